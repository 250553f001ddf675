//! Ends of TCP connections: resets, silence of the peer, and closing with unread data.

mod two_hosts;

use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr};
use std::thread;
use std::time::Duration;

use tidegate::{Interest, Net, Poll, TcpListener, TcpOptions, TcpStream, Token, UdpSocket};
use two_hosts::FAMILIES;

const TIMEOUT: Duration = Duration::from_secs(20);
const SMALL_BUFFER_BYTES: u32 = 4096;

/// Connects the first host to the second, with small buffers; returns both streams.
fn pair([a, b]: &[Net; 2], to: SocketAddr) -> [TcpStream; 2] {
    let options = TcpOptions::default()
        .receive_buffer_bytes(SMALL_BUFFER_BYTES)
        .send_buffer_bytes(SMALL_BUFFER_BYTES);
    let listener = TcpListener::bind_with(b, to, 4, options).unwrap();
    let accepting = thread::spawn(move || listener.accept().unwrap().0);
    let client = TcpStream::connect_nonblocking(a, to, options).unwrap();
    let mut poll = Poll::new(a);
    poll.register_for(&client, Token(0), Interest::Writable).unwrap();
    poll.wait(&mut Vec::new(), Some(TIMEOUT)).unwrap();
    let ends = [client, accepting.join().unwrap()];
    for end in &ends {
        end.set_read_timeout(Some(TIMEOUT)).unwrap();
        end.set_write_timeout(Some(TIMEOUT)).unwrap();
    }
    ends
}

/// Runs `check` on both families, with embedded stacks and with daemons.
fn on_both_families(check: impl Fn([Net; 2], SocketAddr)) {
    for [_, b] in FAMILIES {
        let address = SocketAddr::new(b.parse().unwrap(), 7);
        two_hosts::in_both_forms(1024, |nets| check(nets, address));
    }
}

/// Writes until there is no space, although the network cores have taken what they could.
fn fill(stream: &TcpStream, nets: &[Net; 2]) {
    stream.set_nonblocking(true).unwrap();
    let mut full_rounds = 0;
    while full_rounds < 100 {
        match stream.send(&[5; 1000]) {
            Ok(_) => full_rounds = 0,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                full_rounds += 1;
            }
        }
        for net in nets {
            net.run_once().unwrap();
            // The answer comes after the network core has had its turn.
            let _ = stream.info();
        }
    }
    stream.set_nonblocking(false).unwrap();
}

#[test]
fn reset_reaches_a_reader_whose_data_is_unsent() {
    on_both_families(|nets, to| {
        let [client, server] = pair(&nets, to);
        fill(&client, &nets);
        server.set_reset_on_close(true);
        drop(server);
        let error = client.recv(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert_eq!(client.recv(&mut [0; 10]).unwrap(), 0, "the error is reported once");
    });
}

#[test]
fn free_space_is_asked_for_without_taking_the_error() {
    on_both_families(|nets, to| {
        let [client, server] = pair(&nets, to);
        server.set_reset_on_close(true);
        drop(server);
        let mut poll = Poll::new(&nets[0]);
        poll.register(&client, Token(0)).unwrap();
        poll.wait(&mut Vec::new(), Some(TIMEOUT)).unwrap();
        assert_eq!(client.writable_bytes(), 0);
        let error = client.recv(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn silence_of_the_peer_times_out() {
    for [_, b] in FAMILIES {
        let to = SocketAddr::new(b.parse().unwrap(), 7);
        let embedded = two_hosts::open(1024, |config| config);
        let attached = two_hosts::attached_to_embedded(1024);
        for nets in [&embedded, &attached.nets] {
            let [client, server] = pair(nets, to);
            client.set_options(|options| options.user_timeout_ms = Some(50)).unwrap();
            // No thread runs the server's stack any more. More than the send buffer holds.
            client.set_nonblocking(true).unwrap();
            while client.send(&[5; 1000]).is_ok() {}
            client.set_nonblocking(false).unwrap();
            let error = client.recv(&mut [0; 10]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            assert_eq!(client.recv(&mut [0; 10]).unwrap(), 0, "the error is reported once");
            drop(server);
        }
    }
}

#[test]
fn close_with_unread_data_resets_the_peer() {
    on_both_families(|nets, to| {
        let [client, server] = pair(&nets, to);
        server.send(b"unread").unwrap();
        // The data is in the receive buffer, or in memory that the application shares.
        assert_eq!(client.peek(&mut [0; 10]).unwrap(), 6);
        drop(client);
        let error = server.recv(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn close_after_everything_was_read_ends_the_stream() {
    on_both_families(|nets, to| {
        let [client, server] = pair(&nets, to);
        server.send(b"read").unwrap();
        assert_eq!(client.recv(&mut [0; 10]).unwrap(), 4);
        client.send(b"last").unwrap();
        drop(client);
        assert_eq!(server.recv(&mut [0; 10]).unwrap(), 4);
        assert_eq!(server.recv(&mut [0; 10]).unwrap(), 0);
    });
}

#[test]
fn close_with_data_that_no_call_has_received_resets_the_peer() {
    for [_, b] in FAMILIES {
        let to = SocketAddr::new(b.parse().unwrap(), 7);
        let nets = two_hosts::open(1024, |config| config);
        let [client, server] = pair(&nets, to);
        // The data waits at the device: no thread runs the client's stack.
        server.send(b"unread").unwrap();
        drop(client);
        let error = server.recv(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
}

/// As at the kernel, where the call succeeds.
#[test]
fn shutdown_ends_an_attempt_to_connect() {
    on_both_families(|[a, _], to| {
        // An address of no host: there is no answer yet.
        let unused = match to {
            SocketAddr::V4(_) => "192.0.2.9:7".parse().unwrap(),
            SocketAddr::V6(_) => "[2001:db8::9]:7".parse().unwrap(),
        };
        let stream = TcpStream::connect_nonblocking(&a, unused, TcpOptions::default()).unwrap();
        stream.shutdown(Shutdown::Both).unwrap();
        let mut poll = Poll::new(&a);
        poll.register_for(&stream, Token(0), Interest::Writable).unwrap();
        poll.wait(&mut Vec::new(), Some(TIMEOUT)).unwrap();
        let error = stream.take_error().unwrap().unwrap();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn closing_ends_waiting_calls_of_other_handles() {
    on_both_families(|[_, b], to| {
        let listener = TcpListener::bind(&b, to).unwrap();
        let other = listener.clone();
        let waiting = thread::spawn(move || other.accept().map(|_| ()));
        listener.close();
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::NotConnected);
        // The port is free although there is a handle.
        drop(TcpListener::bind(&b, to).unwrap());

        let udp = UdpSocket::bind(&b, to).unwrap();
        let other = udp.clone();
        let waiting = thread::spawn(move || other.recv(&mut [0; 8]));
        udp.shutdown(Shutdown::Read);
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::UnexpectedEof);
        assert_eq!(udp.send_to(b"text", to).unwrap(), 4);
        udp.shutdown(Shutdown::Write);
        assert_eq!(udp.send_to(b"text", to).unwrap_err().kind(), ErrorKind::BrokenPipe);
    });
}

/// Sockets bound to an IPv4-mapped address are IPv4 sockets.
#[test]
fn mapped_addresses_can_be_bound() {
    on_both_families(|[_, b], to| {
        let SocketAddr::V4(v4) = to else { return };
        let mapped = SocketAddr::new(v4.ip().to_ipv6_mapped().into(), to.port());
        assert_eq!(TcpListener::bind(&b, mapped).unwrap().local_addr().unwrap(), to);
        assert_eq!(UdpSocket::bind(&b, mapped).unwrap().local_addr().unwrap(), to);
    });
}
