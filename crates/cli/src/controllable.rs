//! Servers and daemon behind a control socket.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use tidegate::capture::CaptureRequest;
use tidegate::gate::{Settings, admission, transmit};
use tidegate_service::daemon::{DaemonReport, GateState};
use tidegate_wire::Medium;

use crate::health_check::HealthCheck;

/// Server that can be reconfigured while it runs.
pub(crate) trait Controllable: Send + Sync + 'static {
    /// Number of network cores.
    fn core_count(&self) -> usize;

    /// Medium of the device.
    fn medium(&self) -> io::Result<Medium>;

    /// True if sockets belong to attached programs.
    fn has_programs(&self) -> bool {
        false
    }

    /// Sockets and counters.
    fn report(&self) -> io::Result<DaemonReport>;

    /// Begins a capture on all cores. After an error it runs on some.
    fn start_capture(&self, request: &CaptureRequest) -> io::Result<()>;

    /// Ends capture `number` on all cores.
    fn end_capture(&self, number: u64);

    /// Sets `settings` if given; returns the receive scheduling settings in force and their
    /// counters.
    fn gate(&self, settings: Option<&Settings>) -> io::Result<GateState>;

    /// Enables admission control, or replaces its configuration.
    fn set_admission(&self, classes: &admission::Config) -> io::Result<()>;

    /// Sends by transmit classes, or by others. Each network core gets its part of all ceilings.
    fn set_transmit_classes(&self, classes: &transmit::Config) -> io::Result<()>;

    /// Migrates the application with process id `pid` to network core `core`.
    fn move_process(&self, pid: u32, core: usize) -> io::Result<()>;

    /// Checks the service on `address`, through each stack of the server.
    fn check_service(
        &self,
        check: &HealthCheck,
        address: IpAddr,
        timeout: Duration,
    ) -> Result<(), String>;
}
