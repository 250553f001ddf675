//! The laboratory under test: its commands, their results, and the reasons for which a test
//! cannot run.

// Each test binary uses a part of this module.
#![allow(dead_code, unused_imports)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard};

use serde_json::Value;
pub use tidegate_lab::testbed::for_tests::{can_run, has_programs, is_root, wait_until};

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

/// Held in common by experiments that may run beside others, and alone by those that measure rates.
static PROCESSORS: RwLock<()> = RwLock::new(());

/// Waits for an experiment that measures rates; as long as the result is held, none begins. For
/// tests that start the laboratory themselves.
pub fn share_processors() -> RwLockReadGuard<'static, ()> {
    PROCESSORS.read().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the laboratory to completion.
pub fn run(arguments: &[&str]) -> Output {
    let _shared = share_processors();
    run_now(arguments)
}

fn run_now(arguments: &[&str]) -> Output {
    Command::new(laboratory()).args(arguments).output().unwrap()
}

/// Runs an experiment and returns its JSON result.
pub fn lab(arguments: &[&str]) -> Value {
    result_of(arguments, run)
}

/// Runs an experiment while no other one of this test program runs, and returns its JSON result.
pub fn lab_alone(arguments: &[&str]) -> Value {
    let _alone = PROCESSORS.write().unwrap_or_else(PoisonError::into_inner);
    result_of(arguments, run_now)
}

fn result_of(arguments: &[&str], run: fn(&[&str]) -> Output) -> Value {
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
