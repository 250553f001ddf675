//! Unmodified programs that speak to addresses of their own host.

mod support;

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use support::run::{Daemon, Host, Program};
use support::{CLIENT_V4, CLIENT_V6, Kind, SERVER_V4, SERVER_V6, Site, can};

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(30);

/// Speaks to itself on each address that it is given, in all the ways that
/// programs wait, and then to 127.0.0.1.
const TO_ITSELF: &str = "import asyncio, socket, sys, threading
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
        raise SystemExit('nobody refuses')
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
        raise SystemExit('nobody refuses')
    except ConnectionRefusedError:
        pass

for address in sys.argv[1:] + ['127.0.0.1']:
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    streams(address)
    datagrams(address)
    asyncio.run(events(address))
    refused(address)
print('it listens to itself')";

fn to_itself(mut command: Command, what: &str) {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.stdout, b"it listens to itself\n", "{what}: {error}");
}

const ITSELF: [&str; 5] = ["python3", "-c", TO_ITSELF, SERVER_V4, SERVER_V6];

#[test]
fn a_program_speaks_to_itself() {
    if !can("run_loopback", &["python3"]) {
        return;
    }
    for (kind, port) in [(Kind::Xdp, "xdp"), (Kind::Packet, "packet"), (Kind::Tap, "tap")] {
        let site = Site::new(kind);
        to_itself(site.run(&["--port", port], &ITSELF), port);
    }
}

#[test]
fn programs_on_one_daemon_speak_to_each_other() {
    if !can("run_loopback_attached", &["python3", "curl"]) {
        return;
    }
    for cores in ["1", "2"] {
        let site = Site::new(Kind::Xdp);
        let daemon = Daemon::start(&site, &["--cores", cores]);
        to_itself(daemon.run(&[], &ITSELF), cores);
        let folder = tempfile::tempdir().unwrap();
        let large: Vec<u8> = (0..3_000_000).map(|n| (n % 251) as u8).collect();
        std::fs::write(folder.path().join("large"), &large).unwrap();
        let folder = folder.path().to_str().unwrap();
        let _server =
            daemon.run_server(&["python3", "-m", "http.server", "-d", folder, "-b", "::"], 8000);
        for address in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
            let url = format!("http://{address}:8000/large");
            let ask = ["curl", "-sS", "--max-time", "20", &url];
            let output = daemon.run(&[], &ask).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.stdout == large, "{cores} cores, {address}: {error}");
        }
    }
}

/// What a program printed that went well.
fn said(output: Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// One of the counters of the server's kernel (`/proc/net/snmp`, `/proc/net/snmp6`).
fn kernel_count(site: &Site, names: &[&str]) -> u64 {
    let files = ["/proc/net/snmp", "/proc/net/snmp6"];
    let text = said(site.server().command("cat").args(files).output().unwrap());
    // The first file has lines of names and of values, the second a value a line.
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
fn a_listener_on_the_kernels_address_is_reached_from_its_own_host() {
    if !can("run_loopback_shared", &["python3", "curl"]) {
        return;
    }
    Host::each_shared(|host| {
        let site = host.site();
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
            let _server = Program::new(&mut host.run(&serve));
            site.wait_for_port(address, 8000);
            let name = if address.contains(':') { format!("[{address}]") } else { address.into() };
            let url = format!("http://{name}:8000/page");
            let ask = ["-sS", "--max-time", "20", &url];
            let kernels = || kernel_count(site, &["Tcp:PassiveOpens"]);
            let before = kernels();
            assert_eq!(site.tool("curl", &ask), "tide\n", "from the wire, {bind}");
            assert_eq!(kernels(), before, "what comes by the wire is Tidegate's, {bind}");
            let local = site.server().command("curl").args(ask).output().unwrap();
            assert_eq!(said(local), "tide\n", "from a program on the kernel, {bind}");
            let moved = host.run(&[&["curl"], &ask[..]].concat()).output().unwrap();
            assert_eq!(said(moved), "tide\n", "from one that moves, {bind}");
            assert_eq!(kernels(), before + 2, "{bind}");
            assert_eq!(site.tool("curl", &ask), "tide\n", "from the wire again, {bind}");
        }
    });
}

/// Sends back datagrams on a port of one address, by a way to wait.
const ECHO: &str = "import select, socket, sys
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

/// Asks that, by a socket that is connected and by one that is not. The server may not
/// have begun, and datagrams may be lost.
const ASK: &str = "import socket, sys, time
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
            assert time.monotonic() < until, f'nobody answers, {connects=} {number=}'
            try:
                client.send(data) if connects else client.sendto(data, (address, 5300))
                answer, peer = client.recvfrom(100)
                assert peer[:2] == (address, 5300), peer
                if answer == data:
                    break
            except (TimeoutError, ConnectionRefusedError):
                pass
print('it answers')";

#[test]
fn datagrams_to_the_kernels_address_arrive_from_its_own_host() {
    if !can("run_loopback_shared_udp", &["python3"]) {
        return;
    }
    Host::each_shared(|host| {
        let site = host.site();
        for (address, way) in [
            (SERVER_V4, "block"),
            (SERVER_V6, "block"),
            (SERVER_V4, "epoll"),
            (SERVER_V6, "edge"),
            (SERVER_V4, "poll"),
            (SERVER_V6, "select"),
        ] {
            let _server = Program::new(&mut host.run(&["python3", "-c", ECHO, address, way]));
            let ask = ["-c", ASK, address];
            // The first goes to the kernel as long as nobody has the port.
            assert_eq!(site.tool("python3", &ask), "it answers\n", "{address} {way}");
            let kernels = || kernel_count(site, &["Udp:InDatagrams", "Udp6InDatagrams"]);
            let before = kernels();
            assert_eq!(site.tool("python3", &ask), "it answers\n", "{address} {way}");
            assert_eq!(kernels(), before, "what comes by the wire is Tidegate's");
            let local = site.server().command("python3").args(ask).output().unwrap();
            assert_eq!(said(local), "it answers\n", "from the kernel, {address} {way}");
            let moved = host.run(&[&["python3"], &ask[..]].concat()).output().unwrap();
            assert_eq!(said(moved), "it answers\n", "from one that moves, {address} {way}");
            assert!(kernels() > before);
        }
    });
}

#[test]
fn a_server_for_datagrams_connects_to_a_client_on_its_own_host() {
    if !can("run_loopback_connects", &["iperf3"]) {
        return;
    }
    Host::each_shared(|host| {
        let site = host.site();
        let _server = host.run_server(&["iperf3", "-s"], 5201);
        for address in ["127.0.0.1", "::1", SERVER_V4, SERVER_V6] {
            // It connects the socket that it was asked on, and binds another one.
            for more in [&[][..], &["-R"]] {
                let udp = ["-c", address, "-u", "-b", "10M", "-n", "200K", "--json"];
                let began = Instant::now();
                let error = loop {
                    let mut client = site.server().command("iperf3");
                    let output = client.args(udp).args(more).output().unwrap();
                    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
                    let error = report["error"].as_str().map(str::to_owned);
                    // The server closes its listener after each run and makes another.
                    let is_early = |error: &String| {
                        error.ends_with("refused") || error.ends_with("reset by peer")
                    };
                    if !error.as_ref().is_some_and(is_early) || began.elapsed() > LIMIT {
                        break error;
                    }
                };
                assert_eq!(error, None, "{address} {more:?}");
            }
        }
    });
}

/// Connects a socket for datagrams to who echoes them, and hears only him: what another
/// program of this host sends to its port is not for it.
const STRANGER: &str = "import socket, sys
own, peer = sys.argv[1:]
family = socket.AF_INET6 if ':' in own else socket.AF_INET
client, stranger = (socket.socket(family, socket.SOCK_DGRAM) for _ in range(2))
client.bind((own, 5301))
client.connect((peer, 5300))
stranger.sendto(b'stranger', (own, 5301))
client.settimeout(0.1)
for attempt in range(300):
    try:
        client.send(b'echo')
        print(client.recv(100).decode())
        break
    except (TimeoutError, ConnectionRefusedError):
        pass";

#[test]
fn a_connected_socket_hears_nobody_else_on_its_own_host() {
    if !can("run_loopback_stranger", &["python3", "ping"]) {
        return;
    }
    Host::each_shared(|host| {
        for (own, peer) in [(SERVER_V4, CLIENT_V4), (SERVER_V6, CLIENT_V6)] {
            // They find each other before anything counts.
            host.site().tool("ping", &["-c", "1", "-w", "30", own]);
            let mut echo = host.site().client().command("python3");
            let _echo = Program::new(echo.args(["-c", ECHO, peer, "block"]));
            let output = host.run(&["python3", "-c", STRANGER, own, peer]).output().unwrap();
            assert_eq!(said(output), "echo\n", "{own}");
        }
    });
}
