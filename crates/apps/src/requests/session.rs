//! Sessions of HTTP clients, by a signed cookie: the server stores nothing for a session.

use std::fmt;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

/// Hexadecimal digits of an identity, of a time, and of a tag.
const ID_DIGITS: usize = 16;
const TIME_DIGITS: usize = 8;
const TAG_DIGITS: usize = 32;

/// Cookies of one name that a request may carry; further ones are not looked at.
const MAX_COOKIES: usize = 4;

/// Secret key that signs sessions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SessionSecret([u8; 16]);

// Debug output hides the key: knowing it allows forging sessions.
impl fmt::Debug for SessionSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionSecret")
    }
}

/// Session that was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) id: u64,
    /// End of the session, in seconds since the Unix epoch.
    pub(crate) expires_s: u32,
}

impl SessionSecret {
    /// Creates a secret from 16 random bytes.
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Bytes of the secret, as a seed of keyed hashes that nobody sees.
    pub(crate) fn bytes(&self) -> [u8; 16] {
        self.0
    }

    /// Returns the value of the cookie of a session.
    pub(crate) fn sign(&self, session: Session) -> String {
        let Session { id, expires_s } = session;
        format!("{id:016x}{expires_s:08x}{:032x}", self.tag(session))
    }

    /// Returns the session of a cookie's value, unless it is forged or has expired.
    pub(crate) fn verify(&self, value: &[u8], now_s: u32) -> Option<Session> {
        let is_hex = value.len() == ID_DIGITS + TIME_DIGITS + TAG_DIGITS
            && value.iter().all(u8::is_ascii_hexdigit);
        let text = str::from_utf8(value).ok().filter(|_| is_hex)?;
        let (front, tag) = text.split_at(ID_DIGITS + TIME_DIGITS);
        let (id, expires) = front.split_at(ID_DIGITS);
        let session = Session {
            id: u64::from_str_radix(id, 16).ok()?,
            expires_s: u32::from_str_radix(expires, 16).ok()?,
        };
        // The integers are compared as a whole: the time says nothing about the place of a wrong
        // digit.
        let is_signed = u128::from_str_radix(tag, 16).ok()? ^ self.tag(session) == 0;
        (is_signed && now_s < session.expires_s).then_some(session)
    }

    /// Returns the session of the first valid cookie `name` in the values of `Cookie` headers (RFC
    /// 6265 section 5.4).
    pub(crate) fn find<'a>(
        &self,
        name: &str,
        headers: impl Iterator<Item = &'a [u8]>,
        now_s: u32,
    ) -> Option<Session> {
        headers
            .flat_map(|header| header.split(|&byte| byte == b';'))
            .filter_map(|pair| pair.trim_ascii().strip_prefix(name.as_bytes())?.strip_prefix(b"="))
            .take(MAX_COOKIES)
            .find_map(|value| self.verify(value, now_s))
    }

    fn tag(&self, session: Session) -> u128 {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(&session.id.to_be_bytes());
        hasher.write(&session.expires_s.to_be_bytes());
        hasher.finish128().as_u128()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: SessionSecret = SessionSecret([3; 16]);
    const SESSION: Session = Session { id: 0x1234, expires_s: 1_700_000_000 };

    fn find(headers: &[String]) -> Option<Session> {
        SECRET.find("s", headers.iter().map(String::as_bytes), 1_600_000_000)
    }

    #[test]
    fn only_own_unexpired_cookies_are_sessions() {
        let value = SECRET.sign(SESSION);
        let verify = |value: &str, now_s| SECRET.verify(value.as_bytes(), now_s);
        assert_eq!(verify(&value, 1_699_999_999), Some(SESSION));
        assert_eq!(verify(&value, 1_700_000_000), None, "expired");
        assert_eq!(SessionSecret([4; 16]).verify(value.as_bytes(), 0), None, "another secret");
        for at in 0..value.len() {
            let mut forged = value.clone().into_bytes();
            forged[at] = if forged[at] == b'0' { b'1' } else { b'0' };
            assert_eq!(SECRET.verify(&forged, 0), None, "digit {at}");
        }
        for text in ["", "+", &value[1..], &format!("{value}0"), &"é".repeat(28)] {
            assert_eq!(verify(text, 0), None, "{text}");
        }
    }

    #[test]
    fn finds_the_cookie_among_others() {
        let value = SECRET.sign(SESSION);
        let own = format!("s={value}");
        let (before, forged) = ("a=b".to_owned(), format!("s=forged;{own}"));
        for headers in [
            vec![own.clone()],
            vec![format!("a=b; {own}; c=d")],
            vec![before, own.clone()],
            vec![forged],
        ] {
            assert_eq!(find(&headers), Some(SESSION), "{headers:?}");
        }
        let many = format!("{}{own}", "s=forged;".repeat(MAX_COOKIES));
        for header in [format!("ss={value}"), format!("S={value}"), value, many] {
            assert_eq!(find(std::slice::from_ref(&header)), None, "{header:?}");
        }
        assert_eq!(find(&[]), None);
    }
}
