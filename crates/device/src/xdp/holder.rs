//! Process whose XDP program is attached to an interface, by a link that ends with the process.

use std::fs;
use std::path::{Path, PathBuf};

use crate::process::ProcessInfo;

/// Returns the holder of the interface with this index in the network namespace of the caller.
/// `None` if no process that the caller may examine has such a link.
pub(super) fn of_interface(index: u32) -> Option<ProcessInfo> {
    let processes = fs::read_dir("/proc").ok()?.filter_map(Result::ok);
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .find(|&pid| holds(pid, index))
        .map(ProcessInfo::of)
}

fn holds(pid: u32, index: u32) -> bool {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let links = fs::read_dir(folder.join("fdinfo")).into_iter().flatten().filter_map(Result::ok);
    let mut texts = links.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    texts.any(|text| is_link_to(&text, index)) && shares_network(&folder)
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
    fn finds_links_of_xdp_programs_by_interface() {
        let text = "pos:\t0\nflags:\t02000002\nmnt_id:\t16\nino:\t12\nlink_type:\txdp\n\
                    link_id:\t3\nprog_tag:\te5e8\nprog_id:\t9\nifindex:\t42\n";
        assert!(is_link_to(text, 42));
        assert!(!is_link_to(text, 4));
        assert!(!is_link_to(&text.replace("xdp", "tcx"), 42));
        assert!(!is_link_to("pos:\t0\nflags:\t02\n", 0));
    }
}
