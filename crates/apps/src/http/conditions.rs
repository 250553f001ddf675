//! Conditional requests and ranges (RFC 9110 sections 13 and 14).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::HeaderMap;
use hyper::header::{
    HeaderName, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, RANGE,
};

/// Which state of a file an answer shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Validators {
    /// A strong entity tag, with its quotes.
    pub(super) etag: String,
    /// In whole seconds, as the header has it.
    pub(super) modified: SystemTime,
}

/// What part of a file an answer shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Whole,
    /// From this byte to that one, both included.
    Range(u64, u64),
    /// The range begins behind the end.
    Unsatisfiable,
    /// The client has it already.
    NotModified,
    /// The client wants another state of the file.
    PreconditionFailed,
}

impl Validators {
    /// Of a file that was changed then (since the epoch) and is so long.
    pub(super) fn new(modified: Duration, len: u64) -> Self {
        Self {
            etag: format!("\"{:x}-{len:x}\"", modified.as_nanos()),
            modified: UNIX_EPOCH + Duration::from_secs(modified.as_secs()),
        }
    }

    /// What to answer to a GET or HEAD with these headers, in the order of RFC
    /// 9110 section 13.2.2.
    pub(super) fn judge(&self, headers: &HeaderMap, len: u64) -> Part {
        if headers.contains_key(IF_MATCH) {
            if !self.is_listed(headers, IF_MATCH, false) {
                return Part::PreconditionFailed;
            }
        } else if date(headers, IF_UNMODIFIED_SINCE).is_some_and(|date| self.modified > date) {
            return Part::PreconditionFailed;
        }
        if headers.contains_key(IF_NONE_MATCH) {
            if self.is_listed(headers, IF_NONE_MATCH, true) {
                return Part::NotModified;
            }
        } else if date(headers, IF_MODIFIED_SINCE).is_some_and(|date| self.modified <= date) {
            return Part::NotModified;
        }
        if !self.range_applies(headers) {
            return Part::Whole;
        }
        headers
            .get(RANGE)
            .and_then(|range| range.to_str().ok())
            .map_or(Part::Whole, |range| range_of(range, len))
    }

    /// Whether the header lists our tag; `weak` tags are as good as strong ones
    /// then (RFC 9110 section 8.8.3.2).
    fn is_listed(&self, headers: &HeaderMap, name: HeaderName, weak: bool) -> bool {
        let lists = headers.get_all(name).into_iter().filter_map(|list| list.to_str().ok());
        lists.flat_map(|list| list.split(',')).map(str::trim).any(|tag| {
            tag == "*" || tag == self.etag || weak && tag.strip_prefix("W/") == Some(&self.etag)
        })
    }

    /// RFC 9110 section 13.1.5.
    fn range_applies(&self, headers: &HeaderMap) -> bool {
        let Some(condition) = headers.get(IF_RANGE).map(|value| value.to_str().unwrap_or(""))
        else {
            return true;
        };
        let same_date = |date: SystemTime| date == self.modified;
        condition == self.etag || httpdate::parse_http_date(condition).is_ok_and(same_date)
    }
}

fn date(headers: &HeaderMap, name: HeaderName) -> Option<SystemTime> {
    httpdate::parse_http_date(headers.get(name)?.to_str().ok()?).ok()
}

/// One range of bytes; several, and what cannot be understood, are as if there
/// were none (RFC 9110 section 14.2).
fn range_of(text: &str, len: u64) -> Part {
    let spec = text.split_once('=').filter(|(unit, _)| unit.eq_ignore_ascii_case("bytes"));
    let Some((first, last)) = spec.and_then(|(_, spec)| spec.trim().split_once('-')) else {
        return Part::Whole;
    };
    let number = |text: &str| {
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| {
            // More digits than a number has are behind every end.
            text.parse().unwrap_or(u64::MAX)
        })
    };
    match (first.is_empty(), number(first), last.is_empty(), number(last)) {
        (true, _, false, Some(0)) => Part::Unsatisfiable,
        (true, _, false, Some(_)) if len == 0 => Part::Unsatisfiable,
        (true, _, false, Some(count)) => Part::Range(len.saturating_sub(count), len - 1),
        (false, Some(first), true, _) if first < len => Part::Range(first, len - 1),
        (false, Some(first), false, Some(last)) if first > last => Part::Whole,
        (false, Some(first), false, Some(last)) if first < len => {
            Part::Range(first, last.min(len - 1))
        }
        (false, Some(_), true, _) | (false, Some(_), false, Some(_)) => Part::Unsatisfiable,
        _ => Part::Whole,
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

    fn judge(headers: &[(HeaderName, &str)]) -> Part {
        let headers = headers.iter();
        let headers = headers.map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        file().judge(&headers, LEN)
    }

    #[test]
    fn ranges() {
        let cases = [
            ("bytes=0-0", Part::Range(0, 0)),
            ("bytes=10-19", Part::Range(10, 19)),
            ("Bytes=990-", Part::Range(990, 999)),
            ("bytes=-10", Part::Range(990, 999)),
            ("bytes=-5000", Part::Range(0, 999)),
            ("bytes=500-99999999999999999999999", Part::Range(500, 999)),
            ("bytes=1000-", Part::Unsatisfiable),
            ("bytes=99999999999999999999999-", Part::Unsatisfiable),
            ("bytes=-0", Part::Unsatisfiable),
            ("bytes=20-10", Part::Whole),
            ("bytes=0-1,5-6", Part::Whole),
            ("bytes=-", Part::Whole),
            ("bytes=+1-2", Part::Whole),
            ("bytes", Part::Whole),
            ("lines=0-1", Part::Whole),
        ];
        for (text, part) in cases {
            assert_eq!(judge(&[(RANGE, text)]), part, "{text}");
        }
        assert_eq!(range_of("bytes=0-", 0), Part::Unsatisfiable);
        assert_eq!(range_of("bytes=-1", 0), Part::Unsatisfiable);
    }

    #[test]
    fn conditions_in_their_order() {
        let etag = file().etag;
        let weak = format!("W/{etag}");
        let (before, same, after) = (
            "Tue, 14 Nov 2023 22:13:19 GMT",
            "Tue, 14 Nov 2023 22:13:20 GMT",
            "Tue, 14 Nov 2023 22:13:21 GMT",
        );
        assert_eq!(judge(&[(IF_NONE_MATCH, &etag)]), Part::NotModified);
        assert_eq!(judge(&[(IF_NONE_MATCH, &format!("\"x\", {weak}"))]), Part::NotModified);
        assert_eq!(judge(&[(IF_NONE_MATCH, "*")]), Part::NotModified);
        assert_eq!(judge(&[(IF_NONE_MATCH, "\"x\"")]), Part::Whole);
        assert_eq!(judge(&[(IF_MODIFIED_SINCE, before)]), Part::Whole);
        assert_eq!(judge(&[(IF_MODIFIED_SINCE, same)]), Part::NotModified);
        // The tag counts, not the date.
        assert_eq!(judge(&[(IF_NONE_MATCH, "\"x\""), (IF_MODIFIED_SINCE, same)]), Part::Whole);
        assert_eq!(judge(&[(IF_MATCH, "\"x\"")]), Part::PreconditionFailed);
        assert_eq!(judge(&[(IF_MATCH, &weak)]), Part::PreconditionFailed);
        assert_eq!(judge(&[(IF_MATCH, &etag), (IF_NONE_MATCH, &etag)]), Part::NotModified);
        assert_eq!(judge(&[(IF_UNMODIFIED_SINCE, before)]), Part::PreconditionFailed);
        assert_eq!(judge(&[(IF_UNMODIFIED_SINCE, after)]), Part::Whole);
        let range = (RANGE, "bytes=1-2");
        assert_eq!(judge(&[range.clone(), (IF_RANGE, &etag)]), Part::Range(1, 2));
        assert_eq!(judge(&[range.clone(), (IF_RANGE, same)]), Part::Range(1, 2));
        assert_eq!(judge(&[range.clone(), (IF_RANGE, &weak)]), Part::Whole);
        assert_eq!(judge(&[range, (IF_RANGE, before)]), Part::Whole);
        assert_eq!(judge(&[(IF_MODIFIED_SINCE, "yesterday")]), Part::Whole);
    }

    proptest! {
        #[test]
        fn a_range_is_inside_the_file(text in "bytes=[0-9]{0,22}-[0-9]{0,22}", len in 0_u64..2000) {
            if let Part::Range(first, last) = range_of(&text, len) {
                prop_assert!(first <= last && last < len);
            }
        }

        #[test]
        fn no_header_is_too_odd(bytes in prop::collection::vec(32_u8..=255, 0..60)) {
            let Ok(value) = HeaderValue::from_bytes(&bytes) else { return Ok(()) };
            for name in [RANGE, IF_RANGE, IF_MATCH, IF_NONE_MATCH, IF_MODIFIED_SINCE] {
                let headers = [(name, value.clone()), (RANGE, value.clone())];
                file().judge(&headers.into_iter().collect(), LEN);
            }
        }
    }
}
