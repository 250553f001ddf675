//! TCP echo on every port, with the kernel's sockets and tools on the other
//! side.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use support::{Kind, SERVER_V4, SERVER_V6, Site, have, is_root};

const PORT: u16 = 7777;

fn on_every_port(test: &str, check: impl Fn(Kind, &Site)) {
    if is_root(test) {
        for kind in Kind::ALL {
            eprintln!("{test} on {kind:?}");
            check(kind, &Site::new(kind));
        }
    }
}

fn connect(server: &str) -> TcpStream {
    let stream = TcpStream::connect((server, PORT)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// Sends so many bytes and reads them back; the peer ends when we do.
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
fn streams_of_every_size_come_back_to_the_kernel() {
    on_every_port("tcp_streams", |kind, site| {
        let server = site.serve(kind, &["echo", "--tcp", "--listen", "7777"]);
        site.client()
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

/// Requests and answers on one connection, and a connection for each.
#[test]
fn requests_are_answered_one_by_one() {
    on_every_port("tcp_requests", |kind, site| {
        let server = site.serve(kind, &["echo", "--tcp", "--listen", "7777"]);
        site.client()
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

/// What the link loses, doubles and reorders arrives all the same.
#[test]
fn streams_survive_a_bad_link() {
    if !is_root("tcp_bad_link") {
        return;
    }
    let site = Site::new(Kind::Packet);
    let fault = "loss=0.02,duplication=0.02,reordering=0.05,corruption=0.005,seed=3";
    let server = site.serve(Kind::Packet, &["echo", "--tcp", "--listen", "7777", "--fault", fault]);
    site.client()
        .enter(|| {
            for address in [SERVER_V4, SERVER_V6] {
                round_trip(address, 1_000_000);
            }
        })
        .unwrap();
    drop(server);
}

#[test]
fn netcat_and_a_closed_port() {
    if !is_root("tcp_netcat") || !have("tcp_netcat", &["nc"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let server = site.serve(Kind::Xdp, &["echo", "--tcp", "--listen", "7777"]);
    let script = format!("printf 'the tide' | nc -N -w 5 {SERVER_V4} 7777");
    assert_eq!(site.tool("sh", &["-c", &script]), "the tide");
    let refused =
        site.client().enter(|| TcpStream::connect((SERVER_V6, 7778)).unwrap_err().kind()).unwrap();
    assert_eq!(refused, std::io::ErrorKind::ConnectionRefused);
    drop(server);
}

/// A server on an address of the kernel's: only its port moves.
#[test]
fn a_shared_address_leaves_other_ports_to_the_kernel() {
    if !is_root("tcp_shared") {
        return;
    }
    let site = Site::shared();
    let serve = ["echo", "--tcp", "--listen", "7777", "--shared", "--iface", site.device()];
    let server = site.start(&serve);
    let others =
        site.server().enter(|| std::net::TcpListener::bind((SERVER_V4, 7778)).unwrap()).unwrap();
    site.client()
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

/// The kernel cuts what the server sends and merges what it gets: to frames as
/// on any wire, and not at all where its device says that it can do so.
#[test]
fn streams_arrive_whole_when_the_kernel_cuts_and_merges() {
    if !is_root("tcp_segmentation") || !have("tcp_segmentation", &["ethtool"]) {
        return;
    }
    for (kind, offload) in [(Kind::Packet, "off"), (Kind::Packet, "on"), (Kind::Tap, "on")] {
        let site = Site::new(kind);
        if let Site::Veth(pair) = &site {
            for end in [&pair.a, &pair.b] {
                let mut ethtool = end.namespace.command("ethtool");
                ethtool.args(["-K", &end.device, "tx", offload, "tso", offload, "gso", offload]);
                assert!(ethtool.args(["gro", "on"]).output().unwrap().status.success());
            }
        }
        let serve = ["echo", "--tcp", "--listen", "7777", "--segmentation"];
        let server = site.serve(kind, &serve);
        site.client()
            .enter(|| {
                for address in [SERVER_V4, SERVER_V6] {
                    for bytes in [0, 1, 1461, 100_000, 8_000_000] {
                        round_trip(address, bytes);
                    }
                }
            })
            .unwrap();
        let report = server.stop();
        for reason in ["tcp_checksum", "frame_too_long", "transmit_failed"] {
            assert!(report["drops"].get(reason).is_none(), "{kind:?} {offload}: {report}");
        }
    }
}

/// The servers on kernel sockets that Tidegate is measured beside.
#[test]
fn kernel_sockets_echo_with_epoll_and_with_io_uring() {
    if !is_root("tcp_kernel") {
        return;
    }
    for way in [&[][..], &["--spin"], &["--io-uring"]] {
        let site = Site::shared();
        let flags = ["echo", "--tcp", "--port", "kernel", "--listen", "7777"];
        let server = site.start(&[&flags[..], way].concat());
        site.client()
            .enter(|| {
                for address in [SERVER_V4, SERVER_V6] {
                    for bytes in [0, 1, 1000, 100_000, 4_000_000] {
                        round_trip(address, bytes);
                    }
                    // More at once than one call hands over, and some that end badly.
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
        assert!(server.stop()["requests"].as_u64().unwrap() > 1800, "{way:?}");
    }
}
