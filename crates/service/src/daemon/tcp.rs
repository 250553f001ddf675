//! Bytes between an application's streams and a connection of the stack.

use tidegate_engine::Engine;
use tidegate_memory::shared::Broken;
use tidegate_stack::{Shutdown, TcpError, TcpState};

use super::socket::{Kind, Looked, Socket, Stream};
use crate::contract::status::{Phase, Status};

impl Socket {
    pub(super) fn look_at_stream(&mut self, engine: &mut Engine) -> Result<Looked, Broken> {
        let Kind::Stream(stream) = &mut self.kind else { return Ok(Looked::default()) };
        let received = !stream.is_closed && receive(stream, engine, || self.place.space.ask())?;
        let took = send(stream, engine)?;
        let id = stream.id;
        let is_done = stream.is_closed && stream.from_app.available()? == 0;
        let mut tell = received || took && self.place.room.take();
        let stack = engine.parts().0;
        let readiness = stack.tcp_readiness(id);
        let phase = match stack.tcp_state(id) {
            Some(TcpState::SynSent | TcpState::SynReceived) => Phase::Connecting,
            None | Some(TcpState::Closed) if stack.tcp_readable(id) == 0 => Phase::Over,
            _ => Phase::Connected,
        };
        // The end comes after what is still to be moved.
        let read_closed = readiness.read_closed && stack.tcp_readable(id) == 0;
        let write_closed = readiness.write_closed;
        if let Some(error) = stack.tcp_take_error(id) {
            tell |= self.set_error(error.kind());
        }
        tell |= self.set_status(Status { phase, read_closed, write_closed, ..self.status });
        Ok(Looked { tell, is_done, ..Looked::default() })
    }
}

/// Moves bytes to the application, as many as it has room for. `wait` asks to
/// be told of more room.
fn receive(stream: &mut Stream, engine: &mut Engine, wait: impl Fn()) -> Result<bool, Broken> {
    let (stack, _, now_ns) = engine.parts();
    let Stream { id, to_app, moved, .. } = stream;
    // No more than the program wants to have unread.
    let limit = stack.tcp_options(*id).map_or(0, |options| options.receive_buffer_bytes as usize);
    let mut received = false;
    while stack.tcp_readable(*id) > 0 {
        if to_app.room_within(limit)? == 0 {
            wait();
            if to_app.room_within(limit)? == 0 {
                break;
            }
        }
        let mut written = Ok(0);
        let read = stack.tcp_read_with(now_ns, *id, |bytes| {
            written = to_app.write_within(limit, bytes);
            written.unwrap_or(0)
        });
        written?;
        let Ok(len @ 1..) = read else { break };
        moved.to_app += len as u64;
        received = true;
    }
    to_app.publish();
    Ok(received)
}

/// Hands what the application has written to the connection, as much as it
/// takes. Whether it took any.
fn send(stream: &mut Stream, engine: &mut Engine) -> Result<bool, Broken> {
    let (stack, arena, now_ns) = engine.parts();
    let Stream { id, from_app, is_shut, is_closed, moved, .. } = stream;
    let mut took = false;
    loop {
        let available = from_app.available()?;
        if available == 0 {
            break;
        }
        let mut read = Ok(0);
        let wrote = stack.tcp_write_with(now_ns, *id, available, |place| {
            read = from_app.read(place);
            read.unwrap_or(0)
        });
        read?;
        match wrote {
            Ok(len) => moved.from_app += len as u64,
            Err(TcpError::WouldBlock) => break,
            Err(TcpError::NotConnected) if stack.tcp_state(*id) == Some(TcpState::SynSent) => break,
            // Nobody will ever want it.
            Err(_) => from_app.skip(available),
        }
        took = true;
    }
    if took {
        from_app.release();
    }
    if *is_shut && !*is_closed && from_app.available()? == 0 {
        // One that is over already needs no end.
        let _ = stack.tcp_shutdown(now_ns, arena, *id, Shutdown::Write);
        *is_shut = false;
    }
    Ok(took)
}
