//! DNS cookies (RFC 7873) with the server cookies of RFC 9018, which several servers of one
//! address can share by a common secret.

use std::fmt;
use std::net::IpAddr;

use tidegate_stack::siphash;

/// Length of a client cookie, in bytes.
pub(super) const CLIENT_COOKIE_BYTES: usize = 8;

/// Length of both cookies together, in bytes.
pub(super) const COOKIE_BYTES: usize = CLIENT_COOKIE_BYTES + 16;

/// Age in seconds up to which a server cookie is valid, and from which on it is renewed (RFC 9018
/// section 4.3).
const MAX_AGE_SECONDS: i32 = 3600;
const RENEWAL_AGE_SECONDS: i32 = 1800;

/// Time in seconds that a server cookie may be ahead of this server's clock.
const MAX_AHEAD_SECONDS: i32 = 300;

/// Version 1 and three reserved bytes.
const VERSION: [u8; 4] = [1, 0, 0, 0];

/// Secret key of server cookies, as 16 bytes in the configuration of each server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CookieSecret([u64; 2]);

// Debug output hides the key: knowing it allows forging cookies.
impl fmt::Debug for CookieSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CookieSecret")
    }
}

impl CookieSecret {
    /// Creates a secret from its 16 bytes.
    pub fn new(bytes: [u8; 16]) -> Self {
        let number = u128::from_le_bytes(bytes);
        CookieSecret([number as u64, (number >> 64) as u64])
    }

    /// Parses 32 hexadecimal digits, as other name servers write the secret.
    pub fn from_hex(text: &str) -> Option<Self> {
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| is_hex)?;
        Some(CookieSecret::new(number.to_be_bytes()))
    }

    /// Hash of a server cookie, the last eight bytes of the cookie.
    fn hash(self, client: &[u8; CLIENT_COOKIE_BYTES], front: &[u8; 8], address: IpAddr) -> [u8; 8] {
        let mut input = [0; CLIENT_COOKIE_BYTES + 8 + 16];
        input[..8].copy_from_slice(client);
        input[8..16].copy_from_slice(front);
        let len = match address.to_canonical() {
            IpAddr::V4(address) => {
                input[16..20].copy_from_slice(&address.octets());
                20
            }
            IpAddr::V6(address) => {
                input[16..].copy_from_slice(&address.octets());
                32
            }
        };
        siphash(self.0, &input[..len]).to_le_bytes()
    }
}

/// Cookie option of a query, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CheckedCookie {
    /// Client cookie and server cookie for the reply.
    pub reply: [u8; COOKIE_BYTES],
    /// The client sent a server cookie of this server: its address is not forged.
    pub is_valid: bool,
}

/// Checks the cookie option of a query and prepares that of the reply. The first secret makes new
/// cookies; all are accepted. Returns `None` without a secret.
pub(super) fn check(
    secrets: &[CookieSecret],
    option: &[u8],
    client: IpAddr,
    now_seconds: u32,
) -> Option<CheckedCookie> {
    let active = *secrets.first()?;
    let client_cookie = option.first_chunk::<CLIENT_COOKIE_BYTES>()?;
    let mut reply = [0; COOKIE_BYTES];
    reply[..8].copy_from_slice(client_cookie);
    let mut is_valid = false;
    if let Ok(sent) = <&[u8; COOKIE_BYTES]>::try_from(option) {
        let (front, hash) = sent[8..].split_at(8);
        if let (Some(front), Some(made)) = (front.first_chunk::<8>(), front.last_chunk::<4>()) {
            // Serial numbers (RFC 1982): seconds wrap around in 2106.
            let age = now_seconds.wrapping_sub(u32::from_be_bytes(*made)) as i32;
            is_valid = front[0] == VERSION[0]
                && (-MAX_AHEAD_SECONDS..=MAX_AGE_SECONDS).contains(&age)
                && secrets.iter().any(|secret| secret.hash(client_cookie, front, client) == hash);
            let is_active = active.hash(client_cookie, front, client) == hash;
            if is_valid && is_active && age < RENEWAL_AGE_SECONDS {
                return Some(CheckedCookie { reply: *sent, is_valid });
            }
        }
    }
    let mut front = [0; 8];
    front[..4].copy_from_slice(&VERSION);
    front[4..].copy_from_slice(&now_seconds.to_be_bytes());
    reply[8..16].copy_from_slice(&front);
    reply[16..].copy_from_slice(&active.hash(client_cookie, &front, client));
    Some(CheckedCookie { reply, is_valid })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect()
    }

    const SECRET: &str = "e5e973e5a6b2a43f48e7dc849e37bfcf";

    fn secret(text: &str) -> CookieSecret {
        CookieSecret::from_hex(text).unwrap()
    }

    /// Test vectors of RFC 9018 appendix A.
    #[test]
    fn matches_published_cookies() {
        let cases = [
            // A.1: a new client.
            (
                SECRET,
                "198.51.100.100",
                1_559_731_985,
                "2464c4abcf10c957",
                "010000005cf79f111f8130c3eee29480",
            ),
            // A.4: a client with an IPv6 address.
            (
                "445536bcd2513298075a5d379663c962",
                "2001:db8:220:1:59de:d0f4:8769:82b8",
                1_559_741_961,
                "22681ab97d52c298",
                "010000005cf7c609a6bb79d16625507a",
            ),
        ];
        for (key, client, now, client_cookie, server_cookie) in cases {
            let client = client.parse().unwrap();
            let checked = check(&[secret(key)], &bytes(client_cookie), client, now).unwrap();
            assert!(!checked.is_valid);
            assert_eq!(checked.reply[8..], bytes(server_cookie), "{client}");
            let again = check(&[secret(key)], &checked.reply, client, now + 10).unwrap();
            assert_eq!(again, CheckedCookie { reply: checked.reply, is_valid: true });
        }
    }

    #[test]
    fn rejects_cookies_of_others_and_old_ones() {
        let secrets = [secret(SECRET)];
        let client = "192.0.2.1".parse().unwrap();
        let now = 1_700_000_000;
        let good = check(&secrets, &[7; 8], client, now).unwrap().reply;
        let is_valid = |cookie: &[u8], client: &str, now| {
            check(&secrets, cookie, client.parse().unwrap(), now).unwrap().is_valid
        };
        assert!(is_valid(&good, "192.0.2.1", now));
        assert!(is_valid(&good, "::ffff:192.0.2.1", now + 3600));
        assert!(is_valid(&good, "192.0.2.1", now - 300));
        assert!(!is_valid(&good, "192.0.2.1", now + 3601));
        assert!(!is_valid(&good, "192.0.2.1", now - 301));
        assert!(!is_valid(&good, "192.0.2.2", now));
        for at in 0..COOKIE_BYTES {
            let mut changed = good;
            changed[at] ^= 1;
            assert!(!is_valid(&changed, "192.0.2.1", now), "byte {at}");
        }
        assert!(!is_valid(&good[..23], "192.0.2.1", now), "cut short");
        assert!(check(&[], &good, client, now).is_none());
    }

    #[test]
    fn renews_old_cookies_and_those_of_the_former_secret() {
        let (former, active) = (secret(SECRET), secret("445536bcd2513298075a5d379663c962"));
        let client = "2001:db8::1".parse().unwrap();
        let now = 1_700_000_000;
        let old = check(&[former], &[7; 8], client, now).unwrap().reply;
        let renewed = check(&[former], &old, client, now + 1800).unwrap();
        assert!(renewed.is_valid && renewed.reply != old);
        let moved = check(&[active, former], &old, client, now).unwrap();
        assert!(moved.is_valid && moved.reply != old);
        assert!(check(&[active], &moved.reply, client, now).unwrap().is_valid);
        assert!(!check(&[active], &old, client, now).unwrap().is_valid);
    }

    #[test]
    fn parses_secrets_of_32_digits_only() {
        for text in
            ["", "e5e9", "+5e973e5a6b2a43f48e7dc849e37bfcf", "g5e973e5a6b2a43f48e7dc849e37bfcf"]
        {
            assert_eq!(CookieSecret::from_hex(text), None, "{text}");
        }
    }
}
