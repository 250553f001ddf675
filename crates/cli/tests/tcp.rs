//! TCP echo on every kind of device, with the kernel's sockets and tools on the client side.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root};

const PORT: u16 = 7777;

fn on_every_device(test: &str, check: impl Fn(DeviceKind, &Testbed)) {
    if is_root(test) {
        for &kind in DeviceKind::ALL {
            eprintln!("{test} on {kind:?}");
            check(kind, &Testbed::new(kind));
        }
    }
}

fn connect(server: &str) -> TcpStream {
    let stream = TcpStream::connect((server, PORT)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// Sends `bytes` bytes and reads them back; the server closes after the client's FIN.
fn round_trip(server: &str, bytes: usize) {
    let sent: Vec<u8> = (0..bytes).map(|n| (n % 251) as u8).collect();
    let stream = connect(server);
    let received = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut received = Vec::new();
            (&stream).read_to_end(&mut received).unwrap();
            received
        });
        (&stream).write_all(&sent).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        reader.join().unwrap()
    });
    assert!(received == sent, "{server}: {} of {bytes} bytes came back", received.len());
}

#[test]
fn echoes_streams_of_every_size() {
    on_every_device("tcp_streams", |kind, testbed| {
        let server = testbed.serve(kind, &["echo", "--tcp", "--listen", "7777"]);
        testbed
            .client()
            .enter(|| {
                for address in [SERVER_V4, SERVER_V6] {
                    for bytes in [0, 1, 1000, 1460, 100_000, 4_000_000] {
                        round_trip(address, bytes);
                    }
                }
            })
            .unwrap();
        let report = server.stop();
        assert!(report["drops"].get("tcp_checksum").is_none(), "{report}");
    });
}

/// Requests and replies on one connection, and one connection for each request.
#[test]
fn answers_requests_one_by_one() {
    on_every_device("tcp_requests", |kind, testbed| {
        let server = testbed.serve(kind, &["echo", "--tcp", "--listen", "7777"]);
        testbed
            .client()
            .enter(|| {
                let mut stream = connect(SERVER_V4);
                stream.set_nodelay(true).unwrap();
                let mut buf = [0; 64];
                for n in 0..200_u8 {
                    stream.write_all(&[n; 64]).unwrap();
                    stream.read_exact(&mut buf).unwrap();
                    assert_eq!(buf, [n; 64]);
                }
                for n in 0..50 {
                    let mut stream = connect(if n % 2 == 0 { SERVER_V4 } else { SERVER_V6 });
                    stream.write_all(&[n; 10]).unwrap();
                    stream.read_exact(&mut buf[..10]).unwrap();
                    assert_eq!(buf[..10], [n; 10]);
                }
            })
            .unwrap();
        drop(server);
    });
}

/// Streams arrive intact although the link drops, duplicates, reorders and corrupts packets.
#[test]
fn streams_survive_a_faulty_link() {
    if !is_root("tcp_bad_link") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let fault = "loss=0.02,duplication=0.02,reordering=0.05,corruption=0.005,seed=3";
    let server =
        testbed.serve(DeviceKind::Packet, &["echo", "--tcp", "--listen", "7777", "--fault", fault]);
    testbed
        .client()
        .enter(|| {
            for address in [SERVER_V4, SERVER_V6] {
                round_trip(address, 1_000_000);
            }
        })
        .unwrap();
    drop(server);
}

#[test]
fn netcat_echoes_and_a_closed_port_refuses() {
    if !is_root("tcp_netcat") || !has_programs("tcp_netcat", &["nc"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = testbed.serve(DeviceKind::Xdp, &["echo", "--tcp", "--listen", "7777"]);
    let script = format!("printf 'the tide' | nc -N -w 5 {SERVER_V4} 7777");
    assert_eq!(testbed.tool("sh", &["-c", &script]), "the tide");
    let refused = testbed
        .client()
        .enter(|| TcpStream::connect((SERVER_V6, 7778)).unwrap_err().kind())
        .unwrap();
    assert_eq!(refused, std::io::ErrorKind::ConnectionRefused);
    drop(server);
}

/// A server on the host's own addresses: only its port is redirected.
#[test]
fn shared_address_leaves_other_ports_to_the_kernel() {
    if !is_root("tcp_shared") {
        return;
    }
    let testbed = Testbed::shared();
    let serve = ["echo", "--tcp", "--listen", "7777", "--shared", "--iface", testbed.device()];
    let server = testbed.start(&serve);
    let others =
        testbed.server().enter(|| std::net::TcpListener::bind((SERVER_V4, 7778)).unwrap()).unwrap();
    testbed
        .client()
        .enter(|| {
            for address in [SERVER_V4, SERVER_V6] {
                round_trip(address, 100_000);
            }
            TcpStream::connect((SERVER_V4, 7778)).unwrap();
        })
        .unwrap();
    others.accept().unwrap();
    drop(server);
}

/// The kernel segments the server's stream and coalesces what the server receives: into frames
/// as on a physical link, or not at all where its device offers the offloads. Of two network cores,
/// the second has a queue of its own on AF_PACKET and none on TAP.
#[test]
fn streams_stay_intact_with_kernel_gso_and_gro() {
    if !is_root("tcp_segmentation") || !has_programs("tcp_segmentation", &["ethtool"]) {
        return;
    }
    let kinds = [(DeviceKind::Packet, "off"), (DeviceKind::Packet, "on"), (DeviceKind::Tap, "on")];
    for ((kind, offload), cores) in kinds.into_iter().flat_map(|it| [(it, "1"), (it, "2")]) {
        let testbed = Testbed::new(kind);
        if let Testbed::Veth(pair) = &testbed {
            for end in [&pair.a, &pair.b] {
                let mut ethtool = end.namespace.command("ethtool");
                ethtool.args(["-K", &end.device, "tx", offload, "tso", offload, "gso", offload]);
                assert!(ethtool.args(["gro", "on"]).output().unwrap().status.success());
            }
        }
        let serve = ["echo", "--tcp", "--listen", "7777", "--segmentation", "--cores", cores];
        let server = testbed.serve(kind, &serve);
        testbed
            .client()
            .enter(|| {
                for address in [SERVER_V4, SERVER_V6] {
                    for bytes in [0, 1, 1461, 100_000, 8_000_000] {
                        round_trip(address, bytes);
                    }
                    // Flows for each core.
                    (0..20).for_each(|_| round_trip(address, 20_000));
                }
            })
            .unwrap();
        let report = server.stop();
        let of_cores = report["cores"].as_array().unwrap();
        assert_eq!(of_cores.len().to_string(), cores, "{report}");
        for core in of_cores {
            assert!(core["handled"].as_u64() > Some(0), "{kind:?} {offload}: {report}");
        }
        for reason in ["tcp_checksum", "frame_too_long", "transmit_failed"] {
            assert!(report["drops"].get(reason).is_none(), "{kind:?} {offload}: {report}");
        }
    }
}

/// The servers on kernel sockets that serve as the baseline for Tidegate.
#[test]
fn kernel_sockets_echo_with_epoll_and_io_uring() {
    if !is_root("tcp_kernel") {
        return;
    }
    for mode_flags in [&[][..], &["--spin"], &["--io-uring"]] {
        let testbed = Testbed::shared();
        let flags = ["echo", "--tcp", "--io", "kernel", "--listen", "7777"];
        let server = testbed.start(&[&flags[..], mode_flags].concat());
        testbed
            .client()
            .enter(|| {
                for address in [SERVER_V4, SERVER_V6] {
                    for bytes in [0, 1, 1000, 100_000, 4_000_000] {
                        round_trip(address, bytes);
                    }
                    // More connections than one call hands over; unread data resets them on close.
                    let streams: Vec<_> = (0..300).map(|_| connect(address)).collect();
                    for _ in 0..3 {
                        streams.iter().for_each(|mut stream| stream.write_all(b"tide").unwrap());
                        let mut buf = [0; 4];
                        for mut stream in &streams {
                            stream.read_exact(&mut buf).unwrap();
                            assert_eq!(&buf, b"tide");
                        }
                    }
                    streams.iter().for_each(|mut stream| stream.write_all(b"unread").unwrap());
                }
                round_trip(SERVER_V4, 1000);
            })
            .unwrap();
        assert!(server.stop()["requests"].as_u64().unwrap() > 1800, "{mode_flags:?}");
    }
}
