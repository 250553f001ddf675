//! Programs of local ports, for transmit classes that name a program or a user.

use std::io;

use tidegate_gate::transmit::Config;
use tidegate_stack::Transport;

use super::NetworkCore;
use super::server::SocketServer;
use crate::daemon::ids::{Identity, SocketKey, StackSocketId};

impl SocketServer {
    /// Tells the transmit classes whose packets come from the port of a socket.
    pub(super) fn set_port_program(&mut self, identity: &Identity, key: SocketKey) {
        if !self.engine.stack().has_transmit_classes() {
            return;
        }
        let Some(socket) = self.sockets.get(key) else { return };
        let Some(local) = socket.local_addr(&self.engine) else { return };
        let transport = match socket.id() {
            StackSocketId::Udp(_) => Transport::Udp,
            StackSocketId::Listener(_) | StackSocketId::Stream(_) => Transport::Tcp,
        };
        let (stack, _, _) = self.engine.parts();
        stack.set_port_program(transport, local.port(), identity.as_program());
    }
}

impl NetworkCore {
    /// Sends by transmit classes from now on, or by others.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the configuration is invalid.
    pub(in crate::daemon) fn set_transmit_classes(&mut self, config: &Config) -> io::Result<()> {
        self.server.engine.change_transmit_classes(config)?;
        let apps = self.apps.iter().flatten();
        let keys: Vec<_> = apps.flat_map(|app| app.sockets().map(|(_, key)| key)).collect();
        self.set_port_programs(keys.into_iter());
        Ok(())
    }

    /// Tells the transmit classes the programs of sockets: of all when the classes are new, else of those
    /// that come from another core or another daemon.
    pub(in crate::daemon) fn set_port_programs(&mut self, keys: impl Iterator<Item = SocketKey>) {
        for key in keys {
            let holders = self.server.sockets.get(key).map_or(&[][..], |socket| socket.holders());
            let number = holders.first().map(|holder| holder.app as usize);
            let app = number.and_then(|number| self.apps.get(number)?.as_ref());
            if let Some(app) = app {
                self.server.set_port_program(&app.identity, key);
            }
        }
    }
}
