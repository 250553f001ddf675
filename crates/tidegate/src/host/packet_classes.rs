//! Classes of packets that a stack has beside its host.

use tidegate_engine::NetConfig;
use tidegate_gate::{admission, transmit};

/// Classes of received and of sent packets: sections `[admission]` and `[transmit]` of a
/// configuration file.
///
/// # Examples
/// ```
/// use tidegate::gate::admission;
/// use tidegate::host::PacketClasses;
/// use tidegate::{NetConfig, mem};
///
/// let classes = PacketClasses { admission: Some(admission::Config::default()), transmit: None };
/// let (device, _peer) = mem::wire(&mem::MemConfig::default())?;
/// let config = classes.add_to(NetConfig::new(device));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct PacketClasses {
    /// Classes that decide which packets pass under overload.
    pub admission: Option<admission::Config>,
    /// Classes that decide which frames go first while the link is slower than its senders.
    pub transmit: Option<transmit::Config>,
}

impl PacketClasses {
    /// Adds the classes to the configuration of a stack.
    pub fn add_to(&self, mut config: NetConfig) -> NetConfig {
        if let Some(admission) = &self.admission {
            config = config.admission(admission.clone());
        }
        if let Some(transmit) = &self.transmit {
            config = config.transmit(transmit.clone());
        }
        config
    }
}
