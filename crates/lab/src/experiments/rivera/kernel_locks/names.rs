//! Names of locks: those of a socket by their place in it, others by the functions that take them.

use std::collections::HashMap;

use crate::testbed::btf::StructFields;
use crate::testbed::tracefs::TraceEvent;

/// Names of locks by the function that takes them: part of the function's name, name of the
/// lock. The innermost matching function counts.
const LOCK_FUNCTIONS: [(&str, &str); 8] = [
    ("prepare_to_wait", WAIT_QUEUE),
    ("finish_wait", WAIT_QUEUE),
    ("__wake_up", WAIT_QUEUE),
    ("__schedule", SCHEDULER),
    ("rq_lock", SCHEDULER),
    ("try_to_wake_up", SCHEDULER),
    ("slab", MEMORY),
    ("rmqueue", MEMORY),
];
/// Lock of the queue in which readers of an empty socket sleep.
const WAIT_QUEUE: &str = "wait queue";
const SCHEDULER: &str = "scheduler";
const MEMORY: &str = "memory";

/// Names of locks.
pub(super) struct LockNames<'a> {
    socket: u64,
    fields: &'a StructFields,
    by_function: HashMap<u64, String>,
}

impl<'a> LockNames<'a> {
    /// Collects names from events with stacks, of locks that `socket` does not have.
    pub(super) fn new(socket: u64, events: &[TraceEvent], fields: &'a StructFields) -> Self {
        let begins = events.iter().filter(|event| event.name == "contention_begin");
        let by_taker =
            begins.filter_map(|event| Some((event.address("")?, name_by_stack(&event.stack)?)));
        Self { socket, fields, by_function: by_taker.collect() }
    }

    pub(super) fn name(&self, lock: u64) -> String {
        let of_socket = name_in_socket(lock, self.socket, self.fields);
        let name = of_socket.or_else(|| self.by_function.get(&lock).cloned());
        name.unwrap_or_else(|| "elsewhere".to_owned())
    }
}

/// Name of the lock that was taken with this call stack.
fn name_by_stack(stack: &[String]) -> Option<String> {
    let is_lock = |function: &&String| {
        ["trace", "spin_lock", "mutex_lock"].iter().any(|part| function.contains(part))
    };
    let known_function =
        |function: &String| LOCK_FUNCTIONS.iter().find(|taker| function.contains(taker.0));
    let first = stack.iter().find(|function| !is_lock(function))?;
    let name = stack.iter().filter(|function| !is_lock(function)).find_map(known_function);
    Some(name.map_or_else(|| format!("in {first}"), |taker| taker.1.to_owned()))
}

/// Name of a lock inside the socket; `None` for any other lock.
fn name_in_socket(lock: u64, socket: u64, fields: &StructFields) -> Option<String> {
    let in_head = fields.iter().find(|f| f.0 == "sk_buff_head" && f.1 == "lock").map_or(0, |f| f.2);
    let end = fields.iter().map(|field| field.2).max().unwrap_or(0) + 256;
    let offset = lock.checked_sub(socket).filter(|at| *at < end)?;
    let queues = ["sk_receive_queue", "reader_queue", "sk_error_queue", "sk_write_queue"];
    let named = fields.iter().find(|(_, field, at)| {
        let inside = if queues.contains(&field.as_str()) { in_head } else { 0 };
        at + inside == offset && (inside > 0 || field == "sk_lock" || field == "sk_callback_lock")
    });
    Some(named.map_or_else(|| format!("socket + {offset}"), |(_, field, _)| field.clone()))
}

/// Locks of a UDP socket that its readers may take: name and address.
pub(super) fn locks_of_socket(socket: u64, fields: &StructFields) -> Vec<(&'static str, u64)> {
    let offset = |of: &str, name: &str| {
        fields.iter().find(|field| field.0 == of && field.1 == name).map(|field| field.2)
    };
    let in_queue = offset("sk_buff_head", "lock");
    let queue = |of, name| Some(offset(of, name)? + in_queue?);
    let locks = [
        ("sk_lock", offset("sock", "sk_lock")),
        ("sk_receive_queue", queue("sock", "sk_receive_queue")),
        ("reader_queue", queue("udp_sock", "reader_queue")),
    ];
    locks.into_iter().filter_map(|(name, at)| Some((name, socket + at?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_locks_of_the_socket() {
        let field = |of: &str, name: &str, at| (of.to_owned(), name.to_owned(), at);
        let fields = vec![
            field("sk_buff_head", "lock", 20),
            field("sock", "sk_receive_queue", 168),
            field("sock", "sk_lock", 320),
            field("udp_sock", "reader_queue", 1152),
        ];
        let by_function = |lock: u64, functions: &[&str]| TraceEvent {
            stack: functions.iter().map(|&function| function.to_owned()).collect(),
            name: "contention_begin".into(),
            arguments: format!("{lock:#x} (flags=SPIN)"),
            ..TraceEvent::default()
        };
        let events = [
            by_function(0x90_0000, &["_raw_spin_lock_irqsave", "prepare_to_wait_exclusive", "f"]),
            by_function(
                0xa0_0000,
                &["__traceiter_contention_begin", "_raw_spin_lock", "try_to_wake_up"],
            ),
            by_function(0xb0_0000, &["_raw_spin_lock", "something_else", "udp_recvmsg"]),
            by_function(0xc0_0000, &["_raw_spin_lock", "a_probe", "__schedule"]),
        ];
        let lock_names = LockNames::new(0x1000, &events, &fields);
        let name = |at: u64| lock_names.name(0x1000 + at);
        assert_eq!(name(188), "sk_receive_queue");
        assert_eq!(name(320), "sk_lock");
        assert_eq!(name(1172), "reader_queue");
        assert_eq!(name(400), "socket + 400");
        assert_eq!(name(1 << 20), "elsewhere");
        assert_eq!(lock_names.name(0x90_0000), "wait queue");
        assert_eq!(lock_names.name(0xa0_0000), "scheduler");
        assert_eq!(lock_names.name(0xb0_0000), "in something_else");
        assert_eq!(lock_names.name(0xc0_0000), "scheduler");
        assert_eq!(LockNames::new(0x2000, &[], &fields).name(0x1000), "elsewhere");
        let locks = locks_of_socket(0x1000, &fields);
        let expected = [("sk_lock", 320), ("sk_receive_queue", 188), ("reader_queue", 1172)];
        assert_eq!(locks, expected.map(|(name, at)| (name, 0x1000 + at)));
    }
}
