//! Contexts of mTCP: each core's stack and sockets.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use libc::c_int;
use tidegate::{CongestionControl, Net};

use super::config::{self, MtcpConf};
use super::pipe::PipeEnd;
use crate::socket::{Socket, lock, os_error};
use crate::{descriptors, stack};

/// State of the process.
struct Process {
    /// Numbers that the program has set, or that the file has.
    numbers: Option<MtcpConf>,
    opened: Option<Opened>,
}

#[derive(Clone)]
struct Opened {
    /// Stacks of the cores, or one for all.
    nets: Vec<Net>,
    congestion_control: CongestionControl,
}

static PROCESS: Mutex<Process> = Mutex::new(Process { numbers: None, opened: None });
/// Contexts are never freed: a program may use one that it has destroyed.
static CONTEXTS: Mutex<Vec<&'static Context>> = Mutex::new(Vec::new());

/// Object of a socket identifier.
#[derive(Clone)]
pub(super) enum Named {
    /// Descriptor of a socket or an epoll set of the library.
    Fd(c_int),
    Pipe(Arc<PipeEnd>),
}

impl Named {
    /// Closes the object, or this name of it.
    ///
    /// # Errors
    /// `EBADF` for a descriptor that was closed by another name.
    pub(super) fn close(self) -> io::Result<()> {
        match self {
            Self::Fd(fd) => descriptors::close(fd),
            Self::Pipe(_) => Ok(()),
        }
    }
}

/// Objects by socket identifier. Identifiers are small, since programs of mTCP index arrays of
/// `max_concurrency` elements by them.
#[derive(Default)]
struct Identifiers {
    objects: Vec<Option<Named>>,
    free: Vec<usize>,
}

impl Identifiers {
    fn len(&self) -> usize {
        self.objects.len() - self.free.len()
    }

    fn add(&mut self, object: Named) -> usize {
        let identifier = self.free.pop().unwrap_or_else(|| {
            self.objects.push(None);
            self.objects.len() - 1
        });
        self.objects[identifier] = Some(object);
        identifier
    }

    fn get(&self, identifier: c_int) -> Option<&Named> {
        self.objects.get(usize::try_from(identifier).ok()?)?.as_ref()
    }

    fn remove(&mut self, identifier: c_int) -> Option<Named> {
        let index = usize::try_from(identifier).ok()?;
        let object = self.objects.get_mut(index)?.take()?;
        self.free.push(index);
        Some(object)
    }
}

/// Context of a core.
pub struct Context {
    pub(super) net: Net,
    congestion_control: CongestionControl,
    is_destroyed: AtomicBool,
    identifiers: Mutex<Identifiers>,
    /// Addresses to connect from, and how many.
    sources: Mutex<Option<(Ipv4Addr, u32)>>,
    next_source: AtomicU32,
}

/// Numbers in force.
pub(super) fn numbers() -> MtcpConf {
    lock(&PROCESS).numbers.unwrap_or_default()
}

/// Changes the numbers. The number of cores is fixed once the stack is open.
pub(super) fn set_numbers(numbers: MtcpConf) {
    let mut process = lock(&PROCESS);
    let num_cores = match &process.opened {
        Some(_) => process.numbers.unwrap_or_default().num_cores,
        None => numbers.num_cores,
    };
    process.numbers = Some(MtcpConf { num_cores, ..numbers });
}

/// Reads the configuration file and opens the stacks.
///
/// # Errors
/// `EINVAL` for an error in the file, `EALREADY` when the stacks are open, and errors of opening.
pub(super) fn init(path: &Path) -> io::Result<()> {
    let mut process = lock(&PROCESS);
    if process.opened.is_some() {
        return Err(stack::fail(libc::EALREADY, "mtcp_init was called before"));
    }
    let config = config::read(path, process.numbers.unwrap_or_default())
        .map_err(|text| stack::fail(libc::EINVAL, &text))?;
    let cores = config.numbers.num_cores.max(1).unsigned_abs() as usize;
    let nets = stack::open_stacks(&config.location, cores)?;
    process.numbers = Some(config.numbers);
    process.opened = Some(Opened { nets, congestion_control: config.congestion_control });
    Ok(())
}

/// Creates the context of a core.
///
/// # Errors
/// `EPERM` before [`init`], `EINVAL` for a core beyond the configured ones.
pub(super) fn create(cpu: c_int) -> io::Result<&'static Context> {
    let process = lock(&PROCESS);
    let Some(opened) = &process.opened else { return Err(os_error(libc::EPERM)) };
    let cores = process.numbers.unwrap_or_default().num_cores;
    if !(0..cores).contains(&cpu) {
        return Err(os_error(libc::EINVAL));
    }
    let own = opened.nets.get(cpu.unsigned_abs() as usize);
    let net = own.or(opened.nets.first()).ok_or_else(|| os_error(libc::ENETDOWN))?.clone();
    let context: &'static Context = Box::leak(Box::new(Context {
        net,
        congestion_control: opened.congestion_control,
        is_destroyed: AtomicBool::new(false),
        identifiers: Mutex::default(),
        sources: Mutex::new(None),
        next_source: AtomicU32::new(0),
    }));
    lock(&CONTEXTS).push(context);
    Ok(context)
}

/// Destroys all contexts and finishes their connections.
pub(super) fn destroy_all() {
    let contexts = std::mem::take(&mut *lock(&CONTEXTS));
    contexts.into_iter().for_each(Context::destroy);
    stack::finish();
}

impl Context {
    /// Checks that the context can be used.
    ///
    /// # Errors
    /// `EPERM` for a destroyed one.
    pub(super) fn check(&self) -> io::Result<&Self> {
        match self.is_destroyed.load(Ordering::Relaxed) {
            true => Err(os_error(libc::EPERM)),
            false => Ok(self),
        }
    }

    /// Closes all sockets of the context.
    pub(super) fn destroy(&self) {
        self.is_destroyed.store(true, Ordering::Relaxed);
        let identifiers = std::mem::take(&mut *lock(&self.identifiers));
        for object in identifiers.objects.into_iter().flatten() {
            // Fails for a descriptor that was closed by another name.
            let _ = object.close();
        }
    }

    /// Checks that the context may have `more` sockets.
    ///
    /// # Errors
    /// `ENFILE`.
    pub(super) fn check_space(&self, more: usize) -> io::Result<()> {
        let max = numbers().max_concurrency.max(0).unsigned_abs() as usize;
        match lock(&self.identifiers).len() + more <= max {
            true => Ok(()),
            false => Err(os_error(libc::ENFILE)),
        }
    }

    /// Adds a descriptor; returns its identifier.
    ///
    /// # Errors
    /// None: identifiers are fewer than descriptors.
    pub(super) fn add(&self, fd: c_int) -> io::Result<c_int> {
        self.add_object(Named::Fd(fd))
    }

    /// Adds an object; returns its identifier.
    ///
    /// # Errors
    /// As [`Context::add`].
    pub(super) fn add_object(&self, object: Named) -> io::Result<c_int> {
        let identifier = lock(&self.identifiers).add(object);
        c_int::try_from(identifier).map_err(|_| os_error(libc::ENFILE))
    }

    /// Object of an identifier.
    ///
    /// # Errors
    /// `EBADF`.
    pub(super) fn object(&self, identifier: c_int) -> io::Result<Named> {
        lock(&self.identifiers).get(identifier).cloned().ok_or_else(|| os_error(libc::EBADF))
    }

    /// Descriptor of an identifier: of the kernel for the end of a pipe.
    ///
    /// # Errors
    /// `EBADF`.
    pub(super) fn fd(&self, identifier: c_int) -> io::Result<c_int> {
        Ok(match self.object(identifier)? {
            Named::Fd(fd) => fd,
            Named::Pipe(end) => end.fd(),
        })
    }

    /// Removes an identifier; returns its object.
    ///
    /// # Errors
    /// `EBADF`.
    pub(super) fn remove(&self, identifier: c_int) -> io::Result<Named> {
        lock(&self.identifiers).remove(identifier).ok_or_else(|| os_error(libc::EBADF))
    }

    /// Gives a new socket the configured options.
    pub(super) fn configure(&self, socket: &Socket) {
        let numbers = numbers();
        let bytes = |size: c_int| u32::try_from(size).ok().filter(|&bytes| bytes > 0);
        let timeout_ms = u32::try_from(numbers.tcp_timeout).ok().map(|s| s.saturating_mul(1_000));
        let mut settings = socket.settings();
        settings.receive_buffer_bytes = bytes(numbers.rcvbuf_size);
        settings.send_buffer_bytes = bytes(numbers.sndbuf_size);
        settings.user_timeout_ms = timeout_ms.filter(|&ms| ms > 0);
        settings.congestion_control = self.congestion_control;
        settings.reuse_address = true;
        settings.reuse_port = numbers.num_cores > 1;
    }

    /// Sets the addresses to connect from.
    pub(super) fn set_sources(&self, base: Ipv4Addr, count: u32) {
        let sources = (!base.is_unspecified() && count > 0).then_some((base, count));
        *lock(&self.sources) = sources;
    }

    /// Next address to connect from, if they are set.
    pub(super) fn next_source(&self) -> Option<SocketAddr> {
        let (base, count) = (*lock(&self.sources))?;
        let index = self.next_source.fetch_add(1, Ordering::Relaxed) % count;
        let address = Ipv4Addr::from(u32::from(base).wrapping_add(index));
        Some(SocketAddr::new(IpAddr::V4(address), 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_small_and_used_again() {
        let mut identifiers = Identifiers::default();
        assert_eq!((identifiers.add(Named::Fd(100)), identifiers.add(Named::Fd(200))), (0, 1));
        assert!(matches!(identifiers.get(1), Some(Named::Fd(200))));
        assert!(identifiers.get(2).is_none() && identifiers.get(-1).is_none());
        assert!(matches!(identifiers.remove(0), Some(Named::Fd(100))));
        assert!(identifiers.remove(0).is_none());
        assert_eq!((identifiers.len(), identifiers.add(Named::Fd(300))), (1, 0));
    }
}
