//! Scripts of the descriptions, run in the namespaces of a testbed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tidegate_lab::testbed::netns::Namespace;

use crate::description::cache;
use crate::support::{CLIENT_V4, CLIENT_V6, SERVER_V4, SERVER_V6};

/// Functions for scripts.
const FUNCTIONS: &str = include_str!("functions.sh");

/// Longest time that a script may take, in seconds.
const LIMIT_SECONDS: &str = "240";

/// Folder of a running program, with the variables for its scripts.
pub struct ProgramFolder {
    folder: tempfile::TempDir,
    own: BTreeMap<String, String>,
    pub pid: u32,
}

/// Address with brackets, as in URLs.
fn bracketed(address: &str) -> String {
    let address: IpAddr = address.parse().unwrap();
    if address.is_ipv6() { format!("[{address}]") } else { address.to_string() }
}

impl ProgramFolder {
    /// Creates a folder that every user may write to, with the data that the program will move.
    /// `own` are further variables.
    pub fn new(own: &BTreeMap<String, String>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let created = Self { folder, own: own.clone(), pid: 0 };
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(created.root(), mode).unwrap();
        fs::write(created.root().join("data"), data()).unwrap();
        created
    }

    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    /// File with what `transfer` has to print.
    pub fn expected(&self) -> PathBuf {
        let [own, usual] = ["expected", "data"].map(|name| self.root().join(name));
        if own.exists() { own } else { usual }
    }

    /// Variables of all scripts.
    fn variables(&self) -> impl Iterator<Item = (&str, String)> {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let common = [
            ("ROOT", text(self.root())),
            ("CACHE", text(&cache())),
            ("SOURCES", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/program_table").to_owned()),
            ("SERVER_V4", SERVER_V4.to_owned()),
            ("SERVER_V6", SERVER_V6.to_owned()),
            ("CLIENT_V4", CLIENT_V4.to_owned()),
            ("CLIENT_V6", CLIENT_V6.to_owned()),
            ("PID", self.pid.to_string()),
        ];
        // Own variables may contain the common ones.
        self.own.iter().map(|(name, value)| (&**name, value.clone())).chain(common)
    }

    /// The text with the variables replaced.
    pub fn fill(&self, text: &str) -> String {
        let fill =
            |text: String, (name, value): (&str, String)| text.replace(&format!("${name}"), &value);
        self.variables().fold(text.to_owned(), fill)
    }

    /// Command for a script about the server's address: `$ADDRESS`, in URLs `$HOST`, and
    /// `$BACKEND` for the client's address of the same family.
    pub fn script(&self, namespace: &Namespace, script: &str, address: &str) -> Command {
        let backend = if address == SERVER_V4 { CLIENT_V4 } else { CLIENT_V6 };
        let mut command = namespace.command("timeout");
        command.args(["-k", "5", LIMIT_SECONDS, "bash", "-euo", "pipefail", "-c"]);
        command.arg(format!("{FUNCTIONS}\n{script}")).envs(self.variables());
        command.env("ADDRESS", address).env("HOST", bracketed(address));
        command.env("BACKEND", bracketed(backend)).current_dir(self.root());
        command.stdin(Stdio::null());
        command
    }

    /// Runs a script to its end and returns its output.
    pub fn run(
        &self,
        namespace: &Namespace,
        script: &str,
        address: &str,
    ) -> Result<String, String> {
        result(self.script(namespace, script, address).output().unwrap())
    }

    /// Starts a script, with its output in a file of this name.
    pub fn spawn(&self, namespace: &Namespace, script: &str, address: &str, log: &str) -> Child {
        let log = File::create(self.root().join(log)).unwrap();
        let mut command = self.script(namespace, script, address);
        command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
    }

    /// Last line that the program has written, for reasons.
    pub fn last_line(&self, log: &str) -> String {
        last_line(&fs::read(self.root().join(log)).unwrap_or_default()).unwrap_or_default()
    }
}

/// Last line that is not empty.
fn last_line(text: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(text);
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_owned)
}

/// Output of a script, or its last line on standard error.
fn result(output: Output) -> Result<String, String> {
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    if output.status.code() == Some(124) {
        return Err(format!("no end after {LIMIT_SECONDS} s"));
    }
    Err(last_line(&output.stderr).unwrap_or_else(|| output.status.to_string()))
}

/// Runs a script outside of namespaces, as for the version of a program.
pub fn run_plain(script: &str, cache: &Path) -> Result<String, String> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let mut bash = Command::new("bash");
    bash.args(["-euo", "pipefail", "-c", script]).env("CACHE", cache).env("PATH", path);
    bash.env("SCRIPTS", concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts"));
    result(bash.stdin(Stdio::null()).output().unwrap())
}

/// 10 MB of text: lines of 80 bytes, all different.
pub fn data() -> String {
    let mut state = 1_u64;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 8
    };
    let mut line = || {
        format!(
            "{:014x}{:014x}{:014x}{:014x}{:014x}{:09x}\n",
            next(),
            next(),
            next(),
            next(),
            next(),
            next() >> 20
        )
    };
    (0..125_000).map(|_| line()).collect()
}
