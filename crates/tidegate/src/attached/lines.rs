//! The attachments of a program: one at first, and one for each network core of the
//! daemon's when it has something for all of them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll;
use tidegate_service::Handle;
use tidegate_service::attachment::{Attachment, Kind};

use crate::readiness::Readiness;

/// More cores than that are not used by one program.
const MOST_LINES: usize = 64;

/// Sockets of several attachments, each by a number of its own.
pub(super) struct Lines {
    all: Vec<Attachment>,
    /// How many there may be.
    most: usize,
    /// Readable when one of them is.
    signal: Arc<OwnedFd>,
    /// There will be no more of them.
    is_refused: bool,
    /// Which of them is to connect next.
    next: usize,
}

/// The number of a socket: with one line only it is that of the attachment's.
fn bits(line: usize, most: usize, socket: Handle) -> u64 {
    let place = u64::from(socket.place) * most as u64 + line as u64;
    u64::from(socket.generation) << 32 | place
}

/// The line and the socket of a number.
fn named(bits: u64, most: usize) -> (usize, Handle) {
    let (place, generation) = (bits as u32, (bits >> 32) as u32);
    let most = most as u32;
    ((place % most) as usize, Handle { place: place / most, generation })
}

impl Lines {
    pub(super) fn new(first: Attachment) -> io::Result<Self> {
        let most = first.cores().clamp(1, MOST_LINES);
        Self::with(vec![first], most)
    }

    fn with(all: Vec<Attachment>, most: usize) -> io::Result<Self> {
        let signal = match all.as_slice() {
            [only] if most == 1 => only.as_fd().try_clone_to_owned()?,
            _ => epoll::create(epoll::CreateFlags::CLOEXEC)?,
        };
        let lines = Self { all, most, signal: Arc::new(signal), is_refused: false, next: 0 };
        if most > 1 {
            lines.all.iter().try_for_each(|line| lines.watch(line))?;
        }
        Ok(lines)
    }

    fn watch(&self, line: &Attachment) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        Ok(epoll::add(&self.signal, line.as_fd(), data, epoll::EventFlags::IN)?)
    }

    /// Readable when the daemon tells something, to sleep on while others hold the
    /// rest.
    pub(super) fn signal(&self) -> &Arc<OwnedFd> {
        &self.signal
    }

    /// Has one for each core, as far as the daemon lets them in.
    pub(super) fn complete(&mut self) {
        while self.all.len() < self.most && !self.is_refused {
            let another = self.all[0].another();
            match another.and_then(|another| self.watch(&another).map(|()| another)) {
                Ok(another) => self.all.push(another),
                // A program that has changed its user or its root stays where it is.
                Err(_) => self.is_refused = true,
            }
        }
    }

    /// How many there may be.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// They take turns.
    pub(super) fn take_turn(&mut self) -> usize {
        self.next = (self.next + 1) % self.all.len();
        self.next
    }

    pub(super) fn number(&self, line: usize, socket: Handle) -> u64 {
        bits(line, self.most, socket)
    }

    /// The line and the name there of the socket of this number.
    pub(super) fn named(&self, number: u64) -> (usize, Handle) {
        named(number, self.most)
    }

    /// The attachment of a line.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when there is none.
    pub(super) fn line(&mut self, line: usize) -> io::Result<&mut Attachment> {
        self.all.get_mut(line).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The attachment that has the socket of this number, and its name there.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when there is none.
    pub(super) fn of(&mut self, number: u64) -> io::Result<(&mut Attachment, Handle)> {
        let (line, socket) = self.named(number);
        Ok((self.line(line)?, socket))
    }

    /// The one that was there first, which knows as much as any.
    pub(super) fn first(&mut self) -> &mut Attachment {
        &mut self.all[0]
    }

    /// What a socket is ready for. One that was closed is ready for its error.
    pub(super) fn look(&mut self, number: u64) -> Readiness {
        let failed = Readiness { failed: true, readable: true, ..Readiness::default() };
        self.of(number).map_or(failed, |(line, socket)| line.readiness(socket).into())
    }

    /// The program has no use for a socket any more.
    pub(super) fn close(&mut self, number: u64, abrupt: bool) {
        if let Ok((line, socket)) = self.of(number) {
            line.close(socket, abrupt);
        }
    }

    /// Closes sockets, and waits until the daemon has done so.
    pub(super) fn close_and_wait(&mut self, numbers: &[u64]) {
        numbers.iter().for_each(|&number| self.close(number, false));
        for &number in numbers {
            if let Ok((line, _)) = self.of(number) {
                // A daemon that has ended has none of them.
                let _ = line.ping();
            }
        }
    }

    /// Takes what the daemon has told since. Whether it was anything.
    pub(super) fn poll(&mut self) -> io::Result<bool> {
        self.all.iter_mut().try_fold(false, |any, line| Ok(line.poll()? || any))
    }

    /// The next socket that something happened to.
    pub(super) fn next_changed(&mut self) -> Option<(u64, Kind)> {
        let most = self.most;
        self.all.iter_mut().enumerate().find_map(|(line, attachment)| {
            attachment.next_changed().map(|(socket, kind)| (bits(line, most, socket), kind))
        })
    }

    /// Whether something happened to a socket that nobody has heard of yet.
    pub(super) fn have_changed(&self) -> bool {
        self.all.iter().any(Attachment::has_changed)
    }

    /// Before sleeping on the signal. `false` when there is something already.
    pub(super) fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.all.iter_mut().try_fold(true, |quiet, line| Ok(line.prepare_sleep()? && quiet))
    }

    /// After sleeping, also where it came to nothing.
    pub(super) fn end_sleep(&mut self) -> io::Result<()> {
        // Each of them is to wake up, whatever the others say.
        self.all.iter_mut().map(Attachment::end_sleep).fold(Ok(()), Result::and)
    }

    /// Waits until the daemon has done all that it was asked for before.
    pub(super) fn ping(&mut self) -> io::Result<()> {
        self.all.iter_mut().try_for_each(|line| line.ping().map(|_| ()))
    }

    /// The same for a child that is about to be forked.
    pub(super) fn heirs(&mut self) -> io::Result<Self> {
        let heirs = self.all.iter_mut().map(Attachment::heir).collect::<io::Result<_>>()?;
        Self::with(heirs, self.most)
    }

    /// In a child that got none of its own.
    pub(super) fn abandon(&mut self) {
        self.all.iter_mut().for_each(Attachment::abandon);
        if let Some(signal) =
            self.all.first().and_then(|line| line.as_fd().try_clone_to_owned().ok())
        {
            self.signal = Arc::new(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_number_is_that_of_one_socket_of_one_line(
            most in 1..=MOST_LINES,
            line in 0..MOST_LINES,
            place in 0..1_u32 << 20,
            generation: u32,
        ) {
            let (line, socket) = (line % most, Handle { place, generation });
            prop_assert_eq!(named(bits(line, most, socket), most), (line, socket));
        }
    }
}
