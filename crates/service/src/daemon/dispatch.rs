//! Dispatch of the messages to a network core: to admission, transfer, migration and upgrade.

use std::io;
use std::ops::ControlFlow;

use super::core::message::CoreMessage;
use super::core::{MessageHandler, NetworkCore};
use super::transfer::request::SearchTarget;
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

/// True for a query of another core for a port.
fn is_for_port_of_another_core(core: &NetworkCore, message: &CoreMessage) -> bool {
    matches!(message, CoreMessage::PortQuery(query) if query.asking_core != core.index)
}

/// True for a message at which sockets of this core may move to another core or daemon.
fn may_move_sockets(core: &NetworkCore, message: &CoreMessage) -> bool {
    match message {
        CoreMessage::MoveLoad { .. }
        | CoreMessage::MoveNext { .. }
        | CoreMessage::MigrateProcess { .. }
        | CoreMessage::Gather
        | CoreMessage::Gathered { .. }
        | CoreMessage::HandOver(_) => true,
        CoreMessage::InsertBatch(_) => core.cores.is_gathering(),
        CoreMessage::PortQuery(_) => is_for_port_of_another_core(core, message),
        CoreMessage::Transfer(request) => match request.search {
            SearchTarget::Socket { target_core, .. } => {
                let key = core.server.transfers.key(request.fd_cookie());
                target_core != core.index && key.is_some()
            }
            SearchTarget::Application => false,
        },
        CoreMessage::Attach(..)
        | CoreMessage::Report(_)
        | CoreMessage::Gate(..)
        | CoreMessage::Admission(..)
        | CoreMessage::TransmitClasses(..)
        | CoreMessage::OwnAddresses(_)
        | CoreMessage::Drops(_)
        | CoreMessage::Medium(_)
        | CoreMessage::StartCapture(..)
        | CoreMessage::EndCapture(..)
        | CoreMessage::Stop => false,
    }
}

impl MessageHandler for Dispatcher {
    fn on_message(
        &mut self,
        core: &mut NetworkCore,
        message: CoreMessage,
    ) -> io::Result<ControlFlow<Option<u32>>> {
        let mut successor = None;
        if is_for_port_of_another_core(core, &message) {
            // An application that has exited may have had the port.
            core.reap_except(None);
        }
        if may_move_sockets(core, &message) {
            // A socket of a detached application cannot move.
            core.end_all_sockets();
        }
        match message {
            CoreMessage::Attach(app, asked) => core.attach(app, asked)?,
            CoreMessage::Transfer(request) => core.handle_transfer(*request)?,
            CoreMessage::PortQuery(port) => core.on_port_query(port)?,
            CoreMessage::InsertBatch(batch) => core.insert_batch(*batch)?,
            CoreMessage::MoveLoad { to, busy_permille } => core.move_load(to, busy_permille)?,
            CoreMessage::MoveNext { to, apps } => core.move_next(to, &apps)?,
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
            CoreMessage::TransmitClasses(config, to) => {
                // The requester may have gone.
                let _ = to.send(core.set_transmit_classes(&config));
            }
            CoreMessage::OwnAddresses(to) => {
                // The requester may have gone.
                let _ = to.send(core.server.engine.stack().own_addresses());
            }
            CoreMessage::Drops(to) => {
                // The requester may have gone.
                let _ = to.send(core.server.engine.drops());
            }
            CoreMessage::Medium(to) => {
                // The requester may have gone.
                let _ = to.send(core.server.engine.capabilities().medium);
            }
            CoreMessage::StartCapture(tap, to) => {
                // The requester may have gone.
                let _ = to.send(core.server.engine.start_capture(*tap));
            }
            CoreMessage::EndCapture(number, to) => {
                // The requester has the memory too, and unmaps it.
                core.server.engine.end_capture(number);
                let _ = to.send(());
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
