//! `tidegate ctl` and the control socket of a running server.
//!
//! Protocol: one line of JSON as request, one line of JSON as response. The socket
//! file has mode 0600, so that only its owner can open it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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
use tidegate::capture::CaptureRequest;
use tidegate::gate::{Config, Settings, admission, transmit};
use tidegate_service::daemon::{Controls, DaemonReport, GateState};
use tidegate_service::{receive_with_fds, send_with_fds};
use tidegate_wire::Medium;

use crate::capture::{CaptureInfo, CaptureSessions, CaptureSettings};
use crate::controllable::Controllable;
use crate::health_check::HealthCheck;
use crate::output::{print, print_line};
use crate::report;
use crate::{Failure, capture, server_report};

/// Read and write timeout of both ends of the control socket.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time that a check of the service may take, for all the other requests wait.
const MAX_CHECK_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum length of a request line, in bytes.
const MAX_LINE_BYTES: usize = 64 * 1024;
/// Maximum length of a response line, in bytes: the report of a server with many sockets.
const MAX_RESPONSE_BYTES: u64 = 1 << 30;

/// Flags of `ctl`.
#[derive(Args)]
pub(crate) struct Ctl {
    /// Control socket of the server, as given to its `--control`
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
    /// Receive scheduling settings to change, as NAME=VALUE; without any, all are listed
    #[arg(value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// Migrate the application with this process id to another network core of the daemon,
    /// together with the processes that share sockets or ports with it; needs --to
    #[arg(long = "move", value_name = "PID", requires = "to", conflicts_with = "set")]
    pid: Option<u32>,
    /// Target network core of --move, counted from 0
    #[arg(long, value_name = "CORE", requires = "pid")]
    to: Option<usize>,
    /// Print the response as JSON
    #[arg(long)]
    json: bool,
}

/// Request to a running server.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
enum Request {
    /// Settings to change, as name and value; an empty list only queries them.
    Set(Vec<(String, String)>),
    /// Migrates the application with this process id to another network core.
    Move { pid: u32, core: usize },
    /// Checks the service on an address of the stack, through the stack.
    Check { check: HealthCheck, address: IpAddr, timeout_ms: u64 },
    /// Returns the sockets and counters.
    Report,
    /// Facts that a capture needs.
    CaptureInfo,
    /// Begins a capture into the memory whose descriptor comes along; it ends with the connection.
    Capture(CaptureSettings),
}

/// Response of a running server.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Response {
    /// Settings in force, and the counters of the gate, of the admission classes and of the transmit
    /// classes.
    Gate {
        settings: Box<Config>,
        counters: Value,
        classes: Value,
        #[serde(default)]
        transmit_classes: Value,
    },
    /// The request was accepted: carried out now or shortly after.
    Done,
    /// Sockets and counters.
    Report(Box<DaemonReport>),
    /// Facts that a capture needs.
    CaptureInfo(CaptureInfo),
    /// The request was refused for this reason; nothing was changed.
    Refused(String),
}

impl Ctl {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let request = match (self.pid, self.to) {
            (Some(pid), Some(core)) => Request::Move { pid, core },
            _ => Request::Set(
                self.set.iter().map(|text| parse_setting(text)).collect::<Result<_, _>>()?,
            ),
        };
        match ask(&self.socket, &request)? {
            Response::Refused(reason) => Err(reason.into()),
            response if self.json => {
                print_line!("{}", serde_json::to_string(&response)?)?;
                Ok(())
            }
            Response::Done | Response::Report(_) | Response::CaptureInfo(_) => Ok(()),
            Response::Gate { settings, counters, classes, transmit_classes } => {
                print(format_args!("{}", toml::to_string(&settings)?))?;
                for (name, value) in counters.as_object().into_iter().flatten() {
                    print_line!("# {name} = {value}")?;
                }
                for (name, class) in classes.as_object().into_iter().flatten() {
                    print_line!("# class {name}: {class}")?;
                }
                for (name, class) in transmit_classes.as_object().into_iter().flatten() {
                    print_line!("# transmit class {name}: {class}")?;
                }
                Ok(())
            }
        }
    }
}

fn parse_setting(text: &str) -> Result<(String, String), Failure> {
    let parts = text.split_once('=');
    let (name, value) = parts.ok_or_else(|| {
        format!("{text}: expected NAME=VALUE, as low-mark-percent=10; `tidegate ctl SOCKET` lists the names")
    })?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Returns the state of the server with this control socket, as JSON.
pub(crate) fn query(socket: &Path) -> Result<Value, Failure> {
    Ok(serde_json::to_value(send_request(socket, &Request::Set(Vec::new()))?)?)
}

/// Makes the server with this control socket check its own service, through its stack.
///
/// # Errors
/// The check fails, or the server does not answer.
pub(crate) fn check_service(
    socket: &Path,
    check: &HealthCheck,
    address: IpAddr,
    timeout: Duration,
) -> Result<(), String> {
    let timeout_ms = timeout.as_millis() as u64;
    let request = Request::Check { check: check.clone(), address, timeout_ms };
    match send_request_within(socket, &request, TIMEOUT + timeout) {
        Ok(Response::Refused(reason)) => Err(reason),
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{}: {error}", socket.display())),
    }
}

/// Report of the server with this control socket.
pub(crate) fn report(socket: &Path) -> Result<DaemonReport, Failure> {
    match ask(socket, &Request::Report)? {
        Response::Report(report) => Ok(*report),
        Response::Refused(reason) => Err(reason.into()),
        _ => Err("the server is of another version of Tidegate".into()),
    }
}

/// Sends a request; explains why if there is no response.
fn ask(socket: &Path, request: &Request) -> Result<Response, Failure> {
    send_request(socket, request).map_err(|error| {
        format!("{}: {error}; start the server with --control {0}", socket.display()).into()
    })
}

/// Facts that a capture of the server with this control socket needs.
pub(crate) fn capture_info(socket: &Path) -> Result<CaptureInfo, Failure> {
    match ask(socket, &Request::CaptureInfo)? {
        Response::CaptureInfo(info) => Ok(info),
        Response::Refused(reason) => Err(reason.into()),
        _ => Err("the server is of another version of Tidegate".into()),
    }
}

/// Begins a capture into `memory`. It ends when the returned connection is closed.
pub(crate) fn start_capture(
    socket: &Path,
    settings: CaptureSettings,
    memory: BorrowedFd<'_>,
) -> Result<UnixStream, Failure> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut line = serde_json::to_vec(&Request::Capture(settings))?;
    line.push(b'\n');
    send_with_fds(stream.as_fd(), &line, &[memory])?;
    match serde_json::from_str(&read_line(&stream)?)? {
        Response::Done => Ok(stream),
        Response::Refused(reason) => Err(reason.into()),
        _ => Err("the server is of another version of Tidegate".into()),
    }
}

fn send_request(socket: &Path, request: &Request) -> io::Result<Response> {
    send_request_within(socket, request, TIMEOUT)
}

fn send_request_within(
    socket: &Path,
    request: &Request,
    timeout: Duration,
) -> io::Result<Response> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    write_line(&mut stream, request)?;
    Ok(serde_json::from_str(&read_line(&stream)?)?)
}

/// Writes a request or a response.
pub(crate) fn write_line(stream: &mut UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Reads a request or a response.
pub(crate) fn read_line(stream: &UnixStream) -> io::Result<String> {
    let mut line = String::new();
    BufReader::new(stream.take(MAX_RESPONSE_BYTES)).read_line(&mut line)?;
    Ok(line)
}

/// Receives a line of a request, and the descriptor that comes along if there is one.
fn receive_line(stream: &UnixStream) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let (mut line, mut buffer, mut fd) = (Vec::new(), [0; 4096], None);
    while line.last() != Some(&b'\n') && line.len() < MAX_LINE_BYTES {
        let (len, fds) = receive_with_fds(stream.as_fd(), &mut buffer, 1)?;
        if len == 0 {
            break;
        }
        line.extend_from_slice(&buffer[..len]);
        fd = fd.or(fds.into_iter().next());
    }
    Ok((line, fd))
}

impl Controllable for Net {
    fn core_count(&self) -> usize {
        1
    }

    fn medium(&self) -> io::Result<Medium> {
        Ok(self.capabilities().medium)
    }

    fn report(&self) -> io::Result<DaemonReport> {
        Ok(server_report::of_server(std::slice::from_ref(self)))
    }

    fn start_capture(&self, request: &CaptureRequest) -> io::Result<()> {
        Net::start_capture(self, request, 0)
    }

    fn end_capture(&self, number: u64) {
        Net::end_capture(self, number);
    }

    fn gate(&self, settings: Option<&Settings>) -> io::Result<GateState> {
        settings.map_or(Ok(()), |settings| self.set_gate(settings.clone()))?;
        let counters = self.counters();
        Ok(GateState {
            settings: Net::gate(self),
            counters: counters.gate,
            classes: counters.classes,
            limit_pps: counters.admission_limit_pps,
            transmit_classes: counters.transmit_classes,
        })
    }

    fn set_admission(&self, classes: &admission::Config) -> io::Result<()> {
        Net::set_admission(self, classes)
    }

    fn set_transmit_classes(&self, classes: &transmit::Config) -> io::Result<()> {
        Net::set_transmit_classes(self, classes)
    }

    fn move_process(&self, _: u32, _: usize) -> io::Result<()> {
        let reason =
            "a server without the daemon serves no applications: use --move only with the daemon";
        Err(io::Error::new(io::ErrorKind::Unsupported, reason))
    }

    fn check_service(
        &self,
        check: &HealthCheck,
        address: IpAddr,
        timeout: Duration,
    ) -> Result<(), String> {
        check.run(self, address, timeout)
    }
}

/// Stacks of a server with several network cores, the first one's first.
#[derive(Clone)]
pub(crate) struct NetCores(pub(crate) Vec<Net>);

impl Controllable for NetCores {
    fn core_count(&self) -> usize {
        self.0.len()
    }

    fn medium(&self) -> io::Result<Medium> {
        self.0.first().map_or(Ok(Medium::Ethernet), Controllable::medium)
    }

    fn report(&self) -> io::Result<DaemonReport> {
        Ok(server_report::of_server(&self.0))
    }

    fn start_capture(&self, request: &CaptureRequest) -> io::Result<()> {
        let mut cores = self.0.iter().enumerate();
        cores.try_for_each(|(core, net)| net.start_capture(request, core))
    }

    fn end_capture(&self, number: u64) {
        self.0.iter().for_each(|net| net.end_capture(number));
    }

    fn gate(&self, settings: Option<&Settings>) -> io::Result<GateState> {
        let mut states = self.0.iter().map(|net| Controllable::gate(net, settings));
        let mut all = states.next().unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))?;
        for state in states {
            all.add(&state?);
        }
        Ok(all)
    }

    /// The first core refuses frames for all.
    fn set_admission(&self, classes: &admission::Config) -> io::Result<()> {
        self.0.first().map_or(Ok(()), |net| net.set_admission(classes))
    }

    fn set_transmit_classes(&self, classes: &transmit::Config) -> io::Result<()> {
        let part = classes.clone().divided(self.0.len());
        self.0.iter().try_for_each(|net| net.set_transmit_classes(&part))
    }

    fn move_process(&self, pid: u32, core: usize) -> io::Result<()> {
        self.0.first().map_or(Ok(()), |net| net.move_process(pid, core))
    }

    fn check_service(
        &self,
        check: &HealthCheck,
        address: IpAddr,
        timeout: Duration,
    ) -> Result<(), String> {
        self.0.iter().try_for_each(|net| check.run(net, address, timeout))
    }
}

impl Controllable for Controls {
    fn core_count(&self) -> usize {
        Controls::core_count(self)
    }

    fn medium(&self) -> io::Result<Medium> {
        Controls::medium(self)
    }

    fn has_programs(&self) -> bool {
        true
    }

    fn report(&self) -> io::Result<DaemonReport> {
        Controls::report(self)
    }

    fn start_capture(&self, request: &CaptureRequest) -> io::Result<()> {
        Controls::start_capture(self, request)
    }

    fn end_capture(&self, number: u64) {
        Controls::end_capture(self, number);
    }

    fn gate(&self, settings: Option<&Settings>) -> io::Result<GateState> {
        Controls::gate(self, settings)
    }

    fn set_admission(&self, classes: &admission::Config) -> io::Result<()> {
        Controls::set_admission(self, classes)
    }

    fn set_transmit_classes(&self, classes: &transmit::Config) -> io::Result<()> {
        Controls::set_transmit_classes(self, classes)
    }

    fn move_process(&self, pid: u32, core: usize) -> io::Result<()> {
        Controls::move_process(self, pid, core)
    }

    fn check_service(&self, _: &HealthCheck, _: IpAddr, _: Duration) -> Result<(), String> {
        Err("the daemon serves no port itself: check its programs with --check-through daemon"
            .into())
    }
}

/// Control socket of a server. Dropping it stops its thread and removes its file.
pub(crate) struct ControlSocket {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ControlSocket {
    /// Listens on `path` and answers requests for `server` until dropped.
    ///
    /// # Errors
    /// When another server listens on `path`, or the socket file cannot be created.
    pub(crate) fn listen(path: &Path, server: impl Controllable) -> Result<Self, Failure> {
        if UnixStream::connect(path).is_ok() {
            return Err(
                format!("--control {}: another server listens there", path.display()).into()
            );
        }
        Self::replace(path, server)
    }

    /// Listens on `path` and answers each connection by `respond` until dropped. `flag` has given
    /// the path.
    ///
    /// # Errors
    /// As [`ControlSocket::listen`].
    pub(crate) fn serve(
        path: &Path,
        flag: &str,
        respond: impl FnMut(UnixStream) -> io::Result<()> + Send + 'static,
    ) -> Result<Self, Failure> {
        if UnixStream::connect(path).is_ok() {
            return Err(format!("{flag} {}: another process listens there", path.display()).into());
        }
        Self::replace_by(path, flag, respond)
    }

    /// Listens on `path` as [`ControlSocket::listen`] does, and replaces a server that listens
    /// there.
    ///
    /// # Errors
    /// When the socket file cannot be created.
    pub(crate) fn replace(path: &Path, server: impl Controllable) -> Result<Self, Failure> {
        let (server, mut captures) = (Arc::new(server), CaptureSessions::default());
        Self::replace_by(path, "--control", move |stream| respond(stream, &server, &mut captures))
    }

    fn replace_by(
        path: &Path,
        flag: &str,
        mut respond: impl FnMut(UnixStream) -> io::Result<()> + Send + 'static,
    ) -> Result<Self, Failure> {
        let fail = |error: io::Error| format!("{flag} {}: {error}", path.display());
        // Stale socket file of a server that was killed.
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
                // A client that disconnects or times out needs no error report.
                let _ = stream.and_then(&mut respond);
            }
        })?;
        Ok(Self { path: path.to_owned(), stop, thread: Some(thread) })
    }
}

impl ControlSocket {
    /// Leaves the socket file in place: it belongs to the daemon that takes over.
    pub(crate) fn hand_over(self) {
        // The thread ends with the process.
        std::mem::forget(self);
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // The thread blocks in accept: this last connection wakes it. Without the connection
        // a join would never return.
        let woken = UnixStream::connect(&self.path).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
        // The file may have been removed already; that is no error here.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn respond<S: Controllable>(
    mut stream: UnixStream,
    server: &Arc<S>,
    captures: &mut CaptureSessions,
) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let (line, fd) = receive_line(&stream)?;
    let response = match serde_json::from_slice(&line) {
        Ok(Request::Set(pairs)) => apply_settings(&**server, &pairs),
        Ok(Request::Move { pid, core }) => {
            server.move_process(pid, core).map(|()| Response::Done).map_err(Failure::from)
        }
        Ok(Request::Check { check, address, timeout_ms }) => {
            let timeout = Duration::from_millis(timeout_ms).min(MAX_CHECK_TIMEOUT);
            let result = server.check_service(&check, address, timeout);
            result.map(|()| Response::Done).map_err(Failure::from)
        }
        Ok(Request::Report) => {
            server.report().map(|report| Response::Report(Box::new(report))).map_err(Failure::from)
        }
        Ok(Request::CaptureInfo) => capture::info(&**server).map(Response::CaptureInfo),
        Ok(Request::Capture(settings)) => {
            captures.start(&stream, server, settings, fd).map(|()| Response::Done)
        }
        Err(error) => Err(format!("invalid request: {error}").into()),
    };
    write_line(
        &mut stream,
        &response.unwrap_or_else(|reason| Response::Refused(reason.to_string())),
    )
}

/// Applies all the settings, or none of them; returns the settings in force.
fn apply_settings(
    server: &impl Controllable,
    pairs: &[(String, String)],
) -> Result<Response, Failure> {
    let mut state = server.gate(None)?;
    if !pairs.is_empty() {
        let mut config = serde_json::to_value(state.settings.config())?;
        for (name, text) in pairs {
            let slot = config.get_mut(name).ok_or_else(|| {
                format!("there is no setting {name}; `tidegate ctl SOCKET` lists them")
            })?;
            *slot = serde_json::from_str(text).unwrap_or_else(|_| json!(text));
        }
        let config: Config = serde_json::from_value(config)?;
        state = server.gate(Some(&Settings::new(config)?))?;
    }
    Ok(Response::Gate {
        settings: Box::new(state.settings.config().clone()),
        counters: report::gate_json(&state.counters),
        classes: report::classes_json(&state.classes),
        transmit_classes: report::transmit_classes_json(&state.transmit_classes),
    })
}

#[cfg(test)]
mod tests {
    use tidegate::mem::{MemConfig, wire};
    use tidegate::{FrameSize, NetConfig};

    use super::*;

    fn net() -> Net {
        let (device, _) = wire(&MemConfig::default()).unwrap();
        let config = NetConfig::new(device)
            .address("192.0.2.1/24".parse().unwrap())
            .frames(64, FrameSize::K2)
            .hugepages(false);
        Net::open(config).unwrap()
    }

    fn set(path: &Path, pairs: &[(&str, &str)]) -> Response {
        let pairs = pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
        send_request(path, &Request::Set(pairs.collect())).unwrap()
    }

    #[test]
    fn shows_changes_and_refuses_settings() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let net = net();
        let control = ControlSocket::listen(&path, net.clone()).unwrap();
        assert!(ControlSocket::listen(&path, net.clone()).is_err(), "two servers on one socket");
        assert!(matches!(set(&path, &[]), Response::Gate { .. }));

        let pairs = [("receive-quota", "7"), ("transmit-quota", "unlimited")];
        let Response::Gate { settings, .. } = set(&path, &pairs) else { panic!("refused") };
        assert_eq!(settings.receive_quota.packets(), 7);
        assert_eq!(settings.transmit_quota.packets(), u32::MAX);

        let refusals = [
            (vec![("receive-quota", "9"), ("low-mark-percent", "99")], "must be below"),
            (vec![("quota", "9")], "no setting quota"),
            (vec![("receive-quota", "many")], "number of packets"),
            (vec![("mode", "dedicated")], "restart it"),
        ];
        for (pairs, words) in refusals {
            let Response::Refused(reason) = set(&path, &pairs) else { panic!("not refused") };
            assert!(reason.contains(words), "{reason}");
        }
        let check = "tcp:9".parse().unwrap();
        let address = "192.0.2.1".parse().unwrap();
        let closed = check_service(&path, &check, address, Duration::from_secs(1));
        assert!(closed.unwrap_err().contains("refused"), "no service at the port");
        let listener = tidegate::TcpListener::bind(&net, "192.0.2.1:9").unwrap();
        check_service(&path, &check, address, Duration::from_secs(1)).unwrap();
        drop(listener);
        let moved = send_request(&path, &Request::Move { pid: 1, core: 0 }).unwrap();
        assert!(matches!(moved, Response::Refused(reason) if reason.contains("daemon")));
        assert_eq!(net.gate().config().receive_quota.packets(), 7, "all or nothing");

        // A malformed request does not affect other clients.
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(b"\xff\xfe{{{\n").unwrap();
        drop(stream);
        assert!(matches!(set(&path, &[]), Response::Gate { .. }));
        drop(control);
        assert!(!path.exists());
    }
}
