//! The daemon itself is killed.

use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use tidegate::{Net, TcpStream, UdpSocket};

use super::data::Numbers;
use super::peers::PATIENCE;
use super::site::{Site, datagrams_at, own, streams_at};
use crate::LabError;

/// One that has heard nothing after so long hangs.
const HANGS_AFTER: Duration = Duration::from_secs(20);

/// An application that says when it waits for what will never come, and what
/// ended that.
type Waiter = fn(&Path, &mpsc::Sender<()>) -> io::Result<()>;

/// What came of it.
pub(super) struct Restarted {
    /// When the last application knew that the daemon had ended.
    pub(super) noticed: Duration,
    /// When an application of the new daemon had an answer.
    pub(super) restarted: Duration,
    /// Applications that never heard of it.
    pub(super) hung: usize,
}

/// Kills the daemon under applications that wait, and starts it again.
pub(super) fn run(site: &Site) -> Result<Restarted, LabError> {
    let (waits, waiting) = mpsc::channel();
    let (knows, known) = mpsc::channel();
    let waiters: [Waiter; 3] = [wait_for_datagram, wait_for_bytes, write_bytes];
    for wait in waiters {
        let (path, waits, knows) = (site.socket(), waits.clone(), knows.clone());
        // Not joined: one that hangs would hang us.
        thread::spawn(move || {
            let ended = wait(&path, &waits);
            drop(waits);
            // Nobody listens any more when it took too long.
            let _ = knows.send(ended);
        });
    }
    for _ in waiters {
        waiting
            .recv_timeout(HANGS_AFTER)
            .map_err(|_| LabError::Config("applications cannot attach".to_owned()))?;
    }
    let began = Instant::now();
    site.kill_daemon()?;
    let mut noticed = Duration::ZERO;
    let mut hung = 0;
    for _ in waiters {
        match known.recv_timeout(HANGS_AFTER.saturating_sub(began.elapsed())) {
            Ok(Err(_)) => noticed = began.elapsed(),
            Ok(Ok(())) => {
                return Err(LabError::Config(
                    "an application took a dead daemon's end for good".into(),
                ));
            }
            Err(_) => hung += 1,
        }
    }
    let began = Instant::now();
    site.start_daemon()?;
    let answered = || {
        let net = Net::attach(site.socket(), "after")?;
        let socket = UdpSocket::bind(&net, (own(0), 0))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut numbers = Numbers::new(1);
        socket.send_to(numbers.next(100), datagrams_at(0))?;
        let mut came = [0; 2048];
        let (len, _) = socket.recv_from(&mut came)?;
        numbers.check(&came[..len])
    };
    answered().map_err(LabError::io("the daemon that was started again does not serve"))?;
    Ok(Restarted { noticed, restarted: began.elapsed(), hung })
}

fn wait_for_datagram(path: &Path, waits: &mpsc::Sender<()>) -> io::Result<()> {
    let net = Net::attach(path, "waiter")?;
    let socket = UdpSocket::bind(&net, (own(0), 0))?;
    // Who asked has a limit of its own.
    let _ = waits.send(());
    socket.recv_from(&mut [0; 64]).map(|_| ())
}

fn wait_for_bytes(path: &Path, waits: &mpsc::Sender<()>) -> io::Result<()> {
    let net = Net::attach(path, "waiter")?;
    let stream = TcpStream::connect_timeout(&net, streams_at(1), PATIENCE)?;
    let _ = waits.send(());
    stream.recv(&mut [0; 64]).map(|_| ())
}

fn write_bytes(path: &Path, waits: &mpsc::Sender<()>) -> io::Result<()> {
    let net = Net::attach(path, "waiter")?;
    let stream = TcpStream::connect_timeout(&net, streams_at(0), PATIENCE)?;
    let _ = waits.send(());
    // Until nothing takes it any more, and then until there is an error.
    loop {
        stream.send(&[7; 1024])?;
    }
}
