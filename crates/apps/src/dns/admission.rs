//! Admission of queries by name, type and client, on one thread.

use std::net::IpAddr;

use tidegate_gate::requests::{RequestAdmission, StandingQueue};

use super::message::Query;
use crate::requests::{DnsMeta, DnsRefusal, RequestPolicy};

/// Decides which queries a thread looks up. A query waits in the queue of a socket, so the wait is
/// the time for which that queue has not been empty.
pub(super) struct QueryAdmission {
    policy: RequestPolicy,
    decision: RequestAdmission,
    queue: StandingQueue,
}

impl QueryAdmission {
    pub(super) fn new(policy: &RequestPolicy) -> Self {
        let decision = policy.admission();
        let queue = StandingQueue::new(decision.level_count());
        Self { policy: policy.clone(), decision, queue }
    }

    /// Answer to refused queries.
    pub(super) fn refusal(&self) -> DnsRefusal {
        self.policy.config().dns_refusal
    }

    /// Records that no query is left.
    pub(super) fn on_empty(&mut self) {
        self.queue.on_empty();
    }

    /// Begins a batch of queries.
    pub(super) fn on_batch(&mut self, now_ns: u64) {
        self.queue.on_batch(now_ns);
    }

    /// Returns true if the query is to be looked up.
    pub(super) fn admit(&mut self, query: &Query<'_>, client: IpAddr, now_ns: u64) -> bool {
        let meta = DnsMeta { name: query.name(), rtype: query.rtype, client };
        let class = self.policy.classify_dns(&meta);
        let level = self.decision.level(class);
        let wait_ns = self.queue.wait_ns(level, now_ns);
        let is_admitted = self.decision.admit(class, now_ns, wait_ns).is_ok();
        if !is_admitted {
            self.queue.on_refused(level, now_ns);
        }
        is_admitted
    }
}
