//! Rules that assign requests to classes.

use std::net::IpAddr;
use std::str::FromStr;

use domain::base::iana::Rtype;
use serde::{Deserialize, Serialize};
use tidegate_wire::IpCidr;

use crate::dns::Name;

/// Conditions of a rule, as written in a configuration file. All that are present must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RequestMatch {
    /// HTTP: front of the path, in whole segments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// HTTP: host, without the port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// HTTP: true for requests of admitted sessions, false for all others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<bool>,
    /// DNS: the queried name, or a name above.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// DNS: the queried type, as `AAAA` or `TYPE28`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub rtype: Option<String>,
    /// Network of the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
}

/// Parts of an HTTP request that rules look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HttpMeta<'a> {
    /// Decoded path.
    pub(crate) path: &'a [u8],
    /// Host without port, in any case.
    pub(crate) host: &'a str,
    pub(crate) has_session: bool,
    pub(crate) client: IpAddr,
}

/// Parts of a DNS query that rules look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DnsMeta<'a> {
    /// Name in wire format, in any case; well-formed.
    pub(crate) name: &'a [u8],
    pub(crate) rtype: u16,
    pub(crate) client: IpAddr,
}

/// Checked rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    client: Option<IpCidr>,
    protocol: ProtocolRule,
}

/// Conditions that one protocol has.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ProtocolRule {
    Any,
    Http { path: Option<String>, host: Option<String>, session: Option<bool> },
    Dns { name: Option<Name>, rtype: Option<u16> },
}

impl Rule {
    /// Rule of every request.
    pub(super) const EVERY: Self = Self { client: None, protocol: ProtocolRule::Any };

    pub(super) fn matches_http(&self, meta: &HttpMeta<'_>) -> bool {
        self.matches_client(meta.client)
            && match &self.protocol {
                ProtocolRule::Any => true,
                ProtocolRule::Http { path, host, session } => {
                    session.is_none_or(|session| session == meta.has_session)
                        && path.as_ref().is_none_or(|path| is_below(meta.path, path.as_bytes()))
                        && host.as_ref().is_none_or(|host| host.eq_ignore_ascii_case(meta.host))
                }
                ProtocolRule::Dns { .. } => false,
            }
    }

    pub(super) fn matches_dns(&self, meta: &DnsMeta<'_>) -> bool {
        self.matches_client(meta.client)
            && match &self.protocol {
                ProtocolRule::Any => true,
                ProtocolRule::Dns { name, rtype } => {
                    rtype.is_none_or(|rtype| rtype == meta.rtype)
                        && name.as_ref().is_none_or(|name| is_in_domain(meta.name, name.wire()))
                }
                ProtocolRule::Http { .. } => false,
            }
    }

    fn matches_client(&self, client: IpAddr) -> bool {
        self.client.is_none_or(|network| network.contains(client.to_canonical()))
    }
}

/// True if `path` is `prefix` or below: `/shop` has `/shop/cart` below, but not `/shopping`.
pub(super) fn is_below(path: &[u8], prefix: &[u8]) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| {
        rest.is_empty() || rest[0] == b'/' || prefix.last().is_none_or(|&last| last == b'/')
    })
}

/// True if the name is `domain` or below. Both are in wire format.
pub(super) fn is_in_domain(name: &[u8], domain: &[u8]) -> bool {
    let Some(start) = name.len().checked_sub(domain.len()) else { return false };
    // Length octets are below the letters, so they compare as they are.
    if !name[start..].eq_ignore_ascii_case(domain) {
        return false;
    }
    // A label may contain the bytes of a domain: only the start of a label counts.
    let mut at = 0;
    while at < start {
        at += 1 + usize::from(name[at]);
    }
    at == start
}

impl RequestMatch {
    /// Checks the conditions. The error says what is wrong.
    pub(super) fn compile(&self) -> Result<Rule, String> {
        let client = self.client.as_deref().map(parse_network).transpose()?;
        let is_http = self.path.is_some() || self.host.is_some() || self.session.is_some();
        let is_dns = self.name.is_some() || self.rtype.is_some();
        let protocol = match (is_http, is_dns) {
            (true, true) => {
                return Err("path, host and session are of HTTP requests, name and type of DNS \
                            queries: make two rules"
                    .into());
            }
            (true, false) => self.compile_http()?,
            (false, true) => self.compile_dns()?,
            (false, false) => ProtocolRule::Any,
        };
        Ok(Rule { client, protocol })
    }

    fn compile_http(&self) -> Result<ProtocolRule, String> {
        if let Some(path) = self.path.as_ref().filter(|path| !path.starts_with('/')) {
            return Err(format!("path {path:?} does not begin with /"));
        }
        if let Some(host) = self.host.as_ref().filter(|host| host.is_empty()) {
            return Err(format!("host {host:?} is empty"));
        }
        let (path, host) = (self.path.clone(), self.host.clone());
        Ok(ProtocolRule::Http { path, host, session: self.session })
    }

    fn compile_dns(&self) -> Result<ProtocolRule, String> {
        let name = self.name.as_ref().map(|name| {
            Name::from_text(name).ok_or_else(|| format!("name {name:?} is no domain name"))
        });
        let rtype = self.rtype.as_ref().map(|rtype| {
            let advice = "write a type such as AAAA or TYPE28";
            Rtype::from_str(rtype).map_err(|_| format!("unknown type {rtype:?}: {advice}"))
        });
        let (name, rtype) = (name.transpose()?, rtype.transpose()?);
        Ok(ProtocolRule::Dns { name, rtype: rtype.map(Rtype::to_int) })
    }
}

/// Parses a network, or the address of one client.
fn parse_network(text: &str) -> Result<IpCidr, String> {
    let network = text.parse().or_else(|_| text.parse().map(IpCidr::host));
    network.map_err(|_| format!("client {text:?} is no network, such as 192.0.2.0/24"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: &str = "192.0.2.1";

    fn rule(text: &str) -> Result<Rule, String> {
        toml::from_str::<RequestMatch>(text).map_err(|error| error.to_string())?.compile()
    }

    fn http(rule_text: &str, path: &str, host: &str, has_session: bool, client: &str) -> bool {
        let client = client.parse().unwrap();
        let meta = HttpMeta { path: path.as_bytes(), host, has_session, client };
        rule(rule_text).unwrap().matches_http(&meta)
    }

    fn dns(rule_text: &str, name: &[u8], rtype: u16, client: &str) -> bool {
        let meta = DnsMeta { name, rtype, client: client.parse().unwrap() };
        rule(rule_text).unwrap().matches_dns(&meta)
    }

    #[test]
    fn paths_match_by_whole_segments() {
        for (prefix, path, expected) in [
            ("/shop", "/shop", true),
            ("/shop", "/shop/cart", true),
            ("/shop", "/shopping", false),
            ("/shop", "/Shop", false),
            ("/shop", "/", false),
            ("/shop/", "/shop/cart", true),
            ("/shop/", "/shop", false),
            ("/", "/shop", true),
        ] {
            let rule = format!("path = '{prefix}'");
            assert_eq!(http(&rule, path, "x", false, CLIENT), expected, "{prefix} {path}");
        }
    }

    #[test]
    fn all_conditions_of_a_rule_hold() {
        let text = "path = '/a'\nhost = 'Shop.example'\nsession = true\nclient = '192.0.2.0/24'";
        assert!(http(text, "/a", "shop.EXAMPLE", true, CLIENT));
        assert!(http(text, "/a", "shop.example", true, "::ffff:192.0.2.9"));
        assert!(!http(text, "/b", "shop.example", true, CLIENT));
        assert!(!http(text, "/a", "other.example", true, CLIENT));
        assert!(!http(text, "/a", "shop.example", false, CLIENT));
        assert!(!http(text, "/a", "shop.example", true, "192.0.3.1"));
        assert!(http("client = '2001:db8::1'", "/", "", false, "2001:db8::1"));
        assert!(!http("client = '2001:db8::1'", "/", "", false, "2001:db8::2"));
        assert!(!http("name = 'a'", "/", "", false, CLIENT), "a rule of DNS");
    }

    #[test]
    fn names_match_by_whole_labels() {
        for (name, expected) in [
            (&b"\x07example\x03org\0"[..], true),
            (b"\x03wWw\x07eXample\x03org\0", true),
            (b"\x0bwww.example\x03org\0", false),
            // One label with the bytes of the domain at its end.
            (b"\x0cx\x07example\x03org\0", false),
            (b"\x03org\0", false),
            (b"\0", false),
        ] {
            assert_eq!(dns("name = 'Example.org'", name, 1, CLIENT), expected, "{name:?}");
            assert_eq!(dns("name = 'example.org.'", name, 1, CLIENT), expected, "{name:?}");
        }
        assert!(dns("name = '.'", b"\x01a\0", 1, CLIENT));
        let text = "name = 'a'\ntype = 'AAAA'\nclient = '2001:db8::/32'";
        assert!(dns(text, b"\x01a\0", 28, "2001:db8::1"));
        assert!(!dns(text, b"\x01a\0", 1, "2001:db8::1"));
        assert!(!dns(text, b"\x01a\0", 28, "2001:db9::1"));
        assert!(!dns("session = true", b"\x01a\0", 1, CLIENT), "a rule of HTTP");
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("path = 'shop'", "begin with /"),
            ("host = ''", "empty"),
            ("name = 'a..b'", "a..b"),
            ("type = 'QUAD'", "QUAD"),
            ("client = '192.0.2'", "192.0.2"),
            ("path = '/'\nname = 'a'", "two rules"),
            ("cookie = 'a'", "cookie"),
        ] {
            let error = rule(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
