//! Handover protocol between two daemons, the old and the new one.
//!
//! The new daemon connects to the attach socket. The old daemon answers with a refusal, or with
//! its state: one message with the number of descriptors and the first of them, then the rest
//! in batches. The new daemon opens the device, restores everything and sends [`READY`]. Only
//! then the old daemon decides, sends [`GO`] and ends. On a timeout or a closed connection
//! either side assumes that there was no upgrade. So at any time one daemon serves, never both.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use tidegate_memory::shared::SealedBytes;

use super::snapshot::STATE_FORMAT;
use crate::ipc::connect::connect_to_daemon;
use crate::ipc::fd_passing::{MAX_FDS, receive_with_fds, send_with_fds};
use crate::ipc::handshake::{Hello, send_hello};
use crate::ipc::version::ProtocolVersion;

/// Magic number at the start of the first message.
const MAGIC: [u8; 8] = *b"tidesucc";
const HEADER_BYTES: usize = MAGIC.len() + 4;

/// Descriptors of the daemon itself: its state, its listening socket, stdout and stderr.
const DAEMON_FDS: usize = 4;
/// Maximum number of descriptors accepted: as many as a process can have.
const MAX_DESCRIPTORS: usize = 1 << 20;
/// Maximum size of the state accepted, in bytes.
const MAX_STATE_BYTES: u64 = 1 << 33;

const READY: u8 = 1;
const GO: u8 = 2;

/// Time limit for each wait on the peer. Applications wait 10 s for an answer: the upgrade must
/// be decided before.
const PEER_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for the exit of a new daemon whose takeover was aborted.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Output descriptors of a daemon that has handed over, for the next daemon to continue with.
#[derive(Debug)]
pub struct OutputFds {
    /// Standard output: reports.
    pub stdout: OwnedFd,
    /// Standard error: log lines.
    pub stderr: OwnedFd,
}

/// State and descriptors received from the old daemon.
pub(in crate::daemon) struct ReceivedState {
    pub(in crate::daemon) state: SealedBytes,
    pub(in crate::daemon) listener: UnixListener,
    pub(in crate::daemon) output: OutputFds,
    pub(in crate::daemon) descriptors: Vec<OwnedFd>,
}

/// Connection to the new daemon, at the old daemon (the predecessor).
pub(super) struct Predecessor(UnixStream);

/// Connection to the old daemon, at the new daemon (the successor).
pub(in crate::daemon) struct Successor(UnixStream);

impl Predecessor {
    /// # Errors
    /// When the socket's timeouts cannot be set.
    pub(in crate::daemon) fn new(connection: UnixStream) -> io::Result<Self> {
        connection.set_read_timeout(Some(PEER_TIMEOUT))?;
        connection.set_write_timeout(Some(PEER_TIMEOUT))?;
        Ok(Self(connection))
    }

    /// Sends everything, waits until the new daemon is ready, and lets it begin.
    ///
    /// # Errors
    /// When there was no upgrade: the new daemon has failed, or is too slow.
    pub(in crate::daemon) fn hand_over(
        &mut self,
        state: BorrowedFd<'_>,
        listener: &UnixListener,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let output = [rustix::stdio::stdout(), rustix::stdio::stderr()];
        let own = [state, listener.as_fd(), output[0], output[1]];
        let mut head = [0; HEADER_BYTES];
        head[..MAGIC.len()].copy_from_slice(&MAGIC);
        head[MAGIC.len()..].copy_from_slice(&(descriptors.len() as u32).to_ne_bytes());
        send_with_fds(self.0.as_fd(), &head, &own)?;
        for batch in descriptors.chunks(MAX_FDS) {
            send_with_fds(self.0.as_fd(), &[batch.len() as u8], batch)?;
        }
        expect_byte(&mut self.0, READY)?;
        // From here on the state belongs to the new daemon.
        self.0.write_all(&[GO])
    }

    /// Aborts the handover, and waits until the new daemon has ended and holds nothing any more.
    /// Returns false if it has not ended in time.
    pub(in crate::daemon) fn abort(&mut self) -> bool {
        // The new daemon may have ended already.
        let _ = self.0.shutdown(std::net::Shutdown::Write);
        let _ = self.0.set_read_timeout(Some(EXIT_TIMEOUT));
        let mut rest = [0; 64];
        loop {
            match self.0.read(&mut rest) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }
}

impl Successor {
    /// Connects to the daemon that listens at a path.
    ///
    /// # Errors
    /// When no daemon listens there.
    pub(in crate::daemon) fn connect(path: &Path) -> io::Result<Self> {
        let connection = connect_to_daemon(path)?;
        connection.set_read_timeout(Some(PEER_TIMEOUT))?;
        connection.set_write_timeout(Some(PEER_TIMEOUT))?;
        Ok(Self(connection))
    }

    /// Requests the state of the old daemon, which stops serving.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] with the daemon's reason when it refuses;
    /// [`io::ErrorKind::InvalidData`] when its answer is malformed.
    pub(in crate::daemon) fn request_state(&mut self) -> io::Result<ReceivedState> {
        send_hello(self.0.as_fd(), ProtocolVersion::CURRENT, &Hello::Upgrade(STATE_FORMAT))?;
        let mut head = [0; 256];
        let (len, own) = receive_with_fds(self.0.as_fd(), &mut head, MAX_FDS)?;
        let Some(count) = head[..len].strip_prefix(&MAGIC) else {
            let why = match len {
                0 => "the daemon has ended".into(),
                _ => String::from_utf8_lossy(&head[..len]),
            };
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        };
        let other_version =
            || invalid("the daemon uses another protocol version: restart it instead");
        let count = count.try_into().map(u32::from_ne_bytes).map_err(|_| other_version())? as usize;
        let own: [OwnedFd; DAEMON_FDS] = own.try_into().map_err(|_| other_version())?;
        if count > MAX_DESCRIPTORS {
            return Err(other_version());
        }
        let mut descriptors = Vec::new();
        while descriptors.len() < count {
            let mut said = [0];
            let (len, batch) = receive_with_fds(self.0.as_fd(), &mut said, MAX_FDS)?;
            let is_whole = usize::from(said[0]) == batch.len();
            if len == 0 || batch.is_empty() || batch.len() > count - descriptors.len() || !is_whole
            {
                let what = "not all of the daemon's descriptors arrived: raise the limit of open \
                            files (`ulimit -n`)";
                return Err(invalid(what));
            }
            descriptors.extend(batch);
        }
        let [state, listener, stdout, stderr] = own;
        let state = SealedBytes::map(state, MAX_STATE_BYTES)?;
        let output = OutputFds { stdout, stderr };
        Ok(ReceivedState { state, listener: listener.into(), output, descriptors })
    }

    /// Reports that everything is open, and waits until the old daemon has ended.
    ///
    /// # Errors
    /// When there is no upgrade: the old daemon continues.
    pub(in crate::daemon) fn commit(mut self) -> io::Result<()> {
        self.0.write_all(&[READY])?;
        expect_byte(&mut self.0, GO)
    }
}

fn expect_byte(connection: &mut UnixStream, word: u8) -> io::Result<()> {
    let mut said = [0];
    match connection.read_exact(&mut said) {
        Ok(()) if said == [word] => Ok(()),
        Ok(()) => Err(invalid("the other daemon sent an unexpected message")),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(io::Error::new(error.kind(), "the other daemon has closed the connection"))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let what = format!("the other daemon is not ready after {} s", PEER_TIMEOUT.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, what))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::thread;

    use rustix::fs::MemfdFlags;

    use super::*;
    use crate::ipc::handshake::{receive_hello, send_refusal};

    fn pair() -> (UnixStream, Successor) {
        let (old, new) = UnixStream::pair().unwrap();
        (old, Successor(new))
    }

    fn memfd_of(bytes: &[u8]) -> OwnedFd {
        SealedBytes::create(|file| file.write_all(bytes)).unwrap()
    }

    fn numbered_memfd(number: usize) -> File {
        let file = File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(&number.to_ne_bytes(), 0).unwrap();
        file
    }

    #[test]
    fn hands_over_state_and_descriptors_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let state: Vec<u8> = (0..100_000).map(|n| n as u8).collect();
        for count in [0, 1, MAX_FDS, 2 * MAX_FDS + 3] {
            let (old, mut new) = pair();
            let files: Vec<File> = (0..count).map(numbered_memfd).collect();
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            thread::scope(|scope| {
                let taking = scope.spawn(|| {
                    let handed = new.request_state().unwrap();
                    assert!(*handed.state == *state && handed.descriptors.len() == count);
                    for (number, fd) in handed.descriptors.into_iter().enumerate() {
                        let mut read = [0; 8];
                        File::from(fd).read_exact_at(&mut read, 0).unwrap();
                        assert_eq!(usize::from_ne_bytes(read), number);
                    }
                    handed.listener.local_addr().unwrap();
                    new.commit().unwrap();
                });
                receive_hello(old.as_fd()).unwrap();
                let state = memfd_of(&state);
                let mut old = Predecessor::new(old).unwrap();
                old.hand_over(state.as_fd(), &listener, &fds).unwrap();
                taking.join().unwrap();
            });
        }
    }

    #[test]
    fn either_side_closing_early_cancels_the_handover() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let (old, mut new) = pair();
        thread::scope(|scope| {
            scope.spawn(move || drop(new.request_state().unwrap()));
            let mut old = Predecessor::new(old).unwrap();
            receive_hello(old.0.as_fd()).unwrap();
            assert!(old.hand_over(memfd_of(b"state").as_fd(), &listener, &[]).is_err());
            assert!(old.abort());
        });
        let (old, new) = pair();
        drop(old);
        assert!(new.commit().is_err());
    }

    #[test]
    fn rejects_malformed_handover_messages() {
        let ask = |say: &dyn Fn(BorrowedFd<'_>)| {
            let (old, mut new) = pair();
            say(old.as_fd());
            old.shutdown(std::net::Shutdown::Write).unwrap();
            new.request_state().map(|_| ()).unwrap_err().to_string()
        };
        let said = ask(&|old| send_refusal(old, "not today").unwrap());
        assert!(said.contains("not today"), "{said}");
        assert!(ask(&|_| ()).contains("has ended"));
        let head = |count: u32| [&MAGIC[..], &count.to_ne_bytes()].concat();
        let file = numbered_memfd(7);
        let own = [file.as_fd(); DAEMON_FDS];
        let sealed = memfd_of(b"x");
        let good = [sealed.as_fd(), own[1], own[2], own[3]];
        assert!(ask(&|old| send_with_fds(old, &head(0), &own[..2]).unwrap()).contains("version"));
        assert!(ask(&|old| send_with_fds(old, &MAGIC, &own).unwrap()).contains("version"));
        assert!(
            ask(&|old| send_with_fds(old, &head(u32::MAX), &good).unwrap()).contains("version")
        );
        assert!(ask(&|old| send_with_fds(old, &head(0), &own).unwrap()).contains("not sealed"));
        assert!(ask(&|old| send_with_fds(old, &head(1), &good).unwrap()).contains("not all"));
        let lies = ask(&|old| {
            send_with_fds(old, &head(2), &good).unwrap();
            send_with_fds(old, &[2], &own[..1]).unwrap();
        });
        assert!(lies.contains("not all"), "{lies}");
    }
}
