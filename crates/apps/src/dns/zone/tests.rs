//! Zone files that make no zone, and what is said about them.

use super::super::zonefile;
use super::*;
use proptest::prelude::*;

const HEAD: &str = "$ORIGIN example.\n@ 3600 SOA ns1 host 1 2 3 4 5\n@ 3600 NS ns1\n";

fn load(text: &str) -> Result<(Zone, Vec<Warning>), DnsError> {
    load_as(text, None)
}

fn load_as(text: &str, origin: Option<&str>) -> Result<(Zone, Vec<Warning>), DnsError> {
    let path = Path::new("some.zone");
    let origin = origin.map(|text| Name::from_text(text).unwrap());
    let records = zonefile::scan(path, text.as_bytes(), origin.as_ref())?;
    let mut warnings = Vec::new();
    let zone = Zone::build(path, origin.as_ref(), records, &mut warnings)?;
    Ok((zone, warnings))
}

/// The message for a zone that begins as it should and goes on with `rest`.
fn problem(rest: &str) -> String {
    problem_of(&format!("{HEAD}{rest}"))
}

fn problem_of(text: &str) -> String {
    match load(text) {
        Ok(_) => panic!("{text} was taken"),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn assert_says(problem: &str, parts: &[&str]) {
    for part in parts {
        assert!(problem.contains(part), "`{problem}` does not say `{part}`");
    }
}

fn names(zone: &Zone) -> Vec<String> {
    zone.nodes.iter().map(|node| node.name.to_string()).collect()
}

#[test]
fn names_stand_in_tree_order_with_the_empty_ones_between() {
    let (zone, warnings) =
        load(&format!("{HEAD}ns1 3600 A 192.0.2.1\na.b.c 60 A 192.0.2.2\nx.c 60 A 192.0.2.3"))
            .unwrap();
    assert!(warnings.is_empty());
    let expected = [
        "example.",
        "c.example.",
        "b.c.example.",
        "a.b.c.example.",
        "x.c.example.",
        "ns1.example.",
    ];
    assert_eq!(names(&zone), expected);
    assert!(zone.nodes[1].sets.is_empty());
    assert!(zone.nodes.is_sorted_by(|a, b| a.key < b.key));
}

#[test]
fn the_origin_can_come_from_outside() {
    let text = "@ 60 SOA ns1 host 1 2 3 4 5\n 60 NS ns1\nwww 60 A 192.0.2.1";
    let (zone, _) = load_as(text, Some("Example.org")).unwrap();
    assert_eq!(names(&zone), ["Example.org.", "www.Example.org."]);
    assert_says(&problem_of(text), &["some.zone:1", "$ORIGIN"]);
}

#[test]
fn an_origin_that_is_not_the_soas_is_refused() {
    let error = load_as(&format!("{HEAD}www 60 A 192.0.2.1"), Some("example.org")).err().unwrap();
    assert_says(&error.to_string(), &["some.zone:2", "example.", "example.org."]);
}

#[test]
fn a_zone_has_one_soa_and_at_least_one_ns() {
    assert_says(&problem_of("$ORIGIN example.\nwww 60 A 192.0.2.1\n"), &["some.zone", "no SOA"]);
    assert_says(&problem_of(""), &["no SOA"]);
    assert_says(
        &problem("\n@ 60 SOA ns2 host 2 2 3 4 5\n"),
        &["some.zone:5", "second SOA", "line 2"],
    );
    assert_says(
        &problem_of("$ORIGIN example.\n@ 60 SOA ns1 host 1 2 3 4 5\nsub 60 NS ns1\n"),
        &["some.zone:2", "no NS"],
    );
}

#[test]
fn records_out_of_the_zone_are_refused() {
    assert_says(
        &problem("; comment\nwww.other. 60 A 192.0.2.1\n"),
        &["some.zone:5", "www.other.", "not in zone"],
    );
    // A label that ends like the zone is not in it.
    assert_says(&problem("www.myexample. 60 A 192.0.2.1\n"), &["not in zone"]);
}

#[test]
fn an_alias_stands_alone() {
    let said = problem("www 60 CNAME a\nwww 60 A 192.0.2.1\n");
    assert_says(&said, &["some.zone:5", "www.example.", "CNAME", "line 4"]);
    assert_says(&problem("www 60 CNAME a\nwww 60 CNAME b\n"), &["some.zone:5", "second CNAME"]);
    assert!(load(&format!("{HEAD}www 60 CNAME a\nWWW 60 CNAME a\n")).is_ok());
    assert_says(&problem("@ 60 CNAME a\n"), &["CNAME", "other data"]);
}

#[test]
fn renaming_and_delegating_do_not_mix() {
    assert_says(&problem("d 60 DNAME a\nd 60 DNAME b\n"), &["some.zone:5", "second DNAME"]);
    assert_says(&problem("d 60 DNAME a\nd 60 NS ns1\n"), &["some.zone:5", "DNAME and NS"]);
    assert_says(&problem("*.w 60 NS ns1\n"), &["some.zone:4", "wildcard"]);
    assert_says(&problem("*.w 60 DNAME a\n"), &["some.zone:4", "wildcard"]);
}

#[test]
fn ttls_of_a_set_are_made_the_same_with_a_warning() {
    let (zone, warnings) =
        load(&format!("{HEAD}www 60 A 192.0.2.1\nwww 30 A 192.0.2.2\nwww 90 AAAA ::1\n")).unwrap();
    assert_eq!(warnings.len(), 1);
    assert_says(&warnings[0].to_string(), &["some.zone:5", "60", "30"]);
    let node = zone.node(b"\x07example\x03www").unwrap();
    assert_eq!(node.set(rtype::A).unwrap().ttl, 30);
    assert_eq!(node.set(rtype::AAAA).unwrap().ttl, 90);
}

#[test]
fn a_record_that_stands_twice_is_taken_once() {
    let (zone, _) = load(&format!("{HEAD}www 60 A 192.0.2.1\nwWw 60 A 192.0.2.1\n")).unwrap();
    assert_eq!(zone.node(b"\x07example\x03www").unwrap().set(rtype::A).unwrap().data.len(), 1);
}

#[test]
fn syntax_errors_say_line_column_and_what_was_expected() {
    assert_says(&problem("\nwww 60 A 192.0.2\n"), &["some.zone:5:10: ", "IPv4", "`192.0.2`"]);
    assert_says(
        &problem("www 60 BOGUS x\n"),
        &["some.zone:4:", "expected", "record type", "BOGUS"],
    );
    assert_says(&problem("www 60 A\n"), &["some.zone:4:", "expected more fields"]);
    assert_says(
        &problem("www 60 A 192.0.2.1 extra\n"),
        &["some.zone:4:", "expected the end", "extra"],
    );
    assert_says(&problem("www 60 TXT (\"a\"\n"), &["some.zone:", "expected"]);
    assert_says(&problem("www 60 CH A 192.0.2.1\n"), &["some.zone:4:", "class IN"]);
    assert_says(&problem("$GENERATE 1-3 a A 192.0.2.1\n"), &["some.zone:4", "$GENERATE"]);
    assert_says(&problem("$INCLUDE other.zone\n"), &["some.zone:4", "$INCLUDE"]);
}

#[test]
fn names_and_labels_that_are_too_long_are_refused() {
    let label = "a".repeat(64);
    assert_says(&problem(&format!("{label} 60 A 192.0.2.1\n")), &["some.zone:4"]);
    let name = ["a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(60)].join(".");
    assert_says(&problem(&format!("{name} 60 A 192.0.2.1\n")), &["some.zone:4"]);
    assert_says(&problem(&format!("www 60 CNAME {name}\n")), &["some.zone:4"]);
}

#[test]
fn types_of_questions_cannot_be_stored() {
    for kind in ["TYPE255", "TYPE252", "TYPE41", "TYPE0", "TYPE250"] {
        assert_says(
            &problem(&format!("www 60 {kind} \\# 0\n")),
            &["some.zone:4", "cannot be stored"],
        );
    }
}

#[test]
fn lines_are_counted_through_comments_and_parentheses() {
    let text = "a 60 TXT (\n \"x\" ; in it\n \"y\"\n)\n\n; a comment\nb 60 A 192.0.2.1 ; behind\nwww.other. 60 A 192.0.2.1\n";
    assert_says(
        &problem(text),
        &["some.zone:11:", "www.other."].map(|part| part.trim_end_matches(':')),
    );
}

#[test]
fn a_file_may_end_without_a_line_feed() {
    let (zone, _) = load(&format!("{HEAD}www 60 A 192.0.2.1")).unwrap();
    assert!(zone.node(b"\x07example\x03www").is_some());
}

#[test]
fn times_may_have_units() {
    let text = "$ORIGIN example.\n$TTL 1h\n@ SOA ns1 host 1 2h 15m 2w 1d\n@ 2d IN NS ns1\nwww A 192.0.2.1\n";
    let (zone, _) = load(text).unwrap();
    assert_eq!(zone.soa().unwrap().ttl, 3600);
    assert_eq!(zone.soa().unwrap().data[0].last_chunk::<4>(), Some(&86_400_u32.to_be_bytes()));
    assert_eq!(zone.nodes[0].set(rtype::NS).unwrap().ttl, 172_800);
    assert_says(&problem("www 1h A 192.0.2\n"), &["some.zone:4:10: ", "`192.0.2`"]);
}

fn tokens() -> impl Strategy<Value = String> {
    let token = prop_oneof![
        Just("@"),
        Just("www"),
        Just("www."),
        Just("60"),
        Just("1h"),
        Just("IN"),
        Just("CH"),
        Just("A"),
        Just("TXT"),
        Just("NS"),
        Just("SOA"),
        Just("MX"),
        Just("TYPE1"),
        Just("\\#"),
        Just("192.0.2.1"),
        Just("\"quoted\""),
        Just("\""),
        Just("("),
        Just(")"),
        Just(";"),
        Just("\n"),
        Just("\n\t"),
        Just("$ORIGIN"),
        Just("$TTL"),
        Just("$INCLUDE"),
        Just("\\"),
        Just("\\300"),
        Just("\\."),
        Just("4"),
        Just("c0000201"),
        Just("é"),
        Just("..")
    ];
    proptest::collection::vec(token, 0..30).prop_map(|tokens| tokens.join(" "))
}

/// The scanner wants a byte in front of every name, and a quoted token may end
/// right where the next begins.
#[test]
fn a_token_may_follow_a_quotation_mark_at_once() {
    assert_says(&problem("$INCLUDE \" \"quoted\" \"\n"), &["expected the end of the record"]);
    assert_says(&problem("$INCLUDE \"a\"b\n"), &["$INCLUDE"]);
    let naptr = "n NAPTR 1 1 \"u\" \"E2U+sip\" \"!^.*$!x!\"replacement\n";
    for record in [naptr, "t TXT \"one\"\"two\"three\n"] {
        assert!(load(&format!("{HEAD}{record}")).is_ok(), "{record}");
    }
}

proptest! {
    #[test]
    fn no_text_makes_the_loader_panic(text in tokens()) {
        let _ = load(&text);
        let _ = load(&format!("{HEAD}{text}"));
    }

    #[test]
    fn no_bytes_make_the_loader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = zonefile::scan(Path::new("x"), &bytes, None);
    }
}
