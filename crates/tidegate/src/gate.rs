//! Receive scheduling and admission: settings and counters.

pub use tidegate_gate::{Config, ConfigError, GateCounters, Mode, Quota, Settings};

/// Admission under overload: classes of sources, and their counters.
pub mod admission {
    pub use tidegate_gate::admission::{
        Class, ClassCounters, ClassLimit, Config, ConfigError, Match, NumberRange, PacketRate,
        ProtocolMatch, RateLimit,
    };
}
