//! Terms on which sockets share a port. Many sockets on one port have few different terms, so a bind
//! is not checked against each socket.

use std::net::IpAddr;

/// Address of a socket, and the terms on which others may have it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BindTerms {
    pub(super) ip: IpAddr,
    pub(super) is_dual_stack: bool,
    pub(super) reuse_port: bool,
    pub(super) reuse_address: bool,
    pub(super) owner: u64,
}

impl BindTerms {
    /// True if two sockets may be bound to the same address and port.
    fn may_share_address(&self, other: &Self) -> bool {
        let agree = self.reuse_port && other.reuse_port || self.both_reuse_address(other);
        agree && self.owner == other.owner
    }

    /// True if both sockets set `reuse_address`.
    fn both_reuse_address(&self, other: &Self) -> bool {
        self.reuse_address && other.reuse_address
    }

    /// True if both sockets stand for all addresses of a family, or for the same address.
    fn have_same_address(&self, other: &Self) -> bool {
        self.ip == other.ip
            || self.ip.is_unspecified()
                && other.ip.is_unspecified()
                && (self.is_dual_stack || other.is_dual_stack)
    }

    /// True if a datagram could match both sockets on one port.
    fn overlaps(&self, other: &Self) -> bool {
        let same_family = self.ip.is_ipv4() == other.ip.is_ipv4();
        let same_family = same_family || self.is_dual_stack || other.is_dual_stack;
        let is_any = self.ip.is_unspecified() || other.ip.is_unspecified();
        self.ip == other.ip || same_family && is_any
    }
}

/// Numbers of sockets with the same terms.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    unconnected: u32,
    connected: u32,
}

impl Counts {
    fn count(&mut self, is_connected: bool) -> &mut u32 {
        if is_connected { &mut self.connected } else { &mut self.unconnected }
    }
}

/// Terms of all sockets on one port.
#[derive(Debug, Default)]
pub(super) struct PortTerms(Vec<(BindTerms, Counts)>);

impl PortTerms {
    pub(super) fn add(&mut self, terms: BindTerms, is_connected: bool) {
        let known = self.0.iter().position(|(known, _)| *known == terms);
        let at = known.unwrap_or_else(|| {
            self.0.push((terms, Counts::default()));
            self.0.len() - 1
        });
        *self.0[at].1.count(is_connected) += 1;
    }

    pub(super) fn remove(&mut self, terms: BindTerms, is_connected: bool) {
        let Some(at) = self.0.iter().position(|(known, _)| *known == terms) else { return };
        let counts = &mut self.0[at].1;
        *counts.count(is_connected) -= 1;
        if *counts == Counts::default() {
            self.0.swap_remove(at);
        }
    }

    /// True if an unconnected socket has the address and does not share it on these terms.
    pub(super) fn has_bind_conflict(&self, terms: &BindTerms) -> bool {
        let unconnected = self.0.iter().filter(|(_, counts)| counts.unconnected > 0);
        let mut same = unconnected.filter(|(other, _)| terms.have_same_address(other));
        same.any(|(other, _)| !terms.may_share_address(other))
    }

    /// True if a socket does not agree to share the port on these terms, and its address overlaps.
    pub(super) fn has_clash(&self, terms: &BindTerms) -> bool {
        self.0.iter().any(|(other, _)| {
            let agree = terms.both_reuse_address(other) || terms.may_share_address(other);
            !agree && terms.overlaps(other)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(ip: &str, owner: u64) -> BindTerms {
        let ip: IpAddr = ip.parse().unwrap();
        let is_dual_stack = ip.is_ipv6() && ip.is_unspecified();
        BindTerms { ip, is_dual_stack, reuse_port: true, reuse_address: false, owner }
    }

    #[test]
    fn sockets_on_the_same_terms_are_counted_only() {
        let mut port = PortTerms::default();
        let (mine, other) = (terms("::", 1), terms("::", 2));
        for n in 0..1000 {
            assert!(!port.has_bind_conflict(&mine) && !port.has_clash(&mine));
            port.add(mine, n % 2 == 0);
        }
        assert_eq!(port.0.len(), 1);
        assert!(port.has_bind_conflict(&other) && port.has_clash(&other));
        (0..500).for_each(|_| port.remove(mine, false));
        assert!(!port.has_bind_conflict(&other) && port.has_clash(&other), "all are connected");
        (0..500).for_each(|_| port.remove(mine, true));
        assert!(port.0.is_empty() && !port.has_clash(&other));
        port.remove(mine, true);
    }

    #[test]
    fn addresses_conflict_across_families_on_dual_stack_sockets_only() {
        let mut port = PortTerms::default();
        port.add(terms("::", 1), false);
        for (ip, conflicts, clashes) in [
            ("0.0.0.0", true, true),
            ("::", true, true),
            ("192.0.2.1", false, true),
            ("2001:db8::1", false, true),
        ] {
            let other = terms(ip, 2);
            assert_eq!(port.has_bind_conflict(&other), conflicts, "{ip}");
            assert_eq!(port.has_clash(&other), clashes, "{ip}");
        }
        let v6_only = BindTerms { is_dual_stack: false, ..terms("::", 1) };
        let mut port = PortTerms::default();
        port.add(v6_only, false);
        for (ip, clashes) in [("0.0.0.0", false), ("192.0.2.1", false), ("2001:db8::1", true)] {
            assert!(!port.has_bind_conflict(&terms(ip, 2)), "{ip}");
            assert_eq!(port.has_clash(&terms(ip, 2)), clashes, "{ip}");
        }
    }
}
