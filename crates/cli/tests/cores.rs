//! A daemon with several network cores, and applications that migrate between the cores
//! while they serve.

mod support;

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::run::Daemon;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run, files, url};

const REDIS: [&str; 8] =
    ["redis-server", "--save", "", "--protected-mode", "no", "--bind", "0.0.0.0", "::"];

const TIMEOUT: Duration = Duration::from_secs(60);

fn output_text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{}: {out}{err}", output.status)
}

/// `tidegate ctl` of a daemon.
fn ctl(testbed: &Testbed, control: &Path, arguments: &[&str]) -> Output {
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("ctl").arg(control).args(arguments).output().unwrap()
}

/// Process ID and core of each attachment of the applications with this name: one
/// attachment per network core.
fn application_cores(daemon: &Daemon<'_>, name: &str) -> Vec<(u64, u64)> {
    let report = daemon.sockets();
    let apps = report["applications"].as_array().unwrap();
    let has_name = |app: &&Value| app["identity"]["name"].as_str().unwrap().contains(name);
    let pid_and_core = |app: &Value| (app["identity"]["pid"].as_u64(), app["core"].as_u64());
    let pairs = apps.iter().filter(has_name).map(pid_and_core);
    pairs.map(|(pid, core)| (pid.unwrap(), core.unwrap())).collect()
}

fn move_and_wait(daemon: &Daemon<'_>, testbed: &Testbed, control: &Path, name: &str, core: u64) {
    let pid = application_cores(daemon, name)[0].0;
    let (pid, to) = (pid.to_string(), core.to_string());
    let began = Instant::now();
    loop {
        // A busy core may move applications away again.
        let moved = ctl(testbed, control, &["--move", &pid, "--to", &to]);
        assert!(moved.status.success(), "{}", output_text(&moved));
        if application_cores(daemon, name).iter().all(|(_, at)| *at == core) {
            return;
        }
        assert!(began.elapsed() < TIMEOUT, "{name} did not migrate to core {core}");
    }
}

fn benchmark(testbed: &Testbed, host: &str) -> Command {
    let mut command = testbed.client().command("redis-benchmark");
    command.args(["-h", host, "-c", "20", "-n", "8000", "-q", "-t", "set,get,lrange_100"]);
    command
}

#[test]
fn applications_migrate_between_cores_under_load() {
    if !can_run("cores", &["redis-server", "redis-benchmark", "memcached", "nc"]) {
        return;
    }
    let testbeds = [
        (&["xdp"][..], Testbed::new(DeviceKind::Xdp)),
        (&["xdp"], Testbed::with_queues(2)),
        (&["packet"], Testbed::new(DeviceKind::Packet)),
        (&["packet", "--segmentation"], Testbed::new(DeviceKind::Packet)),
        #[cfg(feature = "dpdk")]
        (&["dpdk:net_af_packet0,qpairs=2,iface="], Testbed::new(DeviceKind::DpdkPacket)),
    ];
    for (io, testbed) in testbeds {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control");
        let control_flags = ["--cores", "2", "--control", control.to_str().unwrap(), "--io"];
        let dpdk = format!("{}{}", io[0], testbed.device());
        let io = if io[0].starts_with("dpdk:") { &[&*dpdk] } else { io };
        let daemon = Daemon::start(&testbed, &[&control_flags[..], io].concat());
        let _redis = daemon.run_server(&REDIS, 6379);
        let _memcached =
            daemon.run_server(&["memcached", "-u", "root", "-l", "0.0.0.0,::", "-U", "0"], 11211);
        for name in ["redis", "memcached"] {
            let cores: BTreeSet<u64> =
                application_cores(&daemon, name).iter().map(|it| it.1).collect();
            assert_eq!(cores.len(), 2, "{name} is on both cores");
        }
        for host in [SERVER_V4, SERVER_V6] {
            let mut load = benchmark(&testbed, host);
            let load = load.stdout(Stdio::piped());
            let mut load = load.stderr(Stdio::piped()).spawn().unwrap();
            let mut moves = 0;
            while load.try_wait().unwrap().is_none() {
                move_and_wait(&daemon, &testbed, &control, "redis", moves % 2);
                moves += 1;
            }
            let output = load.wait_with_output().unwrap();
            let text = output_text(&output);
            assert!(output.status.success() && text.contains("requests per second"), "{text}");
            assert!(!text.contains("rror"), "{text}");
            assert!(moves >= 2, "the load ended before two migrations");
        }
        // Receive scheduling settings hold for all cores and change on all.
        let output = ctl(&testbed, &control, &["receive-quota=7", "--json"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["gate"]["settings"]["receive-quota"], 7, "{report}");
        let pid = application_cores(&daemon, "redis")[0].0;
        let rejected = ctl(&testbed, &control, &["--move", &pid.to_string(), "--to", "2"]);
        assert!(
            output_text(&rejected).contains("choose from 0 to 1"),
            "{}",
            output_text(&rejected)
        );
    }
}

/// Server on a port shared by `SO_REUSEPORT`, for both families, UDP and TCP. Each reply is
/// the server's process ID followed by the request.
const REUSEPORT_SERVER: &str = r#"
import os, selectors, socket
own = b"%d " % os.getpid()
ready = selectors.DefaultSelector()
def bind(family, kind, address):
    s = socket.socket(family, kind)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    s.bind((address, 7007))
    if kind == socket.SOCK_STREAM:
        s.listen(64)
    ready.register(s, selectors.EVENT_READ, kind == socket.SOCK_STREAM)
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    bind(socket.AF_INET, kind, "0.0.0.0")
    bind(socket.AF_INET6, kind, "::")
while True:
    for key, _ in ready.select():
        s = key.fileobj
        if key.data is True:
            ready.register(s.accept()[0], selectors.EVENT_READ)
        elif key.data is False:
            data, peer = s.recvfrom(2048)
            s.sendto(own + data, peer)
        elif data := s.recv(2048):
            s.sendall(own + data)
        else:
            ready.unregister(s)
            s.close()
"#;

/// Client of the shared port: opens new connections and keeps eight long-lived ones, which
/// must stay with the same server process.
const REUSEPORT_CLIENT: &str = r#"
import socket, sys
address, rounds = (sys.argv[1], 7007), int(sys.argv[2])
def connect():
    s = socket.create_connection(address, timeout=20)
    return s, talk(s, b"hello")
def talk(s, what):
    s.sendall(what)
    got = b""
    while not got.endswith(b" " + what):
        more = s.recv(2048)
        assert more, "it ended after %r" % got
        got += more
    return got.split()[0]
family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
lasting = [connect() for _ in range(8)]
streams, datagrams = set(), set()
for n in range(rounds):
    s, who = connect()
    streams.add(who)
    s.close()
    s, who = lasting[n % len(lasting)]
    assert talk(s, b"%d" % n) == who, "the connection moved to another server"
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.settimeout(20)
        s.sendto(b"%d" % n, address)
        got, _ = s.recvfrom(2048)
        assert got.endswith(b" %d" % n), got
        datagrams.add(got.split()[0])
print(len(streams), len(datagrams))
"#;

#[test]
fn reuseport_servers_span_cores_and_survive_migration() {
    if !can_run("cores", &["python3", "nc"]) {
        return;
    }
    for io in ["xdp", "packet"] {
        let testbed = Testbed::new(if io == "xdp" { DeviceKind::Xdp } else { DeviceKind::Packet });
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control");
        let flags = ["--io", io, "--cores", "2", "--control", control.to_str().unwrap()];
        let daemon = Daemon::start(&testbed, &flags);
        let server = || daemon.run_server(&["python3", "-c", REUSEPORT_SERVER], 7007);
        let _servers = [server(), server(), server()];
        let began = Instant::now();
        while application_cores(&daemon, "python").len() < 3 {
            assert!(began.elapsed() < TIMEOUT, "the servers did not attach");
        }
        let all = application_cores(&daemon, "python");
        let cores: BTreeSet<_> = all.into_iter().map(|(_, core)| core).collect();
        assert_eq!(cores.len(), 2, "the servers run on both cores");
        for host in [SERVER_V4, SERVER_V6] {
            let mut client = testbed.client().command("python3");
            client.args(["-c", REUSEPORT_CLIENT, host, "300"]);
            let client = client.stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut client = client.spawn().unwrap();
            let mut moves = 0;
            while client.try_wait().unwrap().is_none() {
                let all = application_cores(&daemon, "python");
                let (pid, core) = all[moves % all.len()];
                let (pid, to) = (pid.to_string(), (1 - core).to_string());
                let moved = ctl(&testbed, &control, &["--move", &pid, "--to", &to]);
                assert!(moved.status.success(), "{}", output_text(&moved));
                moves += 1;
            }
            let output = client.wait_with_output().unwrap();
            assert!(output.status.success(), "after {moves} moves: {}", output_text(&output));
            assert!(
                output_text(&output).contains("3 3"),
                "not every server was reached: {}",
                output_text(&output)
            );
            assert!(moves >= 2, "the load ended before two migrations");
        }
    }
}

#[test]
fn several_cores_reject_shared_addresses() {
    if !can_run("cores", &[]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let folder = tempfile::tempdir().unwrap();
    command.args(["daemon", "--cores", "1-2", "--shared", "--iface", testbed.device(), "--socket"]);
    let refused = command.arg(folder.path().join("daemon.sock")).output().unwrap();
    assert!(output_text(&refused).contains("one network core"), "{}", output_text(&refused));
}

/// Has 64 clients of each family send three datagrams of different sizes to an echo server.
fn exchange_datagrams(testbed: &Testbed, port: u16) {
    for server in [SERVER_V4, SERVER_V6] {
        let address = SocketAddr::new(server.parse().unwrap(), port);
        let any = if server.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
        let exchange = || {
            for number in 0..64_u8 {
                let socket = UdpSocket::bind(any).unwrap();
                socket.set_read_timeout(Some(TIMEOUT)).unwrap();
                socket.connect(address).unwrap();
                for size in [1, 100, 1400] {
                    socket.send(&vec![number; size]).unwrap();
                    let mut reply = [0; 2000];
                    let len = socket.recv(&mut reply).unwrap();
                    assert_eq!(reply[..len], vec![number; size]);
                }
            }
        };
        testbed.client().enter(exchange).unwrap();
    }
}

/// Has 32 clients of each family at once exchange some bytes with a TCP echo server.
fn exchange_streams(testbed: &Testbed, port: u16) {
    for server in [SERVER_V4, SERVER_V6] {
        let address = SocketAddr::new(server.parse().unwrap(), port);
        let exchange = || {
            let connect = |_| TcpStream::connect(address).unwrap();
            let mut streams: Vec<_> = (0..32).map(connect).collect();
            for (number, stream) in (0_u8..).zip(&mut streams) {
                stream.set_read_timeout(Some(TIMEOUT)).unwrap();
                stream.write_all(&[number; 3000]).unwrap();
                let mut reply = [0; 3000];
                stream.read_exact(&mut reply).unwrap();
                assert_eq!(reply, [number; 3000]);
            }
        };
        testbed.client().enter(exchange).unwrap();
    }
}

/// Figure of each core in the report of a server.
fn of_cores(report: &Value, field: &str) -> Vec<u64> {
    let cores = report["cores"].as_array().unwrap();
    cores.iter().map(|core| core[field].as_u64().unwrap()).collect()
}

/// Cores that share the kernel's addresses: their port is theirs alone, and the kernel's again
/// afterwards; the kernel answers everything else.
#[test]
fn cores_share_addresses_with_the_kernel() {
    if !can_run("shared addresses", &["ping"]) {
        return;
    }
    for (io, queues, cores) in [("xdp", 2, 2), ("xdp", 1, 2), ("packet", 1, 3)] {
        let testbed = Testbed::shared_with_queues(queues);
        let bind = || UdpSocket::bind(("::", 7777)).map(drop);
        let count = cores.to_string();
        let flags = ["--io", io, "--shared", "--iface", testbed.device(), "--cores", &count];
        let serve = |service: &[&str]| testbed.start(&[service, &flags].concat());

        let server = serve(&["echo", "--listen", "7777"]);
        exchange_datagrams(&testbed, 7777);
        for address in [SERVER_V4, SERVER_V6] {
            testbed.tool("ping", &["-c", "1", "-W", "5", address]);
        }
        let refused = testbed.server().enter(bind).unwrap().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse, "{io}");
        let report = server.stop();
        assert_eq!(report["answers"], 2 * 64 * 3, "{report}");
        assert!(of_cores(&report, "delivered").iter().all(|&core| core > 0), "{report}");
        testbed.server().enter(bind).unwrap().expect("the port is the kernel's again");

        let server = serve(&["echo", "--tcp", "--listen", "7777"]);
        exchange_streams(&testbed, 7777);
        let report = server.stop();
        assert!(of_cores(&report, "handled").iter().all(|&core| core > 50), "{report}");
    }
}

/// A server whose cores have a queue each: every flow is answered, whatever its queue.
#[test]
fn server_reads_a_queue_on_each_core() {
    if !can_run("queues", &[]) {
        return;
    }
    let cases = [
        (DeviceKind::Xdp, 2, 2),
        (DeviceKind::Xdp, 2, 3),
        (DeviceKind::Xdp, 1, 2),
        // A socket for each core, whatever the card has.
        (DeviceKind::Packet, 3, 3),
    ];
    for (kind, queues, cores) in cases {
        let testbed = match kind {
            DeviceKind::Xdp => Testbed::with_queues(queues),
            kind => Testbed::new(kind),
        };
        let (listen, count) = (["echo", "--listen", "7777", "--cores"], cores.to_string());
        let arguments = [&listen[..], &[&count]].concat();
        let server = testbed.serve(kind, &arguments);
        exchange_datagrams(&testbed, 7777);
        let report = server.stop();
        let of_cores = |field| of_cores(&report, field);
        assert_eq!(report["answers"], 2 * 64 * 3, "{report}");
        assert_eq!(of_cores("delivered").iter().sum::<u64>(), 2 * 64 * 3, "{report}");
        assert!(of_cores("delivered").iter().all(|&core| core > 0), "{report}");
        // Flows cross only while a core has no queue; a few advertisements always do.
        let passing = of_cores("passed_on").into_iter().filter(|&passed| passed > 20).count();
        assert_eq!(passing, if queues == cores { 0 } else { queues }, "{report}");
    }
}

/// As [`server_reads_a_queue_on_each_core`], for DPDK devices: the kernel spreads the flows.
#[cfg(feature = "dpdk")]
#[test]
fn server_reads_a_dpdk_queue_on_each_core() {
    if !can_run("queues of DPDK", &[]) {
        return;
    }
    let veth = || Testbed::new(DeviceKind::DpdkPacket);
    for (testbed, device, cores) in [
        (veth(), "net_af_packet0,qpairs=2", "2"),
        // Queues 0 and 2 are the first core's.
        (veth(), "net_af_packet0,qpairs=3", "2"),
        (Testbed::without_device(), "net_tap0", "3"),
    ] {
        let io = format!("dpdk:{device},iface={}", testbed.device());
        let addresses = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
        let mut flags = vec!["--listen", "7777", "--cores", cores, "--io", &io];
        flags.extend(["--address", &addresses[0], "--address", &addresses[1]]);
        if device.ends_with('3') {
            flags.extend(["--queues", "3"]);
        }
        let serve = |service: &[&str]| {
            let server = testbed.start(&[service, &flags].concat());
            if let Testbed::Tap(_) = testbed {
                testbed.give_client_addresses();
            }
            server
        };
        let server = serve(&["echo"]);
        exchange_datagrams(&testbed, 7777);
        let report = server.stop();
        assert_eq!(report["answers"], 2 * 64 * 3, "{report}");
        assert!(of_cores(&report, "delivered").iter().all(|&core| core > 0), "{report}");
        let passing = of_cores(&report, "passed_on").into_iter().filter(|&passed| passed > 20);
        assert_eq!(passing.count(), 0, "{report}");

        let server = serve(&["echo", "--tcp"]);
        exchange_streams(&testbed, 7777);
        let report = server.stop();
        assert!(of_cores(&report, "handled").iter().all(|&core| core > 30), "{report}");
    }
}

/// Each network core is on its processor, also if there is one only.
#[test]
fn network_cores_run_on_their_processors() {
    if !can_run("processors", &[]) {
        return;
    }
    let testbed = Testbed::with_queues(2);
    for (cores, processors) in [("1", "1"), ("2", "1,0")] {
        let arguments = ["echo", "--listen", "7", "--cores", cores, "--core-cpus", processors];
        let server = testbed.serve(DeviceKind::Xdp, &arguments);
        let tasks = format!("/proc/{}/task", server.pid().as_raw_nonzero());
        let is_on = |processor: &str| {
            let line = format!("Cpus_allowed_list:\t{processor}");
            std::fs::read_dir(&tasks).unwrap().any(|task| {
                // A thread may end meanwhile.
                let status = std::fs::read_to_string(task.unwrap().path().join("status"));
                status.is_ok_and(|status| status.lines().any(|it| it == line))
            })
        };
        let began = Instant::now();
        for processor in processors.split(',') {
            // The threads start after the server says that it is ready.
            while !is_on(processor) {
                assert!(began.elapsed() < TIMEOUT, "no thread is on processor {processor}");
                std::thread::yield_now();
            }
        }
    }
}

/// Streams on a server whose cores have a queue each: echo, and files by HTTP.
#[test]
fn stream_servers_run_on_each_core() {
    if !can_run("streams", &["curl"]) {
        return;
    }
    let testbed = Testbed::with_queues(2);
    let server =
        testbed.serve(DeviceKind::Xdp, &["echo", "--tcp", "--listen", "7", "--cores", "2"]);
    exchange_streams(&testbed, 7);
    let report = server.stop();
    assert!(of_cores(&report, "handled").iter().all(|&core| core > 100), "{report}");

    let files = files();
    let root = files.path().to_str().unwrap();
    let http = ["http", "--root", root, "--cores", "2", "--core-cpus", "0,1"];
    let server = testbed.serve(DeviceKind::Xdp, &http);
    for address in [SERVER_V4, SERVER_V6] {
        for _ in 0..16 {
            let output = testbed.try_tool("curl", &["-sf", &url(address, "/large")]);
            assert!(output.status.success() && output.stdout.len() == 3_000_000);
        }
    }
    let report = server.stop();
    assert_eq!(report["requests"], 32, "{report}");
}
