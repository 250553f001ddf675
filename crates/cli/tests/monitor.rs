//! `tidegate monitor` beside the kernel: counts are exact, nothing is taken from the kernel, and
//! collectors of others read the exported records.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{CLIENT_V4, CLIENT_V6, SERVER_V4, SERVER_V6, Server, Testbed, can_run, wait_until};
use tidegate_device::packet::{PacketConfig, PacketDevice};
use tidegate_device::{Burst, Device};
use tidegate_lab::testbed::netns::Namespace;
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_wire::{EtherType, Ipv4Header, Ipv6Header, Protocol, UdpHeader};

const TIMEOUT: Duration = Duration::from_secs(60);
const PORT: u16 = 5300;
const FAMILIES: [(&str, &str, u64); 2] = [(CLIENT_V4, SERVER_V4, 20), (CLIENT_V6, SERVER_V6, 40)];
/// Interval of reports in a test that wants only the last one.
const NO_REPORTS: [&str; 2] = ["--interval", "1000"];

fn monitor(testbed: &Testbed, device: &str, more: &[&str]) -> Server {
    testbed.start_command("monitor", &[&["--iface", device], &NO_REPORTS[..], more].concat())
}

fn bind(namespace: &Namespace, address: &str, port: u16) -> UdpSocket {
    let address = SocketAddr::new(address.parse().unwrap(), port);
    let socket = namespace.enter(|| UdpSocket::bind(address)).unwrap().unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket
}

/// Socket of a client that is connected to a socket of the server.
fn sockets(testbed: &Testbed, client: &str, server: &str) -> (UdpSocket, UdpSocket) {
    let server = bind(testbed.server(), server, PORT);
    let client = bind(testbed.client(), client, 0);
    client.connect(server.local_addr().unwrap()).unwrap();
    (client, server)
}

/// Sends `requests` datagrams, which the server's kernel answers by one datagram each.
fn exchange(client: &UdpSocket, server: &UdpSocket, requests: usize, bytes: usize) {
    let mut buffer = vec![0; 65_536];
    for _ in 0..requests {
        client.send(&vec![7; bytes]).unwrap();
        let (len, from) = server.recv_from(&mut buffer).unwrap();
        assert_eq!(len, bytes);
        server.send_to(&buffer[..1], from).unwrap();
        assert_eq!(client.recv(&mut buffer).unwrap(), 1);
    }
}

fn address(text: &str) -> Value {
    serde_json::to_value(text.parse::<IpAddr>().unwrap()).unwrap()
}

/// Packets and bytes of the only flow of UDP from an address and a port.
fn udp_flow(report: &Value, source: &str, port: u16) -> (u64, u64, Value) {
    let is_wanted = |flow: &&Value| {
        flow["protocol"] == 17 && flow["source"] == address(source) && flow["source_port"] == port
    };
    let flows: Vec<_> = report["flows"].as_array().unwrap().iter().filter(is_wanted).collect();
    assert_eq!(flows.len(), 1, "{report}");
    let number = |name: &str| flows[0][name].as_u64().unwrap();
    (number("packets"), number("bytes"), flows[0]["vlan"].clone())
}

/// Packets that were observed or lost, by the totals of a report.
fn observed_and_lost(report: &Value) -> (u64, u64) {
    let sum = |counts: &Value| {
        counts.as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum::<u64>()
    };
    let total = &report["total"];
    (total["packets"].as_u64().unwrap() + sum(&total["malformed"]), sum(&total["lost"]))
}

#[test]
fn counts_traffic_of_the_kernel_exactly_and_leaves_it() {
    if !can_run("monitor", &[]) {
        return;
    }
    let testbed = Testbed::shared();
    for (client_address, server_address, ip_bytes) in FAMILIES {
        // Both directions are seen at either end.
        for device in [testbed.device(), testbed.client_device()] {
            let namespace = if device == testbed.device() { "server" } else { "client" };
            let (client, server) = sockets(&testbed, client_address, server_address);
            let monitor = match namespace {
                "server" => monitor(&testbed, device, &["--top", "100"]),
                _ => start_in(testbed.client(), &["--iface", device, "--top", "100"]),
            };
            exchange(&client, &server, 300, 1000);
            let report = monitor.stop();
            let source_port = client.local_addr().unwrap().port();
            let requests = udp_flow(&report, client_address, source_port);
            let answers = udp_flow(&report, server_address, PORT);
            assert_eq!(requests, (300, 300 * (1008 + ip_bytes), Value::Null), "{namespace}");
            assert_eq!(answers, (300, 300 * (9 + ip_bytes), Value::Null), "{namespace}");
            assert_eq!(observed_and_lost(&report).1, 0, "{report}");
        }
    }
}

/// Starts a monitor in a namespace that is not the server's.
fn start_in(namespace: &Namespace, arguments: &[&str]) -> Server {
    let mut command = namespace.command(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("monitor").args(NO_REPORTS).args(arguments);
    Server::start(&mut command)
}

#[test]
fn fragments_are_a_flow_of_their_own() {
    if !can_run("monitor of fragments", &[]) {
        return;
    }
    let testbed = Testbed::shared();
    for (client_address, server_address, ip_bytes) in FAMILIES {
        let (client, server) = sockets(&testbed, client_address, server_address);
        let monitor = monitor(&testbed, testbed.device(), &["--top", "100"]);
        exchange(&client, &server, 20, 100);
        // Each in three fragments.
        exchange(&client, &server, 5, 4000);
        let report = monitor.stop();
        let source_port = client.local_addr().unwrap().port();
        let requests = udp_flow(&report, client_address, source_port);
        assert_eq!(requests, (20, 20 * (108 + ip_bytes), Value::Null));
        let flows = report["flows"].as_array().unwrap();
        let fragments: Vec<_> = flows.iter().filter(|flow| flow["fragment"] == true).collect();
        assert_eq!(fragments.len(), 1, "{report}");
        assert_eq!(fragments[0]["packets"], 15);
        assert_eq!(fragments[0]["source"], address(client_address));
    }
}

/// A link on which nobody sends but a test: without IPv6, and without addresses.
fn quiet_testbed() -> Testbed {
    let testbed = Testbed::new(support::DeviceKind::Packet);
    for namespace in [testbed.client(), testbed.server()] {
        let setting = "net.ipv6.conf.all.disable_ipv6=1";
        assert!(namespace.command("sysctl").args(["-qw", setting]).status().unwrap().success());
    }
    testbed
}

/// Sender of frames from the client's end of the link.
struct FrameSender {
    device: PacketDevice,
    arena: Arena,
}

impl FrameSender {
    fn new(testbed: &Testbed) -> Self {
        let config = ArenaConfig { frames: 256, frame_size: FrameSize::K2, hugepages: false };
        let mut arena = Arena::new(config).unwrap();
        let open = || PacketDevice::open(&PacketConfig::new(testbed.client_device()), &mut arena);
        let device = testbed.client().enter(open).unwrap().unwrap();
        Self { device, arena }
    }

    fn send(&mut self, frame: &[u8]) {
        let mut burst: Burst = [self.arena.alloc_from(frame).unwrap()].into();
        while !burst.is_empty() {
            self.device.transmit(&mut self.arena, &mut burst).unwrap();
        }
    }
}

/// Frame of a datagram from port 9 to the server, behind these VLAN tags.
fn tagged_datagram(client: &str, server: &str, tags: &[u8]) -> Vec<u8> {
    let payload = [0; 8 + 22];
    let addresses = (client.parse().unwrap(), server.parse().unwrap());
    let (ethertype, mut packet) = match addresses {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut packet = vec![0; 20];
            let header = Ipv4Header::new(source, destination, Protocol::UDP, payload.len());
            header.unwrap().emit(&mut packet).unwrap();
            (EtherType::IPV4, packet)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut packet = vec![0; 40];
            let header = Ipv6Header::new(source, destination, Protocol::UDP, payload.len());
            header.unwrap().emit(&mut packet).unwrap();
            (EtherType::IPV6, packet)
        }
        _ => panic!("two families"),
    };
    let datagram = packet.len();
    packet.extend(payload);
    UdpHeader::new(9, PORT, 22).unwrap().emit(&mut packet[datagram..]).unwrap();
    [&[2; 12], tags, &ethertype.0.to_be_bytes()[..], &packet].concat()
}

#[test]
fn looks_through_vlan_tags() {
    if !can_run("monitor of VLANs", &["sysctl"]) {
        return;
    }
    let testbed = quiet_testbed();
    let mut sender = FrameSender::new(&testbed);
    for (client, server, ip_bytes) in FAMILIES {
        for (tags, vlan) in [(&[0x81, 0, 0, 7][..], 7), (&[0x88, 0xa8, 0, 9, 0x81, 0, 0, 7], 9)] {
            let monitor = monitor(&testbed, testbed.device(), &[]);
            (0..50).for_each(|_| sender.send(&tagged_datagram(client, server, tags)));
            let report = monitor.stop();
            let expected = (50, 50 * (ip_bytes + 30), Value::from(vlan));
            assert_eq!(udp_flow(&report, client, 9), expected, "{report}");
        }
    }
}

#[test]
fn lost_packets_are_counted_exactly() {
    if !can_run("losses of the monitor", &["sysctl"]) {
        return;
    }
    const FRAMES: u64 = 20_000;
    let testbed = quiet_testbed();
    let monitor = monitor(&testbed, testbed.device(), &["--ring-mib", "1"]);
    let mut sender = FrameSender::new(&testbed);
    kill_process(monitor.pid(), Signal::STOP).unwrap();
    let frame = [&[2; 12][..], &[0x88, 0xb5], &[0; 186]].concat();
    (0..FRAMES).for_each(|_| sender.send(&frame));
    kill_process(monitor.pid(), Signal::CONT).unwrap();
    let report = monitor.stop();
    let (observed, lost) = observed_and_lost(&report);
    assert_eq!(observed + lost, FRAMES, "{report}");
    assert!(observed > 0, "{report}");
    let ring_full = report["total"]["lost"]["ring_full"].as_u64().unwrap();
    assert!(ring_full > FRAMES / 2, "{report}");
}

#[test]
fn random_frames_are_counted_each() {
    if !can_run("monitor of random frames", &["sysctl"]) {
        return;
    }
    const FRAMES: u64 = 20_000;
    // The kernel drops a frame that ends inside a VLAN tag before anybody sees the frame.
    const MIN_RANDOM_BYTES: usize = 6;
    let testbed = quiet_testbed();
    let monitor =
        monitor(&testbed, testbed.device(), &["--flows", "256", "--ipfix", "127.0.0.1:9"]);
    let mut sender = FrameSender::new(&testbed);
    let mut rng = fastrand::Rng::with_seed(1);
    let starts: [&[u8]; 6] =
        [&[8, 0, 0x45], &[8, 0], &[0x86, 0xdd, 0x60], &[0x86, 0xdd], &[0x81, 0], &[]];
    for _ in 0..FRAMES {
        let mut frame = vec![2; 12];
        frame.extend(starts[rng.usize(..starts.len())]);
        frame.extend((0..rng.usize(MIN_RANDOM_BYTES..100)).map(|_| rng.u8(..)));
        sender.send(&frame);
    }
    let mut report = monitor.stop();
    // On a veth, frames of unknown VLANs count as missed too.
    report["total"]["lost"]["rx_missed"] = 0.into();
    let (observed, lost) = observed_and_lost(&report);
    assert_eq!(observed + lost, FRAMES, "{report}");
    assert_eq!(report["table"]["max_flows"], 256);
    assert!(report["table"]["evicted"]["flows"].as_u64().unwrap() > 0, "{report}");
    assert!(report["total"]["malformed"]["ipv6_payload_length"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn vanished_interface_ends_the_monitor_with_an_error_and_a_report() {
    if !can_run("monitor of a vanished interface", &[]) {
        return;
    }
    let testbed = Testbed::shared();
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["monitor", "--iface", testbed.device(), "--json"]).args(NO_REPORTS);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let (client, server) = sockets(&testbed, CLIENT_V4, SERVER_V4);
    exchange(&client, &server, 10, 100);
    testbed.server().ip(&["link", "del", testbed.device()]).unwrap();
    let (mut report, mut error) = (String::new(), String::new());
    output.read_to_string(&mut report).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{error}");
    let report: Value = serde_json::from_str(&report).unwrap();
    let port = client.local_addr().unwrap().port();
    assert_eq!(udp_flow(&report, CLIENT_V4, port).0, 10);
    assert!(error.contains(testbed.device()) && error.contains("is gone"), "{error}");
}

#[test]
fn count_limits_the_reports() {
    if !can_run("reports of the monitor", &[]) {
        return;
    }
    let testbed = Testbed::shared();
    let run = |more: &[&str]| {
        let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["monitor", "--device", testbed.device(), "--interval", "0.01"]).args(more);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let json = run(&["--count", "3", "--json", "--mode", "napi"]);
    let reports: Vec<Value> =
        json.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
    let finals: Vec<_> = reports.iter().map(|report| report["final"] == true).collect();
    assert_eq!(finals, [false, false, false, true], "{json}");
    let table = run(&["--count", "1", "--mode", "dedicated"]);
    for part in ["protocol", "others", "lost: 0 on a full ring", "in all"] {
        assert!(table.contains(part), "{part} is not in {table}");
    }
}

/// `nfcapd`, ended on drop.
struct Collector(Child);

impl Collector {
    fn start(namespace: &Namespace, address: &str, folder: &str) -> Self {
        let family = if address.contains(':') { "-6" } else { "-4" };
        let mut command = namespace.command("nfcapd");
        command.args([family, "-b", address, "-p", "4739", "-w", folder, "-t", "3600"]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let sockets = ["udp", "udp6"].map(|file| format!("/proc/{}/net/{file}", child.id()));
        // 4739 in hexadecimal.
        let listens =
            |file: &String| fs::read_to_string(file).is_ok_and(|text| text.contains(":1283 "));
        wait_until("nfcapd listens", || sockets.iter().any(listens));
        Self(child)
    }

    /// Ends the collector, which then writes its file.
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn nfcapd_reads_the_exported_records() {
    if !can_run("IPFIX export", &["nfcapd", "nfdump"]) {
        return;
    }
    let testbed = Testbed::shared();
    testbed.server().ip(&["link", "set", "lo", "up"]).unwrap();
    for collector_address in ["127.0.0.1", "::1"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let collector = Collector::start(testbed.server(), collector_address, path);
        let monitor =
            monitor(&testbed, testbed.device(), &["--ipfix", collector_address, "--domain", "5"]);
        let mut ports = Vec::new();
        for (client_address, server_address, _) in FAMILIES {
            let (client, server) = sockets(&testbed, client_address, server_address);
            exchange(&client, &server, 50, 1000);
            ports.push(client.local_addr().unwrap().port());
        }
        let report = monitor.stop();
        let export = &report["export"];
        assert_eq!(export["records_not_sent"], 0);
        assert_eq!(export["records"], report["table"]["current"]["flows"]);
        collector.stop();
        let format = "fmt:%sa,%sp,%da,%dp,%pr,%pkt,%byt";
        let output =
            Command::new("nfdump").args(["-6", "-N", "-q", "-R", path, "-o", format]).output();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        let text = text.replace(' ', "");
        for ((client, server, ip_bytes), port) in FAMILIES.into_iter().zip(ports) {
            let bytes = 50 * (1008 + ip_bytes);
            let line = format!("{client},{port},{server},{PORT},17,50,{bytes}");
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
