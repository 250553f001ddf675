//! Rules: the sockets that move to Tidegate.

use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;
use tidegate::IpCidr;

/// Transport protocol of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

/// Rules for moving sockets. By default every socket moves, except for loopback addresses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules {
    /// Ports of listeners that move; `None`: all.
    listen: Option<Vec<PortRule>>,
    /// Networks to which connecting or sending sockets move; `None`: all that the stack has a
    /// route to.
    connect: Option<Vec<IpCidr>>,
}

/// Content of a rule file, which `tidegate run` has read.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct RuleLists {
    listen: Option<Vec<String>>,
    connect: Option<Vec<String>>,
}

/// Entry of `listen`: `6379`, `80-90`, `udp:53`, `tcp:7000-7010`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PortRule {
    protocol: Option<Protocol>,
    first: u16,
    last: u16,
}

impl PortRule {
    fn parse(text: &str) -> Option<Self> {
        let (protocol, ports) = match text.split_once(':') {
            Some(("tcp", ports)) => (Some(Protocol::Tcp), ports),
            Some(("udp", ports)) => (Some(Protocol::Udp), ports),
            Some(_) => return None,
            None => (None, text),
        };
        let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (first <= last).then_some(Self { protocol, first, last })
    }

    fn matches(self, protocol: Protocol, port: u16) -> bool {
        self.protocol.is_none_or(|own| own == protocol) && (self.first..=self.last).contains(&port)
    }
}

impl Rules {
    /// Parses the entries of a rule file.
    ///
    /// # Errors
    /// The first entry that cannot be parsed.
    pub(crate) fn parse(lists: &RuleLists) -> Result<Self, String> {
        let ports = |text: &String| {
            PortRule::parse(text).ok_or_else(|| {
                format!(
                    "listen {text:?}: expected a port, a range such as \"80-90\", or \"udp:53\""
                )
            })
        };
        let network = |text: &String| {
            text.parse().map_err(|error| {
                format!("connect {text:?}: {error}; expected a network such as \"192.0.2.0/24\"")
            })
        };
        let listen =
            lists.listen.as_ref().map(|all| all.iter().map(ports).collect()).transpose()?;
        let connect =
            lists.connect.as_ref().map(|all| all.iter().map(network).collect()).transpose()?;
        Ok(Self { listen, connect })
    }

    /// True when a socket that listens on this address moves.
    pub(crate) fn moves_listener(&self, protocol: Protocol, local: SocketAddr) -> bool {
        let is_listed =
            |all: &Vec<PortRule>| all.iter().any(|one| one.matches(protocol, local.port()));
        !is_loopback(local.ip()) && self.listen.as_ref().is_none_or(is_listed)
    }

    /// True when a socket that connects or sends to `peer` moves, provided that the stack has
    /// a route.
    pub(crate) fn moves_connection_to(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        let is_listed = |all: &Vec<IpCidr>| all.iter().any(|network| network.contains(peer));
        !is_loopback(peer) && self.connect.as_ref().is_none_or(is_listed)
    }
}

/// True for loopback addresses, including IPv4-mapped ones.
pub(crate) fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Rules, String> {
        let lists = serde_json::from_str(text).map_err(|error| error.to_string())?;
        Rules::parse(&lists)
    }

    fn moves(rules: &Rules, protocol: Protocol, local: &str) -> bool {
        rules.moves_listener(protocol, local.parse().unwrap())
    }

    #[test]
    fn default_rules_move_all_but_loopback() {
        let rules = Rules::default();
        assert!(moves(&rules, Protocol::Tcp, "0.0.0.0:80"));
        assert!(moves(&rules, Protocol::Udp, "[::]:53"));
        for local in ["127.0.0.1:80", "[::1]:80", "[::ffff:127.0.0.1]:80"] {
            assert!(!moves(&rules, Protocol::Tcp, local), "{local}");
        }
        assert!(rules.moves_connection_to("192.0.2.1".parse().unwrap()));
        assert!(!rules.moves_connection_to("::1".parse().unwrap()));
    }

    #[test]
    fn moves_only_listed_ports_and_networks() {
        let rules = parse(
            r#"{"listen": ["6379", "80-90", "udp:53"], "connect": ["192.0.2.0/24", "2001:db8::/32"]}"#,
        )
        .unwrap();
        for (protocol, local, expected) in [
            (Protocol::Tcp, "0.0.0.0:6379", true),
            (Protocol::Tcp, "0.0.0.0:6380", false),
            (Protocol::Tcp, "[::]:85", true),
            (Protocol::Tcp, "[::]:91", false),
            (Protocol::Udp, "[::]:53", true),
            (Protocol::Tcp, "[::]:53", false),
        ] {
            assert_eq!(moves(&rules, protocol, local), expected, "{protocol:?} {local}");
        }
        assert!(rules.moves_connection_to("::ffff:192.0.2.9".parse().unwrap()));
        assert!(rules.moves_connection_to("2001:db8:1::".parse().unwrap()));
        assert!(!rules.moves_connection_to("198.51.100.1".parse().unwrap()));
    }

    #[test]
    fn errors_name_the_invalid_entry() {
        for (text, expected) in [
            (r#"{"listen": ["http"]}"#, "http"),
            (r#"{"listen": ["9-3"]}"#, "9-3"),
            (r#"{"listen": ["sctp:9"]}"#, "sctp"),
            (r#"{"connect": ["example.org"]}"#, "example.org"),
            (r#"{"lisen": []}"#, "lisen"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
