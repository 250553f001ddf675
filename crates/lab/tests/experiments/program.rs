//! The program of the laboratory: the program that it measures, its errors, its end by a signal.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::support::{can_run, fails_with, is_root, lab, laboratory, share_processors, wait_until};

/// A folder with the laboratory alone, as a link: the program finds its folder by its own path.
fn laboratory_alone() -> tempfile::TempDir {
    let target = laboratory().parent().unwrap();
    let folder = tempfile::tempdir_in(target).unwrap();
    fs::hard_link(laboratory(), folder.path().join("tidegate-lab")).unwrap();
    folder
}

/// Runs an experiment of the laboratory in `folder`, which has to fail; returns its error.
fn error_of_lab_in(folder: &Path) -> String {
    let mut command = Command::new(folder.join("tidegate-lab"));
    let output: Output = command.args(["mlfrr", "--quick"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !error.contains("panicked"), "{error}");
    error
}

#[test]
fn measures_only_the_program_beside_it() {
    if !is_root("program beside the laboratory") {
        return;
    }
    let folder = laboratory_alone();
    let program = folder.path().join("tidegate");
    let error = error_of_lab_in(folder.path());
    assert!(error.contains(&format!("{} is missing", program.display())), "{error}");
    assert!(error.contains("make build"), "{error}");

    let text = "#!/bin/sh\necho 'tidegate 0.1.0 (build 0000000000000000)'\n";
    fs::write(&program, text).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let error = error_of_lab_in(folder.path());
    assert!(error.contains("is of another build"), "{error}");
    assert!(error.contains("build 0000000000000000") && error.contains("make build"), "{error}");
}

#[test]
fn unknown_experiment_is_named() {
    fails_with(&["nothing"], &["nothing", "Usage"]);
}

#[test]
fn results_that_cannot_be_written_are_refused_before_the_experiment() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing/result.json");
    let missing = missing.to_str().unwrap();
    fails_with(&["sweep", "--quick", "--json", missing], &["--json", missing, "does not exist"]);
    fails_with(&["sweep", "--quick", "--svg", missing], &["--svg", missing, "does not exist"]);
    let name = folder.path().to_str().unwrap();
    fails_with(&["sweep", "--quick", "--json", name], &["--json", name, "is a folder"]);
    // Not even root writes there.
    let unwritable = "/proc/result.json";
    fails_with(&["sweep", "--quick", "--json", unwritable], &["--json", "/proc is not writable"]);
    // Nothing is left behind by the check.
    assert_eq!(names_in(folder.path()), [""; 0]);
}

/// Processes of a group with their command lines, without those that have ended.
fn processes_of_group(group: u32) -> Vec<String> {
    let is_member = |id: &u32| {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // State, parent and group follow the name in parentheses.
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        !matches!(fields.next(), None | Some("Z")) && fields.nth(1) == Some(&group.to_string())
    };
    let ids = fs::read_dir("/proc").unwrap().flatten();
    let ids = ids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_member);
    ids.map(|id| fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default()).collect()
}

/// Names in a folder, if it exists.
fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Runs an experiment until it has namespaces, files and other processes, ends it by `signal`, and
/// checks that nothing of it is left.
fn ends_without_a_trace(experiment: &[&str], signal: Signal) {
    let folder = tempfile::tempdir().unwrap();
    // Servers that give up root's rights read files of experiments.
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = Command::new(laboratory());
    command.args(experiment).env("TMPDIR", folder.path()).process_group(0);
    let _shared = share_processors();
    let mut lab = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let id = lab.id();
    let owned = |name: &String, prefix: &str| name.starts_with(&format!("{prefix}{id}-"));
    let netns = Path::new("/var/run/netns");
    let namespaces = || names_in(netns).iter().filter(|name| owned(name, "tg-")).count();
    let traces = || {
        let instances = names_in(Path::new("/sys/kernel/tracing/instances"));
        instances.iter().filter(|name| owned(name, "tidegate-")).count()
    };
    wait_until("the experiment has namespaces, files and processes", || {
        let runs = processes_of_group(id).iter().any(|line| line.contains("tidegate\0"));
        assert!(lab.try_wait().unwrap().is_none(), "the experiment has ended");
        runs && namespaces() > 0 && !names_in(folder.path()).is_empty()
    });
    kill_process(Pid::from_child(&lab), signal).unwrap();
    let status = lab.wait().unwrap();
    assert_eq!(status.code(), Some(128 + signal.as_raw()), "{experiment:?}: {status}");
    // A restorer ends by itself after its server.
    wait_until("all processes have ended", || processes_of_group(id).is_empty());
    assert_eq!((namespaces(), traces()), (0, 0), "{experiment:?}");
    assert_eq!(names_in(folder.path()), [""; 0], "{experiment:?}");
}

#[test]
fn sigint_and_sigterm_leave_nothing_behind() {
    if !is_root("the end of an experiment") {
        return;
    }
    for signal in [Signal::INT, Signal::TERM] {
        // Applications and a daemon that are killed and started all the time.
        ends_without_a_trace(&["chaos", "--kills", "1000000"], signal);
        // A server that is stopped, for which SIGTERM alone is too weak.
        ends_without_a_trace(&["hostile", "--part", "left-behind", "--trials", "1000000"], signal);
        ends_without_a_trace(&["dns", "--servers", "tidegate-xdp", "--no-verify"], signal);
    }
}

// In a process of its own: other tests in the same process change its resident memory, too.
#[test]
fn memory_does_not_grow_in_a_soak_test() {
    let result = lab(&["soak", "--seconds", "1", "--faults", "0.1"]);
    let growth_bytes = result["figures"]["growth_bytes"].as_f64().unwrap();
    assert!(growth_bytes < f64::from(16 << 20), "{result}");
}

#[test]
fn growth_lab_compares_many_with_few() {
    if !can_run("lab growth", &["valgrind"]) {
        return;
    }
    let few = ["--active-connections", "20", "--connections", "200", "--messages", "2000"];
    let small = ["--quick", "--seconds", "0.05", "--socket-count", "200", "--packets", "100"];
    let result = lab(&[&["growth"], &few[..], &small[..]].concat());
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 + 2 + 4, "two counts of each part, two families of lookups: {rows:?}");
    assert!(rows.iter().all(|row| row["value"].as_f64() > Some(0.0)), "{rows:?}");
    for figure in ["active_among_200", "programs_64_cpu_ratio", "lookup_growth"] {
        assert!(result["figures"][figure].as_f64() > Some(0.0), "{result}");
    }
    // Instructions do not depend on the machine.
    assert!(result["figures"]["lookup_growth"].as_f64() < Some(2.0), "{result}");
}
