//! Cost of a request and its echo through the rings of the daemon: an attached application
//! sends from one socket to another socket of its own, which answers. The stack loops all
//! packets back.
//!
//! The network core and the application take turns on one thread: the application has its turn
//! whenever the core receives from the device. A round trip takes four turns.
//!
//! Count instructions as the difference of two runs:
//! `valgrind --tool=callgrind target/release/examples/ring_echo 10000`, and with
//! 30000. The second argument is `udp` (the default) or `tcp`. Two counts differ by up to
//! 0.2 percent: the core checks the application every 10 ms. Without the inclusive count of
//! `check_applications` they agree to 0.03 percent.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tidegate_device::{Burst, Capabilities, Device, DeviceCounters, mem};
use tidegate_engine::NetConfig;
use tidegate_memory::Arena;
use tidegate_service::attachment::{Attachment, SocketType};
use tidegate_service::daemon::{AttachConfig, Daemon};
use tidegate_service::{Geometry, Handle, SocketState};
use tidegate_stack::{TcpOptions, UdpOptions};

const PAYLOAD_BYTES: usize = 64;
const GEOMETRY: Geometry = Geometry { sockets: 16, tcp_bytes: 1 << 14, udp_bytes: 1 << 17 };
/// Pause between two polls before the round trips begin.
const SETUP_PAUSE: Duration = Duration::from_millis(1);

/// Application whose client socket sends requests to its server socket.
struct Echo {
    app: Attachment,
    client: Handle,
    server: Handle,
    /// Destination of a datagram from the client; `None` for TCP.
    server_addr: Option<SocketAddr>,
    trips_left: u64,
}

/// Device whose receive calls are the turns of the application.
struct TurnDevice {
    inner: Box<dyn Device>,
    /// Application that is ready for its round trips.
    ready: mpsc::Receiver<Echo>,
    echo: Option<Echo>,
    /// Gets the number of turns at the end.
    done: mpsc::Sender<u64>,
    turns: u64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let trips_left: u64 = args.next().map_or(Ok(10_000), |text| text.parse())?;
    let is_tcp = match args.next().as_deref() {
        None | Some("udp") => false,
        Some("tcp") => true,
        Some(other) => return Err(format!("not a protocol: {other}: choose udp or tcp").into()),
    };
    let (ready_sender, ready) = mpsc::channel();
    let (done, done_receiver) = mpsc::channel();
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("tidegate.sock");
    let daemon = start_daemon(&path, ready, done)?;
    let mut app = Attachment::connect(&path, "ring_echo")?;
    // The attachment needs the socket file no longer.
    folder.close()?;

    let server_addr = SocketAddr::from(([192, 0, 2, 1], 1000));
    let client_addr = SocketAddr::from(([192, 0, 2, 1], 1001));
    let echo = if is_tcp {
        let (client, server) = connect_tcp(&mut app, server_addr)?;
        Echo { app, client, server, server_addr: None, trips_left }
    } else {
        let server = app.bind_udp(server_addr, UdpOptions::default())?;
        let client = app.bind_udp(client_addr, UdpOptions::default())?;
        Echo { app, client, server, server_addr: Some(server_addr), trips_left }
    };
    ready_sender.send(echo)?;
    // Wakes the core.
    daemon.report()?;
    let turns = done_receiver.recv()?;
    println!("{trips_left} requests and echoes in {turns} turns");
    // The core has stopped in its last turn, so the daemon cannot be dropped.
    std::process::exit(0);
}

fn start_daemon(
    path: &Path,
    ready: mpsc::Receiver<Echo>,
    done: mpsc::Sender<u64>,
) -> Result<Daemon, Box<dyn std::error::Error>> {
    let (device, _) = mem::wire(&mem::MemConfig::default())?;
    let net = NetConfig::new(device).address("192.0.2.1/24".parse()?).seed([7; 16]).wrap(Box::new(
        |inner| Ok(Box::new(TurnDevice { inner, ready, echo: None, done, turns: 0 })),
    ));
    let attach = AttachConfig::new(path, GEOMETRY);
    Ok(Daemon::start(net, attach, || Ok(()), Arc::new(|text: &str| eprintln!("{text}")))?)
}

/// Connects a client to a server; returns both ends.
fn connect_tcp(app: &mut Attachment, server_addr: SocketAddr) -> io::Result<(Handle, Handle)> {
    let options = TcpOptions::default().no_delay(true);
    let listener = app.listen(server_addr, 1, options)?;
    let client = app.connect_tcp(None, server_addr, options)?;
    let server = loop {
        app.poll()?;
        match app.accept(listener) {
            Ok((server, _)) => break server,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        std::thread::sleep(SETUP_PAUSE);
    };
    while app.state(client)? == SocketState::Connecting {
        std::thread::sleep(SETUP_PAUSE);
    }
    Ok((client, server))
}

impl Echo {
    /// Sends the first request.
    fn begin(&mut self) -> io::Result<()> {
        while self.app.next_changed().is_some() {}
        self.send_request()
    }

    /// Receives and answers all that the daemon has notified. Returns false after the last
    /// round trip.
    fn take_turn(&mut self) -> io::Result<bool> {
        self.app.poll()?;
        while let Some(changed) = self.app.next_changed() {
            let handle = changed.handle;
            let mut buf = [0; 2 * PAYLOAD_BYTES];
            let (len, from) = match changed.socket_type {
                SocketType::Udp => match self.app.recv_datagram(handle, &mut buf, false) {
                    Ok(received) => (received.len, Some(received.from)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                    Err(error) => return Err(error),
                },
                _ => match self.app.recv(handle, &mut buf, false) {
                    Ok(len) => (len, None),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                    Err(error) => return Err(error),
                },
            };
            assert_eq!(len, PAYLOAD_BYTES);
            if handle == self.server {
                self.send(handle, &buf[..len], from)?;
                continue;
            }
            assert_eq!(handle, self.client);
            self.trips_left -= 1;
            if self.trips_left == 0 {
                return Ok(false);
            }
            self.send_request()?;
        }
        Ok(true)
    }

    fn send_request(&mut self) -> io::Result<()> {
        self.send(self.client, &[7; PAYLOAD_BYTES], self.server_addr)
    }

    fn send(&mut self, handle: Handle, bytes: &[u8], to: Option<SocketAddr>) -> io::Result<()> {
        match to {
            Some(to) => self.app.send_datagram(handle, bytes, Some(to), None),
            None => self.app.send(handle, bytes).map(|len| assert_eq!(len, bytes.len())),
        }
    }
}

impl TurnDevice {
    fn run_application(&mut self) -> io::Result<()> {
        let Some(echo) = &mut self.echo else {
            std::thread::sleep(SETUP_PAUSE);
            self.echo = self.ready.try_recv().ok();
            return self.echo.as_mut().map_or(Ok(()), Echo::begin);
        };
        self.turns += 1;
        if !echo.take_turn()? {
            self.done.send(self.turns).map_err(io::Error::other)?;
            // The core does not run on: nothing behind the last round trip is counted.
            loop {
                std::thread::park();
            }
        }
        Ok(())
    }
}

impl Device for TurnDevice {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.run_application()?;
        self.inner.receive(arena, burst, quota)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.inner.transmit(arena, burst)
    }

    fn counters(&mut self) -> DeviceCounters {
        self.inner.counters()
    }
}
