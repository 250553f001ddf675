//! Connections and listeners as plain data, for another process to go on with.
//!
//! What a peer could notice goes on: numbers, windows, time stamps, secrets,
//! what is on its way. Times are relative to the moment of saving. What is read
//! back is checked here, all of it, so that the rest of TCP need not expect
//! anything that it has not made itself.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use super::arrival::seconds;
use super::chunks::{CHUNK_BYTES, Chunks, Strand};
use super::congestion::{Controller, SavedController};
use super::connection::{Connection, Is, LEAST_MSS, NEVER, Shared, Wait};
use super::flight::SavedFlight;
use super::listener::SavedPlace;
use super::options::MAX_WINDOW_SHIFT;
use super::peer_clock::{PeerClock, Shown, milliseconds};
use super::prf::Secret;
use super::recovery::Phase;
use super::rtt::{RoundTrip, SavedRoundTrip};
use super::segment::Ends;
use super::seq::Seq;
use super::socket::{Failure, TcpListenerId, TcpOptions, TcpState};
use super::table::TcpTable;
use crate::{Event, RestoreError};

/// No window or buffer is larger (RFC 7323 section 2.3).
const MOST_BYTES: u32 = 1 << 30;

/// What is so and stays so in another stack. The rest follows from it.
pub(super) const LASTING: Is = Is::PASSIVE
    .union(Is::ORPHAN)
    .union(Is::IN_SYN_QUEUE)
    .union(Is::WANTS_OUTPUT)
    .union(Is::TIMESTAMPS)
    .union(Is::SACK)
    .union(Is::ECN)
    .union(Is::ECHO_CONGESTION)
    .union(Is::TELL_REDUCED)
    .union(Is::FIN_QUEUED)
    .union(Is::FIN_SENT)
    .union(Is::FIN_RECEIVED)
    .union(Is::READ_SHUT)
    .union(Is::ACK_NOW)
    .union(Is::RESET_NOW)
    .union(Is::KEEPALIVE_NOW)
    .union(Is::FORCE_RETRANSMISSION)
    .union(Is::FORCE_WINDOW)
    .union(Is::TAIL_PROBE_NOW)
    .union(Is::TAIL_PROBED)
    .union(Is::TAIL_PROBE_REPEATS)
    .union(Is::REORDERING_SEEN)
    .union(Is::SYN_REPEATED)
    .union(Is::WINDOW_LIMITED)
    .union(Is::WRITE_BLOCKED)
    .union(Is::STARVED);

/// All of TCP.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedTcp {
    secret: Secret,
    shown: Shown,
    /// How long acknowledgements may still bring a cookie.
    cookies_for_ns: u64,
    tells_confirmed: bool,
    /// Peers that nobody was told of yet.
    confirmed: Vec<IpAddr>,
    listeners: Vec<SavedPlace>,
    /// Every place that was ever used: its generation and who is there.
    connections: Vec<(u32, Option<SavedConnection>)>,
}

/// One connection. What stands for a time is how long ago it was (`_age_`) or
/// how long it takes until then (`_in_`).
#[derive(Clone, Debug, Serialize, Deserialize)]
struct SavedConnection {
    ends: Ends,
    state: TcpState,
    is: u64,
    listener: Option<TcpListenerId>,
    options: TcpOptions,
    failure: Option<Failure>,
    soft_failure: Option<Failure>,
    sending: Sending,
    receiving: Receiving,
    recovery: Recovery,
    timers: Timers,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Sending {
    una: Seq,
    nxt: Seq,
    base: Seq,
    /// What was written and not acknowledged.
    data: ByteBuf,
    window: u32,
    max_window: u32,
    window_seq: Seq,
    window_ack: Seq,
    peer_mss: u16,
    mss_limit: u16,
    mss_most: u16,
    small_end: Seq,
    sent_age_ns: u64,
    shift: u8,
    /// What the time stamps showed.
    stamp: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Receiving {
    nxt: Seq,
    edge: Seq,
    read: Seq,
    /// What arrived in order and was not read.
    data: ByteBuf,
    /// What arrived out of order; what came last comes last.
    stretches: Vec<(Seq, ByteBuf)>,
    duplicate: (Seq, Seq),
    unacknowledged: u32,
    consumed: u32,
    heard_mss: u16,
    acks_owed: u8,
    last_ack_sent: Seq,
    heard_age_ns: u64,
    shift: u8,
    ts_recent: u32,
    ts_recent_age_s: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Recovery {
    flight: Option<SavedFlight>,
    searches_path: bool,
    rtt: SavedRoundTrip,
    controller: SavedController,
    phase: Phase,
    end: Seq,
    probe_end: Seq,
    cwr_end: Seq,
    duplicate_acks: u8,
    reordering_steps: u8,
    retries: u8,
    stalled_age_ns: u64,
    rto_base_age_ns: u64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Timers {
    wait: Wait,
    wait_in_ns: Option<u64>,
    ack_in_ns: Option<u64>,
    idle_in_ns: Option<u64>,
    keepalives: u8,
    /// When the next challenge is due, from now; it wraps.
    challenge_in_ms: u32,
}

/// How long it takes from `now_ns` until a deadline; `None` when there is none.
fn left_ns(now_ns: u64, at_ns: u64) -> Option<u64> {
    (at_ns != NEVER).then_some(at_ns.saturating_sub(now_ns))
}

fn deadline_ns(now_ns: u64, left_ns: Option<u64>) -> u64 {
    left_ns.map_or(NEVER, |left_ns| now_ns.saturating_add(left_ns))
}

/// Some bytes of a strand.
fn copy_of(mut strand: Strand, chunks: &Chunks, at: u32, bytes: u32) -> ByteBuf {
    let mut copy = vec![0; bytes as usize];
    strand.read(chunks, at as usize, &mut copy);
    ByteBuf::from(copy)
}

/// A strand that holds these bytes.
fn strand_of(chunks: &mut Chunks, data: &[u8]) -> Result<Strand, RestoreError> {
    let mut strand = Strand::EMPTY;
    if !strand.grow(chunks, 0, data.len()) {
        return Err(RestoreError::TooMany {
            what: "bytes of TCP data",
            found: data.len(),
            limit: chunks.left() * CHUNK_BYTES,
        });
    }
    strand.write(chunks, 0, data);
    Ok(strand)
}

fn damaged_unless(right: bool, what: &'static str) -> Result<(), RestoreError> {
    if right { Ok(()) } else { Err(RestoreError::Damaged(what)) }
}

impl Connection {
    fn save(&self, now_ns: u64, chunks: &Chunks) -> SavedConnection {
        let age_ns = |at_ns: u64| now_ns.saturating_sub(at_ns);
        let on_its_way = self.flight.as_ref().filter(|flight| !flight.is_empty());
        let stretch = |(start, end): (Seq, Seq)| {
            let at = start.since(self.read_seq);
            (start, copy_of(self.incoming, chunks, at, end.since(start)))
        };
        SavedConnection {
            ends: self.ends,
            state: self.state,
            is: (self.is & LASTING).bits(),
            listener: self.listener,
            options: *self.options,
            failure: self.failure,
            soft_failure: self.soft_failure,
            sending: Sending {
                una: self.una,
                nxt: self.nxt,
                base: self.send_base,
                data: copy_of(self.outgoing, chunks, 0, self.outgoing_bytes),
                window: self.window,
                max_window: self.max_window,
                window_seq: self.window_seq,
                window_ack: self.window_ack,
                peer_mss: self.peer_mss,
                mss_limit: self.mss_limit,
                mss_most: self.mss_most,
                small_end: self.small_end,
                sent_age_ns: age_ns(self.last_sent_ns),
                shift: self.shift_out,
                stamp: self.ts_now(now_ns),
            },
            receiving: Receiving {
                nxt: self.rcv_nxt,
                edge: self.rcv_edge,
                read: self.read_seq,
                data: copy_of(self.incoming, chunks, 0, self.readable()),
                stretches: self.gaps.iter().flat_map(|g| g.stretches().map(stretch)).collect(),
                duplicate: self.duplicate,
                unacknowledged: self.unacknowledged,
                consumed: self.consumed,
                heard_mss: self.heard_mss,
                acks_owed: self.acks_owed,
                last_ack_sent: self.last_ack_sent,
                heard_age_ns: age_ns(self.heard_ns),
                shift: self.shift_in,
                ts_recent: self.ts_recent,
                ts_recent_age_s: seconds(now_ns).wrapping_sub(self.ts_recent_s),
            },
            recovery: Recovery {
                flight: on_its_way.map(|flight| flight.save(now_ns)),
                searches_path: self.search.is_some(),
                rtt: self.rtt.save(now_ns),
                controller: self.controller.save(),
                phase: self.phase,
                end: self.recovery_end,
                probe_end: self.probe_end,
                cwr_end: self.cwr_end,
                duplicate_acks: self.duplicate_acks,
                reordering_steps: self.reordering_steps,
                retries: self.retries,
                stalled_age_ns: age_ns(self.stalled_ns),
                rto_base_age_ns: age_ns(self.rto_base_ns),
            },
            timers: Timers {
                wait: self.wait,
                wait_in_ns: left_ns(now_ns, self.wait_until_ns),
                ack_in_ns: left_ns(now_ns, self.ack_at_ns),
                idle_in_ns: left_ns(now_ns, self.idle_at_ns),
                keepalives: self.keepalives,
                challenge_in_ms: self.challenge_due_ms.wrapping_sub(milliseconds(now_ns)),
            },
        }
    }

    /// The connection that was saved, without what arrived out of order.
    fn restore(
        now_ns: u64,
        saved: &SavedConnection,
        shared: &mut Shared,
    ) -> Result<Self, RestoreError> {
        saved.check()?;
        let SavedConnection { sending, receiving, recovery, timers, .. } = saved;
        let past_ns = |age_ns: u64| now_ns.saturating_sub(age_ns);
        let options = shared.options(saved.options);
        let kind = options.congestion_control;
        let mut connection = Connection::new(now_ns, saved.ends, options, sending.una, 0);
        let own = &mut connection;
        own.listener = saved.listener;
        own.state = saved.state;
        own.is = Is::from_bits_truncate(saved.is) & LASTING;
        (own.failure, own.soft_failure) = (saved.failure, saved.soft_failure);

        (own.una, own.nxt, own.send_base) = (sending.una, sending.nxt, sending.base);
        own.outgoing = strand_of(&mut shared.chunks, &sending.data)?;
        own.outgoing_bytes = sending.data.len() as u32;
        (own.window, own.max_window) =
            (sending.window.min(MOST_BYTES), sending.max_window.min(MOST_BYTES));
        (own.window_seq, own.window_ack) = (sending.window_seq, sending.window_ack);
        (own.peer_mss, own.mss_limit) = (sending.peer_mss, sending.mss_limit);
        own.set_mss_most(sending.mss_most);
        own.small_end = sending.small_end;
        own.last_sent_ns = past_ns(sending.sent_age_ns);
        own.shift_out = sending.shift;
        own.ts_offset = sending.stamp.wrapping_sub(own.ts_now(now_ns));

        (own.rcv_nxt, own.rcv_edge) = (receiving.nxt, receiving.edge);
        own.read_seq = receiving.read;
        own.incoming = strand_of(&mut shared.chunks, &receiving.data)?;
        own.duplicate = receiving.duplicate;
        (own.unacknowledged, own.consumed) = (receiving.unacknowledged, receiving.consumed);
        (own.heard_mss, own.acks_owed) = (receiving.heard_mss, receiving.acks_owed);
        own.last_ack_sent = receiving.last_ack_sent;
        own.heard_ns = past_ns(receiving.heard_age_ns);
        own.shift_in = receiving.shift;
        own.ts_recent = receiving.ts_recent;
        own.ts_recent_s = seconds(now_ns).wrapping_sub(receiving.ts_recent_age_s);

        own.rtt = RoundTrip::restore(now_ns, &recovery.rtt);
        own.controller = Controller::restore(kind, own.mss.into(), &recovery.controller);
        own.phase = recovery.phase;
        (own.recovery_end, own.probe_end) = (recovery.end, recovery.probe_end);
        own.cwr_end = recovery.cwr_end;
        own.duplicate_acks = recovery.duplicate_acks;
        own.reordering_steps = recovery.reordering_steps.clamp(1, 16);
        own.retries = recovery.retries;
        own.stalled_ns = past_ns(recovery.stalled_age_ns);
        own.rto_base_ns = past_ns(recovery.rto_base_age_ns);
        own.restore_flight(now_ns, recovery.flight.as_ref(), shared)?;
        if recovery.searches_path {
            own.begin_path_search(now_ns);
        }

        own.wait = timers.wait;
        own.wait_until_ns = deadline_ns(now_ns, timers.wait_in_ns);
        own.ack_at_ns = deadline_ns(now_ns, timers.ack_in_ns);
        own.idle_at_ns = deadline_ns(now_ns, timers.idle_in_ns);
        own.keepalives = timers.keepalives;
        own.challenge_due_ms = milliseconds(now_ns).wrapping_add(timers.challenge_in_ms);
        if own.state == TcpState::TimeWait {
            own.idle_at_ns = own.idle_at_ns.min(now_ns.saturating_add(shared.time_wait_ns));
        }
        own.look_around();
        Ok(connection)
    }

    /// What is on its way must be what was sent and not acknowledged.
    fn restore_flight(
        &mut self,
        now_ns: u64,
        saved: Option<&SavedFlight>,
        shared: &mut Shared,
    ) -> Result<(), RestoreError> {
        const WHAT: &str = "what is on its way is not what was sent";
        // The answer to a cookie acknowledges a number that was never noted.
        let is_cookie = self.is.contains(Is::PASSIVE) && self.una + 1 == self.send_base;
        let Some(saved) = saved else {
            let rests = self.una == self.nxt
                || self.state == TcpState::Closed
                || is_cookie && self.nxt == self.send_base;
            return damaged_unless(rests, WHAT);
        };
        let mut flight = shared.take_flight();
        damaged_unless(flight.restore(now_ns, saved), WHAT)?;
        let (Some(first), Some(last)) = (flight.first(), flight.last()) else {
            return Err(RestoreError::Damaged(WHAT));
        };
        let begins =
            first.start == self.una || is_cookie && first.start == self.send_base && !first.syn;
        let is_right = match self.is_synchronized() {
            true => {
                !first.syn
                    && self.send_base.is_up_to(first.start)
                    && last.fin == self.is.contains(Is::FIN_SENT)
            }
            false => first.syn && flight.len() == 1,
        };
        let is_open = self.state != TcpState::Closed;
        damaged_unless(is_open && begins && is_right && last.end == self.nxt, WHAT)?;
        self.flight = Some(flight);
        Ok(())
    }

    /// Has a look at what there may be to send and to tell: better once too
    /// often than never.
    pub(super) fn look_around(&mut self) {
        let is_over = match self.state {
            TcpState::Closed => !self.is.contains(Is::RESET_NOW),
            TcpState::TimeWait => !self.is.contains(Is::ACK_NOW),
            _ => false,
        };
        // What waits for nothing may have been forgotten.
        let waits = self.flight.is_some() || self.may_have_output();
        if is_over {
            self.is.remove(Is::WANTS_OUTPUT);
        } else if waits && self.wait_until_ns == NEVER || self.is.contains(Is::RESET_NOW) {
            self.is.insert(Is::WANTS_OUTPUT);
        }
        let ended = self.state == TcpState::Closed;
        let at_end = self.is.contains(Is::FIN_RECEIVED) || self.is.contains(Is::READ_SHUT);
        let can_write = self.can_send() && self.has_room() && !self.is.contains(Is::STARVED);
        let written = self.is.contains(Is::FIN_QUEUED);
        self.is.set(Is::TELL_READABLE, self.readable() > 0 || at_end || ended);
        self.is.set(Is::TELL_WRITABLE, can_write || written || ended);
    }
}

impl SavedConnection {
    fn is(&self, what: Is) -> bool {
        Is::from_bits_truncate(self.is).contains(what)
    }

    fn is_synchronized(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::SynSent | TcpState::SynReceived)
    }

    fn check(&self) -> Result<(), RestoreError> {
        let (local, remote) = (self.ends.local(), self.ends.remote());
        let ends = local.is_ipv4() == remote.is_ipv4()
            && local.port() != 0
            && remote.port() != 0
            && !remote.ip().is_unspecified()
            && !remote.ip().is_multicast();
        damaged_unless(ends, "a connection has impossible ends")?;
        self.check_sending()?;
        self.check_receiving()
    }

    fn check_sending(&self) -> Result<(), RestoreError> {
        let Sending { una, nxt, base, ref data, .. } = self.sending;
        let sizes = self.sending.shift <= MAX_WINDOW_SHIFT
            && self.sending.peer_mss >= LEAST_MSS
            && self.sending.mss_limit >= LEAST_MSS
            && (LEAST_MSS..=self.sending.peer_mss).contains(&self.sending.mss_most);
        damaged_unless(sizes, "a connection has impossible segments")?;
        let bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
        damaged_unless(bytes <= MOST_BYTES, "a connection has too much to send")?;
        let end = base + bytes;
        let fin = self.is(Is::FIN_SENT);
        let numbers = match self.state {
            TcpState::Closed => bytes == 0,
            TcpState::SynSent | TcpState::SynReceived => {
                base == una + 1 && (nxt == una || nxt == base) && bytes == 0 && !fin
            }
            _ => {
                let begins = una == base || una + 1 == base || fin && una == end + 1 && bytes == 0;
                let ends =
                    if fin { nxt == end + 1 } else { base.is_up_to(nxt) && nxt.is_up_to(end) };
                begins && ends
            }
        };
        damaged_unless(numbers, "a connection sends what it has not")
    }

    fn check_receiving(&self) -> Result<(), RestoreError> {
        let Receiving { nxt, edge, read, ref data, .. } = self.receiving;
        let bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let fin = u32::from(self.is(Is::FIN_RECEIVED));
        let right = bytes <= MOST_BYTES
            && read + bytes + fin == nxt
            && nxt.is_up_to(edge)
            && edge.since(nxt) <= MOST_BYTES
            && self.receiving.shift <= MAX_WINDOW_SHIFT
            && (self.is_synchronized() || self.state == TcpState::Closed || bytes + fin == 0);
        damaged_unless(right, "a connection has received what it has not")
    }
}

impl TcpTable {
    pub(crate) fn save(&self, now_ns: u64) -> SavedTcp {
        let confirmed = self.events.iter().filter_map(|event| match event {
            Event::PeerConfirmed(peer) => Some(*peer),
            _ => None,
        });
        let chunks = &self.shared.chunks;
        let place = |(generation, connection): (u32, Option<&Connection>)| {
            (generation, connection.map(|connection| connection.save(now_ns, chunks)))
        };
        SavedTcp {
            secret: self.secret,
            shown: self.clock.show(now_ns),
            cookies_for_ns: self.cookies_until_ns.saturating_sub(now_ns),
            tells_confirmed: self.tells_confirmed,
            confirmed: confirmed.collect(),
            listeners: self.listeners.save(),
            connections: self.connections.places().map(place).collect(),
        }
    }

    /// The addresses that listeners have and that connections send from.
    pub(crate) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let listeners = (0..self.listeners.places()).filter_map(|index| self.listeners.at(index));
        let connections = self.connections.iter().filter(|c| c.sends_from_its_address());
        listeners.map(|listener| listener.local.ip()).chain(connections.map(|c| c.ends.local_ip()))
    }

    /// Takes everything up, into a table that has nothing yet.
    ///
    /// # Errors
    /// When it is damaged, or more than the limits allow.
    pub(crate) fn restore(&mut self, now_ns: u64, saved: SavedTcp) -> Result<(), RestoreError> {
        self.secret = saved.secret;
        self.clock = PeerClock::showing(saved.shown, now_ns);
        self.cookies_until_ns = now_ns.saturating_add(saved.cookies_for_ns);
        self.tells_confirmed = saved.tells_confirmed;
        self.events.extend(saved.confirmed.into_iter().map(Event::PeerConfirmed));
        self.restore_listeners(saved.listeners)?;
        let mut taken_up = Vec::new();
        let mut stretches = Vec::new();
        let found = saved.connections.len();
        for (generation, saved) in saved.connections {
            let connection = match &saved {
                Some(saved) => Some(Connection::restore(now_ns, saved, &mut self.shared)?),
                None => None,
            };
            let Some(index) = self.connections.add_place(generation, connection) else {
                let limit = self.connections.limit();
                return Err(RestoreError::TooMany { what: "connections", found, limit });
            };
            let Some(saved) = saved else { continue };
            if self.connections.at(index).is_some_and(Connection::has_ends) {
                let known = self.index.find(&self.connections, &saved.ends);
                damaged_unless(known.is_none(), "two connections have the same ends")?;
                self.index.insert(&mut self.connections, index);
            }
            taken_up.push(index);
            if !saved.receiving.stretches.is_empty() {
                stretches.push((index, saved.receiving.stretches));
            }
        }
        self.restore_queues()?;
        // What is acknowledged has its memory: now what can be sent again.
        for (index, stretches) in stretches {
            let Some(connection) = self.connections.at_mut(index) else { continue };
            for (start, data) in stretches {
                connection.take_up_out_of_order(start, &data, &mut self.shared);
            }
        }
        self.wake_all(now_ns, taken_up);
        Ok(())
    }

    /// Lets those go on who came from another table.
    pub(super) fn wake_all(&mut self, now_ns: u64, mut indices: Vec<u32>) {
        // Those in TIME-WAIT are in a queue by age.
        indices.sort_by_key(|&index| match self.connections.at(index) {
            Some(connection) if connection.state == TcpState::TimeWait => connection.idle_at_ns,
            _ => NEVER,
        });
        indices.into_iter().for_each(|index| self.wake(now_ns, index));
    }

    fn wake(&mut self, now_ns: u64, index: u32) {
        let Some((connection, id)) = self.connections.at_mut_with_id(index) else { return };
        if connection.is.take(Is::STARVED) {
            self.starve(id);
        }
        self.settle(now_ns, index);
    }

    fn restore_listeners(&mut self, saved: Vec<SavedPlace>) -> Result<(), RestoreError> {
        let (found, limit) = (saved.len(), self.listeners.limit());
        if found > limit {
            return Err(RestoreError::TooMany { what: "listeners", found, limit });
        }
        saved.into_iter().try_for_each(|place| self.listeners.add_place(place, &mut self.shared))
    }

    /// Joins listeners and their connections again.
    fn restore_queues(&mut self) -> Result<(), RestoreError> {
        for index in 0..self.listeners.places() {
            let id = self.listeners.id(index);
            let Some(listener) = self.listeners.get_mut(id) else { continue };
            for queued in listener.queued() {
                let waits = self.connections.at_mut(queued).is_some_and(|connection| {
                    connection.listener == Some(id)
                        && connection.is.contains(Is::ORPHAN)
                        && !matches!(connection.state, TcpState::SynSent | TcpState::SynReceived)
                        && connection.is.newly(Is::IN_ACCEPT_QUEUE)
                });
                damaged_unless(waits, "a queue to be accepted is not one")?;
            }
            if listener.waiting() > 0 {
                listener.told = true;
                self.events.push_back(Event::TcpAcceptable(id));
            }
        }
        for connection in self.connections.iter_mut() {
            let listener = connection.listener.and_then(|id| self.listeners.get_mut(id));
            match listener {
                Some(listener) if connection.is.contains(Is::IN_SYN_QUEUE) => {
                    listener.half_open += 1;
                }
                Some(_) => {}
                None => connection.is.remove(Is::IN_SYN_QUEUE),
            }
        }
        Ok(())
    }
}
