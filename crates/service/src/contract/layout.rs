//! Where everything lies in the memory that is shared.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use tidegate_memory::shared::{
    BytePart, ByteReceiver, ByteSender, Part, Receiver, Region, STREAM_WORDS, Sender, Wanted,
    Words, words_for,
};

use super::command::COMMAND_WORDS;
use super::notice::NOTICE_WORDS;

/// Commands that may be under way.
pub(crate) const COMMANDS: usize = 1024;
/// Notices that may be under way.
const NOTICES: usize = 1024;

/// The word that the daemon sets when it sleeps, and the application's.
const DAEMON_SLEEPS: usize = 0;
const APPLICATION_SLEEPS: usize = 8;
const HEAD_WORDS: usize = 16;

const COMMAND_RING: usize = HEAD_WORDS;
const NOTICE_RING: usize = COMMAND_RING + words_for(COMMANDS, COMMAND_WORDS);
const PLACES: usize = NOTICE_RING + words_for(NOTICES, NOTICE_WORDS);

/// Words of a socket's place, each of the first on a cache line of its own.
const STATUS: usize = 0;
const CHANGES_WANTED: usize = 8;
const LOOKS_WANTED: usize = 16;
const ROOM_WANTED: usize = 24;
const SPACE_WANTED: usize = 32;
const TO_APPLICATION: usize = 40;
const TO_DAEMON: usize = TO_APPLICATION + STREAM_WORDS;
const PLACE_WORDS: usize = TO_DAEMON + STREAM_WORDS;

/// Bytes of a stream in memory.
pub type StreamIn = ByteReceiver<Part, BytePart>;
/// Bytes of a stream in memory.
pub type StreamOut = ByteSender<Part, BytePart>;

/// How much there is of everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Places for sockets.
    pub sockets: u32,
    /// Bytes that a stream of a connection holds each way, a power of two.
    pub tcp_bytes: u32,
    /// Bytes that the datagrams of a UDP socket take each way, a power of two.
    pub udp_bytes: u32,
}

/// No geometry is larger than this.
const MOST_SOCKETS: u32 = 1 << 20;
const STREAM_BYTES: std::ops::RangeInclusive<u32> = 4096..=1 << 26;

impl Geometry {
    /// Whether both sides can work with it.
    pub fn is_sound(&self) -> bool {
        let sizes = [self.tcp_bytes, self.udp_bytes];
        (1..=MOST_SOCKETS).contains(&self.sockets)
            && sizes.iter().all(|size| size.is_power_of_two() && STREAM_BYTES.contains(size))
    }

    /// Bytes that a place has each way: enough for whichever socket comes.
    fn way_bytes(&self) -> usize {
        self.tcp_bytes.max(self.udp_bytes) as usize
    }

    /// Words of the memory for rings and places.
    pub fn control_words(&self) -> usize {
        PLACES + self.sockets as usize * PLACE_WORDS
    }

    /// Words of the memory for streams.
    pub fn data_words(&self) -> usize {
        self.sockets as usize * 2 * self.way_bytes() / 8
    }
}

/// The memory that an application and the daemon share.
#[derive(Clone)]
pub struct Memory {
    geometry: Geometry,
    control: Arc<Region>,
    data: Arc<Region>,
}

fn unusable(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the shared memory is not usable: {what}"))
}

impl Memory {
    /// Joins the two pieces.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when they are not of this geometry.
    pub fn new(geometry: Geometry, control: Region, data: Region) -> io::Result<Self> {
        if !geometry.is_sound()
            || control.words().len() < geometry.control_words()
            || data.words().len() < geometry.data_words()
        {
            return Err(unusable("its size is not what was agreed on"));
        }
        Ok(Self { geometry, control: Arc::new(control), data: Arc::new(data) })
    }

    /// How much there is of everything.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The two pieces, to be handed to the other side.
    pub fn regions(&self) -> [&Region; 2] {
        [&self.control, &self.data]
    }

    fn part(&self, start: usize, words: usize) -> io::Result<Part> {
        Part::new(&self.control, start..start + words).ok_or_else(|| unusable("it is too small"))
    }

    fn wanted(&self, at: usize) -> io::Result<Wanted<Part>> {
        Wanted::new(self.part(at, 1)?).ok_or_else(|| unusable("it is too small"))
    }

    /// The end of the command ring that asks.
    pub(crate) fn asking(&self) -> io::Result<Sender<Part, COMMAND_WORDS>> {
        let part = self.part(COMMAND_RING, words_for(COMMANDS, COMMAND_WORDS))?;
        Sender::new(part, COMMANDS).map_err(io::Error::other)
    }

    /// The end of the command ring that is asked.
    pub(crate) fn asked(&self) -> io::Result<Receiver<Part, COMMAND_WORDS>> {
        let part = self.part(COMMAND_RING, words_for(COMMANDS, COMMAND_WORDS))?;
        Receiver::new(part, COMMANDS).map_err(io::Error::other)
    }

    /// The end of the notice ring that tells.
    pub(crate) fn telling(&self) -> io::Result<Sender<Part, NOTICE_WORDS>> {
        let part = self.part(NOTICE_RING, words_for(NOTICES, NOTICE_WORDS))?;
        Sender::new(part, NOTICES).map_err(io::Error::other)
    }

    /// The end of the notice ring that is told.
    pub(crate) fn told(&self) -> io::Result<Receiver<Part, NOTICE_WORDS>> {
        let part = self.part(NOTICE_RING, words_for(NOTICES, NOTICE_WORDS))?;
        Receiver::new(part, NOTICES).map_err(io::Error::other)
    }

    /// Set while the daemon sleeps.
    pub(crate) fn daemon_sleeps(&self) -> io::Result<Wanted<Part>> {
        self.wanted(DAEMON_SLEEPS)
    }

    /// Set while the application sleeps.
    pub(crate) fn application_sleeps(&self) -> io::Result<Wanted<Part>> {
        self.wanted(APPLICATION_SLEEPS)
    }

    /// Bytes that the streams take, those of sockets that are closed included.
    pub(crate) fn used_bytes(&self) -> io::Result<u64> {
        self.data.used_bytes()
    }

    /// Whether sockets are in it, and not only somebody who could use it.
    pub(crate) fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.control) > 1
    }

    /// Whether the first piece is the memory behind a descriptor.
    pub(crate) fn has(&self, piece: BorrowedFd<'_>) -> bool {
        let of =
            |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|found| (found.st_dev, found.st_ino));
        of(self.control.as_fd()).is_ok_and(|own| of(piece) == Ok(own))
    }

    /// Whether this is the same memory, and not only memory like it.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.control, &other.control)
    }

    /// The word of a place by which an application wants to be told of changes.
    pub(crate) fn changes(&self, number: u32) -> io::Result<Wanted<Part>> {
        Ok(self.place(number)?.changes)
    }

    /// The place with this number.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when there is none.
    pub(crate) fn place(&self, number: u32) -> io::Result<Place> {
        if number >= self.geometry.sockets {
            return Err(unusable("it has no such place"));
        }
        let start = PLACES + number as usize * PLACE_WORDS;
        Ok(Place {
            memory: self.clone(),
            number,
            status: self.part(start + STATUS, 1)?,
            changes: self.wanted(start + CHANGES_WANTED)?,
            looks: self.wanted(start + LOOKS_WANTED)?,
            room: self.wanted(start + ROOM_WANTED)?,
            space: self.wanted(start + SPACE_WANTED)?,
        })
    }
}

/// The words and bytes of one socket.
pub(crate) struct Place {
    memory: Memory,
    number: u32,
    /// How the socket stands: the daemon's word.
    pub(crate) status: Part,
    /// The application wants to be told of changes.
    pub(crate) changes: Wanted<Part>,
    /// The daemon wants to be told to look.
    pub(crate) looks: Wanted<Part>,
    /// The application waits for room in the stream to the daemon.
    pub(crate) room: Wanted<Part>,
    /// The daemon waits for room in the stream to the application.
    pub(crate) space: Wanted<Part>,
}

/// Which kind of stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carries {
    /// The bytes of a connection.
    Bytes,
    /// Datagrams, each behind a head.
    Datagrams,
}

/// While it is there no other process has one of the same memory. It ends with
/// its process, however that ends.
pub(crate) struct Turn(Arc<Region>);

impl Turn {
    fn take(region: &Arc<Region>) -> io::Result<Self> {
        loop {
            match rustix::fs::fcntl_lock(region, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(Self(Arc::clone(region))),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // What was locked can be unlocked.
        let _ = rustix::fs::fcntl_lock(&self.0, FlockOperation::Unlock);
    }
}

impl Place {
    /// The same place, for another attachment that is told of changes by a place of
    /// `memory`.
    pub(crate) fn told_by(&self, memory: &Memory, number: u32) -> io::Result<Self> {
        let changes = memory.changes(number)?;
        Ok(Self { changes, ..self.memory.place(self.number)? })
    }

    /// The memory that it is in.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Whether it is a place of this memory.
    pub(crate) fn is_of(&self, memory: &Memory) -> bool {
        self.memory.is_same(memory)
    }

    /// Holds back the other processes that have the sockets of this memory.
    pub(crate) fn turn(&self) -> io::Result<Turn> {
        Turn::take(&self.memory.control)
    }

    /// All words are zero, as new streams need them.
    pub(crate) fn clear(&self) -> io::Result<()> {
        let start = PLACES + self.number as usize * PLACE_WORDS;
        let part = self.memory.part(start, PLACE_WORDS)?;
        for word in part.words() {
            word.store(0, std::sync::atomic::Ordering::Relaxed);
        }
        Ok(())
    }

    /// Gives the memory of its streams back.
    pub(crate) fn discard(&self) {
        let bytes = 2 * self.memory.geometry.way_bytes();
        // It stays in use when this fails, and nothing else.
        let _ = self.memory.data.discard(self.number as usize * bytes, bytes);
    }

    fn stream(&self, carries: Carries, to_daemon: bool) -> io::Result<(Part, BytePart)> {
        let Geometry { tcp_bytes, udp_bytes, .. } = self.memory.geometry;
        let way_bytes = self.memory.geometry.way_bytes();
        let start = PLACES + self.number as usize * PLACE_WORDS;
        let indices = if to_daemon { TO_DAEMON } else { TO_APPLICATION };
        let indices = self.memory.part(start + indices, STREAM_WORDS)?;
        let len = match carries {
            Carries::Bytes => tcp_bytes,
            Carries::Datagrams => udp_bytes,
        };
        let at = (2 * self.number as usize + usize::from(to_daemon)) * way_bytes;
        let bytes = BytePart::new(&self.memory.data, at, len as usize);
        Ok((indices, bytes.ok_or_else(|| unusable("it is too small"))?))
    }

    /// The daemon's ends: what it reads, and what it writes.
    pub(crate) fn daemon_ends(&self, carries: Carries) -> io::Result<(StreamIn, StreamOut)> {
        self.ends(carries, true)
    }

    /// The application's ends: what it reads, and what it writes.
    pub(crate) fn application_ends(&self, carries: Carries) -> io::Result<(StreamIn, StreamOut)> {
        self.ends(carries, false)
    }

    fn ends(&self, carries: Carries, of_daemon: bool) -> io::Result<(StreamIn, StreamOut)> {
        let (indices, bytes) = self.stream(carries, of_daemon)?;
        let read = StreamIn::new(indices, bytes).map_err(io::Error::other)?;
        let (indices, bytes) = self.stream(carries, !of_daemon)?;
        let written = StreamOut::new(indices, bytes).map_err(io::Error::other)?;
        Ok((read, written))
    }
}
