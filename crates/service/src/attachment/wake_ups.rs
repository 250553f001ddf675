//! Tests of the wake-ups of the daemon by commands.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use tidegate_memory::shared::Region;

use super::Attachment;
use crate::ipc::event_fds::EventFds;
use crate::ipc::handshake::Welcome;
use crate::ipc::layout::{Geometry, SharedMemory};
use crate::ipc::takeover_token::TakeoverToken;
use crate::ipc::version::ProtocolVersion;

const GEOMETRY: Geometry = Geometry { sockets: 1, tcp_bytes: 4096, udp_bytes: 4096 };
/// Processor of the network core.
const PROCESSOR: usize = 3;

/// An attachment whose daemon sleeps, and never answers.
struct SleepingDaemon {
    attachment: Attachment,
    memory: SharedMemory,
    connection: UnixStream,
    event_fds: EventFds<OwnedFd>,
}

impl SleepingDaemon {
    fn new() -> Self {
        let region = |words| Region::reserve(words).unwrap();
        let (control, data) = (region(GEOMETRY.control_words()), region(GEOMETRY.data_words()));
        let memory = SharedMemory::new(GEOMETRY, control, data).unwrap();
        let (near, connection) = UnixStream::pair().unwrap();
        let token = TakeoverToken::new().unwrap();
        let event_fds = EventFds::new().unwrap();
        let theirs = event_fds.in_order().map(|fd| fd.try_clone().unwrap());
        let [daemon, application] = theirs;
        let welcome = Welcome {
            memory: memory.clone(),
            event_fds: EventFds { daemon, application },
            token,
            cores: 1,
        };
        let attachment =
            Attachment::new(near, welcome, ProtocolVersion::CURRENT, Path::new("unused"), "test")
                .unwrap();
        memory.daemon_processor().unwrap().publish(PROCESSOR);
        memory.daemon_sleeps().unwrap().request();
        Self { attachment, memory, connection, event_fds }
    }

    fn send_command(&mut self) {
        self.attachment.send_no_op().unwrap();
    }

    /// True if the daemon was woken; it sleeps again.
    fn take_wake_up(&self) -> bool {
        let is_woken = rustix::io::read(&self.event_fds.daemon, &mut [0; 8]).is_ok();
        assert_eq!(self.memory.daemon_sleeps().unwrap().is_requested(), !is_woken);
        self.memory.daemon_sleeps().unwrap().request();
        is_woken
    }

    fn wake_application(&self) {
        rustix::io::write(&self.event_fds.application, &1_u64.to_ne_bytes()).unwrap();
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
fn end_of_the_daemon_ends_a_sleep() {
    let mut daemon = SleepingDaemon::new();
    daemon.wake_application();
    daemon.connection.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(daemon.attachment.sleep(Duration::MAX).is_err());
    assert!(daemon.attachment.poll().is_err());
}

/// Number of the attachment's descriptors that would end a sleep.
fn ready_sleep_fds(daemon: &SleepingDaemon) -> usize {
    let fds = daemon.attachment.sleep_fds();
    let mut polled = fds.each_ref().map(|fd| PollFd::new(&**fd, PollFlags::IN));
    rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
}

#[test]
fn wake_up_ends_one_sleep_on_descriptors() {
    let mut daemon = SleepingDaemon::new();
    assert!(daemon.attachment.prepare_sleep().unwrap());
    assert_eq!(ready_sleep_fds(&daemon), 0);
    daemon.wake_application();
    assert_eq!(ready_sleep_fds(&daemon), 1);
    // An event of the program ends the sleep before: the wake-up stays for the next one.
    daemon.attachment.end_sleep_on_fds(true).unwrap();
    assert!(daemon.attachment.prepare_sleep().unwrap());
    assert_eq!(ready_sleep_fds(&daemon), 1);
    daemon.attachment.end_sleep_on_fds(false).unwrap();
    assert_eq!(ready_sleep_fds(&daemon), 0);
}

#[test]
fn wake_up_that_the_daemon_has_announced_is_taken_with_any_event() {
    let mut daemon = SleepingDaemon::new();
    assert!(daemon.attachment.prepare_sleep().unwrap());
    assert!(daemon.memory.application_sleeps().unwrap().take());
    daemon.wake_application();
    daemon.attachment.end_sleep_on_fds(true).unwrap();
    assert_eq!(ready_sleep_fds(&daemon), 0);
}

#[test]
fn end_of_the_daemon_ends_a_sleep_on_descriptors() {
    let mut daemon = SleepingDaemon::new();
    assert!(daemon.attachment.prepare_sleep().unwrap());
    daemon.connection.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(ready_sleep_fds(&daemon), 1);
    assert!(daemon.attachment.end_sleep_on_fds(false).is_err());
}

#[test]
fn end_that_nobody_waits_for_is_found_by_polling() {
    let mut daemon = SleepingDaemon::new();
    daemon.connection.shutdown(std::net::Shutdown::Both).unwrap();
    assert!((0..=super::MAX_EMPTY_POLLS).any(|_| daemon.attachment.poll().is_err()));
}

#[test]
fn thread_that_waits_for_a_reply_leaves_the_wake_up_to_the_others() {
    let mut daemon = SleepingDaemon::new();
    // A second thread sleeps with an `epoll` of its own.
    let other = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    daemon.attachment.watch(&other).unwrap();
    assert!(daemon.attachment.prepare_sleep().unwrap());
    daemon.wake_application();
    daemon.attachment.sleep(Duration::MAX).unwrap();
    for _ in 0..=super::MAX_EMPTY_POLLS {
        daemon.attachment.poll().unwrap();
    }
    let mut buffer = [const { MaybeUninit::<epoll::Event>::uninit() }; 2];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let (events, _) = epoll::wait(&other, &mut buffer[..], Some(&now)).unwrap();
    assert!(!events.is_empty() && !super::has_hung_up(events));
    assert!(daemon.memory.application_sleeps().unwrap().is_requested());
}
