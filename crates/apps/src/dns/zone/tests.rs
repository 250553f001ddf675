//! Tests of zone checks: invalid zone files and their error messages.

use super::super::zonefile;
use super::*;
use proptest::prelude::*;

const ZONE_HEADER: &str = "$ORIGIN example.\n@ 3600 SOA ns1 host 1 2 3 4 5\n@ 3600 NS ns1\n";

fn load(text: &str) -> Result<(Zone, Vec<Warning>), DnsError> {
    load_as(text, None)
}

fn load_as(text: &str, origin: Option<&str>) -> Result<(Zone, Vec<Warning>), DnsError> {
    let path = Path::new("some.zone");
    let origin = origin.map(|text| Name::from_text(text).unwrap());
    let records = zonefile::scan_records(path, text.as_bytes(), origin.as_ref())?;
    let mut warnings = Vec::new();
    let zone = Zone::build(path, origin.as_ref(), records, &mut warnings)?;
    Ok((zone, warnings))
}

/// Returns the error of a zone with a valid start followed by `rest`.
fn problem(rest: &str) -> String {
    problem_of(&format!("{ZONE_HEADER}{rest}"))
}

fn problem_of(text: &str) -> String {
    match load(text) {
        Ok(_) => panic!("{text} was accepted"),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn assert_contains(problem: &str, parts: &[&str]) {
    for part in parts {
        assert!(problem.contains(part), "`{problem}` does not contain `{part}`");
    }
}

fn names(zone: &Zone) -> Vec<String> {
    zone.nodes.iter().map(|node| node.name.to_string()).collect()
}

#[test]
fn sorts_names_in_tree_order_with_empty_non_terminals() {
    let (zone, warnings) = load(&format!(
        "{ZONE_HEADER}ns1 3600 A 192.0.2.1\na.b.c 60 A 192.0.2.2\nx.c 60 A 192.0.2.3"
    ))
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
fn accepts_origin_from_the_configuration() {
    let text = "@ 60 SOA ns1 host 1 2 3 4 5\n 60 NS ns1\nwww 60 A 192.0.2.1";
    let (zone, _) = load_as(text, Some("Example.org")).unwrap();
    assert_eq!(names(&zone), ["Example.org.", "www.Example.org."]);
    assert_contains(&problem_of(text), &["some.zone:1", "$ORIGIN"]);
}

#[test]
fn rejects_origin_that_differs_from_the_soa_owner() {
    let error =
        load_as(&format!("{ZONE_HEADER}www 60 A 192.0.2.1"), Some("example.org")).err().unwrap();
    assert_contains(&error.to_string(), &["some.zone:2", "example.", "example.org."]);
}

#[test]
fn requires_one_soa_and_an_ns_record() {
    assert_contains(
        &problem_of("$ORIGIN example.\nwww 60 A 192.0.2.1\n"),
        &["some.zone", "no SOA"],
    );
    assert_contains(&problem_of(""), &["no SOA"]);
    assert_contains(
        &problem("\n@ 60 SOA ns2 host 2 2 3 4 5\n"),
        &["some.zone:5", "second SOA", "line 2"],
    );
    assert_contains(
        &problem_of("$ORIGIN example.\n@ 60 SOA ns1 host 1 2 3 4 5\nsub 60 NS ns1\n"),
        &["some.zone:2", "no NS"],
    );
}

#[test]
fn rejects_records_outside_the_zone() {
    assert_contains(
        &problem("; comment\nwww.other. 60 A 192.0.2.1\n"),
        &["some.zone:5", "www.other.", "not in zone"],
    );
    // A label that ends like the zone's name is outside the zone.
    assert_contains(&problem("www.myexample. 60 A 192.0.2.1\n"), &["not in zone"]);
}

#[test]
fn rejects_cname_beside_other_data() {
    let message = problem("www 60 CNAME a\nwww 60 A 192.0.2.1\n");
    assert_contains(&message, &["some.zone:5", "www.example.", "CNAME", "line 4"]);
    assert_contains(&problem("www 60 CNAME a\nwww 60 CNAME b\n"), &["some.zone:5", "second CNAME"]);
    assert!(load(&format!("{ZONE_HEADER}www 60 CNAME a\nWWW 60 CNAME a\n")).is_ok());
    assert_contains(&problem("@ 60 CNAME a\n"), &["CNAME", "other data"]);
}

#[test]
fn rejects_conflicting_dname_ns_and_wildcard_records() {
    assert_contains(&problem("d 60 DNAME a\nd 60 DNAME b\n"), &["some.zone:5", "second DNAME"]);
    assert_contains(&problem("d 60 DNAME a\nd 60 NS ns1\n"), &["some.zone:5", "DNAME and NS"]);
    assert_contains(&problem("*.w 60 NS ns1\n"), &["some.zone:4", "wildcard"]);
    assert_contains(&problem("*.w 60 DNAME a\n"), &["some.zone:4", "wildcard"]);
}

#[test]
fn equalizes_ttls_of_a_set_with_a_warning() {
    let (zone, warnings) =
        load(&format!("{ZONE_HEADER}www 60 A 192.0.2.1\nwww 30 A 192.0.2.2\nwww 90 AAAA ::1\n"))
            .unwrap();
    assert_eq!(warnings.len(), 1);
    assert_contains(&warnings[0].to_string(), &["some.zone:5", "60", "30"]);
    let node = zone.node(b"\x07example\x03www").unwrap();
    assert_eq!(node.set(rtype::A).unwrap().ttl, 30);
    assert_eq!(node.set(rtype::AAAA).unwrap().ttl, 90);
}

#[test]
fn drops_duplicate_records() {
    let (zone, _) =
        load(&format!("{ZONE_HEADER}www 60 A 192.0.2.1\nwWw 60 A 192.0.2.1\n")).unwrap();
    assert_eq!(zone.node(b"\x07example\x03www").unwrap().set(rtype::A).unwrap().data.len(), 1);
}

#[test]
fn syntax_errors_name_line_column_and_expected_token() {
    assert_contains(&problem("\nwww 60 A 192.0.2\n"), &["some.zone:5:10: ", "IPv4", "`192.0.2`"]);
    assert_contains(
        &problem("www 60 BOGUS x\n"),
        &["some.zone:4:", "expected", "record type", "BOGUS"],
    );
    assert_contains(&problem("www 60 A\n"), &["some.zone:4:", "expected more fields"]);
    assert_contains(
        &problem("www 60 A 192.0.2.1 extra\n"),
        &["some.zone:4:", "expected the end", "extra"],
    );
    assert_contains(&problem("www 60 TXT (\"a\"\n"), &["some.zone:", "expected"]);
    assert_contains(&problem("www 60 CH A 192.0.2.1\n"), &["some.zone:4:", "class IN"]);
    assert_contains(&problem("$GENERATE 1-3 a A 192.0.2.1\n"), &["some.zone:4", "$GENERATE"]);
    assert_contains(&problem("$INCLUDE no-such.zone\n"), &["some.zone:4:10", "no-such.zone"]);
}

#[test]
fn rejects_overlong_names_and_labels() {
    let label = "a".repeat(64);
    assert_contains(&problem(&format!("{label} 60 A 192.0.2.1\n")), &["some.zone:4"]);
    let name = ["a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(60)].join(".");
    assert_contains(&problem(&format!("{name} 60 A 192.0.2.1\n")), &["some.zone:4"]);
    assert_contains(&problem(&format!("www 60 CNAME {name}\n")), &["some.zone:4"]);
}

#[test]
fn rejects_meta_types() {
    for kind in ["TYPE255", "TYPE252", "TYPE41", "TYPE0", "TYPE250"] {
        assert_contains(
            &problem(&format!("www 60 {kind} \\# 0\n")),
            &["some.zone:4", "cannot be stored"],
        );
    }
}

#[test]
fn counts_lines_through_comments_and_parentheses() {
    let text = "a 60 TXT (\n \"x\" ; in it\n \"y\"\n)\n\n; a comment\nb 60 A 192.0.2.1 ; behind\nwww.other. 60 A 192.0.2.1\n";
    assert_contains(
        &problem(text),
        &["some.zone:11:", "www.other."].map(|part| part.trim_end_matches(':')),
    );
}

#[test]
fn accepts_file_without_final_line_feed() {
    let (zone, _) = load(&format!("{ZONE_HEADER}www 60 A 192.0.2.1")).unwrap();
    assert!(zone.node(b"\x07example\x03www").is_some());
}

#[test]
fn accepts_times_with_units() {
    let text = "$ORIGIN example.\n$TTL 1h\n@ SOA ns1 host 1 2h 15m 2w 1d\n@ 2d IN NS ns1\nwww A 192.0.2.1\n";
    let (zone, _) = load(text).unwrap();
    assert_eq!(zone.soa().unwrap().ttl, 3600);
    assert_eq!(zone.soa().unwrap().data[0].last_chunk::<4>(), Some(&86_400_u32.to_be_bytes()));
    assert_eq!(zone.nodes[0].set(rtype::NS).unwrap().ttl, 172_800);
    assert_contains(&problem("www 1h A 192.0.2\n"), &["some.zone:4:10: ", "`192.0.2`"]);
}

#[test]
fn rejects_records_below_a_dname() {
    let message = problem("d 60 DNAME other.\nx.d 60 A 192.0.2.1\n");
    assert_contains(&message, &["some.zone:5", "x.d.example.", "DNAME", "line 4"]);
    assert_contains(&problem("x.y.d 60 A 192.0.2.1\nd 60 DNAME o.\n"), &["some.zone:4", "line 5"]);
    assert_contains(&problem("@ 60 DNAME other.\nwww 60 A 192.0.2.1\n"), &["some.zone:5"]);
    // Data beside the record, and names that only look alike.
    let rest = "d 60 DNAME other.\nd 60 TXT x\nxd 60 A 192.0.2.1\ne 60 A 192.0.2.1\n";
    assert!(load(&format!("{ZONE_HEADER}{rest}")).is_ok());
}

/// Loads a zone from files in a folder; the first is the zone file.
fn load_files(files: &[(&str, &str)]) -> Result<(Zone, tempfile::TempDir), String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let zone = Zone::load(&folder.path().join(files[0].0), None, &mut Vec::new());
    zone.map(|zone| (zone, folder)).map_err(|error| error.to_string())
}

#[test]
fn includes_files_relative_to_the_including_file() {
    let main = format!(
        "{ZONE_HEADER}$TTL 77\n$INCLUDE parts/one.zone sub\n$INCLUDE \"parts/t\\119o.zone\"\nlast A 192.0.2.9\n"
    );
    let one = "$TTL 5\na A 192.0.2.1\n$ORIGIN other.example.\nb A 192.0.2.2\n$INCLUDE deeper/three.zone\n";
    let files = [
        ("main.zone", main.as_str()),
        ("parts/one.zone", one),
        ("parts/two.zone", "c A 192.0.2.3\n"),
        ("parts/deeper/three.zone", "d A 192.0.2.4"),
    ];
    let (zone, _folder) = load_files(&files).unwrap();
    let expected = [
        "example.",
        "c.example.",
        "sub.example.",
        "a.sub.example.",
        "last.example.",
        "other.example.",
        "b.other.example.",
        "d.other.example.",
    ];
    assert_eq!(names(&zone), expected);
    let ttl = |key: &[u8]| zone.node(key).unwrap().set(rtype::A).unwrap().ttl;
    assert_eq!(ttl(b"\x07example\x01c"), 77, "taken over");
    assert_eq!(ttl(b"\x07example\x05other\x01d"), 5);
    assert_eq!(ttl(b"\x07example\x04last"), 77, "the included $TTL ends with its file");
}

#[test]
fn errors_in_included_files_name_that_file() {
    let main = format!("{ZONE_HEADER}$INCLUDE part\n");
    let fails = |part: &str| load_files(&[("main.zone", &main), ("part", part)]).err().unwrap();
    assert_contains(&fails("\na 60 A 192.0.2\n"), &["/part:2:8: "]);
    assert_contains(&fails("a 60 KX 1\n"), &["/part:1:", "a domain name"]);
    assert_contains(&fails(" 60 A 192.0.2.1\n"), &["/part:1:", "owner name"]);
    assert_contains(&fails("a.other. 60 A 192.0.2.1\n"), &["/part:1:", "not in zone"]);
    assert_contains(&fails("@ 60 SOA a a 1 2 3 4 5\n"), &["/part:1:", "second SOA", "main.zone:2"]);
    // A file that includes itself, once and twice.
    for part in ["$INCLUDE part\n", "$INCLUDE part\n$INCLUDE part\n"] {
        assert_contains(&fails(part), &["/part:1:1", "include itself", "8 levels"]);
    }
}

#[test]
fn includes_no_file_outside_the_folder_of_the_zone() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    std::fs::write(&secret, "root:hash\n").unwrap();
    let fails = |path: &str| {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(&secret, folder.path().join("link")).unwrap();
        let zone = folder.path().join("main.zone");
        std::fs::write(&zone, format!("{ZONE_HEADER}$INCLUDE {path}\n")).unwrap();
        Zone::load(&zone, None, &mut Vec::new()).err().unwrap().to_string()
    };
    for path in [secret.to_str().unwrap(), "link", "../main.zone/../../etc/passwd", "/dev/zero"] {
        let message = fails(path);
        assert_contains(&message, &["main.zone:4:10: cannot include"]);
        assert!(!message.contains("hash"), "{message}");
    }
    assert_contains(&fails("link"), &["outside", "move it there"]);
    assert_contains(&fails("."), &["regular file"]);
    assert_contains(&fails(""), &["the name of a file"]);
    assert_contains(&fails("\"a\\000b\""), &["the name of a file"]);
    assert_contains(&fails("a b c"), &["the end of the $INCLUDE directive"]);
}

#[test]
fn accepts_generic_types_classes_and_data() {
    let text = "a 60 CLASS1 TYPE1 192.0.2.1\nb CLASS1 60 TYPE1 \\# 4 c0000202\nc 60 TYPE29 0 N 0 E 0\nd 1h LOC \\# 16 00121613 80000000 80000000 00989680\n";
    let (zone, _) = load(&format!("{ZONE_HEADER}{text}")).unwrap();
    let data = |key: &[u8], rtype| zone.node(key).unwrap().set(rtype).unwrap().data[0].clone();
    assert_eq!(*data(b"\x07example\x01a", rtype::A), [192, 0, 2, 1]);
    assert_eq!(*data(b"\x07example\x01b", rtype::A), [192, 0, 2, 2]);
    assert_eq!(data(b"\x07example\x01c", 29), data(b"\x07example\x01d", 29));
    assert_contains(&problem("a 60 CLASS3 A 192.0.2.1\n"), &["some.zone:4:", "class IN"]);
    assert_contains(&problem("a 60 TYPE1 \\# 5 c0000202\n"), &["some.zone:4"]);
}

fn random_tokens() -> impl Strategy<Value = String> {
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
        Just("LOC"),
        Just("APL"),
        Just("SIG"),
        Just("CLASS1"),
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

/// The scanner needs a byte before every name, but a quoted token may end directly before the
/// next token.
#[test]
fn accepts_token_right_after_quotation_mark() {
    assert_contains(&problem("$INCLUDE \" \"quoted\" \"\n"), &["expected the end of the $INCLUDE"]);
    assert_contains(&problem("$INCLUDE \"a\"b\n"), &["cannot include a:"]);
    let naptr = "n NAPTR 1 1 \"u\" \"E2U+sip\" \"!^.*$!x!\"replacement\n";
    for record in [naptr, "t TXT \"one\"\"two\"three\n"] {
        assert!(load(&format!("{ZONE_HEADER}{record}")).is_ok(), "{record}");
    }
}

proptest! {
    #[test]
    fn loads_any_tokens_without_panic(text in random_tokens()) {
        let _ = load(&text);
        let _ = load(&format!("{ZONE_HEADER}{text}"));
    }

    #[test]
    fn scans_any_bytes_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = zonefile::scan_records(Path::new("x"), &bytes, None);
    }
}
