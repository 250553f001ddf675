//! Bytes in a snapshot.

use std::borrow::Cow;
use std::ops::Deref;

/// Data of a connection or a datagram. Bytes of a deserialized snapshot stay where they are, if the
/// format permits: nothing is copied before the data is restored.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct SnapshotBytes<'a>(
    #[cfg_attr(feature = "serde", serde(borrow, with = "serde_bytes"))] Cow<'a, [u8]>,
);

impl Deref for SnapshotBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl From<Vec<u8>> for SnapshotBytes<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Cow::Owned(bytes))
    }
}

impl From<SnapshotBytes<'_>> for Box<[u8]> {
    fn from(bytes: SnapshotBytes<'_>) -> Self {
        bytes.0.into_owned().into()
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;

    #[test]
    fn deserialized_bytes_stay_where_they_are() {
        let encoded = postcard::to_allocvec(&SnapshotBytes::from(vec![7; 100])).unwrap();
        assert_eq!(encoded, postcard::to_allocvec(&vec![7_u8; 100]).unwrap());
        let decoded: SnapshotBytes<'_> = postcard::from_bytes(&encoded).unwrap();
        assert!(matches!(decoded.0, Cow::Borrowed(_)));
        assert_eq!(*decoded, [7; 100]);
    }
}
