//! Data of record types in presentation format, and errors in it.

use super::super::entries::Entries;
use super::*;

/// Encodes the data of a record; the origin is `example.`.
fn encode(record: &str) -> Result<String, FieldError> {
    let text = format!("w 60 IN {record}");
    let entry = Entries::new(text.as_bytes()).next().unwrap().unwrap();
    let generic = to_generic_form(&entry, || Name::from_text("example"))?;
    let generic = String::from_utf8(generic.expect("a type of this module")).unwrap();
    let front = format!("w 60 IN TYPE{} \\# ", find_format(entry.token(3)).unwrap().rtype);
    let (len, hex) = generic.strip_prefix(&front).unwrap().split_once(' ').unwrap();
    let hex = hex.trim_end();
    assert_eq!(hex.len(), 2 * len.parse::<usize>().unwrap());
    Ok(hex.to_owned())
}

/// Data that other tests do not compare with NSD's, worked out by hand.
#[test]
fn encodes_fields_as_the_rfcs_say() {
    let cases = [
        ("LOC 42 21 54 N 71 06 18 W -24m 30m", "0033161389172dd070be15f000988d20"),
        ("LOC 0 N 0 E 0", "00121613800000008000000000989680"),
        ("WKS 10.0.0.1 tcp telnet 25 ftp", "0a0000010600000540"),
        ("KX 10 host", "000a04686f7374076578616d706c6500"),
        ("KX 10 host.", "000a04686f737400"),
        ("RT 1 @", "0001076578616d706c6500"),
        ("ISDN \"150862028003217\" 004", "0f31353038363230323830303332313703303034"),
        ("NSAP 0x47.0005.80", "47000580"),
        ("NXT next A MX NXT", "046e657874076578616d706c650040010002"),
        ("APL 1:192.168.32.0/21 !1:192.168.38.0/28", "00011503c0a82000011c83c0a826"),
        ("APL", ""),
        ("CSYNC 66 3 A NS AAAA", "000000420003000460000008"),
        ("NID 10 0014:4fff:ff20:ee64", "000a00144fffff20ee64"),
        ("EUI48 00-00-5e-00-53-2a", "00005e00532a"),
        ("URI 10 1 \"ftp://a.example/b\"", "000a00016674703a2f2f612e6578616d706c652f62"),
        ("CERT PKIX 1 RSASHA256 AQID", "0001000108010203"),
        ("SPF \"v=spf1\" \"-all\"", "06763d73706631042d616c6c"),
        ("DLV 1 RSASHA1 2 01 02 03", "00010502010203"),
        (
            "SIG A 5 2 1h 20300101000000 20240229235959 7 example. AQID",
            "0001050200000e1070dbd88065e11a7f0007076578616d706c6500010203",
        ),
    ];
    for (record, expected) in cases {
        assert_eq!(encode(record).as_deref(), Ok(expected), "{record}");
    }
}

#[test]
fn names_the_token_at_fault() {
    let cases = [
        ("LOC 91 N 0 E 0", 4),
        ("LOC 90 0 1 N 0 E 0", 7),
        ("LOC 1 N 1", 7),
        ("LOC 1 N 1 E 1m 1m 1m 1m 1m", 12),
        ("KX 65536 host", 4),
        ("KX +1 host", 4),
        ("KX 1", 5),
        ("KX 1 host extra", 6),
        ("NID 1 1:2:3", 5),
        ("EUI64 00-00-5e-00-53-2a", 4),
        ("APL 1:192.0.2.0/33", 4),
        ("APL 2:192.0.2.0/3", 4),
        ("SPF", 4),
        ("URI 1 2 \"\"", 6),
        ("NXT next TYPE200", 5),
        ("CERT 1 2 NOSUCH AQID", 6),
        ("SMIMEA 1 2 3 0", 7),
        ("SIG A 5 2 60 20240230000000 20240101000000 7 example. AQID", 8),
        ("WKS 10.0.0.1 tcp nosuchservice", 6),
        ("NSAP 4700", 4),
    ];
    for (record, token) in cases {
        assert_eq!(encode(record).map_err(|error| error.token), Err(token), "{record}");
    }
}

#[test]
fn leaves_other_types_and_generic_data_alone() {
    for text in ["w 60 IN A 192.0.2.1", "w LOC \\# 0", "$ORIGIN LOC", "LOC 60 IN TXT x"] {
        let entry = Entries::new(text.as_bytes()).next().unwrap().unwrap();
        assert_eq!(to_generic_form(&entry, || None), Ok(None), "{text}");
    }
}

#[test]
fn accepts_the_generic_name_of_a_type_with_its_own_data() {
    assert_eq!(encode("TYPE108 00-00-5e-00-53-2a").as_deref(), Ok("00005e00532a"));
}
