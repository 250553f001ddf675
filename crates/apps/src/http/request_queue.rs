//! Admission of requests: refuses them before the work, and serves the others by rank.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::Request;
use hyper::header::{COOKIE, HOST, HeaderValue};
use percent_encoding::percent_decode_str;
use tidegate_gate::requests::{RequestAdmission, SessionRate, SessionReservation};
use tokio::sync::{Notify, oneshot};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::service::HttpCounters;
use super::settings::HttpRequests;
use crate::requests::{HttpMeta, Session};
use crate::responder::unix_time_ns;

/// Part by which a measurement changes the mean time of a turn.
const MEAN_DIVISOR: u64 = 8;

/// Requests of a server that wait to be served. One request is served at a time, by the task of its
/// connection, and then what has arrived meanwhile is received first. So the order is that of the
/// ranks, and the time that a request waits is known.
pub(super) struct RequestQueue {
    epoch: Instant,
    state: Mutex<State>,
    /// Signals a request that waits, and the end of a turn.
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// `None` serves every request at once.
    admission: Option<Admission>,
    /// Requests that wait, by level.
    waiting: Vec<VecDeque<Waiting>>,
    /// Requests that are being served.
    turns: usize,
}

struct Admission {
    requests: HttpRequests,
    decision: RequestAdmission,
    sessions: SessionReservation,
    session_rate: SessionRate,
    /// Mean time of a turn, with what the server does between two turns.
    turn_ns: u64,
}

struct Waiting {
    since_ns: u64,
    /// The request is one of a session, or the first of a new session.
    is_session: bool,
    granted: oneshot::Sender<Turn>,
}

/// Permission to serve one request, until it is dropped.
pub(super) struct Turn(Arc<RequestQueue>);

/// Fate of a request that has arrived.
pub(super) enum Entry {
    /// There is no admission: serve it.
    Serve,
    /// Refuse it: the client may come again after so many seconds.
    Refuse(u32),
    Wait(Ticket),
}

/// Place of a request in the queue.
pub(super) struct Ticket {
    /// Receives nothing if the request has waited too long.
    pub(super) granted: oneshot::Receiver<Turn>,
    /// Seconds after which the client may come again then.
    pub(super) retry_after: u32,
    /// Cookie for the response.
    pub(super) cookie: Option<HeaderValue>,
}

impl RequestQueue {
    pub(super) fn new() -> Self {
        Self { epoch: Instant::now(), state: Mutex::default(), changed: Notify::new() }
    }

    /// Replaces classes and settings. Requests that wait are served.
    pub(super) fn replace(self: &Arc<Self>, requests: Option<HttpRequests>) {
        let waiting = {
            let mut state = self.lock();
            let queues =
                requests.as_ref().map_or(0, |requests| requests.policy.admission().level_count());
            state.admission = requests.map(Admission::new);
            std::mem::replace(&mut state.waiting, (0..queues).map(|_| VecDeque::new()).collect())
        };
        for waiting in waiting.into_iter().flatten() {
            self.grant(waiting);
        }
    }

    /// Decides about a request of `client`. Reads only its head.
    pub(super) fn enter<B>(
        &self,
        request: &Request<B>,
        client: IpAddr,
        counters: &HttpCounters,
    ) -> Entry {
        let now_ns = self.now_ns();
        let mut state = self.lock();
        let State { admission, waiting, .. } = &mut *state;
        let Some(admission) = admission else { return Entry::Serve };
        let retry_after = admission.requests.policy.config().retry_after_s;
        let session = admission.session(request, now_ns);
        let (class, is_new) = admission.classify(request, client, session.is_some());
        if session.is_some() {
            counters.session_requests.fetch_add(1, Ordering::Relaxed);
        }
        let level = admission.decision.level(class);
        let ahead: usize = waiting[..=level].iter().map(VecDeque::len).sum();
        let wait_ns = admission.turn_ns.saturating_mul(ahead as u64);
        let has_room = !is_new || admission.sessions.has_room(now_ns);
        let admitted = has_room.then(|| admission.decision.admit(class, now_ns, wait_ns));
        let Some(Ok(level)) = admitted else {
            if session.is_some() {
                counters.session_requests_refused.fetch_add(1, Ordering::Relaxed);
            }
            return Entry::Refuse(retry_after);
        };
        if is_new {
            admission.sessions.reserve(now_ns);
            counters.sessions.fetch_add(1, Ordering::Relaxed);
        }
        let (sender, granted) = oneshot::channel();
        let is_session = is_new || session.is_some();
        waiting[level].push_back(Waiting { since_ns: now_ns, is_session, granted: sender });
        self.changed.notify_one();
        Entry::Wait(Ticket { granted, retry_after, cookie: admission.cookie(session, is_new) })
    }

    /// Serves the requests that wait, one after the other, for ever.
    pub(super) async fn run(self: Arc<Self>) {
        loop {
            let began_ns = self.now_ns();
            let Some(next) = self.next(began_ns) else {
                self.changed.notified().await;
                continue;
            };
            let is_session = next.is_session;
            self.grant(next);
            while self.lock().turns > 0 {
                self.changed.notified().await;
            }
            // What has arrived meanwhile is received first, and takes its place.
            yield_now().await;
            self.on_turn_over(is_session, began_ns);
        }
    }

    /// Takes the request to serve next, and refuses those that have waited too long.
    fn next(&self, now_ns: u64) -> Option<Waiting> {
        let mut state = self.lock();
        let State { admission, waiting, .. } = &mut *state;
        let admission = admission.as_ref()?;
        for (level, queue) in waiting.iter_mut().enumerate() {
            // Whoever came during the last turn was admitted when it was over.
            let max_wait_ns = admission.decision.max_wait_ns(level) + admission.turn_ns;
            let has_expired = |first: &Waiting| now_ns - first.since_ns > max_wait_ns;
            while queue.front().is_some_and(has_expired) {
                queue.pop_front();
            }
        }
        // Clients that have gone need no turn.
        waiting
            .iter_mut()
            .flat_map(|queue| std::iter::from_fn(|| queue.pop_front()))
            .find(|next| !next.granted.is_closed())
    }

    fn grant(self: &Arc<Self>, waiting: Waiting) {
        self.lock().turns += 1;
        // A turn that its connection does not take ends here.
        let _ = waiting.granted.send(Turn(Arc::clone(self)));
    }

    /// Measures a turn.
    fn on_turn_over(&self, is_session: bool, began_ns: u64) {
        let now_ns = self.now_ns();
        let Some(admission) = &mut self.lock().admission else { return };
        let turn_ns = now_ns - began_ns;
        let mean_ns = admission.turn_ns;
        admission.turn_ns = mean_ns - mean_ns / MEAN_DIVISOR + turn_ns / MEAN_DIVISOR;
        if is_session {
            admission.sessions.on_work(now_ns, turn_ns);
        }
    }

    fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.lock().turns -= 1;
        self.0.changed.notify_one();
    }
}

impl Admission {
    fn new(requests: HttpRequests) -> Self {
        let session_rps = requests.policy.config().session_rps;
        Self {
            decision: requests.policy.admission(),
            sessions: SessionReservation::default(),
            session_rate: SessionRate::new(session_rps, requests.secret.bytes()),
            requests,
            turn_ns: 0,
        }
    }

    /// Session of a request, if its cookie is valid and the session within its rate.
    fn session<B>(&mut self, request: &Request<B>, now_ns: u64) -> Option<Session> {
        let name = &self.requests.policy.config().session_cookie;
        if name.is_empty() {
            return None;
        }
        let cookies = request.headers().get_all(COOKIE).iter().map(HeaderValue::as_bytes);
        let session = self.requests.secret.find(name, cookies, unix_time_s())?;
        self.session_rate.admit(session.id, now_ns).then_some(session)
    }

    /// Class of a request, and true if a session is to begin with it: if a session would be of use for
    /// the request. So what is always admitted gives no session away.
    fn classify<B>(
        &self,
        request: &Request<B>,
        client: IpAddr,
        has_session: bool,
    ) -> (usize, bool) {
        let path = Cow::from(percent_decode_str(request.uri().path()));
        let meta = HttpMeta { path: &path, host: host_of(request), has_session, client };
        let policy = &self.requests.policy;
        let class = policy.classify_http(&meta);
        if has_session || policy.config().session_cookie.is_empty() {
            return (class, false);
        }
        let with_session = policy.classify_http(&HttpMeta { has_session: true, ..meta });
        (class, self.decision.level(with_session) < self.decision.level(class))
    }

    /// Cookie for the response: that of a new session, or of one whose cookie is half expired.
    fn cookie(&self, session: Option<Session>, is_new: bool) -> Option<HeaderValue> {
        let config = self.requests.policy.config();
        let (now_s, lifetime_s) = (unix_time_s(), config.session_lifetime_s);
        let id = match session {
            Some(session) if session.expires_s.saturating_sub(now_s) < lifetime_s / 2 => session.id,
            None if is_new => fastrand::u64(..),
            _ => return None,
        };
        let value = self.requests.secret.sign(Session { id, expires_s: now_s + lifetime_s });
        let name = &config.session_cookie;
        let attributes = "Path=/; HttpOnly; SameSite=Lax";
        HeaderValue::try_from(format!("{name}={value}; Max-Age={lifetime_s}; {attributes}")).ok()
    }
}

/// Host that a request is for, without the port.
fn host_of<B>(request: &Request<B>) -> &str {
    let header = || request.headers().get(HOST).and_then(|host| host.to_str().ok());
    let host = request.uri().host().or_else(header).unwrap_or("");
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
            if name.contains(':') && !name.ends_with(']') { host } else { name }
        }
        _ => host,
    }
}

/// Time since the Unix epoch, in seconds.
fn unix_time_s() -> u32 {
    (unix_time_ns() / 1_000_000_000) as u32
}

#[cfg(test)]
mod tests;
