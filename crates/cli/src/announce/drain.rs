//! `tidegate drain`, and the socket on which `tidegate announce` takes its requests.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::event::Event;
use super::state::AnnounceState;
use crate::Failure;
use crate::control::{ControlSocket, TIMEOUT, read_line, write_line};
use crate::output::print_line;

/// Socket of `tidegate announce`.
pub(crate) const DEFAULT_SOCKET: &str = "/run/tidegate/announce.sock";

/// Time in which routers move the traffic after a withdrawal, in seconds.
const WAIT_SECONDS: f64 = 1.0;

/// Long help of `drain`.
const STEPS: &str = "Before maintenance of a server in a fleet: `tidegate drain`, then the \
maintenance, then `tidegate drain --undo`. `tidegate announce` withdraws the addresses, and the \
routers send new packets to the other servers. The service goes on: packets that are still under \
way are answered.";

/// Flags of `drain`.
#[derive(Args)]
#[command(after_long_help = STEPS)]
pub(crate) struct Drain {
    /// Socket of `tidegate announce`, as given to its --socket
    #[arg(long, value_name = "SOCKET", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Announce the addresses again, once the service is healthy
    #[arg(long)]
    undo: bool,
    /// Print the state and change nothing
    #[arg(long, conflicts_with = "undo")]
    status: bool,
    /// Time to wait after the withdrawal, in which routers move the traffic, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = WAIT_SECONDS)]
    wait: f64,
    /// Print the state as JSON
    #[arg(long)]
    json: bool,
}

/// Request to `tidegate announce`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum DrainRequest {
    Status,
    Drain,
    Undo,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum DrainResponse {
    State(Box<AnnounceState>),
    Refused(String),
}

impl Drain {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let wait = Duration::try_from_secs_f64(self.wait)
            .map_err(|_| format!("--wait {}: give a number of seconds from 0 on", self.wait))?;
        let request = match (self.status, self.undo) {
            (true, _) => DrainRequest::Status,
            (_, true) => DrainRequest::Undo,
            _ => DrainRequest::Drain,
        };
        let state = send(&self.socket, request)?;
        if self.json {
            print_line!("{}", serde_json::to_string(&state)?)?;
        } else {
            print_line!("{state}")?;
        }
        check_routing(&state)?;
        if matches!(request, DrainRequest::Drain) {
            std::thread::sleep(wait);
        }
        Ok(())
    }
}

/// Makes the `tidegate announce` at this socket withdraw the addresses, and waits for the routers.
///
/// # Errors
/// No `tidegate announce` answers, or the routing daemon does not obey.
pub(crate) fn drain(socket: &Path) -> Result<(), Failure> {
    check_routing(&send(socket, DrainRequest::Drain)?)?;
    std::thread::sleep(Duration::from_secs_f64(WAIT_SECONDS));
    Ok(())
}

fn check_routing(state: &AnnounceState) -> Result<(), Failure> {
    match &state.routing_error {
        Some(error) => Err(format!("the routing daemon does not obey: {error}").into()),
        None => Ok(()),
    }
}

fn send(socket: &Path, request: DrainRequest) -> Result<AnnounceState, Failure> {
    let exchange = || -> io::Result<DrainResponse> {
        let mut stream = UnixStream::connect(socket)?;
        // The routing daemon has its own time limits.
        stream.set_read_timeout(Some(4 * TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        write_line(&mut stream, &request)?;
        Ok(serde_json::from_str(&read_line(&stream)?)?)
    };
    let response = exchange().map_err(|error| {
        let socket = socket.display();
        format!("{socket}: {error}; start `tidegate announce` with --socket {socket}")
    })?;
    match response {
        DrainResponse::State(state) => Ok(*state),
        DrainResponse::Refused(reason) => Err(reason.into()),
    }
}

/// Serves the requests of `tidegate drain`, until the returned value is dropped.
///
/// # Errors
/// Another process listens there, or the socket cannot be created.
pub(super) fn listen(path: &Path, events: Sender<Event>) -> Result<ControlSocket, Failure> {
    if path == Path::new(DEFAULT_SOCKET)
        && let Some(folder) = path.parent()
    {
        // A failure is one of the socket, which says more.
        let _ = std::fs::create_dir_all(folder);
    }
    ControlSocket::serve(path, "--socket", move |mut stream| {
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let response = match serde_json::from_str(&read_line(&stream)?) {
            Ok(request) => handle(request, &events),
            Err(error) => DrainResponse::Refused(format!("invalid request: {error}")),
        };
        write_line(&mut stream, &response)
    })
}

fn handle(request: DrainRequest, events: &Sender<Event>) -> DrainResponse {
    let is_drained = match request {
        DrainRequest::Status => None,
        DrainRequest::Drain => Some(true),
        DrainRequest::Undo => Some(false),
    };
    let (reply, state) = channel();
    let sent = events.send(Event::Request(is_drained, reply)).is_ok();
    match state.recv_timeout(4 * TIMEOUT) {
        Ok(state) if sent => DrainResponse::State(Box::new(state)),
        _ => DrainResponse::Refused("`tidegate announce` is busy or ends: try again".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_reach_the_announcer_and_its_state_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("announce.sock");
        let missing = drain(&path).unwrap_err().to_string();
        assert!(missing.contains("start `tidegate announce`"), "{missing}");
        let (events, requests) = channel();
        let socket = listen(&path, events).unwrap();
        std::thread::scope(|scope| {
            let client = scope.spawn(|| send(&path, DrainRequest::Drain).unwrap());
            let Event::Request(is_drained, reply) = requests.recv().unwrap() else { panic!() };
            assert_eq!(is_drained, Some(true));
            let state = AnnounceState { reason: Some("drained".into()), ..Default::default() };
            reply.send(state.clone()).unwrap();
            assert_eq!(client.join().unwrap(), state);
        });
        // The announcer has ended.
        drop(requests);
        let error = drain(&path).unwrap_err().to_string();
        assert!(error.contains("try again"), "{error}");
        drop(socket);
        assert!(!path.exists());
    }
}
