//! Service that the host provides, and the queues in front of it.

use crate::error::SetupError;
use crate::router::{FilterQueue, RouterQueues};
use crate::setup::{HostRole, Placement, Setup};
use crate::udp::UdpService;

/// Service that the host provides.
pub(crate) enum Service {
    Udp { udp: Box<UdpService>, answers: bool, inline: bool },
    Router(RouterQueues),
}

impl Service {
    pub(crate) fn new(setup: &Setup, seed: u64) -> Result<Self, SetupError> {
        Ok(match setup.role {
            HostRole::Udp { family, socket_queue, answers, placement } => Self::Udp {
                udp: Box::new(UdpService::new(family, setup.readers, socket_queue, seed)?),
                answers,
                inline: placement == Placement::Inline,
            },
            HostRole::Closed { family } => Self::Udp {
                udp: Box::new(UdpService::new(family, 0, 1, seed)?),
                answers: false,
                inline: false,
            },
            HostRole::Router { output_queue, filter } => {
                Self::Router(RouterQueues::new(output_queue, filter))
            }
        })
    }

    /// True if the service runs inside the polling loop.
    pub(crate) fn is_inline(&self) -> bool {
        matches!(self, Self::Udp { inline: true, .. })
    }

    /// Datagrams that full socket queues have dropped.
    pub(crate) fn socket_drops(&self) -> u64 {
        match self {
            Self::Udp { udp, .. } => udp.socket_drops(),
            Self::Router(_) => 0,
        }
    }

    /// Fill level of the fullest queue in front of an application; 0 without such a queue.
    pub(crate) fn max_level_percent(&self) -> u32 {
        let level = match self {
            Self::Udp { udp, .. } => {
                (0..udp.readers()).map(|reader| percent(udp.level(reader))).max()
            }
            Self::Router(router) => {
                let level = |queue: &FilterQueue| (queue.waiting.len() as u32, queue.capacity);
                router.filter.as_ref().map(|queue| percent(level(queue)))
            }
        };
        level.unwrap_or(0)
    }
}

fn percent((packets, capacity): (u32, u32)) -> u32 {
    (u64::from(packets) * 100 / u64::from(capacity.max(1))) as u32
}
