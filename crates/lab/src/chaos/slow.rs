//! Many applications, one of which is bad: what it costs the others.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tidegate::{Net, UdpSocket};

use super::ChaosConfig;
use super::child::Victim;
use super::data::Numbers;
use super::peers::is_time_out;
use super::site::{Site, datagrams_at, own};
use super::victim::State;
use crate::LabError;
use crate::stop::StopAtEnd;

/// All applications.
const APPLICATIONS: usize = 24;

/// Requests that an application has under way.
const WINDOW: usize = 4;

/// A request that has no answer by now has none.
const LOST_AFTER: Duration = Duration::from_millis(500);

/// Before requests are counted.
const WARM_UP: Duration = Duration::from_millis(200);

/// What a bad application does, and what one does instead that is not bad: the
/// processor is shared as before.
pub(super) const BAD: [(State, State); 3] = [
    (State::Flooding, State::Churning),
    (State::Scribbling, State::Passing),
    (State::Deaf, State::Hearing),
];

/// The requests/s of the others with a bad application and without, each time.
pub(super) struct Slowed {
    pub(super) bad: State,
    pub(super) runs: Vec<[f64; 2]>,
}

impl Slowed {
    pub(super) fn median(&self, of: impl Fn(&[f64; 2]) -> f64) -> f64 {
        crate::dns::sweep::median(&self.runs.iter().map(of).collect::<Vec<_>>())
    }

    /// What the others lose, in percent.
    pub(super) fn loss_percent(&self) -> f64 {
        self.median(|[without, with]| 100.0 * (1.0 - with / without))
    }
}

/// Measures each bad application, beside its good one, in turn.
pub(super) fn run(site: &Site, config: &ChaosConfig) -> Result<Vec<Slowed>, LabError> {
    let mut all: Vec<Slowed> =
        BAD.iter().map(|(bad, _)| Slowed { bad: *bad, runs: Vec::new() }).collect();
    for repeat in 0..config.repeats {
        for ((bad, good), slowed) in BAD.iter().zip(&mut all) {
            // Whoever comes first has no advantage, and what changes meanwhile
            // changes for both.
            let [first, second] =
                if repeat % 2 == 0 { [(1, *bad), (0, *good)] } else { [(0, *good), (1, *bad)] };
            let mut run = [0.0; 2];
            for (place, state) in [first, second, second, first] {
                run[place] += requests_per_s(site, state, config.seconds / 2.0)? / 2.0;
            }
            eprintln!(
                "{} {:<10} {:.0} requests/s, without {:.0}",
                repeat + 1,
                bad.name(),
                run[1],
                run[0]
            );
            slowed.runs.push(run);
        }
    }
    Ok(all)
}

/// How many requests/s all but the last application have answered.
fn requests_per_s(site: &Site, last: State, seconds: f64) -> Result<f64, LabError> {
    let path = site.socket();
    let (answered, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut child = Victim::start(last, &path, 9999, 1)?;
    child.wait_until_begun(last)?;
    thread::scope(|scope| {
        let stop_at_end = StopAtEnd(&stop);
        let good: Vec<_> = (0..APPLICATIONS - 1)
            .map(|number| {
                let (path, stop, answered) = (&path, &stop, &answered);
                scope.spawn(move || ask(path, number, stop, answered))
            })
            .collect();
        thread::sleep(WARM_UP);
        let (before, began) = (answered.load(Ordering::Relaxed), Instant::now());
        thread::sleep(Duration::from_secs_f64(seconds));
        let count = answered.load(Ordering::Relaxed) - before;
        let rate = count as f64 / began.elapsed().as_secs_f64();
        drop(stop_at_end);
        for asking in good {
            let asked = asking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            asked.map_err(LabError::io("an application failed beside a bad one"))?;
        }
        Ok(rate)
    })
}

/// Asks, a few requests at a time, and checks every answer.
fn ask(path: &Path, number: usize, stop: &AtomicBool, answered: &AtomicU64) -> io::Result<()> {
    let net = Net::attach(path, "good")?;
    let socket = UdpSocket::bind(&net, (own(number), 0))?;
    socket.set_read_timeout(Some(LOST_AFTER))?;
    let mut numbers = Numbers::new(number as u64);
    let request = numbers.next(64).to_vec();
    let mut came = [0; 2048];
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..WINDOW {
            socket.send_to(&request, datagrams_at(number))?;
        }
        for _ in 0..WINDOW {
            match socket.recv_from(&mut came) {
                Ok((len, _)) => numbers.check(&came[..len])?,
                Err(error) if is_time_out(&error) => break,
                Err(error) => return Err(error),
            }
            answered.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}
