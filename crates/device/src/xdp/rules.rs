//! Maps of the steering rules in a BPF program.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aya::Ebpf;
use aya::maps::{Array, HashMap, MapData, MapError};

use super::admission::take_map;
use super::error::XdpError;
use super::steering::{AddressKey, PortKey, RuleUsers, SettingsValue, Steering};
use crate::steering::{SharedRules, SteeringRule};

/// Steering rules that the cores of a device share. The lock is held for a change of the rules, never
/// for a frame.
pub(crate) type SharedRuleMaps = Arc<Mutex<RuleMaps>>;

impl SharedRules for Mutex<RuleMaps> {
    fn set(&self, rule: &SteeringRule, take: bool) -> io::Result<()> {
        let mut rules = lock(self);
        let set = if take { rules.steer(rule) } else { rules.unsteer(rule) };
        set.map_err(|error| io::Error::other(XdpError::from(error)))
    }
}

/// Locks rules, which a thread that panicked has left as a whole number of changes.
pub(crate) fn lock(rules: &Mutex<RuleMaps>) -> MutexGuard<'_, RuleMaps> {
    rules.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Steering rules of a BPF program, as its maps hold them.
pub(crate) struct RuleMaps {
    /// Current rules, each once.
    steering: Steering,
    users: RuleUsers,
    settings: Array<MapData, SettingsValue>,
    /// `None` in a program that knows no rules for addresses.
    addresses: Option<HashMap<MapData, AddressKey, u32>>,
    ports: HashMap<MapData, PortKey, u32>,
    /// True while the program applies the class limits.
    limiting: bool,
    /// True while the program drops frames that match a rule but have no socket.
    dropping: bool,
}

impl RuleMaps {
    /// Takes the maps out of a loaded BPF object. There are no rules.
    pub(crate) fn take(ebpf: &mut Ebpf) -> Result<Self, MapError> {
        let addresses = ebpf.map("addresses").is_some().then(|| take_map(ebpf, "addresses"));
        Ok(Self {
            steering: Steering::default(),
            users: RuleUsers::default(),
            settings: take_map(ebpf, "settings")?,
            addresses: addresses.transpose()?,
            ports: take_map(ebpf, "ports")?,
            limiting: false,
            dropping: false,
        })
    }

    /// Current rules and VLAN.
    pub(crate) fn steering(&self) -> &Steering {
        &self.steering
    }

    /// Sets the VLAN ID to which the rules apply; `None` for untagged frames.
    pub(crate) fn set_vlan(&mut self, vlan: Option<u16>) -> Result<(), MapError> {
        self.steering.vlan = vlan;
        self.apply_settings()
    }

    /// Sets whether the program applies the class limits.
    pub(super) fn set_limiting(&mut self, limiting: bool) -> Result<(), MapError> {
        if std::mem::replace(&mut self.limiting, limiting) == limiting {
            return Ok(());
        }
        self.apply_settings()
    }

    /// Sets whether the program drops frames that match a rule but have no socket.
    pub(super) fn set_dropping(&mut self, dropping: bool) -> Result<(), MapError> {
        self.dropping = dropping;
        self.apply_settings()
    }

    /// Adds a user of a rule. The rule is effective immediately, and until its last user leaves.
    pub(crate) fn steer(&mut self, rule: &SteeringRule) -> Result<(), MapError> {
        if !self.users.add(*rule) {
            return Ok(());
        }
        let added = self.add_keys(rule).and_then(|()| {
            self.steering.rules.push(*rule);
            self.apply_settings()
        });
        if added.is_err() {
            let _ = self.unsteer(rule);
        }
        added
    }

    /// Removes a user of a rule. With its last user the rule ends, effective immediately.
    pub(crate) fn unsteer(&mut self, rule: &SteeringRule) -> Result<(), MapError> {
        if !self.users.remove(rule) {
            return Ok(());
        }
        self.steering.rules.retain(|other| other != rule);
        self.apply_settings()?;
        self.remove_keys(rule)
    }

    /// Removes all rules of a program without a link to an interface, and resets its modes.
    pub(super) fn clear(&mut self) {
        (self.limiting, self.dropping) = (false, false);
        self.users = RuleUsers::default();
        for rule in std::mem::take(&mut self.steering).rules {
            // Fails only without the right to change the map. A key without a link to an interface
            // redirects nothing.
            let _ = self.remove_keys(&rule);
        }
    }

    fn add_keys(&mut self, rule: &SteeringRule) -> Result<(), MapError> {
        if let (Some(key), Some(addresses)) = (rule.address_key(), &mut self.addresses) {
            addresses.insert(key, 1, 0)?;
        }
        rule.port_keys().try_for_each(|key| self.ports.insert(key, 1, 0))
    }

    fn remove_keys(&mut self, rule: &SteeringRule) -> Result<(), MapError> {
        if let (Some(key), Some(addresses)) = (rule.address_key(), &mut self.addresses) {
            ignore_not_found(addresses.remove(&key))?;
        }
        rule.port_keys().try_for_each(|key| ignore_not_found(self.ports.remove(&key)))
    }

    /// Writes the settings map: kinds of rules in use, limits, VLAN.
    fn apply_settings(&mut self) -> Result<(), MapError> {
        self.settings.set(0, self.steering.settings(self.limiting, self.dropping), 0)
    }
}

fn ignore_not_found(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::SyscallError(error)) if error.io_error.kind() == io::ErrorKind::NotFound => {
            Ok(())
        }
        other => other,
    }
}
