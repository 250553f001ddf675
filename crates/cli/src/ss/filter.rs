//! Filter of `ss`, in the words of iproute2's `ss`: states, ports and networks, joined by `and`, `or`
//! and `not`.

use std::cmp::Ordering;
use std::net::{IpAddr, SocketAddr};

use tidegate::IpCidr;
use tidegate_service::SocketState;
use tidegate_service::daemon::SocketReport;

use crate::Failure;

/// Deepest nesting of parentheses and negations.
const MAX_DEPTH: usize = 32;

/// Sockets to show.
#[derive(Debug, Default)]
pub(super) struct Filter {
    condition: Option<Condition>,
    names_state: bool,
}

#[derive(Debug, PartialEq)]
enum Condition {
    State(States),
    Port { end: End, is: Vec<Ordering>, port: u16 },
    Network { end: End, network: Option<IpCidr>, port: Option<u16> },
    Not(Box<Condition>),
    And(Box<Condition>, Box<Condition>),
    Or(Box<Condition>, Box<Condition>),
}

/// End of a connection.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Local,
    Peer,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum States {
    All,
    Connected,
    One(SocketState),
}

impl Filter {
    /// Parses the words of the command line, each of which may hold several.
    ///
    /// # Errors
    /// Names the word that is not understood.
    pub(super) fn parse(words: &[String]) -> Result<Self, Failure> {
        let text = words.join(" ");
        // Signs stand alone, whether spaces surround them or not.
        let mut spaced = String::new();
        let mut signs = text.chars().peekable();
        while let Some(sign) = signs.next() {
            match sign {
                '(' | ')' => spaced.extend([' ', sign, ' ']),
                '=' | '!' | '<' | '>' => {
                    spaced.extend([' ', sign]);
                    spaced.extend(signs.next_if_eq(&'='));
                    spaced.push(' ');
                }
                sign => spaced.push(sign),
            }
        }
        let words: Vec<&str> = spaced.split_whitespace().collect();
        if words.is_empty() {
            return Ok(Self::default());
        }
        let mut parser = Parser { words: &words, at: 0, names_state: false };
        let condition = parser.either(0)?;
        match parser.next() {
            None => Ok(Self { condition: Some(condition), names_state: parser.names_state }),
            Some(word) => Err(unexpected(word)),
        }
    }

    /// True if the filter says which states to show.
    pub(super) fn names_state(&self) -> bool {
        self.names_state
    }

    pub(super) fn matches(&self, socket: &SocketReport) -> bool {
        self.condition.as_ref().is_none_or(|condition| condition.matches(socket))
    }
}

fn unexpected(word: &str) -> Failure {
    format!("filter: unexpected {word:?}; `tidegate ss --help` shows filters").into()
}

struct Parser<'a> {
    words: &'a [&'a str],
    at: usize,
    names_state: bool,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.words.get(self.at).copied()
    }

    fn next(&mut self) -> Option<&'a str> {
        let word = self.peek();
        self.at += usize::from(word.is_some());
        word
    }

    fn need(&mut self, wanted: &str) -> Result<&'a str, Failure> {
        self.next().ok_or_else(|| format!("filter: {wanted} is missing at its end").into())
    }

    fn next_if(&mut self, words: &[&str]) -> bool {
        let found = self.peek().is_some_and(|word| words.contains(&word));
        self.at += usize::from(found);
        found
    }

    fn either(&mut self, depth: usize) -> Result<Condition, Failure> {
        let mut condition = self.both(depth)?;
        while self.next_if(&["or", "|", "||"]) {
            condition = Condition::Or(condition.into(), self.both(depth)?.into());
        }
        Ok(condition)
    }

    /// Conditions in a row belong together, with `and` or without.
    fn both(&mut self, depth: usize) -> Result<Condition, Failure> {
        let mut condition = self.one(depth)?;
        while self.peek().is_some_and(|word| !["or", "|", "||", ")"].contains(&word)) {
            self.next_if(&["and", "&", "&&"]);
            condition = Condition::And(condition.into(), self.one(depth)?.into());
        }
        Ok(condition)
    }

    fn one(&mut self, depth: usize) -> Result<Condition, Failure> {
        if depth > MAX_DEPTH {
            return Err(format!("filter: nested more than {MAX_DEPTH} deep").into());
        }
        match self.need("a condition")? {
            "(" => {
                let condition = self.either(depth + 1)?;
                match self.need("`)`")? {
                    ")" => Ok(condition),
                    word => Err(unexpected(word)),
                }
            }
            "not" | "!" => Ok(Condition::Not(self.one(depth + 1)?.into())),
            "state" => Ok(Condition::State(self.state()?)),
            "exclude" => Ok(Condition::Not(Condition::State(self.state()?).into())),
            "sport" => self.port(End::Local),
            "dport" => self.port(End::Peer),
            "src" => self.network(End::Local),
            "dst" => self.network(End::Peer),
            word => Err(unexpected(word)),
        }
    }

    fn state(&mut self) -> Result<States, Failure> {
        self.names_state = true;
        Ok(match self.need("a state")? {
            "all" => States::All,
            "connected" => States::Connected,
            "established" => States::One(SocketState::Connected),
            "syn-sent" => States::One(SocketState::Connecting),
            "listening" | "listen" => States::One(SocketState::Listening),
            "closed" | "close" => States::One(SocketState::Over),
            "unconnected" => States::One(SocketState::Datagram),
            word => {
                return Err(format!(
                    "filter: {word:?} is no state: give established, syn-sent, listening, closed, \
                     unconnected, connected or all"
                )
                .into());
            }
        })
    }

    fn port(&mut self, end: End) -> Result<Condition, Failure> {
        use Ordering::{Equal, Greater, Less};
        let is = match self.peek() {
            Some("=" | "==" | "eq") => vec![Equal],
            Some("!=" | "ne" | "neq") => vec![Less, Greater],
            Some("<" | "lt") => vec![Less],
            Some(">" | "gt") => vec![Greater],
            Some("<=" | "le" | "leq") => vec![Less, Equal],
            Some(">=" | "ge" | "geq") => vec![Greater, Equal],
            _ => Vec::new(),
        };
        self.at += usize::from(!is.is_empty());
        let is = if is.is_empty() { vec![Equal] } else { is };
        let word = self.need("a port")?;
        let port = word.strip_prefix(':').unwrap_or(word).parse();
        let port = port.map_err(|_| format!("filter: {word:?} is no port: write it as :80"))?;
        Ok(Condition::Port { end, is, port })
    }

    fn network(&mut self, end: End) -> Result<Condition, Failure> {
        let is_not = self.next_if(&["!=", "ne", "neq"]);
        if !is_not {
            self.next_if(&["=", "==", "eq"]);
        }
        let word = self.need("an address")?;
        let (network, port) = parse_network(word).ok_or_else(|| {
            format!(
                "filter: {word:?} is no address: write it as 192.0.2.1, 192.0.2.0/24, 192.0.2.1:80 \
                 or [2001:db8::1]:80"
            )
        })?;
        let condition = Condition::Network { end, network, port };
        Ok(if is_not { Condition::Not(condition.into()) } else { condition })
    }
}

/// Parses `NETWORK`, `NETWORK:PORT` or `:PORT`; an IPv6 address with a port is in brackets.
fn parse_network(text: &str) -> Option<(Option<IpCidr>, Option<u16>)> {
    let network = |text: &str| -> Option<IpCidr> {
        if let Ok(network) = text.parse() {
            return Some(network);
        }
        let address: IpAddr = text.parse().ok()?;
        format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 }).parse().ok()
    };
    if let Some(found) = network(text) {
        return Some((Some(found), None));
    }
    let (head, port) = text.rsplit_once(':')?;
    let port = if port == "*" { None } else { Some(port.parse().ok()?) };
    let head = head.strip_prefix('[').and_then(|head| head.strip_suffix(']')).unwrap_or(head);
    Some(if matches!(head, "" | "*") { (None, port) } else { (Some(network(head)?), port) })
}

impl Condition {
    fn matches(&self, socket: &SocketReport) -> bool {
        match self {
            Self::State(States::All) => true,
            Self::State(States::Connected) => {
                matches!(socket.phase, SocketState::Connecting | SocketState::Connected)
            }
            Self::State(States::One(state)) => socket.phase == *state,
            Self::Port { end, is, port } => {
                end.of(socket).is_some_and(|address| is.contains(&address.port().cmp(port)))
            }
            Self::Network { end, network, port } => end.of(socket).is_some_and(|address| {
                network.is_none_or(|network| network.contains(address.ip()))
                    && port.is_none_or(|port| address.port() == port)
            }),
            Self::Not(condition) => !condition.matches(socket),
            Self::And(one, other) => one.matches(socket) && other.matches(socket),
            Self::Or(one, other) => one.matches(socket) || other.matches(socket),
        }
    }
}

impl End {
    fn of(self, socket: &SocketReport) -> Option<SocketAddr> {
        match self {
            Self::Local => socket.local,
            Self::Peer => socket.peer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(phase: SocketState, local: &str, peer: &str) -> SocketReport {
        SocketReport {
            phase,
            local: local.parse().ok(),
            peer: peer.parse().ok(),
            waiting: 0,
            fill_percent: 0,
            holders: 1,
            tcp: None,
        }
    }

    /// Numbers of the sockets that a filter shows.
    fn shown(filter: &str) -> Vec<usize> {
        let sockets = [
            socket(SocketState::Listening, "192.0.2.1:80", ""),
            socket(SocketState::Connected, "192.0.2.1:80", "198.51.100.7:40000"),
            socket(SocketState::Connected, "[2001:db8::1]:443", "[2001:db8::7]:50000"),
            socket(SocketState::Datagram, "192.0.2.1:53", ""),
            socket(SocketState::Connecting, "192.0.2.1:41000", "203.0.113.5:443"),
        ];
        let filter = Filter::parse(&[filter.to_owned()]).unwrap();
        (0..sockets.len()).filter(|&at| filter.matches(&sockets[at])).collect()
    }

    #[test]
    fn filters_choose_sockets() {
        for (filter, expected) in [
            ("", vec![0, 1, 2, 3, 4]),
            ("state established", vec![1, 2]),
            ("state connected", vec![1, 2, 4]),
            ("exclude listening", vec![1, 2, 3, 4]),
            ("sport = :80", vec![0, 1]),
            ("sport :80", vec![0, 1]),
            ("dport>=:50000", vec![2]),
            ("dport != :443", vec![1, 2]),
            ("src 192.0.2.0/24", vec![0, 1, 3, 4]),
            ("dst 203.0.113.5:443", vec![4]),
            ("dst [2001:db8::7]:50000", vec![2]),
            ("dst :443", vec![4]),
            ("not state listening and src 192.0.2.1", vec![1, 3, 4]),
            ("( sport = :443 or dport = :443 ) and state established", vec![2]),
            ("(sport=:443 or dport=:443) state syn-sent", vec![4]),
            ("sport = :53 or sport = :443", vec![2, 3]),
        ] {
            assert_eq!(shown(filter), expected, "{filter}");
        }
    }

    #[test]
    fn wrong_filters_say_what_is_wrong() {
        let error = |text: &str| Filter::parse(&[text.to_owned()]).unwrap_err().to_string();
        assert!(error("state open").contains("no state"));
        assert!(error("sport = :http").contains("no port"));
        assert!(error("src nowhere").contains("no address"));
        assert!(error("( sport = :80").contains("`)`"));
        assert!(error("sport = :80 )").contains("\")\""));
        assert!(error("port = 80").contains("\"port\""));
        assert!(error(&"( ".repeat(10_000)).contains("nested"));
    }
}
