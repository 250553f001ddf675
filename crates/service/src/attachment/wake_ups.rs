//! Tests of the wake-ups of the daemon by commands.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::RecvFlags;
use tidegate_memory::shared::Region;

use super::Attachment;
use crate::ipc::handshake::Welcome;
use crate::ipc::layout::{Geometry, SharedMemory};
use crate::ipc::takeover_token::TakeoverToken;

const GEOMETRY: Geometry = Geometry { sockets: 1, tcp_bytes: 4096, udp_bytes: 4096 };
/// Processor of the network core.
const PROCESSOR: usize = 3;

/// An attachment whose daemon sleeps, and never answers.
struct SleepingDaemon {
    attachment: Attachment,
    memory: SharedMemory,
    connection: UnixStream,
}

impl SleepingDaemon {
    fn new() -> Self {
        let region = |words| Region::reserve(words).unwrap();
        let (control, data) = (region(GEOMETRY.control_words()), region(GEOMETRY.data_words()));
        let memory = SharedMemory::new(GEOMETRY, control, data).unwrap();
        let (near, connection) = UnixStream::pair().unwrap();
        let token = TakeoverToken::new().unwrap();
        let welcome = Welcome { memory: memory.clone(), token, cores: 1 };
        let attachment = Attachment::new(near, welcome, Path::new("unused"), "test").unwrap();
        memory.daemon_processor().unwrap().publish(PROCESSOR);
        memory.daemon_sleeps().unwrap().request();
        Self { attachment, memory, connection }
    }

    fn send_command(&mut self) {
        self.attachment.send_no_op().unwrap();
    }

    /// True if the daemon was woken; it sleeps again.
    fn take_wake_up(&self) -> bool {
        let is_woken =
            rustix::net::recv(&self.connection, &mut [0; 8], RecvFlags::DONTWAIT).is_ok();
        assert_eq!(self.memory.daemon_sleeps().unwrap().is_requested(), !is_woken);
        self.memory.daemon_sleeps().unwrap().request();
        is_woken
    }
}

#[test]
fn command_wakes_the_daemon_on_another_processor_at_once() {
    let mut daemon = SleepingDaemon::new();
    assert!(!daemon.attachment.note_processor(PROCESSOR + 1));
    daemon.attachment.defer_wake_ups(5);
    daemon.send_command();
    assert!(daemon.take_wake_up());
}

#[test]
fn wake_up_of_the_daemon_on_the_same_processor_waits_for_the_last_command() {
    let mut daemon = SleepingDaemon::new();
    assert!(daemon.attachment.note_processor(PROCESSOR));
    daemon.send_command();
    assert!(daemon.take_wake_up(), "no wake-up may be deferred");
    daemon.attachment.defer_wake_ups(1);
    daemon.send_command();
    assert!(!daemon.take_wake_up());
    daemon.send_command();
    assert!(daemon.take_wake_up());
}

#[test]
fn deferred_wake_up_comes_before_a_wait() {
    let mut daemon = SleepingDaemon::new();
    daemon.attachment.note_processor(PROCESSOR);
    daemon.attachment.defer_wake_ups(5);
    assert!(daemon.attachment.prepare_sleep().unwrap());
    assert!(!daemon.take_wake_up(), "no command waits");
    daemon.attachment.defer_wake_ups(5);
    daemon.send_command();
    assert!(!daemon.take_wake_up());
    daemon.attachment.prepare_sleep().unwrap();
    assert!(daemon.take_wake_up());
}

#[test]
fn deferred_wake_up_does_not_wait_for_long() {
    let mut daemon = SleepingDaemon::new();
    daemon.attachment.note_processor(PROCESSOR);
    daemon.attachment.defer_wake_ups(u32::MAX);
    daemon.send_command();
    std::thread::sleep(2 * super::MAX_WAKE_UP_DELAY);
    daemon.send_command();
    assert!(daemon.take_wake_up());
}

#[test]
fn wait_that_ends_at_once_wakes_the_daemon_after_a_while() {
    let mut daemon = SleepingDaemon::new();
    daemon.attachment.note_processor(PROCESSOR);
    daemon.attachment.wake_daemon_if_overdue();
    assert!(!daemon.take_wake_up(), "no command waits");
    daemon.attachment.defer_wake_ups(u32::MAX);
    daemon.send_command();
    std::thread::sleep(2 * super::MAX_WAKE_UP_DELAY);
    daemon.attachment.wake_daemon_if_overdue();
    assert!(daemon.take_wake_up());
}

#[test]
fn processor_is_wanted_while_the_daemon_there_is_awake() {
    let mut daemon = SleepingDaemon::new();
    daemon.attachment.note_processor(PROCESSOR);
    assert!(!daemon.attachment.is_processor_wanted());
    daemon.memory.daemon_sleeps().unwrap().clear();
    assert!(daemon.attachment.is_processor_wanted());
    daemon.attachment.note_processor(PROCESSOR + 1);
    assert!(!daemon.attachment.is_processor_wanted());
}

#[test]
fn edge_of_the_end_is_the_end_although_bytes_precede_it() {
    let mut daemon = SleepingDaemon::new();
    daemon.connection.write_all(&[0; 3]).unwrap();
    assert!(daemon.attachment.prepare_sleep().unwrap());
    daemon.connection.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(daemon.attachment.end_edge_triggered_sleep(true).is_err());
    assert!(daemon.attachment.poll().is_err());
}

#[test]
fn edge_of_another_attachment_is_not_the_end() {
    let mut daemon = SleepingDaemon::new();
    daemon.connection.write_all(&[0; 3]).unwrap();
    assert!(daemon.attachment.prepare_sleep().unwrap());
    daemon.attachment.end_edge_triggered_sleep(true).unwrap();
    daemon.attachment.poll().unwrap();
}

#[test]
fn thread_that_reads_the_wake_up_of_another_asks_for_the_next_one() {
    let mut daemon = SleepingDaemon::new();
    let application_sleeps = daemon.memory.application_sleeps().unwrap();
    assert!(daemon.attachment.prepare_sleep().unwrap());
    assert!(application_sleeps.take());
    daemon.connection.write_all(&[0]).unwrap();
    // A second thread waits for a reply.
    for _ in 0..super::MAX_EMPTY_POLLS + 1 {
        daemon.attachment.poll().unwrap();
    }
    let left = rustix::net::recv(&daemon.attachment, &mut [0; 8], RecvFlags::DONTWAIT);
    assert_eq!(left, Err(rustix::io::Errno::AGAIN));
    assert!(application_sleeps.is_requested());
}
