//! Tokio futures, on two hosts in one process.
#![cfg(feature = "tokio")]

mod two_hosts;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use tidegate::tokio::{TcpListener, TcpStream, drive};
use tidegate::{Net, TcpOptions};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use two_hosts::{Daemons, FAMILIES};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Driver of the stacks.
#[derive(Clone, Copy, Debug)]
enum Drive {
    Task,
    Thread,
    /// A daemon with this number of cores, and a task that receives its notifications.
    Daemon(usize),
}

fn hosts(drive_by: Drive, daemons: Option<&Daemons>) -> [Net; 2] {
    let own_thread = matches!(drive_by, Drive::Thread);
    let hosts = match daemons {
        Some(daemons) => daemons.attach(),
        None => two_hosts::open(1024, |config| config.own_thread(own_thread)),
    };
    for net in &hosts {
        tokio::spawn(drive(net.clone()));
    }
    hosts
}

/// Runs `check` on every kind of runtime and driver, on both families.
fn on_every_runtime<F: Future<Output = ()>>(check: impl Fn([Net; 2], SocketAddr) -> F) {
    let runtimes: [fn() -> Runtime; 2] = [
        || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
        || {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(2).enable_all().build().unwrap()
        },
    ];
    for runtime in runtimes {
        for drive_by in [Drive::Task, Drive::Thread, Drive::Daemon(1), Drive::Daemon(3)] {
            for [_, server] in FAMILIES {
                let to = SocketAddr::new(server.parse().unwrap(), 7);
                let daemons = match drive_by {
                    Drive::Daemon(cores) => Some(two_hosts::daemons(1024, cores)),
                    _ => None,
                };
                runtime().block_on(async {
                    let check = check(hosts(drive_by, daemons.as_ref()), to);
                    timeout(TIMEOUT, check).await.unwrap_or_else(|_| panic!("{drive_by:?} {to}"));
                });
            }
        }
    }
}

#[test]
fn echoes_stream_and_closes() {
    on_every_runtime(|[a, b], to| async move {
        let listener = TcpListener::bind(&b, to).unwrap();
        let server = tokio::spawn(async move {
            let (stream, peer) = listener.accept().await.unwrap();
            assert_eq!(stream.peer_addr().unwrap(), peer);
            let (mut read, mut write) = tokio::io::split(stream);
            let echoed = tokio::io::copy(&mut read, &mut write).await.unwrap();
            write.shutdown().await.unwrap();
            echoed
        });
        let stream = TcpStream::connect(&a, to).await.unwrap();
        let (mut read, mut write) = tokio::io::split(stream);
        let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
        let copy = sent.clone();
        let writer = tokio::spawn(async move {
            write.write_all(&copy).await.unwrap();
            write.shutdown().await.unwrap();
            write.write_all(b"more").await.unwrap_err().kind()
        });
        let mut received = Vec::new();
        read.read_to_end(&mut received).await.unwrap();
        assert!(received == sent);
        assert_eq!(writer.await.unwrap(), ErrorKind::BrokenPipe);
        assert_eq!(server.await.unwrap(), sent.len() as u64);
    });
}

#[test]
fn many_tasks_on_one_listener() {
    on_every_runtime(|[a, b], to| async move {
        let listener = TcpListener::bind(&b, to).unwrap();
        for _ in 0..4 {
            let listener = listener.clone();
            tokio::spawn(async move {
                loop {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    tokio::spawn(async move {
                        let mut received = Vec::new();
                        stream.read_to_end(&mut received).await.unwrap();
                        stream.write_all(&received).await.unwrap();
                    });
                }
            });
        }
        let clients = (0..50_u8).map(|n| {
            let a = a.clone();
            tokio::spawn(async move {
                let mut stream = TcpStream::connect(&a, to).await.unwrap();
                let sent = vec![n; 2000 + usize::from(n)];
                stream.write_all(&sent).await.unwrap();
                stream.shutdown().await.unwrap();
                let mut received = Vec::new();
                stream.read_to_end(&mut received).await.unwrap();
                assert!(received == sent, "client {n}");
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await.unwrap();
        }
    });
}

#[test]
fn full_connection_becomes_writable_when_peer_reads() {
    on_every_runtime(|[a, b], to| async move {
        let small = TcpOptions::default().send_buffer_bytes(4096).receive_buffer_bytes(4096);
        let listener = TcpListener::bind_with(&b, to, 4, small).unwrap();
        let mut client = TcpStream::connect_with(&a, to, small).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let payload = [7; 100_000];
        let writer = tokio::spawn(async move {
            client.write_all(&payload).await.unwrap();
            client
        });
        let mut received = vec![0; 100_000];
        server.read_exact(&mut received).await.unwrap();
        assert!(received == payload);
        let mut client = writer.await.unwrap();
        // A vectored write, and an end by a reset.
        let parts = [std::io::IoSlice::new(b"high "), std::io::IoSlice::new(b"water")];
        assert!(client.is_write_vectored());
        assert_eq!(client.write_vectored(&parts).await.unwrap(), 10);
        let mut received_text = [0; 10];
        server.read_exact(&mut received_text).await.unwrap();
        assert_eq!(&received_text, b"high water");
        server.set_reset_on_close(true);
        drop(server);
        let error = client.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn connect_to_closed_port_is_refused() {
    on_every_runtime(|[a, _b], to| async move {
        let error = TcpStream::connect(&a, to).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn dropped_future_leaves_no_waiter() {
    on_every_runtime(|[a, b], to| async move {
        let listener = TcpListener::bind(&b, to).unwrap();
        let early = timeout(Duration::from_millis(5), listener.accept()).await;
        assert!(early.is_err(), "no client has connected");
        let mut client = TcpStream::connect(&a, to).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let early = timeout(Duration::from_millis(5), client.read_u8()).await;
        assert!(early.is_err(), "nothing was sent");
        drop(server);
        assert_eq!(client.read(&mut [0; 10]).await.unwrap(), 0);
    });
}
