//! Rings of the C library: a ring of the Rust library, and the descriptors' sockets that it uses.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tidegate::Net;
use tidegate::ring::{Completion, Ring, RingConfig, Socket as RingSocket, SocketKey};

use crate::sleeper::{self, KernelWaiter};
use crate::socket::{Endpoint, Socket, lock, os_error};

/// Ring behind a descriptor. Threads take turns.
pub(crate) struct SocketRing {
    net: Net,
    inner: Mutex<RingInner>,
}

/// Ring, and the sockets that it uses.
pub(crate) struct RingInner {
    pub(crate) ring: Ring,
    sockets: HashMap<SocketKey, Arc<Socket>>,
    /// Keys of the sockets by address, which is theirs as long as `sockets` has them.
    keys: HashMap<usize, SocketKey>,
}

fn address_of(socket: &Arc<Socket>) -> usize {
    Arc::as_ptr(socket).addr()
}

impl SocketRing {
    /// Creates a ring.
    ///
    /// # Errors
    /// `EINVAL` for limits out of range.
    pub(crate) fn new(net: &Net, config: RingConfig) -> io::Result<Self> {
        let inner = RingInner {
            ring: Ring::new(net, config)?,
            sockets: HashMap::new(),
            keys: HashMap::new(),
        };
        Ok(Self { net: net.clone(), inner: Mutex::new(inner) })
    }

    pub(crate) fn net(&self) -> &Net {
        &self.net
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, RingInner> {
        lock(&self.inner)
    }
}

impl RingInner {
    /// Key of a socket, which is added if the ring does not have it.
    ///
    /// # Errors
    /// `ENOTCONN` for a socket that is neither bound, listening nor connecting; `EMFILE` at the limit.
    pub(crate) fn key_of(&mut self, socket: &Arc<Socket>) -> io::Result<SocketKey> {
        if let Some(&key) = self.keys.get(&address_of(socket)) {
            return Ok(key);
        }
        let endpoint: RingSocket = match socket.endpoint() {
            Some(Endpoint::Listener(listener)) => listener.clone().into(),
            Some(Endpoint::Stream(stream)) => stream.clone().into(),
            Some(Endpoint::Udp(udp)) => udp.clone().into(),
            None => return Err(os_error(libc::ENOTCONN)),
        };
        let key = self.ring.add(endpoint)?;
        self.insert(key, Arc::clone(socket));
        Ok(key)
    }

    fn insert(&mut self, key: SocketKey, socket: Arc<Socket>) {
        self.keys.insert(address_of(&socket), key);
        self.sockets.insert(key, socket);
    }

    /// Forgets the program's socket of a key.
    pub(crate) fn forget(&mut self, key: SocketKey) {
        if let Some(socket) = self.sockets.remove(&key) {
            self.keys.remove(&address_of(&socket));
        }
    }

    /// Socket of a completion.
    pub(crate) fn socket_of(&self, completion: &Completion) -> Option<&Arc<Socket>> {
        self.sockets.get(&completion.socket?)
    }

    /// Makes a socket of an accepted connection.
    ///
    /// # Errors
    /// When the connection has left the ring.
    pub(crate) fn open_accepted(
        &mut self,
        key: SocketKey,
        listener: &Socket,
    ) -> io::Result<Arc<Socket>> {
        let Some(RingSocket::Stream(stream)) = self.ring.socket(key) else {
            return Err(os_error(libc::ECONNABORTED));
        };
        let socket = listener.open_accepted(stream.clone())?;
        self.insert(key, Arc::clone(&socket));
        Ok(socket)
    }

    /// Removes an accepted connection for which there is no descriptor.
    pub(crate) fn discard(&mut self, key: SocketKey) {
        self.forget(key);
        self.ring.remove(key);
    }

    /// Submits, and waits as [`Ring::submit_and_wait`]. A signal ends the wait as that of a socket
    /// call.
    ///
    /// # Errors
    /// As [`Ring::submit_and_wait`]; `EINTR`.
    pub(crate) fn submit_and_wait(
        &mut self,
        count: usize,
        timeout: Option<Duration>,
    ) -> io::Result<usize> {
        // Signals count only when the call waits.
        let mut no_wait = KernelWaiter::new(Vec::new(), None, false);
        let found = self.ring.submit_and_wait_with(count, Some(Duration::ZERO), &mut no_wait)?;
        if found >= count || timeout == Some(Duration::ZERO) {
            return Ok(found);
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let remaining = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            let mut kernel = KernelWaiter::new(Vec::new(), None, true);
            match self.ring.submit_and_wait_with(count, remaining, &mut kernel) {
                Err(error)
                    if error.kind() == io::ErrorKind::Interrupted
                        && timeout.is_none()
                        && sleeper::all_handlers_restart() => {}
                result => return result,
            }
        }
    }
}
