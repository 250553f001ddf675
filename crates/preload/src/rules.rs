//! Rules: the sockets that move to Tidegate.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use serde::{Deserialize, Serialize};
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

/// Rule file (TOML).
#[derive(Deserialize, Serialize, Default)]
#[serde(default, deny_unknown_fields)]
struct RulesFile {
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
    /// Reads a rule file.
    ///
    /// # Errors
    /// The path of the file and the first entry that cannot be read.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path);
        text.map_err(|error| error.to_string())
            .and_then(|text| Self::parse(&text))
            .map_err(|error| format!("{}: {error}", path.display()))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: RulesFile = toml::from_str(text).map_err(|error| error.to_string())?;
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
        let listen = file.listen.map(|all| all.iter().map(ports).collect()).transpose()?;
        let connect = file.connect.map(|all| all.iter().map(network).collect()).transpose()?;
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
        let rules = Rules::parse(
            "listen = ['6379', '80-90', 'udp:53']\nconnect = ['192.0.2.0/24', '2001:db8::/32']",
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
            ("listen = ['http']", "http"),
            ("listen = ['9-3']", "9-3"),
            ("listen = ['sctp:9']", "sctp"),
            ("connect = ['example.org']", "example.org"),
            ("lisen = []", "lisen"),
        ] {
            let error = Rules::parse(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
