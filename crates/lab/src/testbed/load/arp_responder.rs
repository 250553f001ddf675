//! ARP responder for addresses that no host has.
//!
//! A flood receives nothing, but a server that replies to the flood requests the hardware
//! address of the flood's source. The responder answers with an address that is not the
//! device's. So the kernel at the flood's end drops the replies at once, as frames for another
//! host, at almost no cost.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_load::neighbour::{self, NeighbourEvent};
use tidegate_load::template::Addressing;

use crate::error::LabError;
use crate::testbed::netns::VethEnd;
use crate::testbed::sys;

/// Interval between two checks of the stop flag.
const STOP_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// ARP responder that runs until dropped.
pub struct ArpResponder {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), LabError>>>,
}

impl ArpResponder {
    /// Answers ARP on the device of `end` for the source addresses of `addressing`, with its source
    /// hardware address, from core `core`. IPv4 only.
    ///
    /// # Errors
    /// When the socket cannot be opened.
    pub fn new(end: &VethEnd, addressing: &Addressing, core: usize) -> Result<Self, LabError> {
        let index = end.ifindex()?;
        let socket = end.namespace.enter(|| sys::arp_socket(index))?;
        let socket = socket.map_err(LabError::io("cannot listen for ARP"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let (should_stop, addressing) = (Arc::clone(&stop), addressing.clone());
        let thread = end.namespace.spawn(move || {
            crate::testbed::cpu::pin_this_thread(core)?;
            let mut frame = [0; 128];
            while !should_stop.load(Ordering::Relaxed) {
                let mut poll_fds = [PollFd::new(&socket, PollFlags::IN)];
                match poll(&mut poll_fds, Some(&STOP_CHECK_INTERVAL)) {
                    Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                    Ok(_) => {}
                    Err(error) => return Err(LabError::io("cannot wait for ARP")(error)),
                }
                answer_request(&socket, &mut frame, &addressing)
                    .map_err(LabError::io("cannot answer ARP"))?;
            }
            Ok(())
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

fn answer_request(
    socket: &std::os::fd::OwnedFd,
    frame: &mut [u8],
    addressing: &Addressing,
) -> io::Result<()> {
    let len = rustix::io::read(socket, &mut *frame)?;
    let reply = neighbour::parse(&frame[..len], addressing, addressing.target.ip());
    let Some(NeighbourEvent::Reply(reply)) = reply else { return Ok(()) };
    match rustix::io::write(socket, &reply) {
        // The queue is full of the flood, and the server will ask again.
        Err(rustix::io::Errno::NOBUFS) => Ok(()),
        result => Ok(result.map(drop)?),
    }
}

impl Drop for ArpResponder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A failed responder shows as servers that do not reply.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
