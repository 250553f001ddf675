//! Health checks of a service: DNS queries, datagrams, TCP connections and HTTP requests, over kernel sockets
//! or over a stack of Tidegate.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::{Duration, Instant};

use domain::base::iana::{Rcode, Rtype};
use domain::base::{Message, MessageBuilder, Name};
use serde::{Deserialize, Serialize};
use tidegate::Net;

/// Error of a server that has dropped its privileges and shares the host's addresses.
const SHARED_ADDRESS: &str = "on shared addresses a check needs a port of the kernel, and the server \
                              has dropped the right to open one: serve on an own address \
                              (--address), or start the server with --user root";

/// Longest reply that a check reads, in bytes.
const MAX_REPLY_BYTES: usize = 64 * 1024;

/// Datagram of a check of a UDP port.
const DATAGRAM: &[u8] = b"tidegate-announce";

/// Health check of one address: what to ask, and at which port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum HealthCheck {
    /// DNS query for the address of a name, by UDP or TCP.
    Dns { name: String, port: u16, by_tcp: bool },
    /// Datagram that any datagram answers.
    Udp { port: u16 },
    /// TCP connection, closed at once.
    Tcp { port: u16 },
    /// HTTP request GET, answered with a status below 400.
    Http { port: u16, path: String },
}

impl FromStr for HealthCheck {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let malformed = || {
            format!(
                "{text}: give a check as dns:NAME, dns-tcp:NAME, udp:PORT, tcp:PORT or http:PORT/PATH; a DNS \
                 server on another port than 53 as dns:NAME:PORT"
            )
        };
        let port = |text: &str| text.parse().ok().filter(|&port| port != 0).ok_or_else(malformed);
        let (kind, rest) = text.split_once(':').ok_or_else(malformed)?;
        match kind {
            "dns" | "dns-tcp" => {
                let (name, port) = match rest.rsplit_once(':') {
                    Some((name, number)) => (name, port(number)?),
                    None => (rest, 53),
                };
                name.parse::<Name<Vec<u8>>>().map_err(|_| malformed())?;
                Ok(Self::Dns { name: name.to_owned(), port, by_tcp: kind == "dns-tcp" })
            }
            "udp" => Ok(Self::Udp { port: port(rest)? }),
            "tcp" => Ok(Self::Tcp { port: port(rest)? }),
            "http" => {
                let (number, path) = rest.split_once('/').unwrap_or((rest, ""));
                let is_plain = path.bytes().all(|byte| byte.is_ascii_graphic());
                let path = Some(format!("/{path}")).filter(|_| is_plain).ok_or_else(malformed)?;
                Ok(Self::Http { port: port(number)?, path })
            }
            _ => Err(malformed()),
        }
    }
}

impl TryFrom<String> for HealthCheck {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<HealthCheck> for String {
    fn from(check: HealthCheck) -> Self {
        check.to_string()
    }
}

impl fmt::Display for HealthCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns { name, port, by_tcp } => {
                write!(f, "{}:{name}", if *by_tcp { "dns-tcp" } else { "dns" })?;
                if *port == 53 { Ok(()) } else { write!(f, ":{port}") }
            }
            Self::Udp { port } => write!(f, "udp:{port}"),
            Self::Tcp { port } => write!(f, "tcp:{port}"),
            Self::Http { port, path } => write!(f, "http:{port}{path}"),
        }
    }
}

/// Stack that a check goes through.
pub(crate) trait CheckTransport {
    /// Sends a datagram and returns the first reply for which `is_reply` is true.
    fn exchange_datagram(
        &self,
        server: SocketAddr,
        request: &[u8],
        timeout: Duration,
        is_reply: &dyn Fn(&[u8]) -> bool,
    ) -> io::Result<Vec<u8>>;

    /// Connects, sends a request, and reads until `is_complete` is true for what was read.
    fn exchange_stream(
        &self,
        server: SocketAddr,
        request: &[u8],
        timeout: Duration,
        is_complete: &dyn Fn(&[u8]) -> bool,
    ) -> io::Result<Vec<u8>>;
}

impl HealthCheck {
    /// Checks one address.
    ///
    /// # Errors
    /// The service does not answer in time, or not as it should; the text says what happened.
    pub(crate) fn run(
        &self,
        transport: &impl CheckTransport,
        address: IpAddr,
        timeout: Duration,
    ) -> Result<(), String> {
        let result = match self {
            Self::Dns { name, port, by_tcp } => {
                let server = SocketAddr::new(address, *port);
                check_dns(transport, server, name, *by_tcp, timeout)
            }
            Self::Udp { port } => {
                let server = SocketAddr::new(address, *port);
                transport.exchange_datagram(server, DATAGRAM, timeout, &|_| true).map(drop)
            }
            Self::Tcp { port } => transport
                .exchange_stream(SocketAddr::new(address, *port), &[], timeout, &|_| true)
                .map(drop),
            Self::Http { port, path } => {
                check_http(transport, SocketAddr::new(address, *port), path, timeout)
            }
        };
        result.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!("no answer within {} ms", timeout.as_millis())
            }
            // The sandbox of a server has no such call.
            io::ErrorKind::Unsupported => SHARED_ADDRESS.to_owned(),
            _ => error.to_string(),
        })
    }
}

fn check_dns(
    transport: &impl CheckTransport,
    server: SocketAddr,
    name: &str,
    by_tcp: bool,
    timeout: Duration,
) -> io::Result<()> {
    // The standard library seeds `RandomState` from system randomness.
    let id = RandomState::new().hash_one(name) as u16;
    let query = query(name, id).ok_or(io::ErrorKind::InvalidInput)?;
    let is_reply = |reply: &[u8]| {
        let message = Message::from_octets(reply).ok();
        message.is_some_and(|message| message.header().qr() && message.header().id() == id)
    };
    let reply = if by_tcp {
        let length = (query.len() as u16).to_be_bytes();
        let request = [&length, query.as_slice()].concat();
        let is_complete = |read: &[u8]| {
            let length = read.first_chunk().map(|bytes| usize::from(u16::from_be_bytes(*bytes)));
            length.is_some_and(|length| read.len() >= 2 + length)
        };
        let read = transport.exchange_stream(server, &request, timeout, &is_complete)?;
        read.get(2..).unwrap_or_default().to_vec()
    } else {
        transport.exchange_datagram(server, &query, timeout, &is_reply)?
    };
    if !is_reply(&reply) {
        return Err(io::Error::other("the answer belongs to another query"));
    }
    let message = Message::from_octets(reply).map_err(io::Error::other)?;
    match message.header().rcode() {
        Rcode::NOERROR => Ok(()),
        code => Err(io::Error::other(format!("the server answers {code}"))),
    }
}

/// Query for the IPv4 address of `name`.
fn query(name: &str, id: u16) -> Option<Vec<u8>> {
    let name: Name<Vec<u8>> = name.parse().ok()?;
    let mut builder = MessageBuilder::new_vec().question();
    builder.header_mut().set_id(id);
    builder.push((name, Rtype::A)).ok()?;
    Some(builder.finish())
}

fn check_http(
    transport: &impl CheckTransport,
    server: SocketAddr,
    path: &str,
    timeout: Duration,
) -> io::Result<()> {
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {server}\r\nUser-Agent: tidegate-announce\r\n\
         Connection: close\r\n\r\n"
    );
    let is_complete = |read: &[u8]| read.contains(&b'\n');
    let read = transport.exchange_stream(server, request.as_bytes(), timeout, &is_complete)?;
    let line = read.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_ascii_whitespace();
    let is_http = words.next().is_some_and(|version| version.starts_with("HTTP/1."));
    match words.next().and_then(|status| status.parse::<u16>().ok()) {
        Some(100..=399) if is_http => Ok(()),
        Some(status) if is_http => Err(io::Error::other(format!("HTTP status {status}"))),
        _ => Err(io::Error::other("the answer is not HTTP")),
    }
}

/// Time left of a time limit; at its end an error.
fn time_left(began: Instant, timeout: Duration) -> io::Result<Duration> {
    let left = timeout.checked_sub(began.elapsed()).filter(|left| !left.is_zero());
    left.ok_or_else(|| io::ErrorKind::TimedOut.into())
}

/// Receives datagrams with `receive`, which gets the time left, until one is the reply.
fn receive_reply(
    began: Instant,
    timeout: Duration,
    is_reply: &dyn Fn(&[u8]) -> bool,
    mut receive: impl FnMut(&mut [u8], Duration) -> io::Result<usize>,
) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; MAX_REPLY_BYTES];
    loop {
        let bytes = receive(&mut buffer, time_left(began, timeout)?)?;
        if is_reply(&buffer[..bytes]) {
            buffer.truncate(bytes);
            return Ok(buffer);
        }
    }
}

/// Reads with `read`, which gets the time left, until `is_complete` or the end of the stream.
fn read_until(
    began: Instant,
    timeout: Duration,
    is_complete: &dyn Fn(&[u8]) -> bool,
    mut read: impl FnMut(&mut [u8], Duration) -> io::Result<usize>,
) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    while !is_complete(&all) && all.len() < MAX_REPLY_BYTES {
        match read(&mut buffer, time_left(began, timeout)?)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => all.extend_from_slice(&buffer[..bytes]),
        }
    }
    Ok(all)
}

/// The kernel's sockets.
pub(crate) struct KernelTransport;

impl CheckTransport for KernelTransport {
    fn exchange_datagram(
        &self,
        server: SocketAddr,
        request: &[u8],
        timeout: Duration,
        is_reply: &dyn Fn(&[u8]) -> bool,
    ) -> io::Result<Vec<u8>> {
        let began = Instant::now();
        let socket = std::net::UdpSocket::bind(any_address(server))?;
        socket.connect(server)?;
        socket.send(request)?;
        receive_reply(began, timeout, is_reply, |buffer, left| {
            socket.set_read_timeout(Some(left))?;
            socket.recv(buffer)
        })
    }

    fn exchange_stream(
        &self,
        server: SocketAddr,
        request: &[u8],
        timeout: Duration,
        is_complete: &dyn Fn(&[u8]) -> bool,
    ) -> io::Result<Vec<u8>> {
        let began = Instant::now();
        let mut stream = std::net::TcpStream::connect_timeout(&server, timeout)?;
        stream.set_write_timeout(Some(time_left(began, timeout)?))?;
        stream.write_all(request)?;
        read_until(began, timeout, is_complete, |buffer, left| {
            stream.set_read_timeout(Some(left))?;
            stream.read(buffer)
        })
    }
}

fn any_address(server: SocketAddr) -> SocketAddr {
    let any = match server {
        SocketAddr::V4(_) => IpAddr::from([0; 4]),
        SocketAddr::V6(_) => IpAddr::from([0_u16; 8]),
    };
    SocketAddr::new(any, 0)
}

/// A stack of Tidegate: requests to its own addresses stay inside.
impl CheckTransport for Net {
    fn exchange_datagram(
        &self,
        server: SocketAddr,
        request: &[u8],
        timeout: Duration,
        is_reply: &dyn Fn(&[u8]) -> bool,
    ) -> io::Result<Vec<u8>> {
        let began = Instant::now();
        let socket = tidegate::UdpSocket::bind_one_family(self, any_address(server))?;
        socket.connect(server)?;
        socket.send(request)?;
        receive_reply(began, timeout, is_reply, |buffer, left| {
            socket.set_read_timeout(Some(left))?;
            socket.recv(buffer)
        })
    }

    fn exchange_stream(
        &self,
        server: SocketAddr,
        request: &[u8],
        timeout: Duration,
        is_complete: &dyn Fn(&[u8]) -> bool,
    ) -> io::Result<Vec<u8>> {
        let began = Instant::now();
        let stream = tidegate::TcpStream::connect_timeout(self, server, timeout)?;
        stream.set_write_timeout(Some(time_left(began, timeout)?))?;
        (&stream).write_all(request)?;
        read_until(began, timeout, is_complete, |buffer, left| {
            stream.set_read_timeout(Some(left))?;
            stream.recv(buffer)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn check(text: &str) -> HealthCheck {
        text.parse().unwrap()
    }

    #[test]
    fn checks_are_written_as_they_are_read() {
        for text in
            ["dns:example.org", "dns-tcp:example.org:5353", "udp:7", "tcp:443", "http:80/health?a"]
        {
            assert_eq!(check(text).to_string(), text);
        }
        assert_eq!(check("http:80").to_string(), "http:80/");
        for text in ["dns", "dns:", "dns:a..b", "tcp:0", "tcp:x", "http:80/a b", "ping:1"] {
            let error = text.parse::<HealthCheck>().unwrap_err();
            assert!(error.contains("give a check as"), "{error}");
        }
    }

    /// Answers one query with this response code, after a datagram that is no answer.
    fn answer_query(socket: &UdpSocket, code: Rcode) {
        let mut buffer = [0; 512];
        let (bytes, peer) = socket.recv_from(&mut buffer).unwrap();
        socket.send_to(b"no answer", peer).unwrap();
        let question = Message::from_octets(buffer[..bytes].to_vec()).unwrap();
        let mut answer = MessageBuilder::new_vec().start_answer(&question, code).unwrap();
        answer.header_mut().set_qr(true);
        socket.send_to(&answer.finish(), peer).unwrap();
    }

    #[test]
    fn dns_server_has_to_answer_without_error() {
        for address in ["127.0.0.1", "::1"] {
            let address: IpAddr = address.parse().unwrap();
            let socket = UdpSocket::bind((address, 0)).unwrap();
            let check = check(&format!("dns:a.example:{}", socket.local_addr().unwrap().port()));
            for (code, is_healthy) in [(Rcode::NOERROR, true), (Rcode::SERVFAIL, false)] {
                std::thread::scope(|scope| {
                    scope.spawn(|| answer_query(&socket, code));
                    let result = check.run(&KernelTransport, address, TIMEOUT);
                    assert_eq!(result.is_ok(), is_healthy, "{result:?}");
                });
            }
            let silent = check.run(&KernelTransport, address, Duration::from_millis(1));
            assert_eq!(silent.unwrap_err(), "no answer within 1 ms");
        }
    }

    #[test]
    fn web_server_has_to_answer_with_a_good_status() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let check = check(&format!("http:{}/health", address.port()));
        for (reply, expected) in [
            ("HTTP/1.1 204 No Content\r\n\r\n", Ok(())),
            ("HTTP/1.1 503 Busy\r\n\r\n", Err("HTTP status 503".to_owned())),
            ("SSH-2.0\r\n", Err("the answer is not HTTP".to_owned())),
        ] {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut request = [0; 1024];
                    let bytes = stream.read(&mut request).unwrap();
                    assert!(request[..bytes].starts_with(b"GET /health HTTP/1.1\r\n"));
                    stream.write_all(reply.as_bytes()).unwrap();
                });
                assert_eq!(check.run(&KernelTransport, address.ip(), TIMEOUT), expected);
            });
        }
        let tcp = HealthCheck::Tcp { port: address.port() };
        assert_eq!(tcp.run(&KernelTransport, address.ip(), TIMEOUT), Ok(()));
        drop(listener);
        assert!(tcp.run(&KernelTransport, address.ip(), TIMEOUT).is_err());
    }
}
