//! First message of a connection: an application that attaches, or a request.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, PoisonError, RwLock, mpsc};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_cookie};
use tidegate_engine::BoundPort;
use tidegate_memory::Doorbell;
use tidegate_memory::shared::Region;

use super::bound_socket::AttachConfig;
use crate::daemon::application::Application;
use crate::daemon::attachment_counts::{AttachmentCounts, AttachmentLimits};
use crate::daemon::core::cores::Cores;
use crate::daemon::core::message::CoreMessage;
use crate::daemon::ids::Identity;
use crate::daemon::log::Log;
use crate::daemon::peer::Peer;
use crate::daemon::quota::AppSettings;
use crate::daemon::transfer::request::{SearchTarget, TransferRequest};
use crate::daemon::upgrade::offer::UpgradeRequest;
use crate::daemon::versions::Versions;
use crate::daemon::workers::AppFd;
use crate::ipc::event_fds::EventFds;
use crate::ipc::handshake::{Hello, TransferOperation, receive_hello, send_refusal, send_welcome};
use crate::ipc::layout::SharedMemory;
use crate::ipc::takeover_token::TakeoverToken;

/// Time limit for the first message of a connection, and for each read and write of its handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);

/// Handler of first messages, on the workers of the users.
pub(super) struct HelloHandler {
    pub(super) config: AttachConfig,
    pub(super) limits: AttachmentLimits,
    pub(super) attachments: AttachmentCounts,
    pub(super) cores: Arc<Cores>,
    pub(super) log: Log,
    /// Locked for writing during an upgrade, when no request may reach a core.
    pub(super) admission: RwLock<()>,
    /// Requests to take over, for the attach listener, which waits on the bell.
    pub(super) upgrades: mpsc::Sender<UpgradeRequest>,
    pub(super) upgrade_bell: Doorbell,
}

impl HelloHandler {
    /// Reads the first message, and sends the application to a core or answers the request.
    ///
    /// # Errors
    /// When the connection is rejected.
    pub(super) fn handle(&self, connection: &AppFd, peer: Peer) -> io::Result<()> {
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(connection, direction, Some(HANDSHAKE_TIMEOUT))?;
        }
        let (library, hello) = receive_hello(connection.as_fd()).inspect_err(|error| {
            // The peer may be gone.
            let _ = send_refusal(connection.as_fd(), &error.to_string());
        })?;
        let cores = &self.cores;
        let protocol = library.protocol;
        let identity = |name| Identity { pid: peer.pid.get(), uid: peer.uid, name, library };
        match hello {
            Hello::Attach(name) => {
                let app = self.create_application(connection, identity(name), None)?;
                let welcome = app.welcome(cores.count());
                self.while_admitting(|| {
                    cores.admit(cores.least_loaded(), app)?;
                    // Does not block: the connection is empty.
                    send_welcome(connection.as_fd(), protocol, &welcome)
                })
            }
            Hello::Inherit(token, name) => {
                // The core lets a worker send the welcome once the child has its sockets.
                let app = self.create_application(connection, identity(name), Some(token))?;
                self.while_admitting(|| cores.admit(0, app))
            }
            Hello::Transfer(token, operation, descriptor) => {
                let request = self.transfer_request(connection, token, operation, descriptor)?;
                let message = CoreMessage::Transfer(Box::new(request));
                self.while_admitting(|| cores.inbox(0).send(message))
            }
            Hello::Report => {
                let report = cores.report()?.of_daemon(Versions::own()).visible_to(peer.uid);
                let mut stream = UnixStream::from(connection.as_fd().try_clone_to_owned()?);
                stream.write_all(&serde_json::to_vec(&report)?)
            }
            Hello::Upgrade(newest_format) => {
                let connection = UnixStream::from(connection.as_fd().try_clone_to_owned()?);
                let request = UpgradeRequest { connection, peer, newest_format };
                let ended = |_| io::Error::other("the daemon is ending");
                self.upgrades.send(request).map_err(ended)?;
                self.upgrade_bell.ring();
                Ok(())
            }
        }
    }

    /// Sends to a core while no upgrade is in progress. `send` must not block.
    fn while_admitting(&self, send: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _admission = self.admission.read().unwrap_or_else(PoisonError::into_inner);
        send()
    }

    /// Examines the descriptor of a transfer request.
    fn transfer_request(
        &self,
        connection: &AppFd,
        token: TakeoverToken,
        operation: TransferOperation,
        descriptor: OwnedFd,
    ) -> io::Result<TransferRequest> {
        let descriptor = AppFd::new(descriptor, connection.uid(), self.cores.workers());
        // Fails for a descriptor that is no socket.
        let cookie = socket_cookie(&descriptor)?;
        let port = match operation {
            TransferOperation::ReservePort(_) => BoundPort::of(&descriptor).ok(),
            _ => None,
        };
        Ok(TransferRequest {
            connection: connection.clone(),
            token,
            operation,
            descriptor,
            port,
            cookie,
            search: SearchTarget::Application,
            hops: 0,
        })
    }

    /// Creates an application with its shared memory.
    fn create_application(
        &self,
        connection: &AppFd,
        identity: Identity,
        parent_token: Option<TakeoverToken>,
    ) -> io::Result<Application> {
        let AttachConfig { geometry, coalescing, quota, .. } = self.config;
        let count = self.attachments.admit(identity.uid, self.limits).inspect_err(|error| {
            // The peer may be gone.
            let _ = send_refusal(connection.as_fd(), &error.to_string());
        })?;
        let uid = identity.uid;
        let releaser = self.cores.workers().region_releaser(uid);
        let region =
            |words| io::Result::Ok(Region::reserve(words)?.released_by(Arc::clone(&releaser)));
        let (control, data) = (region(geometry.control_words())?, region(geometry.data_words())?);
        let memory = SharedMemory::new(geometry, control, data)?;
        let attachments = self.attachments.clone();
        let event_fds = EventFds::new()?.map(|fd| AppFd::new(fd, uid, self.cores.workers()));
        let settings = AppSettings { coalescing, quota, attachments };
        let connection = connection.clone();
        Application::new(identity, memory, connection, event_fds, parent_token, count, &settings)
    }
}
