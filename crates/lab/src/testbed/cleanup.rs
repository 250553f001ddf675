//! End of the laboratory by a signal, while an experiment runs.

use std::collections::HashSet;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{ending, folder, netns, sysctl, tracefs};

/// Time for the processes of an experiment to end by themselves, so that servers restore their
/// interfaces.
const GRACE: Duration = Duration::from_secs(3);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Name of restorer processes. They end by themselves, after the process for which they work.
const RESTORER: &str = "tg-restorer";

/// Ends all processes that this process has started, removes its namespaces, temporary folders and
/// trace instances, and restores settings of the machine. For a process that is about to end without dropping the owners; other
/// threads can create nothing any more.
pub fn remove_everything() {
    ending::stop_creating();
    end_processes();
    // Processes whose parents had ended before may be in the namespaces.
    while netns::remove_own() > 0 {}
    folder::remove_own();
    tracefs::remove_own();
    sysctl::restore();
}

/// Ends the descendants of this process: SIGTERM, and SIGKILL for those that take too long.
fn end_processes() {
    let began = Instant::now();
    let mut asked = HashSet::new();
    loop {
        let descendants = descendants(std::process::id());
        if descendants.is_empty() {
            return;
        }
        for &id in &descendants {
            let Some(pid) = i32::try_from(id).ok().and_then(Pid::from_raw) else { continue };
            // The process may have ended by itself.
            if began.elapsed() > GRACE {
                let _ = kill_process(pid, Signal::KILL);
            } else if asked.insert(id) {
                let _ = kill_process(pid, Signal::TERM);
                // A stopped process does not notice SIGTERM.
                let _ = kill_process(pid, Signal::CONT);
            }
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Ids of all living descendants of the process `ancestor`, without restorers.
fn descendants(ancestor: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parents: Vec<(u32, u32)> = ids
        .filter_map(|id| {
            let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
            parse_parent(&stat).map(|parent| (id, parent))
        })
        .collect();
    let mut found = vec![ancestor];
    let mut at = 0;
    while let Some(&parent) = found.get(at) {
        found.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(id, _)| *id));
        at += 1;
    }
    found.split_off(1)
}

/// Id of the parent from `/proc/PID/stat`; `None` for a restorer and for a process that has ended.
fn parse_parent(stat: &str) -> Option<u32> {
    // The name, in parentheses, may contain parentheses and spaces.
    let (head, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    let has_ended = matches!(fields.next()?, "Z" | "X");
    let is_restorer = head.ends_with(&format!("({RESTORER}"));
    fields.next()?.parse().ok().filter(|_| !has_ended && !is_restorer)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn finds_children_and_their_children() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 1000 & echo $!; wait"]).stdout(Stdio::piped());
        let mut child = shell.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let grandchild: u32 = line.trim().parse().unwrap();
        assert_eq!(descendants(child.id()), [grandchild]);
        let all = descendants(std::process::id());
        assert!(all.contains(&child.id()) && all.contains(&grandchild), "{all:?}");
        kill_process(Pid::from_raw(grandchild as i32).unwrap(), Signal::KILL).unwrap();
        child.wait().unwrap();
        assert_eq!(descendants(child.id()), [0; 0]);
    }

    #[test]
    fn leaves_out_restorers_and_ended_processes() {
        assert_eq!(parse_parent("7 (a) (b)) S 5 7 7 0"), Some(5));
        assert_eq!(parse_parent("7 (sh) Z 5 7 7 0"), None);
        assert_eq!(parse_parent("7 (tg-restorer) S 5 7 7 0"), None);
        assert_eq!(parse_parent(""), None);
    }
}
