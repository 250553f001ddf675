//! Applications that ask for io_uring, whose socket calls the preload library does not see.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use support::run::{ServerHost, library};
use support::{SERVER_V4, SERVER_V6, can_run, has_programs, is_root, url};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/io_uring.c");

const REFUSED: &str = "io_uring: Function not implemented";
const ALLOWED: &str = "io_uring: Success";

/// Compiles the program into a folder that every user may read, beside the preload library.
fn compile(folder: &Path) -> PathBuf {
    fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).unwrap();
    fs::copy(library(), folder.join("library.so")).unwrap();
    let program = folder.join("io_uring");
    let mut compile = Command::new("cc");
    compile.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(SOURCE);
    assert!(compile.status().unwrap().success());
    program
}

fn is_io_uring_available(program: &Path) -> bool {
    let printed = Command::new(program).output().unwrap().stdout;
    let is_available = printed.starts_with(ALLOWED.as_bytes());
    if !is_available {
        tidegate_needs::skip("io_uring", "this kernel offers no io_uring");
    }
    is_available
}

/// Output of `program`, started by `tidegate run` with an embedded stack, which stays closed. The
/// words in `before` start `tidegate`.
fn run(before: &[&str], flags: &[&str], program: &Path) -> Output {
    let tidegate = fs::File::open(env!("CARGO_BIN_EXE_tidegate")).unwrap();
    // Through an open file: the build directory may be inaccessible to other users.
    let words = [before, &["/proc/self/fd/0"]].concat();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(tidegate);
    command.env("TIDEGATE_PRELOAD_LIBRARY", program.with_file_name("library.so"));
    command.args(["run", "--embedded", "--iface", "lo", "--address", "192.0.2.1/24"]);
    command.args(flags).arg("--").arg(program).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn program_gets_no_io_uring() {
    if !is_root("run_io_uring") || !has_programs("run_io_uring", &["cc", "setpriv"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path());
    if !is_io_uring_available(&program) {
        return;
    }
    let output = run(&["env"], &[], &program);
    assert_eq!(stdout(&output), format!("{REFUSED}, gains privileges: yes\n"));
    assert_eq!(stderr(&output), "");
    let output = run(&["env"], &["--allow-io-uring"], &program);
    assert_eq!(stdout(&output), format!("{ALLOWED}, gains privileges: yes\n"));

    // Without CAP_SYS_ADMIN the kernel accepts the filter only from a process that gives up new
    // privileges.
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let output = run(&user, &[], &program);
    assert_eq!(stdout(&output), format!("{REFUSED}, gains privileges: no\n"));
    assert!(stderr(&output).contains("set-user-ID"), "{}", stderr(&output));
    let output = run(&user, &["--allow-io-uring"], &program);
    assert_eq!(stdout(&output), format!("{ALLOWED}, gains privileges: yes\n"));
    assert_eq!(stderr(&output), "");

    let log = folder.path().join("log");
    fs::write(&log, "").unwrap();
    fs::set_permissions(&log, PermissionsExt::from_mode(0o666)).unwrap();
    let output = run(&user, &["--log", log.to_str().unwrap()], &program);
    assert_eq!(stderr(&output), "");
    assert!(fs::read_to_string(&log).unwrap().contains("set-user-ID"));
}

/// The dynamic linker loads no preload library into such programs.
#[test]
fn rejects_programs_that_gain_privileges() {
    if !is_root("run_gaining") || !has_programs("run_gaining", &["cc", "setpriv"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path());
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    for (mode, expected) in [(0o4755, "set-user-ID"), (0o2755, "set-group-ID")] {
        fs::set_permissions(&program, PermissionsExt::from_mode(mode)).unwrap();
        let output = run(&user, &[], &program);
        assert!(!output.status.success(), "{}", stdout(&output));
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
        // The user has what the program would gain, or cannot gain anything.
        assert!(run(&["env"], &[], &program).status.success());
        let confined = [&user[..], &["--no-new-privs"]].concat();
        assert!(run(&confined, &[], &program).status.success());
    }
}

/// HTTP server of Node.js, whose answer is the version of its event loop (libuv).
const NODE: &str = "const http = require('http');
    http.createServer((request, response) => response.end(process.versions.uv))
        .listen(8080, '::');";

/// Node.js of a version that registers descriptors by io_uring, if one is named by
/// `TIDEGATE_TEST_NODE`; otherwise the installed one.
#[test]
fn node_answers_whatever_it_would_use_io_uring_for() {
    let node = std::env::var("TIDEGATE_TEST_NODE").unwrap_or_else(|_| "node".to_owned());
    if !can_run("run_node_io_uring", &[&node, "curl"]) {
        return;
    }
    ServerHost::each(|host| {
        let _server = host.run_server(&[&node, "-e", NODE], 8080);
        for address in [SERVER_V4, SERVER_V6] {
            let request = ["-sS", "--max-time", "20", &url(address, ":8080/")];
            assert!(host.testbed().tool("curl", &request).starts_with("1."), "{address}");
        }
    });
}
