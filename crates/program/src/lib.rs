//! Parts that the programs of Tidegate share: version and build id, programs beside each other,
//! standard output.

mod beside;
pub mod output;

pub use beside::{BesideError, beside, same_build_beside};

/// Identity of the build: equal for programs that were built from the same sources of the product,
/// with the same profile for the same target.
pub const BUILD_ID: &str = env!("TIDEGATE_BUILD_ID");

/// Version of the programs with the build id, as `--version` prints it after the program's name.
pub const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (build ", env!("TIDEGATE_BUILD_ID"), ")");

/// Error that ends a command: printed once to standard error, exit code 1.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
