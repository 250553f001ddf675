//! The system calls of a server that is ready: those that sockets, files, memory, threads and time
//! need. The kernel answers every other call as if it did not have that call (ENOSYS), to which the
//! C library adapts.
//!
//! Not in the list, among others: starting programs (`execve`), other processes (`ptrace`,
//! `process_vm_*`, `kill`, `pidfd_*`), users and capabilities (`set*id`, `capset`, `keyctl`), mounts
//! and namespaces (`mount`, `unshare`, `setns`, `clone3`), the kernel (`bpf` but for the elements of
//! open maps and for links of open programs, `init_module`, `kexec_load`, `perf_event_open`,
//! `userfaultfd`, `io_uring_setup`), new sockets but Unix and route netlink, and executable memory.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// Calls that are permitted whatever their arguments are.
const PERMITTED: &[libc::c_long] = &[
    // Files and descriptors.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_close,
    libc::SYS_lseek,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    // Waiting.
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    // Of rings that were made before; they accept requests to wait for a descriptor, nothing else.
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Sockets, of which few can be made.
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    libc::SYS_socketpair,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_membarrier,
    // Threads and signals of this process.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_tgkill,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getattr,
    libc::SYS_sched_setattr,
    libc::SYS_getpriority,
    libc::SYS_setpriority,
    libc::SYS_getcpu,
    libc::SYS_prlimit64,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_capget,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    // Time, chance and the machine.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
];

/// Calls that only this architecture has, besides the calls of all.
#[cfg(target_arch = "x86_64")]
const PERMITTED_HERE: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_mkdir,
    libc::SYS_unlink,
    libc::SYS_dup2,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const PERMITTED_HERE: &[libc::c_long] = &[];

/// Flags of `clone` that make namespaces.
const NAMESPACE_FLAGS: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// Request of `linux/eventpoll.h`.
const EPIOCSPARAMS: u64 = 0x4008_8a01;

/// Commands of `bpf` on the elements of an open map.
const BPF_MAP_LOOKUP_ELEM: u64 = 1;
const BPF_MAP_UPDATE_ELEM: u64 = 2;
const BPF_MAP_DELETE_ELEM: u64 = 3;
const BPF_MAP_GET_NEXT_KEY: u64 = 4;

/// Commands of `bpf` that detach an open program from its interface, and attach it to one without a
/// program: an AF_XDP device on a veth does so before and after a stream. The kernel asks for no
/// capability, and this process has no other program.
const BPF_LINK_CREATE: u64 = 28;
const BPF_LINK_DETACH: u64 = 34;

/// Restricts the system calls of all threads of this process, and sets `no_new_privs`.
///
/// # Errors
/// The kernel has no such filters.
pub(super) fn restrict() -> Result<(), seccompiler::Error> {
    seccompiler::apply_filter_all_threads(&program()?)
}

/// Conditions on the arguments of a call that all have to hold.
type Conditions<'a> = &'a [(u8, SeccompCmpOp, u64)];

fn program() -> Result<BpfProgram, seccompiler::BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq};

    let all = PERMITTED.iter().chain(PERMITTED_HERE);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = all.map(|&call| (call, vec![])).collect();
    let is = |argument, value| (argument, Eq, value);
    let has_none = |argument, flags| (argument, MaskedEq(flags), 0);
    let not_executable = [has_none(2, libc::PROT_EXEC as u64)];
    let conditional: &[(libc::c_long, Conditions<'_>)] = &[
        (libc::SYS_mmap, &not_executable),
        (libc::SYS_mprotect, &not_executable),
        (libc::SYS_clone, &[has_none(0, NAMESPACE_FLAGS)]),
        (libc::SYS_socket, &[is(0, libc::AF_UNIX as u64)]),
        (libc::SYS_socket, &[is(0, libc::AF_NETLINK as u64), is(2, libc::NETLINK_ROUTE as u64)]),
        (libc::SYS_prctl, &[is(0, libc::PR_SET_NAME as u64)]),
        (libc::SYS_prctl, &[is(0, libc::PR_GET_NAME as u64)]),
        // Not TIOCSTI, which types into the terminal of another process.
        (libc::SYS_ioctl, &[is(1, libc::FIONBIO)]),
        (libc::SYS_ioctl, &[is(1, libc::FIONREAD)]),
        (libc::SYS_ioctl, &[is(1, libc::TCGETS)]),
        // A packet socket asks for a link that went down.
        (libc::SYS_ioctl, &[is(1, libc::SIOCGIFFLAGS)]),
        // Busy polling of an epoll, of the servers on kernel sockets.
        (libc::SYS_ioctl, &[is(1, EPIOCSPARAMS)]),
        (libc::SYS_bpf, &[is(0, BPF_MAP_LOOKUP_ELEM)]),
        (libc::SYS_bpf, &[is(0, BPF_MAP_UPDATE_ELEM)]),
        (libc::SYS_bpf, &[is(0, BPF_MAP_DELETE_ELEM)]),
        (libc::SYS_bpf, &[is(0, BPF_MAP_GET_NEXT_KEY)]),
        (libc::SYS_bpf, &[is(0, BPF_LINK_CREATE)]),
        (libc::SYS_bpf, &[is(0, BPF_LINK_DETACH)]),
    ];
    for (call, conditions) in conditional {
        // The kernel ignores the upper half of integers, but of no flags.
        let rule = conditions.iter().map(|(argument, operator, value)| {
            let len = match operator {
                MaskedEq(_) => SeccompCmpArgLen::Qword,
                _ => SeccompCmpArgLen::Dword,
            };
            SeccompCondition::new(*argument, len, operator.clone(), *value)
        });
        let rule = SeccompRule::new(rule.collect::<Result<_, _>>()?)?;
        rules.entry(*call).or_default().push(rule);
    }
    let refused = SeccompAction::Errno(libc::ENOSYS as u32);
    let architecture = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture)?.try_into()
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::os::fd::AsRawFd;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use rustix::net::{AddressFamily, SocketType};

    use super::*;

    /// Asks for an interface as a packet socket does.
    fn ask_for_loopback() -> std::io::Result<()> {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
        // SAFETY: all zero is a valid `ifreq`: no name, no flags.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_name[..2].copy_from_slice(&b"lo".map(|byte| byte as libc::c_char));
        // SAFETY: SIOCGIFFLAGS reads and writes one `ifreq`, which is live.
        match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &mut request) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// Runs on its own thread, because a filter cannot be removed.
    #[test]
    fn refuses_what_a_server_does_not_need() {
        let confined = std::thread::spawn(|| {
            seccompiler::apply_filter(&program().unwrap()).unwrap();
            let socket = |family| rustix::net::socket(family, SocketType::DGRAM, None).map(drop);
            for refused in [AddressFamily::INET, AddressFamily::INET6, AddressFamily::PACKET] {
                assert_eq!(socket(refused), Err(rustix::io::Errno::NOSYS), "{refused:?}");
            }
            assert_eq!(socket(AddressFamily::UNIX), Ok(()));
            ask_for_loopback().unwrap();
            let not_started = Command::new("/bin/true").exec();
            assert_eq!(not_started.raw_os_error(), Some(libc::ENOSYS), "{not_started}");
            let set_user = rustix::thread::set_thread_uid(rustix::process::getuid());
            assert_eq!(set_user, Err(rustix::io::Errno::NOSYS));
            let this = rustix::process::getpid();
            let signal = rustix::process::test_kill_process(this);
            assert_eq!(signal, Err(rustix::io::Errno::NOSYS));
            let thread = std::thread::Builder::new().name("named".to_owned());
            let (started, memory) = (thread.spawn(|| 7).unwrap().join(), vec![0_u8; 1 << 24]);
            assert_eq!((started.unwrap(), memory.len()), (7, 1 << 24));
            let missing = std::fs::read("/no/such/file").unwrap_err();
            assert_eq!(missing.kind(), ErrorKind::NotFound);
        });
        confined.join().unwrap();
    }
}
