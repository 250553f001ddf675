//! Response bodies.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};

/// Bytes of a file read at a time; shorter ranges are read at once.
const FILE_READ_BYTES: u64 = 64 << 10;

/// Body of a response.
#[derive(Debug)]
pub enum ResponseBody {
    /// Bytes in memory; `None` when empty or already sent.
    Full(Option<Bytes>),
    /// Range of a file, read while it is sent.
    File(FileRange),
    /// Request body, sent back.
    Echo(Incoming),
}

/// Range of a file that is still to be sent.
#[derive(Debug)]
pub struct FileRange {
    file: Arc<File>,
    offset: u64,
    remaining: u64,
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
        if len > FILE_READ_BYTES {
            return Ok(Self::File(FileRange {
                file: Arc::new(file),
                offset: start,
                remaining: len,
            }));
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, start)?;
        Ok(Self::bytes(bytes))
    }
}

impl FileRange {
    /// Reads the next piece. A file that was truncated meanwhile closes the connection, since the
    /// response has announced more bytes.
    fn read(&mut self) -> io::Result<Bytes> {
        let len = self.remaining.min(FILE_READ_BYTES);
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, self.offset)?;
        (self.offset, self.remaining) = (self.offset + len, self.remaining - len);
        Ok(bytes.into())
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
            Self::Echo(incoming) => {
                Pin::new(incoming).poll_frame(context).map_err(io::Error::other)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_none(),
            Self::File(part) => part.remaining == 0,
            Self::Echo(incoming) => incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::File(part) => SizeHint::with_exact(part.remaining),
            Self::Echo(incoming) => incoming.size_hint(),
        }
    }
}
