//! Configuration of a host: device, addresses, routes.

mod config;
mod device;
mod error;
#[cfg(feature = "serde")]
mod serialize;

pub use config::HostConfig;
pub use device::HostDevice;
pub use error::HostConfigError;
