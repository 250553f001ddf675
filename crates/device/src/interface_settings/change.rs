//! One change of an interface's settings: the values before, and the text of a record.

use std::fmt::{self, Display, Formatter};
use std::io;
use std::str::FromStr;

use super::access::{InterfaceId, Settings, SettingsAccess};
use crate::netlink::{GroMaxSizes, NapiSettings};

/// Changed settings of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SettingsChange {
    pub(super) interface: InterfaceId,
    /// Values before the change.
    pub(super) original: Settings,
    /// [`Settings::mark`] of the changed values.
    pub(super) changed_mark: u32,
}

impl SettingsChange {
    /// Writes the original values, if the current values differ. Returns true if they differed.
    ///
    /// # Errors
    /// The kernel refuses: the interface is gone, or CAP_NET_ADMIN is missing.
    pub(super) fn restore(&self, access: &mut SettingsAccess) -> io::Result<bool> {
        let current = access.read(&self.interface)?;
        // NAPI instances that are gone took their settings with them.
        let original = match (&self.original, &current) {
            (Settings::Napis(original), Settings::Napis(current)) => {
                let exists = |napi: &&NapiSettings| current.iter().any(|other| other.id == napi.id);
                Settings::Napis(original.iter().filter(exists).copied().collect())
            }
            _ => self.original.clone(),
        };
        let is_changed = match (&original, &current) {
            (Settings::Napis(original), Settings::Napis(current)) => {
                original.iter().any(|napi| !current.contains(napi))
            }
            _ => original != current,
        };
        if is_changed {
            access.write(&self.interface, &original)?;
        }
        Ok(is_changed)
    }

    /// Changed values, with this flush timeout.
    pub(super) fn changed(&self, flush_timeout_ns: u64) -> Settings {
        match &self.original {
            Settings::Deferral { .. } => {
                Settings::Deferral { defer_irqs: self.changed_mark, flush_timeout_ns }
            }
            Settings::Napis(original) => {
                let changed = |napi: &NapiSettings| NapiSettings {
                    id: napi.id,
                    defer_hard_irqs: self.changed_mark,
                    gro_flush_timeout_ns: flush_timeout_ns,
                };
                Settings::Napis(original.iter().map(changed).collect())
            }
            Settings::Gro(original) => Settings::Gro(original.limited_to(self.changed_mark)),
        }
    }

    /// Restores the settings if their current values are those of this change. Returns true if the
    /// values were changed.
    ///
    /// # Errors
    /// As [`SettingsChange::restore`].
    pub(super) fn restore_if_in_force(&self, access: &mut SettingsAccess) -> io::Result<bool> {
        Ok(access.read(&self.interface)?.mark() == self.changed_mark && self.restore(access)?)
    }
}

impl Display for SettingsChange {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mac = self.interface.mac.map(|byte| format!("{byte:02x}")).join(":");
        writeln!(f, "interface {} {mac}", self.interface.index)?;
        writeln!(f, "changed {}", self.changed_mark)?;
        match &self.original {
            Settings::Deferral { defer_irqs, flush_timeout_ns } => {
                writeln!(f, "deferral {defer_irqs} {flush_timeout_ns}")
            }
            Settings::Napis(napis) => napis.iter().try_for_each(|napi| {
                let NapiSettings { id, defer_hard_irqs, gro_flush_timeout_ns } = napi;
                writeln!(f, "napi {id} {defer_hard_irqs} {gro_flush_timeout_ns}")
            }),
            Settings::Gro(GroMaxSizes { v6, v4 }) => writeln!(f, "gro {v6} {v4}"),
        }
    }
}

/// A text is not that of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MalformedChange;

impl FromStr for SettingsChange {
    type Err = MalformedChange;

    /// Parses the lines of a change; lines with other keys are skipped.
    fn from_str(text: &str) -> Result<Self, MalformedChange> {
        let (mut interface, mut changed_mark, mut original) = (None, None, None);
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["interface", index, mac] => {
                    interface = Some(InterfaceId { index: number(index)?, mac: parse_mac(mac)? });
                }
                ["changed", mark] => changed_mark = Some(number(mark)?),
                ["deferral", irqs, timeout] => {
                    let (defer_irqs, flush_timeout_ns) = (number(irqs)?, number(timeout)?);
                    original = Some(Settings::Deferral { defer_irqs, flush_timeout_ns });
                }
                ["napi", id, irqs, timeout] => {
                    let napi = NapiSettings {
                        id: number(id)?,
                        defer_hard_irqs: number(irqs)?,
                        gro_flush_timeout_ns: number(timeout)?,
                    };
                    match &mut original {
                        Some(Settings::Napis(napis)) => napis.push(napi),
                        _ => original = Some(Settings::Napis(vec![napi])),
                    }
                }
                ["gro", v6, v4] => {
                    let (v6, v4) = (number(v6)?, number(v4)?);
                    original = Some(Settings::Gro(GroMaxSizes { v6, v4 }));
                }
                _ => {}
            }
        }
        match (interface, changed_mark, original) {
            (Some(interface), Some(changed_mark), Some(original)) => {
                Ok(Self { interface, original, changed_mark })
            }
            _ => Err(MalformedChange),
        }
    }
}

fn number<T: FromStr>(text: &str) -> Result<T, MalformedChange> {
    text.parse().map_err(|_| MalformedChange)
}

fn parse_mac(text: &str) -> Result<[u8; 6], MalformedChange> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next().ok_or(MalformedChange)?;
        *byte = u8::from_str_radix(part, 16).map_err(|_| MalformedChange)?;
    }
    if parts.next().is_none() { Ok(mac) } else { Err(MalformedChange) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn change(original: Settings) -> SettingsChange {
        let interface = InterfaceId { index: 7, mac: [2, 0, 0xab, 0, 0, 0xff] };
        SettingsChange { interface, original, changed_mark: 2 }
    }

    #[test]
    fn parses_what_it_writes() {
        let napi = |id| NapiSettings { id, defer_hard_irqs: 1, gro_flush_timeout_ns: 20_000 };
        for original in [
            Settings::Deferral { defer_irqs: 0, flush_timeout_ns: u64::MAX },
            Settings::Napis(vec![napi(8193), napi(8194)]),
            Settings::Gro(GroMaxSizes { v6: 65536, v4: 60000 }),
        ] {
            let change = change(original);
            let text = format!("id 5\n{change}");
            assert_eq!(text.parse(), Ok(change));
        }
    }

    #[test]
    fn changed_values_follow_from_the_original_ones() {
        let napi = |hard_irqs, timeout_ns| {
            let (defer_hard_irqs, gro_flush_timeout_ns) = (hard_irqs, timeout_ns);
            Settings::Napis(vec![NapiSettings { id: 8193, defer_hard_irqs, gro_flush_timeout_ns }])
        };
        let deferral = |defer_irqs, timeout_ns| Settings::Deferral {
            defer_irqs,
            flush_timeout_ns: timeout_ns,
        };
        let gro = |v6, v4| Settings::Gro(GroMaxSizes { v6, v4 });
        for (original, changed) in
            [(napi(0, 7), napi(2, 5)), (deferral(0, 7), deferral(2, 5)), (gro(9, 1), gro(2, 1))]
        {
            let change = change(original);
            assert_eq!(change.changed(5), changed);
            assert_eq!(changed.mark(), change.changed_mark);
        }
    }

    #[test]
    fn malformed_text_is_refused() {
        for text in [
            "",
            "interface 7 02:00:00:00:00:01\nchanged 2\n",
            "interface x 02:00:00:00:00:01\nchanged 2\ngro 1 2\n",
            "interface 7 02:00:00:00:00\nchanged 2\ngro 1 2\n",
            "interface 7 02:00:00:00:00:01\nchanged 2\ndeferral 1 -2\n",
        ] {
            assert_eq!(text.parse::<SettingsChange>(), Err(MalformedChange), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_comes_to_an_end(text in "\\PC{0,80}(\n\\PC{0,40}){0,3}") {
            let _ = text.parse::<SettingsChange>();
        }
    }
}
