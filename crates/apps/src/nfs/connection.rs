//! Task of one connection.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};

use super::connections::ConnectionEntry;
use super::records::Records;
use super::service::NfsService;

/// Bytes of replies from which on they are sent before the next call is answered.
const TURN_BYTES: usize = 128 << 10;

/// Bytes received at a time.
const RECEIVE_BYTES: usize = 16 << 10;

/// Answers calls until the client closes the connection, a limit is reached, or the stream holds
/// something else than calls. While replies are unsent nothing is read, so a client that does not
/// take its replies costs few of them.
pub(super) async fn serve_connection(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    service: Arc<NfsService>,
    entry: ConnectionEntry,
) -> io::Result<()> {
    let mut records = Records::default();
    let mut replies = Vec::new();
    let mut waiting_since = Instant::now();
    loop {
        let limits = service.limits();
        respond(&service, &mut records, &mut replies)?;
        if replies.is_empty() {
            // A call has its time limit from its first byte on.
            let limit = match records.has_partial() {
                true => limits.progress_timeout,
                false => limits.idle_timeout,
            };
            let was_idle = !records.has_partial();
            timeout_at(waiting_since + limit, receive(&mut stream, &mut records)).await??;
            if was_idle {
                waiting_since = Instant::now();
            }
        } else {
            entry.on_progress(replies.capacity(), &limits);
            timeout(limits.progress_timeout, stream.write_all(&replies)).await??;
            replies = Vec::new();
            entry.on_progress(0, &limits);
            waiting_since = Instant::now();
        }
    }
}

/// Answers received calls, until there are enough replies to send.
fn respond(service: &NfsService, records: &mut Records, replies: &mut Vec<u8>) -> io::Result<()> {
    while replies.len() < TURN_BYTES {
        let Some(call) = records.next().map_err(|_| ErrorKind::InvalidData)? else { break };
        service.respond(call, replies).map_err(|_| ErrorKind::InvalidData)?;
    }
    Ok(())
}

/// Waits for bytes.
async fn receive(stream: &mut (impl AsyncRead + Unpin), records: &mut Records) -> io::Result<()> {
    let buffer = records.buffer();
    buffer.reserve(RECEIVE_BYTES);
    match stream.read_buf(buffer).await? {
        0 => Err(ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}
