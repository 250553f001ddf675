//! Messages to a service manager: ready, reloading, stopping, watchdog, and the process that goes on.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use support::running::Running;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, is_root};

/// Upper bound for any message.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Time without a message after which the service manager would end a service.
const WATCHDOG_US: &str = "400000";

/// Service manager of the test.
struct Manager {
    socket: UnixDatagram,
    folder: tempfile::TempDir,
}

impl Manager {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        // Servers that root has started send as another user.
        fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
        Self { socket, folder }
    }

    fn start(&self, command: &mut Command) -> Running {
        command.env("NOTIFY_SOCKET", self.folder.path().join("notify"));
        Running::start(command.env("WATCHDOG_USEC", WATCHDOG_US).stdin(Stdio::null()))
    }

    /// Waits for this message. Only messages of the watchdog may come before it.
    #[track_caller]
    fn wait_for(&self, expected: &str) -> String {
        loop {
            let mut bytes = [0; 4096];
            let len = self.socket.recv(&mut bytes).unwrap();
            let message = String::from_utf8_lossy(&bytes[..len]).into_owned();
            if message.starts_with(expected) {
                return message;
            }
            assert_eq!(message, "WATCHDOG=1\n", "instead of {expected}");
        }
    }
}

/// Kills a process on drop.
struct KillOnDrop(Pid);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

#[test]
fn server_reports_its_states() {
    let manager = Manager::new();
    let flag_sets: [&[&str]; 2] = [&["127.0.0.1/8"], &["::1/128", "--tcp"]];
    for flags in flag_sets {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["serve", "echo", "--io", "kernel", "--listen", "47313", "--address"]);
        command.args(flags);
        let mut server = manager.start(&mut command);
        manager.wait_for("READY=1");
        manager.wait_for("WATCHDOG=1");
        server.reload();
        let message = manager.wait_for("RELOADING=1");
        assert!(message.contains("\nMONOTONIC_USEC="), "{message}");
        manager.wait_for("READY=1");
        server.stop();
        manager.wait_for("STOPPING=1");
    }
}

#[test]
fn upgraded_daemon_stays_the_service() {
    if !is_root("service") {
        return;
    }
    let (manager, testbed) = (Manager::new(), Testbed::new(DeviceKind::Packet));
    let socket = manager.folder.path().join("daemon.sock");
    let addresses = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("daemon").args(DeviceKind::Packet.flags(testbed.device()));
    command.args(["--address", &addresses[0], "--address", &addresses[1]]);
    let mut first = manager.start(command.arg("--socket").arg(&socket));
    manager.wait_for("READY=1");
    manager.wait_for("WATCHDOG=1");
    let mut pid = None;
    for _ in 0..2 {
        let mut upgrade = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        // The new daemon is a service of the old one's manager, whoever upgrades.
        upgrade.env("NOTIFY_SOCKET", "/nonexistent");
        let output = upgrade.arg("upgrade").arg("--socket").arg(&socket).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let message = manager.wait_for("MAINPID=");
        let number = message.trim().strip_prefix("MAINPID=").unwrap().parse().unwrap();
        pid = Pid::from_raw(number).map(KillOnDrop);
        // From the new daemon: the message before was the last one of the old daemon.
        manager.wait_for("WATCHDOG=1");
    }
    assert!(first.child.wait().unwrap().success());
    kill_process(pid.as_ref().unwrap().0, Signal::TERM).unwrap();
    manager.wait_for("STOPPING=1");
}
