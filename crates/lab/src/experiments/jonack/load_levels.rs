//! The load levels of the paper.

/// Rates without a flood and at the paper's levels N1 to N8, in packets/s
/// (jonack_load_levels.csv). Every server gets these rates. Against the kernel's receive work the
/// generator does not make every rate above.
pub(super) const LEVELS_PPS: [f64; 9] =
    [0.0, 127e3, 189e3, 236e3, 324e3, 371e3, 498e3, 639e3, 875e3];

/// Name of a level by its index in [`LEVELS_PPS`].
pub(super) fn level_name(level: usize) -> String {
    if level == 0 { "none".to_owned() } else { format!("N{level}") }
}
