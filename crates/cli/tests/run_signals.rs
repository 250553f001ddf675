//! Programs whose handlers of signals use their sockets.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use support::run::{Daemon, Program};
use support::{Kind, SERVER_V4, SERVER_V6, Site, have, is_root};

const ALARM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/alarm.c");
const BYTES: usize = 8_000_000;

/// How long nothing may come.
const LIMIT: Duration = Duration::from_secs(30);

/// A byte of the stream: none that a handler writes, or that ends the stream.
fn byte(at: usize) -> u8 {
    b'a' + (at % 23) as u8
}

/// Sends much and gets it back, with what the handler writes in between. Gives how often
/// it has written, by what came and by what the program says.
fn echo(site: &Site, address: &str) -> [usize; 2] {
    let mut stream = site.client().enter(|| TcpStream::connect((address, 7500))).unwrap().unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    let mut sender = stream.try_clone().unwrap();
    let send = std::thread::spawn(move || {
        let data: Vec<u8> = (0..BYTES).map(byte).collect();
        sender.write_all(&data).unwrap();
        sender.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    send.join().unwrap();
    let end = got.iter().position(|&byte| byte == b'\n').unwrap();
    let written = got[..end].iter().filter(|&&byte| byte == b'!').count();
    let echoed = got[..end].iter().filter(|&&byte| byte != b'!');
    assert!(echoed.copied().eq((0..BYTES).map(byte)), "{address}");
    let told = String::from_utf8_lossy(&got[end..]);
    [written, told.trim().parse().unwrap()]
}

#[test]
fn a_handler_uses_a_socket_while_its_thread_is_in_the_stack() {
    if !is_root("run_signals") || !have("run_signals", &["cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("alarm");
    let program = program.to_str().unwrap();
    let mut compile = Command::new("cc");
    compile.args(["-O1", "-Wall", "-Werror", "-o", program, ALARM]);
    assert!(compile.status().unwrap().success());
    for how in ["restart", "interrupt"] {
        let serves = |site: &Site, _program: Program| {
            for address in [SERVER_V4, SERVER_V6] {
                let [came, told] = echo(site, address);
                assert!(came > 0 && came == told, "{came} came, {told} were written");
            }
        };
        let site = Site::new(Kind::Packet);
        serves(&site, site.run_server(&["--port", "packet"], &[program, how], 7500));
        drop(site);
        let site = Site::new(Kind::Packet);
        let daemon = Daemon::start(&site, &["--port", "packet"]);
        serves(&site, daemon.run_server(&[program, how], 7500));
    }
}
