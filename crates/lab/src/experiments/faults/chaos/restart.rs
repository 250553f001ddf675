//! Kill and restart of the daemon.

use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use tidegate::{Net, TcpStream, UdpSocket};

use super::echo_checker::EchoChecker;
use super::peers::REPLY_TIMEOUT;
use super::testbed::{ChaosTestbed, daemon_address, datagram_server, stream_server};
use crate::LabError;

/// Time after which an application that has not noticed the daemon's end counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_secs(20);

/// Application that signals when it starts to wait for data that never arrives, and returns the
/// result of that call.
type Waiter = fn(&Path, &mpsc::Sender<()>) -> io::Result<()>;

/// Result of the restart.
pub(super) struct RestartResults {
    /// Time from the kill until the last application noticed that the daemon had ended.
    pub(super) noticed: Duration,
    /// Time from the start of the new daemon until an application received a reply through it.
    pub(super) restarted: Duration,
    /// Number of applications that never noticed that the daemon had ended.
    pub(super) hung: usize,
}

/// Kills the daemon while applications are blocked, and starts it again.
pub(super) fn run(testbed: &ChaosTestbed) -> Result<RestartResults, LabError> {
    let (blocks, blocking) = mpsc::channel();
    let (reports, reported) = mpsc::channel();
    let waiters: [Waiter; 3] = [wait_for_datagram, wait_for_bytes, write_bytes];
    for waiter in waiters {
        let (path, blocks, reports) = (testbed.socket(), blocks.clone(), reports.clone());
        // The thread is not joined: a hung application would block the experiment.
        thread::spawn(move || {
            let result = waiter(&path, &blocks);
            drop(blocks);
            // The receiver may be gone if the application took too long.
            let _ = reports.send(result);
        });
    }
    for _ in waiters {
        blocking.recv_timeout(HANG_TIMEOUT).map_err(|_| {
            LabError::Config("the applications could not attach to the daemon".to_owned())
        })?;
    }
    let began = Instant::now();
    testbed.kill_daemon()?;
    let mut noticed = Duration::ZERO;
    let mut hung = 0;
    for _ in waiters {
        match reported.recv_timeout(HANG_TIMEOUT.saturating_sub(began.elapsed())) {
            Ok(Err(_)) => noticed = began.elapsed(),
            Ok(Ok(())) => {
                return Err(LabError::Config(
                    "an application received no error although the daemon was killed".into(),
                ));
            }
            Err(_) => hung += 1,
        }
    }
    let began = Instant::now();
    testbed.start_daemon()?;
    let check_reply = || {
        let net = Net::attach(testbed.socket(), "after")?;
        let socket = UdpSocket::bind(&net, (daemon_address(0), 0))?;
        socket.set_read_timeout(Some(REPLY_TIMEOUT))?;
        let mut checker = EchoChecker::new(1);
        socket.send_to(checker.next_piece(100), datagram_server(0))?;
        let mut received = [0; 2048];
        let (len, _) = socket.recv_from(&mut received)?;
        checker.check(&received[..len])
    };
    check_reply().map_err(LabError::io("the restarted daemon does not serve"))?;
    Ok(RestartResults { noticed, restarted: began.elapsed(), hung })
}

fn wait_for_datagram(path: &Path, blocks: &mpsc::Sender<()>) -> io::Result<()> {
    let net = Net::attach(path, "waiter")?;
    let socket = UdpSocket::bind(&net, (daemon_address(0), 0))?;
    // The receiver waits for this signal with a time limit.
    let _ = blocks.send(());
    socket.recv_from(&mut [0; 64]).map(|_| ())
}

fn wait_for_bytes(path: &Path, blocks: &mpsc::Sender<()>) -> io::Result<()> {
    let net = Net::attach(path, "waiter")?;
    let stream = TcpStream::connect_timeout(&net, stream_server(1), REPLY_TIMEOUT)?;
    let _ = blocks.send(());
    stream.recv(&mut [0; 64]).map(|_| ())
}

fn write_bytes(path: &Path, blocks: &mpsc::Sender<()>) -> io::Result<()> {
    let net = Net::attach(path, "waiter")?;
    let stream = TcpStream::connect_timeout(&net, stream_server(0), REPLY_TIMEOUT)?;
    let _ = blocks.send(());
    // Sends until the buffers are full and the call blocks, and then until it fails.
    loop {
        stream.send(&[7; 1024])?;
    }
}
