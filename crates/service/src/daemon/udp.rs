//! Datagrams between an application's streams and the stack.

use tidegate_engine::Engine;
use tidegate_memory::Arena;
use tidegate_memory::shared::Broken;
use tidegate_stack::SendError;

use super::held::Held;
use super::socket::{Datagrams, Kind, Looked, Socket};
use crate::contract::datagram::{HEAD_BYTES, Head, record_bytes};

const PADDING: [u8; 8] = [0; 8];

impl Socket {
    pub(super) fn look_at_datagrams(&mut self, engine: &mut Engine) -> Result<Looked, Broken> {
        let Kind::Datagrams(datagrams) = &mut self.kind else { return Ok(Looked::default()) };
        let received = receive(datagrams, engine, || self.place.space.ask())?;
        let sent = send(datagrams, engine)?;
        let id = datagrams.id;
        let mut tell = received || sent.took && self.place.room.take();
        let reported = engine.parts().0.udp_take_error(id).map(|error| error.kind());
        if let Some(kind) = reported.or(sent.failure) {
            tell |= self.set_error(kind);
        }
        if engine.wants_levels() {
            engine.tell_level(id);
        }
        Ok(Looked { tell, again: sent.is_full, ..Looked::default() })
    }
}

/// Moves datagrams to the application, as many as it has room for. `wait` asks
/// to be told of more room.
fn receive(
    datagrams: &mut Datagrams,
    engine: &mut Engine,
    wait: impl Fn(),
) -> Result<bool, Broken> {
    let (stack, arena, _) = engine.parts();
    let Datagrams { id, to_app, held, moved, .. } = datagrams;
    let mut received = false;
    let mut next = |arena: &mut Arena| Some(Held::Frame(stack.udp_receive(arena, *id)?));
    while let Some(datagram) = held.take().or_else(|| next(arena)) {
        let bytes = datagram.bytes(arena);
        let len = bytes.len();
        if to_app.room()? < record_bytes(len) {
            wait();
            if to_app.room()? < record_bytes(len) {
                *held = Some(datagram);
                break;
            }
        }
        let head = datagram.head(len);
        to_app.write(&head.to_bytes())?;
        to_app.write(bytes)?;
        to_app.write(&PADDING[..record_bytes(len) - HEAD_BYTES - len])?;
        datagram.release(arena);
        moved.to_app += len as u64;
        received = true;
    }
    to_app.publish();
    Ok(received)
}

/// What came of sending.
#[derive(Default)]
struct Sent {
    /// Something was taken from the application.
    took: bool,
    /// The port is full.
    is_full: bool,
    /// Why a datagram was not sent.
    failure: Option<std::io::ErrorKind>,
}

/// Sends what the application has written.
fn send(datagrams: &mut Datagrams, engine: &mut Engine) -> Result<Sent, Broken> {
    let (stack, arena, now_ns) = engine.parts();
    let Datagrams { id, from_app, moved, .. } = datagrams;
    let mut sent = Sent::default();
    loop {
        let available = from_app.available()?;
        if available == 0 {
            break;
        }
        let mut head = [0; HEAD_BYTES];
        from_app.peek(0, &mut head)?;
        let Head { len, remote, local } = Head::from_bytes(&head).ok_or(Broken)?;
        if available < record_bytes(len) {
            return Err(Broken);
        }
        let frame = stack.udp_alloc(arena);
        let result = match frame {
            None => Err(SendError::WouldBlock),
            Some(mut frame) if arena.room(&frame) >= len => {
                arena.set_len(&mut frame, len);
                from_app.peek(HEAD_BYTES, arena.bytes_mut(&mut frame))?;
                stack.udp_send_frame(now_ns, arena, *id, remote, local, frame)
            }
            Some(frame) => {
                arena.free(frame);
                let mut payload = vec![0; len];
                from_app.peek(HEAD_BYTES, &mut payload)?;
                stack.udp_send(now_ns, arena, *id, remote, local, &payload)
            }
        };
        match result {
            Ok(()) => moved.from_app += len as u64,
            Err(SendError::WouldBlock) => {
                sent.is_full = true;
                break;
            }
            Err(error) => sent.failure = Some(error.kind()),
        }
        from_app.skip(record_bytes(len));
        sent.took = true;
    }
    if sent.took {
        from_app.release();
    }
    Ok(sent)
}
