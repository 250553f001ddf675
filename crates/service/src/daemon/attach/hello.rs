//! First message of a connection: an application that attaches, or a request.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tidegate_memory::shared::Region;

use super::bound_socket::{AttachConfig, BoundSocket};
use crate::daemon::application::Application;
use crate::daemon::core::cores::Cores;
use crate::daemon::core::message::CoreMessage;
use crate::daemon::ids::Identity;
use crate::daemon::log::Log;
use crate::daemon::quota::AppSettings;
use crate::daemon::transfer::request::{SearchTarget, TransferRequest};
use crate::daemon::upgrade::offer::offer_upgrade;
use crate::ipc::handshake::{Hello, receive_hello, send_refusal};
use crate::ipc::layout::SharedMemory;
use crate::ipc::takeover_token::TakeoverToken;

/// Time limit for the first message of a connection, and for each read and write of its handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);

/// Outcome of a connection's first message.
pub(super) enum HandshakeOutcome {
    /// The application was admitted, or the request was answered.
    Served,
    /// The peer has taken over from this daemon.
    Replaced,
}

/// Reads the first message, and sends the application to a core or answers the request.
pub(super) fn handle_hello(
    connection: UnixStream,
    socket: &BoundSocket,
    cores: &Cores,
    log: &Log,
) -> io::Result<HandshakeOutcome> {
    let config = &socket.config;
    connection.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
    connection.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
    let hello = receive_hello(connection.as_fd()).inspect_err(|error| {
        // The peer may be gone.
        let _ = send_refusal(connection.as_fd(), &error.to_string());
    })?;
    match hello {
        Hello::Attach(name) => {
            let app = create_application(connection, config, name, None)?;
            app.welcome(cores.count())?;
            cores.admit(cores.least_loaded(), app)?;
        }
        Hello::Inherit(token, name) => {
            // The core sends the welcome once the child has its sockets.
            let app = create_application(connection, config, name, Some(token))?;
            cores.admit(0, app)?;
        }
        Hello::Transfer(token, operation, descriptor) => {
            // Fails for a descriptor that is no socket.
            let cookie = rustix::net::sockopt::socket_cookie(&descriptor)?;
            let (search, hops) = (SearchTarget::Application, 0);
            let request =
                TransferRequest { connection, token, operation, descriptor, cookie, search, hops };
            cores.inbox(0).send(CoreMessage::Transfer(Box::new(request)))?;
        }
        Hello::Report => {
            let report = cores.report()?;
            (&connection).write_all(&serde_json::to_vec(&report)?)?;
        }
        Hello::Upgrade => {
            if offer_upgrade(connection, &socket.listener, cores.inbox(0), log)? {
                return Ok(HandshakeOutcome::Replaced);
            }
        }
    }
    Ok(HandshakeOutcome::Served)
}

/// Creates an application with its shared memory.
fn create_application(
    connection: UnixStream,
    config: &AttachConfig,
    name: String,
    parent_token: Option<TakeoverToken>,
) -> io::Result<Application> {
    let credentials = rustix::net::sockopt::socket_peercred(&connection)?;
    let pid = credentials.pid.as_raw_nonzero().get().unsigned_abs();
    let identity = Identity { pid, uid: credentials.uid.as_raw(), name };
    let control = Region::reserve(config.geometry.control_words())?;
    let data = Region::reserve(config.geometry.data_words())?;
    let memory = SharedMemory::new(config.geometry, control, data)?;
    let settings = AppSettings { coalescing: config.coalescing, quota: config.quota };
    Application::new(identity, memory, OwnedFd::from(connection), parent_token, settings)
}
