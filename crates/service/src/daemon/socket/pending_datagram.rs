//! Received datagram that waits for space in an application's stream.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_engine::Engine;
use tidegate_memory::Arena;
use tidegate_stack::{Datagram, DatagramInfo};

use crate::ipc::datagram::DatagramHeader;

/// Datagram that found no space in the application's stream.
pub(super) enum PendingDatagram {
    /// In the frame that was received.
    Frame(Datagram),
    /// Copied out of its frame, for a migration or a handover.
    Copy(DatagramSnapshot),
}

/// Datagram as plain data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct DatagramSnapshot {
    pub(in crate::daemon) remote: SocketAddr,
    pub(in crate::daemon) local: IpAddr,
    pub(in crate::daemon) hop_limit: u8,
    pub(in crate::daemon) traffic_class: u8,
    pub(in crate::daemon) bytes: Vec<u8>,
}

impl DatagramSnapshot {
    fn info(&self) -> DatagramInfo {
        let Self { remote, local, hop_limit, traffic_class, .. } = *self;
        DatagramInfo { remote, local, hop_limit, traffic_class }
    }
}

impl PendingDatagram {
    /// Header of the datagram, passed on at `received_ns`.
    pub(super) fn header(&self, len: usize, received_ns: u64) -> DatagramHeader {
        let DatagramInfo { remote, local, hop_limit, traffic_class } = match self {
            Self::Frame(datagram) => datagram.info(),
            Self::Copy(saved) => saved.info(),
        };
        DatagramHeader {
            len,
            remote: Some(remote),
            local: Some(local),
            hop_limit: Some(hop_limit),
            traffic_class: Some(traffic_class),
            received_ns,
            is_error_report: false,
        }
    }

    pub(in crate::daemon) fn bytes<'a>(&'a self, arena: &'a Arena) -> &'a [u8] {
        match self {
            Self::Frame(datagram) => datagram.bytes(arena),
            Self::Copy(saved) => &saved.bytes,
        }
    }

    /// Frees the frame.
    pub(in crate::daemon) fn release(self, arena: &mut Arena) {
        if let Self::Frame(datagram) = self {
            datagram.release(arena);
        }
    }

    pub(in crate::daemon) fn save(&self, engine: &mut Engine) -> DatagramSnapshot {
        match self {
            Self::Frame(datagram) => DatagramSnapshot {
                remote: datagram.remote,
                local: datagram.local,
                hop_limit: datagram.hop_limit,
                traffic_class: datagram.traffic_class,
                bytes: datagram.bytes(engine.parts().1).to_vec(),
            },
            Self::Copy(saved) => saved.clone(),
        }
    }
}
