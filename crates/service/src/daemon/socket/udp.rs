//! Datagrams between an application's streams and a UDP socket of the stack.

use tidegate_engine::Engine;
use tidegate_memory::Arena;
use tidegate_memory::shared::PeerError;
use tidegate_stack::SendError;

use super::pending_datagram::PendingDatagram;
use super::{AppSocket, MIN_DATAGRAM_COST_BYTES, PollResult, SocketKind, UdpEndpoint};
use crate::ipc::datagram::{DatagramHeader, HEADER_BYTES, record_bytes};

const PADDING: [u8; 8] = [0; 8];

impl AppSocket {
    pub(super) fn poll_udp(
        &mut self,
        engine: &mut Engine,
        max_bytes: usize,
    ) -> Result<PollResult, PeerError> {
        let SocketKind::Udp(datagrams) = &mut self.kind else { return Ok(PollResult::default()) };
        let received = receive(datagrams, engine, || self.slot.poll_on_rx_space.request())?
            | pass_error_reports(datagrams, engine)?;
        let sent = send(datagrams, engine, max_bytes)?;
        let id = datagrams.id;
        let mut notify = received || sent.consumed && self.slot.notify_on_tx_space.take();
        let reported = engine.parts().0.udp_take_error(id).map(|error| error.kind());
        if let Some(kind) = reported.or(sent.failure) {
            notify |= self.set_error(kind);
        }
        if engine.needs_queue_levels() {
            engine.report_level(id);
        }
        let SendOutcome { device_full, has_more, cost_bytes, .. } = sent;
        Ok(PollResult {
            notify,
            device_full,
            has_more,
            taken_bytes: cost_bytes,
            ..PollResult::default()
        })
    }
}

/// Moves received datagrams to the application, as far as there is space. `wait` requests a
/// notification of new space.
fn receive(
    datagrams: &mut UdpEndpoint,
    engine: &mut Engine,
    wait: impl Fn(),
) -> Result<bool, PeerError> {
    let received_ns = engine.monotonic_ns();
    let (stack, arena, _) = engine.parts();
    let UdpEndpoint { id, to_app, pending, payload_bytes, .. } = datagrams;
    let mut received = false;
    let limit_bytes = stack.udp_options(*id).and_then(|options| options.queue_bytes);
    let mut next = |arena: &mut Arena| Some(PendingDatagram::Frame(stack.udp_recv(arena, *id)?));
    while let Some(datagram) = pending.take().or_else(|| next(arena)) {
        let bytes = datagram.bytes(arena);
        let len = bytes.len();
        // One datagram may exceed the limit by its header.
        let limit_bytes = limit_bytes.unwrap_or(usize::MAX).max(record_bytes(len));
        if to_app.space_within(limit_bytes)? < record_bytes(len) {
            wait();
            if to_app.space_within(limit_bytes)? < record_bytes(len) {
                *pending = Some(datagram);
                break;
            }
        }
        let head = datagram.header(len, received_ns);
        to_app.write(&head.to_bytes())?;
        to_app.write(bytes)?;
        to_app.write(&PADDING[..record_bytes(len) - HEADER_BYTES - len])?;
        datagram.release(arena);
        payload_bytes.to_app += len as u64;
        received = true;
    }
    to_app.publish();
    Ok(received)
}

/// Moves error reports to the application. As at the kernel, a report without space is lost.
fn pass_error_reports(datagrams: &mut UdpEndpoint, engine: &mut Engine) -> Result<bool, PeerError> {
    let UdpEndpoint { id, to_app, .. } = datagrams;
    let mut passed = false;
    while let Some(report) = engine.parts().0.udp_take_error_report(*id) {
        let len = report.payload.len();
        if to_app.space_within(usize::MAX)? < record_bytes(len) {
            continue;
        }
        to_app.write(&DatagramHeader::of_error_report(&report).to_bytes())?;
        to_app.write(&report.payload)?;
        to_app.write(&PADDING[..record_bytes(len) - HEADER_BYTES - len])?;
        passed = true;
    }
    if passed {
        to_app.publish();
    }
    Ok(passed)
}

/// Outcome of sending.
#[derive(Default)]
struct SendOutcome {
    /// Datagrams were taken from the application.
    consumed: bool,
    /// The device is full.
    device_full: bool,
    /// The application has written more than one poll takes.
    has_more: bool,
    /// Cost of the datagrams that were taken.
    cost_bytes: usize,
    /// Error of a datagram that was not sent.
    failure: Option<std::io::ErrorKind>,
}

/// Sends the datagrams that the application has written, up to a cost of `max_bytes`.
fn send(
    datagrams: &mut UdpEndpoint,
    engine: &mut Engine,
    max_bytes: usize,
) -> Result<SendOutcome, PeerError> {
    let (stack, arena, now_ns) = engine.parts();
    let UdpEndpoint { id, from_app, payload_bytes, .. } = datagrams;
    let mut sent = SendOutcome::default();
    // What the application writes meanwhile is for the next poll.
    let mut available = from_app.available()?;
    while available > 0 {
        if sent.cost_bytes >= max_bytes {
            sent.has_more = true;
            break;
        }
        let mut head = [0; HEADER_BYTES];
        from_app.peek(0, &mut head)?;
        let header = DatagramHeader::from_bytes(&head).ok_or(PeerError)?;
        let (DatagramHeader { len, remote, .. }, options) = (header, header.send_options());
        if available < record_bytes(len) {
            return Err(PeerError);
        }
        let frame = stack.udp_alloc(arena);
        let result = match frame {
            None => Err(SendError::WouldBlock),
            Some(mut frame) if arena.space(&frame) >= len => {
                arena.set_len(&mut frame, len);
                from_app.peek(HEADER_BYTES, arena.bytes_mut(&mut frame))?;
                stack.udp_send_frame(now_ns, arena, *id, remote, options, frame)
            }
            Some(frame) => {
                arena.free(frame);
                let mut payload = vec![0; len];
                from_app.peek(HEADER_BYTES, &mut payload)?;
                stack.udp_send(now_ns, arena, *id, remote, options, &payload)
            }
        };
        match result {
            Ok(()) => payload_bytes.from_app += len as u64,
            Err(SendError::WouldBlock) => {
                sent.device_full = true;
                break;
            }
            Err(error) => sent.failure = Some(error.kind()),
        }
        from_app.skip(record_bytes(len));
        available -= record_bytes(len);
        sent.consumed = true;
        sent.cost_bytes += len.max(MIN_DATAGRAM_COST_BYTES);
    }
    if sent.consumed {
        from_app.release();
    }
    Ok(sent)
}
