//! The stack of this process: opened when the first socket moves to it. In a child
//! an attachment goes on with one of the child's own, and a stack inside the program
//! is given up.

use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use serde::Deserialize;
use tidegate::gate::{Config, Settings, admission};
use tidegate::host::HostConfig;
use tidegate::{Fork, Net};

use crate::rules::Rules;
use crate::signals::Turn;
use crate::{epoll, log, table};

/// The variable that `tidegate run` sets.
const VARIABLE: &str = "TIDEGATE_RUN";

/// What `tidegate run` was told.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Written {
    /// Where the stack is: with these, inside the program.
    host: Option<HostConfig>,
    #[serde(default)]
    gate: Config,
    admission: Option<admission::Config>,
    /// With this, in the daemon that listens there.
    socket: Option<PathBuf>,
    /// The daemon lives on the kernel's addresses.
    #[serde(default)]
    shared: bool,
    rules: Option<PathBuf>,
    #[serde(default)]
    strict: bool,
    log: Option<PathBuf>,
}

struct Start {
    stack: Stack,
    rules: Rules,
    is_strict: bool,
}

/// Where the stack is.
enum Stack {
    /// Inside this program.
    Embedded { host: Box<HostConfig>, gate: Settings, admission: Option<admission::Config> },
    /// In the daemon that listens there.
    Attached { socket: PathBuf, is_shared: bool },
}

static START: OnceLock<Option<Start>> = OnceLock::new();
static NET: OnceLock<Result<Net, String>> = OnceLock::new();
/// This is a child of the process that runs the stack inside.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

fn start() -> Option<&'static Start> {
    START.get_or_init(read).as_ref()
}

fn read() -> Option<Start> {
    let text = std::env::var(VARIABLE).ok()?;
    match parse(&text) {
        Ok(start) => Some(start),
        Err(error) => {
            log::say(&format!("{VARIABLE}: {error}; start the program by `tidegate run`"));
            None
        }
    }
}

fn parse(text: &str) -> Result<Start, String> {
    let written: Written = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if let Some(path) = &written.log {
        log::to(path).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let stack = match (written.host, written.socket) {
        (Some(host), None) => {
            let gate = Settings::new(written.gate).map_err(|error| error.to_string())?;
            Stack::Embedded { host: Box::new(host), gate, admission: written.admission }
        }
        (None, Some(socket)) => Stack::Attached { socket, is_shared: written.shared },
        _ => return Err("it says not where the stack is".to_owned()),
    };
    Ok(Start {
        stack,
        rules: written.rules.as_deref().map(Rules::read).transpose()?.unwrap_or_default(),
        is_strict: written.strict,
    })
}

/// What moves; `None` when nothing does.
pub(crate) fn rules() -> Option<&'static Rules> {
    start().map(|start| &start.rules)
}

/// Whether the stack is in a daemon, or will be.
pub(crate) fn is_to_attach() -> bool {
    start().is_some_and(|start| matches!(start.stack, Stack::Attached { .. }))
}

/// Whether the stack is in a daemon that lives on the kernel's addresses.
pub(crate) fn is_shared_daemon() -> bool {
    start().is_some_and(|start| matches!(start.stack, Stack::Attached { is_shared: true, .. }))
}

/// Whether the stack lives on the kernel's addresses, or will.
pub(crate) fn is_shared() -> bool {
    start().is_some_and(|start| match &start.stack {
        Stack::Embedded { host, .. } => host.shared,
        Stack::Attached { is_shared, .. } => *is_shared,
    })
}

/// Whether a call that is not known shall fail.
pub(crate) fn is_strict() -> bool {
    start().is_some_and(|start| start.is_strict)
}

/// The stack, opened now if it was not. A child of the process that has it inside
/// cannot use it: its memory is the parent's.
///
/// # Errors
/// When it cannot be opened, which is logged; in a child.
pub(crate) fn net() -> io::Result<&'static Net> {
    let _turn = Turn::begin();
    if is_child() {
        return Err(child_error());
    }
    let opened = NET.get_or_init(|| {
        let opened = open();
        match &opened {
            Ok(net) => {
                at_fork();
                let capabilities = net.capabilities();
                let (kind, detail) = (capabilities.kind, capabilities.detail);
                log::say(&format!("this program is on Tidegate now: {kind} ({detail})"));
            }
            Err(error) => log::say(error),
        }
        opened
    });
    opened.as_ref().map_err(|_| io::Error::from_raw_os_error(libc::ENETDOWN))
}

fn open() -> Result<Net, String> {
    let start = start().ok_or("no settings: start the program by `tidegate run`")?;
    match &start.stack {
        Stack::Embedded { host, gate, admission } => {
            let mut config = host.net_config(gate).map_err(|error| error.to_string())?;
            if let Some(admission) = admission {
                config = config.admission(admission.clone());
            }
            // Each socket that moves leaves one of the kernel's behind.
            Net::open(config.ports_are_held(true)).map_err(|error| error.to_string())
        }
        Stack::Attached { socket, .. } => {
            // What the program is called, which its file may not be.
            let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
            let net = Net::attach(socket, name.trim_end());
            net.map_err(|error| error.to_string())
        }
    }
}

/// The stack, if it is open.
#[inline]
pub(crate) fn open_net() -> Option<&'static Net> {
    NET.get()?.as_ref().ok()
}

/// Whether this is a child of the process that runs the stack inside.
#[inline]
pub(crate) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

pub(crate) fn child_error() -> io::Error {
    log::say_once(
        "a child of this program uses a socket of its parent's: those are the parent's alone, \
         and a child can only close them. Attach the program to a daemon (`tidegate serve`), or \
         run it as one process (nginx: `daemon off; master_process off;`)",
    );
    io::Error::from_raw_os_error(libc::EIO)
}

/// What is held from before a fork until it is over: no other thread changes
/// meanwhile what the child gets.
struct Forking {
    fork: Fork<'static>,
    table: Vec<MutexGuard<'static, ()>>,
    sets: epoll::Held,
    turn: Turn,
}

thread_local! {
    static FORKING: RefCell<Option<Forking>> = const { RefCell::new(None) };
}

fn take_forking() -> Option<Forking> {
    // A thread that ends does not fork.
    FORKING.try_with(RefCell::take).ok().flatten()
}

fn at_fork() {
    extern "C" fn before() {
        let Some(net) = open_net().filter(|net| net.is_attached()) else { return };
        let turn = Turn::begin();
        // In the order in which other threads take these locks.
        let sets = epoll::hold();
        let Some(fork) = net.prepare_fork() else { return };
        let forking = Forking { fork, table: table::lock(), sets, turn };
        // A thread that ends does not fork.
        let _ = FORKING.try_with(|place| place.replace(Some(forking)));
    }
    extern "C" fn in_parent() {
        let Some(Forking { fork, table, sets, turn }) = take_forking() else { return };
        drop(table);
        fork.in_parent();
        // The last to have a set calls the stack.
        drop(sets);
        drop(turn);
    }
    extern "C" fn in_child() {
        let Some(Forking { fork, table, sets, turn: _turn }) = take_forking() else {
            return IS_CHILD.store(true, Ordering::Relaxed);
        };
        drop(table);
        let inherited = fork.in_child();
        drop(sets);
        match inherited {
            Ok(()) => table::sockets().for_each(|socket| socket.on_inherited()),
            Err(error) => {
                log::say(&format!("a child of this program has none of its sockets: {error}"));
            }
        }
    }
    // SAFETY: the functions are there as long as this library, which is never
    // unloaded. The C library calls them in the thread that forks, the last two
    // when its own memory is in order again; they take and give back locks of that
    // thread alone.
    unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
}

/// When the stack ran last, in nanoseconds since the first question.
static RAN_NS: AtomicU64 = AtomicU64::new(0);

/// Calls that do not wait run the stack no more often than this.
const RUN_EVERY: Duration = Duration::from_micros(20);

fn now_ns() -> u64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// The stack has just run.
pub(crate) fn has_run() {
    RAN_NS.store(now_ns(), Ordering::Relaxed);
}

/// Runs the stack for a call that does not wait, unless it ran just now.
/// Whether it has.
pub(crate) fn run_if_due(net: &Net) -> io::Result<bool> {
    let now_ns = now_ns();
    if now_ns.saturating_sub(RAN_NS.load(Ordering::Relaxed)) < RUN_EVERY.as_nanos() as u64 {
        return Ok(false);
    }
    RAN_NS.store(now_ns, Ordering::Relaxed);
    net.run_once().map(|_| true)
}

/// The process ends: what was written still goes out, as from the kernel.
pub(crate) fn finish() {
    if is_child() {
        return;
    }
    let _turn = Turn::begin();
    if let Some(net) = open_net() {
        table::clear();
        net.finish();
    }
}
