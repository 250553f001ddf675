//! Closing that waits until the peer has acknowledged everything (`SO_LINGER` with a time).

use std::net::Shutdown;
use std::time::{Duration, Instant};

use tidegate::TcpState;

use super::Socket;
use crate::sleeper::KernelWaiter;

/// Time between two looks at the connection: no event reports the acknowledgement of a FIN.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

impl Socket {
    /// Called when the program closes its last descriptor of the socket. If the program has set a
    /// time to linger, sends a FIN and waits until the peer has acknowledged the FIN or the time
    /// is over. A signal ends the wait.
    pub(crate) fn linger(&self) {
        let Some(seconds) = self.settings().linger_s() else { return };
        let Some(stream) = self.stream() else { return };
        // Unread data makes closing reset the connection.
        if self.readable_bytes().map_or(true, |unread| unread > 0)
            || stream.shutdown(Shutdown::Write).is_err()
        {
            return;
        }
        let is_unacknowledged = || {
            use TcpState::{CloseWait, Closing, Established, FinWait1, LastAck};
            let waiting = [Established, CloseWait, FinWait1, Closing, LastAck];
            stream.info().is_ok_and(|info| waiting.contains(&info.state))
        };
        let deadline = Instant::now() + Duration::from_secs(seconds.unsigned_abs().into());
        let mut signals = KernelWaiter::new(Vec::new(), None, true);
        while is_unacknowledged() {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let interval = Some(remaining.min(CHECK_INTERVAL));
            if remaining.is_zero() || self.net.wait(&[], interval, &mut signals).is_err() {
                return;
            }
        }
    }
}
