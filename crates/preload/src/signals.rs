//! Handlers of signals, which must not run while their thread is inside the stack: one
//! that uses a socket there would wait for a lock that its own thread has.
//!
//! A handler of the program's is called by [`on_signal`]. While its thread is inside,
//! the signal is sent to the thread once more, held back, and let through when the
//! thread leaves. So the kernel delivers it as ever, only later. To enter and to leave
//! costs no system call.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence};

use libc::{c_int, c_long, c_void, sigaction, siginfo_t, sigset_t, ucontext_t};

use crate::real;

/// Signals have the numbers from 1 to this.
const LAST: c_int = 64;

/// What tells of a fault: it is handled where it happens.
pub(crate) const FAULTS: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// The program's handlers, by their signals.
static HANDLERS: [AtomicUsize; LAST as usize + 1] =
    [const { AtomicUsize::new(libc::SIG_DFL) }; LAST as usize + 1];
/// Signals whose handlers want to be told more, a bit for each.
static WANT_INFO: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// How often this thread is inside.
    static INSIDE: AtomicU32 = const { AtomicU32::new(0) };
    /// The signals that are held back for that, a bit for each.
    static DEFERRED: AtomicU64 = const { AtomicU64::new(0) };
}

fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// From its making to its end a thread is inside the stack.
pub(crate) struct Turn(());

impl Turn {
    #[inline]
    pub(crate) fn begin() -> Self {
        INSIDE.with(|inside| inside.store(inside.load(Ordering::Relaxed) + 1, Ordering::Relaxed));
        compiler_fence(Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Turn {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        let left = INSIDE.with(|inside| {
            let left = inside.load(Ordering::Relaxed) - 1;
            inside.store(left, Ordering::Relaxed);
            left
        });
        // What came before that is held back, what comes after runs at once.
        compiler_fence(Ordering::SeqCst);
        if left == 0 && are_deferred() {
            let_through();
        }
    }
}

/// Whether a signal came while this thread was inside.
#[inline]
pub(crate) fn are_deferred() -> bool {
    DEFERRED.with(|deferred| deferred.load(Ordering::Relaxed)) != 0
}

/// Does what may take long and touches nothing of the stack's: signals may come.
pub(crate) fn outside<R>(wait: impl FnOnce() -> R) -> R {
    let before = INSIDE.with(|inside| inside.swap(0, Ordering::Relaxed));
    compiler_fence(Ordering::SeqCst);
    let result = wait();
    compiler_fence(Ordering::SeqCst);
    INSIDE.with(|inside| inside.store(before, Ordering::Relaxed));
    result
}

/// The handlers of the signals that came meanwhile run now.
#[cold]
pub(crate) fn let_through() {
    let deferred = DEFERRED.with(|deferred| deferred.swap(0, Ordering::Relaxed));
    if deferred == 0 {
        return;
    }
    let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    // SAFETY: a set of signals is a plain array of bits that the calls fill in or read;
    // errno is this thread's own.
    unsafe {
        let mut set: sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        let signals = (1..=LAST).filter(|&signal| deferred & bit(signal) != 0);
        signals.for_each(|signal| {
            libc::sigaddset(&mut set, signal);
        });
        outside(|| libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut()));
        *libc::__errno_location() = error;
    }
}

fn own() -> usize {
    on_signal as *const () as usize
}

/// What the kernel shall be told instead of what the program wants for a signal.
pub(crate) fn replace(signal: c_int, wanted: &sigaction) -> sigaction {
    let mut given = *wanted;
    let is_handler = !matches!(wanted.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
    // After the first call of one that is called once, the kernel has forgotten it.
    let is_once = wanted.sa_flags & libc::SA_RESETHAND != 0;
    let is_known = (1..=LAST).contains(&signal);
    if is_handler && is_known && !is_once && !FAULTS.contains(&signal) {
        HANDLERS[signal as usize].store(wanted.sa_sigaction, Ordering::SeqCst);
        match wanted.sa_flags & libc::SA_SIGINFO {
            0 => WANT_INFO.fetch_and(!bit(signal), Ordering::SeqCst),
            _ => WANT_INFO.fetch_or(bit(signal), Ordering::SeqCst),
        };
        (given.sa_sigaction, given.sa_flags) = (own(), wanted.sa_flags | libc::SA_SIGINFO);
    }
    given
}

/// What the program wanted for a signal, of what the kernel was told.
pub(crate) fn original(signal: c_int, told: &sigaction, before: Handler) -> sigaction {
    let mut wanted = *told;
    if told.sa_sigaction == own() && (1..=LAST).contains(&signal) {
        wanted.sa_sigaction = before.address;
        if !before.wants_info {
            wanted.sa_flags &= !libc::SA_SIGINFO;
        }
    }
    wanted
}

/// A handler of the program's.
#[derive(Clone, Copy)]
pub(crate) struct Handler {
    address: usize,
    wants_info: bool,
}

impl Handler {
    pub(crate) fn of(signal: c_int) -> Self {
        let known = usize::try_from(signal).ok().and_then(|at| HANDLERS.get(at));
        let address = known.map_or(libc::SIG_DFL, |handler| handler.load(Ordering::SeqCst));
        let wants_info =
            (1..=LAST).contains(&signal) && WANT_INFO.load(Ordering::SeqCst) & bit(signal) != 0;
        Self { address, wants_info }
    }
}

/// The handler that the kernel knows.
extern "C" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let is_inside = INSIDE.with(|inside| inside.load(Ordering::Relaxed)) > 0;
    // SAFETY: the kernel passes both, as it was told to.
    if is_inside && unsafe { defer(signal, info, context.cast()) } {
        return;
    }
    let address = Handler::of(signal).address;
    if matches!(address, libc::SIG_DFL | libc::SIG_IGN) {
        return;
    }
    type Function = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
    // SAFETY: the program has given it for this signal; one that takes less does not
    // look at the rest.
    let handler = unsafe { std::mem::transmute::<usize, Function>(address) };
    handler(signal, info, context);
}

/// Holds a signal back until its thread leaves the stack; whether it does.
///
/// # Safety
/// Both are what the kernel has passed to a handler.
unsafe fn defer(signal: c_int, info: *mut siginfo_t, context: *mut ucontext_t) -> bool {
    // SAFETY: the caller's promise; sets of signals are filled in or read; errno is
    // that of this thread.
    unsafe {
        let error = *libc::__errno_location();
        let mut set: sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal);
        // Before it is sent again, and from the handler's end on.
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        let (process, thread) = (libc::getpid(), libc::gettid());
        let sent = real::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            process.into(),
            thread.into(),
            signal.into(),
            info as c_long,
            0,
            0,
        );
        *libc::__errno_location() = error;
        if sent == 0 {
            libc::sigaddset(&mut (*context).uc_sigmask, signal);
            DEFERRED.with(|deferred| deferred.fetch_or(bit(signal), Ordering::Relaxed));
        }
        sent == 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    static CALLS: AtomicU32 = AtomicU32::new(0);
    static TOLD: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn count(_: c_int) {
        CALLS.fetch_add(1, Ordering::SeqCst);
    }

    extern "C" fn look(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
        // SAFETY: the kernel's, for a signal that was sent with a value.
        let value = unsafe { (*info).si_value().sival_ptr } as usize;
        TOLD.store(TOLD.load(Ordering::SeqCst) * 10 + value, Ordering::SeqCst);
    }

    fn action(handler: usize, flags: c_int) -> sigaction {
        // SAFETY: plain numbers, for which zero is a value.
        let mut action: sigaction = unsafe { std::mem::zeroed() };
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        action
    }

    fn install(signal: c_int, wanted: &sigaction) {
        let given = replace(signal, wanted);
        // SAFETY: the actions are valid.
        assert_eq!(unsafe { real::sigaction(signal, &given, std::ptr::null_mut()) }, 0);
    }

    #[test]
    fn a_handler_runs_when_its_thread_has_left() {
        let wanted = action(count as *const () as usize, libc::SA_RESTART | libc::SA_NODEFER);
        install(libc::SIGUSR1, &wanted);
        // SAFETY: sends this thread a signal that has a handler.
        let raise = || unsafe { assert_eq!(libc::raise(libc::SIGUSR1), 0) };
        let calls = || CALLS.load(Ordering::SeqCst);
        raise();
        assert_eq!(calls(), 1);
        let turn = Turn::begin();
        let inner = Turn::begin();
        raise();
        // One that is pending already is the same.
        raise();
        assert!(are_deferred());
        drop(inner);
        assert_eq!(calls(), 1, "it is still inside");
        drop(turn);
        assert_eq!(calls(), 2);
        assert!(!are_deferred());
        let turn = Turn::begin();
        outside(raise);
        assert_eq!(calls(), 3, "while it waits, it is not inside");
        raise();
        let_through();
        assert_eq!(calls(), 4);
        drop(turn);
        raise();
        assert_eq!(calls(), 5, "it is not held back any more");
        // The program gets to see what it has asked for.
        let mut told = action(0, 0);
        // SAFETY: asks for the handler.
        unsafe { real::sigaction(libc::SIGUSR1, std::ptr::null(), &mut told) };
        let seen = original(libc::SIGUSR1, &told, Handler::of(libc::SIGUSR1));
        assert_eq!(seen.sa_sigaction, wanted.sa_sigaction);
        assert_eq!(seen.sa_flags & (libc::SA_SIGINFO | libc::SA_RESTART), libc::SA_RESTART);
    }

    #[test]
    fn signals_that_are_queued_keep_their_order_and_what_they_tell() {
        let signal = libc::SIGRTMIN() + 3;
        install(signal, &action(look as *const () as usize, libc::SA_SIGINFO));
        let turn = Turn::begin();
        for value in 1..=3usize {
            let value = libc::sigval { sival_ptr: value as *mut c_void };
            // SAFETY: sends this thread a signal that has a handler.
            assert_eq!(unsafe { libc::pthread_sigqueue(libc::pthread_self(), signal, value) }, 0);
        }
        assert_eq!(TOLD.load(Ordering::SeqCst), 0);
        drop(turn);
        assert_eq!(TOLD.load(Ordering::SeqCst), 123);
    }

    #[test]
    fn faults_and_what_is_no_handler_stay_as_they_are() {
        let handler = count as *const () as usize;
        for (signal, wanted) in [
            (libc::SIGSEGV, action(handler, 0)),
            (libc::SIGUSR2, action(libc::SIG_IGN, 0)),
            (libc::SIGUSR2, action(handler, libc::SA_RESETHAND)),
            (99, action(handler, 0)),
        ] {
            let given = replace(signal, &wanted);
            assert_eq!(
                (given.sa_sigaction, given.sa_flags),
                (wanted.sa_sigaction, wanted.sa_flags)
            );
        }
    }
}
