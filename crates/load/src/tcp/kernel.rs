//! TCP connections on kernel sockets, with epoll.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::{ConnectionOps, ConnectionSet, TcpLoadConfig, source_address};

/// Maximum number of events per `epoll_wait`.
const EVENTS_PER_WAIT: usize = 256;
/// Event data of the timer: no connection has this slot.
const TIMER: u64 = u64::MAX;
/// Resolution of the time limit of `epoll_wait`, in nanoseconds.
const EPOLL_RESOLUTION_NS: u64 = 1_000_000;

/// Connections on kernel sockets.
pub(super) struct KernelConnections<'c> {
    ops: KernelOps<'c>,
    events: Vec<epoll::Event>,
}

struct KernelOps<'c> {
    config: &'c TcpLoadConfig,
    epoll: OwnedFd,
    /// Ends the waits that are shorter than the resolution of `epoll_wait`.
    timer: OwnedFd,
    streams: Vec<Option<TcpStream>>,
}

impl<'c> KernelConnections<'c> {
    pub(super) fn new(config: &'c TcpLoadConfig) -> io::Result<Self> {
        // Each connection uses one file descriptor.
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)?;
        let streams = (0..config.connections).map(|_| None).collect();
        let ops = KernelOps { config, epoll, timer, streams };
        Ok(Self { ops, events: Vec::with_capacity(EVENTS_PER_WAIT) })
    }
}

impl ConnectionSet for KernelConnections<'_> {
    fn wait_ready(
        &mut self,
        timeout_ns: u64,
        on_ready: &mut dyn FnMut(&mut dyn ConnectionOps, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let spins = self.ops.config.spins;
        if spins && matches!(self.ops.streams[..], [Some(_)]) {
            // Calls of epoll between two attempts would delay the only reply.
            return on_ready(&mut self.ops, 0);
        }
        let timeout_ns = if spins { 0 } else { timeout_ns };
        let timeout = Duration::from_nanos(timeout_ns);
        let timeout =
            Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        if (1..EPOLL_RESOLUTION_NS).contains(&timeout_ns) {
            let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
            let once = Itimerspec { it_interval: zero, it_value: timeout };
            // An expiry before this one no longer counts.
            timerfd_settime(&self.ops.timer, TimerfdTimerFlags::empty(), &once)?;
        }
        self.events.clear();
        let events = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.ops.epoll, events, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in self.events.drain(..) {
            let slot = event.data.u64();
            if slot == TIMER {
                // Reads the expiry: the next wait may be without the timer.
                let _ = rustix::io::read(&self.ops.timer, &mut [0_u8; 8]);
            } else {
                on_ready(&mut self.ops, slot as usize)?;
            }
        }
        Ok(())
    }

    fn with_ops(
        &mut self,
        action: &mut dyn FnMut(&mut dyn ConnectionOps) -> io::Result<()>,
    ) -> io::Result<()> {
        action(&mut self.ops)
    }
}

impl KernelOps<'_> {
    fn get(&mut self, slot: usize) -> io::Result<&mut TcpStream> {
        self.streams[slot].as_mut().ok_or(ErrorKind::NotConnected.into())
    }
}

impl ConnectionOps for KernelOps<'_> {
    fn connect(&mut self, slot: usize) -> io::Result<()> {
        let target = self.config.target;
        let family = if target.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, None)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        if let Some(source) = source_address(self.config, slot) {
            bind(&socket, &SocketAddr::new(source, 0))?;
        }
        match connect(&socket, &target) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let data = epoll::EventData::new_u64(slot as u64);
        let both = epoll::EventFlags::IN | epoll::EventFlags::OUT;
        epoll::add(&self.epoll, &socket, data, both)?;
        self.streams[slot] = Some(TcpStream::from(socket));
        Ok(())
    }

    fn finish_connect(&mut self, slot: usize) -> io::Result<()> {
        let stream = self.get(slot)?;
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        match stream.peer_addr() {
            Err(error) if error.kind() == ErrorKind::NotConnected => {
                Err(ErrorKind::WouldBlock.into())
            }
            result => result.map(|_| ()),
        }
    }

    fn send(&mut self, slot: usize, data: &[u8]) -> io::Result<usize> {
        self.get(slot)?.write(data)
    }

    fn recv(&mut self, slot: usize, buf: &mut [u8]) -> io::Result<usize> {
        self.get(slot)?.read(buf)
    }

    fn set_write_interest(&mut self, slot: usize, wanted: bool) -> io::Result<()> {
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, wanted);
        let Some(stream) = &self.streams[slot] else { return Ok(()) };
        epoll::modify(&self.epoll, stream, epoll::EventData::new_u64(slot as u64), flags)?;
        Ok(())
    }

    fn close(&mut self, slot: usize, reset: bool) {
        if let Some(stream) = self.streams[slot].take()
            && reset
        {
            // Without the option the close is graceful: it only takes longer.
            let _ = sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
        }
    }
}
