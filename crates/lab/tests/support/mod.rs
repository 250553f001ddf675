//! The laboratory under test: its commands, their results, and the reasons for which a test
//! cannot run.

// Each test binary uses a part of this module.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

/// True if the test can run as root; prints a notice if it is skipped.
pub fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped {test}: network namespaces need root");
    }
    root
}

/// True if all these programs are installed; prints the missing one if not.
pub fn has_programs(test: &str, programs: &[&str]) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let missing = programs
        .iter()
        .find(|program| !path.split(':').any(|folder| Path::new(folder).join(program).exists()));
    if let Some(program) = missing {
        eprintln!("skipped {test}: {program} is not installed");
    }
    missing.is_none()
}

/// True if a test can run that needs network namespaces and these programs.
pub fn can_run(test: &str, programs: &[&str]) -> bool {
    is_root(test) && has_programs(test, programs)
}

/// Waits until the condition holds. Panics after one minute.
pub fn wait_until(state: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(60), "timed out waiting until: {state}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Path of the laboratory's program. The program under test and the preload library, of the same
/// build, lie beside it.
pub fn laboratory() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let program = Path::new(env!("CARGO_BIN_EXE_tidegate-lab"));
        let folder = program.parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--locked", "--quiet", "-p", "tidegate-preload"]);
        // A test of the whole workspace has built it, with other features of what it depends on.
        if !is_same_build(&folder.join("tidegate")) {
            build.args(["-p", "tidegate-cli"]);
            if cfg!(feature = "dpdk") {
                build.args(["--features", "tidegate-cli/dpdk"]);
            }
        }
        if folder.ends_with("release") {
            build.arg("--release");
        }
        let build = build.arg("--target-dir").arg(folder.parent().unwrap());
        let built = build.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
        assert!(built.success(), "building the program under test failed");
        program.to_owned()
    })
}

fn is_same_build(program: &Path) -> bool {
    let output = Command::new(program).arg("--version").output();
    let expected = format!("tidegate {}\n", tidegate_program::VERSION);
    output.is_ok_and(|output| output.stdout == expected.as_bytes())
}

/// Runs the laboratory to completion.
pub fn run(arguments: &[&str]) -> Output {
    Command::new(laboratory()).args(arguments).output().unwrap()
}

/// Runs an experiment and returns its JSON result.
pub fn lab(arguments: &[&str]) -> Value {
    let output = run(&[arguments, &["--json", "-"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs the laboratory, which has to fail, and checks that its error contains all `parts`.
pub fn fails_with(arguments: &[&str], parts: &[&str]) {
    let output = run(arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "the command succeeded unexpectedly: {error}");
    assert!(!error.contains("panicked"), "{error}");
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}
