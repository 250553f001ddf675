//! Upgrade of a daemon of another build to this one, while programs with the library of that build
//! are attached.
//!
//! `TIDEGATE_PREVIOUS` names the folder with that build's `tidegate` and `libtidegate_preload.so`;
//! `scripts/upgrade-from` makes one of an earlier commit.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use support::run::Daemon;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Server that returns what its connections send, on a port of both families.
const ECHO: &str = "
import socket, sys, threading
def echo(stream):
    while data := stream.recv(65536):
        stream.sendall(data)
    stream.close()
port = int(sys.argv[1])
server = socket.create_server(('::', port), family=socket.AF_INET6, dualstack_ipv6=True)
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
";

fn previous() -> Option<PathBuf> {
    let folder = std::env::var_os("TIDEGATE_PREVIOUS").map(PathBuf::from);
    if folder.is_none() {
        tidegate_needs::skip(
            "previous-build",
            "set TIDEGATE_PREVIOUS, or run scripts/upgrade-from",
        );
    }
    folder
}

/// Command of `program` in the server's namespace; the library is the one beside it.
fn run(daemon: &Daemon<'_>, program: &Path, port: u16) -> Command {
    let mut command = daemon.testbed().server().command(program);
    command.arg("run").arg("--socket").arg(daemon.socket());
    command.args(["--", "python3", "-c", ECHO, &port.to_string()]);
    command
}

/// Runs `program upgrade`; returns whether it succeeded, and what it has written.
fn upgrade(daemon: &Daemon<'_>, program: &Path) -> (bool, String) {
    let mut command = daemon.testbed().server().command(program);
    command.arg("upgrade").arg("--socket").arg(daemon.socket());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn connect(testbed: &Testbed, host: &str, port: u16) -> TcpStream {
    let address = SocketAddr::new(host.parse().unwrap(), port);
    let stream = testbed.client().enter(|| TcpStream::connect(address).unwrap()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn exchange(stream: &mut TcpStream, number: usize, len: usize) {
    let sent: Vec<u8> = (0..len).map(|n| (n ^ number) as u8).collect();
    stream.write_all(&sent).unwrap();
    let mut received = vec![0; len];
    stream.read_exact(&mut received).unwrap();
    assert!(sent == received, "exchange {number}");
}

/// Ends the daemon that has taken over, however the test ends.
struct EndDaemon<'d, 's>(&'d Daemon<'s>);

impl Drop for EndDaemon<'_, '_> {
    fn drop(&mut self) {
        let report = tidegate_service::daemon::DaemonReport::query(&self.0.socket());
        let pid = report.ok().and_then(|report| i32::try_from(report.pid).ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

#[test]
fn connections_of_previous_programs_survive_upgrade() {
    let Some(folder) = previous() else { return };
    if !is_root("upgrade from a previous version")
        || !has_programs("upgrade from a previous version", &["python3"])
    {
        return;
    }
    let addresses = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
    let own = ["--address", &addresses[0], "--address", &addresses[1], "--cores", "2"];
    for flags in [&own[..], &["--shared"]] {
        let testbed = match flags {
            ["--shared"] => Testbed::shared(),
            _ => Testbed::new(DeviceKind::Xdp),
        };
        check_upgrade(&testbed, &folder.join("tidegate"), flags);
    }
}

fn check_upgrade(testbed: &Testbed, previous: &Path, flags: &[&str]) {
    let current = Path::new(env!("CARGO_BIN_EXE_tidegate"));
    // The library of this build, beside its program.
    support::run::library();
    let daemon = Daemon::start_program(previous, testbed, flags);
    let _end = EndDaemon(&daemon);
    let _server = testbed.wait_for_server(&mut run(&daemon, previous, 7), 7);
    let hosts = [SERVER_V4, SERVER_V6];
    let mut silent = hosts.map(|host| connect(testbed, host, 7));
    silent.iter_mut().for_each(|stream| exchange(stream, 1, 100));
    let is_finished = &AtomicBool::new(false);
    let mut others = Vec::new();
    std::thread::scope(|scope| {
        let busy = hosts.map(|host| {
            let mut stream = connect(testbed, host, 7);
            scope.spawn(move || {
                let mut exchanges = 0;
                while !is_finished.load(Ordering::Relaxed) {
                    exchange(&mut stream, exchanges, 1 + exchanges * 97 % 30_000);
                    exchanges += 1;
                }
                exchanges
            })
        });
        // From the previous version to this one, and on.
        for round in 0..2 {
            let (is_done, text) = upgrade(&daemon, current);
            eprintln!("{flags:?}: {text}");
            assert!(is_done, "{flags:?}: {text}");
            assert!(text.contains("state format"), "{text}");
            silent.iter_mut().for_each(|stream| exchange(stream, round, 50_000));
        }
        // New attachments of both versions.
        for (program, port) in [(previous, 8), (current, 9)] {
            others.push(testbed.wait_for_server(&mut run(&daemon, program, port), port));
            for host in hosts {
                exchange(&mut connect(testbed, host, port), 2, 50_000);
            }
        }
        // Back to the previous version, unless it reads the same state.
        let (is_done, text) = upgrade(&daemon, previous);
        eprintln!("{flags:?}: {text}");
        assert!(is_done || text.contains("state format"), "{text}");
        silent.iter_mut().for_each(|stream| exchange(stream, 3, 50_000));
        for host in hosts {
            exchange(&mut connect(testbed, host, 7), 4, 50_000);
        }
        is_finished.store(true, Ordering::Relaxed);
        for busy in busy {
            let exchanges = busy.join().unwrap();
            eprintln!("{flags:?}: {exchanges} exchanges of the busy connection");
            assert!(exchanges > 0);
        }
    });
}
