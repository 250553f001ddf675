//! Every receive mode on real devices, and control of the settings at run time.

mod support;

use std::process::Command;

use serde_json::Value;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, is_root, tidegate};

const MODE_FLAGS: [&[&str]; 8] = [
    &["--mode", "interrupt"],
    &["--mode", "moderated"],
    &["--mode", "napi"],
    &["--mode", "polled"],
    &["--mode", "polled", "--network-thread"],
    &["--mode", "polled", "--cpu-share-percent", "20"],
    &["--mode", "polled", "--receive-quota", "unlimited", "--admission"],
    &["--mode", "dedicated"],
];

#[test]
fn every_mode_answers_on_xdp_and_packet() {
    if !is_root("modes") {
        return;
    }
    for kind in [DeviceKind::Xdp, DeviceKind::Packet] {
        let testbed = Testbed::new(kind);
        for flags in MODE_FLAGS {
            let arguments = [&["echo", "--listen", "7777"], flags].concat();
            let server = testbed.serve(kind, &arguments);
            for (family, address) in [("-4", SERVER_V4), ("-6", SERVER_V6)] {
                let ping = [family, "-c", "2", "-i", "0.01", "-W", "5", "-s", "4000", address];
                let output = testbed.tool("ping", &ping);
                assert!(output.contains(" 0% packet loss"), "{flags:?}: {output}");
                let intact = testbed.client().enter(|| echoes_intact(address)).unwrap();
                assert!(intact, "{kind:?} {flags:?} {address}");
            }
            let report = server.stop();
            assert_eq!(report["requests"], 8, "{flags:?}: {report}");
            let interrupts = report["gate"]["interrupts"].as_u64().unwrap();
            let by_interrupts = matches!(flags[1], "interrupt" | "moderated" | "napi");
            assert_eq!(interrupts > 0, by_interrupts, "{flags:?}: {report}");
        }
    }
}

/// Sends four datagrams, the longest in fragments; true if each comes back unchanged.
fn echoes_intact(server: &str) -> bool {
    let any = if server.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
    let socket = std::net::UdpSocket::bind(any).unwrap();
    socket.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
    socket.connect((server, 7777)).unwrap();
    [0, 1, 1000, 1600].into_iter().all(|size: usize| {
        let payload: Vec<u8> = (0..size).map(|at| at as u8).collect();
        socket.send(&payload).unwrap();
        let mut buf = vec![0; 2000];
        socket.recv(&mut buf).is_ok_and(|len| buf[..len] == payload)
    })
}

#[test]
fn ctl_shows_and_changes_a_running_server() {
    if !is_root("ctl") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control");
    let socket = socket.to_str().unwrap();
    let server = testbed.serve(DeviceKind::Xdp, &["echo", "--listen", "7777", "--control", socket]);
    let output = tidegate(&["ctl", socket]);
    let settings = String::from_utf8(output.stdout).unwrap();
    assert!(settings.contains("mode = \"polled\"") && settings.contains("low-mark-percent = 25"));

    let changed =
        tidegate(&["ctl", socket, "low-mark-percent=10", "cpu-share-percent=50", "--json"]);
    let changed: Value = serde_json::from_slice(&changed.stdout).unwrap();
    assert_eq!(changed["gate"]["settings"]["low-mark-percent"], 10);
    testbed.tool("ping", &["-c", "1", "-W", "5", SERVER_V4]);

    let refused = tidegate(&["ctl", socket, "cpu-share-percent=0"]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("from 1 to 100"));
    server.stop();
    let gone = tidegate(&["ctl", socket]);
    assert!(String::from_utf8_lossy(&gone.stderr).contains("--control"));
}

/// When a server exits, the interface settings are the original ones.
#[test]
fn interface_settings_are_restored() {
    if !is_root("settings") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let read = || {
        let device = testbed.device().to_owned();
        testbed.server().enter(move || interface_settings(&device)).unwrap()
    };
    let before = read();
    let server = testbed.serve(DeviceKind::Xdp, &["echo"]);
    testbed.tool("ping", &["-c", "1", "-W", "5", SERVER_V4]);
    server.stop();
    assert_eq!(read(), before);
}

fn interface_settings(device: &str) -> String {
    let show = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    // Addresses and flags; an attached XDP program would appear here.
    let link = show("ip", &["-d", "link", "show", device]);
    assert!(link.contains(device));
    link
}
