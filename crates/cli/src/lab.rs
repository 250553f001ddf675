//! `tidegate lab` and `tidegate demo`: the program `tidegate-lab`, which is no part of this one.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use clap::Args;
use tidegate_program::beside;

use crate::Failure;

/// The program of the laboratory, in the folder of this program.
const PROGRAM: &str = "tidegate-lab";

/// Arguments for the laboratory, which checks them.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Arguments of `tidegate-lab`; --help lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

impl Arguments {
    /// Replaces this process by `tidegate-lab` with the command, if one is given, and the
    /// arguments. Returns only on an error.
    pub(crate) fn run(self, command: Option<&str>) -> Result<(), Failure> {
        let program = beside(PROGRAM)?;
        let error = Command::new(&program).args(command).args(self.arguments).exec();
        Err(format!("cannot start {}: {error}", program.display()).into())
    }
}
