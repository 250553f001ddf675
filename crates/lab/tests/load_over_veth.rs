//! The generators against a kernel echo server, over a real veth pair.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_lab::load::{LinkKind, LoadConfig, load_udp};
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
