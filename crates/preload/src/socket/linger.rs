//! Closing that waits until the peer has acknowledged everything (`SO_LINGER` with a time).

use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::TcpState;

use super::{Endpoint, Socket, Stream};
use crate::fd_table::{self, InUse};
use crate::runtime;
use crate::sleeper::KernelWaiter;

/// Time between two looks at the connection: no event reports the acknowledgement of a FIN.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Connection whose last descriptor is being closed, and whose closing waits.
pub(crate) struct LingeringSocket {
    socket: InUse<Arc<Socket>>,
    limit: Duration,
}

impl LingeringSocket {
    /// Called before a descriptor is closed; `None` if closing does not wait.
    pub(crate) fn begin(fd: i32) -> Option<Self> {
        let socket = fd_table::socket(fd).filter(|_| !runtime::is_child())?;
        let limit = stream_of(&socket)?.linger.get()?;
        let is_same = |&other: &i32| {
            other != fd && fd_table::socket(other).is_some_and(|one| Arc::ptr_eq(&one, &socket))
        };
        let is_last = !socket.has_other_holders()
            && !fd_table::range(0, u32::MAX).any(|other| is_same(&other));
        // Unread data makes closing reset the connection.
        let resets = socket.readable_bytes().map_or(true, |unread| unread > 0);
        (is_last && !resets).then_some(Self { socket, limit })
    }

    /// Sends a FIN, and waits until the peer has acknowledged the FIN or the time is over. A
    /// signal ends the wait.
    pub(crate) fn finish(self) {
        let Some(stream) = stream_of(&self.socket) else { return };
        let deadline = Instant::now() + self.limit;
        if stream.shutdown(Shutdown::Write).is_err() {
            return;
        }
        let mut signals = KernelWaiter::new(Vec::new(), None);
        while is_unacknowledged(stream) {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let interval = Some(remaining.min(CHECK_INTERVAL));
            if remaining.is_zero() || self.socket.net.wait(&[], interval, &mut signals).is_err() {
                return;
            }
        }
    }
}

fn stream_of(socket: &Socket) -> Option<&Stream> {
    match &*socket.endpoint {
        Endpoint::Stream(stream) => Some(stream),
        Endpoint::Listener(_) | Endpoint::Udp(_) => None,
    }
}

/// True while the peer has not acknowledged our FIN.
fn is_unacknowledged(stream: &Stream) -> bool {
    let waiting = [
        TcpState::Established,
        TcpState::CloseWait,
        TcpState::FinWait1,
        TcpState::Closing,
        TcpState::LastAck,
    ];
    stream.stream.info().is_ok_and(|info| waiting.contains(&info.state))
}
