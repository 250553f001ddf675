//! Filter expressions, compiled by libpcap through tcpdump.

use std::io::{ErrorKind, Write};
use std::process::{Command, Stdio};

use tidegate::capture::FilterInstruction;
use tidegate_wire::Medium;

use crate::Failure;

/// Compiles `expression` for frames of `medium` of at most `snap_bytes` bytes.
///
/// # Errors
/// When the expression is invalid, with the message of libpcap, or tcpdump is not installed.
pub(super) fn compile(expression: &str, medium: Medium) -> Result<Vec<FilterInstruction>, Failure> {
    // tcpdump takes the link type from a file, and needs no privilege for that.
    let mut child = Command::new("tcpdump")
        .args(["-r", "-", "-ddd", "--", expression])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                "a filter needs tcpdump, which compiles it: install tcpdump".into()
            }
            _ => format!("cannot start tcpdump to compile the filter: {error}"),
        })?;
    if let Some(mut stdin) = child.stdin.take() {
        // If tcpdump has ended already, its message says why.
        let _ = stdin.write_all(&empty_file(medium));
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        let message = message.lines().rfind(|line| !line.starts_with("reading from"));
        let message = message.unwrap_or("tcpdump refuses it").trim_start_matches("tcpdump: ");
        return Err(format!("filter '{expression}': {message}; see pcap-filter(7)").into());
    }
    parse(&String::from_utf8_lossy(&output.stdout))
        .ok_or_else(|| "cannot read the filter that tcpdump has compiled".into())
}

/// Capture file of this link type without packets.
fn empty_file(medium: Medium) -> Vec<u8> {
    let link_type: u32 = match medium {
        Medium::Ethernet => 1,
        Medium::Ip => 101,
    };
    let words: [u32; 6] = [0xa1b2_c3d4, 0x0004_0002, 0, 0, 262_144, link_type];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Reads what `tcpdump -ddd` prints: a count, then an instruction a line.
fn parse(text: &str) -> Option<Vec<FilterInstruction>> {
    let mut lines = text.lines();
    let count: usize = lines.next()?.trim().parse().ok()?;
    let instruction = |line: &str| {
        let mut numbers = line.split_whitespace().map(|word| word.parse::<u32>().ok());
        let mut next = || numbers.next().flatten();
        let (code, jt, jf, k) = (next()?, next()?, next()?, next()?);
        Some(FilterInstruction {
            code: code.try_into().ok()?,
            jt: jt.try_into().ok()?,
            jf: jf.try_into().ok()?,
            k,
        })
    };
    let program = lines.map(instruction).collect::<Option<Vec<_>>>()?;
    (program.len() == count).then_some(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_compiled_programs() {
        let program = parse("2\n40 0 0 12\n6 0 0 262144\n").unwrap();
        assert_eq!(program[1], FilterInstruction { code: 6, jt: 0, jf: 0, k: 262_144 });
        assert_eq!((parse("3\n6 0 0 0\n"), parse("1\n6 0 0\n")), (None, None));
    }
}
