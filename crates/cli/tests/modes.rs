//! Every mode of receive scheduling on real devices, and its control while it
//! runs.

mod support;

use std::process::Command;

use serde_json::Value;
use support::{Kind, SERVER_V4, SERVER_V6, Site, is_root, tidegate};

const FORMS: [&[&str]; 8] = [
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
    for kind in [Kind::Xdp, Kind::Packet] {
        let site = Site::new(kind);
        for form in FORMS {
            let arguments = [&["echo", "--listen", "7777"], form].concat();
            let server = site.serve(kind, &arguments);
            for (family, address) in [("-4", SERVER_V4), ("-6", SERVER_V6)] {
                let ping = [family, "-c", "2", "-i", "0.01", "-W", "5", "-s", "4000", address];
                let output = site.tool("ping", &ping);
                assert!(output.contains(" 0% packet loss"), "{form:?}: {output}");
                let intact = site.client().enter(|| echo(address)).unwrap();
                assert!(intact, "{kind:?} {form:?} {address}");
            }
            let report = server.stop();
            assert_eq!(report["requests"], 8, "{form:?}: {report}");
            let interrupts = report["gate"]["interrupts"].as_u64().unwrap();
            let by_interrupts = matches!(form[1], "interrupt" | "moderated" | "napi");
            assert_eq!(interrupts > 0, by_interrupts, "{form:?}: {report}");
        }
    }
}

/// Four datagrams, the longest in fragments, come back byte for byte.
fn echo(server: &str) -> bool {
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
fn a_running_server_is_shown_and_tuned() {
    if !is_root("ctl") {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control");
    let socket = socket.to_str().unwrap();
    let server = site.serve(Kind::Xdp, &["echo", "--listen", "7777", "--control", socket]);
    let shown = tidegate(&["ctl", socket]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("mode = \"polled\"") && shown.contains("low-mark-percent = 25"));

    let changed =
        tidegate(&["ctl", socket, "low-mark-percent=10", "cpu-share-percent=50", "--json"]);
    let changed: Value = serde_json::from_slice(&changed.stdout).unwrap();
    assert_eq!(changed["gate"]["settings"]["low-mark-percent"], 10);
    site.tool("ping", &["-c", "1", "-W", "5", SERVER_V4]);

    let refused = tidegate(&["ctl", socket, "cpu-share-percent=0"]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("from 1 to 100"));
    server.stop();
    let gone = tidegate(&["ctl", socket]);
    assert!(String::from_utf8_lossy(&gone.stderr).contains("--control"));
}

/// The settings of the interface are as before when a server ends.
#[test]
fn the_interface_is_left_as_it_was() {
    if !is_root("settings") {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let read = || {
        let device = site.device().to_owned();
        site.server().enter(move || settings_of(&device)).unwrap()
    };
    let before = read();
    let server = site.serve(Kind::Xdp, &["echo"]);
    site.tool("ping", &["-c", "1", "-W", "5", SERVER_V4]);
    server.stop();
    assert_eq!(read(), before);
}

fn settings_of(device: &str) -> String {
    let show = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    // Addresses and flags, an attached program among them.
    let link = show("ip", &["-d", "link", "show", device]);
    assert!(link.contains(device));
    link
}
