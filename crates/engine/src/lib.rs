//! One network core: the poll loop over device, gate and stack.
//!
//! An [`Engine`] owns a device, the arena of its frames, and a stack. It runs them to completion
//! in the order that the gate chooses: receive a burst, pass it to the stack, serve the timers,
//! transmit. The engine takes no lock and starts no thread; its owner calls [`Engine::poll`].
//!
//! Without work, [`IdleGovernor`] chooses how to wait, and [`Engine::prepare_sleep`] arms the
//! descriptors of [`Engine::wake_fds`]. [`open()`] creates an engine from a [`NetConfig`].
//!
//! # Features
//! None is on by default.
//!
//! * `xdp`: devices on AF_XDP, and the guard of servers on the kernel's stack (module `guard`).
//! * `packet`: devices on AF_PACKET.

mod address_reservation;
pub mod admission;
mod arrival_times;
mod boost;
pub mod capture;
mod captured_frames;
mod claim;
mod clock;
mod device_config;
mod engine;
#[cfg(feature = "xdp")]
pub mod guard;
mod handover;
mod idle;
mod idle_detector;
mod interrupt;
mod kernel_port;
mod neighbours;
mod open;
mod open_device;
mod placement;
mod prepared;
mod pressure;
mod priority;
mod receive_way;
mod reconfigure;
mod sharded;
mod source_sample;
mod special_ways;
mod sys;

pub use address_reservation::{AddressHolder, AddressReservations, ReservationError};
pub use boost::{PriorityBoost, shorten_time_slice, thread_cpu_ns};
pub use claim::{PortClaim, PortClaims};
pub use clock::Clock;
pub use device_config::{DeviceConfig, OpenDevice};
pub use engine::{Engine, EngineConfig, EngineCounters, SleepPlan, StepResult, WakeFds};
pub use handover::{InheritedDevice, InheritedKind};
pub use idle::{CpuContention, IdleConfig, IdleGovernor, IdleStep, pause};
pub use idle_detector::IdleDetector;
pub use kernel_port::{BoundPort, HeldSocket, KernelPort};
pub use neighbours::{KernelNeighbours, NeighbourResolver};
pub use open::{DeviceWrapper, NetConfig, OpenError, OpenHook};
pub use placement::EngineNodes;
pub use prepared::{PreparedEngine, open};
pub use priority::Priority;
pub use sharded::{PreparedEngines, ShardedStacks, open_sharded};
