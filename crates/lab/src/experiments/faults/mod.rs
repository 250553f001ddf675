//! Faults and attacks: their effects on others, and the state that they leave behind.

pub mod chaos;
pub mod hostile;
pub mod soak;
