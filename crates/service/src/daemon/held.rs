//! A datagram between the stack and an application's stream.

use tidegate_engine::Engine;
use tidegate_memory::Arena;
use tidegate_stack::Datagram;

use super::state::SavedDatagram;
use crate::contract::datagram::Head;

/// A datagram that found no room.
pub(super) enum Held {
    /// In the frame that it came in.
    Frame(Datagram),
    /// As another daemon has saved it.
    Copy(SavedDatagram),
}

impl Held {
    pub(super) fn head(&self, len: usize) -> Head {
        let (remote, local) = match self {
            Self::Frame(datagram) => (datagram.remote, datagram.local),
            Self::Copy(saved) => (saved.remote, saved.local),
        };
        Head { len, remote: Some(remote), local: Some(local) }
    }

    pub(super) fn bytes<'a>(&'a self, arena: &'a Arena) -> &'a [u8] {
        match self {
            Self::Frame(datagram) => datagram.bytes(arena),
            Self::Copy(saved) => &saved.bytes,
        }
    }

    /// Gives its frame back.
    pub(super) fn release(self, arena: &mut Arena) {
        if let Self::Frame(datagram) = self {
            datagram.release(arena);
        }
    }

    pub(super) fn save(&self, engine: &mut Engine) -> SavedDatagram {
        match self {
            Self::Frame(datagram) => SavedDatagram {
                remote: datagram.remote,
                local: datagram.local,
                bytes: datagram.bytes(engine.parts().1).to_vec(),
            },
            Self::Copy(saved) => saved.clone(),
        }
    }
}
