//! Interfaces are as they were, however a process ends.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use support::run::ChildProcess;
use support::{DeviceKind, Testbed, can_run, wait_until};

/// Settings that AF_XDP devices change.
const FILES: [&str; 2] = ["napi_defer_hard_irqs", "gro_flush_timeout"];

/// Contents of the files on the server's interface.
fn settings(testbed: &Testbed) -> [String; 2] {
    let folder = Path::new("/sys/class/net").join(testbed.device());
    let read = || FILES.map(|name| fs::read_to_string(folder.join(name)).unwrap());
    testbed.server().enter(read).unwrap()
}

fn send(process: u32, signal: Signal) {
    kill_process(Pid::from_raw(process as i32).unwrap(), signal).unwrap();
}

/// Process IDs of the restorers of a process: its descriptor is their standard error.
fn restorers_of(process: u32) -> Vec<u32> {
    let is_restorer = |id: &u32| {
        let read = |file: &str| fs::read_to_string(format!("/proc/{id}/{file}"));
        read("comm").is_ok_and(|name| name == "tg-restorer\n")
            && read("fdinfo/2").is_ok_and(|info| {
                let mut lines = info.lines().filter_map(|line| line.strip_prefix("Pid:"));
                lines.any(|id| id.trim() == process.to_string())
            })
    };
    let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    names.filter_map(|name| name.to_str()?.parse().ok()).filter(is_restorer).collect()
}

/// Kills a server and all its restorers at once.
fn kill_all(server: u32) {
    wait_until("the restorer has a standby", || restorers_of(server).len() == 2);
    let restorers = restorers_of(server);
    // A stopped restorer cannot replace the one that is killed first.
    restorers.iter().for_each(|&restorer| send(restorer, Signal::STOP));
    send(server, Signal::KILL);
    restorers.iter().for_each(|&restorer| send(restorer, Signal::KILL));
    wait_until("the restorers are gone", || restorers_of(server).is_empty());
}

#[test]
fn killed_program_with_an_embedded_stack_leaves_nothing_behind() {
    if !can_run("left behind by a program", &["python3"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let before = settings(&testbed);
    let script = "import socket,time\n\
                  s=socket.create_server(('0.0.0.0',7000)); time.sleep(3600)";
    let mut command = testbed.run(&[], &["python3", "-c", script]);
    let program = ChildProcess::new(&mut command);
    wait_until("the program has restorers", || restorers_of(program.pid()).len() == 2);
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", program.pid()));
    assert_eq!(children.unwrap_or_default(), "", "restorers are no children of the program");
    drop(program);
    wait_until("the settings are restored", || settings(&testbed) == before);
}

#[test]
fn killed_restorers_are_replaced() {
    if !can_run("restorers", &[]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let before = settings(&testbed);
    let server = testbed.serve(DeviceKind::Xdp, &["echo"]);
    let id = server.pid().as_raw_pid() as u32;
    for victim in [0, 1, 0, 1] {
        wait_until("the server has two restorers", || restorers_of(id).len() == 2);
        let old = restorers_of(id);
        send(old[victim], Signal::KILL);
        wait_until("the restorer is replaced", || {
            let now = restorers_of(id);
            now.len() == 2 && !now.contains(&old[victim])
        });
    }
    server.kill();
    wait_until("the settings are restored", || settings(&testbed) == before);
    wait_until("the restorers have ended", || restorers_of(id).is_empty());
}

#[test]
fn doctor_and_the_next_server_restore_what_was_left_behind() {
    if !can_run("restored by the next", &[]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let before = settings(&testbed);
    let doctor = || {
        let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        let output = command.args(["doctor", "--iface", testbed.device()]).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let leave_behind = || {
        let server = testbed.serve(DeviceKind::Xdp, &["echo"]);
        let id = server.pid().as_raw_pid() as u32;
        let report = doctor();
        assert!(!report.contains("killed process"), "the server lives: {report}");
        kill_all(id);
        drop(server);
        assert_ne!(settings(&testbed), before, "nobody could restore");
    };
    leave_behind();
    let report = doctor();
    assert!(report.contains("killed process") && report.contains("restored now"), "{report}");
    assert_eq!(settings(&testbed), before);
    assert!(!doctor().contains("killed process"));

    leave_behind();
    // A server that changes no setting itself.
    testbed.serve(DeviceKind::XdpInterrupts, &["echo"]).stop();
    assert_eq!(settings(&testbed), before);

    leave_behind();
    testbed.serve(DeviceKind::Xdp, &["echo"]).stop();
    assert_eq!(settings(&testbed), before, "the state before the killed server");
}

#[test]
fn changes_by_others_are_kept() {
    if !can_run("changes by others", &[]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = testbed.serve(DeviceKind::Xdp, &["echo"]);
    kill_all(server.pid().as_raw_pid() as u32);
    drop(server);
    testbed.server().write_device_file(testbed.device(), FILES[0], "5").unwrap();
    let changed = settings(&testbed);
    let mut doctor = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    assert!(doctor.arg("doctor").output().unwrap().status.success());
    assert_eq!(settings(&testbed), changed);
}

#[test]
fn restorer_refuses_streams_of_others() {
    let restorer = |role: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["restore-settings", role]).output().unwrap()
    };
    for role in ["leader", "launcher", "standby:1", "other"] {
        assert!(!restorer(role).status.success(), "{role}");
    }
}
