//! States of every format that is read, from golden files.
//!
//! `tests/golden/state-N-FAMILY` is written when format N is new, by `TIDEGATE_GOLDEN=write cargo
//! test -p tidegate-service golden`, and never again: daemons that write the format are in use. The
//! file with `.txt` has what this version reads in it, field by field; it is written anew when a
//! later format adds fields.

use std::path::PathBuf;

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{Config, Stack, TcpId, TcpState};
use tidegate_wire::MacAddr;

use super::{DaemonSnapshot, OLDEST_STATE_FORMAT, STATE_FORMAT, SnapshotError, UnreadableFormat};
use crate::ipc::version::{Library, ProtocolVersion};

const FAMILIES: [&str; 2] = ["v4", "v6"];

fn may_write() -> bool {
    std::env::var_os("TIDEGATE_GOLDEN").is_some_and(|value| value == "write")
}

fn path(format: u8, family: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    folder.join(format!("state-{format}-{family}"))
}

fn read(format: u8, family: &str) -> Vec<u8> {
    std::fs::read(path(format, family)).unwrap()
}

/// Fields of a snapshot, a line each; the numbers of a list are in one line.
fn fields(state: &DaemonSnapshot<'_>) -> String {
    let mut text = String::new();
    let mut is_in_numbers = false;
    for line in format!("{state:#?}").lines() {
        let field = line.trim_start();
        let is_number = field.trim_end_matches(',').parse::<u64>().is_ok();
        match is_number && is_in_numbers {
            true => text.push(' '),
            false => text.extend(["\n", &" ".repeat((line.len() - field.len()) / 4)]),
        }
        text.push_str(field);
        is_in_numbers = is_number;
    }
    text.trim_start().to_owned() + "\n"
}

#[test]
fn reads_every_field_of_every_format() {
    for (format, family) in formats() {
        let bytes = read(format, family);
        let found = fields(&DaemonSnapshot::decode(&bytes).unwrap());
        let path = path(format, family).with_extension("txt");
        if may_write() {
            std::fs::write(&path, &found).unwrap();
        }
        let expected = std::fs::read_to_string(&path).unwrap();
        for (number, (expected, found)) in expected.lines().zip(found.lines()).enumerate() {
            assert_eq!(
                expected,
                found,
                "format {format}, line {} of {}",
                number + 1,
                path.display()
            );
        }
        assert_eq!(expected.len(), found.len(), "format {format}");
    }
}

fn formats() -> impl Iterator<Item = (u8, &'static str)> {
    (OLDEST_STATE_FORMAT..=STATE_FORMAT).flat_map(|format| FAMILIES.map(|family| (format, family)))
}

#[test]
fn state_changes_only_with_a_new_format() {
    for family in FAMILIES {
        let oldest = read(OLDEST_STATE_FORMAT, family);
        let mut state = DaemonSnapshot::decode(&oldest).unwrap();
        for app in state.applications.iter_mut().flatten() {
            let release = "0.2.0".to_owned();
            app.identity.library = Library { protocol: ProtocolVersion::CURRENT, release };
        }
        let mut bytes = Vec::new();
        state.encode(&mut bytes).unwrap();
        assert!(state.to_format_8() == oldest, "format 8 has changed");
        let path = path(STATE_FORMAT, family);
        if may_write() && !path.exists() {
            std::fs::write(&path, &bytes).unwrap();
        }
        let is_same = std::fs::read(path).unwrap() == bytes;
        assert!(is_same, "state format {STATE_FORMAT} has changed: make a new format");
    }
}

/// The stack has connections that are established, half open, in TIME-WAIT and reset; four of them
/// have a handle.
#[test]
fn stack_of_every_format_goes_on() {
    use TcpState::{Closed, Established, SynSent};
    for (format, family) in formats() {
        let bytes = read(format, family);
        let state = DaemonSnapshot::decode(&bytes).unwrap();
        let arena = ArenaConfig { frames: 256, frame_size: FrameSize::K2, hugepages: false };
        let mut arena = Arena::new(arena).unwrap();
        let own = match family {
            "v4" => "192.0.2.2/24",
            _ => "2001:db8::2/64",
        };
        let config = Config::ethernet(MacAddr([2, 0, 0, 0, 0, 2]), [7; 16])
            .addresses(vec![own.parse().unwrap()]);
        let stack = Stack::restore(config, state.stack, 0, &mut arena).unwrap();
        let ids =
            (0..16_u64).flat_map(|index| (0..3).map(move |generation| generation << 32 | index));
        let infos = ids.filter_map(|bits| stack.tcp_info(TcpId::from_bits(bits)));
        let states: Vec<_> = infos.map(|info| info.state).collect();
        let expected = [Established, Established, Closed, SynSent];
        assert_eq!(states, expected, "format {format}, {family}");
        assert_eq!(stack.tcp_connections(), 7);
        assert_eq!(stack.counters().balance(), 0);
    }
}

#[test]
fn refuses_other_formats_by_number() {
    let bytes = read(STATE_FORMAT, "v4");
    let refusal = |format| {
        let mut other = bytes.clone();
        other[7] = format;
        DaemonSnapshot::decode(&other).unwrap_err()
    };
    let newer = STATE_FORMAT + 1;
    assert_eq!(refusal(newer), SnapshotError::Format(UnreadableFormat::TooNew(newer)));
    let older = OLDEST_STATE_FORMAT - 1;
    assert_eq!(refusal(older), SnapshotError::Format(UnreadableFormat::TooOld(older)));
    for (format, remedy) in [(newer, "newer version"), (older, "in between")] {
        let text = refusal(format).to_string();
        assert!(
            text.contains(&format!("state format {format},")) && text.contains(remedy),
            "{text}"
        );
    }
    // A number alone does not make an older state of this one.
    assert!(matches!(refusal(OLDEST_STATE_FORMAT), SnapshotError::Invalid(_)));
}
