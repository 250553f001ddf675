//! State of a connection's current request, shared by its service, its bodies and its I/O.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::limits::READ_BUFFER_BYTES;

/// Bytes of a file that are read at a time: at first, and at most.
const MIN_PIECE_BYTES: usize = 4 << 10;
const MAX_PIECE_BYTES: usize = 64 << 10;

/// Bytes of an echoed body that wait inside hyper at most: its write queue, the channel to the
/// response, and its read buffer.
const ECHO_BYTES: usize = 4 * READ_BUFFER_BYTES;

/// State of a connection's current request. All of one connection runs on one thread at a time.
#[derive(Debug)]
pub(super) struct Exchange {
    /// Bytes of the next head have arrived.
    head_started: AtomicBool,
    /// A request body is being read.
    reads_body: AtomicBool,
    /// Requests so far.
    requests: AtomicU64,
    /// The last request was refused by admission.
    is_refused: AtomicBool,
    /// Bytes of a file to read at a time.
    piece_bytes: AtomicUsize,
    /// Bytes of the response that hyper may hold while the client does not read.
    waiting_bytes: AtomicUsize,
}

impl Exchange {
    pub(super) fn new() -> Self {
        Self {
            head_started: AtomicBool::new(false),
            reads_body: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            is_refused: AtomicBool::new(false),
            piece_bytes: AtomicUsize::new(2 * MIN_PIECE_BYTES),
            waiting_bytes: AtomicUsize::new(0),
        }
    }

    /// Records the arrival of bytes.
    pub(super) fn on_received(&self) {
        if !self.reads_body() {
            self.head_started.store(true, Ordering::Relaxed);
        }
    }

    /// Records a complete request head.
    pub(super) fn on_request(&self) {
        self.head_started.store(false, Ordering::Relaxed);
        self.reads_body.store(false, Ordering::Relaxed);
        self.waiting_bytes.store(0, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Records whether the request is refused. Returns true if the request before was.
    pub(super) fn set_refused(&self, is_refused: bool) -> bool {
        self.is_refused.swap(is_refused, Ordering::Relaxed)
    }

    /// Records the start of a response that echoes the request body.
    pub(super) fn begin_echo(&self) {
        self.reads_body.store(true, Ordering::Relaxed);
        self.waiting_bytes.store(ECHO_BYTES, Ordering::Relaxed);
    }

    /// Records the end of the request body.
    pub(super) fn end_body(&self) {
        self.reads_body.store(false, Ordering::Relaxed);
    }

    /// Number of bytes of a file to read next. Hyper takes it while it holds less than a buffer.
    pub(super) fn next_piece(&self) -> usize {
        let bytes = self.piece_bytes.load(Ordering::Relaxed);
        self.waiting_bytes.store(READ_BUFFER_BYTES + bytes, Ordering::Relaxed);
        bytes
    }

    /// Adapts the pieces of files to the send buffer.
    pub(super) fn set_send_buffer(&self, bytes: u32) {
        let piece_bytes = (bytes as usize / 2).clamp(MIN_PIECE_BYTES, MAX_PIECE_BYTES);
        self.piece_bytes.store(piece_bytes, Ordering::Relaxed);
    }

    pub(super) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn has_started_head(&self) -> bool {
        self.head_started.load(Ordering::Relaxed)
    }

    pub(super) fn reads_body(&self) -> bool {
        self.reads_body.load(Ordering::Relaxed)
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}
