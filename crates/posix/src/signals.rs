//! Signals that interrupt waiting calls.

use libc::c_int;

/// True when a call that a signal interrupted is to be restarted. The signal is unknown here,
/// so all handlers must have `SA_RESTART`. `read_action` reads the action of a signal and returns
/// 0, or -1 for a signal without one.
pub fn all_handlers_restart(read_action: impl Fn(c_int, *mut libc::sigaction) -> c_int) -> bool {
    (1..=64).all(|signal| {
        // SAFETY: a plain structure, for which zero is valid.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // glibc reserves two signals, for which it returns an error.
        let is_known = read_action(signal, &raw mut action) == 0;
        let is_handled = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
        !is_known || !is_handled || action.sa_flags & libc::SA_RESTART != 0
    })
}
