//! The experiment `dpdk`.

mod forward;
mod testpmd;

use tidegate_port::dpdk::DpdkError;

pub use forward::{ForwardConfig, forward};

use crate::error::LabError;

/// What a port says is told as it is: it names the next step.
fn refused(error: DpdkError) -> LabError {
    LabError::Config(error.to_string())
}
