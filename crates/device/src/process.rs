//! Processes by number and name, for errors that name one.

use std::fmt;
use std::fs;
use std::path::PathBuf;

/// A process of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Process number.
    pub pid: u32,
    /// Program that the process runs, with its subcommands.
    pub name: String,
}

impl fmt::Display for ProcessInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.as_str() {
            "" => write!(f, "process {}", self.pid),
            name => write!(f, "process {} ({name})", self.pid),
        }
    }
}

impl ProcessInfo {
    /// Looks up the name of a process. The name is empty if there is no such process.
    pub fn of(pid: u32) -> Self {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let read = |file| fs::read(folder.join(file)).unwrap_or_default();
        let comm = || printable(String::from_utf8_lossy(&read("comm")).trim_end());
        Self { pid, name: command_name(&read("cmdline")).unwrap_or_else(comm) }
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
}
