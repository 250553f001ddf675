//! Applications that use sockets in signal handlers.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use support::run::{ChildProcess, Daemon};
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root};

const ALARM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/alarm.c");
const BYTES: usize = 8_000_000;

/// Longest time without data.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Stream byte at this position: never a byte that the handler writes or the final newline.
fn byte(at: usize) -> u8 {
    b'a' + (at % 23) as u8
}

/// Sends [`BYTES`] bytes and receives them back, with the handler's bytes in between. Returns
/// how often the handler wrote: counted in the stream, and as reported by the program.
fn exchange_with_handler(testbed: &Testbed, address: &str) -> [usize; 2] {
    let mut stream =
        testbed.client().enter(|| TcpStream::connect((address, 7500))).unwrap().unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
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
    let reported = String::from_utf8_lossy(&got[end..]);
    [written, reported.trim().parse().unwrap()]
}

#[test]
fn signal_handler_can_use_sockets_while_its_thread_is_in_the_stack() {
    if !is_root("run_signals") || !has_programs("run_signals", &["cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("alarm");
    let program = program.to_str().unwrap();
    let mut compile = Command::new("cc");
    compile.args(["-O1", "-Wall", "-Werror", "-o", program, ALARM]);
    assert!(compile.status().unwrap().success());
    for mode in ["restart", "interrupt"] {
        let serves = |testbed: &Testbed, _program: ChildProcess| {
            for address in [SERVER_V4, SERVER_V6] {
                let [received, reported] = exchange_with_handler(testbed, address);
                assert!(
                    received > 0 && received == reported,
                    "{received} received, {reported} reported"
                );
            }
        };
        let testbed = Testbed::new(DeviceKind::Packet);
        serves(&testbed, testbed.run_server(&["--io", "packet"], &[program, mode], 7500));
        drop(testbed);
        let testbed = Testbed::new(DeviceKind::Packet);
        let daemon = Daemon::start(&testbed, &["--io", "packet"]);
        serves(&testbed, daemon.run_server(&[program, mode], 7500));
    }
}
