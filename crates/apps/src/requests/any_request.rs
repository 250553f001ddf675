//! The parts of any request that rules look at: a name or a path is below another exactly if its
//! labels or segments are, and no cookie is a session that was not signed here.

use super::matching::{is_below, is_in_domain};
use super::session::{Session, SessionSecret};

const SECRET: SessionSecret = SessionSecret::new([3; 16]);
const SESSION: Session = Session { id: 7, expires_s: 2 };

/// Runs one input: its first byte splits the rest into what the request has and what the rule has.
/// Returns whether the name, the path and the cookie of the request match.
pub fn check(input: &[u8]) -> [bool; 3] {
    let Some((&at, rest)) = input.split_first() else { return [false; 3] };
    let (of_request, of_rule) = rest.split_at(usize::from(at).min(rest.len()));
    let [name, domain] = [labels(of_request), labels(of_rule)];
    let is_name = is_in_domain(&wire(&name), &wire(&domain));
    let is_end = name.len() >= domain.len()
        && name
            .iter()
            .rev()
            .zip(domain.iter().rev())
            .all(|(one, other)| one.eq_ignore_ascii_case(other));
    assert_eq!(is_name, is_end, "{name:?} in {domain:?}");

    let is_path = is_below(of_request, of_rule);
    let segments = |path| <[u8]>::split(path, |&byte| byte == b'/').collect::<Vec<_>>();
    let (path, mut front) = (segments(of_request), segments(of_rule));
    // A slash at the end of the rule asks for it in the path, and for nothing behind it.
    let ends_open = front.last().is_some_and(|last| last.is_empty());
    front.truncate(front.len() - usize::from(ends_open));
    let is_front = path.starts_with(&front) && (!ends_open || path.len() > front.len());
    assert_eq!(is_path, is_front, "{of_request:?} below {of_rule:?}");

    let found = SECRET.find("s", [of_request, of_rule].into_iter(), 1);
    let is_signed = [of_request, of_rule].iter().any(|header| {
        let value = SECRET.sign(SESSION).into_bytes();
        header.windows(value.len()).any(|part| part.eq_ignore_ascii_case(&value))
    });
    assert!(found.is_none_or(|session| is_signed && session == SESSION));
    [is_name, is_path, found.is_some()]
}

/// Labels from any bytes, each with its length before it, as many as a name may have.
fn labels(mut bytes: &[u8]) -> Vec<&[u8]> {
    let (mut labels, mut len) = (Vec::new(), 1);
    while let Some((&first, rest)) = bytes.split_first() {
        let (label, rest) = rest.split_at(usize::from(first & 63).min(rest.len()));
        len += 1 + label.len();
        if label.is_empty() || len > 255 {
            break;
        }
        labels.push(label);
        bytes = rest;
    }
    labels
}

fn wire(labels: &[&[u8]]) -> Vec<u8> {
    let label = |label: &&[u8]| [&[label.len() as u8][..], label].concat();
    labels.iter().flat_map(label).chain([0]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn replays_request_rules_corpus() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/request_rules");
        let mut matched = [0; 3];
        for entry in std::fs::read_dir(folder).expect("the corpus is in the repository") {
            let matches = check(&std::fs::read(entry.unwrap().path()).unwrap());
            matched
                .iter_mut()
                .zip(matches)
                .for_each(|(count, is_match)| *count += i32::from(is_match));
        }
        assert!(
            matched.iter().all(|&count| count > 0),
            "the seeds have matches of each: {matched:?}"
        );
    }

    proptest! {
        #[test]
        fn rules_match_whole_labels_and_segments(
            of_request in prop::collection::vec(prop::sample::select(&b"\x01\x02/aA;s= "[..]), 0..24),
            of_rule in prop::collection::vec(prop::sample::select(&b"\x01\x02/aA"[..]), 0..8),
        ) {
            check(&[&[of_request.len() as u8][..], &of_request, &of_rule].concat());
        }
    }
}
