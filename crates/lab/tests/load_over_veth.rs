//! The generators against a kernel echo server, over a real veth pair.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_lab::load::{
    Answer, AskerConfig, LinkKind, LoadConfig, Question, TcpLoadReport, load_tcp_at_device,
    load_udp,
};
use tidegate_lab::netns::{Namespace, VethConfig, VethPair};
use tidegate_lab::{LabError, cpu};

/// True when a namespace can be made; says so when not.
fn may_make_namespaces() -> bool {
    match Namespace::new("probe") {
        Ok(_) => true,
        Err(error @ (LabError::Permission { .. } | LabError::Missing { .. })) => {
            eprintln!("skipped: {error}");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

fn pair(client_has_addresses: bool) -> VethPair {
    let own = |n: u8| vec![format!("10.99.0.{n}/24"), format!("fd99::{n}/64")];
    let a = if client_has_addresses { own(1) } else { Vec::new() };
    VethPair::new(&VethConfig { a, b: own(2) }).unwrap()
}

/// Echoes in the second namespace until `work` in the first is done.
fn with_echo<T: Send>(
    pair: &VethPair,
    server: IpAddr,
    work: impl FnOnce(SocketAddr) -> T + Send,
) -> T {
    let socket = pair.b.namespace.enter(|| UdpSocket::bind((server, 0)).unwrap()).unwrap();
    let target = socket.local_addr().unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 2048];
            while !over.load(Ordering::Relaxed) {
                if let Ok((len, from)) = socket.recv_from(&mut buffer) {
                    let _ = socket.send_to(&buffer[..len], from);
                }
            }
        });
        let done = pair.a.namespace.enter(|| work(target)).unwrap();
        over.store(true, Ordering::Relaxed);
        done
    })
}

fn echoes(link: LinkKind) {
    if !may_make_namespaces() {
        return;
    }
    let pair = pair(link == LinkKind::Kernel);
    let interface = pair.a.device.clone();
    for (source, server) in [("10.99.0.9", "10.99.0.2"), ("fd99::9", "fd99::2")] {
        let mut config = LoadConfig::new(link, "0.0.0.0:0".parse().unwrap());
        if link != LinkKind::Kernel {
            config.interface = Some(interface.clone());
            config.source = Some(source.parse().unwrap());
            config.sources = 3;
        }
        config.ports = 4;
        // So few that every queue has room for all of them, however slow the
        // machine is; the wait ends with the last answer.
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
    echoes(LinkKind::Kernel);
}

#[test]
fn echoes_come_back_over_af_packet() {
    echoes(LinkKind::Packet);
}

#[test]
fn echoes_come_back_over_af_xdp() {
    echoes(LinkKind::Xdp);
}

#[test]
fn nobody_at_the_target_is_an_error_that_says_so() {
    if !may_make_namespaces() {
        return;
    }
    let pair = pair(false);
    let mut config = LoadConfig::new(LinkKind::Packet, "10.99.0.77:9".parse().unwrap());
    config.interface = Some(pair.a.device.clone());
    config.source = Some("10.99.0.9".parse().unwrap());
    let result = pair.a.namespace.enter(|| load_udp(&config, 64, &mut |_| {})).unwrap();
    let error = result.unwrap_err();
    assert!(matches!(error, LabError::Unresolved { protocol: "ARP", .. }), "{error}");
}

#[test]
fn namespaces_are_deleted_when_dropped() {
    if !may_make_namespaces() {
        return;
    }
    let pair = pair(true);
    let names = [pair.a.namespace.name().to_owned(), pair.b.namespace.name().to_owned()];
    let exists = |name: &String| std::path::Path::new("/var/run/netns").join(name).exists();
    assert!(names.iter().all(exists));
    pair.b.set_rps(Some(0)).unwrap();
    pair.b.set_deferral(0, 0).unwrap();
    drop(pair);
    assert!(!names.iter().any(exists));
}

#[test]
fn a_napi_thread_appears_and_is_pinned() {
    if !may_make_namespaces() {
        return;
    }
    let pair = pair(true);
    assert!(pair.b.set_threaded_napi(0).is_err(), "no NAPI context without GRO or XDP");
    pair.b.ethtool(&["gro", "on"]).unwrap();
    let threads = pair.b.set_threaded_napi(0).unwrap();
    assert_eq!(threads, cpu::napi_threads(&pair.b.device));
    assert_eq!(threads.len(), 1);
}

/// Asks eight kernel sockets, each of which `answer` serves, from the device.
fn ask(
    request: &[u8],
    expected: &[u8],
    answer: impl Fn(&mut TcpStream) -> std::io::Result<()> + Copy + Send + 'static,
) -> Result<TcpLoadReport, LabError> {
    let pair = pair(true);
    // A veth takes redirected frames when it has a NAPI context.
    pair.b.ethtool(&["gro", "on"]).unwrap();
    let listener = pair.b.namespace.enter(|| TcpListener::bind("10.99.0.2:0").unwrap()).unwrap();
    let SocketAddr::V4(target) = listener.local_addr().unwrap() else { panic!("IPv4") };
    // It ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_nodelay(true).unwrap();
            std::thread::spawn(move || while answer(&mut stream).is_ok() {});
        }
    });
    let question = Question { request: request.into(), answer: Answer::Exactly(expected.into()) };
    let config = AskerConfig {
        target: (target, pair.b.mac),
        source: SocketAddrV4::new("10.99.0.1".parse().unwrap(), 20_000),
        connections: 8,
        question,
        warm_up_seconds: 0.0,
        seconds: 2.0,
        core: 0,
    };
    load_tcp_at_device(&pair.a, &config)
}

#[test]
fn a_device_asks_again_and_again() {
    if !may_make_namespaces() {
        return;
    }
    let report = ask(b"what", b"this!", |stream| {
        let mut question = [0; 4];
        stream.read_exact(&mut question)?;
        assert_eq!(&question, b"what");
        stream.write_all(b"this!")
    });
    let report = report.unwrap();
    assert_eq!((report.connections, report.broken, report.wrong_answers), (8, 0, 0), "{report}");
    // The first one of each is asked in another way.
    assert!(report.requests > 16, "{report}");
    assert_eq!(report.latency.count, report.requests);
}

#[test]
fn a_device_takes_answers_in_pieces_and_late_ones() {
    if !may_make_namespaces() {
        return;
    }
    let report = ask(b"what", b"this and that", |stream| {
        let mut question = [0; 4];
        // Longer than it waits before it asks again.
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
fn a_device_notes_wrong_answers_and_ends() {
    if !may_make_namespaces() {
        return;
    }
    let report = ask(b"what", b"this!", |stream| {
        stream.read_exact(&mut [0; 4])?;
        stream.write_all(b"that!")
    });
    let report = report.unwrap();
    assert_eq!((report.connections, report.broken, report.wrong_answers), (0, 8, 8), "{report}");
    let report = ask(b"what", b"this!", |stream| {
        stream.read_exact(&mut [0; 4])?;
        Err(std::io::ErrorKind::Other.into())
    });
    let report = report.unwrap();
    assert_eq!((report.connections, report.broken, report.wrong_answers), (0, 8, 0), "{report}");
}

#[test]
fn a_device_asks_nothing_that_has_no_room_in_the_answer() {
    if !may_make_namespaces() {
        return;
    }
    let error = ask(b"what", b"no", |_| Err(std::io::ErrorKind::Other.into())).unwrap_err();
    assert!(error.to_string().contains("no longer than its answer"), "{error}");
}
