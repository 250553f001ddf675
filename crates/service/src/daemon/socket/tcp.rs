//! Byte streams between an application and a TCP connection of the stack.

use tidegate_engine::Engine;
use tidegate_memory::shared::PeerError;
use tidegate_stack::{Shutdown, TcpError, TcpState};

use super::{AppSocket, PollResult, SocketKind, TcpEndpoint};
use crate::ipc::status::{SocketState, Status};

impl TcpEndpoint {
    /// True if the application has not read all bytes that it was given. Invalid indices count as
    /// unread bytes.
    pub(in crate::daemon) fn has_unread(&mut self) -> bool {
        self.to_app.unread() != Ok(0)
    }
}

impl AppSocket {
    pub(super) fn poll_stream(
        &mut self,
        engine: &mut Engine,
        max_bytes: usize,
    ) -> Result<PollResult, PeerError> {
        let SocketKind::Stream(stream) = &mut self.kind else { return Ok(PollResult::default()) };
        let received =
            !stream.is_closed && receive(stream, engine, || self.slot.poll_on_rx_space.request())?;
        // Sending would discard the failure, together with the application's bytes.
        let failure = match engine.parts().0.tcp_take_error(stream.id) {
            // The application had ended its data, too, which waits here.
            Some(TcpError::ResetAfterEnd(peer)) if stream.shutdown_pending => {
                Some(TcpError::Reset(peer))
            }
            failure => failure,
        };
        let SendOutcome { taken, has_more, taken_bytes } = send(stream, engine, max_bytes)?;
        let id = stream.id;
        let is_done = stream.is_closed && stream.from_app.available()? == 0;
        let mut notify = received || taken && self.slot.notify_on_tx_space.take();
        let stack = engine.parts().0;
        let readiness = stack.tcp_readiness(id);
        let state = match stack.tcp_state(id) {
            Some(TcpState::SynSent | TcpState::SynReceived) => SocketState::Connecting,
            None | Some(TcpState::Closed | TcpState::TimeWait) if stack.tcp_readable(id) == 0 => {
                SocketState::Over
            }
            _ => SocketState::Connected,
        };
        // The end of the stream is reported after its last byte.
        let read_closed = stack.tcp_has_read_ended(id) && stack.tcp_readable(id) == 0;
        let write_closed = readiness.write_closed;
        if let Some(failure) = failure {
            notify |= self.set_error(failure.kind());
        }
        notify |= self.set_status(Status { state, read_closed, write_closed, ..self.status });
        Ok(PollResult { notify, is_done, has_more, taken_bytes, ..PollResult::default() })
    }
}

/// Outcome of sending.
#[derive(Default)]
struct SendOutcome {
    /// Bytes were taken from the application.
    taken: bool,
    /// Bytes that the connection has accepted.
    taken_bytes: usize,
    /// The connection would accept more than one poll takes.
    has_more: bool,
}

/// Moves received bytes to the application, as far as there is space. `wait` requests a
/// notification of new space.
fn receive(
    stream: &mut TcpEndpoint,
    engine: &mut Engine,
    wait: impl Fn(),
) -> Result<bool, PeerError> {
    let (stack, _, now_ns) = engine.parts();
    let TcpEndpoint { id, to_app, payload_bytes, .. } = stream;
    // The application's receive-buffer size limits the unread bytes.
    let limit = stack.tcp_options(*id).map_or(0, |options| options.receive_buffer_bytes as usize);
    let mut received = false;
    while stack.tcp_readable(*id) > 0 {
        if to_app.space_within(limit)? == 0 {
            wait();
            if to_app.space_within(limit)? == 0 {
                break;
            }
        }
        let mut written = Ok(0);
        let read = stack.tcp_recv_with(now_ns, *id, |bytes| {
            written = to_app.write_within(limit, bytes);
            written.unwrap_or(0)
        });
        written?;
        let Ok(len @ 1..) = read else { break };
        payload_bytes.to_app += len as u64;
        received = true;
    }
    to_app.publish();
    Ok(received)
}

/// Writes the application's bytes to the connection, as many as it accepts, up to `max_bytes`.
fn send(
    stream: &mut TcpEndpoint,
    engine: &mut Engine,
    max_bytes: usize,
) -> Result<SendOutcome, PeerError> {
    let (stack, arena, now_ns) = engine.parts();
    let TcpEndpoint { id, from_app, shutdown_pending, is_closed, payload_bytes, .. } = stream;
    let mut sent = SendOutcome::default();
    // What the application writes meanwhile is for the next poll.
    let mut available = from_app.available()?;
    let mut left = available.min(max_bytes);
    while left > 0 {
        let mut read = Ok(0);
        let wrote = stack.tcp_send_with(*id, left, |place| {
            read = from_app.read(place);
            read.unwrap_or(0)
        });
        read?;
        match wrote {
            Ok(len @ 1..) => {
                payload_bytes.from_app += len as u64;
                sent.taken_bytes += len;
                (left, available) = (left.saturating_sub(len), available.saturating_sub(len));
            }
            Ok(0) | Err(TcpError::WouldBlock) => break,
            Err(TcpError::NotConnected) if stack.tcp_state(*id) == Some(TcpState::SynSent) => break,
            // The connection has ended: discard the bytes.
            Err(_) => {
                from_app.skip(available);
                (left, available) = (0, 0);
            }
        }
        sent.taken = true;
    }
    sent.has_more = left == 0 && available > 0;
    if sent.taken {
        from_app.release();
    }
    if *shutdown_pending && !*is_closed && from_app.available()? == 0 {
        // A closed connection needs no shutdown.
        let _ = stack.tcp_shutdown(now_ns, arena, *id, Shutdown::Write);
        *shutdown_pending = false;
    }
    Ok(sent)
}
