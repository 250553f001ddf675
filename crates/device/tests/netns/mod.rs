//! Two network namespaces joined by a veth pair; deleted on drop.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// True if this test may create namespaces; prints a message if not.
pub fn can_create_namespaces() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        tidegate_needs::skip("root", "network namespaces need root");
    }
    root
}

/// A network namespace with one end of the pair in it.
pub struct Namespace {
    pub name: String,
    pub interface: &'static str,
}

impl Namespace {
    fn new(name: String, interface: &'static str) -> Self {
        ip(&format!("netns add {name}"));
        let namespace = Self { name, interface };
        namespace.ip("link set lo up");
        namespace
    }

    /// Runs `ip` in the namespace.
    pub fn ip(&self, arguments: &str) {
        ip(&format!("-n {} {arguments}", self.name));
    }

    /// Runs a program in the namespace, with `/sys` of the namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }

    /// Runs `work` on a thread of the namespace and returns what it returns.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    let file = File::open(format!("/var/run/netns/{}", self.name)).unwrap();
                    let kind = Some(LinkNameSpaceType::Network);
                    move_into_link_name_space(file.as_fd(), kind).unwrap();
                    work()
                })
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Gives the interface an address that is usable at once.
    pub fn add_address(&self, address: IpAddr, prefix: u8) {
        let nodad = if address.is_ipv6() { "nodad" } else { "" };
        self.ip(&format!("address add {address}/{prefix} dev {} {nodad}", self.interface));
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.name]).status();
    }
}

/// Two namespaces joined by a veth pair; both ends are up.
pub struct VethPair {
    pub left: Namespace,
    pub right: Namespace,
}

/// Addresses of the two ends, IPv4 and IPv6, set by [`Pair::new`].
pub const LEFT_ADDRESSES: [&str; 2] = ["10.77.0.1", "fd77::1"];
pub const RIGHT_ADDRESSES: [&str; 2] = ["10.77.0.2", "fd77::2"];
/// Addresses of the link that neither kernel has.
pub const FREE_ADDRESSES: [&str; 2] = ["10.77.0.3", "fd77::3"];

impl VethPair {
    /// As [`VethPair::with_offloads`], but without checksum offload, so every frame is complete as
    /// on a wire.
    pub fn new(queues: u32) -> Self {
        let pair = Self::with_offloads(queues);
        for namespace in [&pair.left, &pair.right] {
            run(namespace.command("ethtool").args(["-K", namespace.interface, "tx", "off"]));
        }
        pair
    }

    /// Creates a pair with `queues` transmit and receive queues on each side, and the offloads that
    /// Linux gives a veth.
    pub fn with_offloads(queues: u32) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("tg-port-{}-{id}", std::process::id());
        let left = Namespace::new(format!("{prefix}-l"), "left");
        let right = Namespace::new(format!("{prefix}-r"), "right");
        let ends = |name: &str, namespace: &Namespace| {
            format!(
                "name {name} netns {} numtxqueues {queues} numrxqueues {queues}",
                namespace.name
            )
        };
        ip(&format!("link add {} type veth peer {}", ends("left", &left), ends("right", &right)));
        for (namespace, addresses) in [(&left, LEFT_ADDRESSES), (&right, RIGHT_ADDRESSES)] {
            let interface = namespace.interface;
            for address in addresses {
                let prefix = if address.contains(':') { 64 } else { 24 };
                namespace.add_address(address.parse().unwrap(), prefix);
            }
            namespace.ip(&format!("link set {interface} up"));
        }
        Self { left, right }
    }
}

/// Runs a command that must succeed; returns its output.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn ip(arguments: &str) {
    run(Command::new("ip").args(arguments.split_whitespace()));
}
