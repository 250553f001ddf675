//! Sockets that are handed from one application to another with a descriptor of the
//! kernel's.

mod support;

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::time::Instant;

use support::{FAMILIES, LIMIT, Site, address, connected, pair, places, until};
use tidegate_service::attachment::{Attachment, Kind};
use tidegate_service::{Handle, Part};
use tidegate_stack::{TcpOptions, UdpOptions};

/// A descriptor of the kernel's.
fn descriptor() -> UdpSocket {
    UdpSocket::bind("127.0.0.1:0").unwrap()
}

/// How many have each socket of each that is attached to the second daemon.
fn holders(site: &Site) -> Vec<Vec<usize>> {
    let apps = site.report(1).applications;
    apps.iter().map(|app| app.sockets.iter().map(|socket| socket.holders).collect()).collect()
}

fn connect(client: &mut Attachment, to: SocketAddr) -> Handle {
    let socket = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
    connected(client, socket).unwrap();
    socket
}

#[test]
fn a_listener_outlives_its_sender_and_serves_who_took_it() {
    for (site, family) in places() {
        let (mut client, mut sender) = (site.attach(0), site.attach(1));
        let mut takers = [site.attach(1), site.attach(1)];
        let to = address(1, family, 80);
        // What they have already has the name that the listener has with its sender.
        let own = takers.each_mut().map(|taker| {
            let local = address(1, family, 0);
            taker.bind_udp(local, UdpOptions::default()).unwrap()
        });
        let listener = sender.listen(to, 8, TcpOptions::default()).unwrap();
        let descriptor = descriptor();
        for _ in &takers {
            sender.offer(listener, Part::ONLY, descriptor.as_fd()).unwrap();
        }
        connect(&mut client, to);
        drop(sender);
        let began = Instant::now();
        while holders(&site).len() > takers.len() {
            assert!(began.elapsed() < LIMIT, "the sender is still there");
            std::thread::yield_now();
        }
        let mut taken = Vec::new();
        for taker in &mut takers {
            let arrived = taker.take(0, descriptor.as_fd()).unwrap();
            assert_eq!((arrived.kind, arrived.is_new), (Kind::Listener, true));
            assert_eq!(taker.local_addr(arrived.socket).unwrap(), to);
            taken.push(arrived.socket);
        }
        assert!(!taken.contains(&own[0]));
        let error = takers[0].take(0, descriptor.as_fd()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotConnected, "two were to take it");
        // The one that waited, and one more for each.
        for n in [0, 1, 0] {
            until(&mut takers[n], |taker| taker.accept(taken[n])).unwrap();
            connect(&mut client, to);
        }
        let [first, second] = &mut takers;
        first.close(taken[0], false);
        first.ping().unwrap();
        connect(&mut client, to);
        until(second, |taker| taker.accept(taken[1])).unwrap();
        second.close(taken[1], false);
        second.ping().unwrap();
        let refused = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
        assert!(connected(&mut client, refused).is_err());
        for (taker, own) in takers.iter_mut().zip(own) {
            assert!(taker.local_addr(own).is_ok());
            assert!(taker.bind_udp(address(1, family, 0), UdpOptions::default()).is_ok());
        }
    }
}

/// A socket of the kernel's that is bound to this port.
fn bound(to: SocketAddr) -> TcpListener {
    let any = if to.is_ipv4() { "0.0.0.0" } else { "::" };
    TcpListener::bind((any, to.port())).unwrap()
}

#[test]
fn all_who_have_the_kernels_socket_may_listen_on_it() {
    for (site, family) in places() {
        let (mut client, mut first) = (site.attach(0), site.attach(1));
        let kernels = bound(address(1, family, 0));
        let port = kernels.local_addr().unwrap().port();
        let to = address(1, family, port);
        let listen = |app: &mut Attachment| app.listen(to, 8, TcpOptions::default());
        first.hold(Part::ONLY, kernels.as_fd()).unwrap();
        let own = listen(&mut first).unwrap();
        // The next ones cannot have another listener there, but this one.
        let mut second = site.attach(1);
        second.hold(Part::ONLY, kernels.as_fd()).unwrap();
        assert_eq!(listen(&mut second).unwrap_err().kind(), ErrorKind::AddrInUse);
        let arrived = second.take(0, kernels.as_fd()).unwrap();
        assert_eq!((arrived.kind, arrived.is_new), (Kind::Listener, true));
        let again = second.take(0, kernels.as_fd()).unwrap();
        assert_eq!((again.socket, again.is_new), (arrived.socket, false));
        assert!(second.take(0, descriptor().as_fd()).is_err());
        // It can be on its way, too, and stay where it is.
        second.offer(arrived.socket, Part::ONLY, kernels.as_fd()).unwrap();
        second.withdraw(0, kernels.as_fd()).unwrap();
        assert_eq!(holders(&site), [vec![2], vec![2]]);
        for _ in 0..2 {
            connect(&mut client, to);
        }
        until(&mut first, |app| app.accept(own)).unwrap();
        until(&mut second, |app| app.accept(arrived.socket)).unwrap();
        first.close(own, false);
        first.ping().unwrap();
        connect(&mut client, to);
        until(&mut second, |app| app.accept(arrived.socket)).unwrap();
        // The last closes it: it is nobody's any more.
        second.close(arrived.socket, false);
        second.ping().unwrap();
        let error = first.take(0, kernels.as_fd()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotConnected);
        listen(&mut first).unwrap();
    }
}

#[test]
fn a_connection_goes_on_where_its_sender_left_it() {
    for (site, family) in places() {
        let mut apps = [site.attach(0), site.attach(1)];
        let [ours, theirs] = pair(&mut apps, address(1, family, 80));
        let [mut client, mut sender] = apps;
        client.send(ours, b"one two three").unwrap();
        let mut buf = [0; 100];
        let read = |app: &mut Attachment, socket, buf: &mut [u8]| {
            until(app, |app| app.recv(socket, buf, false)).unwrap()
        };
        assert_eq!(read(&mut sender, theirs, &mut buf[..4]), 4);
        sender.send(theirs, b"from the first, ").unwrap();
        // Handed on twice, through one that does nothing with it.
        let mut taker = site.attach(1);
        let mut socket = theirs;
        for _ in 0..2 {
            let descriptor = descriptor();
            sender.offer(socket, Part::ONLY, descriptor.as_fd()).unwrap();
            sender.close(socket, false);
            sender.ping().unwrap();
            let arrived = taker.take(0, descriptor.as_fd()).unwrap();
            assert_eq!((arrived.kind, arrived.is_new), (Kind::Stream, true));
            assert_eq!(taker.peer_addr(arrived.socket).unwrap(), client.local_addr(ours).unwrap());
            (sender, socket) = (taker, arrived.socket);
            taker = site.attach(1);
        }
        assert_eq!(read(&mut sender, socket, &mut buf), 9);
        assert_eq!(&buf[..9], b"two three");
        sender.send(socket, b"from the last").unwrap();
        sender.close(socket, false);
        let mut got = Vec::new();
        while got.len() < 29 {
            let len = read(&mut client, ours, &mut buf);
            got.extend_from_slice(&buf[..len]);
        }
        assert_eq!(got, b"from the first, from the last");
        assert_eq!(read(&mut client, ours, &mut buf), 0, "it is closed for the peer");
    }
}

#[test]
fn only_what_was_offered_is_taken_and_only_with_its_descriptor() {
    let site = Site::new();
    let (mut sender, mut taker) = (site.attach(1), site.attach(1));
    let local = address(1, FAMILIES[0], 53);
    let socket = sender.bind_udp(local, UdpOptions::default()).unwrap();
    let (shown, other) = (descriptor(), descriptor());
    let refused =
        |app: &mut Attachment, shown: &UdpSocket| app.take(0, shown.as_fd()).unwrap_err().kind();
    assert_eq!(refused(&mut taker, &shown), ErrorKind::NotConnected);
    sender.offer(socket, Part::ONLY, shown.as_fd()).unwrap();
    assert_eq!(holders(&site), [vec![2], vec![]]);
    assert_eq!(refused(&mut taker, &other), ErrorKind::NotConnected);
    // A socket has one descriptor, and a descriptor one socket.
    assert_eq!(
        sender.offer(socket, Part::ONLY, other.as_fd()).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    let second = sender.bind_udp(address(1, FAMILIES[1], 53), UdpOptions::default()).unwrap();
    assert_eq!(
        sender.offer(second, Part::ONLY, shown.as_fd()).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    // Nothing that is no socket is one.
    let file = tempfile::tempfile().unwrap();
    assert!(sender.offer(second, Part::ONLY, file.as_fd()).is_err());
    sender.withdraw(0, shown.as_fd()).unwrap();
    assert_eq!(holders(&site), [vec![1, 1], vec![]]);
    assert_eq!(refused(&mut taker, &shown), ErrorKind::NotConnected);
    // Who has it already gets it by the name that it knows.
    sender.offer(socket, Part::ONLY, shown.as_fd()).unwrap();
    let arrived = sender.take(0, shown.as_fd()).unwrap();
    assert_eq!((arrived.socket, arrived.is_new), (socket, false));
    assert_eq!(holders(&site), [vec![1, 1], vec![]]);
    // One that is withdrawn after its sender has closed it is closed.
    sender.offer(socket, Part::ONLY, shown.as_fd()).unwrap();
    sender.close(socket, false);
    sender.ping().unwrap();
    assert!(taker.bind_udp(local, UdpOptions::default()).is_err());
    sender.withdraw(0, shown.as_fd()).unwrap();
    assert!(taker.bind_udp(local, UdpOptions::default()).is_ok());
}
