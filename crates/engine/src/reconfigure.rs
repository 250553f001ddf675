//! Changes to a running engine.

use std::io;

use tidegate_gate::admission::Config;

use crate::Engine;
use crate::admission::AdmissionError;
use crate::open::random_seed;

impl Engine {
    /// Enables admission control while the engine runs, or replaces its configuration. Sources
    /// have to become known again.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the configuration is invalid, another kind if the device
    /// rejects it; then nothing has changed.
    pub fn change_admission(&mut self, config: &Config) -> io::Result<()> {
        let seed = random_seed().map_err(io::Error::other)?;
        self.set_admission(config, seed).map_err(|error| match error {
            AdmissionError::Device(error) => error,
            error @ AdmissionError::Config(_) => io::Error::new(io::ErrorKind::InvalidInput, error),
        })
    }
}
