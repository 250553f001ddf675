//! Response bodies.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};

use super::exchange::Exchange;

/// Files and ranges up to this size are read at once.
const SMALL_FILE_BYTES: u64 = 16 << 10;

/// Bytes of a file read at a time where no [`Exchange`] says otherwise.
const PIECE_BYTES: usize = 16 << 10;

/// Body of a response.
#[derive(Debug)]
pub enum ResponseBody {
    /// Bytes in memory; `None` when empty or already sent.
    Full(Option<Bytes>),
    /// Range of a file, read while it is sent.
    File(FileRange),
    /// Request body, sent back.
    Echo(RequestEcho),
}

/// Range of a file that is still to be sent.
#[derive(Debug)]
pub struct FileRange {
    file: File,
    offset: u64,
    remaining: u64,
    exchange: Option<Arc<Exchange>>,
}

/// Request body on its way back.
#[derive(Debug)]
pub struct RequestEcho {
    request: Incoming,
    exchange: Option<Arc<Exchange>>,
}

impl ResponseBody {
    /// Body without bytes.
    pub fn empty() -> Self {
        Self::Full(None)
    }

    /// Body of these bytes.
    pub fn bytes(bytes: impl Into<Bytes>) -> Self {
        Self::Full(Some(bytes.into()))
    }

    /// Body of `len` bytes of the file from offset `start` on; short ranges are read at once.
    pub(super) fn file(file: File, start: u64, len: u64) -> io::Result<Self> {
        if len > SMALL_FILE_BYTES {
            let range = FileRange { file, offset: start, remaining: len, exchange: None };
            return Ok(Self::File(range));
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, start)?;
        Ok(Self::bytes(bytes))
    }

    /// Body that sends `request` back without buffering all of it.
    pub(super) fn echo(request: Incoming) -> Self {
        Self::Echo(RequestEcho { request, exchange: None })
    }

    /// Connects the body to the state of its connection.
    pub(super) fn attach(&mut self, exchange: &Arc<Exchange>) {
        match self {
            Self::Full(_) => {}
            Self::File(range) => range.exchange = Some(Arc::clone(exchange)),
            Self::Echo(echo) => {
                if !echo.request.is_end_stream() {
                    exchange.begin_echo();
                }
                echo.exchange = Some(Arc::clone(exchange));
            }
        }
    }
}

impl FileRange {
    /// Reads the next piece. A file that was truncated meanwhile closes the connection, since the
    /// response has announced more bytes.
    fn read(&mut self) -> io::Result<Bytes> {
        let max = self.exchange.as_ref().map_or(PIECE_BYTES, |exchange| exchange.next_piece());
        let len = self.remaining.min(max as u64);
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, self.offset)?;
        (self.offset, self.remaining) = (self.offset + len, self.remaining - len);
        Ok(bytes.into())
    }
}

impl RequestEcho {
    fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let frame = Pin::new(&mut self.request).poll_frame(context).map_err(io::Error::other);
        let has_ended = matches!(frame, Poll::Ready(None | Some(Err(_))));
        if has_ended || self.request.is_end_stream() {
            self.end_body();
        }
        frame
    }

    fn end_body(&self) {
        if let Some(exchange) = &self.exchange {
            exchange.end_body();
        }
    }
}

impl Drop for RequestEcho {
    fn drop(&mut self) {
        self.end_body();
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match self.get_mut() {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::File(part) if part.remaining == 0 => Poll::Ready(None),
            Self::File(part) => Poll::Ready(Some(part.read().map(Frame::data))),
            Self::Echo(echo) => echo.poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_none(),
            Self::File(part) => part.remaining == 0,
            Self::Echo(echo) => echo.request.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::File(part) => SizeHint::with_exact(part.remaining),
            Self::Echo(echo) => echo.request.size_hint(),
        }
    }
}
