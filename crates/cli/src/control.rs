//! Talking to a server that runs: `tidegate ctl`, and the socket it talks to.
//!
//! One line of JSON there, one back. The socket is a file that only its owner
//! may open.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidegate::Net;
use tidegate::gate::{Config, Settings};
use tidegate_service::daemon::{Controls, GateState};

use crate::Failure;
use crate::report;

/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest line.
const LINE_MAX: u64 = 16 * 1024;

/// Flags of `ctl`.
#[derive(Args)]
pub(crate) struct Ctl {
    /// The socket that the server was given by `--control`
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
    /// Settings of receive scheduling to change, as NAME=VALUE; none shows them all
    #[arg(value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// Let a program go to another network core of the daemon, with those that it shares
    /// sockets or ports with
    #[arg(long = "move", value_name = "PID", requires = "to", conflicts_with = "set")]
    pid: Option<u32>,
    /// The network core for --move, from 0 on
    #[arg(long, value_name = "CORE", requires = "pid")]
    to: Option<usize>,
    /// Print the answer as JSON
    #[arg(long)]
    json: bool,
}

/// What is asked.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
enum Request {
    /// Settings to change; none only asks.
    Set(Vec<(String, String)>),
    /// A program is to be served by another network core.
    Move { pid: u32, core: usize },
}

/// What is answered.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    /// The settings in force, and what the gate counted.
    Gate { settings: Box<Config>, counters: Value, classes: Value },
    /// It is done, or will be in a moment.
    Done,
    /// Nothing was changed, because.
    Refused(String),
}

impl Ctl {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let request = match (self.pid, self.to) {
            (Some(pid), Some(core)) => Request::Move { pid, core },
            _ => Request::Set(self.set.iter().map(|text| pair(text)).collect::<Result<_, _>>()?),
        };
        let answer = ask(&self.socket, &request).map_err(|error| {
            format!(
                "{}: {error}; is a server running that was started with --control {0}?",
                self.socket.display()
            )
        })?;
        match answer {
            Answer::Refused(reason) => Err(reason.into()),
            answer if self.json => {
                println!("{}", serde_json::to_string(&answer)?);
                Ok(())
            }
            Answer::Done => Ok(()),
            Answer::Gate { settings, counters, classes } => {
                print!("{}", toml::to_string(&settings)?);
                for (name, value) in counters.as_object().into_iter().flatten() {
                    println!("# {name} = {value}");
                }
                for (name, class) in classes.as_object().into_iter().flatten() {
                    println!("# class {name}: {class}");
                }
                Ok(())
            }
        }
    }
}

fn pair(text: &str) -> Result<(String, String), Failure> {
    let pair = text.split_once('=');
    let (name, value) = pair.ok_or_else(|| {
        format!("{text}: expected NAME=VALUE, as low-mark-percent=10; `tidegate ctl SOCKET` lists the names")
    })?;
    Ok((name.to_owned(), value.to_owned()))
}

fn ask(socket: &Path, request: &Request) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write_line(&mut stream, request)?;
    Ok(serde_json::from_str(&read_line(&stream)?)?)
}

fn write_line(stream: &mut UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn read_line(stream: &UnixStream) -> io::Result<String> {
    let mut line = String::new();
    BufReader::new(stream.take(LINE_MAX)).read_line(&mut line)?;
    Ok(line)
}

/// What can be changed while it runs.
pub(crate) trait Controlled: Send + 'static {
    /// Receive scheduling, with these settings from now on if there are any.
    fn gate(&self, settings: Option<&Settings>) -> io::Result<GateState>;

    /// A program is to be served by another network core.
    fn move_program(&self, pid: u32, core: usize) -> io::Result<()>;
}

impl Controlled for Net {
    fn gate(&self, settings: Option<&Settings>) -> io::Result<GateState> {
        settings.map_or(Ok(()), |settings| self.set_gate(settings.clone()))?;
        let counters = self.counters();
        Ok(GateState {
            settings: Net::gate(self),
            counters: counters.gate,
            classes: counters.classes,
        })
    }

    fn move_program(&self, _: u32, _: usize) -> io::Result<()> {
        let what = "a server of its own has one network core: --move is for the daemon";
        Err(io::Error::new(io::ErrorKind::Unsupported, what))
    }
}

impl Controlled for Controls {
    fn gate(&self, settings: Option<&Settings>) -> io::Result<GateState> {
        Controls::gate(self, settings)
    }

    fn move_program(&self, pid: u32, core: usize) -> io::Result<()> {
        Controls::move_program(self, pid, core)
    }
}

/// The socket of a server; its thread and its file go when this is dropped.
pub(crate) struct Control {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Listens on `path` and answers for `own` as long as the process lives.
    ///
    /// # Errors
    /// When something else is there, or the folder cannot be written.
    pub(crate) fn listen(path: &Path, own: impl Controlled) -> Result<Self, Failure> {
        if UnixStream::connect(path).is_ok() {
            return Err(
                format!("--control {}: another server listens there", path.display()).into()
            );
        }
        Self::replace(path, own)
    }

    /// As [`Control::listen`], in the place of whoever listens there.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(crate) fn replace(path: &Path, own: impl Controlled) -> Result<Self, Failure> {
        let fail = |error: io::Error| format!("--control {}: {error}", path.display());
        // What a server left that was killed.
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fail(error).into()),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(fail)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(fail)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("control".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                // Whoever hangs up or says nothing has had his answer.
                let _ = stream.and_then(|stream| answer(stream, &own));
            }
        })?;
        Ok(Self { path: path.to_owned(), stop, thread: Some(thread) })
    }
}

impl Control {
    /// The file is another one's now, who goes on in our place.
    pub(crate) fn leave(self) {
        // Its thread ends with the process.
        std::mem::forget(self);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // The thread waits for a connection: this is its last. Without one it
        // could not be waited for.
        let woken = UnixStream::connect(&self.path).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
        // Nothing can be done about a file that somebody else removed.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn answer(mut stream: UnixStream, own: &impl Controlled) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let done = match serde_json::from_str(&read_line(&stream)?) {
        Ok(Request::Set(pairs)) => change(own, &pairs),
        Ok(Request::Move { pid, core }) => {
            own.move_program(pid, core).map(|()| Answer::Done).map_err(Failure::from)
        }
        Err(error) => Err(format!("no request: {error}").into()),
    };
    write_line(&mut stream, &done.unwrap_or_else(|reason| Answer::Refused(reason.to_string())))
}

/// Changes all the settings, or none of them.
fn change(own: &impl Controlled, pairs: &[(String, String)]) -> Result<Answer, Failure> {
    let mut state = own.gate(None)?;
    if !pairs.is_empty() {
        let mut config = serde_json::to_value(state.settings.config())?;
        for (name, text) in pairs {
            let slot = config.get_mut(name).ok_or_else(|| {
                format!("there is no setting {name}; `tidegate ctl SOCKET` lists them")
            })?;
            *slot = serde_json::from_str(text).unwrap_or_else(|_| json!(text));
        }
        let config: Config = serde_json::from_value(config)?;
        state = own.gate(Some(&Settings::new(config)?))?;
    }
    Ok(Answer::Gate {
        settings: Box::new(state.settings.config().clone()),
        counters: report::gate_json(&state.counters),
        classes: report::classes_json(&state.classes),
    })
}

#[cfg(test)]
mod tests {
    use tidegate::mem::{MemConfig, wire};
    use tidegate::{FrameSize, NetConfig};

    use super::*;

    fn net() -> Net {
        let (port, _) = wire(&MemConfig::default()).unwrap();
        let config = NetConfig::new(port)
            .address("192.0.2.1/24".parse().unwrap())
            .frames(64, FrameSize::K2)
            .hugepages(false);
        Net::open(config).unwrap()
    }

    fn set(path: &Path, pairs: &[(&str, &str)]) -> Answer {
        let pairs = pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
        ask(path, &Request::Set(pairs.collect())).unwrap()
    }

    #[test]
    fn settings_are_shown_changed_and_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let net = net();
        let control = Control::listen(&path, net.clone()).unwrap();
        assert!(Control::listen(&path, net.clone()).is_err(), "two servers on one socket");
        assert!(matches!(set(&path, &[]), Answer::Gate { .. }));

        let pairs = [("receive-quota", "7"), ("transmit-quota", "unlimited")];
        let Answer::Gate { settings, .. } = set(&path, &pairs) else { panic!("refused") };
        assert_eq!(settings.receive_quota.packets(), 7);
        assert_eq!(settings.transmit_quota.packets(), u32::MAX);

        let refusals = [
            (vec![("receive-quota", "9"), ("low-mark-percent", "99")], "must be below"),
            (vec![("quota", "9")], "no setting quota"),
            (vec![("receive-quota", "many")], "number of packets"),
            (vec![("mode", "dedicated")], "start again"),
        ];
        for (pairs, words) in refusals {
            let Answer::Refused(reason) = set(&path, &pairs) else { panic!("not refused") };
            assert!(reason.contains(words), "{reason}");
        }
        let moved = ask(&path, &Request::Move { pid: 1, core: 0 }).unwrap();
        assert!(matches!(moved, Answer::Refused(reason) if reason.contains("daemon")));
        assert_eq!(net.gate().config().receive_quota.packets(), 7, "all or nothing");

        // Somebody who says nothing sensible harms nobody.
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(b"\xff\xfe{{{\n").unwrap();
        drop(stream);
        assert!(matches!(set(&path, &[]), Answer::Gate { .. }));
        drop(control);
        assert!(!path.exists());
    }
}
