//! Answers ARP for addresses that nobody has.
//!
//! A flood receives nothing, but who answers it asks for its hardware address.
//! It gets one that is not the device's: so the kernel at the flood's end drops
//! the answers as another's at its first look, and they cost next to nothing.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::neighbour::{self, Event};
use super::template::Addressing;
use crate::error::LabError;
use crate::netns::End;
use crate::sys;

/// How often it looks whether it is to stop.
const STOP_CHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Answers until it is dropped.
pub struct Responder {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), LabError>>>,
}

impl Responder {
    /// Answers on the device of `end` for the source addresses of `addressing`
    /// with its source hardware address, from core `core`. IPv4 only.
    ///
    /// # Errors
    /// When the socket cannot be opened.
    pub fn new(end: &End, addressing: &Addressing, core: usize) -> Result<Self, LabError> {
        let index = end.index()?;
        let socket = end.namespace.enter(|| sys::arp_socket(index))?;
        let socket = socket.map_err(LabError::io("cannot listen for ARP"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, addressing) = (Arc::clone(&stop), addressing.clone());
        let thread = end.namespace.spawn(move || {
            crate::cpu::pin_this_thread(core)?;
            let mut frame = [0; 128];
            while !stopped.load(Ordering::Relaxed) {
                let mut waited = [PollFd::new(&socket, PollFlags::IN)];
                match poll(&mut waited, Some(&STOP_CHECK)) {
                    Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                    Ok(_) => {}
                    Err(error) => return Err(LabError::io("cannot wait for ARP")(error)),
                }
                answer(&socket, &mut frame, &addressing)
                    .map_err(LabError::io("cannot answer ARP"))?;
            }
            Ok(())
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

fn answer(
    socket: &std::os::fd::OwnedFd,
    frame: &mut [u8],
    addressing: &Addressing,
) -> io::Result<()> {
    let len = rustix::io::read(socket, &mut *frame)?;
    let reply = neighbour::read(&frame[..len], addressing, addressing.target.ip());
    if let Some(Event::Reply(reply)) = reply {
        rustix::io::write(socket, &reply)?;
    }
    Ok(())
}

impl Drop for Responder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A failure shows as servers that do not answer.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
