//! Dispatch of the messages to a network core: to admission, transfer, migration and upgrade.

use std::io;
use std::ops::ControlFlow;

use super::core::message::CoreMessage;
use super::core::{MessageHandler, NetworkCore};
use super::upgrade::handover::{Handover, UpgradeMode};

/// Handler of all messages to one network core.
pub(super) struct Dispatcher {
    handover: Handover,
}

impl Dispatcher {
    pub(super) fn new(upgrade: UpgradeMode) -> Self {
        Self { handover: Handover::new(upgrade) }
    }
}

impl MessageHandler for Dispatcher {
    fn on_message(
        &mut self,
        core: &mut NetworkCore,
        message: CoreMessage,
    ) -> io::Result<ControlFlow<Option<u32>>> {
        let mut successor = None;
        match message {
            CoreMessage::Attach(app, asked) => core.attach(app, asked)?,
            CoreMessage::Transfer(request) => core.handle_transfer(*request)?,
            CoreMessage::PortQuery(port) => core.on_port_query(port)?,
            CoreMessage::InsertBatch(batch) => core.insert_batch(*batch)?,
            CoreMessage::MoveLoad { to, busy_permille } => core.move_load(to, busy_permille)?,
            CoreMessage::MigrateProcess { pid, to } => core.migrate_process(pid, to)?,
            CoreMessage::Report(to) => {
                // The requester may have gone.
                let _ = to.send(core.report());
            }
            CoreMessage::Gate(settings, to) => {
                // The requester may have gone.
                let _ = to.send(core.gate(settings));
            }
            CoreMessage::Admission(config, to) => {
                // The requester may have gone.
                let _ = to.send(core.server.engine.change_admission(&config));
            }
            CoreMessage::OwnAddresses(to) => {
                // The requester may have gone.
                let _ = to.send(core.server.engine.stack().own_addresses());
            }
            CoreMessage::Drops(to) => {
                // The requester may have gone.
                let _ = to.send(core.server.engine.drops());
            }
            CoreMessage::Gather => core.move_all_to_primary()?,
            CoreMessage::Gathered { unmoved, why } => {
                successor = self.handover.on_gathered(core, unmoved, why)?;
            }
            CoreMessage::HandOver(request) => successor = self.handover.start(core, request)?,
            CoreMessage::Stop => return Ok(ControlFlow::Break(None)),
        }
        Ok(match successor {
            None => ControlFlow::Continue(()),
            Some(_) => ControlFlow::Break(successor),
        })
    }

    fn count_migration_sets(&self, core: &NetworkCore) -> usize {
        core.count_migration_sets()
    }
}
