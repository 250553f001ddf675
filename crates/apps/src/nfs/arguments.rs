//! Decoding of a call's arguments (XDR, RFC 4506).

/// Arguments that end early, or whose lengths are out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Undecoded rest of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arguments<'c> {
    rest: &'c [u8],
}

impl<'c> Arguments<'c> {
    pub(super) fn new(bytes: &'c [u8]) -> Self {
        Self { rest: bytes }
    }

    fn array<const LEN: usize>(&mut self) -> Result<[u8; LEN], Malformed> {
        let (array, rest) = self.rest.split_first_chunk().ok_or(Malformed)?;
        self.rest = rest;
        Ok(*array)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    /// Bytes of variable length, at most `max_bytes` of them.
    pub(super) fn opaque(&mut self, max_bytes: usize) -> Result<&'c [u8], Malformed> {
        let len = self.u32()? as usize;
        if len > max_bytes {
            return Err(Malformed);
        }
        let (padded, rest) =
            self.rest.split_at_checked(len.next_multiple_of(4)).ok_or(Malformed)?;
        self.rest = rest;
        Ok(&padded[..len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_checked_before_bytes_are_taken() {
        let opaque = |bytes: &[u8], max| Arguments::new(bytes).opaque(max).map(<[u8]>::to_vec);
        assert_eq!(opaque(&[0, 0, 0, 0], 64), Ok(vec![]));
        assert_eq!(opaque(&[0, 0, 0, 3, 1, 2, 3, 0], 64), Ok(vec![1, 2, 3]));
        assert_eq!(opaque(&[0, 0, 0, 3, 1, 2, 3], 64), Err(Malformed), "no padding");
        assert_eq!(opaque(&[0, 0, 0, 3, 1, 2, 3, 0], 2), Err(Malformed), "above the maximum");
        assert_eq!(opaque(&[0xff; 8], usize::MAX), Err(Malformed), "past the end");
        assert_eq!(opaque(&[0, 0], 64), Err(Malformed));
        let mut numbers = Arguments::new(&[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!((numbers.u32(), numbers.u64(), numbers.u32()), (Ok(1), Ok(2), Err(Malformed)));
    }
}
