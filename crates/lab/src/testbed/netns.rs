//! Network namespaces and veth pairs for experiments.
//!
//! The namespaces and devices are created with iproute2's `ip`, have the prefix `tg-` and the id
//! of this process in their names, and are deleted on drop. [`remove_stale`] deletes namespaces
//! that a killed process left behind.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::LinkNameSpaceType;
use tidegate_wire::MacAddr;

use crate::error::LabError;
use crate::testbed::cpu;
use crate::testbed::ending;
use crate::testbed::process::setpriv_arguments;
use crate::testbed::sys;

const NAME_PREFIX: &str = "tg-";
const NETNS_FOLDER: &str = "/var/run/netns";

/// Runs a command to completion and returns its standard output.
///
/// # Errors
/// [`LabError::Missing`] if the executable is not installed, [`LabError::Command`] if the command
/// fails.
pub fn run_to_end(command: &mut Command, package: &'static str) -> Result<String, LabError> {
    let output = output(command, package)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(LabError::Command {
        command: command_line(command),
        status: output.status.to_string(),
        stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Runs a command to completion, successful or not.
///
/// # Errors
/// [`LabError::Missing`] if the executable is not installed.
pub fn output(command: &mut Command, package: &'static str) -> Result<Output, LabError> {
    command.stdin(Stdio::null()).output().map_err(|source| match source.kind() {
        ErrorKind::NotFound => LabError::Missing {
            program: command.get_program().to_string_lossy().into_owned(),
            package,
        },
        _ => LabError::Io { what: format!("cannot start `{}`", command_line(command)), source },
    })
}

fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

fn ip<I: AsRef<OsStr>>(arguments: &[I]) -> Result<String, LabError> {
    run_to_end(Command::new("ip").args(arguments), "iproute2").map_err(|error| match error {
        LabError::Command { command, stderr, .. } if stderr.contains("not permitted") => {
            LabError::Permission {
                what: format!("`{command}`"),
                hint: "run as root, or inside `unshare --user --map-root-user --net --mount`"
                    .to_owned(),
            }
        }
        other => other,
    })
}

/// Deletes the namespaces of processes that no longer exist, and returns their names.
///
/// # Errors
/// If a namespace cannot be deleted.
pub fn remove_stale() -> Result<Vec<String>, LabError> {
    let Ok(entries) = fs::read_dir(NETNS_FOLDER) else { return Ok(Vec::new()) };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let stale: Vec<String> =
        names.filter(|name| owner_pid(name).is_some_and(|pid| !process_exists(pid))).collect();
    for name in &stale {
        match ip(&["netns", "del", name]) {
            // Another process has deleted the namespace already.
            Err(_) if !Path::new(NETNS_FOLDER).join(name).exists() => {}
            result => drop(result?),
        }
    }
    Ok(stale)
}

/// Ends the processes in the namespaces of this process, and deletes these namespaces. For a
/// process that is about to end without dropping its [`Namespace`]s. Returns the number of
/// namespaces deleted.
pub(super) fn remove_own() -> usize {
    let Ok(entries) = fs::read_dir(NETNS_FOLDER) else { return 0 };
    let (own, mut deleted) = (std::process::id(), 0);
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    for name in names.filter(|name| owner_pid(name) == Some(own)) {
        let pids = ip(&["netns", "pids", &name]).unwrap_or_default();
        let pids = pids.lines().filter_map(|line| line.trim().parse::<u32>().ok());
        // Threads of this process may have entered the namespace.
        for pid in pids.filter(|&pid| pid != own).filter_map(|pid| Pid::from_raw(pid as i32)) {
            // The process may have ended by itself.
            let _ = kill_process(pid, Signal::KILL);
        }
        // `remove_stale` tries again at the next start.
        deleted += usize::from(ip(&["netns", "del", &name]).is_ok());
    }
    deleted
}

/// Id of the process that created the namespace `name`; `None` for names of another form.
fn owner_pid(name: &str) -> Option<u32> {
    // tg-<pid>-<count>-<label>
    let mut parts = name.strip_prefix(NAME_PREFIX)?.splitn(3, '-');
    let pid = parts.next()?.parse().ok()?;
    parts.next()?.parse::<u32>().ok()?;
    parts.next()?;
    Some(pid)
}

fn process_exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// A number unique among the namespaces and devices of this process.
fn next_unique_number() -> u32 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    COUNT.fetch_add(1, Ordering::Relaxed)
}

/// A network namespace owned by this process, deleted on drop.
#[derive(Debug)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Creates an empty namespace with the loopback device up. `label` is the last part of the
    /// name, for people.
    ///
    /// # Errors
    /// [`LabError::Permission`] without root, [`LabError::Missing`] without iproute2.
    pub fn new(label: &str) -> Result<Self, LabError> {
        let name = format!("{NAME_PREFIX}{}-{}-{label}", std::process::id(), next_unique_number());
        let _creating = ending::creating();
        ip(&["netns", "add", &name])?;
        let namespace = Self { name };
        namespace.ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// The name known to `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` in this namespace.
    ///
    /// # Errors
    /// If the command fails.
    pub fn ip(&self, arguments: &[&str]) -> Result<String, LabError> {
        let mut all = vec!["-n", self.name.as_str()];
        all.extend_from_slice(arguments);
        ip(&all)
    }

    /// A command that runs `program` in this namespace, with the namespace's own `/sys`. `program`
    /// replaces the helper that enters the namespace, so the child has the process id of
    /// `program`.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    /// Like [`Namespace::command`], pinned to one core. The process receives SIGTERM when the
    /// thread that starts it ends.
    pub fn command_on_core(&self, core: usize, program: impl AsRef<OsStr>) -> Command {
        self.command_on_cores(&[core], program)
    }

    /// Like [`Namespace::command_on_core`], confined to several cores.
    pub fn command_on_cores(&self, cores: &[usize], program: impl AsRef<OsStr>) -> Command {
        let mut command = self.command("setpriv");
        command.args(setpriv_arguments(cores)).arg(program);
        command
    }

    /// Runs a closure in this namespace on a separate thread, and returns its result. Sockets
    /// that the closure opens stay in the namespace, and `/sys` shows the namespace.
    ///
    /// # Errors
    /// If the namespace cannot be entered.
    ///
    /// # Panics
    /// If the closure panics.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, LabError> {
        let handle = self.open_handle()?;
        thread::scope(|scope| {
            let worker = scope.spawn(|| handle.enter().map(|()| work()));
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Like [`Namespace::enter`], without waiting for the thread.
    ///
    /// # Errors
    /// If the namespace no longer exists. A failure to enter the namespace is an error of the
    /// thread.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, LabError> + Send + 'static,
    ) -> Result<JoinHandle<Result<T, LabError>>, LabError> {
        let handle = self.open_handle()?;
        Ok(thread::spawn(move || handle.enter().and_then(|()| work())))
    }

    fn open_handle(&self) -> Result<NamespaceHandle, LabError> {
        let path = Path::new(NETNS_FOLDER).join(&self.name);
        let file = File::open(&path).map_err(LabError::file(&path))?;
        Ok(NamespaceHandle { file, name: self.name.clone() })
    }

    /// Writes a file below `/sys/class/net/DEVICE/` in this namespace.
    ///
    /// # Errors
    /// If there is no such file, or the kernel refuses the value.
    pub fn write_device_file(&self, device: &str, file: &str, value: &str) -> Result<(), LabError> {
        self.write_device_files(device, file, value)
    }

    /// Writes all files below `/sys/class/net/DEVICE/` that match a pattern of the shell, which has
    /// no spaces.
    fn write_device_files(&self, device: &str, files: &str, value: &str) -> Result<(), LabError> {
        // A thread that only entered the namespace would still see the old /sys.
        let script = r#"for file in /sys/class/net/$1; do printf %s "$2" > "$file" || exit; done"#;
        let target = format!("{device}/{files}");
        let mut command = self.command("sh");
        run_to_end(command.args(["-c", script, "sh", &target, value]), "dash").map(drop)
    }
}

/// Open file of a namespace, through which threads enter the namespace.
struct NamespaceHandle {
    file: File,
    name: String,
}

impl NamespaceHandle {
    /// Moves the calling thread into the namespace permanently.
    fn enter(&self) -> Result<(), LabError> {
        rustix::thread::move_into_link_name_space(
            self.file.as_fd(),
            Some(LinkNameSpaceType::Network),
        )
        .map_err(LabError::io(format!("cannot enter namespace {}", self.name)))?;
        sys::unshare_sysfs().map_err(LabError::io("cannot mount /sys for a namespace"))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Deletes the devices in the namespace too. A failure cannot be reported here;
        // `remove_stale` tries again at the next start.
        let _ = ip(&["netns", "del", &self.name]);
    }
}

/// One end of a [`VethPair`].
#[derive(Debug)]
pub struct VethEnd {
    /// The namespace of the device.
    pub namespace: Namespace,
    /// Name of the device, unique on this machine while this process runs.
    pub device: String,
    /// Hardware address of the device.
    pub mac: [u8; 6],
}

/// Configuration of a [`VethPair`].
#[derive(Clone, Debug, Default)]
pub struct VethConfig {
    /// Kernel addresses of the first end with prefix lengths: `10.9.0.1/24`. Leave out the
    /// addresses of Tidegate.
    pub a: Vec<String>,
    /// Kernel addresses of the second end, in the same form.
    pub b: Vec<String>,
}

/// Two namespaces joined by a veth pair, up.
#[derive(Debug)]
pub struct VethPair {
    /// The first end: clients and load generators.
    pub a: VethEnd,
    /// The second end: servers.
    pub b: VethEnd,
}

impl VethPair {
    /// As [`VethPair::new`], with offloads off: the frames on the pair are those of a physical
    /// wire.
    ///
    /// # Errors
    /// The errors of [`Namespace::new`] and of [`VethEnd::ethtool`].
    pub fn as_on_a_wire(config: &VethConfig) -> Result<Self, LabError> {
        Self::as_on_a_wire_with_queues(config, 1)
    }

    /// As [`VethPair::as_on_a_wire`], with as many transmit and receive queues on both ends.
    ///
    /// # Errors
    /// As [`VethPair::as_on_a_wire`].
    pub fn as_on_a_wire_with_queues(config: &VethConfig, queues: usize) -> Result<Self, LabError> {
        let pair = Self::with_queues(config, queues)?;
        for end in [&pair.a, &pair.b] {
            end.ethtool(&["tx", "off", "tso", "off", "gso", "off", "gro", "off"])?;
        }
        Ok(pair)
    }

    /// Creates the namespaces, the devices and their addresses. The devices have one queue, and the
    /// offloads that Linux gives a veth: frames have unfilled checksums and up to 64 KiB.
    ///
    /// # Errors
    /// The errors of [`Namespace::new`].
    pub fn new(config: &VethConfig) -> Result<Self, LabError> {
        Self::with_queues(config, 1)
    }

    /// As [`VethPair::new`], with as many transmit and receive queues on both ends.
    ///
    /// # Errors
    /// The errors of [`Namespace::new`].
    pub fn with_queues(config: &VethConfig, queues: usize) -> Result<Self, LabError> {
        let (a, b) = (Namespace::new("a")?, Namespace::new("b")?);
        // At most 15 bytes. The name must also be recognisable in the name of a NAPI thread, which
        // has space for nine of them.
        let stem = format!("t{:x}{:x}", std::process::id() & 0xff_ffff, next_unique_number() & 0xf);
        let (device_a, device_b) = (format!("{stem}a"), format!("{stem}b"));
        let queues = queues.to_string();
        let queues = ["numtxqueues", &queues, "numrxqueues", &queues];
        let mut add = vec!["link", "add", &device_a];
        add.extend(queues);
        add.extend(["type", "veth", "peer", "name", &device_b]);
        add.extend(queues);
        add.extend(["netns", b.name()]);
        a.ip(&add)?;
        let a = VethEnd::prepare(a, device_a, &config.a)?;
        let b = VethEnd::prepare(b, device_b, &config.b)?;
        for end in [&a, &b] {
            end.namespace.ip(&["link", "set", &end.device, "up"])?;
        }
        Ok(Self { a, b })
    }
}

impl VethEnd {
    fn prepare(
        namespace: Namespace,
        device: String,
        addresses: &[String],
    ) -> Result<Self, LabError> {
        // No automatic addresses: router solicitations and duplicate address detection would be
        // packets that no test sent.
        let quiet = format!("net.ipv6.conf.{device}.accept_ra=0");
        let _ = run_to_end(namespace.command("sysctl").args(["-qw", &quiet]), "procps");
        namespace.ip(&["link", "set", &device, "addrgenmode", "none"])?;
        for address in addresses {
            let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
            let mut arguments = vec!["addr", "add", address.as_str(), "dev", device.as_str()];
            arguments.extend(nodad);
            namespace.ip(&arguments)?;
        }
        let text = namespace.ip(&["-o", "link", "show", &device])?;
        let mac = parse_mac_of_link(&text)
            .ok_or_else(|| LabError::Config(format!("no hardware address in {text:?}")))?;
        Ok(Self { namespace, device, mac })
    }

    /// Interface index of the device.
    ///
    /// # Errors
    /// If the device no longer exists.
    pub fn ifindex(&self) -> Result<u32, LabError> {
        self.read_device_number("ifindex").map(|index| index as u32)
    }

    /// Frames transmitted through the device so far, without those that its peer dropped on a
    /// full ring.
    ///
    /// # Errors
    /// If the device no longer exists.
    pub fn tx_packets(&self) -> Result<u64, LabError> {
        self.read_device_number("statistics/tx_packets")
    }

    /// Frames received by the device so far.
    ///
    /// # Errors
    /// If the device no longer exists.
    pub fn rx_packets(&self) -> Result<u64, LabError> {
        self.read_device_number("statistics/rx_packets")
    }

    fn read_device_number(&self, file: &str) -> Result<u64, LabError> {
        let path = format!("/sys/class/net/{}/{file}", self.device);
        let text = self.namespace.enter(|| fs::read_to_string(&path))?;
        let text = text.map_err(LabError::file(&path))?;
        let number = text.trim().parse();
        number.map_err(|_| LabError::Config(format!("{path} contains {text:?}, not a number")))
    }

    /// Sets offload features with `ethtool -K`.
    ///
    /// # Errors
    /// If ethtool is missing or fails.
    pub fn ethtool(&self, features: &[&str]) -> Result<(), LabError> {
        let mut command = self.namespace.command("ethtool");
        let output = output(command.args(["-K", &self.device]).args(features), "ethtool")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        // `ip netns exec` itself starts, and then does not find ethtool.
        if stderr.contains("No such file") {
            return Err(LabError::Missing { program: "ethtool".into(), package: "ethtool" });
        }
        if output.status.success() {
            return Ok(());
        }
        Err(LabError::Command {
            command: command_line(&command),
            status: output.status.to_string(),
            stderr: stderr.trim().to_owned(),
        })
    }

    /// Adds an address with prefix length to the device, usable at once.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn add_address(&self, address: IpAddr, prefix: u8) -> Result<(), LabError> {
        let text = format!("{address}/{prefix}");
        let mut arguments = vec!["addr", "add", text.as_str(), "dev", self.device.as_str()];
        if address.is_ipv6() {
            arguments.push("nodad");
        }
        self.namespace.ip(&arguments).map(drop)
    }

    /// Directs the receive processing of all queues of this device to `cores` by Receive Packet
    /// Steering (RPS), by a hash of the flow and independent of the sender's core. Without cores it
    /// turns RPS off.
    ///
    /// # Errors
    /// If the kernel refuses the mask.
    pub fn set_rps(&self, cores: &[usize]) -> Result<(), LabError> {
        self.namespace.write_device_files(&self.device, "queues/rx-*/rps_cpus", &rps_mask(cores))
    }

    /// Enables threaded NAPI: gives the device's NAPI context a kernel thread, pinned to `core`.
    /// Returns the process ids of the threads. The device needs a NAPI context: on veth, an XDP
    /// program or GRO.
    ///
    /// # Errors
    /// If the device has no NAPI context, or no thread appears.
    pub fn set_threaded_napi(&self, core: usize) -> Result<Vec<i32>, LabError> {
        self.namespace.write_device_file(&self.device, "threaded", "1")?;
        let threads = cpu::napi_threads(&self.device);
        if threads.is_empty() {
            return Err(LabError::Config(format!(
                "{} has no NAPI thread; attach an XDP program or turn GRO on first",
                self.device
            )));
        }
        for &thread in &threads {
            cpu::pin_process(thread, core)?;
        }
        Ok(threads)
    }

    /// Disables the threaded NAPI of [`VethEnd::set_threaded_napi`], now or when the device gets
    /// its next NAPI context.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_softirq_napi(&self) -> Result<(), LabError> {
        self.namespace.write_device_file(&self.device, "threaded", "0")
    }

    /// Removes the XDP program that a process has left attached, if any.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove_xdp_program(&self) -> Result<(), LabError> {
        self.namespace.ip(&["link", "set", "dev", &self.device, "xdp", "off"]).map(drop)
    }

    /// Sets the interrupt deferral of the device's NAPI context after a poll: the number of idle
    /// polls, and the interval of the timer in nanoseconds. Preferred busy polling builds on it.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_deferral(&self, defer_hard_irqs: u32, flush_ns: u64) -> Result<(), LabError> {
        let defer = defer_hard_irqs.to_string();
        self.namespace.write_device_file(&self.device, "napi_defer_hard_irqs", &defer)?;
        let flush = flush_ns.to_string();
        self.namespace.write_device_file(&self.device, "gro_flush_timeout", &flush)
    }

    /// Sets the time for which the device has no interrupts while a program that prefers to
    /// busy-poll finds packets, in nanoseconds.
    ///
    /// # Errors
    /// If the kernel is older than Linux 6.13, or the device has no NAPI context.
    pub fn set_irq_suspend_timeout(&self, timeout_ns: u64) -> Result<(), LabError> {
        let index = self.ifindex()?;
        let result = self
            .namespace
            .enter(|| tidegate_device::netlink::set_irq_suspend_timeout(index, timeout_ns))?;
        result.map_err(LabError::io(format!("cannot set irq-suspend-timeout of {}", self.device)))
    }
}

/// CPU mask with these cores, in the format of sysfs: hexadecimal words of 32 bits, the highest
/// first.
fn rps_mask(cores: &[usize]) -> String {
    let mut words = vec![0u32; cores.iter().max().map_or(1, |core| core / 32 + 1)];
    for core in cores {
        words[core / 32] |= 1 << (core % 32);
    }
    words.iter().rev().map(|word| format!("{word:08x}")).collect::<Vec<_>>().join(",")
}

fn parse_mac_of_link(text: &str) -> Option<[u8; 6]> {
    let mut words = text.split_whitespace().skip_while(|word| *word != "link/ether");
    words.nth(1)?.parse().ok().map(|MacAddr(octets)| octets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_owner_from_the_name() {
        assert_eq!(owner_pid("tg-123-0-a"), Some(123));
        for other in ["tg-123", "tg-x-0-a", "tg-123-y-a", "other-123-0-a", "tg-wire-b"] {
            assert_eq!(owner_pid(other), None, "{other}");
        }
    }

    #[test]
    fn rps_mask_supports_more_than_32_cores() {
        assert_eq!(rps_mask(&[]), "00000000");
        assert_eq!(rps_mask(&[0, 5]), "00000021");
        assert_eq!(rps_mask(&[0, 33]), "00000002,00000001");
    }

    #[test]
    fn missing_program_names_its_package() {
        let error =
            run_to_end(&mut Command::new("tg-no-such-program"), "some-package").unwrap_err();
        assert!(error.to_string().contains("apt-get install some-package"), "{error}");
    }
}
