//! Transfer of sockets between applications with a kernel file descriptor.

mod support;

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::time::Instant;

use support::{
    DaemonPair, FAMILIES, TIMEOUT, address, connection_pair, testbeds, wait_until,
    wait_until_connected,
};
use tidegate_service::attachment::{Attachment, SocketType};
use tidegate_service::{Handle, Shard};
use tidegate_stack::{TcpOptions, UdpOptions};

/// Kernel socket whose descriptor identifies a transfer.
fn descriptor() -> UdpSocket {
    UdpSocket::bind("127.0.0.1:0").unwrap()
}

/// Number of holders of each socket, for each application at the second daemon.
fn holders(testbed: &DaemonPair) -> Vec<Vec<usize>> {
    let apps = testbed.report(1).applications;
    apps.iter().map(|app| app.sockets.iter().map(|socket| socket.holders).collect()).collect()
}

fn connect(client: &mut Attachment, to: SocketAddr) -> Handle {
    let socket = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
    wait_until_connected(client, socket).unwrap();
    socket
}

#[test]
fn transferred_listener_outlives_its_sender() {
    for (testbed, family) in testbeds() {
        let (mut client, mut sender) = (testbed.attach(0), testbed.attach(1));
        let mut receivers = [testbed.attach(1), testbed.attach(1)];
        let to = address(1, family, 80);
        // The receivers already use the handle that the listener has at its sender.
        let own = receivers.each_mut().map(|receiver| {
            let local = address(1, family, 0);
            receiver.bind_udp(local, UdpOptions::default()).unwrap()
        });
        let listener = sender.listen(to, 8, TcpOptions::default()).unwrap();
        let descriptor = descriptor();
        for _ in &receivers {
            sender.send_socket(listener, Shard::ONLY, descriptor.as_fd()).unwrap();
        }
        connect(&mut client, to);
        drop(sender);
        let began = Instant::now();
        while holders(&testbed).len() > receivers.len() {
            assert!(began.elapsed() < TIMEOUT, "the sender is still attached");
            std::thread::yield_now();
        }
        let mut received = Vec::new();
        for receiver in &mut receivers {
            let shard = receiver.receive_socket(0, descriptor.as_fd()).unwrap();
            assert_eq!((shard.socket_type, shard.is_new), (SocketType::Listener, true));
            assert_eq!(receiver.local_addr(shard.socket).unwrap(), to);
            received.push(shard.socket);
        }
        assert!(!received.contains(&own[0]));
        let error = receivers[0].receive_socket(0, descriptor.as_fd()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotConnected, "it was sent for two receivers");
        // The connection that waited, and one more for each receiver.
        for n in [0, 1, 0] {
            wait_until(&mut receivers[n], |receiver| receiver.accept(received[n])).unwrap();
            connect(&mut client, to);
        }
        let [first, second] = &mut receivers;
        first.close(received[0], false);
        first.ping().unwrap();
        connect(&mut client, to);
        wait_until(second, |receiver| receiver.accept(received[1])).unwrap();
        second.close(received[1], false);
        second.ping().unwrap();
        let refused = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
        assert!(wait_until_connected(&mut client, refused).is_err());
        for (receiver, own) in receivers.iter_mut().zip(own) {
            assert!(receiver.local_addr(own).is_ok());
            assert!(receiver.bind_udp(address(1, family, 0), UdpOptions::default()).is_ok());
        }
    }
}

/// Kernel listener on this port.
fn kernel_listener(to: SocketAddr) -> TcpListener {
    let any = if to.is_ipv4() { "0.0.0.0" } else { "::" };
    TcpListener::bind((any, to.port())).unwrap()
}

#[test]
fn holders_of_the_kernel_socket_share_the_listener() {
    for (testbed, family) in testbeds() {
        let (mut client, mut first) = (testbed.attach(0), testbed.attach(1));
        let kernel_socket = kernel_listener(address(1, family, 0));
        let port = kernel_socket.local_addr().unwrap().port();
        let to = address(1, family, port);
        let listen = |app: &mut Attachment| app.listen(to, 8, TcpOptions::default());
        first.reserve_port(Shard::ONLY, kernel_socket.as_fd()).unwrap();
        let own = listen(&mut first).unwrap();
        // Another process cannot open a second listener there, but it can share the first.
        let mut second = testbed.attach(1);
        second.reserve_port(Shard::ONLY, kernel_socket.as_fd()).unwrap();
        assert_eq!(listen(&mut second).unwrap_err().kind(), ErrorKind::AddrInUse);
        let received = second.receive_socket(0, kernel_socket.as_fd()).unwrap();
        assert_eq!((received.socket_type, received.is_new), (SocketType::Listener, true));
        let again = second.receive_socket(0, kernel_socket.as_fd()).unwrap();
        assert_eq!((again.socket, again.is_new), (received.socket, false));
        assert!(second.receive_socket(0, descriptor().as_fd()).is_err());
        // The shared listener can be sent, too, and the transfer can be cancelled.
        second.send_socket(received.socket, Shard::ONLY, kernel_socket.as_fd()).unwrap();
        second.withdraw_socket(0, kernel_socket.as_fd()).unwrap();
        assert_eq!(holders(&testbed), [vec![2], vec![2]]);
        for _ in 0..2 {
            connect(&mut client, to);
        }
        wait_until(&mut first, |app| app.accept(own)).unwrap();
        wait_until(&mut second, |app| app.accept(received.socket)).unwrap();
        first.close(own, false);
        first.ping().unwrap();
        connect(&mut client, to);
        wait_until(&mut second, |app| app.accept(received.socket)).unwrap();
        // The last holder closes the listener: it can no longer be received.
        second.close(received.socket, false);
        second.ping().unwrap();
        let error = first.receive_socket(0, kernel_socket.as_fd()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotConnected);
        listen(&mut first).unwrap();
    }
}

#[test]
fn transferred_connection_continues_at_same_byte() {
    for (testbed, family) in testbeds() {
        let mut apps = [testbed.attach(0), testbed.attach(1)];
        let [ours, theirs] = connection_pair(&mut apps, address(1, family, 80));
        let [mut client, mut sender] = apps;
        client.send(ours, b"one two three").unwrap();
        let mut buf = [0; 100];
        let read = |app: &mut Attachment, socket, buf: &mut [u8]| {
            wait_until(app, |app| app.recv(socket, buf, false)).unwrap()
        };
        assert_eq!(read(&mut sender, theirs, &mut buf[..4]), 4);
        sender.send(theirs, b"from the first, ").unwrap();
        // Transferred twice, through a process that does nothing with the socket.
        let mut receiver = testbed.attach(1);
        let mut socket = theirs;
        for _ in 0..2 {
            let descriptor = descriptor();
            sender.send_socket(socket, Shard::ONLY, descriptor.as_fd()).unwrap();
            sender.close(socket, false);
            sender.ping().unwrap();
            let received = receiver.receive_socket(0, descriptor.as_fd()).unwrap();
            assert_eq!((received.socket_type, received.is_new), (SocketType::Stream, true));
            assert_eq!(
                receiver.peer_addr(received.socket).unwrap(),
                client.local_addr(ours).unwrap()
            );
            assert!(receiver.readiness(received.socket).readable);
            receiver.ping().unwrap();
            (sender, socket) = (receiver, received.socket);
            receiver = testbed.attach(1);
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
        assert_eq!(read(&mut client, ours, &mut buf), 0, "the peer sees the end of the stream");
    }
}

#[test]
fn receives_only_sent_sockets_by_their_fd() {
    let testbed = DaemonPair::new();
    let (mut sender, mut receiver) = (testbed.attach(1), testbed.attach(1));
    let local = address(1, FAMILIES[0], 53);
    let socket = sender.bind_udp(local, UdpOptions::default()).unwrap();
    let (fd, other_fd) = (descriptor(), descriptor());
    let refused = |app: &mut Attachment, fd: &UdpSocket| {
        app.receive_socket(0, fd.as_fd()).unwrap_err().kind()
    };
    assert_eq!(refused(&mut receiver, &fd), ErrorKind::NotConnected);
    sender.send_socket(socket, Shard::ONLY, fd.as_fd()).unwrap();
    assert_eq!(holders(&testbed), [vec![2], vec![]]);
    assert_eq!(refused(&mut receiver, &other_fd), ErrorKind::NotConnected);
    // A socket has one descriptor, and a descriptor one socket.
    assert_eq!(
        sender.send_socket(socket, Shard::ONLY, other_fd.as_fd()).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    let second = sender.bind_udp(address(1, FAMILIES[1], 53), UdpOptions::default()).unwrap();
    assert_eq!(
        sender.send_socket(second, Shard::ONLY, fd.as_fd()).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    // A descriptor that is not a socket is refused.
    let file = tempfile::tempfile().unwrap();
    assert!(sender.send_socket(second, Shard::ONLY, file.as_fd()).is_err());
    sender.withdraw_socket(0, fd.as_fd()).unwrap();
    assert_eq!(holders(&testbed), [vec![1, 1], vec![]]);
    assert_eq!(refused(&mut receiver, &fd), ErrorKind::NotConnected);
    // A holder that receives the socket gets the handle that it already has.
    sender.send_socket(socket, Shard::ONLY, fd.as_fd()).unwrap();
    let received = sender.receive_socket(0, fd.as_fd()).unwrap();
    assert_eq!((received.socket, received.is_new), (socket, false));
    assert_eq!(holders(&testbed), [vec![1, 1], vec![]]);
    // A transfer cancelled after its sender has closed the socket closes it for good.
    sender.send_socket(socket, Shard::ONLY, fd.as_fd()).unwrap();
    sender.close(socket, false);
    sender.ping().unwrap();
    assert!(receiver.bind_udp(local, UdpOptions::default()).is_err());
    sender.withdraw_socket(0, fd.as_fd()).unwrap();
    assert!(receiver.bind_udp(local, UdpOptions::default()).is_ok());
}
