//! Unmodified applications that connect to addresses of their own host.

mod support;

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use support::run::{ChildProcess, Daemon, ServerHost};
use support::{CLIENT_V4, CLIENT_V6, DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run};

/// Upper bound for any step.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Exchanges traffic with itself on each address given, and then on 127.0.0.1. Uses blocking
/// calls, timeouts, threads and asyncio.
const SELF_TRAFFIC_SCRIPT: &str = "import asyncio, socket, sys, threading
DATA = bytes(range(256)) * 2000

def streams(address):
    def serve():
        with listener.accept()[0] as peer:
            while data := peer.recv(10000):
                peer.sendall(data)
    with socket.create_server((address, 7), family=family) as listener:
        server = threading.Thread(target=serve)
        server.start()
        with socket.create_connection((address, 7), timeout=20) as client:
            client.settimeout(20)
            assert client.getpeername()[0] == client.getsockname()[0] == address
            writer = threading.Thread(target=client.sendall, args=(DATA,))
            writer.start()
            got = b''
            while len(got) < len(DATA):
                got += client.recv(10000)
            writer.join()
            assert got == DATA
        server.join()

def datagrams(address):
    server, client = (socket.socket(family, socket.SOCK_DGRAM) for _ in range(2))
    server.bind((address, 7))
    for number in range(100):
        client.sendto(bytes([number]), (address, 7))
        server.settimeout(20)
        data, peer = server.recvfrom(100)
        assert peer[0] == address
        server.sendto(data, peer)
        client.settimeout(20)
        assert client.recv(100) == bytes([number])
    client.connect((address, 9))
    client.send(b'x')
    try:
        client.recv(100)
        raise SystemExit('the datagram was not refused')
    except ConnectionRefusedError:
        pass
    server.close()
    client.close()

async def events(address):
    async def serve(reader, writer):
        while data := await reader.read(10000):
            writer.write(data)
            await writer.drain()
        writer.close()
    server = await asyncio.start_server(serve, address, 8)
    async def ask():
        reader, writer = await asyncio.open_connection(address, 8)
        writer.write(DATA)
        assert await reader.readexactly(len(DATA)) == DATA
        writer.close()
    await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(10))), 20)
    server.close()

def refused(address):
    try:
        socket.create_connection((address, 9), timeout=20)
        raise SystemExit('the connection was not refused')
    except ConnectionRefusedError:
        pass

for address in sys.argv[1:] + ['127.0.0.1']:
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    streams(address)
    datagrams(address)
    asyncio.run(events(address))
    refused(address)
print('all exchanges passed')";

fn assert_self_traffic(mut command: Command, what: &str) {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.stdout, b"all exchanges passed\n", "{what}: {error}");
}

const SELF_TRAFFIC: [&str; 5] = ["python3", "-c", SELF_TRAFFIC_SCRIPT, SERVER_V4, SERVER_V6];

#[test]
fn application_exchanges_traffic_with_itself() {
    if !can_run("run_loopback", &["python3"]) {
        return;
    }
    for (kind, io) in
        [(DeviceKind::Xdp, "xdp"), (DeviceKind::Packet, "packet"), (DeviceKind::Tap, "tap")]
    {
        let testbed = Testbed::new(kind);
        assert_self_traffic(testbed.run(&["--io", io], &SELF_TRAFFIC), io);
    }
}

#[test]
fn applications_of_one_daemon_reach_each_other() {
    if !can_run("run_loopback_attached", &["python3", "curl"]) {
        return;
    }
    for cores in ["1", "2"] {
        let testbed = Testbed::new(DeviceKind::Xdp);
        let daemon = Daemon::start(&testbed, &["--cores", cores]);
        assert_self_traffic(daemon.run(&[], &SELF_TRAFFIC), cores);
        let folder = tempfile::tempdir().unwrap();
        let large: Vec<u8> = (0..3_000_000).map(|n| (n % 251) as u8).collect();
        std::fs::write(folder.path().join("large"), &large).unwrap();
        let folder = folder.path().to_str().unwrap();
        let _server =
            daemon.run_server(&["python3", "-m", "http.server", "-d", folder, "-b", "::"], 8000);
        for address in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
            let url = format!("http://{address}:8000/large");
            let request = ["curl", "-sS", "--max-time", "20", &url];
            let output = daemon.run(&[], &request).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.stdout == large, "{cores} cores, {address}: {error}");
        }
    }
}

/// Standard output of a process that must have succeeded.
fn stdout_of(output: Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Sum of counters of the server's kernel (`/proc/net/snmp`, `/proc/net/snmp6`).
fn kernel_counter(testbed: &Testbed, names: &[&str]) -> u64 {
    let files = ["/proc/net/snmp", "/proc/net/snmp6"];
    let text = stdout_of(testbed.server().command("cat").args(files).output().unwrap());
    // snmp has a line of names and a line of values; snmp6 has one name and value a line.
    let lines: Vec<Vec<&str>> =
        text.lines().map(|line| line.split_whitespace().collect()).collect();
    let pairs = lines.windows(2).filter(|pair| pair[0].len() > 2 && pair[0][0] == pair[1][0]);
    let in_table = pairs.flat_map(|pair| {
        pair[0]
            .iter()
            .zip(&pair[1])
            .skip(1)
            .map(|(name, value)| (format!("{}{name}", pair[0][0]), *value))
    });
    let in_list =
        lines.iter().filter(|line| line.len() == 2).map(|line| (line[0].to_owned(), line[1]));
    let all: Vec<(String, &str)> = in_table.chain(in_list).collect();
    let of = |name: &&str| -> u64 {
        let found = all.iter().find(|(own, _)| own == name);
        found.unwrap_or_else(|| panic!("no {name} in {text}")).1.parse().unwrap()
    };
    names.iter().map(of).sum()
}

#[test]
fn listener_on_shared_address_is_reachable_from_its_host() {
    if !can_run("run_loopback_shared", &["python3", "curl"]) {
        return;
    }
    ServerHost::each_shared(|host| {
        let testbed = host.testbed();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("page"), "tide\n").unwrap();
        let folder = folder.path().to_str().unwrap();
        for (bind, address) in [
            (SERVER_V4, SERVER_V4),
            (SERVER_V6, SERVER_V6),
            ("0.0.0.0", SERVER_V4),
            ("::", SERVER_V6),
        ] {
            let serve = ["python3", "-m", "http.server", "-d", folder, "-b", bind, "8000"];
            let _server = ChildProcess::new(&mut host.run(&serve));
            testbed.wait_for_port(address, 8000);
            let name = if address.contains(':') { format!("[{address}]") } else { address.into() };
            let url = format!("http://{name}:8000/page");
            let request = ["-sS", "--max-time", "20", &url];
            let kernel_connections = || kernel_counter(testbed, &["Tcp:PassiveOpens"]);
            let before = kernel_connections();
            assert_eq!(testbed.tool("curl", &request), "tide\n", "from the network, {bind}");
            assert_eq!(
                kernel_connections(),
                before,
                "traffic from the network reaches Tidegate, {bind}"
            );
            let local = testbed.server().command("curl").args(request).output().unwrap();
            assert_eq!(stdout_of(local), "tide\n", "from an application on kernel sockets, {bind}");
            let on_tidegate = host.run(&[&["curl"], &request[..]].concat()).output().unwrap();
            assert_eq!(stdout_of(on_tidegate), "tide\n", "from an application on Tidegate, {bind}");
            assert_eq!(kernel_connections(), before + 2, "{bind}");
            assert_eq!(testbed.tool("curl", &request), "tide\n", "from the network again, {bind}");
        }
    });
}

/// UDP echo server on port 5300 of one address; the second argument is the way to wait.
const UDP_ECHO: &str = "import select, socket, sys
address, way = sys.argv[1:]
family = socket.AF_INET6 if ':' in address else socket.AF_INET
server = socket.socket(family, socket.SOCK_DGRAM)
server.bind((address, 5300))
if way == 'epoll':
    waits = select.epoll()
    waits.register(server, select.EPOLLIN)
    wait = waits.poll
elif way == 'edge':
    waits = select.epoll()
    waits.register(server, select.EPOLLIN | select.EPOLLET)
    wait = waits.poll
elif way == 'poll':
    waits = select.poll()
    waits.register(server, select.POLLIN)
    wait = waits.poll
elif way == 'select':
    wait = lambda: select.select([server], [], [])
else:
    wait = lambda: None
server.setblocking(way == 'block')
while True:
    wait()
    try:
        while True:
            data, peer = server.recvfrom(2000)
            server.sendto(data, peer)
    except BlockingIOError:
        pass";

/// UDP client that queries the echo server over an unconnected and a connected socket. The
/// server may not have started yet, and datagrams may be lost, so the client retries.
const UDP_CLIENT: &str = "import socket, sys, time
address = sys.argv[1]
family = socket.AF_INET6 if ':' in address else socket.AF_INET
for connects in (False, True):
    client = socket.socket(family, socket.SOCK_DGRAM)
    if connects:
        client.connect((address, 5300))
    client.settimeout(0.1)
    until = time.monotonic() + 20
    for number in range(3):
        data = bytes([number])
        while True:
            assert time.monotonic() < until, f'no reply, {connects=} {number=}'
            try:
                client.send(data) if connects else client.sendto(data, (address, 5300))
                answer, peer = client.recvfrom(100)
                assert peer[:2] == (address, 5300), peer
                if answer == data:
                    break
            except (TimeoutError, ConnectionRefusedError):
                pass
print('all replies received')";

#[test]
fn datagrams_to_shared_address_arrive_from_its_host() {
    if !can_run("run_loopback_shared_udp", &["python3"]) {
        return;
    }
    ServerHost::each_shared(|host| {
        let testbed = host.testbed();
        for (address, wait_mode) in [
            (SERVER_V4, "block"),
            (SERVER_V6, "block"),
            (SERVER_V4, "epoll"),
            (SERVER_V6, "edge"),
            (SERVER_V4, "poll"),
            (SERVER_V6, "select"),
        ] {
            let _server =
                ChildProcess::new(&mut host.run(&["python3", "-c", UDP_ECHO, address, wait_mode]));
            let request = ["-c", UDP_CLIENT, address];
            // The first datagrams go to the kernel until the server has bound its port.
            assert_eq!(
                testbed.tool("python3", &request),
                "all replies received\n",
                "{address} {wait_mode}"
            );
            let kernel_datagrams =
                || kernel_counter(testbed, &["Udp:InDatagrams", "Udp6InDatagrams"]);
            let before = kernel_datagrams();
            assert_eq!(
                testbed.tool("python3", &request),
                "all replies received\n",
                "{address} {wait_mode}"
            );
            assert_eq!(kernel_datagrams(), before, "datagrams from the network reach Tidegate");
            let local = testbed.server().command("python3").args(request).output().unwrap();
            assert_eq!(
                stdout_of(local),
                "all replies received\n",
                "from kernel sockets, {address} {wait_mode}"
            );
            let on_tidegate = host.run(&[&["python3"], &request[..]].concat()).output().unwrap();
            assert_eq!(
                stdout_of(on_tidegate),
                "all replies received\n",
                "from an application on Tidegate, {address} {wait_mode}"
            );
            assert!(kernel_datagrams() > before);
        }
    });
}

#[test]
fn udp_server_connects_to_a_client_on_its_host() {
    if !can_run("run_loopback_connects", &["iperf3"]) {
        return;
    }
    ServerHost::each_shared(|host| {
        let testbed = host.testbed();
        let _server = host.run_server(&["iperf3", "-s"], 5201);
        for address in ["127.0.0.1", "::1", SERVER_V4, SERVER_V6] {
            // The server connects the socket that received the request and binds another one.
            for more in [&[][..], &["-R"]] {
                let udp = ["-c", address, "-u", "-b", "10M", "-n", "200K", "--json"];
                let began = Instant::now();
                let error = loop {
                    let mut client = testbed.server().command("iperf3");
                    let output = client.args(udp).args(more).output().unwrap();
                    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
                    let error = report["error"].as_str().map(str::to_owned);
                    // The server closes its listener after each run and opens a new one.
                    let is_early = |error: &String| {
                        error.ends_with("refused") || error.ends_with("reset by peer")
                    };
                    if !error.as_ref().is_some_and(is_early) || began.elapsed() > TIMEOUT {
                        break error;
                    }
                };
                assert_eq!(error, None, "{address} {more:?}");
            }
        }
    });
}

/// Connects a UDP socket to an echo server. A datagram to the socket's port from another
/// socket of this host must not be received.
const CONNECTED_CLIENT: &str = "import socket, sys
own, peer = sys.argv[1:]
family = socket.AF_INET6 if ':' in own else socket.AF_INET
client, other = (socket.socket(family, socket.SOCK_DGRAM) for _ in range(2))
client.bind((own, 5301))
client.connect((peer, 5300))
other.sendto(b'other', (own, 5301))
client.settimeout(0.1)
for attempt in range(300):
    try:
        client.send(b'echo')
        print(client.recv(100).decode())
        break
    except (TimeoutError, ConnectionRefusedError):
        pass";

#[test]
fn connected_udp_socket_ignores_other_local_senders() {
    if !can_run("run_loopback_connected", &["python3", "ping"]) {
        return;
    }
    ServerHost::each_shared(|host| {
        for (own, peer) in [(SERVER_V4, CLIENT_V4), (SERVER_V6, CLIENT_V6)] {
            // Resolves the neighbours before the test.
            host.testbed().tool("ping", &["-c", "1", "-w", "30", own]);
            let mut echo = host.testbed().client().command("python3");
            let _echo = ChildProcess::new(echo.args(["-c", UDP_ECHO, peer, "block"]));
            let output =
                host.run(&["python3", "-c", CONNECTED_CLIENT, own, peer]).output().unwrap();
            assert_eq!(stdout_of(output), "echo\n", "{own}");
        }
    });
}
