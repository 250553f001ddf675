//! Standard output and standard error. A reader that has gone, as in `tidegate doctor | head`, is
//! no failure of the command.

use std::fmt::{self, Display};
use std::io::{self, ErrorKind, Write};

use crate::Failure;

/// The reader of standard output has gone: the command ends, and nothing is reported.
#[derive(Debug)]
pub struct OutputClosed;

impl Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader of standard output has gone")
    }
}

impl std::error::Error for OutputClosed {}

/// Writes to standard output.
///
/// # Errors
/// [`OutputClosed`] when the reader has gone, and the error of any other failed write.
pub fn print(text: fmt::Arguments<'_>) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_fmt(text).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => OutputClosed.into(),
        _ => format!("cannot write to standard output: {error}").into(),
    })
}

/// Writes a line to standard error. The reader may have gone: a failed write is ignored.
pub fn log(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes a line to standard output, formatted as by `println!`. Returns a `Result`.
#[macro_export]
macro_rules! print_line {
    ($($argument:tt)*) => {
        $crate::output::print(format_args!("{}\n", format_args!($($argument)*)))
    };
}
pub use print_line;
