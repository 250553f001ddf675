//! Configuration of a host: device, addresses, routes.

mod config;
mod device;
#[cfg(not(all(feature = "packet", feature = "xdp")))]
mod disabled;
mod error;
#[cfg(feature = "packet")]
mod packet;
mod packet_classes;
#[cfg(feature = "serde")]
mod serialize;
#[cfg(feature = "xdp")]
mod xdp;

pub use config::HostConfig;
pub use device::HostDevice;
pub use error::HostConfigError;
pub use packet_classes::PacketClasses;
