//! The stack with its virtual clock and its sockets.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::IntoRawFd;

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{Config, Route, Stack, TcpId, TcpListenerId, TcpOptions, TcpState};

use crate::layout;
use crate::profile::Profile;

/// First time of the virtual clock.
const START_NS: u64 = 1_000_000_000_000_000;

/// Name of a state in the output of FreeBSD's `sockstat`.
fn freebsd_name(state: TcpState) -> &'static str {
    match state {
        TcpState::Closed => "CLOSED",
        TcpState::SynSent => "SYN_SENT",
        TcpState::SynReceived => "SYN_RCVD",
        TcpState::Established => "ESTABLISHED",
        TcpState::FinWait1 => "FIN_WAIT_1",
        TcpState::FinWait2 => "FIN_WAIT_2",
        TcpState::CloseWait => "CLOSE_WAIT",
        TcpState::Closing => "CLOSING",
        TcpState::LastAck => "LAST_ACK",
        TcpState::TimeWait => "TIME_WAIT",
    }
}

/// Protocol object behind a descriptor.
#[derive(Clone, Copy, Debug)]
pub enum Endpoint {
    Unconnected,
    Listener(TcpListenerId),
    Connection(TcpId),
}

/// Socket behind a descriptor.
#[derive(Clone, Debug)]
pub struct Socket {
    pub domain: i32,
    pub endpoint: Endpoint,
    pub local: Option<SocketAddr>,
    pub options: TcpOptions,
    pub non_blocking: bool,
    /// The result of `connect` has not been returned yet.
    pub connecting: bool,
    /// `SO_LINGER` with a time of 0: `close` resets the connection.
    pub resets_on_close: bool,
    /// `SO_RCVBUF` where it differs from the buffer that the window scale was chosen for.
    pub receive_buffer: Option<u32>,
    /// The receive buffer was adapted to the MSS of the connection.
    pub is_adapted: bool,
    /// Values of options that have no effect on packets.
    pub stored: HashMap<(i32, i32), Vec<u8>>,
    /// Both directions were shut down by an error or the application.
    pub failed: bool,
}

/// Stack, clock and sockets.
pub struct VirtualHost {
    pub stack: Stack,
    pub arena: Arena,
    pub now_ns: u64,
    pub profile: Profile,
    pub sockets: HashMap<i32, Socket>,
    /// Sent packets with their times.
    pub sent: VecDeque<(u64, Vec<u8>)>,
    /// Number of calls so far: shows whether other threads are active.
    pub calls: u64,
    /// States of the sockets as last written.
    states: String,
}

impl VirtualHost {
    /// Creates a host with the addresses that `scripts/packetdrill` passes to packetdrill.
    pub fn new(profile: Profile) -> Self {
        let cidr = |text: &str| text.parse().expect("a valid prefix");
        let mut config = Config::ip([7; 16])
            .mtu(profile.mtu)
            .addresses(vec![cidr("192.168.0.1/16"), cidr("fd3d:fa7b:d17d::1/48")]);
        if profile.mtu < 1280 {
            config.addresses.truncate(1);
        }
        for prefix in ["0.0.0.0/0", "::/0"] {
            config.routes.push(Route { prefix: cidr(prefix), gateway: None });
        }
        // Scripts inject segments that are larger than the MTU, too.
        let memory = ArenaConfig { frames: 1024, frame_size: FrameSize::K64, hugepages: false };
        let mut host = Self {
            stack: Stack::new(config, START_NS).expect("a valid configuration"),
            arena: Arena::new(memory).expect("memory for packets"),
            now_ns: START_NS,
            profile,
            sockets: HashMap::new(),
            sent: VecDeque::new(),
            calls: 0,
            states: String::new(),
        };
        // Duplicate address detection and group reports are over when the script begins.
        host.advance_to(START_NS + 60_000_000_000);
        host.sent.clear();
        host
    }

    /// Adds a socket; returns its descriptor, one of the kernel: packetdrill closes it at the end.
    pub fn add_socket(&mut self, socket: Socket) -> i32 {
        let fd = std::fs::File::open("/dev/null").map_or(-1, IntoRawFd::into_raw_fd);
        self.sockets.insert(fd, socket);
        fd
    }

    /// Writes the states of all sockets to the file that the replacement of `sockstat` prints.
    pub fn write_states(&mut self) {
        let Some(path) = self.profile.state_file.as_ref() else { return };
        let mut states: Vec<_> =
            self.stack.tcp_states().map(|(local, state)| (Some(local), state)).collect();
        let dead = self.sockets.values().filter(|socket| match socket.endpoint {
            Endpoint::Connection(id) => !self.stack.tcp_exists(id),
            Endpoint::Unconnected => true,
            Endpoint::Listener(_) => false,
        });
        states.extend(dead.map(|_| (None, TcpState::Closed)));
        let lines = states.iter().map(|(local, state)| {
            let local = local.map_or("*".to_owned(), |local| local.to_string());
            format!("root packetdril 1 3 tcp {local} {}\n", freebsd_name(*state))
        });
        let text: String = lines.collect();
        if text != self.states && std::fs::write(path, &text).is_ok() {
            self.states = text;
        }
    }

    /// A new socket without connection.
    pub fn new_socket(&self, domain: i32, non_blocking: bool) -> Socket {
        Socket {
            domain,
            endpoint: Endpoint::Unconnected,
            local: None,
            options: self.profile.socket_options().dual_stack(domain == libc::AF_INET6),
            non_blocking,
            connecting: false,
            resets_on_close: false,
            receive_buffer: self.profile.receive_buffer(),
            is_adapted: false,
            stored: HashMap::new(),
            failed: false,
        }
    }

    /// Moves sent packets from the transmit queue to `sent`.
    pub fn collect(&mut self) {
        // A full transmit queue holds segments back.
        for _ in 0..2 {
            while let Some(frame) = self.stack.transmit_queue().pop_front() {
                let packet = self.arena.bytes(&frame).to_vec();
                self.arena.free(frame);
                // Neighbour discovery and group reports are not the subject of a script.
                let is_ours = match packet[0] >> 4 {
                    4 => packet[9] != 2,
                    _ => packet[6] != 0 && !(packet[6] == 58 && packet[40] >= 128),
                };
                if is_ours {
                    let packet = layout::reorder(packet, self.profile.system);
                    self.sent.push_back((self.now_ns, packet));
                }
            }
            self.stack.tcp_flush(self.now_ns, &mut self.arena);
        }
        self.adapt_buffers();
    }

    /// Sets the receive buffers of new connections: the window scale in the SYN was chosen for
    /// the largest buffer, as kernels do that enlarge buffers later.
    fn adapt_buffers(&mut self) {
        for socket in self.sockets.values_mut() {
            let (Endpoint::Connection(id), Some(wanted), false) =
                (socket.endpoint, socket.receive_buffer, socket.is_adapted)
            else {
                continue;
            };
            let Some(info) = self.stack.tcp_info(id) else { continue };
            let is_open = info.state != TcpState::SynSent;
            let buffer_bytes = match is_open {
                true => self.profile.established_receive_buffer(wanted, info.mss_bytes),
                false => wanted,
            };
            if is_open {
                socket.is_adapted = true;
                socket.receive_buffer = Some(buffer_bytes);
            }
            if socket.options.receive_buffer_bytes != buffer_bytes {
                socket.options.receive_buffer_bytes = buffer_bytes;
                let (now_ns, options) = (self.now_ns, socket.options);
                let _ = self.stack.tcp_set_options(now_ns, &mut self.arena, id, options);
            }
        }
    }

    /// Advances the clock; every timer fires on time.
    pub fn advance_to(&mut self, end_ns: u64) {
        self.collect();
        while let Some(due_ns) = self.stack.next_timeout().filter(|&due_ns| due_ns <= end_ns) {
            self.now_ns = self.now_ns.max(due_ns);
            self.stack.handle_timeout(self.now_ns, &mut self.arena);
            self.collect();
        }
        self.now_ns = self.now_ns.max(end_ns);
    }

    /// Advances the clock to the next timer. Returns false without timers.
    pub fn advance_to_timer(&mut self) -> bool {
        self.collect();
        let Some(due_ns) = self.stack.next_timeout() else { return false };
        self.advance_to(due_ns.max(self.now_ns));
        true
    }

    /// Passes a packet to the stack.
    pub fn receive(&mut self, packet: &[u8]) -> bool {
        let Some(frame) = self.arena.alloc_from(packet) else { return false };
        self.stack.handle_frame(self.now_ns, frame, &mut self.arena);
        self.collect();
        while let Some(_event) = self.stack.poll_event() {}
        true
    }

    /// Reasons for which packets were dropped, with their numbers.
    pub fn drops(&self) -> String {
        let drops = self.stack.counters().drops.nonzero();
        drops.map(|(reason, count)| format!("{reason:?} {count} ")).collect()
    }

    /// Takes the next packet that the stack sends, at whatever time; `None` if it sends no more.
    pub fn next_sent(&mut self) -> Option<(u64, Vec<u8>)> {
        const PATIENCE_NS: u64 = 4 * 3600 * 1_000_000_000;
        let end_ns = self.now_ns + PATIENCE_NS;
        self.collect();
        while self.sent.is_empty() && self.now_ns < end_ns && self.advance_to_timer() {}
        self.sent.pop_front()
    }
}
