//! Admission of an application to a network core.

use std::io;
use std::os::fd::AsFd;

use crate::daemon::application::Application;
use crate::daemon::core::NetworkCore;
use crate::daemon::core::message::CoreMessage;
use crate::daemon::ids::AppNumber;
use crate::ipc::handshake::{send_refusal, send_welcome};

impl NetworkCore {
    /// Attaches an application. A fork child is forwarded until the core of its parent is found:
    /// `asked_cores` cores do not have the parent.
    pub(in crate::daemon) fn attach(
        &mut self,
        app: Box<Application>,
        asked_cores: usize,
    ) -> io::Result<()> {
        let identity = app.identity.clone();
        if app.parent_token.is_none() {
            (self.log)(&format!("{identity} attached"));
            // `Cores::admit` has counted the application.
            self.insert_application(app);
            return Ok(());
        }
        let count = self.cores.count();
        if self.parent_of(&app).is_none() && count > 1 && asked_cores < self.cores.max_hops() {
            let next = (self.index + 1) % count;
            self.cores.recount_application(self.index, next);
            return self.cores.inbox(next).send(CoreMessage::Attach(app, asked_cores + 1));
        }
        let number = self.insert_application(app);
        match self.inherit_sockets(number) {
            Ok(()) => (self.log)(&format!("a fork child of {identity} attached")),
            Err(why) => {
                (self.log)(&format!("a fork child of {} was rejected: {why}", identity.name));
                if let Some(Some(app)) = self.apps.get(number as usize) {
                    app.connection().run(move |connection| {
                        // The child may be gone.
                        let _ = send_refusal(connection.as_fd(), &why.to_string());
                    });
                }
                self.detach(number);
            }
        }
        Ok(())
    }

    /// Application of the same user whose takeover token the fork child presented.
    fn parent_of(&self, child: &Application) -> Option<AppNumber> {
        let token = child.parent_token?;
        let is_parent = |app: &Option<Box<Application>>| {
            let app = app.as_ref();
            app.is_some_and(|app| app.token.ct_eq(&token) && app.identity.uid == child.identity.uid)
        };
        Some(self.apps.iter().position(is_parent)? as AppNumber)
    }

    /// Gives a fork child the sockets of its parent.
    fn inherit_sockets(&mut self, number: AppNumber) -> io::Result<()> {
        let no_parent = || io::Error::other("no application of this user has this takeover token");
        let mut child = self.apps[number as usize].take().ok_or_else(no_parent)?;
        let parent = self.parent_of(&child).and_then(|parent| self.apps[parent as usize].as_ref());
        let inherited = match parent {
            Some(parent) => self.server.inherit(number, &mut child, parent),
            None => Err(no_parent()),
        };
        if inherited.is_ok() {
            let welcome = child.welcome(self.cores.count());
            let protocol = child.identity.library.protocol;
            child.connection().run(move |connection| {
                // A child that misses the welcome has gone; the next check finds that out.
                let _ = send_welcome(connection.as_fd(), protocol, &welcome);
            });
        }
        self.apps[number as usize] = Some(child);
        inherited
    }
}
