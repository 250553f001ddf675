//! Hostile application: body of the fuzz target `attachment`, also run on its seeds by the tests.
//! Not compiled into a daemon.
//!
//! The input writes everything that an attached program can write: words of the rings, flags and
//! indices, bytes of the streams, commands, wake-ups and first messages. After each step the core
//! runs a round, in which it must answer another application.

use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use tidegate_memory::shared::{Region, SharedWords};
use tidegate_stack::TcpOptions;

use super::testbed::{Program, Testbed};
use crate::daemon::Quota;
use crate::ipc::command::{COMMAND_WORDS, Command};
use crate::ipc::handshake::receive_hello;
use crate::ipc::layout::{Geometry, SharedMemory, StreamKind};

const GEOMETRY: Geometry = Geometry { sockets: 4, tcp_bytes: 4096, udp_bytes: 4096 };
/// Small memory quota, so that workers measure and discard memory.
const QUOTA: Quota = Quota {
    max_ports: 3,
    max_memory_bytes: 16 << 10,
    cpu_share_percent: 100,
    max_attachments: u32::MAX,
    max_user_attachments: u32::MAX,
};
/// Addresses of commands: own, unspecified, another host, both families.
const ADDRESSES: [&str; 4] = ["192.0.2.1", "0.0.0.0", "192.0.2.9", "2001:db8::1"];
const MAX_STEPS: usize = 200;
/// Codes of commands, one of them unknown.
const COMMAND_CODES: u8 = 14;

/// Effects of the steps on the hostile application.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// The daemon has executed commands of the application.
    pub is_served: bool,
    /// The daemon has evicted the application, or reaped it.
    pub is_detached: bool,
}

/// Runs a network core with an honest application and a hostile one, which does what `input`
/// states.
///
/// # Panics
/// If the core does not answer the honest application in the same round, or if packets are lost
/// uncounted.
pub fn check(mut input: &[u8]) -> Effects {
    let mut testbed = Testbed::new(GEOMETRY, QUOTA);
    let mut hostile = testbed.attach();
    let mut effects = Effects::default();
    for _ in 0..MAX_STEPS {
        let Some([step]) = take(&mut input) else { break };
        testbed.step(step, &mut hostile, &mut input);
        testbed.run_round();
        match testbed.core.apps[hostile.number as usize].as_mut() {
            Some(app) => effects.is_served |= app.commands.taken() > 0,
            None => {
                effects.is_detached = true;
                hostile = testbed.attach();
            }
        }
    }
    testbed.core.detach(hostile.number);
    testbed.run_round();
    assert_eq!(testbed.core.server.engine.stack().counters().balance(), 0);
    effects
}

/// Next bytes of the input.
fn take<const N: usize>(input: &mut &[u8]) -> Option<[u8; N]> {
    let (bytes, rest) = input.split_first_chunk()?;
    *input = rest;
    Some(*bytes)
}

/// Next bytes of the input; zeros when none are left.
fn take_or_zero<const N: usize>(input: &mut &[u8]) -> [u8; N] {
    take(input).unwrap_or([0; N])
}

fn take_word(input: &mut &[u8]) -> u64 {
    u64::from_le_bytes(take_or_zero(input))
}

impl Testbed {
    /// Does one step of the hostile application.
    fn step(&mut self, step: u8, hostile: &mut Program, input: &mut &[u8]) {
        match step % 10 {
            0 => poke(hostile.memory.regions()[0], step, input),
            1 => {
                let words = [(); COMMAND_WORDS].map(|()| take_word(input));
                hostile.push(&words);
            }
            2..=4 => {
                let words = command_words(input);
                hostile.push(&words);
            }
            5 => use_streams(&hostile.memory, step, input),
            6 => while hostile.next_notification().is_some() {},
            7 => {
                self.core.request_wake_ups();
                self.core.has_app_work();
                self.core.clear_wake_ups();
            }
            8 => match step / 10 {
                0 => hostile.connection.shutdown(std::net::Shutdown::Both).unwrap(),
                1..=12 => send_first_message(input),
                _ => hostile.wake_daemon(),
            },
            _ => poke(hostile.memory.regions()[1], step, input),
        }
    }
}

/// Overwrites or changes a word of a region.
fn poke(region: &Region, step: u8, input: &mut &[u8]) {
    let index = usize::from(u16::from_le_bytes(take_or_zero(input)));
    // Most words are messages and bytes. The indices and flags are few, and lie at the beginning
    // and in slots: half of the steps count from the end.
    let words = region.words();
    let word = match step / 10 % 2 {
        0 => &words[index % words.len()],
        _ => &words[words.len() - 1 - index % words.len()],
    };
    let value = match step / 20 % 4 {
        0 => u64::MAX,
        1 => u64::from(u16::from_le_bytes(take_or_zero(input))),
        2 => word.load(Ordering::Relaxed).wrapping_add(u64::from_le_bytes(take_or_zero(input)) % 5),
        _ => take_word(input),
    };
    word.store(value, Ordering::Relaxed);
}

/// Words of a command whose fields are plausible: small handles, tags and ports.
fn command_words(input: &mut &[u8]) -> [u64; COMMAND_WORDS] {
    let [code, argument, socket, generation, local, remote, ports, extra] = take_or_zero(input);
    let address = |choice: u8, port: u8| {
        let ip = ADDRESSES[usize::from(choice) % ADDRESSES.len()].parse().unwrap();
        SocketAddr::new(ip, u16::from(port % 4) * 1000)
    };
    let mut words = Command::ConnectTcp {
        tag: 0,
        local: (local / 4 % 4 != 3).then(|| address(local, ports)),
        remote: address(remote, ports / 4),
        options: TcpOptions::default(),
    }
    .to_words();
    words[0] = u64::from(code % COMMAND_CODES) | u64::from(argument) << 8 | 7 << 32;
    words[1] = u64::from(generation % 4) << 32 | u64::from(socket % 5);
    if remote / 4 % 4 == 3 {
        words[5..8].fill(0);
    }
    if extra % 4 == 0 {
        words[8..].fill_with(|| take_word(input));
    }
    words
}

/// Writes to a socket's stream and reads from it, as the library does.
fn use_streams(memory: &SharedMemory, step: u8, input: &mut &[u8]) {
    let [slot, len] = take_or_zero(input);
    let kind =
        if (step / 10).is_multiple_of(2) { StreamKind::Bytes } else { StreamKind::Datagrams };
    let slot = memory.slot(u32::from(slot) % GEOMETRY.sockets).unwrap();
    let (mut read, mut written) = slot.application_streams(kind).unwrap();
    // Corrupted indices end the use of a stream.
    if written.resume().is_ok() {
        let (data, rest) = input.split_at(usize::from(len).min(input.len()));
        *input = rest;
        let _ = written.write(data);
        written.publish();
    }
    if read.resume().is_ok() {
        let available = read.available().unwrap_or(0);
        read.skip(available.min(usize::from(len)));
        read.release();
    }
}

/// Sends a first message, cut or whole.
fn send_first_message(input: &mut &[u8]) {
    let (mut near, far) = UnixStream::pair().unwrap();
    let [len] = take_or_zero(input);
    let (message, rest) = input.split_at(usize::from(len).min(input.len()));
    *input = rest;
    near.write_all(message).unwrap();
    drop(near);
    let _ = receive_hello(far.as_fd());
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn random_input_harms_no_other_application() {
        let mut reached = Effects::default();
        for seed in 0..300 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let input: Vec<u8> = (0..rng.usize(..2000)).map(|_| rng.u8(..)).collect();
            let effects = check(&input);
            reached.is_served |= effects.is_served;
            reached.is_detached |= effects.is_detached;
        }
        assert_eq!(reached, Effects { is_served: true, is_detached: true });
    }

    /// The seeds were found by the fuzzer.
    #[test]
    fn corpus_of_attachment() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/attachment");
        let mut reached = Effects::default();
        for entry in std::fs::read_dir(corpus).expect("the corpus is in the repository") {
            let effects = check(&std::fs::read(entry.unwrap().path()).unwrap());
            reached.is_served |= effects.is_served;
            reached.is_detached |= effects.is_detached;
        }
        assert_eq!(reached, Effects { is_served: true, is_detached: true });
    }
}
