//! Stack of this process: opened once, used by all its sockets.

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, OnceLock};

use libc::{c_char, c_int};
use tidegate::Net;

use crate::config::{self, EmbeddedHost, StackLocation};
use crate::descriptors;
use crate::socket::{lock, os_error};

static NET: OnceLock<Net> = OnceLock::new();
/// All stacks of the process, to finish their connections at its end.
static ALL: Mutex<Vec<Net>> = Mutex::new(Vec::new());
static OPENING: Mutex<()> = Mutex::new(());
/// True in a forked child, whose stack is the parent's.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Keeps the text of an error for [`last_error`]; returns the error's code.
pub(crate) fn fail(code: c_int, text: &str) -> io::Error {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST_ERROR.set(text);
    os_error(code)
}

/// Text of the thread's last error of opening a stack. Valid until its next one.
pub(crate) fn last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|text| text.as_ptr())
}

/// Prints the text of the thread's last error, for programs that cannot ask for it.
pub(crate) fn print_last_error() {
    LAST_ERROR.with_borrow(|text: &CString| {
        let text: &CStr = text;
        eprintln!("tidegate: {}", text.to_string_lossy());
    });
}

/// Opens stacks at a place: as many as `cores` where each can have its own, otherwise one.
///
/// # Errors
/// `ENETDOWN` and the like, with a text.
pub(crate) fn open_stacks(location: &StackLocation, cores: usize) -> io::Result<Vec<Net>> {
    if IS_CHILD.load(Ordering::Relaxed) {
        return Err(fail(libc::EIO, "a forked child cannot use the stack of its parent"));
    }
    let nets = match location {
        StackLocation::Daemon { socket, name } => {
            let attach = |_| {
                Net::attach(socket, name).map_err(|error| {
                    let code = error.raw_os_error().unwrap_or(libc::ENETDOWN);
                    fail(code, &format!("{}: {error}", socket.display()))
                })
            };
            (0..cores.max(1)).map(attach).collect::<io::Result<Vec<Net>>>()?
        }
        StackLocation::Embedded(host) => open_embedded(host, cores)?,
    };
    for net in &nets {
        net.wait_for_addresses().map_err(|error| fail(libc::EADDRNOTAVAIL, &error.to_string()))?;
    }
    install_handlers();
    lock(&ALL).extend(nets.iter().cloned());
    Ok(nets)
}

fn open_embedded(embedded: &EmbeddedHost, cores: usize) -> io::Result<Vec<Net>> {
    let config = embedded.net_config().map_err(|text| fail(libc::EINVAL, &text))?;
    // Addresses shared with the kernel serve one stack only.
    let opened = match cores {
        2.. if !embedded.host.shared => Net::open_cores(config, cores),
        _ => Net::open(config).map(|net| vec![net]),
    };
    opened.map_err(|error| fail(libc::ENETDOWN, &config::open_error(&error)))
}

/// Opens the stack of the process at a place.
///
/// # Errors
/// As [`open_stacks`]; `EALREADY` when the process has a stack.
pub(crate) fn init(location: &StackLocation) -> io::Result<()> {
    let _opening = lock(&OPENING);
    if NET.get().is_some() {
        return Err(fail(libc::EALREADY, "this process has opened its stack already"));
    }
    let net = open_stacks(location, 1)?.swap_remove(0);
    // Only this function sets the stack while the lock is held.
    let _ = NET.set(net);
    Ok(())
}

/// Makes a stack that is open already that of the process: for tests and measurements in Rust.
/// Returns false if the process has one.
pub fn use_net(net: Net) -> bool {
    install_handlers();
    lock(&ALL).push(net.clone());
    NET.set(net).is_ok()
}

/// Stack of the process; the first call opens it where the environment says.
///
/// # Errors
/// As [`open_stacks`].
pub(crate) fn net() -> io::Result<&'static Net> {
    if IS_CHILD.load(Ordering::Relaxed) {
        return Err(os_error(libc::EIO));
    }
    if let Some(net) = NET.get() {
        return Ok(net);
    }
    let location = StackLocation::of_environment().map_err(|text| fail(libc::EINVAL, &text))?;
    match init(&location) {
        Err(error) if NET.get().is_none() => Err(error),
        _ => NET.get().ok_or_else(|| os_error(libc::ENETDOWN)),
    }
}

/// Closes all sockets, and finishes their connections.
pub(crate) fn finish() {
    if !IS_CHILD.load(Ordering::Relaxed) {
        descriptors::clear();
        let all = lock(&ALL).clone();
        all.iter().for_each(Net::finish);
    }
}

fn install_handlers() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the functions live as long as the library, which a program does not unload once
        // it has opened a stack. They neither unwind nor take locks in the child.
        unsafe {
            libc::atexit(at_exit);
            libc::pthread_atfork(None, None, Some(in_forked_child));
        }
    });
}

extern "C" fn at_exit() {
    crate::boundary::nothing(|| {
        finish();
        Ok(())
    });
}

extern "C" fn in_forked_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
    descriptors::forget_all();
}
