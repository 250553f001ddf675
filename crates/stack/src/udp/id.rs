//! Handle of a UDP socket.

/// Socket handle: slot index and generation. A handle is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct UdpId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl UdpId {
    /// Packs the handle into one number, for tables outside of the stack.
    pub fn to_bits(self) -> u64 {
        u64::from(self.index) << 32 | u64::from(self.generation)
    }

    /// Unpacks a handle from a number, also for tables that issue handles of this type for other
    /// objects.
    pub fn from_bits(bits: u64) -> Self {
        Self { index: (bits >> 32) as u32, generation: bits as u32 }
    }
}
