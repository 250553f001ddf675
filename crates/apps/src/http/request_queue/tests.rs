use tokio::time::{Duration, advance};

use super::*;
use crate::requests::{RequestsConfig, SessionSecret};

mod simulation;

const CLIENT: &str = "192.0.2.1";
const MS: Duration = Duration::from_millis(1);

fn requests(text: &str) -> HttpRequests {
    let config: RequestsConfig = toml::from_str(text).unwrap();
    HttpRequests { policy: config.compile().unwrap(), secret: SessionSecret::new([1; 16]) }
}

/// Queue whose turns are measured to take a millisecond.
struct Server {
    queue: Arc<RequestQueue>,
    counters: HttpCounters,
}

impl Server {
    fn new(text: &str) -> Self {
        let queue = Arc::new(RequestQueue::new());
        queue.replace(Some(requests(text)));
        if let Some(admission) = &mut queue.lock().admission {
            admission.turn_ns = 1_000_000;
        }
        Self { queue, counters: HttpCounters::default() }
    }

    fn enter_from(&self, path: &str, cookie: &str, client: &str) -> Entry {
        let request = Request::get(path).header(HOST, "x").header(COOKIE, cookie).body(()).unwrap();
        self.queue.enter(&request, client.parse().unwrap(), &self.counters)
    }

    fn enter(&self, path: &str, cookie: &str) -> Option<Ticket> {
        match self.enter_from(path, cookie, CLIENT) {
            Entry::Wait(ticket) => Some(ticket),
            Entry::Refuse(_) => None,
            Entry::Serve => panic!("there is admission"),
        }
    }

    /// Begins a session on an idle server; returns its cookie.
    fn begin_session(&self) -> String {
        let Ticket { granted, cookie, .. } = self.enter("/", "").unwrap();
        drop(granted);
        let set_cookie = cookie.unwrap().to_str().unwrap().to_owned();
        assert!(self.queue.next(self.queue.now_ns()).is_none(), "the ticket is gone");
        set_cookie.split(';').next().unwrap().to_owned()
    }

    /// Serves the next request; returns false if none waits.
    fn serve_next(&self) -> bool {
        let next = self.queue.next(self.queue.now_ns());
        next.map(|next| self.queue.grant(next)).is_some()
    }
}

fn has_turn(ticket: &mut Ticket) -> bool {
    ticket.granted.try_recv().is_ok()
}

#[tokio::test(start_paused = true)]
async fn sessions_are_served_before_requests_that_came_first() {
    let server = Server::new("");
    let session = server.begin_session();
    let mut new = server.enter("/", "").unwrap();
    let mut old = server.enter("/", &session).unwrap();
    assert!(old.cookie.is_none(), "the session goes on");
    assert!(server.serve_next());
    assert!(has_turn(&mut old) && !has_turn(&mut new));
    assert!(server.serve_next());
    assert!(has_turn(&mut new));
    assert!(!server.serve_next());
}

#[tokio::test(start_paused = true)]
async fn new_sessions_are_refused_when_they_would_wait_and_admitted_ones_are_not() {
    let server = Server::new("");
    let session = server.begin_session();
    let tickets: Vec<_> = (0..100).map_while(|_| server.enter("/", "")).collect();
    assert_eq!(tickets.len(), 21, "20 ms of waiting");
    let sessions: Vec<_> = (0..40).map_while(|_| server.enter("/", &session)).collect();
    assert_eq!(sessions.len(), 40);
    assert!(matches!(server.enter_from("/", "", CLIENT), Entry::Refuse(10)));
    assert_eq!(server.counters.session_requests.load(Ordering::Relaxed), 40);
    assert_eq!(server.counters.session_requests_refused.load(Ordering::Relaxed), 0);
    assert_eq!(server.counters.sessions.load(Ordering::Relaxed), 22);
}

#[tokio::test(start_paused = true)]
async fn requests_that_have_waited_too_long_are_refused() {
    let server = Server::new("max-wait-ms = 10");
    let session = server.begin_session();
    let mut new = server.enter("/", "").unwrap();
    let mut old = server.enter("/", &session).unwrap();
    advance(12 * MS).await;
    let late = server.enter("/", "").unwrap();
    assert!(server.serve_next());
    assert!(has_turn(&mut old), "a session waits longer");
    assert!(matches!(new.granted.try_recv(), Err(oneshot::error::TryRecvError::Closed)));
    drop(late);
    assert!(!server.serve_next(), "the client has gone");
}

/// Whoever replays a cookie gets the rate of one session, from wherever.
#[tokio::test(start_paused = true)]
async fn replayed_cookie_gets_the_rate_of_one_session() {
    let server = Server::new("session-rps = 20");
    let session = server.begin_session();
    let mut with_session = 0;
    for number in 0..200 {
        let client = format!("2001:db8:0:{number:x}::1");
        let before = server.counters.session_requests.load(Ordering::Relaxed);
        let _ = server.enter_from("/", &session, &client);
        with_session += server.counters.session_requests.load(Ordering::Relaxed) - before;
        while server.serve_next() {}
    }
    assert_eq!(with_session, 21);
}

#[tokio::test(start_paused = true)]
async fn forged_cookies_and_paths_that_are_always_admitted_begin_no_session() {
    let server = Server::new(
        "[[class]]
        name = 'status'
        match = [{ path = '/status' }]
        [[class]]
        name = 'session'
        match = [{ session = true }]
        rank = 1",
    );
    assert!(server.enter("/status", "").unwrap().cookie.is_none());
    assert!(server.enter("/%73tatus", "").unwrap().cookie.is_none());
    let forged = format!("tidegate-session={}", "0".repeat(56));
    let ticket = server.enter("/", &forged).unwrap();
    assert!(ticket.cookie.is_some(), "as a client without cookie");
    assert_eq!(server.counters.session_requests.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn replaced_classes_serve_what_waits() {
    let server = Server::new("");
    let mut waiting: Vec<_> = (0..3).map(|_| server.enter("/", "").unwrap()).collect();
    server.queue.replace(None);
    assert!(waiting.iter_mut().all(has_turn));
    assert!(matches!(server.enter_from("/", "", CLIENT), Entry::Serve));
}

#[test]
fn host_is_without_port() {
    for (host, expected) in [
        ("shop.example", "shop.example"),
        ("shop.example:8080", "shop.example"),
        ("[2001:db8::1]:80", "[2001:db8::1]"),
        ("[2001:db8::1]", "[2001:db8::1]"),
        ("2001:db8::1", "2001:db8::1"),
    ] {
        let request = Request::get("/").header(HOST, host).body(()).unwrap();
        assert_eq!(host_of(&request), expected);
    }
    let request = Request::get("http://a.example:1/").header(HOST, "b").body(()).unwrap();
    assert_eq!(host_of(&request), "a.example");
}
