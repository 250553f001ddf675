//! Programs of the same installation: they lie in one folder.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::VERSION;

/// Reason that a program beside the running program cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BesideError {
    /// The folder of the running program is unknown.
    #[error("cannot find the folder of this program: {0}; start it by its path")]
    Folder(io::Error),
    /// The folder has no such program.
    #[error(
        "{} is missing: `make build` builds it; programs of one build belong into one folder",
        .0.display()
    )]
    Missing(PathBuf),
    /// The program cannot be started.
    #[error("cannot start {}: {source}", path.display())]
    Start {
        /// Path of the program.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The program belongs to another build.
    #[error(
        "{} is of another build: it reports `{reported}`, this program is {VERSION}; \
         `make build` builds both anew",
        path.display()
    )]
    OtherBuild {
        /// Path of the program.
        path: PathBuf,
        /// First line of its `--version`.
        reported: String,
    },
}

/// Returns the path of the program `name` in the folder of the running program.
///
/// # Errors
/// [`BesideError::Missing`] if there is no such file.
pub fn beside(name: &str) -> Result<PathBuf, BesideError> {
    // For a program whose file was replaced the name has a suffix, and the folder is right.
    let path = std::env::current_exe().map_err(BesideError::Folder)?.with_file_name(name);
    if path.is_file() { Ok(path) } else { Err(BesideError::Missing(path)) }
}

/// As [`beside`], for a program of the same build only: its `--version` is [`VERSION`].
///
/// # Errors
/// [`BesideError::OtherBuild`] for a program of another build.
pub fn same_build_beside(name: &str) -> Result<PathBuf, BesideError> {
    let path = beside(name)?;
    check_build(&path)?;
    Ok(path)
}

fn check_build(path: &Path) -> Result<(), BesideError> {
    let mut command = Command::new(path);
    command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null());
    let output =
        command.output().map_err(|source| BesideError::Start { path: path.to_owned(), source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let reported = text.lines().next().unwrap_or_default();
    match reported.split_once(' ') {
        Some((_, VERSION)) => Ok(()),
        _ => Err(BesideError::OtherBuild { path: path.to_owned(), reported: reported.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A program that prints `version`.
    fn program(folder: &Path, version: &str) -> PathBuf {
        let path = folder.join("tidegate");
        std::fs::write(&path, format!("#!/bin/sh\necho 'tidegate {version}'\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn accepts_only_the_same_build() {
        let folder = tempfile::tempdir().unwrap();
        check_build(&program(folder.path(), VERSION)).unwrap();
        for other in ["0.0.0", "0.1.0 (build 0000000000000000)", ""] {
            let error = check_build(&program(folder.path(), other)).unwrap_err().to_string();
            assert!(error.contains("another build") && error.contains("make build"), "{error}");
        }
    }

    #[test]
    fn missing_program_names_its_path_and_the_next_step() {
        let error = beside("tg-no-such-program").unwrap_err().to_string();
        assert!(error.contains("/tg-no-such-program") && error.contains("make build"), "{error}");
    }
}
