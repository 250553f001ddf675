//! A client that asks steadily, and remembers what became of each question.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::cpu;
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::livelock::bench::CLIENT_ADDRESS;
use crate::load::QuerySet;
use crate::netns::Namespace;

/// Questions that are sent without a look at the answers.
const BURST: u32 = 32;
/// The length of a numbered datagram: with its headers and trailer, 64 bytes.
const NUMBERED_BYTES: usize = 18;
/// Only so many of the last questions are told apart by their 16 bits.
const REMEMBERED: u64 = 1 << 15;
/// How long to wait for the last answers.
const DRAIN: Duration = Duration::from_millis(200);

/// What a client asks.
#[derive(Clone)]
pub(crate) enum Questions {
    /// Datagrams with a number, of a server that sends back what it gets.
    Numbered,
    /// DNS queries in turn, with their numbers as ids.
    Dns(QuerySet),
}

impl Questions {
    fn write(&self, number: u64, question: &mut Vec<u8>) {
        question.clear();
        match self {
            Self::Numbered => {
                question.resize(NUMBERED_BYTES, 0);
                question[..8].copy_from_slice(&number.to_be_bytes());
            }
            Self::Dns(queries) => {
                question.extend_from_slice(queries.get(number as usize % queries.len()).0);
                question[..2].copy_from_slice(&(number as u16).to_be_bytes());
            }
        }
    }

    /// Which question it answers, of so many that were asked.
    fn number(&self, answer: &[u8], asked: u64) -> Option<u64> {
        match self {
            Self::Numbered => answer.first_chunk().copied().map(u64::from_be_bytes),
            Self::Dns(_) => {
                let id = u16::from_be_bytes(*answer.first_chunk()?);
                let is_answer = *answer.get(2)? & 0x80 != 0;
                let number = number_of_id(id, asked)?;
                is_answer.then_some(number)
            }
        }
    }
}

/// The last question with this id, of so many that were asked.
fn number_of_id(id: u16, asked: u64) -> Option<u64> {
    let last = asked.checked_sub(1)?;
    let age = u64::from((last as u16).wrapping_sub(id));
    if age < REMEMBERED { last.checked_sub(age) } else { None }
}

/// One question.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Asked {
    /// When it was meant to be sent, in seconds since the client's start.
    pub(crate) at_s: f64,
    /// How long after that the answer came, in seconds.
    pub(crate) answered_after_s: Option<f64>,
}

/// A client that runs.
pub(crate) struct Client {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Vec<Asked>, LabError>>>,
    began: Instant,
}

impl Client {
    /// Begins to ask `target` from `namespace`, so many times a second, from
    /// core `core`.
    pub(crate) fn start(
        namespace: &Namespace,
        target: SocketAddr,
        questions: Questions,
        rate_pps: f64,
        core: usize,
    ) -> Result<Self, LabError> {
        let socket = namespace.enter(|| -> io::Result<UdpSocket> {
            let socket = UdpSocket::bind((CLIENT_ADDRESS, 0))?;
            socket.connect(target)?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        })?;
        let socket = socket.map_err(LabError::io("cannot open the client's socket"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let began = Instant::now();
        let thread = std::thread::spawn(move || {
            cpu::pin_this_thread(core)?;
            ask(&socket, &questions, rate_pps, began, &stopped)
        });
        Ok(Self { stop, thread: Some(thread), began })
    }

    /// Seconds since the client's start.
    pub(crate) fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Ends the client and returns every question in order.
    pub(crate) fn stop(mut self) -> Result<Vec<Asked>, LabError> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Ok(Vec::new()) };
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Nobody wants to know any more.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn ask(
    socket: &UdpSocket,
    questions: &Questions,
    rate_pps: f64,
    began: Instant,
    stop: &AtomicBool,
) -> Result<Vec<Asked>, LabError> {
    let mut asked: Vec<Asked> = Vec::new();
    let mut question = Vec::new();
    let mut ended: Option<Instant> = None;
    loop {
        let now_s = began.elapsed().as_secs_f64();
        if ended.is_none() && stop.load(Ordering::Relaxed) {
            ended = Some(Instant::now());
        }
        let next_s = asked.len() as f64 / rate_pps;
        if ended.is_none() {
            for _ in 0..BURST {
                let at_s = asked.len() as f64 / rate_pps;
                if at_s > now_s {
                    break;
                }
                questions.write(asked.len() as u64, &mut question);
                // What cannot be sent is not answered, and counts so.
                let _ = socket.send(&question);
                asked.push(Asked { at_s, answered_after_s: None });
            }
        }
        take_answers(socket, questions, began, &mut asked);
        if ended.is_some_and(|ended| ended.elapsed() > DRAIN) {
            return Ok(asked);
        }
        let wait = if ended.is_some() { 0.02 } else { (next_s - now_s).clamp(0.0, 0.02) };
        let wait = Timespec { tv_sec: 0, tv_nsec: (wait * 1e9) as i64 };
        // An interrupted wait is a short one.
        let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&wait));
    }
}

fn take_answers(socket: &UdpSocket, questions: &Questions, began: Instant, asked: &mut [Asked]) {
    let mut answer = [0; 2048];
    // Errors are about one datagram, or there is nothing.
    while let Ok(len) = socket.recv(&mut answer) {
        let Some(number) = questions.number(&answer[..len], asked.len() as u64) else { continue };
        let Some(one) = asked.get_mut(number as usize) else { continue };
        if one.answered_after_s.is_none() {
            one.answered_after_s = Some(began.elapsed().as_secs_f64() - one.at_s);
        }
    }
}

/// How many questions of an interval there were, and how many were answered.
pub(crate) fn answered_of(asked: &[Asked], from_s: f64, to_s: f64) -> (u64, u64) {
    let (mut all, mut answered) = (0, 0);
    for one in asked.iter().filter(|one| (from_s..to_s).contains(&one.at_s)) {
        all += 1;
        answered += u64::from(one.answered_after_s.is_some());
    }
    (all, answered)
}

/// The share of questions of an interval that were answered, 0 to 1.
pub(crate) fn answered_share(asked: &[Asked], from_s: f64, to_s: f64) -> f64 {
    let (all, answered) = answered_of(asked, from_s, to_s);
    answered as f64 / all.max(1) as f64
}

/// The median of how long the answers of an interval took, in seconds;
/// infinite without any.
pub(crate) fn median_latency_s(asked: &[Asked], from_s: f64, to_s: f64) -> f64 {
    let of_interval = asked.iter().filter(|one| (from_s..to_s).contains(&one.at_s));
    let latencies: Vec<f64> = of_interval.filter_map(|one| one.answered_after_s).collect();
    if latencies.is_empty() { f64::INFINITY } else { median(&latencies) }
}

/// So many questions in a row show that a server has recovered.
const WINDOW: usize = 100;
/// This share of them has to be answered in time: a shared machine stalls now
/// and then without any flood.
const WINDOW_SHARE: f64 = 0.95;

/// How long after `end_s` the server was as before: from when on questions are
/// answered within `limit_s`. `None` when that never happened.
pub(crate) fn recovery_s(asked: &[Asked], end_s: f64, limit_s: f64) -> Option<f64> {
    let after = &asked[asked.partition_point(|one| one.at_s < end_s)..];
    let in_time = |one: &Asked| one.answered_after_s.is_some_and(|after_s| after_s <= limit_s);
    let recovered = |window: &[Asked]| {
        let good = window.iter().filter(|one| in_time(one)).count();
        in_time(&window[0]) && good as f64 >= WINDOW_SHARE * window.len() as f64
    };
    let first = after.windows(WINDOW).find(|window| recovered(window))?.first()?;
    Some((first.at_s + first.answered_after_s.unwrap_or(0.0) - end_s).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A question each millisecond; `after` says how long the answer took.
    fn asked(after: impl Fn(u32) -> Option<f64>) -> Vec<Asked> {
        let one = |n: u32| Asked { at_s: f64::from(n) / 1e3, answered_after_s: after(n) };
        (0..1000).map(one).collect()
    }

    #[test]
    fn recovery_is_when_answers_are_in_time_again() {
        let slow = asked(|n| match n {
            0..300 => Some(0.0001),
            300..640 => None,
            640..660 => Some(0.5),
            700 | 800 => None,
            _ => Some(0.0001),
        });
        let recovery = recovery_s(&slow, 0.6, 0.001).unwrap();
        assert!((recovery - 0.0601).abs() < 1e-9, "{recovery}");
        assert_eq!(recovery_s(&asked(|n| (n < 600).then_some(0.0)), 0.6, 0.001), None);
        let at_once = recovery_s(&asked(|_| Some(0.0)), 0.6, 0.001).unwrap();
        assert!(at_once < 1e-9, "{at_once}");
        assert_eq!(recovery_s(&[], 0.0, 1.0), None);
    }

    #[test]
    fn an_id_is_that_of_the_last_question_that_had_it() {
        assert_eq!(number_of_id(9, 10), Some(9));
        assert_eq!(number_of_id(10, 10), None, "not asked yet");
        assert_eq!(number_of_id(0, 0), None);
        assert_eq!(number_of_id(0xffff, 0x1_0001), Some(0xffff), "ids begin anew");
        assert_eq!(number_of_id(0, 0x1_0001), Some(0x1_0000));
        assert_eq!(number_of_id(1, 0x1_0001), None, "too long ago");
    }

    #[test]
    fn shares_and_medians_are_of_the_interval() {
        let half = asked(|n| (n >= 500).then_some(f64::from(n % 3)));
        assert_eq!(answered_share(&half, 0.0, 0.5), 0.0);
        assert_eq!(answered_share(&half, 0.25, 0.75), 0.5);
        assert_eq!(median_latency_s(&half, 0.5, 1.0), 1.0);
        assert_eq!(median_latency_s(&half, 0.0, 0.5), f64::INFINITY);
    }
}
