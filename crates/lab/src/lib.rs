//! Experiments, comparisons and load generators.
