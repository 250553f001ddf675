//! What an answer carries.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};

/// How much of a file is read at once.
const PIECE_BYTES: u64 = 64 << 10;

/// The body of an answer.
#[derive(Debug)]
pub enum ResponseBody {
    /// These bytes.
    Whole(Option<Bytes>),
    /// Part of a file, read as it is sent.
    File(FilePart),
    /// What the client sends.
    Echo(Incoming),
}

/// Part of a file that is still to be sent.
#[derive(Debug)]
pub struct FilePart {
    file: Arc<File>,
    next: u64,
    left: u64,
}

impl ResponseBody {
    /// No body.
    pub fn empty() -> Self {
        Self::Whole(None)
    }

    /// These bytes.
    pub fn bytes(bytes: impl Into<Bytes>) -> Self {
        Self::Whole(Some(bytes.into()))
    }

    /// `len` bytes of the file from `start` on: read at once if it is little.
    pub(super) fn file(file: File, start: u64, len: u64) -> io::Result<Self> {
        if len > PIECE_BYTES {
            return Ok(Self::File(FilePart { file: Arc::new(file), next: start, left: len }));
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, start)?;
        Ok(Self::bytes(bytes))
    }
}

impl FilePart {
    /// The next piece. A file that has become shorter ends the connection: the
    /// client was promised more.
    fn read(&mut self) -> io::Result<Bytes> {
        let len = self.left.min(PIECE_BYTES);
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, self.next)?;
        (self.next, self.left) = (self.next + len, self.left - len);
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
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::File(part) if part.left == 0 => Poll::Ready(None),
            Self::File(part) => Poll::Ready(Some(part.read().map(Frame::data))),
            Self::Echo(incoming) => {
                Pin::new(incoming).poll_frame(context).map_err(io::Error::other)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::File(part) => part.left == 0,
            Self::Echo(incoming) => incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::File(part) => SizeHint::with_exact(part.left),
            Self::Echo(incoming) => incoming.size_hint(),
        }
    }
}
