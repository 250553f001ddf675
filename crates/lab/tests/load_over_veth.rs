//! Load generators against a kernel echo server, over a real veth pair.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_lab::LabError;
use tidegate_lab::testbed::cpu;
use tidegate_lab::testbed::load::{BpfClientConfig, load_tcp_with_bpf};
use tidegate_lab::testbed::netns::{Namespace, VethConfig, VethPair};
use tidegate_load::{
    ExpectedResponse, LinkKind, LoadConfig, LoadError, TcpLoadReport, Transaction, load_udp,
};

/// True when a namespace can be created; otherwise prints the reason.
fn can_create_namespaces() -> bool {
    match Namespace::new("probe") {
        Ok(_) => true,
        Err(error @ (LabError::Permission { .. } | LabError::Missing { .. })) => {
            tidegate_needs::skip("root", error);
            false
        }
        Err(error) => panic!("{error}"),
    }
}

fn veth_pair(client_has_addresses: bool) -> VethPair {
    let own = |n: u8| vec![format!("10.99.0.{n}/24"), format!("fd99::{n}/64")];
    let a = if client_has_addresses { own(1) } else { Vec::new() };
    VethPair::as_on_a_wire(&VethConfig { a, b: own(2) }).unwrap()
}

/// Echoes in the second namespace until `work` in the first has finished.
fn with_echo<T: Send>(
    pair: &VethPair,
    server: IpAddr,
    work: impl FnOnce(SocketAddr) -> T + Send,
) -> T {
    let socket = pair.b.namespace.enter(|| UdpSocket::bind((server, 0)).unwrap()).unwrap();
    let target = socket.local_addr().unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let finished = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 2048];
            while !finished.load(Ordering::Relaxed) {
                if let Ok((len, from)) = socket.recv_from(&mut buffer) {
                    let _ = socket.send_to(&buffer[..len], from);
                }
            }
        });
        let result = pair.a.namespace.enter(|| work(target)).unwrap();
        finished.store(true, Ordering::Relaxed);
        result
    })
}

fn check_echo(link: LinkKind) {
    if !can_create_namespaces() {
        return;
    }
    let pair = veth_pair(link == LinkKind::Kernel);
    let interface = pair.a.device.clone();
    for (source, server) in [("10.99.0.9", "10.99.0.2"), ("fd99::9", "fd99::2")] {
        let mut config = LoadConfig::new(link, "0.0.0.0:0".parse().unwrap());
        if link != LinkKind::Kernel {
            config.interface = Some(interface.clone());
            config.source = Some(source.parse().unwrap());
            config.sources = 3;
        }
        config.ports = 4;
        // So few that every queue has space for all of them, however slow the machine is; the wait
        // ends with the last reply.
        config.rate_pps = Some(1000.0);
        config.requests = Some(100);
        config.seconds = 600.0;
        config.drain_seconds = 60.0;
        let report = with_echo(&pair, server.parse().unwrap(), |target| {
            load_udp(&LoadConfig { target, ..config }, 64, &mut |_| {})
        })
        .unwrap();
        assert_eq!(report.result.sent, 100, "{report}");
        assert_eq!(report.result.answered, 100, "{report}");
        assert_eq!((report.result.answers.wrong, report.result.unmatched), (0, 0), "{report}");
        assert_eq!(report.result.latency.count, 100);
    }
}

#[test]
fn echoes_come_back_over_kernel_sockets() {
    check_echo(LinkKind::Kernel);
}

#[test]
fn echoes_come_back_over_af_packet() {
    check_echo(LinkKind::Packet);
}

#[test]
fn echoes_come_back_over_af_xdp() {
    check_echo(LinkKind::Xdp);
}

#[test]
fn reports_unresolved_target() {
    if !can_create_namespaces() {
        return;
    }
    let pair = veth_pair(false);
    let mut config = LoadConfig::new(LinkKind::Packet, "10.99.0.77:9".parse().unwrap());
    config.interface = Some(pair.a.device.clone());
    config.source = Some("10.99.0.9".parse().unwrap());
    let result = pair.a.namespace.enter(|| load_udp(&config, 64, &mut |_| {})).unwrap();
    let error = result.unwrap_err();
    assert!(matches!(error, LoadError::Unresolved { protocol: "ARP", .. }), "{error}");
}

#[test]
fn namespaces_are_deleted_when_dropped() {
    if !can_create_namespaces() {
        return;
    }
    let pair = veth_pair(true);
    let names = [pair.a.namespace.name().to_owned(), pair.b.namespace.name().to_owned()];
    let exists = |name: &String| std::path::Path::new("/var/run/netns").join(name).exists();
    assert!(names.iter().all(exists));
    pair.b.set_rps(&[0]).unwrap();
    pair.b.set_deferral(0, 0).unwrap();
    drop(pair);
    assert!(!names.iter().any(exists));
}

#[test]
fn threaded_napi_creates_and_pins_one_thread() {
    if !can_create_namespaces() {
        return;
    }
    let pair = veth_pair(true);
    assert!(pair.b.set_threaded_napi(0).is_err(), "no NAPI context without GRO or XDP");
    pair.b.ethtool(&["gro", "on"]).unwrap();
    let threads = pair.b.set_threaded_napi(0).unwrap();
    assert_eq!(threads, cpu::napi_threads(&pair.b.device));
    assert_eq!(threads.len(), 1);
}

/// Sends requests from the device to eight kernel sockets, each of which `respond` serves.
fn run_device_client(
    request: &[u8],
    expected: &[u8],
    respond: impl Fn(&mut TcpStream) -> std::io::Result<()> + Copy + Send + 'static,
) -> Result<TcpLoadReport, LabError> {
    let pair = veth_pair(true);
    // A veth device accepts redirected frames when it has a NAPI context.
    pair.b.ethtool(&["gro", "on"]).unwrap();
    let listener = pair.b.namespace.enter(|| TcpListener::bind("10.99.0.2:0").unwrap()).unwrap();
    let SocketAddr::V4(target) = listener.local_addr().unwrap() else { panic!("IPv4") };
    // The thread ends with the test process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_nodelay(true).unwrap();
            std::thread::spawn(move || while respond(&mut stream).is_ok() {});
        }
    });
    let transaction = Transaction {
        request: request.into(),
        response: ExpectedResponse::Exactly(expected.into()),
    };
    let config = BpfClientConfig {
        target: (target, pair.b.mac),
        source: SocketAddrV4::new("10.99.0.1".parse().unwrap(), 20_000),
        connections: 8,
        transaction,
        warm_up_seconds: 0.0,
        seconds: 2.0,
        core: 0,
    };
    load_tcp_with_bpf(&pair.a, &config)
}

#[test]
fn device_client_repeats_requests() {
    if !can_create_namespaces() {
        return;
    }
    let report = run_device_client(b"what", b"this!", |stream| {
        let mut question = [0; 4];
        stream.read_exact(&mut question)?;
        assert_eq!(&question, b"what");
        stream.write_all(b"this!")
    });
    let report = report.unwrap();
    assert_eq!((report.connections, report.broken, report.wrong_answers), (8, 0, 0), "{report}");
    // The first request of each connection is sent in another way.
    assert!(report.requests > 16, "{report}");
    assert_eq!(report.latency.count, report.requests);
}

#[test]
fn device_client_accepts_split_and_late_replies() {
    if !can_create_namespaces() {
        return;
    }
    let report = run_device_client(b"what", b"this and that", |stream| {
        let mut question = [0; 4];
        // Longer than the client waits before it repeats the request.
        std::thread::sleep(Duration::from_millis(150));
        stream.read_exact(&mut question)?;
        assert_eq!(&question, b"what");
        stream.write_all(b"this ")?;
        stream.write_all(b"and that")
    });
    let report = report.unwrap();
    assert_eq!((report.connections, report.broken, report.wrong_answers), (8, 0, 0), "{report}");
    assert!(report.requests > 0, "{report}");
}

#[test]
fn device_client_counts_wrong_replies_and_closes() {
    if !can_create_namespaces() {
        return;
    }
    let report = run_device_client(b"what", b"this!", |stream| {
        stream.read_exact(&mut [0; 4])?;
        stream.write_all(b"that!")
    });
    let report = report.unwrap();
    assert_eq!((report.connections, report.broken, report.wrong_answers), (0, 8, 8), "{report}");
    let report = run_device_client(b"what", b"this!", |stream| {
        stream.read_exact(&mut [0; 4])?;
        Err(std::io::ErrorKind::Other.into())
    });
    let report = report.unwrap();
    assert_eq!((report.connections, report.broken, report.wrong_answers), (0, 8, 0), "{report}");
}

#[test]
fn device_client_rejects_reply_shorter_than_request() {
    if !can_create_namespaces() {
        return;
    }
    let error =
        run_device_client(b"what", b"no", |_| Err(std::io::ErrorKind::Other.into())).unwrap_err();
    assert!(error.to_string().contains("no longer than its response"), "{error}");
}
