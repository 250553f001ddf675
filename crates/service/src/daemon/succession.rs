//! What two daemons say to each other, when one goes on in the other's place.
//!
//! The new one comes by the door like anybody. The old one answers with a sentence
//! that says why not, or with its state: one message with how many descriptors
//! there are and the first of them, then the rest in batches. The new one opens and
//! restores everything and says [`READY`]; only then the old one decides, says
//! [`GO`] and has ended. Whoever hears nothing, or that the other has ended, takes
//! it that there was no upgrade. So at any time one of them serves, and never both.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::attachment::call_at;
use crate::contract::descriptors::{MOST, receive_with, send_with};
use crate::contract::greeting::{Hello, send_hello};

/// What the first message begins with.
const MAGIC: [u8; 8] = *b"tidesucc";
const HEAD_BYTES: usize = MAGIC.len() + 4;

/// The descriptors that are the daemon's own: its state, its door, and where what
/// it prints goes.
const OWN: usize = 4;
/// More are not taken: as many as a process can have.
const MOST_DESCRIPTORS: usize = 1 << 20;
/// A larger state is not taken.
const MOST_STATE_BYTES: u64 = 1 << 33;

const READY: u8 = 1;
const GO: u8 = 2;

/// How long either waits for the other. Applications wait 10 s for an answer: what
/// comes of an upgrade must be clear before.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long one that was called off may take to end.
const END_LIMIT: Duration = Duration::from_secs(1);

const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE).union(SealFlags::SEAL);

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Where a daemon that has handed over printed what it had to say: for the next
/// one to go on with.
#[derive(Debug)]
pub struct Prints {
    /// What it reported.
    pub stdout: OwnedFd,
    /// What it logged.
    pub stderr: OwnedFd,
}

/// What a new daemon gets of the old one.
pub(super) struct Handed {
    pub(super) state: Vec<u8>,
    pub(super) listener: UnixListener,
    pub(super) prints: Prints,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// The old daemon's end.
pub(super) struct Predecessor(UnixStream);

/// The new daemon's end.
pub(super) struct Successor(UnixStream);

impl Predecessor {
    /// # Errors
    /// What the kernel says.
    pub(super) fn new(connection: UnixStream) -> io::Result<Self> {
        connection.set_read_timeout(Some(PATIENCE))?;
        connection.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(connection))
    }

    /// Sends all there is, waits until the other one is ready, and lets it begin.
    ///
    /// # Errors
    /// When there was no upgrade: the other one has failed, or is too slow.
    pub(super) fn hand_over(
        &mut self,
        state: &[u8],
        listener: &UnixListener,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let state = sealed(state)?;
        let prints = [rustix::stdio::stdout(), rustix::stdio::stderr()];
        let own = [state.as_fd(), listener.as_fd(), prints[0], prints[1]];
        let mut head = [0; HEAD_BYTES];
        head[..MAGIC.len()].copy_from_slice(&MAGIC);
        head[MAGIC.len()..].copy_from_slice(&(descriptors.len() as u32).to_ne_bytes());
        send_with(self.0.as_fd(), &head, &own)?;
        for batch in descriptors.chunks(MOST) {
            send_with(self.0.as_fd(), &[batch.len() as u8], batch)?;
        }
        expect(&mut self.0, READY)?;
        // From here on it is the other one's.
        self.0.write_all(&[GO])
    }

    /// Tells that nothing came of it, and waits until the other one has ended and
    /// holds nothing any more. Whether it has.
    pub(super) fn call_off(&mut self) -> bool {
        // It may have ended already.
        let _ = self.0.shutdown(std::net::Shutdown::Write);
        let _ = self.0.set_read_timeout(Some(END_LIMIT));
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
    /// Calls the daemon that listens at a path.
    ///
    /// # Errors
    /// When none listens there.
    pub(super) fn call(path: &Path) -> io::Result<Self> {
        let connection = call_at(path)?;
        connection.set_read_timeout(Some(PATIENCE))?;
        connection.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(connection))
    }

    /// Asks for everything the old daemon has, which stops serving.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] with the daemon's reason when it refuses;
    /// [`io::ErrorKind::InvalidData`] when it makes no sense.
    pub(super) fn ask(&mut self) -> io::Result<Handed> {
        send_hello(self.0.as_fd(), &Hello::Upgrade)?;
        let mut head = [0; 256];
        let (len, own) = receive_with(self.0.as_fd(), &mut head, MOST)?;
        let Some(count) = head[..len].strip_prefix(&MAGIC) else {
            let why = match len {
                0 => "the daemon has ended".into(),
                _ => String::from_utf8_lossy(&head[..len]),
            };
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        };
        let strange = || invalid("the daemon speaks another version: restart it instead");
        let count = count.try_into().map(u32::from_ne_bytes).map_err(|_| strange())? as usize;
        let own: [OwnedFd; OWN] = own.try_into().map_err(|_| strange())?;
        if count > MOST_DESCRIPTORS {
            return Err(strange());
        }
        let mut descriptors = Vec::new();
        while descriptors.len() < count {
            let mut said = [0];
            let (len, batch) = receive_with(self.0.as_fd(), &mut said, MOST)?;
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
        let state = unsealed(state)?;
        let prints = Prints { stdout, stderr };
        Ok(Handed { state, listener: listener.into(), prints, descriptors })
    }

    /// Says that everything is open, and waits until the old daemon has ended.
    ///
    /// # Errors
    /// When there is no upgrade: the old one goes on.
    pub(super) fn begin(mut self) -> io::Result<()> {
        self.0.write_all(&[READY])?;
        expect(&mut self.0, GO)
    }
}

fn expect(connection: &mut UnixStream, word: u8) -> io::Result<()> {
    let mut said = [0];
    match connection.read_exact(&mut said) {
        Ok(()) if said == [word] => Ok(()),
        Ok(()) => Err(invalid("the other daemon said something else")),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(io::Error::new(error.kind(), "the other daemon has given up"))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let what = format!("the other daemon is not ready after {} s", PATIENCE.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, what))
        }
        Err(error) => Err(error),
    }
}

/// Bytes in memory that nobody can change.
fn sealed(bytes: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create("tidegate-state", flags)?);
    file.write_all(bytes)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file.into())
}

fn unsealed(fd: OwnedFd) -> io::Result<Vec<u8>> {
    let seals = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
    let file = File::from(fd);
    let len = file.metadata()?.len();
    if !seals.contains(SEALS) || len > MOST_STATE_BYTES {
        return Err(invalid("the state is not sealed, or too large"));
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::contract::greeting::{receive_hello, send_refusal};

    fn pair() -> (UnixStream, Successor) {
        let (old, new) = UnixStream::pair().unwrap();
        (old, Successor(new))
    }

    fn numbered(number: usize) -> File {
        let file = File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(&number.to_ne_bytes(), 0).unwrap();
        file
    }

    #[test]
    fn everything_arrives_in_order_and_then_it_begins() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let state: Vec<u8> = (0..100_000).map(|n| n as u8).collect();
        for count in [0, 1, MOST, 2 * MOST + 3] {
            let (old, mut new) = pair();
            let files: Vec<File> = (0..count).map(numbered).collect();
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            thread::scope(|scope| {
                let taking = scope.spawn(|| {
                    let handed = new.ask().unwrap();
                    assert!(handed.state == state && handed.descriptors.len() == count);
                    for (number, fd) in handed.descriptors.into_iter().enumerate() {
                        let mut read = [0; 8];
                        File::from(fd).read_exact_at(&mut read, 0).unwrap();
                        assert_eq!(usize::from_ne_bytes(read), number);
                    }
                    handed.listener.local_addr().unwrap();
                    new.begin().unwrap();
                });
                receive_hello(old.as_fd()).unwrap();
                Predecessor::new(old).unwrap().hand_over(&state, &listener, &fds).unwrap();
                taking.join().unwrap();
            });
        }
    }

    #[test]
    fn whoever_leaves_before_the_end_ends_it_for_the_other() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let (old, mut new) = pair();
        thread::scope(|scope| {
            scope.spawn(move || drop(new.ask().unwrap()));
            let mut old = Predecessor::new(old).unwrap();
            receive_hello(old.0.as_fd()).unwrap();
            assert!(old.hand_over(b"state", &listener, &[]).is_err());
            assert!(old.call_off());
        });
        let (old, new) = pair();
        drop(old);
        assert!(new.begin().is_err());
    }

    #[test]
    fn what_is_said_is_not_trusted() {
        let ask = |say: &dyn Fn(BorrowedFd<'_>)| {
            let (old, mut new) = pair();
            say(old.as_fd());
            old.shutdown(std::net::Shutdown::Write).unwrap();
            new.ask().map(|_| ()).unwrap_err().to_string()
        };
        let said = ask(&|old| send_refusal(old, "not today").unwrap());
        assert!(said.contains("not today"), "{said}");
        assert!(ask(&|_| ()).contains("has ended"));
        let head = |count: u32| [&MAGIC[..], &count.to_ne_bytes()].concat();
        let file = numbered(7);
        let own = [file.as_fd(); OWN];
        let sealed = sealed(b"x").unwrap();
        let good = [sealed.as_fd(), own[1], own[2], own[3]];
        assert!(ask(&|old| send_with(old, &head(0), &own[..2]).unwrap()).contains("version"));
        assert!(ask(&|old| send_with(old, &MAGIC, &own).unwrap()).contains("version"));
        assert!(ask(&|old| send_with(old, &head(u32::MAX), &good).unwrap()).contains("version"));
        assert!(ask(&|old| send_with(old, &head(0), &own).unwrap()).contains("not sealed"));
        assert!(ask(&|old| send_with(old, &head(1), &good).unwrap()).contains("not all"));
        let lies = ask(&|old| {
            send_with(old, &head(2), &good).unwrap();
            send_with(old, &[2], &own[..1]).unwrap();
        });
        assert!(lies.contains("not all"), "{lies}");
    }
}
