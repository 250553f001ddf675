//! The `dpdk` device: any device with a driver in the system's DPDK. A PCI device is named by
//! its address, a virtual device by its driver and arguments.
//!
//! Available with the feature `dpdk` of this crate. The device receives into frames of the
//! arena and transmits from them. Mbuf number i of its pool describes frame number i; the pool
//! contains the frames that the arena lent to the device. Frames are copied in two cases only:
//! when they come from the pool of another device, or when the device needs DPDK's own memory,
//! as virtio and zero-copy memif do.
//!
//! DPDK exists once per process. The first device starts it with arguments that suit a library:
//! no files, no secondary processes, no change of CPU affinity, ordinary memory if there are no
//! hugepages, and no devices other than the requested ones.

#[cfg(feature = "dpdk")]
mod device;
#[cfg(feature = "dpdk")]
mod eal;
#[cfg(feature = "dpdk")]
mod loss_counters;
#[cfg(feature = "dpdk")]
mod memif;
#[cfg(feature = "dpdk")]
mod sys;
#[cfg(feature = "dpdk")]
mod tx_offload;

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::num::NonZeroU16;
use std::str::FromStr;

use tidegate_memory::{Arena, FrameSize};

use crate::Device;

/// Recommended frame size. Drivers need 2 KiB after the headroom; with smaller frames every
/// frame is copied.
pub const RECOMMENDED_FRAME_SIZE: FrameSize = FrameSize::K4;

/// True if this binary was built with DPDK.
pub const IS_BUILT: bool = cfg!(feature = "dpdk");

/// Configuration of a DPDK device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DpdkConfig {
    /// The device as DPDK names it: a PCI address, or a virtual device with its
    /// arguments, as `net_memif0,role=server,id=0,socket=/run/memif.sock`.
    pub device: String,
    /// EAL arguments, placed before Tidegate's defaults. Only the first DPDK device of a
    /// process can have any.
    pub arguments: Vec<String>,
    /// Number of queues in each direction, at least. A core polls its receive queues in turn; the
    /// device distributes flows among them (RSS) if supported.
    pub queues: NonZeroU16,
    /// Number of network cores that share the queues, at least 1: queue `n` is that of core `n`
    /// modulo the number of cores. The device is that of core 0, offers one for each of the others
    /// ([`Device::offer_queues`]), and starts when all are open. It has a queue for each core if the
    /// driver has as many; a memif has only [`DpdkConfig::queues`], since its peer must have the
    /// same number.
    pub cores: usize,
    /// Offloads TCP segmentation to the device (TSO,
    /// [`Capabilities::segmentation`](crate::Capabilities::segmentation)), if supported.
    /// Needs frames of [`FrameSize::K64`].
    pub segmentation: bool,
}

impl DpdkConfig {
    /// One queue of this device for one core, without EAL arguments and segmentation.
    pub fn new(device: impl Into<String>) -> Self {
        Self {
            device: device.into(),
            arguments: Vec::new(),
            queues: NonZeroU16::MIN,
            cores: 1,
            segmentation: false,
        }
    }

    /// Sets the EAL arguments, placed before Tidegate's defaults.
    pub fn arguments(self, arguments: Vec<String>) -> Self {
        Self { arguments, ..self }
    }

    /// Sets the number of queues in each direction.
    pub fn queues(self, queues: NonZeroU16) -> Self {
        Self { queues, ..self }
    }

    /// Sets the number of network cores that share the queues.
    pub fn cores(self, cores: usize) -> Self {
        Self { cores, ..self }
    }

    /// Sets segmentation offload.
    pub fn segmentation(self, segmentation: bool) -> Self {
        Self { segmentation, ..self }
    }

    /// Checks that the device can be handed over: another process can open it once this process
    /// has closed it, and this process can reopen it if the other fails.
    ///
    /// # Errors
    /// The reason why the device cannot be handed over.
    pub fn check_handover(&self) -> Result<(), &'static str> {
        let is = |driver| self.device.starts_with(driver);
        if is("net_memif") || is("net_af_packet") {
            Ok(())
        } else if is("net_tap") {
            Err(
                "the interface of net_tap is removed with its process, and the kernel's addresses with \
                 it: --io tap has a persistent interface",
            )
        } else if is("net_vhost") || is("net_virtio_user") {
            Err("the peer of a vhost device does not reconnect by itself")
        } else {
            Err("reopening a NIC (network card) needs more privileges than a process should keep")
        }
    }
}

impl FromStr for DpdkConfig {
    type Err = Infallible;

    /// Parses the device, then EAL arguments separated by spaces: `0000:01:00.0
    /// --main-lcore=1`.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let mut words = text.split_whitespace().map(str::to_owned);
        let device = words.next().unwrap_or_default();
        Ok(Self::new(device).arguments(words.collect()))
    }
}

impl fmt::Display for DpdkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device)?;
        self.arguments.iter().try_for_each(|argument| write!(f, " {argument}"))
    }
}

/// Error when opening a DPDK device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DpdkError {
    /// The feature `dpdk` is off.
    #[error(
        "this binary was built without DPDK: apt-get install libdpdk-dev, then cargo build \
         --release -p tidegate-cli --features dpdk"
    )]
    NotBuilt,
    /// No device is named.
    #[error(
        "no device is named: use --io dpdk:DEVICE, where DEVICE is a PCI address (`dpdk-devbind.py \
         --status` lists them) or a virtual device, such as net_tap0,iface=NAME"
    )]
    NoDevice,
    /// DPDK failed to start. The start cannot be repeated in this process.
    #[error("DPDK does not start with the arguments `{arguments}`{log}")]
    Start {
        /// Arguments given to DPDK, including defaults.
        arguments: String,
        /// Log lines of DPDK.
        log: DpdkLog,
    },
    /// DPDK was started earlier with other arguments.
    #[error(
        "DPDK already runs in this process with other arguments: give arguments to the first \
         DPDK device only"
    )]
    AlreadyStarted,
    /// No driver accepts the device.
    #[error("no DPDK driver accepts the device {device}: {advice}{log}")]
    Probe {
        /// The device.
        device: String,
        /// Advice for the user.
        advice: String,
        /// Log lines of DPDK.
        log: DpdkLog,
    },
    /// The device is in use, by this process or by another process.
    #[error(
        "the device {device}, or its underlying resource, is in use: use another name, number or \
         path, or stop the process that holds it{log}"
    )]
    Busy {
        /// The device.
        device: String,
        /// Log lines of DPDK.
        log: DpdkLog,
    },
    /// A frame of the device may exceed a buffer.
    #[error(
        "the MTU of {device} is {mtu}, but a buffer holds at most {max_mtu}: use larger buffers"
    )]
    Mtu {
        /// The device.
        device: String,
        /// MTU of the device, in bytes.
        mtu: usize,
        /// Largest MTU that fits a buffer, in bytes.
        max_mtu: usize,
    },
    /// TCP segmentation offload needs frames of 64 KiB.
    #[error("segmentation needs frames of 64 KiB: use an arena of `FrameSize::K64`")]
    FramesTooSmall,
    /// The device does not support the requested number of queues.
    #[error(
        "the device {device} supports at most {max_queues} queues, not {queues}: configure fewer"
    )]
    TooManyQueues {
        /// The device.
        device: String,
        /// Number of queues requested.
        queues: u16,
        /// Number of queues supported.
        max_queues: u16,
    },
    /// Without an IOMMU a NIC needs memory with fixed physical addresses, as hugepages have.
    #[error(
        "the NIC {device} uses physical addresses, and ordinary memory may move: allocate hugepages \
         with `echo 64 | sudo tee /proc/sys/vm/nr_hugepages`, or enable the IOMMU"
    )]
    NeedsHugepages {
        /// The device.
        device: String,
    },
    /// DPDK or the driver failed at a step of the setup.
    #[error("device {device}: cannot {step}{log}")]
    Setup {
        /// The step, as a verb phrase.
        step: &'static str,
        /// The device.
        device: String,
        /// Log lines of DPDK.
        log: DpdkLog,
    },
    /// No memif server listens on the socket.
    #[error(
        "the memif device {device} found no server to connect to: start the process with \
         role=server first{log}"
    )]
    NoServer {
        /// The device.
        device: String,
        /// Log lines of DPDK.
        log: DpdkLog,
    },
    /// Any other system error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Log lines of DPDK about an error; may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DpdkLog(String);

impl fmt::Display for DpdkLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = self.0.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// Opens a device.
///
/// Its receive buffers are frames lent by the arena. Frames held by a device stay lent when it
/// is dropped; [`Device::close_for_handover`] returns them to the arena.
///
/// # Errors
/// See [`DpdkError`]; the device is closed again.
pub fn open(config: &DpdkConfig, arena: &mut Arena) -> Result<Box<dyn Device>, DpdkError> {
    #[cfg(feature = "dpdk")]
    return Ok(Box::new(device::DpdkDevice::open(config, arena)?));
    #[cfg(not(feature = "dpdk"))]
    {
        let _ = (config, arena);
        Err(DpdkError::NotBuilt)
    }
}

/// Starts DPDK: the slowest part of [`open`], which needs no device.
///
/// # Errors
/// Same as [`open`].
pub fn start(config: &DpdkConfig) -> Result<(), DpdkError> {
    #[cfg(feature = "dpdk")]
    return eal::start(&config.arguments);
    #[cfg(not(feature = "dpdk"))]
    {
        let _ = config;
        Err(DpdkError::NotBuilt)
    }
}

/// Version of the DPDK in use; `None` if built without DPDK.
pub fn version() -> Option<String> {
    #[cfg(feature = "dpdk")]
    return Some(sys::version());
    #[cfg(not(feature = "dpdk"))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_device_then_arguments() {
        let read = |text: &str| text.parse::<DpdkConfig>().unwrap();
        let config = read("net_null0,size=64 --no-huge -m 128");
        assert_eq!(config.device, "net_null0,size=64");
        assert_eq!(config.arguments, ["--no-huge", "-m", "128"]);
        assert_eq!(config.to_string(), "net_null0,size=64 --no-huge -m 128");
        assert_eq!(read("0000:01:00.0").to_string(), "0000:01:00.0");
        assert_eq!(read(" ").device, "");
    }

    #[test]
    fn hands_over_only_devices_whose_peer_stays() {
        let check = |text: &str| text.parse::<DpdkConfig>().unwrap().check_handover();
        assert!(check("net_memif0,role=client").is_ok() && check("net_af_packet0,iface=x").is_ok());
        assert!(check("net_tap0,iface=tg0").unwrap_err().contains("--io tap"));
        assert!(check("net_vhost0,iface=/run/x").unwrap_err().contains("vhost"));
        assert!(check("0000:01:00.0").unwrap_err().contains("card"));
    }

    #[test]
    fn error_without_dpdk_names_the_package() {
        if !IS_BUILT {
            let config = tidegate_memory::ArenaConfig { frames: 1, ..Default::default() };
            let mut arena = Arena::new(config).unwrap();
            let error = open(&"net_null0".parse().unwrap(), &mut arena).err().unwrap().to_string();
            assert!(error.contains("libdpdk-dev") && error.contains("--features dpdk"), "{error}");
        }
    }
}
