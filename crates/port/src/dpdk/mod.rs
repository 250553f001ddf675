//! The `dpdk` port: any device that the system's DPDK has a driver for, by its
//! PCI address or, for a virtual one, by its driver and arguments.
//!
//! It is there with the feature `dpdk` of this crate. The device receives into
//! frames of the arena and sends from them: mbuf number i of its pool is frame
//! number i, and the pool has those frames that the arena lent to it. Frames are
//! copied only when they come from the pool of another device, or with a device
//! that wants memory of DPDK's own, as virtio and zero-copy memif do.
//!
//! DPDK exists once in a process. The first port starts it, with arguments that
//! suit a library: no files, no other processes, no thread moved to another
//! processor, ordinary memory where there are no hugepages, no device but those
//! that are asked for.

#[cfg(feature = "dpdk")]
mod device;
#[cfg(feature = "dpdk")]
mod eal;
#[cfg(feature = "dpdk")]
mod layers;
#[cfg(feature = "dpdk")]
mod losses;
#[cfg(feature = "dpdk")]
mod memif;
#[cfg(feature = "dpdk")]
mod sys;

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::num::NonZeroU16;
use std::str::FromStr;

use tidegate_memory::{Arena, FrameSize};

use crate::Port;

/// How large frames should be: drivers want 2 KiB behind the headroom, or else frames
/// are copied.
pub const FRAME_SIZE: FrameSize = FrameSize::K4;

/// Whether this program was built with DPDK.
pub const BUILT: bool = cfg!(feature = "dpdk");

/// Which device to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DpdkConfig {
    /// The device as DPDK names it: a PCI address, or a virtual device with its
    /// arguments, as `net_memif0,role=server,id=0,socket=/run/memif.sock`.
    pub device: String,
    /// Arguments for DPDK itself, before those that Tidegate gives. Only the
    /// first port of a process can have any.
    pub arguments: Vec<String>,
    /// How many queues to open in each direction. All of them are received from
    /// in turn; the device spreads what arrives by flow (RSS) if it can.
    pub queues: NonZeroU16,
    /// Leave it to the device to cut what TCP sends into segments
    /// ([`Capabilities::segmentation`](crate::Capabilities::segmentation)), if it can.
    /// Needs frames of [`FrameSize::K64`].
    pub segmentation: bool,
}

impl DpdkConfig {
    /// Whether another process can go on with the device when this one has closed
    /// it, and this one if the other fails.
    ///
    /// # Errors
    /// Why not.
    pub fn can_change_hands(&self) -> Result<(), &'static str> {
        let is = |driver| self.device.starts_with(driver);
        if is("net_memif") || is("net_af_packet") {
            Ok(())
        } else if is("net_tap") {
            Err("the interface of net_tap goes with its process, and the kernel's addresses with \
                 it: --port tap has one that stays")
        } else if is("net_vhost") || is("net_virtio_user") {
            Err("the other side of a vhost device does not come back by itself")
        } else {
            Err("opening a card again needs more rights than a process should keep")
        }
    }
}

impl FromStr for DpdkConfig {
    type Err = Infallible;

    /// The device, and after a space arguments for DPDK: `0000:01:00.0
    /// --main-lcore=1`.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let mut words = text.split_whitespace().map(str::to_owned);
        let device = words.next().unwrap_or_default();
        let arguments = words.collect();
        Ok(Self { device, arguments, queues: NonZeroU16::MIN, segmentation: false })
    }
}

impl fmt::Display for DpdkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device)?;
        self.arguments.iter().try_for_each(|argument| write!(f, " {argument}"))
    }
}

/// Why a device of DPDK's could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum DpdkError {
    /// The feature is off.
    #[error(
        "this program was built without DPDK: apt-get install libdpdk-dev, then cargo build \
         --release -p tidegate-cli --features dpdk"
    )]
    NotBuilt,
    /// No device is named.
    #[error(
        "no device: write --port dpdk:DEVICE, where DEVICE is a PCI address (`dpdk-devbind.py \
         --status` lists them) or a virtual device, as net_tap0,iface=NAME"
    )]
    NoDevice,
    /// DPDK did not start. It cannot be tried again in this process.
    #[error("DPDK does not start with the arguments `{arguments}`{said}")]
    Start {
        /// The arguments.
        arguments: String,
        /// What DPDK said.
        said: Said,
    },
    /// DPDK runs already.
    #[error(
        "DPDK runs in this process with other arguments already: give arguments to the first \
         port only"
    )]
    Started,
    /// No driver takes the device.
    #[error("no driver of DPDK's takes the device {device}: {advice}{said}")]
    Probe {
        /// The device.
        device: String,
        /// What to do about it.
        advice: String,
        /// What DPDK said.
        said: Said,
    },
    /// Another port of this process, or another process, has it.
    #[error(
        "the device {device}, or what it stands for, is in use: choose another name, number or \
         path, or end who has it{said}"
    )]
    Busy {
        /// The device.
        device: String,
        /// What DPDK said.
        said: Said,
    },
    /// A frame of the device may not fit into a buffer.
    #[error("the MTU of {device} is {mtu}, but a buffer has room for {room}: use larger buffers")]
    Mtu {
        /// The device.
        device: String,
        /// Its MTU in bytes.
        mtu: usize,
        /// The largest MTU that would do.
        room: usize,
    },
    /// What the device is to cut needs large frames.
    #[error("segmentation needs frames of 64 KiB: open the port with an arena of `FrameSize::K64`")]
    SmallFrames,
    /// It does not have so many queues.
    #[error("the device {device} has at most {most} queues, not {queues}: ask for fewer")]
    Queues {
        /// The device.
        device: String,
        /// How many were asked for.
        queues: u16,
        /// How many it can have.
        most: u16,
    },
    /// Without an IOMMU a card needs memory that stays where it is.
    #[error(
        "the card {device} writes to physical addresses, and ordinary memory moves: get hugepages \
         with `echo 64 | sudo tee /proc/sys/vm/nr_hugepages`, or switch the IOMMU on"
    )]
    Hugepages {
        /// The device.
        device: String,
    },
    /// DPDK or the driver refused a step.
    #[error("cannot {step}, the device {device}{said}")]
    Setup {
        /// What was tried.
        step: &'static str,
        /// The device.
        device: String,
        /// What DPDK said.
        said: Said,
    },
    /// Its server is not there.
    #[error(
        "the memif device {device} has no server to connect to: start the process with \
         role=server first{said}"
    )]
    NoServer {
        /// The device.
        device: String,
        /// What DPDK said.
        said: Said,
    },
    /// The system refused something else.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What DPDK had to say about an error: nothing, or lines of its log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said(String);

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = self.0.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// Opens a device.
///
/// Its buffers are frames of the arena, which are lent to it. When the port is
/// dropped, those that it has stay lent: [`Port::close_for_now`] gives them back.
///
/// # Errors
/// See [`DpdkError`]; the device is let go.
pub fn open(config: &DpdkConfig, arena: &mut Arena) -> Result<Box<dyn Port>, DpdkError> {
    #[cfg(feature = "dpdk")]
    return Ok(Box::new(device::DpdkPort::open(config, arena)?));
    #[cfg(not(feature = "dpdk"))]
    {
        let _ = (config, arena);
        Err(DpdkError::NotBuilt)
    }
}

/// Does the part of [`open`] that takes longest and needs no device: starts DPDK.
///
/// # Errors
/// As [`open`].
pub fn start(config: &DpdkConfig) -> Result<(), DpdkError> {
    #[cfg(feature = "dpdk")]
    return eal::start(&config.arguments);
    #[cfg(not(feature = "dpdk"))]
    {
        let _ = config;
        Err(DpdkError::NotBuilt)
    }
}

/// The version of the DPDK that this program runs with; `None` without.
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
    fn the_first_word_is_the_device() {
        let read = |text: &str| text.parse::<DpdkConfig>().unwrap();
        let config = read("net_null0,size=64 --no-huge -m 128");
        assert_eq!(config.device, "net_null0,size=64");
        assert_eq!(config.arguments, ["--no-huge", "-m", "128"]);
        assert_eq!(config.to_string(), "net_null0,size=64 --no-huge -m 128");
        assert_eq!(read("0000:01:00.0").to_string(), "0000:01:00.0");
        assert_eq!(read(" ").device, "");
    }

    #[test]
    fn a_device_changes_hands_if_its_other_side_stays() {
        let can = |text: &str| text.parse::<DpdkConfig>().unwrap().can_change_hands();
        assert!(can("net_memif0,role=client").is_ok() && can("net_af_packet0,iface=x").is_ok());
        assert!(can("net_tap0,iface=tg0").unwrap_err().contains("--port tap"));
        assert!(can("net_vhost0,iface=/run/x").unwrap_err().contains("vhost"));
        assert!(can("0000:01:00.0").unwrap_err().contains("card"));
    }

    #[test]
    fn without_dpdk_it_says_what_to_install() {
        if !BUILT {
            let config = tidegate_memory::ArenaConfig { frames: 1, ..Default::default() };
            let mut arena = Arena::new(config).unwrap();
            let error = open(&"net_null0".parse().unwrap(), &mut arena).err().unwrap().to_string();
            assert!(error.contains("libdpdk-dev") && error.contains("--features dpdk"), "{error}");
        }
    }
}
