//! Capabilities (capabilities(7)) that opening a device takes.

use std::fmt::{self, Display, Formatter};

use rustix::thread::CapabilitySet;

/// Capabilities that something needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequiredCapabilities {
    /// Name of what needs them, for messages.
    pub user: &'static str,
    /// The capabilities.
    pub set: CapabilitySet,
}

impl RequiredCapabilities {
    /// Of an AF_XDP device. CAP_PERFMON is for the verifier: the kernel lets the steering program
    /// compare packet pointers only with it.
    pub const XDP: Self = Self {
        user: "AF_XDP (`--io xdp`)",
        set: CapabilitySet::NET_ADMIN
            .union(CapabilitySet::NET_RAW)
            .union(CapabilitySet::BPF)
            .union(CapabilitySet::PERFMON),
    };
    /// Of admission control in front of the kernel's stack.
    pub const XDP_GUARD: Self = Self {
        user: "`tidegate guard`",
        set: CapabilitySet::NET_ADMIN.union(CapabilitySet::BPF).union(CapabilitySet::PERFMON),
    };
    /// Of an AF_PACKET device.
    pub const PACKET: Self =
        Self { user: "AF_PACKET (`--io packet`)", set: CapabilitySet::NET_RAW };
    /// Of an AF_PACKET device that shares the kernel's addresses.
    pub const PACKET_SHARED: Self = Self {
        user: "AF_PACKET on a shared address (`--io packet --shared`)",
        set: CapabilitySet::NET_ADMIN.union(CapabilitySet::NET_RAW).union(CapabilitySet::BPF),
    };
    /// Of a TAP device that is created when it is opened.
    pub const TAP: Self = Self { user: "TAP (`--io tap`)", set: CapabilitySet::NET_ADMIN };

    /// Capabilities that the calling thread does not have in effect.
    pub fn missing(self) -> CapabilitySet {
        let sets = rustix::thread::capabilities(None);
        self.set - sets.map_or(CapabilitySet::empty(), |sets| sets.effective)
    }

    /// True if the calling thread has all of them in effect.
    pub fn are_in_effect(self) -> bool {
        self.missing().is_empty()
    }

    /// Explains why a call was not permitted, from the capabilities that the calling thread has.
    pub fn explain(self) -> MissingCapabilities {
        MissingCapabilities { required: self, missing: self.missing() }
    }
}

/// Reason for which the kernel did not permit a call, and the remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingCapabilities {
    required: RequiredCapabilities,
    /// Required capabilities that were not in effect.
    pub missing: CapabilitySet,
}

impl MissingCapabilities {
    /// The reason without a remedy.
    pub fn reason(&self) -> String {
        let RequiredCapabilities { user, set } = self.required;
        let needed = names(set);
        match self.missing.is_empty() {
            true => format!(
                "this process has {needed}, so a user namespace, a container or a security module \
                 denies it"
            ),
            false => {
                let missing = names(self.missing);
                format!("this process lacks {missing}; {user} needs {needed}")
            }
        }
    }
}

impl Display for MissingCapabilities {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason())?;
        if self.missing.is_empty() {
            return Ok(());
        }
        let file_capabilities = file_capabilities(self.required.set);
        write!(f, ": run as root, or `setcap {file_capabilities}+ep EXECUTABLE`")
    }
}

/// Names of capabilities, as capabilities(7) writes them.
pub fn names(set: CapabilitySet) -> String {
    list(set, " ", |name| format!("CAP_{name}"))
}

/// Names of capabilities, as `setcap` takes them.
pub fn file_capabilities(set: CapabilitySet) -> String {
    list(set, ",", |name| format!("cap_{}", name.to_lowercase()))
}

fn list(set: CapabilitySet, separator: &str, text: fn(&str) -> String) -> String {
    let names: Vec<String> = set.iter_names().map(|(name, _)| text(name)).collect();
    names.join(separator)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_what_is_missing_and_what_is_needed() {
        let required = RequiredCapabilities::XDP;
        let message = MissingCapabilities { required, missing: CapabilitySet::PERFMON }.to_string();
        assert!(message.starts_with("this process lacks CAP_PERFMON; "), "{message}");
        assert!(
            message.contains("needs CAP_NET_ADMIN CAP_NET_RAW CAP_PERFMON CAP_BPF"),
            "{message}"
        );
        let setcap = "setcap cap_net_admin,cap_net_raw,cap_perfmon,cap_bpf+ep";
        assert!(message.contains(setcap), "{message}");
        let none = MissingCapabilities { required, missing: CapabilitySet::empty() }.to_string();
        assert!(none.contains("namespace") && !none.contains("lacks"), "{none}");
    }
}
