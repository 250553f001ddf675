//! Handover to another daemon: the part of the attach listener, which talks to that daemon.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;

use rustix::process::Signal;

use super::protocol::Predecessor;
use crate::daemon::core::inbox::InboxSender;
use crate::daemon::core::message::{CoreMessage, HandoverRequest};
use crate::daemon::log::Log;
use crate::ipc::handshake::send_refusal;

/// Hands everything over to another daemon. Meanwhile new connections wait in the backlog.
/// Returns true if the other daemon has taken over.
pub(in crate::daemon) fn offer_upgrade(
    connection: UnixStream,
    listener: &UnixListener,
    inbox: &InboxSender,
    log: &Log,
) -> io::Result<bool> {
    let credentials = rustix::net::sockopt::socket_peercred(&connection)?;
    let refuse = |why: &str| {
        // The peer may be gone.
        let _ = send_refusal(connection.as_fd(), why);
        io::Error::new(io::ErrorKind::PermissionDenied, format!("no upgrade: {why}"))
    };
    if !credentials.uid.is_root() && credentials.uid != rustix::process::geteuid() {
        return Err(refuse("only the daemon's own user and root may replace it"));
    }
    let (offer, offered) = mpsc::channel();
    let (outcome_sender, outcome) = mpsc::channel();
    inbox.send(CoreMessage::HandOver(HandoverRequest { offer, outcome }))?;
    let offered = offered.recv().map_err(|_| io::Error::other("the network core has ended"))?;
    let package = offered.map_err(|why| refuse(&why))?;
    let mut peer = Predecessor::new(connection)?;
    let handed_over = peer.hand_over(&package.state, listener, &package.fds.descriptors());
    let other_pid = credentials.pid.as_raw_nonzero().get().unsigned_abs();
    let successor = handed_over.is_ok().then_some(other_pid);
    if let Err(error) = handed_over {
        log(&format!("no upgrade: {error}; this daemon continues"));
        let own = rustix::process::getpid();
        if !peer.abort() && credentials.pid != own {
            // The peer holds what this daemon needs, and does not answer.
            let _ = rustix::process::kill_process(credentials.pid, Signal::KILL);
            peer.abort();
        }
    }
    // The core waits for this outcome; a core that has ended needs none.
    let _ = outcome_sender.send(successor);
    Ok(successor.is_some())
}
