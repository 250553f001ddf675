//! Devices of a stack: their configurations, and the types that a device of an application's
//! own needs.

pub use tidegate_device::admission::EarlyDrop;
pub use tidegate_device::{Burst, Capabilities, Device, DeviceCounters, HandoverState, Medium};

/// Capture of frames to a file.
pub mod capture {
    pub use tidegate_device::capture::{Capture, CaptureConfig};
}

/// Devices of DPDK.
pub mod dpdk {
    pub use tidegate_device::dpdk::DpdkConfig;
}

/// Injection of faults.
pub mod fault {
    pub use tidegate_device::fault::{FaultConfig, FaultError, FaultInjector, FaultRates};
}

/// Settings of an interface that a killed process leaves changed, unless a restorer exists.
#[cfg(any(feature = "packet", feature = "xdp"))]
pub mod interface_settings {
    pub use tidegate_device::interface_settings::{
        LeftBehind, RestorerRole, UnknownRestorerRole, restore_left_behind, run_restorer,
        set_restorer,
    };
}

/// In-memory links, for tests.
pub mod mem {
    pub use tidegate_device::mem::{MemConfig, MemDevice, wire};
}

/// Devices on AF_PACKET.
#[cfg(feature = "packet")]
pub mod packet {
    pub use tidegate_device::packet::PacketConfig;
}

/// Devices over RDMA NICs.
pub mod rdma {
    pub use tidegate_device::rdma::{RdmaConfig, RdmaError};
}

/// TAP devices.
pub mod tap {
    pub use tidegate_device::tap::TapConfig;
}

/// Trace of frames as text.
pub mod trace {
    pub use tidegate_device::trace::Trace;
}

/// Devices on AF_XDP.
#[cfg(feature = "xdp")]
pub mod xdp {
    pub use tidegate_device::xdp::{
        AttachMode, BusyPoll, CopyMode, RingSizes, UnknownAttachMode, XdpConfig,
    };
}
