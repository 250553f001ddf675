//! Programs of the peers: built from their sources in `crates/lab/peers`, or named by
//! `TIDEGATE_PEERS`.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::LabError;
use crate::report::progress::Progress;
use crate::testbed::netns::run_to_end;
use crate::testbed::programs;

/// Variable that names programs of peers, as `NAME=PATH,NAME=PATH`.
const VARIABLE: &str = "TIDEGATE_PEERS";
/// Peers that the laboratory does not build.
const NAMED_ONLY: [&str; 4] = ["f-stack", "vpp", "mtcp", "tas"];

/// Headers of Debian's lwIP.
const LWIP_HEADERS: &str = "/usr/include/lwip";

/// Peer that the laboratory builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Built {
    Smoltcp,
    /// gVisor's netstack.
    Gvisor,
    /// As Debian builds it.
    Lwip,
}

impl Built {
    const ALL: [Self; 3] = [Self::Smoltcp, Self::Gvisor, Self::Lwip];

    fn name(self) -> &'static str {
        match self {
            Self::Smoltcp => "smoltcp",
            Self::Gvisor => "gvisor",
            Self::Lwip => "lwip",
        }
    }

    /// Builds the program from `source`, below `target`, and returns its path.
    fn build(self, source: &Path, target: &Path) -> Result<PathBuf, LabError> {
        match self {
            Self::Smoltcp => {
                let mut cargo = Command::new("cargo");
                cargo.args(["build", "--release", "--locked", "--quiet", "--manifest-path"]);
                cargo.arg(source.join("Cargo.toml")).arg("--target-dir").arg(target);
                run_to_end(&mut cargo, "cargo")?;
                Ok(target.join("release/tidegate-peer-smoltcp"))
            }
            Self::Gvisor => {
                let program = target.join("tidegate-peer-gvisor");
                let mut go = Command::new("go");
                go.args(["build", "-C"]).arg(source).args(["-trimpath", "-buildvcs=false", "-o"]);
                run_to_end(go.arg(&program).arg("."), "golang")?;
                Ok(program)
            }
            Self::Lwip => {
                if !Path::new(LWIP_HEADERS).is_dir() {
                    let program = "lwIP".to_owned();
                    return Err(LabError::Missing { program, package: "liblwip-dev" });
                }
                let program = target.join("tidegate-peer-lwip");
                let mut compiler = Command::new("cc");
                compiler.args(["-O2", "-Wall", "-Wextra", "-I", LWIP_HEADERS, "-o"]).arg(&program);
                run_to_end(compiler.arg(source.join("main.c")).arg("-llwip"), "gcc")?;
                Ok(program)
            }
        }
    }
}

/// Peer with a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) name: String,
    pub(super) program: PathBuf,
}

/// Peer that is not measured, or not in one case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LeftOut {
    pub(super) name: String,
    pub(super) reason: String,
}

impl LeftOut {
    pub(super) fn new(name: &str, error: &LabError) -> Self {
        Self { name: name.to_owned(), reason: reason_of(error) }
    }
}

/// The reason in one line: of a build's messages the last lines.
fn reason_of(error: &LabError) -> String {
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    match lines.as_slice() {
        [first, .., before, last] => format!("{first} … {before} {last}"),
        lines => lines.join(" "),
    }
}

/// Finds or builds the programs of all peers, or of those with a name in `only`.
///
/// # Errors
/// If `TIDEGATE_PEERS` or `only` cannot be used.
pub(super) fn find(only: &[String]) -> Result<(Vec<Peer>, Vec<LeftOut>), LabError> {
    let mut named = parse(&env::var(VARIABLE).unwrap_or_default())?;
    check_names(only, &named)?;
    let is_wanted = |name: &str| only.is_empty() || only.iter().any(|wanted| wanted == name);
    named.retain(|name, _| is_wanted(name));
    let (mut peers, mut left_out) = (Vec::new(), Vec::new());
    let built: Vec<Built> =
        Built::ALL.into_iter().filter(|built| is_wanted(built.name())).collect();
    let progress = Progress::of_part("programs", built.len());
    for built in built {
        let name = built.name();
        if named.contains_key(name) {
            progress.advance();
            continue;
        }
        match build(built) {
            Ok(program) => {
                progress.step(format_args!("{name} is built"));
                peers.push(Peer { name: name.to_owned(), program });
            }
            Err(error) => {
                progress.step(format_args!("{name} is left out: {error}"));
                left_out.push(LeftOut::new(name, &error));
            }
        }
    }
    for name in NAMED_ONLY.into_iter().filter(|name| is_wanted(name) && !named.contains_key(*name))
    {
        let reason = format!("{VARIABLE} names no program for it");
        left_out.push(LeftOut { name: name.to_owned(), reason });
    }
    peers.extend(named.into_iter().map(|(name, program)| Peer { name, program }));
    Ok((peers, left_out))
}

fn build(built: Built) -> Result<PathBuf, LabError> {
    let laboratory = programs::laboratory()?;
    // Not the folder that the laboratory was built in: packages do not depend on that.
    let below = Path::new("crates/lab/peers").join(built.name());
    let current = env::current_dir().unwrap_or_default();
    let mut folders = laboratory.ancestors().chain(current.ancestors());
    let source = folders.find_map(|folder| Some(folder.join(&below)).filter(|path| path.is_dir()));
    let Some(source) = source else {
        let what = format!(
            "its source {} is missing above {} and {}: start the laboratory in a checkout",
            below.display(),
            laboratory.display(),
            current.display()
        );
        return Err(LabError::Config(what));
    };
    let target = laboratory.with_file_name("peers");
    fs::create_dir_all(&target).map_err(LabError::file(&target))?;
    built.build(&source, &target)
}

/// Programs by name, of a text as `NAME=PATH,NAME=PATH`.
fn parse(text: &str) -> Result<BTreeMap<String, PathBuf>, LabError> {
    let mut named = BTreeMap::new();
    for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let (name, path) = entry.split_once('=').ok_or_else(|| {
            LabError::Config(format!("{VARIABLE}: {entry:?} is not NAME=PATH, as vpp=/opt/peer"))
        })?;
        let path = PathBuf::from(path.trim());
        if !path.is_file() {
            let what = format!("{VARIABLE}: the program {} does not exist", path.display());
            return Err(LabError::Config(what));
        }
        named.insert(name.trim().to_owned(), path);
    }
    Ok(named)
}

fn check_names(only: &[String], named: &BTreeMap<String, PathBuf>) -> Result<(), LabError> {
    let mut names: Vec<&str> = Built::ALL.iter().map(|built| built.name()).collect();
    names.extend(NAMED_ONLY);
    names.extend(named.keys().map(String::as_str));
    match only.iter().find(|name| !names.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let names = names.join(", ");
            Err(LabError::Config(format!("unknown peer {name:?}; available: {names}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_named_with_their_paths() {
        let own = env::current_exe().unwrap();
        let text = format!("vpp={}, other = {} ,", own.display(), own.display());
        let named = parse(&text).unwrap();
        assert!(named.keys().eq(["other", "vpp"]) && named["vpp"] == own, "{named:?}");
        assert!(parse("").unwrap().is_empty());
        assert!(parse("vpp").unwrap_err().to_string().contains("NAME=PATH"));
        let missing = parse("vpp=/no/such/program").unwrap_err().to_string();
        assert!(missing.contains("/no/such/program"), "{missing}");
        let error = check_names(&["vpp".to_owned(), "linux".to_owned()], &named).unwrap_err();
        assert!(error.to_string().contains("lwip, f-stack"), "{error}");
    }

    #[test]
    fn reason_is_one_line() {
        let error = LabError::Config("failed:\n one\n\n two\n three\n".to_owned());
        assert_eq!(reason_of(&error), "failed: … two three");
        assert_eq!(reason_of(&LabError::Config("short\nreason".to_owned())), "short reason");
    }
}
