//! Section `[requests]`: the form of the configuration file, and its check.

use serde::{Deserialize, Serialize};
use tidegate_gate::requests::{RequestAdmission, RequestClass};

use super::matching::{DnsMeta, HttpMeta, RequestMatch, Rule};

/// Maximum number of classes, with the one for the rest.
const MAX_CLASSES: usize = 16;

/// Maximum number of rules in all classes together.
const MAX_RULES: usize = 64;

/// Name of the class of requests that match no other class.
const DEFAULT_CLASS_NAME: &str = "others";

/// Admission of requests: section `[requests]` of a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RequestsConfig {
    /// Classes in matching order; without any, sessions come before all other requests.
    #[serde(rename = "class")]
    pub classes: Vec<RequestClassConfig>,
    /// Longest wait of requests of the last rank, in milliseconds. Each rank before waits up to 16
    /// times as long, and none more than two seconds.
    pub max_wait_ms: u64,
    /// HTTP: name of the cookie of sessions; empty for no sessions.
    pub session_cookie: String,
    /// HTTP: time after which a session without requests ends, in seconds.
    pub session_lifetime_s: u32,
    /// HTTP: requests per second of one session; a request above counts as one without session.
    pub session_rps: u64,
    /// HTTP: time after which a refused client may come again, in seconds.
    pub retry_after_s: u32,
    /// DNS: answer to a refused query.
    pub dns_refusal: DnsRefusal,
}

/// Answer to a DNS query that is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DnsRefusal {
    /// Response code REFUSED, with an extended error: the client asks another server.
    #[default]
    Refused,
    /// An empty answer with the TC bit: the client asks again over TCP, where a query is answered
    /// with REFUSED.
    Truncated,
}

/// Class of requests, as written in a configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RequestClassConfig {
    /// Class name, for messages.
    pub name: String,
    /// Rules of the class. A request belongs to the class if at least one rule matches; without
    /// rules every request matches.
    #[serde(rename = "match", default)]
    pub rules: Vec<RequestMatch>,
    /// Precedence: rank 0 before rank 1.
    #[serde(default)]
    pub rank: u8,
    /// Requests per second that are admitted whatever the rank.
    #[serde(default)]
    pub guaranteed_rps: u64,
    /// Maximum requests per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceiling_rps: Option<u64>,
}

impl Default for RequestsConfig {
    fn default() -> Self {
        Self {
            classes: Vec::new(),
            max_wait_ms: 20,
            session_cookie: "tidegate-session".to_owned(),
            session_lifetime_s: 1800,
            session_rps: 50,
            retry_after_s: 10,
            dns_refusal: DnsRefusal::default(),
        }
    }
}

/// Error in section `[requests]`. Names are the configuration file's keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestsError {
    /// A setting is out of range.
    #[error("{key}: give {expected}")]
    Setting {
        /// Key of the setting.
        key: &'static str,
        /// Values that are allowed.
        expected: &'static str,
    },
    /// More classes or rules than there may be.
    #[error(
        "too many classes or rules: at most {MAX_CLASSES} classes, with `others`, and {MAX_RULES} rules"
    )]
    TooMany,
    /// A class has no name, or that of another class.
    #[error("class {0:?}: give each class a name of its own")]
    Name(String),
    /// A class behind one that matches every request.
    #[error("class `{0}` can never match: the class before it matches every request")]
    Unreachable(String),
    /// The rates of a class contradict each other.
    #[error("class `{0}`: ceiling-rps must be above 0, and not below guaranteed-rps")]
    Rates(String),
    /// A rule of a class is wrong.
    #[error("class `{class}`: {fault}")]
    Rule {
        /// Class of the rule.
        class: String,
        /// Description of the mistake.
        fault: String,
    },
}

/// Checked [`RequestsConfig`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestPolicy {
    config: RequestsConfig,
    rules: Vec<(Rule, usize)>,
    classes: Vec<RequestClass>,
}

impl RequestsConfig {
    /// Checks the settings.
    ///
    /// # Errors
    /// When a setting is out of range or a rule is wrong.
    pub fn compile(&self) -> Result<RequestPolicy, RequestsError> {
        self.check_settings()?;
        let session = RequestMatch { session: Some(true), ..RequestMatch::default() };
        let default_class = RequestClassConfig {
            name: "session".to_owned(),
            rules: vec![session],
            ..RequestClassConfig::default()
        };
        let configured = match self.classes.is_empty() {
            true => std::slice::from_ref(&default_class),
            false => &self.classes[..],
        };
        let mut policy = RequestPolicy { config: self.clone(), rules: vec![], classes: vec![] };
        let mut names: Vec<&str> = vec!["", DEFAULT_CLASS_NAME];
        for class in configured {
            if names.contains(&class.name.as_str()) {
                return Err(RequestsError::Name(class.name.clone()));
            }
            if policy.matches_every_request() {
                return Err(RequestsError::Unreachable(class.name.clone()));
            }
            names.push(&class.name);
            policy.push(class)?;
        }
        if !policy.matches_every_request() {
            let rank = configured.iter().map(|class| class.rank).max().unwrap_or(0);
            let rank = rank.saturating_add(1);
            policy.rules.push((Rule::EVERY, policy.classes.len()));
            policy.classes.push(RequestClass { rank, ..RequestClass::default() });
        }
        match policy.classes.len() > MAX_CLASSES || policy.rules.len() > MAX_RULES {
            true => Err(RequestsError::TooMany),
            false => Ok(policy),
        }
    }

    fn check_settings(&self) -> Result<(), RequestsError> {
        let is_token =
            |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        let checks = [
            ((1..=2000).contains(&self.max_wait_ms), "max-wait-ms", "1 to 2000"),
            (
                self.session_cookie.bytes().all(is_token) && self.session_cookie.len() <= 64,
                "session-cookie",
                "a name of at most 64 letters, digits and - _ . only",
            ),
            (
                (1..=31_536_000).contains(&self.session_lifetime_s),
                "session-lifetime-s",
                "1 to 31536000, a year",
            ),
            (self.session_rps > 0, "session-rps", "at least 1"),
        ];
        checks.into_iter().try_for_each(|(is_right, key, expected)| match is_right {
            true => Ok(()),
            false => Err(RequestsError::Setting { key, expected }),
        })
    }
}

impl RequestPolicy {
    /// Settings of the section.
    pub(crate) fn config(&self) -> &RequestsConfig {
        &self.config
    }

    /// Part of one of several threads that serve together: rates are divided.
    pub fn share_of(&self, threads: usize) -> Self {
        let threads = threads.max(1) as u64;
        let classes = self.classes.iter().map(|class| RequestClass {
            guaranteed_rps: class.guaranteed_rps.div_ceil(threads),
            ceiling_rps: class.ceiling_rps.map(|ceiling| ceiling.div_ceil(threads)),
            ..*class
        });
        Self { classes: classes.collect(), ..self.clone() }
    }

    /// Creates the decision about requests of these classes.
    pub(crate) fn admission(&self) -> RequestAdmission {
        RequestAdmission::new(&self.classes, self.config.max_wait_ms * 1_000_000)
    }

    /// Class of an HTTP request.
    pub(crate) fn classify_http(&self, meta: &HttpMeta<'_>) -> usize {
        self.class_of(|rule| rule.matches_http(meta))
    }

    /// Class of a DNS query.
    pub(crate) fn classify_dns(&self, meta: &DnsMeta<'_>) -> usize {
        self.class_of(|rule| rule.matches_dns(meta))
    }

    fn class_of(&self, matches: impl Fn(&Rule) -> bool) -> usize {
        // The last rule matches every request.
        let rule = self.rules.iter().find(|(rule, _)| matches(rule));
        rule.map_or(self.classes.len() - 1, |&(_, class)| class)
    }

    fn matches_every_request(&self) -> bool {
        self.rules.iter().any(|(rule, _)| *rule == Rule::EVERY)
    }

    fn push(&mut self, class: &RequestClassConfig) -> Result<(), RequestsError> {
        let RequestClassConfig { name, rules, rank, guaranteed_rps, ceiling_rps } = class;
        if ceiling_rps.is_some_and(|ceiling| ceiling == 0 || ceiling < *guaranteed_rps) {
            return Err(RequestsError::Rates(name.clone()));
        }
        let every = [RequestMatch::default()];
        let rules = if rules.is_empty() { &every[..] } else { rules };
        for rule in rules {
            let fault = |fault| RequestsError::Rule { class: name.clone(), fault };
            self.rules.push((rule.compile().map_err(fault)?, self.classes.len()));
        }
        self.classes.push(RequestClass {
            rank: *rank,
            guaranteed_rps: *guaranteed_rps,
            ceiling_rps: *ceiling_rps,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> Result<RequestPolicy, String> {
        let config: RequestsConfig = toml::from_str(text).map_err(|error| error.to_string())?;
        config.compile().map_err(|error| error.to_string())
    }

    fn http_class(policy: &RequestPolicy, path: &str, has_session: bool) -> usize {
        let client = "192.0.2.1".parse().unwrap();
        let (path, host) = (path.as_bytes(), "x");
        policy.classify_http(&HttpMeta { path, host, has_session, client })
    }

    #[test]
    fn sessions_come_first_without_classes() {
        let policy = policy("").unwrap();
        assert_eq!(http_class(&policy, "/", true), 0);
        assert_eq!(http_class(&policy, "/", false), 1);
        let admission = policy.admission();
        assert_eq!([0, 1].map(|class| admission.level(class)), [0, 1]);
    }

    #[test]
    fn first_matching_class_counts_and_the_rest_is_last() {
        let text = "
            [[class]]
            name = 'status'
            match = [{ path = '/api/status' }, { path = '/health' }]
            rank = 4
            guaranteed-rps = 10
            ceiling-rps = 20
            [[class]]
            name = 'api'
            match = [{ path = '/api' }]
            rank = 2";
        let policy = policy(text).unwrap();
        let classes = ["/health", "/api/status/x", "/api/echo", "/"];
        assert_eq!(classes.map(|path| http_class(&policy, path, true)), [0, 0, 1, 2]);
        let admission = policy.admission();
        assert_eq!([0, 1, 2].map(|class| admission.level(class)), [1, 0, 2]);
        assert_eq!(policy.share_of(4).classes[0].ceiling_rps, Some(5));
        assert_eq!(policy.share_of(4).classes[0].guaranteed_rps, 3);
    }

    #[test]
    fn mistakes_are_named() {
        let class = |rest: &str| format!("[[class]]\nname = 'a'\n{rest}");
        let many =
            (0..16).map(|n| format!("[[class]]\nname = '{n}'\nmatch = [{{ path = '/{n}' }}]\n"));
        for (text, part) in [
            ("max-wait-ms = 0".to_owned(), "max-wait-ms"),
            ("session-cookie = 'a b'".to_owned(), "session-cookie"),
            ("session-lifetime-s = 0".to_owned(), "session-lifetime-s"),
            ("session-rps = 0".to_owned(), "session-rps"),
            ("dns-refusal = 'drop'".to_owned(), "dns-refusal"),
            ("max-wait = 3".to_owned(), "max-wait"),
            (class("ceiling-rps = 0"), "ceiling-rps"),
            (class("ceiling-rps = 3\nguaranteed-rps = 4"), "ceiling-rps"),
            (class("rate = 3"), "rate"),
            (class("match = [{ path = 'x' }]"), "class `a`"),
            (class("[[class]]\nname = 'b'"), "never match"),
            (class("match = [{ path = '/' }]\n[[class]]\nname = 'a'"), "name of its own"),
            ("[[class]]\nname = 'others'".to_owned(), "name of its own"),
            (many.collect(), "too many"),
        ] {
            let error = policy(&text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
