//! The laboratory is a program of its own, beside `tidegate`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

/// A folder with `tidegate` alone, as a link: the program finds its folder by its own path.
fn tidegate_alone() -> tempfile::TempDir {
    let program = Path::new(env!("CARGO_BIN_EXE_tidegate"));
    let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
    fs::hard_link(program, folder.path().join("tidegate")).unwrap();
    folder
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(folder.join("tidegate")).args(arguments).output().unwrap()
}

#[test]
fn lab_and_demo_run_the_laboratory_beside_with_all_arguments() {
    let folder = tidegate_alone();
    let laboratory = folder.path().join("tidegate-lab");
    fs::write(&laboratory, "#!/bin/sh\necho \"$@\"\n").unwrap();
    fs::set_permissions(&laboratory, PermissionsExt::from_mode(0o755)).unwrap();
    for (arguments, expected) in [
        (&["lab", "livelock", "--quick", "--json", "-"][..], "livelock --quick --json -\n"),
        (&["lab", "--help"], "--help\n"),
        (&["lab", "dns", "--help"], "dns --help\n"),
        (&["lab"], "\n"),
        (&["demo", "--seconds", "2"], "demo --seconds 2\n"),
        (&["demo", "-h"], "demo -h\n"),
    ] {
        let output = run(folder.path(), arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{arguments:?}");
    }
}

/// The libraries that `tidegate` is linked from, with those that only its build uses.
#[test]
fn product_contains_nothing_of_the_laboratory() {
    let arguments = ["tree", "--locked", "--offline", "-p", "tidegate-cli", "--prefix", "none"];
    let mut command = Command::new(env!("CARGO"));
    command.args(arguments).args(["--edges", "normal,build", "--format", "{p}"]);
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let names: Vec<_> = text.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.contains(&"tidegate-load"), "{names:?}");
    for name in ["tidegate-lab", "tidegate-queues", "tidegate-sim"] {
        assert!(!names.contains(&name), "tidegate-cli depends on {name}");
    }
    // Symbols and source paths of a library have its name with underscores, or its folder.
    let program = fs::read(env!("CARGO_BIN_EXE_tidegate")).unwrap();
    for part in ["tidegate_lab", "crates/lab/src"] {
        let mut windows = program.windows(part.len());
        assert!(!windows.any(|bytes| bytes == part.as_bytes()), "tidegate contains {part}");
    }
}

#[test]
fn missing_laboratory_error_names_its_path_and_the_next_step() {
    let folder = tidegate_alone();
    for command in ["lab", "demo"] {
        let output = run(folder.path(), &[command]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        let path = folder.path().join("tidegate-lab");
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(&format!("{} is missing", path.display())), "{error}");
        assert!(error.contains("make build"), "{error}");
    }
}
