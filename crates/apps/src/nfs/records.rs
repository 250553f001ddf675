//! Record marking (RFC 5531 section 11): calls as fragments in a stream.

/// Maximum size of a call. A call to read has some hundred bytes; the largest is a refused write.
pub(super) const MAX_CALL_BYTES: usize = 16 << 10;

/// Maximum size of a call with the marks of its fragments, so that empty fragments end too.
const MAX_MARKED_BYTES: usize = MAX_CALL_BYTES + 256;

/// Bytes of a record mark.
pub(super) const MARK_BYTES: usize = 4;

/// Flag of the last fragment of a record.
const LAST_FRAGMENT: u32 = 1 << 31;

/// Record above [`MAX_CALL_BYTES`]. What follows in the stream cannot be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooLong;

/// Received bytes, from which records are taken.
#[derive(Debug, Default)]
pub(super) struct Records {
    bytes: Vec<u8>,
    /// Offset of the first byte that was not taken.
    start: usize,
}

impl Records {
    /// Buffer to which received bytes are appended.
    pub(super) fn buffer(&mut self) -> &mut Vec<u8> {
        self.bytes.drain(..self.start);
        self.start = 0;
        &mut self.bytes
    }

    /// Returns true in the middle of a record.
    pub(super) fn has_partial(&self) -> bool {
        self.start < self.bytes.len()
    }

    /// Takes the next complete record.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, TooLong> {
        let start = self.start;
        let mut end = start;
        let mut record_bytes = 0;
        let mut is_split = false;
        loop {
            let Some(&mark) = self.bytes[end..].first_chunk() else { return Ok(None) };
            let mark = u32::from_be_bytes(mark);
            let fragment_bytes = (mark & !LAST_FRAGMENT) as usize;
            record_bytes += fragment_bytes;
            end += MARK_BYTES + fragment_bytes;
            if record_bytes > MAX_CALL_BYTES || end - start > MAX_MARKED_BYTES {
                return Err(TooLong);
            }
            if end > self.bytes.len() {
                return Ok(None);
            }
            if mark & LAST_FRAGMENT != 0 {
                break;
            }
            is_split = true;
        }
        if is_split {
            self.join_fragments(start);
        }
        self.start = end;
        let first = start + MARK_BYTES;
        Ok(Some(&self.bytes[first..first + record_bytes]))
    }

    /// Moves the fragments of a complete record together, behind its first mark.
    fn join_fragments(&mut self, start: usize) {
        let mut read = start;
        let mut write = start + MARK_BYTES;
        loop {
            let Some(&mark) = self.bytes[read..].first_chunk() else { return };
            let mark = u32::from_be_bytes(mark);
            let len = (mark & !LAST_FRAGMENT) as usize;
            let fragment = read + MARK_BYTES;
            self.bytes.copy_within(fragment..fragment + len, write);
            write += len;
            read = fragment + len;
            if mark & LAST_FRAGMENT != 0 {
                return;
            }
        }
    }
}

/// Appends a record in one fragment, which `write` appends to the bytes.
pub(super) fn append_record(bytes: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = bytes.len();
    bytes.extend_from_slice(&[0; MARK_BYTES]);
    write(bytes);
    let len = (bytes.len() - start - MARK_BYTES) as u32;
    bytes[start..start + MARK_BYTES].copy_from_slice(&(len | LAST_FRAGMENT).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragment(len: usize, value: u8, is_last: bool) -> Vec<u8> {
        let mark = len as u32 | if is_last { LAST_FRAGMENT } else { 0 };
        let mut bytes = mark.to_be_bytes().to_vec();
        bytes.resize(MARK_BYTES + len, value);
        bytes
    }

    #[test]
    fn records_are_the_same_however_the_stream_is_cut() {
        let stream = [
            fragment(3, b'a', true),
            fragment(2, b'b', false),
            fragment(0, 0, false),
            fragment(1, b'c', true),
            fragment(0, 0, true),
            fragment(4, b'd', true),
        ]
        .concat();
        let expected: [&[u8]; 4] = [b"aaa", b"bbc", b"", b"dddd"];
        for piece_bytes in 1..=stream.len() {
            let mut records = Records::default();
            let mut taken = Vec::new();
            for piece in stream.chunks(piece_bytes) {
                records.buffer().extend_from_slice(piece);
                while let Some(record) = records.next().unwrap() {
                    taken.push(record.to_vec());
                }
            }
            assert_eq!(taken, expected, "pieces of {piece_bytes} bytes");
            assert!(!records.has_partial());
        }
    }

    #[test]
    fn long_records_are_refused_at_their_mark() {
        let next = |bytes: &[u8]| {
            let mut records = Records::default();
            records.buffer().extend_from_slice(bytes);
            records.next().map(|record| record.map(<[u8]>::len))
        };
        assert_eq!(next(&fragment(MAX_CALL_BYTES, 0, true)), Ok(Some(MAX_CALL_BYTES)));
        assert_eq!(next(&[0xff; 4]), Err(TooLong));
        assert_eq!(next(&(MAX_CALL_BYTES as u32 + 1).to_be_bytes()), Err(TooLong));
        let two = [fragment(MAX_CALL_BYTES, 0, false), fragment(1, 0, true)].concat();
        assert_eq!(next(&two), Err(TooLong));
        assert_eq!(next(&[0; MAX_MARKED_BYTES]), Ok(None));
        assert_eq!(next(&[0; MAX_MARKED_BYTES + MARK_BYTES]), Err(TooLong), "empty fragments");
    }
}
