//! A daemon with several network cores, and programs that go from one to another
//! while they serve.

mod support;

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::run::Daemon;
use support::{Kind, SERVER_V4, SERVER_V6, Site, can};

const REDIS: [&str; 7] =
    ["redis-server", "--save", "", "--protected-mode", "no", "--bind", "0.0.0.0 ::"];

const LIMIT: Duration = Duration::from_secs(60);

fn said(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{}: {out}{err}", output.status)
}

/// `tidegate ctl` of a daemon.
fn ctl(site: &Site, control: &Path, arguments: &[&str]) -> Output {
    let mut command = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("ctl").arg(control).args(arguments).output().unwrap()
}

/// The process and the core of each program of this name.
fn programs(daemon: &Daemon<'_>, name: &str) -> Vec<(u64, u64)> {
    let report = daemon.sockets();
    let apps = report["applications"].as_array().unwrap();
    let is_it = |app: &&Value| app["identity"]["name"].as_str().unwrap().contains(name);
    let place = |app: &Value| (app["identity"]["pid"].as_u64(), app["core"].as_u64());
    let places = apps.iter().filter(is_it).map(place);
    places.map(|(pid, core)| (pid.unwrap(), core.unwrap())).collect()
}

fn move_and_wait(daemon: &Daemon<'_>, site: &Site, control: &Path, name: &str, core: u64) {
    let [(pid, _)] = programs(daemon, name)[..] else { panic!("there is one {name}") };
    let (pid, to) = (pid.to_string(), core.to_string());
    let moved = ctl(site, control, &["--move", &pid, "--to", &to]);
    assert!(moved.status.success(), "{}", said(&moved));
    let began = Instant::now();
    while programs(daemon, name)[0].1 != core {
        assert!(began.elapsed() < LIMIT, "{name} does not arrive at core {core}");
    }
}

fn benchmark(site: &Site, host: &str) -> Command {
    let mut command = site.client().command("redis-benchmark");
    command.args(["-h", host, "-c", "20", "-n", "20000", "-q", "-t", "set,get,lrange_100"]);
    command
}

#[test]
fn programs_move_between_cores_while_they_serve() {
    if !can("cores", &["redis-server", "redis-benchmark", "memcached", "nc"]) {
        return;
    }
    for port in ["xdp", "packet"] {
        let site = Site::new(if port == "xdp" { Kind::Xdp } else { Kind::Packet });
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control");
        let flags = ["--port", port, "--cores", "2", "--control", control.to_str().unwrap()];
        let daemon = Daemon::start(&site, &flags);
        let _redis = daemon.run_server(&REDIS, 6379);
        let _memcached =
            daemon.run_server(&["memcached", "-u", "root", "-l", "0.0.0.0,::", "-U", "0"], 11211);
        let (redis, memcached) = (programs(&daemon, "redis"), programs(&daemon, "memcached"));
        assert_ne!(redis[0].1, memcached[0].1, "each has a core of its own");
        for host in [SERVER_V4, SERVER_V6] {
            let mut load = benchmark(&site, host);
            let load = load.stdout(std::process::Stdio::piped());
            let mut load = load.stderr(std::process::Stdio::piped()).spawn().unwrap();
            let mut moves = 0;
            while load.try_wait().unwrap().is_none() {
                move_and_wait(&daemon, &site, &control, "redis", moves % 2);
                moves += 1;
            }
            let output = load.wait_with_output().unwrap();
            let text = said(&output);
            assert!(output.status.success() && text.contains("requests per second"), "{text}");
            assert!(!text.contains("rror"), "{text}");
            assert!(moves >= 2, "it was over before anybody moved");
        }
        // Receive scheduling is the same on all cores, and is changed on all.
        let shown = ctl(&site, &control, &["receive-quota=7", "--json"]);
        let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
        assert_eq!(shown["gate"]["settings"]["receive-quota"], 7, "{shown}");
        let [(pid, _)] = programs(&daemon, "redis")[..] else { panic!("there is one") };
        let nowhere = ctl(&site, &control, &["--move", &pid.to_string(), "--to", "2"]);
        assert!(said(&nowhere).contains("they are 0 to 1"), "{}", said(&nowhere));
    }
}

#[test]
fn several_cores_need_an_address_of_their_own() {
    if !can("cores", &[]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let mut command = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let folder = tempfile::tempdir().unwrap();
    command.args(["serve", "--cores", "1-2", "--shared", "--iface", site.device(), "--socket"]);
    let refused = command.arg(folder.path().join("daemon.sock")).output().unwrap();
    assert!(said(&refused).contains("one network core"), "{}", said(&refused));
}
