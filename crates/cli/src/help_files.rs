//! Files made of the command line's own description: completions for shells, and manual pages.

use std::path::PathBuf;

use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;

use crate::output::print;
use crate::{Cli, Failure};

/// Name of the program in the files.
const PROGRAM: &str = "tidegate";

/// Flags of `completions`.
#[derive(Args)]
pub(crate) struct Completions {
    /// Shell that reads the script
    shell: Shell,
}

impl Completions {
    /// Prints the script.
    pub(crate) fn run(self) -> Result<(), Failure> {
        print(format_args!("{}", script(self.shell)?))
    }
}

fn script(shell: Shell) -> Result<String, Failure> {
    let whole = Cli::command();
    // Some shells would show hidden commands.
    let shown = whole.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let mut command = Command::new(PROGRAM).version(tidegate_program::VERSION).subcommands(shown);
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, PROGRAM, &mut script);
    Ok(String::from_utf8(script)?)
}

/// Flags of `man`.
#[derive(Args)]
pub(crate) struct ManualPages {
    /// Folder for the pages, which must exist
    folder: PathBuf,
}

impl ManualPages {
    /// Writes a page for the program and one for each command.
    pub(crate) fn run(self) -> Result<(), Failure> {
        let command = Cli::command().name(PROGRAM);
        clap_mangen::generate_to(command, &self.folder)
            .map_err(|error| format!("{}: {error}", self.folder.display()).into())
    }
}

#[cfg(test)]
mod tests {
    use std::process;

    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_shell_completes_the_commands() {
        for &shell in Shell::value_variants() {
            let script = script(shell).unwrap();
            assert!(script.contains("daemon") && script.contains("monitor"), "{shell}");
            assert!(!script.contains("restore-settings"), "{shell}: hidden commands stay hidden");
        }
    }

    #[test]
    fn bash_accepts_its_script_and_completes_with_it() {
        let script = script(Shell::Bash).unwrap();
        let complete = "COMP_WORDS=(tidegate dae); COMP_CWORD=1; \
                        _tidegate tidegate dae tidegate; echo \"${COMPREPLY[*]}\"";
        let output =
            process::Command::new("bash").args(["-c", &format!("{script}\n{complete}")]).output();
        let output = output.unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "daemon\n", "{error}");
    }

    #[test]
    fn each_command_has_a_manual_page() {
        let folder = tempfile::tempdir().unwrap();
        ManualPages { folder: folder.path().to_owned() }.run().unwrap();
        for page in ["tidegate.1", "tidegate-daemon.1", "tidegate-serve-dns.1"] {
            let text = std::fs::read_to_string(folder.path().join(page)).unwrap();
            assert!(text.contains(".TH tidegate"), "{page}: {text}");
        }
        assert!(!folder.path().join("tidegate-restore-settings.1").exists());
        let missing = ManualPages { folder: folder.path().join("missing") };
        assert!(missing.run().unwrap_err().to_string().contains("missing"));
    }
}
