//! Sessions in virtual time, so that each run is the same: the work of a request is a pause in which
//! its turn lasts.

use std::cell::RefCell;
use std::rc::Rc;

use tokio::task::{LocalSet, spawn_local};
use tokio::time::sleep;

use super::*;

const SESSION_REQUESTS: usize = 10;

/// Clients and their server.
#[derive(Clone, Copy)]
struct Load {
    sessions_per_s: u64,
    first_work: Duration,
    later_work: Duration,
    pause: Duration,
}

/// Sessions that began in the measured time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Outcome {
    admitted: u64,
    finished: u64,
    /// Longest time of a request of an admitted session.
    longest: Duration,
}

async fn request(server: &Server, cookie: &str, work: Duration) -> Option<Option<String>> {
    let Ticket { granted, cookie, .. } = server.enter("/", cookie)?;
    let turn = granted.await.ok()?;
    sleep(work).await;
    drop(turn);
    Some(cookie.map(|cookie| cookie.to_str().unwrap().split(';').next().unwrap().to_owned()))
}

async fn run_session(server: Rc<Server>, load: Load, outcome: Rc<RefCell<Outcome>>) {
    let Some(Some(cookie)) = request(&server, "", load.first_work).await else { return };
    outcome.borrow_mut().admitted += 1;
    for _ in 1..SESSION_REQUESTS {
        sleep(load.pause).await;
        let began = Instant::now();
        if request(&server, &cookie, load.later_work).await.is_none() {
            return;
        }
        let mut outcome = outcome.borrow_mut();
        outcome.longest = outcome.longest.max(began.elapsed());
    }
    outcome.borrow_mut().finished += 1;
}

/// Offers a load for 15 s, after so many seconds to learn.
async fn simulate(load: Load, learning_s: u64) -> Outcome {
    let tasks = LocalSet::new();
    tasks
        .run_until(async {
            let server = Rc::new(Server::new(""));
            let serving = spawn_local(Arc::clone(&server.queue).run());
            let outcomes = [0, 1].map(|_| Rc::new(RefCell::new(Outcome::default())));
            for number in 0..(learning_s + 15) * load.sessions_per_s {
                let outcome = &outcomes[usize::from(number >= learning_s * load.sessions_per_s)];
                spawn_local(run_session(Rc::clone(&server), load, Rc::clone(outcome)));
                sleep(Duration::from_secs(1) / load.sessions_per_s as u32).await;
            }
            // The last sessions end.
            sleep(Duration::from_secs(60)).await;
            serving.abort();
            assert_eq!(server.counters.session_requests_refused.load(Ordering::Relaxed), 0);
            *outcomes[1].borrow()
        })
        .await
}

const LOAD: Load =
    Load { sessions_per_s: 100, first_work: MS, later_work: MS, pause: Duration::from_millis(50) };

/// The server has time for 100 sessions/s.
#[tokio::test(start_paused = true)]
async fn sessions_are_served_to_their_end_at_ten_times_the_load() {
    for sessions_per_s in [50, 90] {
        let outcome = simulate(Load { sessions_per_s, ..LOAD }, 15).await;
        assert_eq!(outcome.finished, 15 * sessions_per_s, "nobody is refused: {outcome:?}");
    }
    for sessions_per_s in [200, 1000] {
        let outcome = simulate(Load { sessions_per_s, ..LOAD }, 15).await;
        assert_eq!(outcome.finished, outcome.admitted, "{sessions_per_s}: {outcome:?}");
        assert!(outcome.finished >= 15 * 95, "{sessions_per_s}: {outcome:?}");
        assert!(outcome.longest <= 320 * MS, "{sessions_per_s}: {outcome:?}");
    }
}

/// Later requests cost more than the first, and come long after the admission.
#[tokio::test(start_paused = true)]
async fn work_of_later_requests_is_reserved() {
    let load = Load {
        sessions_per_s: 100,
        first_work: MS,
        later_work: 10 * MS,
        pause: Duration::from_secs(1),
    };
    let outcome = simulate(load, 60).await;
    // A session is 91 ms of work: there is time for 11 in a second.
    assert_eq!(outcome.finished, outcome.admitted, "{outcome:?}");
    assert!(outcome.finished >= 15 * 10, "{outcome:?}");
    assert!(outcome.longest <= 320 * MS, "{outcome:?}");
}
