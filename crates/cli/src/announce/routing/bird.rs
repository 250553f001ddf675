//! BIRD, by its control socket: lines of commands, and replies with numbers.
//!
//! The routes are in static protocols of BIRD's own configuration, over the interface of this
//! process. BIRD uses such a route only while the interface is up.

use std::io::{self, BufRead, BufReader, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use super::{RoutingControl, prefix};
use crate::Failure;

/// Time limit of each read and write.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of lines of a reply.
const MAX_REPLY_LINES: usize = 1000;

/// First number of the replies that report an error.
const FIRST_ERROR: u16 = 8000;

pub(super) struct Bird {
    socket: PathBuf,
    protocols: Vec<String>,
    /// Lines that the configuration lacks if a protocol is missing.
    example: String,
}

impl Bird {
    pub(super) fn new(socket: PathBuf, protocols: Vec<String>, example: String) -> Self {
        Self { socket, protocols, example }
    }

    fn connect(&self) -> Result<Connection, Failure> {
        let socket = self.socket.display();
        Connection::open(&self.socket).map_err(|error| {
            let remedy = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    "run this command as root, or as a member of the group `bird`"
                }
                _ => "start BIRD, or give its control socket by --bird",
            };
            format!("--bird {socket}: {error}; {remedy}").into()
        })
    }

    /// Sends a command for each protocol.
    fn command(&self, command: &str) -> Result<(), Failure> {
        let mut connection = self.connect()?;
        for protocol in &self.protocols {
            let reply = connection.command(&format!("{command} {protocol}"));
            let reply = reply.map_err(|error| format!("BIRD: {command} {protocol}: {error}"))?;
            if reply.is_error {
                let (text, example) = (reply.text, &self.example);
                return Err(format!(
                    "BIRD: {command} {protocol}: {text}; the configuration of BIRD needs these \
                     lines, then `birdc configure`:\n{example}"
                )
                .into());
            }
        }
        Ok(())
    }
}

impl RoutingControl for Bird {
    fn prepare(&mut self) -> Result<(), Failure> {
        self.command("show protocols")?;
        self.withdraw()
    }

    fn announce(&mut self) -> Result<(), Failure> {
        self.command("enable")
    }

    fn withdraw(&mut self) -> Result<(), Failure> {
        self.command("disable")
    }
}

/// Lines for BIRD's configuration.
pub(super) fn example(protocols: &[String], interface: &str, addresses: &[IpAddr]) -> String {
    let mut lines = String::new();
    for (at, (channel, is_ipv6)) in [("ipv4", false), ("ipv6", true)].into_iter().enumerate() {
        let routes: String = addresses
            .iter()
            .filter(|address| address.is_ipv6() == is_ipv6)
            .map(|address| format!("  route {} via \"{interface}\";\n", prefix(address)))
            .collect();
        if !routes.is_empty() {
            let name = protocols.get(at).or(protocols.last()).map_or("tidegate", String::as_str);
            lines += &format!("protocol static {name} {{\n  {channel};\n{routes}}}\n");
        }
    }
    lines
}

/// Reply to a command.
#[derive(Debug, PartialEq)]
struct Reply {
    is_error: bool,
    /// Last line without its number.
    text: String,
}

struct Connection {
    reader: BufReader<UnixStream>,
}

impl Connection {
    fn open(path: &std::path::Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut connection = Self { reader: BufReader::new(stream) };
        connection.read_reply()?;
        Ok(connection)
    }

    fn command(&mut self, command: &str) -> io::Result<Reply> {
        self.reader.get_mut().write_all(format!("{command}\n").as_bytes())?;
        self.read_reply()
    }

    /// Reads a reply: its last line has a number and a space, the lines before a number and a hyphen,
    /// or a space at their begin.
    fn read_reply(&mut self) -> io::Result<Reply> {
        let mut text = String::new();
        for _ in 0..MAX_REPLY_LINES {
            let mut line = String::new();
            if self.reader.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let line = line.trim_end_matches('\n');
            let Some(number) = line.get(..4).and_then(|number| number.parse::<u16>().ok()) else {
                continue;
            };
            let rest = line.get(5..).unwrap_or_default();
            if number != 0 {
                rest.clone_into(&mut text);
            }
            if line.as_bytes().get(4) == Some(&b' ') {
                return Ok(Reply { is_error: number >= FIRST_ERROR, text });
            }
        }
        Err(io::Error::other("the reply is too long"))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// BIRD with one protocol, `tidegate4`. Answers one connection, and returns its commands.
    fn serve_one(listener: &UnixListener) -> Vec<String> {
        let (stream, _) = listener.accept().unwrap();
        (&stream).write_all(b"0001 BIRD 2.0.12 ready.\n").unwrap();
        let mut commands = Vec::new();
        for line in BufReader::new(&stream).lines() {
            let line = line.unwrap();
            let reply = match line.as_str() {
                "show protocols tidegate4" => {
                    "2002-Name       Proto      Table      State  Since         Info\n\
                     1002-tidegate4  Static     master4    up     09:12:58.827  \n0000 \n"
                }
                "enable tidegate4" => "0011-tidegate4: enabled\n0000 \n",
                "disable tidegate4" => "0008-tidegate4: already disabled\n0000 \n",
                _ => "9001 syntax error, unexpected CF_SYM_UNDEFINED\n",
            };
            (&stream).write_all(reply.as_bytes()).unwrap();
            commands.push(line);
        }
        commands
    }

    fn bird(socket: &std::path::Path, protocol: &str) -> Bird {
        Bird::new(socket.to_owned(), vec![protocol.to_owned()], "EXAMPLE".to_owned())
    }

    #[test]
    fn protocols_are_enabled_and_disabled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bird.ctl");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            let server = scope.spawn(|| [(); 4].map(|()| serve_one(&listener)));
            let mut control = bird(&path, "tidegate4");
            control.prepare().unwrap();
            control.announce().unwrap();
            control.withdraw().unwrap();
            let commands = server.join().unwrap();
            assert_eq!(
                commands.concat(),
                [
                    "show protocols tidegate4",
                    "disable tidegate4",
                    "enable tidegate4",
                    "disable tidegate4"
                ]
            );
        });
    }

    #[test]
    fn missing_protocol_and_missing_daemon_are_errors_with_the_next_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bird.ctl");
        let mut control = bird(&path, "other");
        let error = control.prepare().unwrap_err().to_string();
        assert!(error.contains("start BIRD"), "{error}");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| serve_one(&listener));
            let error = control.prepare().unwrap_err().to_string();
            assert!(error.contains("syntax error") && error.ends_with("EXAMPLE"), "{error}");
        });
        // Ends without a reply.
        std::thread::scope(|scope| {
            scope.spawn(|| drop(listener.accept()));
            assert!(control.announce().is_err());
        });
    }

    #[test]
    fn example_has_a_protocol_for_each_family() {
        let addresses: Vec<IpAddr> =
            ["192.0.2.53", "2001:db8::53"].map(|a| a.parse().unwrap()).into();
        let names = ["tidegate4".to_owned(), "tidegate6".to_owned()];
        let lines = example(&names, "tidegate0", &addresses);
        assert!(
            lines.contains("static tidegate4 {\n  ipv4;\n  route 192.0.2.53/32 via \"tidegate0\";")
        );
        assert!(lines.contains("static tidegate6 {\n  ipv6;\n  route 2001:db8::53/128 via"));
        assert!(!example(&names, "tidegate0", &addresses[..1]).contains("ipv6"));
    }
}
