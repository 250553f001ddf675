//! Unmodified programs that speak to addresses of their own host.

mod support;

use support::run::Daemon;
use support::{Kind, SERVER_V4, SERVER_V6, Site, have, is_root};

/// Whether a test can run that needs these programs.
fn can(test: &str, programs: &[&str]) -> bool {
    is_root(test) && have(test, programs)
}

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

fn to_itself(mut command: std::process::Command, what: &str) {
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
