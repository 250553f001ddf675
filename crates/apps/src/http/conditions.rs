//! Conditional requests and ranges (RFC 9110 sections 13 and 14).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::HeaderMap;
use hyper::header::{
    HeaderName, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, RANGE,
};

/// Validators of one version of a file (RFC 9110 section 8.8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Validators {
    /// Strong entity tag, with its quotes.
    pub(super) etag: String,
    /// Modification time in whole seconds, as in the `Last-Modified` header.
    pub(super) modified: SystemTime,
}

/// Outcome of the preconditions and the range of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConditionalOutcome {
    Full,
    /// First and last byte, both included.
    Range(u64, u64),
    /// The range begins past the end of the file.
    Unsatisfiable,
    /// The client's cached copy is current.
    NotModified,
    /// The client asked for another version of the file.
    PreconditionFailed,
}

impl Validators {
    /// Validators of a file modified `modified` after the epoch and `len` bytes long.
    pub(super) fn new(modified: Duration, len: u64) -> Self {
        Self {
            etag: format!("\"{:x}-{len:x}\"", modified.as_nanos()),
            modified: UNIX_EPOCH + Duration::from_secs(modified.as_secs()),
        }
    }

    /// Evaluates the preconditions of a GET or HEAD request in the order of RFC 9110 section
    /// 13.2.2, then its range.
    pub(super) fn evaluate(&self, headers: &HeaderMap, len: u64) -> ConditionalOutcome {
        if headers.contains_key(IF_MATCH) {
            if !self.lists_etag(headers, IF_MATCH, false) {
                return ConditionalOutcome::PreconditionFailed;
            }
        } else if date_header(headers, IF_UNMODIFIED_SINCE).is_some_and(|date| self.modified > date)
        {
            return ConditionalOutcome::PreconditionFailed;
        }
        if headers.contains_key(IF_NONE_MATCH) {
            if self.lists_etag(headers, IF_NONE_MATCH, true) {
                return ConditionalOutcome::NotModified;
            }
        } else if date_header(headers, IF_MODIFIED_SINCE).is_some_and(|date| self.modified <= date)
        {
            return ConditionalOutcome::NotModified;
        }
        if !self.range_applies(headers) {
            return ConditionalOutcome::Full;
        }
        headers
            .get(RANGE)
            .and_then(|range| range.to_str().ok())
            .map_or(ConditionalOutcome::Full, |range| parse_range(range, len))
    }

    /// True when the header lists this entity tag. With `weak_comparison` set, weak tags match
    /// strong tags (RFC 9110 section 8.8.3.2).
    fn lists_etag(&self, headers: &HeaderMap, name: HeaderName, weak_comparison: bool) -> bool {
        let lists = headers.get_all(name).into_iter().filter_map(|list| list.to_str().ok());
        lists.flat_map(|list| list.split(',')).map(str::trim).any(|tag| {
            tag == "*"
                || tag == self.etag
                || weak_comparison && tag.strip_prefix("W/") == Some(&self.etag)
        })
    }

    /// Evaluates `If-Range` (RFC 9110 section 13.1.5).
    fn range_applies(&self, headers: &HeaderMap) -> bool {
        let Some(condition) = headers.get(IF_RANGE).map(|value| value.to_str().unwrap_or(""))
        else {
            return true;
        };
        let same_date = |date: SystemTime| date == self.modified;
        condition == self.etag || httpdate::parse_http_date(condition).is_ok_and(same_date)
    }
}

fn date_header(headers: &HeaderMap, name: HeaderName) -> Option<SystemTime> {
    httpdate::parse_http_date(headers.get(name)?.to_str().ok()?).ok()
}

/// Parses a single byte range. Several ranges, and ranges that cannot be parsed, are ignored
/// (RFC 9110 section 14.2).
fn parse_range(text: &str, len: u64) -> ConditionalOutcome {
    let spec = text.split_once('=').filter(|(unit, _)| unit.eq_ignore_ascii_case("bytes"));
    let Some((first, last)) = spec.and_then(|(_, spec)| spec.trim().split_once('-')) else {
        return ConditionalOutcome::Full;
    };
    let number = |text: &str| {
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| {
            // A number too large for 64 bits lies past the end of every file.
            text.parse().unwrap_or(u64::MAX)
        })
    };
    match (first.is_empty(), number(first), last.is_empty(), number(last)) {
        (true, _, false, Some(0)) => ConditionalOutcome::Unsatisfiable,
        (true, _, false, Some(_)) if len == 0 => ConditionalOutcome::Unsatisfiable,
        (true, _, false, Some(count)) => {
            ConditionalOutcome::Range(len.saturating_sub(count), len - 1)
        }
        (false, Some(first), true, _) if first < len => ConditionalOutcome::Range(first, len - 1),
        (false, Some(first), false, Some(last)) if first > last => ConditionalOutcome::Full,
        (false, Some(first), false, Some(last)) if first < len => {
            ConditionalOutcome::Range(first, last.min(len - 1))
        }
        (false, Some(_), true, _) | (false, Some(_), false, Some(_)) => {
            ConditionalOutcome::Unsatisfiable
        }
        _ => ConditionalOutcome::Full,
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    const LEN: u64 = 1000;

    fn file() -> Validators {
        Validators::new(Duration::new(1_700_000_000, 5), LEN)
    }

    fn evaluate(headers: &[(HeaderName, &str)]) -> ConditionalOutcome {
        let headers = headers.iter();
        let headers = headers.map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        file().evaluate(&headers, LEN)
    }

    #[test]
    fn parses_byte_ranges() {
        let cases = [
            ("bytes=0-0", ConditionalOutcome::Range(0, 0)),
            ("bytes=10-19", ConditionalOutcome::Range(10, 19)),
            ("Bytes=990-", ConditionalOutcome::Range(990, 999)),
            ("bytes=-10", ConditionalOutcome::Range(990, 999)),
            ("bytes=-5000", ConditionalOutcome::Range(0, 999)),
            ("bytes=500-99999999999999999999999", ConditionalOutcome::Range(500, 999)),
            ("bytes=1000-", ConditionalOutcome::Unsatisfiable),
            ("bytes=99999999999999999999999-", ConditionalOutcome::Unsatisfiable),
            ("bytes=-0", ConditionalOutcome::Unsatisfiable),
            ("bytes=20-10", ConditionalOutcome::Full),
            ("bytes=0-1,5-6", ConditionalOutcome::Full),
            ("bytes=-", ConditionalOutcome::Full),
            ("bytes=+1-2", ConditionalOutcome::Full),
            ("bytes", ConditionalOutcome::Full),
            ("lines=0-1", ConditionalOutcome::Full),
        ];
        for (text, outcome) in cases {
            assert_eq!(evaluate(&[(RANGE, text)]), outcome, "{text}");
        }
        assert_eq!(parse_range("bytes=0-", 0), ConditionalOutcome::Unsatisfiable);
        assert_eq!(parse_range("bytes=-1", 0), ConditionalOutcome::Unsatisfiable);
    }

    #[test]
    fn evaluates_preconditions_in_rfc_order() {
        let etag = file().etag;
        let weak = format!("W/{etag}");
        let (before, same, after) = (
            "Tue, 14 Nov 2023 22:13:19 GMT",
            "Tue, 14 Nov 2023 22:13:20 GMT",
            "Tue, 14 Nov 2023 22:13:21 GMT",
        );
        assert_eq!(evaluate(&[(IF_NONE_MATCH, &etag)]), ConditionalOutcome::NotModified);
        assert_eq!(
            evaluate(&[(IF_NONE_MATCH, &format!("\"x\", {weak}"))]),
            ConditionalOutcome::NotModified
        );
        assert_eq!(evaluate(&[(IF_NONE_MATCH, "*")]), ConditionalOutcome::NotModified);
        assert_eq!(evaluate(&[(IF_NONE_MATCH, "\"x\"")]), ConditionalOutcome::Full);
        assert_eq!(evaluate(&[(IF_MODIFIED_SINCE, before)]), ConditionalOutcome::Full);
        assert_eq!(evaluate(&[(IF_MODIFIED_SINCE, same)]), ConditionalOutcome::NotModified);
        // The entity tag takes precedence over the date.
        assert_eq!(
            evaluate(&[(IF_NONE_MATCH, "\"x\""), (IF_MODIFIED_SINCE, same)]),
            ConditionalOutcome::Full
        );
        assert_eq!(evaluate(&[(IF_MATCH, "\"x\"")]), ConditionalOutcome::PreconditionFailed);
        assert_eq!(evaluate(&[(IF_MATCH, &weak)]), ConditionalOutcome::PreconditionFailed);
        assert_eq!(
            evaluate(&[(IF_MATCH, &etag), (IF_NONE_MATCH, &etag)]),
            ConditionalOutcome::NotModified
        );
        assert_eq!(
            evaluate(&[(IF_UNMODIFIED_SINCE, before)]),
            ConditionalOutcome::PreconditionFailed
        );
        assert_eq!(evaluate(&[(IF_UNMODIFIED_SINCE, after)]), ConditionalOutcome::Full);
        let range = (RANGE, "bytes=1-2");
        assert_eq!(evaluate(&[range.clone(), (IF_RANGE, &etag)]), ConditionalOutcome::Range(1, 2));
        assert_eq!(evaluate(&[range.clone(), (IF_RANGE, same)]), ConditionalOutcome::Range(1, 2));
        assert_eq!(evaluate(&[range.clone(), (IF_RANGE, &weak)]), ConditionalOutcome::Full);
        assert_eq!(evaluate(&[range, (IF_RANGE, before)]), ConditionalOutcome::Full);
        assert_eq!(evaluate(&[(IF_MODIFIED_SINCE, "yesterday")]), ConditionalOutcome::Full);
    }

    proptest! {
        #[test]
        fn range_stays_inside_the_file(text in "bytes=[0-9]{0,22}-[0-9]{0,22}", len in 0_u64..2000) {
            if let ConditionalOutcome::Range(first, last) = parse_range(&text, len) {
                prop_assert!(first <= last && last < len);
            }
        }

        #[test]
        fn accepts_arbitrary_header_bytes(bytes in prop::collection::vec(32_u8..=255, 0..60)) {
            let Ok(value) = HeaderValue::from_bytes(&bytes) else { return Ok(()) };
            for name in [RANGE, IF_RANGE, IF_MATCH, IF_NONE_MATCH, IF_MODIFIED_SINCE] {
                let headers = [(name, value.clone()), (RANGE, value.clone())];
                file().evaluate(&headers.into_iter().collect(), LEN);
            }
        }
    }
}
