//! A daemon that others take over from, on an in-memory link.

use std::io::{self, ErrorKind};
use std::iter::Cycle;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::vec::IntoIter;

use tidegate_device::mem::{self, MemDevice};
use tidegate_device::{Burst, Capabilities, Device, DeviceCounters};
use tidegate_engine::{DeviceConfig, NetConfig};
use tidegate_memory::Arena;
use tidegate_service::Handle;
use tidegate_service::attachment::Attachment;
use tidegate_service::daemon::{
    AttachConfig, ConfigFactory, Daemon, StartError, StartOptions, UpgradeMode,
};

use super::{FAMILIES, GEOMETRY, TIMEOUT};

/// Device that one daemon at a time can hold, like a network interface.
#[derive(Clone)]
pub struct SharedDevice(Arc<(Mutex<Option<MemDevice>>, Condvar, AtomicUsize)>);

impl SharedDevice {
    pub fn new(device: MemDevice) -> Self {
        Self(Arc::new((Mutex::new(Some(device)), Condvar::new(), AtomicUsize::new(0))))
    }

    /// Number of times that a daemon has opened the device.
    pub fn openings(&self) -> usize {
        self.0.2.load(Ordering::Relaxed)
    }

    /// Waits until the device is free, and takes it.
    pub fn acquire(&self) -> DeviceLease {
        let (device_slot, returned, openings) = &*self.0;
        openings.fetch_add(1, Ordering::Relaxed);
        let device = device_slot.lock().unwrap();
        let (mut device, _) =
            returned.wait_timeout_while(device, TIMEOUT, |port| port.is_none()).unwrap();
        DeviceLease {
            device: Some(device.take().expect("the device was not released")),
            owner: self.clone(),
        }
    }
}

pub struct DeviceLease {
    device: Option<MemDevice>,
    owner: SharedDevice,
}

impl DeviceLease {
    fn device(&mut self) -> &mut MemDevice {
        self.device.as_mut().unwrap()
    }
}

impl Drop for DeviceLease {
    fn drop(&mut self) {
        let (device_slot, returned, _) = &*self.owner.0;
        *device_slot.lock().unwrap() = self.device.take();
        returned.notify_all();
    }
}

impl Device for DeviceLease {
    fn capabilities(&self) -> &Capabilities {
        self.device.as_ref().unwrap().capabilities()
    }
    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.device().receive(arena, burst, quota)
    }
    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.device().transmit(arena, burst)
    }
    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.device().prepare_sleep()
    }
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.device.as_ref().unwrap().wake_fd()
    }
    fn counters(&mut self) -> DeviceCounters {
        self.device().counters()
    }
}

/// Two hosts on an in-memory link; the daemon of the second host is upgraded.
pub struct UpgradeTestbed {
    pub shared_device: SharedDevice,
    pub first: Daemon,
    pub second: Option<Daemon>,
    /// Number of cores of each successive daemon.
    cores: Cycle<IntoIter<usize>>,
    folder: tempfile::TempDir,
}

pub fn net(device: impl Into<DeviceConfig>, side: usize) -> NetConfig {
    FAMILIES.iter().zip([24, 64]).fold(NetConfig::new(device), |net, (family, len)| {
        net.address(format!("{}/{len}", family[side]).parse().unwrap())
    })
}

pub fn custom(shared_device: &SharedDevice) -> NetConfig {
    let shared_device = shared_device.clone();
    net(
        DeviceConfig::Custom(Box::new(move |_| {
            Ok(Box::new(shared_device.acquire()) as Box<dyn Device>)
        })),
        1,
    )
}

pub type DropPrivileges = fn() -> io::Result<()>;

pub fn start(
    path: &Path,
    cores: usize,
    config_factory: ConfigFactory,
    drop_privileges: DropPrivileges,
) -> StartOptions<impl Fn(usize) -> io::Result<()> + Clone + Send + 'static, DropPrivileges> {
    let attach = AttachConfig::new(path, GEOMETRY);
    let upgrade = UpgradeMode::Reopen(config_factory);
    let log = Arc::new(|_: &str| {});
    StartOptions {
        attach,
        cores: cores..=cores,
        on_core_start: |_| Ok(()),
        drop_privileges,
        upgrade,
        measure_rounds: false,
        log,
    }
}

impl UpgradeTestbed {
    /// Testbeds with one core, with several cores, and with a changing number of cores.
    pub fn all() -> impl Iterator<Item = (Self, [&'static str; 2])> {
        let all = [vec![1], vec![3], vec![3, 1, 2]].into_iter();
        all.flat_map(|cores| FAMILIES.map(|family| (Self::new(cores.clone()), family)))
    }

    pub fn new(cores: Vec<usize>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = mem::wire(&mem::MemConfig::default()).unwrap();
        let paths = ["a.sock", "b.sock"].map(|name| folder.path().join(name));
        let config_factory: ConfigFactory = Box::new(|| Err(ErrorKind::Unsupported.into()));
        let first =
            Daemon::start_with(net(a, 0), start(&paths[0], 1, config_factory, || Ok(()))).unwrap();
        let shared_device = SharedDevice::new(b);
        let cores = cores.into_iter().cycle();
        let mut testbed = Self { shared_device, first, second: None, cores, folder };
        let start =
            start(&paths[1], testbed.cores.next().unwrap(), testbed.config_factory(), || Ok(()));
        testbed.second = Some(Daemon::start_with(custom(&testbed.shared_device), start).unwrap());
        testbed
    }

    fn config_factory(&self) -> ConfigFactory {
        let shared_device = self.shared_device.clone();
        Box::new(move || Ok(custom(&shared_device)))
    }

    pub fn attach(&self, side: usize) -> Attachment {
        let name = ["a.sock", "b.sock"][side];
        Attachment::connect(&self.folder.path().join(name), "test").unwrap()
    }

    /// Path of the second daemon's socket.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("b.sock")
    }

    /// Starts a daemon that is to take over from the second daemon.
    pub fn start_next(
        &mut self,
        net: NetConfig,
        drop_privileges: DropPrivileges,
    ) -> Result<Daemon, StartError> {
        let path = self.path();
        self.take_over(&path, net, drop_privileges)
    }

    fn take_over(
        &mut self,
        path: &Path,
        net: NetConfig,
        drop_privileges: DropPrivileges,
    ) -> Result<Daemon, StartError> {
        let start = start(path, self.cores.next().unwrap(), self.config_factory(), drop_privileges);
        Daemon::take_over(net, start).map(|(daemon, _)| daemon)
    }

    /// Migrates the applications to every core in turn, so that some are in transit.
    pub fn scatter_applications(&self) {
        let daemon = self.second.as_ref().unwrap();
        for core in 0..daemon.report().unwrap().cores.len() {
            daemon.controls().move_application(std::process::id(), core).unwrap();
        }
    }

    pub fn upgrade(&mut self) {
        let path = self.path();
        self.upgrade_through(&path).unwrap();
    }

    /// Upgrades the second daemon by a socket that leads to that of the daemon.
    pub fn upgrade_through(&mut self, path: &Path) -> Result<(), StartError> {
        self.scatter_applications();
        let next = self.take_over(path, custom(&self.shared_device), || Ok(()))?;
        let old = self.second.replace(next).unwrap();
        assert_eq!(old.stop().unwrap(), Some(std::process::id()));
        Ok(())
    }
}

pub fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n as u32).wrapping_mul(0x9e37_79b9) as u8).collect()
}

/// Sends `data` from offset `sent`, as far as the stream has space.
pub fn send_rest(app: &mut Attachment, socket: Handle, data: &[u8], sent: &mut usize) {
    while *sent < data.len() {
        match app.send(socket, &data[*sent..]) {
            Ok(len) => *sent += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(error) => panic!("{error}"),
        }
    }
}

pub fn receive_some(app: &mut Attachment, socket: Handle, to: &mut Vec<u8>) {
    let mut buf = [0; 4096];
    match app.recv(socket, &mut buf, false) {
        Ok(len) => to.extend_from_slice(&buf[..len]),
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
    }
}
