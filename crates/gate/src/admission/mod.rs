//! What is taken when not everything can be.
