//! Servers on Tidegate over an in-memory link, in both address families.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tidegate::{Net, NetConfig, UdpSocket};
use tidegate_apps::dns::synthetic::SyntheticZone;
use tidegate_apps::dns::{DnsConfig, DnsServer, ZoneSource, compare};
use tidegate_apps::echo::Echo;
use tidegate_apps::embedded::serve_embedded;
use tidegate_apps::{Responder, ServeCounters};

const SERVER: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
const CLIENT: [&str; 2] = ["192.0.2.2", "2001:db8::2"];

fn net(device: tidegate::mem::MemDevice, addresses: [&str; 2]) -> Net {
    let [v4, v6] = addresses;
    let config = NetConfig::new(device)
        .address(format!("{v4}/24").parse().unwrap())
        .address(format!("{v6}/64").parse().unwrap());
    Net::open(config).unwrap()
}

/// Serves both address families and calls `client` with one connected socket for each.
fn with_server(
    responder: impl Responder + Send,
    port: u16,
    client: impl FnOnce(&[UdpSocket; 2]),
) -> ServeCounters {
    let (server_device, client_device) = tidegate::mem::wire(&Default::default()).unwrap();
    let (server_net, client_net) = (net(server_device, SERVER), net(client_device, CLIENT));
    let sockets =
        SERVER.map(|ip| UdpSocket::bind(&server_net, format!("{}:{port}", bracket(ip))).unwrap());
    let clients = [0, 1].map(|family: usize| {
        let socket =
            UdpSocket::bind(&client_net, format!("{}:0", bracket(CLIENT[family]))).unwrap();
        socket.connect(format!("{}:{port}", bracket(SERVER[family]))).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        socket
    });
    let stop = Arc::new(AtomicBool::new(false));
    let counters = ServeCounters::new();
    thread::scope(|scope| {
        let (stop, counters) = (&stop, &counters);
        let mut responder = responder;
        let server = scope
            .spawn(move || serve_embedded(&server_net, &sockets, &mut responder, stop, counters));
        client(&clients);
        stop.store(true, Ordering::Relaxed);
        server.join().unwrap().unwrap();
    });
    counters
}

fn bracket(ip: &str) -> String {
    if ip.contains(':') { format!("[{ip}]") } else { ip.to_owned() }
}

#[test]
fn echoes_every_datagram() {
    let counters = with_server(Echo, 7, |clients| {
        for socket in clients {
            let mut reply = [0; 2048];
            for len in [0, 1, 64, 500, 1400] {
                let payload: Vec<u8> = (0..len).map(|at| at as u8).collect();
                socket.send(&payload).unwrap();
                let got = socket.recv(&mut reply).unwrap();
                assert_eq!(reply[..got], payload);
            }
        }
    });
    assert_eq!(counters.requests.into_inner(), 10);
    assert_eq!(counters.replies.into_inner(), 10);
}

#[test]
fn dns_replies_match_the_direct_responder() {
    let zone = SyntheticZone { origin: "mem.test".into(), name_count: 200, seed: 5 };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mem.test.zone");
    zone.write_zone(&mut std::fs::File::create(&path).unwrap()).unwrap();
    let zones = vec![ZoneSource { origin: None, path }];
    let mut direct = DnsServer::load(&DnsConfig { zones, ..DnsConfig::default() }).unwrap();
    let shared = direct.share();
    let counters = with_server(shared, 53, |clients| {
        for index in 0..400_u16 {
            let message = zone.question(index.into()).to_message(index, Some(1232));
            let socket = &clients[usize::from(index % 2)];
            socket.send(&message).unwrap();
            let mut got = [0; 4096];
            let got_len = socket.recv(&mut got).unwrap();
            let mut expected = [0; 4096];
            let from = "192.0.2.2:4000".parse().unwrap();
            let len = direct.respond(&message, from, &mut expected).unwrap();
            compare(&expected[..len], &got[..got_len]).unwrap();
        }
    });
    assert_eq!(counters.replies.into_inner(), 400);
}

#[test]
fn sends_nothing_when_the_responder_returns_none() {
    struct Silent;
    impl Responder for Silent {
        fn respond(
            &mut self,
            request: &[u8],
            _from: std::net::SocketAddr,
            reply: &mut [u8],
        ) -> Option<usize> {
            (request != b"secret").then(|| {
                reply[..2].copy_from_slice(b"ok");
                2
            })
        }
    }
    let counters = with_server(Silent, 9, |clients| {
        for socket in clients {
            socket.send(b"secret").unwrap();
            socket.send(b"open").unwrap();
            let mut reply = [0; 16];
            // Replies keep their order: a reply to the first datagram would have come first.
            assert_eq!(socket.recv(&mut reply).unwrap(), 2);
            socket.set_nonblocking(true).unwrap();
            assert_eq!(socket.recv(&mut reply).unwrap_err().kind(), ErrorKind::WouldBlock);
        }
    });
    assert_eq!(counters.requests.into_inner(), 4);
    assert_eq!(counters.replies.into_inner(), 2);
}
