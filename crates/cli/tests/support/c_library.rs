//! Programs in C on the C library, in the server's namespace of a testbed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use super::run::Daemon;
use super::{DeviceKind, SERVER_V4, SERVER_V6, Testbed};

/// Folder of the C library's crate.
const CRATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../capi");

/// Folder with `libtidegate.so`, built with the profile of this test.
pub fn library_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_BIN_EXE_tidegate")).parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--locked", "--quiet", "-p", "tidegate-capi"]);
        if folder.ends_with("release") {
            build.arg("--release");
        }
        let build = build.arg("--target-dir").arg(folder.parent().unwrap());
        assert!(build.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
        let mut link = Command::new(format!("{CRATE}/../../scripts/c-library"));
        assert!(link.arg("link").arg(folder).status().unwrap().success());
        folder.to_owned()
    })
}

/// Compiles a program of the crate against the C library; returns its path in `folder`.
pub fn compile(folder: &Path, source: &str, flags: &[&str]) -> PathBuf {
    let library = library_folder().to_str().unwrap();
    let program = folder.join(Path::new(source).with_extension("").file_name().unwrap());
    let mut command = Command::new("cc");
    command.args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]).args(flags);
    command.arg("-I").arg(format!("{CRATE}/include")).arg("-o").arg(&program);
    command.arg(format!("{CRATE}/{source}"));
    command.args(["-L", library, &format!("-Wl,-rpath,{library}"), "-ltidegate"]);
    assert!(command.status().unwrap().success(), "{source} does not compile");
    program
}

/// Compiles a program of the crate for the kernel's sockets.
pub fn compile_for_kernel(folder: &Path, source: &str) -> PathBuf {
    let name = Path::new(source).file_stem().unwrap().to_str().unwrap();
    let program = folder.join(format!("{name}-kernel"));
    let mut command = Command::new("cc");
    command.args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-DKERNEL", "-o"]);
    assert!(command.arg(&program).arg(format!("{CRATE}/{source}")).status().unwrap().success());
    program
}

/// StackHost of the stack of a C program.
pub enum StackHost<'s> {
    /// A daemon to which the program attaches.
    Attached(Daemon<'s>),
    /// A stack in the program.
    Embedded(&'s Testbed, tempfile::TempDir),
}

impl StackHost<'_> {
    /// Runs the test with a daemon and with an embedded stack.
    pub fn each(test: impl Fn(&Testbed, &StackHost<'_>)) {
        let testbed = Testbed::new(DeviceKind::Xdp);
        test(&testbed, &StackHost::Attached(Daemon::start(&testbed, &[])));
        let testbed = Testbed::new(DeviceKind::Xdp);
        let folder = tempfile::tempdir().unwrap();
        let config = format!(
            "[host]\niface = '{}'\naddress = ['{SERVER_V4}/24', '{SERVER_V6}/64']\n",
            testbed.device()
        );
        std::fs::write(folder.path().join("tidegate.toml"), config).unwrap();
        test(&testbed, &StackHost::Embedded(&testbed, folder));
    }

    /// Command that runs a program on this stack.
    pub fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let program = program.to_str().unwrap();
        let mut command = match self {
            Self::Attached(daemon) => {
                let mut command = daemon.testbed().server().command(program);
                command.env("TIDEGATE_SOCKET", daemon.socket());
                command
            }
            Self::Embedded(testbed, folder) => {
                let mut command = testbed.server().command(program);
                command.env("TIDEGATE_CONFIG", folder.path().join("tidegate.toml"));
                command
            }
        };
        command.args(arguments);
        command
    }
}

/// Standard output of a program that must succeed.
pub fn output_of(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{stdout}{stderr}");
    stdout.into_owned()
}
