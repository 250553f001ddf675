//! Receive scheduling, admission and transmit classes: settings and counters.

pub use tidegate_gate::{Config, ConfigError, GateCounters, Mode, Quota, Settings};

/// Transmit classes: which frames leave first, and their counters.
pub mod transmit {
    pub use tidegate_gate::transmit::{
        Class, ClassCounters, Config, ConfigError, Match, add_counters,
    };
}

/// Admission under overload: classes of sources, and their counters.
pub mod admission {
    pub use tidegate_gate::admission::{
        Class, ClassCounters, ClassLimit, Config, ConfigError, Match, NumberRange, PacketRate,
        ProtocolMatch, RateLimit,
    };
}
