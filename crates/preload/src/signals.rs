//! Deferral of signal handlers while their thread is inside the stack.
//!
//! A handler that used a socket there would wait for a lock of its own thread.
//!
//! The kernel calls [`on_signal`] in place of each handler of the application. While the
//! thread is inside the stack, [`on_signal`] blocks the signal and sends it to the thread once
//! more; the thread unblocks the signal when it leaves the stack. So the kernel delivers the
//! signal as usual, only later. Entering and leaving the stack costs no system call.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence};

use libc::{c_int, c_long, c_void, sigaction, siginfo_t, sigset_t, ucontext_t};

use crate::{errno, real};

/// Highest signal number; the lowest is 1.
const MAX_SIGNAL: c_int = 64;

/// Signals that report faults. Their handlers run immediately.
pub(crate) const FAULT_SIGNALS: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Handlers of the application, indexed by signal number.
static HANDLERS: [AtomicUsize; MAX_SIGNAL as usize + 1] =
    [const { AtomicUsize::new(libc::SIG_DFL) }; MAX_SIGNAL as usize + 1];
/// Signals whose handlers take `siginfo_t` (`SA_SIGINFO`), one bit each.
static SIGINFO_HANDLERS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Nesting depth of [`SignalGuard`]s in this thread; 0 outside the stack.
    static DEPTH: AtomicU32 = const { AtomicU32::new(0) };
    /// Signals deferred until this thread leaves the stack, one bit each.
    static DEFERRED: AtomicU64 = const { AtomicU64::new(0) };
}

fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// Guard of a thread inside the stack: defers signal handlers until the outermost guard is
/// dropped.
pub(crate) struct SignalGuard(());

impl SignalGuard {
    #[inline]
    pub(crate) fn enter() -> Self {
        DEPTH.with(|depth| depth.store(depth.load(Ordering::Relaxed) + 1, Ordering::Relaxed));
        compiler_fence(Ordering::SeqCst);
        Self(())
    }
}

impl Drop for SignalGuard {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        let remaining = DEPTH.with(|depth| {
            let remaining = depth.load(Ordering::Relaxed) - 1;
            depth.store(remaining, Ordering::Relaxed);
            remaining
        });
        // A signal before this fence is deferred; a later one runs its handler immediately.
        compiler_fence(Ordering::SeqCst);
        if remaining == 0 && has_deferred() {
            deliver_deferred();
        }
    }
}

/// True while this thread counts as inside the stack.
pub(crate) fn is_inside_stack() -> bool {
    DEPTH.with(|depth| depth.load(Ordering::Relaxed)) > 0
}

/// True when this thread has deferred signals.
#[inline]
pub(crate) fn has_deferred() -> bool {
    DEFERRED.with(|deferred| deferred.load(Ordering::Relaxed)) != 0
}

/// Runs `wait`, which may take long and must not touch the stack, with signals undeferred.
pub(crate) fn outside_stack<R>(wait: impl FnOnce() -> R) -> R {
    let before = DEPTH.with(|depth| depth.swap(0, Ordering::Relaxed));
    compiler_fence(Ordering::SeqCst);
    let result = wait();
    compiler_fence(Ordering::SeqCst);
    DEPTH.with(|depth| depth.store(before, Ordering::Relaxed));
    result
}

/// Runs `wait` like [`outside_stack`]; `None` if signals were deferred before. A signal that comes
/// later runs its handler at once, as one just before a call of the kernel.
pub(crate) fn outside_stack_unless_deferred<R>(wait: impl FnOnce() -> R) -> Option<R> {
    outside_stack(|| (!has_deferred()).then(wait))
}

/// Unblocks the deferred signals, so that their handlers run now.
#[cold]
pub(crate) fn deliver_deferred() {
    let deferred = DEFERRED.with(|deferred| deferred.swap(0, Ordering::Relaxed));
    if deferred == 0 {
        return;
    }
    let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    // SAFETY: a signal set is a plain array of bits that the calls write or read; errno is
    // this thread's own.
    unsafe {
        let mut set: sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        let signals = (1..=MAX_SIGNAL).filter(|&signal| deferred & bit(signal) != 0);
        signals.for_each(|signal| {
            libc::sigaddset(&mut set, signal);
        });
        outside_stack(|| libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut()));
        *libc::__errno_location() = error;
    }
}

fn wrapper_address() -> usize {
    on_signal as *const () as usize
}

/// Action to install at the kernel in place of the application's action for a signal.
pub(crate) fn wrap_action(signal: c_int, wanted: &sigaction) -> sigaction {
    let mut wrapped = *wanted;
    let is_handler = !matches!(wanted.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
    // The kernel removes a one-shot handler before its first call.
    let is_once = wanted.sa_flags & libc::SA_RESETHAND != 0;
    let is_known = (1..=MAX_SIGNAL).contains(&signal);
    if is_handler && is_known && !is_once && !FAULT_SIGNALS.contains(&signal) {
        HANDLERS[signal as usize].store(wanted.sa_sigaction, Ordering::SeqCst);
        match wanted.sa_flags & libc::SA_SIGINFO {
            0 => SIGINFO_HANDLERS.fetch_and(!bit(signal), Ordering::SeqCst),
            _ => SIGINFO_HANDLERS.fetch_or(bit(signal), Ordering::SeqCst),
        };
        (wrapped.sa_sigaction, wrapped.sa_flags) =
            (wrapper_address(), wanted.sa_flags | libc::SA_SIGINFO);
    }
    wrapped
}

/// Action of the application, reconstructed from the one installed at the kernel.
pub(crate) fn unwrap_action(signal: c_int, installed: &sigaction, before: Handler) -> sigaction {
    let mut wanted = *installed;
    if installed.sa_sigaction == wrapper_address() && (1..=MAX_SIGNAL).contains(&signal) {
        wanted.sa_sigaction = before.address;
        if !before.takes_siginfo {
            wanted.sa_flags &= !libc::SA_SIGINFO;
        }
    }
    wanted
}

/// Signal handler of the application.
#[derive(Clone, Copy)]
pub(crate) struct Handler {
    address: usize,
    takes_siginfo: bool,
}

impl Handler {
    pub(crate) fn of(signal: c_int) -> Self {
        let known = usize::try_from(signal).ok().and_then(|at| HANDLERS.get(at));
        let address = known.map_or(libc::SIG_DFL, |handler| handler.load(Ordering::SeqCst));
        let takes_siginfo = (1..=MAX_SIGNAL).contains(&signal)
            && SIGINFO_HANDLERS.load(Ordering::SeqCst) & bit(signal) != 0;
        Self { address, takes_siginfo }
    }
}

/// Handler that is installed at the kernel.
extern "C" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let is_inside = DEPTH.with(|depth| depth.load(Ordering::Relaxed)) > 0;
    // SAFETY: the kernel passes valid pointers, since the handler is installed with SA_SIGINFO.
    if is_inside && unsafe { defer(signal, info, context.cast()) } {
        return;
    }
    let address = Handler::of(signal).address;
    if matches!(address, libc::SIG_DFL | libc::SIG_IGN) {
        return;
    }
    type Function = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
    // SAFETY: the application installed the function for this signal; a function with fewer
    // parameters ignores the remaining arguments.
    let handler = unsafe { std::mem::transmute::<usize, Function>(address) };
    handler(signal, info, context);
}

/// Defers a signal until its thread leaves the stack; false when that fails.
///
/// # Safety
/// Both pointers are those that the kernel has passed to a handler.
unsafe fn defer(signal: c_int, info: *mut siginfo_t, context: *mut ucontext_t) -> bool {
    // SAFETY: guaranteed by the caller; signal sets are written or read.
    errno::preserve(|| unsafe {
        let mut set: sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal);
        // Blocked before the signal is sent again, and from the end of the handler on.
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
        if sent == 0 {
            libc::sigaddset(&mut (*context).uc_sigmask, signal);
            DEFERRED.with(|deferred| deferred.fetch_or(bit(signal), Ordering::Relaxed));
        }
        sent == 0
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    static CALLS: AtomicU32 = AtomicU32::new(0);
    static RECEIVED_VALUES: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn count_call(_: c_int) {
        CALLS.fetch_add(1, Ordering::SeqCst);
    }

    extern "C" fn record_value(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
        // SAFETY: passed by the kernel, for a signal sent with a value.
        let value = unsafe { (*info).si_value().sival_ptr } as usize;
        RECEIVED_VALUES
            .store(RECEIVED_VALUES.load(Ordering::SeqCst) * 10 + value, Ordering::SeqCst);
    }

    fn action(handler: usize, flags: c_int) -> sigaction {
        // SAFETY: plain integers, for which zero is valid.
        let mut action: sigaction = unsafe { std::mem::zeroed() };
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        action
    }

    fn install(signal: c_int, wanted: &sigaction) {
        let wrapped = wrap_action(signal, wanted);
        // SAFETY: the actions are valid.
        assert_eq!(unsafe { real::sigaction(signal, &wrapped, std::ptr::null_mut()) }, 0);
    }

    #[test]
    fn handler_runs_when_its_thread_leaves_the_stack() {
        let wanted = action(count_call as *const () as usize, libc::SA_RESTART | libc::SA_NODEFER);
        install(libc::SIGUSR1, &wanted);
        // SAFETY: sends this thread a signal that has a handler.
        let raise = || unsafe { assert_eq!(libc::raise(libc::SIGUSR1), 0) };
        let calls = || CALLS.load(Ordering::SeqCst);
        raise();
        assert_eq!(calls(), 1);
        let guard = SignalGuard::enter();
        let inner = SignalGuard::enter();
        raise();
        // A signal that is already pending is not queued again.
        raise();
        assert!(has_deferred());
        drop(inner);
        assert_eq!(calls(), 1, "still inside the stack");
        drop(guard);
        assert_eq!(calls(), 2);
        assert!(!has_deferred());
        let guard = SignalGuard::enter();
        outside_stack(raise);
        assert_eq!(calls(), 3, "a wait counts as outside the stack");
        raise();
        deliver_deferred();
        assert_eq!(calls(), 4);
        drop(guard);
        raise();
        assert_eq!(calls(), 5, "no longer deferred");
        // The application reads back the action that it installed.
        let mut installed = action(0, 0);
        // SAFETY: reads the action.
        unsafe { real::sigaction(libc::SIGUSR1, std::ptr::null(), &mut installed) };
        let seen = unwrap_action(libc::SIGUSR1, &installed, Handler::of(libc::SIGUSR1));
        assert_eq!(seen.sa_sigaction, wanted.sa_sigaction);
        assert_eq!(seen.sa_flags & (libc::SA_SIGINFO | libc::SA_RESTART), libc::SA_RESTART);
    }

    #[test]
    fn queued_signals_keep_order_and_value() {
        let signal = libc::SIGRTMIN() + 3;
        install(signal, &action(record_value as *const () as usize, libc::SA_SIGINFO));
        let guard = SignalGuard::enter();
        for value in 1..=3usize {
            let value = libc::sigval { sival_ptr: value as *mut c_void };
            // SAFETY: sends this thread a signal that has a handler.
            assert_eq!(unsafe { libc::pthread_sigqueue(libc::pthread_self(), signal, value) }, 0);
        }
        assert_eq!(RECEIVED_VALUES.load(Ordering::SeqCst), 0);
        drop(guard);
        assert_eq!(RECEIVED_VALUES.load(Ordering::SeqCst), 123);
    }

    #[test]
    fn does_not_wrap_faults_ignored_signals_or_one_shot_handlers() {
        let handler = count_call as *const () as usize;
        for (signal, wanted) in [
            (libc::SIGSEGV, action(handler, 0)),
            (libc::SIGUSR2, action(libc::SIG_IGN, 0)),
            (libc::SIGUSR2, action(handler, libc::SA_RESETHAND)),
            (99, action(handler, 0)),
        ] {
            let wrapped = wrap_action(signal, &wanted);
            assert_eq!(
                (wrapped.sa_sigaction, wrapped.sa_flags),
                (wanted.sa_sigaction, wanted.sa_flags)
            );
        }
    }
}
