//! Static probes (USDT) of a network core, for bpftrace, perf and SystemTap: one instruction that
//! does nothing each, and an ELF note.
//!
//! They are here since the crates above have no `unsafe` code.

/// Defines the probes, or functions without effect where there is no inline assembly.
macro_rules! probes {
    ($($(#[$doc:meta])* $function:ident, $name:ident, ($($argument:ident: $kind:ty),*);)*) => {
        $(
            $(#[$doc])*
            #[inline(always)]
            pub fn $function($($argument: $kind),*) {
                #[cfg(any(miri, loom))]
                let _ = ($($argument,)*);
                #[cfg(not(any(miri, loom)))]
                probe::probe!(tidegate, $name, $($argument),*);
            }
        )*
    };
}

probes! {
    /// Probe `receive`: a round of a network core has received this many frames.
    on_receive, receive, (frames: usize);
    /// Probe `drop`: packets were dropped for the reason with this number in the table of reasons.
    on_drop, drop, (reason: usize, packets: u64);
    /// Probe `accept`: a program has accepted a connection with these ports.
    on_accept, accept, (local_port: u16, peer_port: u16);
    /// Probe `close`: a connection with these ports has ended.
    on_close, close, (local_port: u16, peer_port: u16);
}
