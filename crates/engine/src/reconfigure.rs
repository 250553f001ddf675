//! Changes to a running engine.

use std::io;

use tidegate_gate::{admission, transmit};

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
    pub fn change_admission(&mut self, config: &admission::Config) -> io::Result<()> {
        let seed = random_seed().map_err(io::Error::other)?;
        self.set_admission(config, seed).map_err(|error| match error {
            AdmissionError::Device(error) => error,
            error @ AdmissionError::Config(_) => io::Error::new(io::ErrorKind::InvalidInput, error),
        })
    }

    /// Sends by transmit classes from now on, or by others. Programs of ports have to be set again.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the configuration is invalid; then nothing has changed.
    pub fn change_transmit_classes(&mut self, config: &transmit::Config) -> io::Result<()> {
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        self.parts().0.set_transmit_classes(config).map_err(invalid)
    }
}
