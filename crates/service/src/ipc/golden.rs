//! Messages and shared memory of every served version of the attach protocol, against golden
//! files.
//!
//! `tests/golden/attach-protocol-N` is written when version N is new, by `TIDEGATE_GOLDEN=write
//! cargo test -p tidegate-service golden`, and never again: programs that speak the version are in
//! use. A change of what the file holds needs a new version ([`super::version`]).

use std::fmt::Write as _;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use tidegate_memory::shared::{Region, SharedWords, WakeFlag};

use super::command::tests::commands;
use super::command::{Command, Handle};
use super::datagram::DatagramHeader;
use super::error_code;
use super::event_fds::EventFds;
use super::fd_passing::send_with_fds;
use super::handshake::{
    Hello, Shard, TransferOperation, Welcome, receive_hello, receive_welcome, send_hello,
    send_welcome,
};
use super::layout::{Geometry, SharedMemory, StreamKind};
use super::notification::tests::notifications;
use super::notification::{Notification, OpenedSocket};
use super::status::{SocketState, Status};
use super::takeover_token::TakeoverToken;
use super::transfer_reply::{TransferReply, TransferredType, send_outcome};
use super::version::ProtocolVersion;

const GEOMETRY: Geometry = Geometry { sockets: 3, tcp_bytes: 4096, udp_bytes: 8192 };
const HANDLE: Handle = Handle { slot: 2, generation: 0x0102_0304 };

fn token() -> TakeoverToken {
    TakeoverToken::from_bytes(std::array::from_fn(|index| 0xa0 + index as u8))
}

fn memory() -> SharedMemory {
    let region = |words| Region::reserve(words).unwrap();
    let (control, data) = (region(GEOMETRY.control_words()), region(GEOMETRY.data_words()));
    SharedMemory::new(GEOMETRY, control, data).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// First messages of every kind, with their names.
fn hellos() -> Vec<(&'static str, Hello)> {
    let fd = || OwnedFd::from(UnixStream::pair().unwrap().0);
    let shard = Shard { index: 1, count: 3 };
    let transfer = |operation| Hello::Transfer(token(), operation, fd());
    vec![
        ("attach", Hello::Attach("redis-server".into())),
        ("inherit", Hello::Inherit(token(), "nginx".into())),
        ("send socket", transfer(TransferOperation::Send(HANDLE, shard))),
        ("withdraw socket", transfer(TransferOperation::Withdraw(7))),
        ("receive socket", transfer(TransferOperation::Receive(8))),
        ("reserve port", transfer(TransferOperation::ReservePort(shard))),
        ("report", Hello::Report),
        ("upgrade", Hello::Upgrade(0)),
    ]
}

/// Bytes that a message puts on a connection.
fn sent(send: impl FnOnce(&UnixStream)) -> String {
    let (near, mut far) = UnixStream::pair().unwrap();
    send(&near);
    drop(near);
    let mut bytes = Vec::new();
    far.read_to_end(&mut bytes).unwrap();
    hex(&bytes)
}

/// Words of a region that are not zero, each with its index.
fn nonzero_words(region: &Region) -> String {
    let words = region.words().iter().enumerate();
    let words = words.map(|(index, word)| (index, word.load(Ordering::Relaxed)));
    words.filter(|(_, word)| *word != 0).fold(String::new(), |mut text, (index, word)| {
        write!(text, " {index}:{word:x}").unwrap();
        text
    })
}

/// Shared memory after both sides have used all of it.
fn used_memory() -> SharedMemory {
    let memory = memory();
    for flag in [memory.daemon_sleeps(), memory.application_sleeps()] {
        flag.unwrap().request();
    }
    memory.daemon_processor().unwrap().publish(1);
    memory.application_processor().unwrap().publish(2);
    let mut commands_out = memory.command_sender().unwrap();
    for command in commands().into_iter().take(2) {
        assert!(commands_out.push(&command.to_words()).unwrap());
    }
    commands_out.publish();
    let mut commands_in = memory.command_receiver().unwrap();
    assert!(commands_in.pop().unwrap().is_some());
    commands_in.release();
    let mut notifications_out = memory.notification_sender().unwrap();
    for notification in notifications().into_iter().take(2) {
        assert!(notifications_out.push(&notification.to_words()).unwrap());
    }
    notifications_out.publish();
    let mut notifications_in = memory.notification_receiver().unwrap();
    assert!(notifications_in.pop().unwrap().is_some());
    notifications_in.release();
    for (index, kind) in [(0, StreamKind::Bytes), (1, StreamKind::Datagrams)] {
        let slot = memory.slot(index).unwrap();
        let status = Status {
            generation: 7,
            state: SocketState::Connected,
            error: Some(ErrorKind::ConnectionReset),
            error_count: 2,
            read_closed: true,
            write_closed: index == 0,
            accept_ready: index == 1,
            shared: true,
        };
        slot.status.words()[0].store(status.to_word(), Ordering::Relaxed);
        for (number, flag) in [
            &slot.notify_on_change,
            &slot.poll_on_write,
            &slot.notify_on_tx_space,
            &slot.poll_on_rx_space,
        ]
        .into_iter()
        .enumerate()
        {
            if number as u32 & 1 == index {
                flag.request();
            }
        }
        let (mut daemon_in, mut daemon_out) = slot.daemon_streams(kind).unwrap();
        let (mut app_in, mut app_out) = slot.application_streams(kind).unwrap();
        let header = DatagramHeader {
            len: 8,
            remote: Some("[2001:db8::1]:53".parse().unwrap()),
            local: Some("192.0.2.1".parse().unwrap()),
            hop_limit: Some(63),
            traffic_class: Some(0x2e),
            received_ns: 0x0102_0304_0506,
            is_error_report: false,
        };
        for (out, byte) in [(&mut daemon_out, 0x11), (&mut app_out, 0x22)] {
            if kind == StreamKind::Datagrams {
                out.write(&header.to_bytes()).unwrap();
            }
            out.write(&[byte; 24]).unwrap();
            out.publish();
        }
        for input in [&mut daemon_in, &mut app_in] {
            assert_eq!(input.read(&mut [0; 8]).unwrap(), 8);
            input.release();
        }
    }
    memory
}

/// Bytes of a first message; the release of the library is left out.
fn hello_text(protocol: ProtocolVersion, hello: &Hello) -> String {
    let text = sent(|to| send_hello(to.as_fd(), protocol, hello).unwrap());
    let release = hex(env!("CARGO_PKG_VERSION").as_bytes());
    text.replace(&release, &"00".repeat(release.len() / 2))
}

/// Everything that both sides parse, in a version of the protocol.
fn golden(protocol: ProtocolVersion) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| writeln!(text, "{name}: {}", value.trim()).unwrap();
    for (name, hello) in hellos() {
        line(&format!("hello {name}"), &hello_text(protocol, &hello));
    }
    let event_fds = EventFds::new().unwrap();
    let welcome = Welcome { memory: memory(), event_fds, token: token(), cores: 5 };
    line("welcome", &sent(|to| send_welcome(to.as_fd(), protocol, &welcome).unwrap()));
    let local = Some("192.0.2.1:80".parse().unwrap());
    for (number, socket_type) in
        [TransferredType::Udp, TransferredType::Listener, TransferredType::Stream]
            .into_iter()
            .enumerate()
    {
        let reply = TransferReply {
            socket: OpenedSocket { handle: HANDLE, local, peer: None },
            socket_type,
            is_new: number == 0,
            shards: 3,
            slot: number as u32,
            memory: memory(),
        };
        line(
            &format!("transfer reply {number}"),
            &sent(|to| send_outcome(to.as_fd(), Ok(Some(reply))).unwrap()),
        );
    }
    let refused = sent(|to| send_outcome(to.as_fd(), Err(ErrorKind::NotConnected)).unwrap());
    line("transfer refused", &refused);
    for (number, command) in commands().into_iter().enumerate() {
        line(&format!("command {number}"), &format!("{:x?}", command.to_words()));
    }
    for (number, notification) in notifications().into_iter().enumerate() {
        line(&format!("notification {number}"), &format!("{:x?}", notification.to_words()));
    }
    for number in 1..=error_code::to_number(ErrorKind::Other) {
        line(&format!("error {number}"), &format!("{:?}", error_code::from_number(number)));
    }
    for word in 0..7 {
        line(&format!("state {word}"), &format!("{:?}", Status::from_word(word).state));
    }
    line("control words", &GEOMETRY.control_words().to_string());
    line("data words", &GEOMETRY.data_words().to_string());
    let memory = used_memory();
    let [control, data] = memory.regions().map(nonzero_words);
    line("control", &control);
    line("data", &data);
    text
}

fn served_versions() -> impl Iterator<Item = ProtocolVersion> {
    let numbers = ProtocolVersion::OLDEST.number()..=ProtocolVersion::CURRENT.number();
    numbers.map(|number| ProtocolVersion::served(number).unwrap())
}

fn path(protocol: ProtocolVersion) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    folder.join(format!("attach-protocol-{}", protocol.number()))
}

fn read(protocol: ProtocolVersion) -> String {
    std::fs::read_to_string(path(protocol)).unwrap()
}

/// Value of a line.
fn value<'t>(text: &'t str, name: &str) -> &'t str {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let mut values = lines.filter(|(found, _)| *found == name).map(|(_, value)| value.trim());
    values.next().unwrap_or_else(|| panic!("no line {name}"))
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2).map(|pair| str::from_utf8(pair).unwrap());
    digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

fn words<const N: usize>(text: &str) -> [u64; N] {
    let inner = text.trim_matches(['[', ']']).split(", ");
    let words: Vec<_> = inner.map(|word| u64::from_str_radix(word, 16).unwrap()).collect();
    words.try_into().unwrap()
}

/// Stores the words of a line in a region.
fn store(region: &Region, text: &str) {
    for entry in text.split_whitespace() {
        let (index, word) = entry.split_once(':').unwrap();
        let word = u64::from_str_radix(word, 16).unwrap();
        region.words()[index.parse::<usize>().unwrap()].store(word, Ordering::Relaxed);
    }
}

#[test]
fn messages_and_memory_change_only_with_a_new_version() {
    let may_write = std::env::var_os("TIDEGATE_GOLDEN").is_some_and(|value| value == "write");
    for protocol in served_versions() {
        let (number, path) = (protocol.number(), path(protocol));
        if may_write && !path.exists() {
            std::fs::write(&path, golden(protocol)).unwrap();
        }
        let (expected, found) = (read(protocol), golden(protocol));
        for (expected, found) in expected.lines().zip(found.lines()) {
            assert_eq!(expected, found, "attach protocol {number} has changed: make a new version");
        }
        assert_eq!(expected.lines().count(), found.lines().count(), "attach protocol {number}");
    }
}

#[test]
fn reads_messages_of_every_served_version() {
    for protocol in served_versions() {
        let text = read(protocol);
        for (name, hello) in hellos() {
            let (near, far) = UnixStream::pair().unwrap();
            let line = value(&text, &format!("hello {name}"));
            send_with_fds(near.as_fd(), &unhex(line), &[near.as_fd()]).unwrap();
            let (library, received) = receive_hello(far.as_fd()).unwrap();
            assert_eq!(hello_text(protocol, &received), line, "{name}");
            assert_eq!(library.release, "");
            let is_for_daemon = matches!(hello, Hello::Report | Hello::Upgrade(_));
            let oldest = ProtocolVersion::OLDEST;
            assert_eq!(library.protocol, if is_for_daemon { oldest } else { protocol }, "{name}");
        }
        let (near, far) = UnixStream::pair().unwrap();
        let memory = memory();
        let fds = memory.regions().map(AsFd::as_fd);
        let fds = [fds[0], fds[1], near.as_fd(), far.as_fd()];
        send_with_fds(near.as_fd(), &unhex(value(&text, "welcome")), &fds).unwrap();
        let welcome = receive_welcome(far.as_fd(), protocol).unwrap();
        assert_eq!((welcome.cores, *welcome.memory.geometry()), (5, GEOMETRY));
        assert_eq!(welcome.token.bytes(), token().bytes());
        for (number, command) in commands().into_iter().enumerate() {
            let words = words(value(&text, &format!("command {number}")));
            assert_eq!(Command::from_words(words), Some(command));
        }
        for (number, notification) in notifications().into_iter().enumerate() {
            let words = words(value(&text, &format!("notification {number}")));
            assert_eq!(Notification::from_words(words), Some(notification));
        }
    }
}

#[test]
fn reads_memory_of_every_served_version() {
    for protocol in served_versions() {
        let (text, memory) = (read(protocol), memory());
        let [control, data] = memory.regions();
        store(control, value(&text, "control"));
        store(data, value(&text, "data"));
        let mut commands_in = memory.command_receiver().unwrap();
        commands_in.resume().unwrap();
        let words = commands_in.pop().unwrap().unwrap();
        assert_eq!(Command::from_words(words), Some(commands()[1]));
        let mut notifications_in = memory.notification_receiver().unwrap();
        notifications_in.resume().unwrap();
        let words = notifications_in.pop().unwrap().unwrap();
        assert_eq!(Notification::from_words(words), Some(notifications()[1]));
        assert!(memory.daemon_sleeps().unwrap().is_requested());
        assert!(memory.application_sleeps().unwrap().is_requested());
        assert!(memory.daemon_processor().unwrap().is(1));
        assert!(memory.application_processor().unwrap().is(2));
        for (index, kind) in [(0, StreamKind::Bytes), (1, StreamKind::Datagrams)] {
            let slot = memory.slot(index).unwrap();
            let status = Status::from_word(slot.status.words()[0].load(Ordering::Relaxed));
            assert_eq!((status.generation, status.state), (7, SocketState::Connected));
            let flags = [
                &slot.notify_on_change,
                &slot.poll_on_write,
                &slot.notify_on_tx_space,
                &slot.poll_on_rx_space,
            ];
            let requested = flags.map(WakeFlag::is_requested);
            assert_eq!(requested, std::array::from_fn(|number| number as u32 & 1 == index));
            let unread = if kind == StreamKind::Bytes { 16 } else { 80 };
            for (streams, byte) in [
                (slot.daemon_streams(kind).unwrap(), 0x22),
                (slot.application_streams(kind).unwrap(), 0x11),
            ] {
                let (mut input, _) = streams;
                input.resume().unwrap();
                let mut bytes = [0; 128];
                assert_eq!(input.read(&mut bytes).unwrap(), unread);
                assert_eq!(bytes[unread - 16..unread], [byte; 16]);
            }
        }
    }
}
