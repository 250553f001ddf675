//! Handover to another daemon: the part of the attach listener, which talks to that daemon.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal};

use super::protocol::Predecessor;
use super::snapshot::STATE_FORMAT;
use crate::daemon::core::cores::Cores;
use crate::daemon::core::message::{CoreMessage, HandoverRequest};
use crate::daemon::log::Log;
use crate::daemon::peer::Peer;
use crate::ipc::handshake::send_refusal;

/// Time limit for the workers' jobs before a handover.
const WORKERS_TIMEOUT: Duration = Duration::from_millis(50);

/// Request of another daemon to take over.
pub(in crate::daemon) struct UpgradeRequest {
    pub(in crate::daemon) connection: UnixStream,
    pub(in crate::daemon) peer: Peer,
    /// Newest state format that the other daemon reads; 0 if it does not say so.
    pub(in crate::daemon) newest_format: u8,
}

/// Hands everything over to another daemon. Meanwhile new connections wait in the backlog.
/// Returns true if the other daemon has taken over.
pub(in crate::daemon) fn offer_upgrade(
    request: UpgradeRequest,
    listener: &UnixListener,
    cores: &Cores,
    log: &Log,
) -> io::Result<bool> {
    let UpgradeRequest { connection, peer, newest_format } = request;
    let refuse = |why: &str| {
        // The peer may be gone.
        let _ = send_refusal(connection.as_fd(), why);
        io::Error::new(io::ErrorKind::PermissionDenied, format!("no upgrade: {why}"))
    };
    if !Peer::is_privileged(peer.uid) {
        return Err(refuse("only the daemon's own user and root may replace it"));
    }
    // Before anything stops: the other daemon would refuse the state only after it was saved.
    if newest_format < STATE_FORMAT {
        let why = format!(
            "this daemon has state format {STATE_FORMAT}, and the other is of an older version that \
             does not read it: restart the daemon with the older version instead"
        );
        return Err(refuse(&why));
    }
    let (offer, offered) = mpsc::channel();
    let (outcome_sender, outcome) = mpsc::channel();
    cores.inbox(0).send(CoreMessage::HandOver(HandoverRequest { offer, outcome }))?;
    let offered = offered.recv().map_err(|_| io::Error::other("the network core has ended"))?;
    let package = offered.map_err(|why| refuse(&why))?;
    // The applications get the answers that workers send.
    cores.workers().wait_until_idle(WORKERS_TIMEOUT);
    let mut other = Predecessor::new(connection)?;
    let handed_over = other.hand_over(package.state.as_fd(), listener, &package.fds.descriptors());
    let successor = handed_over.is_ok().then_some(peer.pid.get());
    if let Err(error) = handed_over {
        log(&format!("no upgrade: {error}; this daemon continues"));
        let pid = i32::try_from(peer.pid.get()).ok().and_then(Pid::from_raw);
        if !other.abort()
            && let Some(pid) = pid.filter(|&pid| pid != rustix::process::getpid())
        {
            // The peer holds what this daemon needs, and does not answer.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            other.abort();
        }
    }
    // The core waits for this outcome; a core that has ended needs none.
    let _ = outcome_sender.send(successor);
    Ok(successor.is_some())
}
