//! Process whose XDP program is attached to an interface.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Process whose XDP program is attached to an interface, by a link that ends with the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramHolder {
    /// Process number.
    pub pid: u32,
    /// Program that the process runs, with its subcommands.
    pub name: String,
}

impl fmt::Display for ProgramHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

impl ProgramHolder {
    /// Returns the holder of the interface with this index in the network namespace of the caller.
    /// `None` if no process that the caller may examine has such a link.
    pub(super) fn of_interface(index: u32) -> Option<Self> {
        let processes = fs::read_dir("/proc").ok()?.filter_map(Result::ok);
        processes
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .find_map(|pid| Self::if_holds(pid, index))
    }

    fn if_holds(pid: u32, index: u32) -> Option<Self> {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let links = fs::read_dir(folder.join("fdinfo")).ok()?.filter_map(Result::ok);
        let mut texts = links.filter_map(|entry| fs::read_to_string(entry.path()).ok());
        let holds = texts.any(|text| is_link_to(&text, index)) && shares_network(&folder);
        holds.then(|| {
            let read = |file| fs::read(folder.join(file)).unwrap_or_default();
            let name = command_name(&read("cmdline"));
            let comm = || printable(String::from_utf8_lossy(&read("comm")).trim_end());
            Self { pid, name: name.unwrap_or_else(comm) }
        })
    }
}

/// Maximum number of characters and of words of a name.
const MAX_NAME_CHARS: usize = 64;
const MAX_NAME_WORDS: usize = 3;

/// Program and subcommands, up to the first option, of a command line as `/proc` has it.
fn command_name(cmdline: &[u8]) -> Option<String> {
    let words = cmdline.split(|&byte| byte == 0).map(String::from_utf8_lossy);
    let words: Vec<String> = words
        .take(MAX_NAME_WORDS)
        .enumerate()
        .take_while(|(at, word)| *at == 0 || !word.is_empty() && !word.starts_with('-'))
        .map(|(_, word)| word.rsplit('/').next().unwrap_or_default().to_owned())
        .collect();
    let name = printable(&words.join(" "));
    (!name.is_empty()).then_some(name)
}

/// Text of another process, without what a terminal would interpret.
fn printable(text: &str) -> String {
    text.chars().filter(|char| !char.is_control()).take(MAX_NAME_CHARS).collect()
}

/// True if a thread of the process is in the network namespace of the caller. Indices of interfaces
/// repeat in other namespaces.
fn shares_network(process: &Path) -> bool {
    let own = fs::read_link("/proc/thread-self/ns/net").ok();
    let threads = fs::read_dir(process.join("task")).into_iter().flatten().filter_map(Result::ok);
    let mut namespaces = threads.map(|thread| fs::read_link(thread.path().join("ns/net")).ok());
    own.is_some() && namespaces.any(|namespace| namespace == own)
}

/// True if the text of an `fdinfo` file (proc(5)) is that of a link of an XDP program to the
/// interface with this index.
fn is_link_to(text: &str, index: u32) -> bool {
    let has = |name, value: &str| {
        let mut fields = text.lines().filter_map(|line| line.split_once(':'));
        fields.any(|(key, found)| key == name && found.trim() == value)
    };
    has("link_type", "xdp") && has("ifindex", &index.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_the_program_with_its_subcommands() {
        let name = |text: &str| command_name(text.replace(' ', "\0").as_bytes());
        let is = |text: &str| Some(text.to_owned());
        assert_eq!(name("/usr/bin/tidegate serve dns --iface eth0"), is("tidegate serve dns"));
        assert_eq!(name("tidegate daemon -i eth0"), is("tidegate daemon"));
        assert_eq!(name("a\u{1b}[2Jb"), is("a[2Jb"), "no escape sequence");
        assert_eq!(name(""), None);
    }

    #[test]
    fn finds_links_of_xdp_programs_by_interface() {
        let text = "pos:\t0\nflags:\t02000002\nmnt_id:\t16\nino:\t12\nlink_type:\txdp\n\
                    link_id:\t3\nprog_tag:\te5e8\nprog_id:\t9\nifindex:\t42\n";
        assert!(is_link_to(text, 42));
        assert!(!is_link_to(text, 4));
        assert!(!is_link_to(&text.replace("xdp", "tcx"), 42));
        assert!(!is_link_to("pos:\t0\nflags:\t02\n", 0));
    }
}
