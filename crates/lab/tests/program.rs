//! The program of the laboratory: the program that it measures, its errors, its end by a signal.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use support::{fails_with, is_root, laboratory, wait_until};

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

/// An experiment that SIGTERM ends leaves no namespace behind.
#[test]
fn lab_removes_its_namespaces_on_sigterm() {
    if !is_root("lab namespaces") {
        return;
    }
    let mut lab = Command::new(laboratory())
        .args(["echo-latency", "--seconds", "600"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let prefix = format!("tg-{}-", lab.id());
    let namespaces = || {
        let entries = fs::read_dir("/var/run/netns").into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name.starts_with(&prefix)).count()
    };
    wait_until("the experiment has its namespaces", || namespaces() > 0);
    let pid = rustix::process::Pid::from_child(&lab);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = lab.wait().unwrap();
    assert_eq!(status.code(), Some(143), "{status}");
    assert_eq!(namespaces(), 0);
}
