//! Programs in C on the C library, against the kernel and real tools.

mod support;

use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use support::c_library::{StackHost, compile, compile_for_kernel, output_of};
use support::run::{ChildProcess, Daemon};
use support::{
    CLIENT_V4, CLIENT_V6, DeviceKind, SERVER_V4, SERVER_V6, Testbed, files, has_programs, is_root,
    url,
};

const CALLS: &str = "tests/programs/calls.c";
const ECHO: &str = "examples/echo.c";
const MTCP_SERVER: &str = "examples/mtcp_server.c";
const MTCP_GET: &str = "examples/mtcp_get.c";
const FF_SERVER: &str = "examples/ff_server.c";
const RING_ECHO: &str = "examples/ring_echo.c";
const MTCP_PIPE: &str = "tests/programs/mtcp_pipe.c";
const ZERO_COPY: &str = "tests/programs/zero_copy.c";

#[test]
fn echoes_with_the_kernel_in_both_roles() {
    if !is_root("c_library") || !has_programs("c_library", &["cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let echo = compile(folder.path(), ECHO, &[]);
    let kernel = compile_for_kernel(folder.path(), ECHO);
    StackHost::each(|testbed, place| {
        let _server = ChildProcess::new(&mut place.command(&echo, &["serve", "7000"]));
        let kernel = kernel.to_str().unwrap();
        for address in [SERVER_V4, SERVER_V6] {
            testbed.wait_for_port(address, 7000);
            assert_eq!(testbed.tool(kernel, &["call", address, "7000"]), "echoed\n");
        }
    });
    StackHost::each(|testbed, place| {
        let mut serve = testbed.client().command(kernel.to_str().unwrap());
        let _server = ChildProcess::new(serve.args(["serve", "7000"]));
        for address in [CLIENT_V4, CLIENT_V6] {
            testbed.wait_for_port(address, 7000);
            let output = output_of(&mut place.command(&echo, &["call", address, "7000"]));
            assert_eq!(output, "echoed\n");
        }
    });
}

#[test]
fn rings_echo_with_the_kernel_in_both_roles() {
    if !is_root("c_library") || !has_programs("c_library", &["cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let kernel = compile_for_kernel(folder.path(), ECHO);
    let ring_echo = compile(folder.path(), RING_ECHO, &[]);
    StackHost::each(|testbed, host| {
        let _server = ChildProcess::new(&mut host.command(&ring_echo, &["serve", "7000"]));
        let kernel = kernel.to_str().unwrap();
        for address in [SERVER_V4, SERVER_V6] {
            testbed.wait_for_port(address, 7000);
            assert_eq!(testbed.tool(kernel, &["call", address, "7000"]), "echoed\n");
        }
    });
    StackHost::each(|testbed, host| {
        let mut serve = testbed.client().command(kernel.to_str().unwrap());
        let _server = ChildProcess::new(serve.args(["serve", "7000"]));
        for address in [CLIENT_V4, CLIENT_V6] {
            testbed.wait_for_port(address, 7000);
            let output = output_of(&mut host.command(&ring_echo, &["call", address, "7000"]));
            assert_eq!(output, "echoed\n");
        }
    });
}

/// Configuration file of mTCP for the server's side.
fn mtcp_config(folder: &Path, lines: &str) -> String {
    let path = folder.join("mtcp.conf");
    let numbers = "num_mem_ch = 4\nrcvbuf = 65536\nsndbuf = 65536\ntcp_timeout = 30\n\
                   tcp_timewait = 0\nmax_concurrency = 5000\nmax_num_buffers = 5000\n";
    std::fs::write(&path, format!("# mTCP\n{numbers}{lines}")).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Asks a server with curl and wrk, over both families.
fn check_http(testbed: &Testbed, port: u16, body: &str) {
    for address in [SERVER_V4, SERVER_V6] {
        testbed.wait_for_port(address, port);
        let url = url(address, &format!(":{port}/"));
        assert_eq!(testbed.tool("curl", &["-sS", "--max-time", "20", &url]), body);
        let report = testbed.tool("wrk", &["-t1", "-c20", "-d1", &url]);
        assert!(!report.contains("Socket errors") && !report.contains("Non-2xx"), "{report}");
        let requests = report.lines().find_map(|line| line.trim().split_once(" requests in "));
        assert!(requests.unwrap().0.parse::<u64>().unwrap() > 0, "{report}");
    }
}

/// Ends a server with SIGTERM; returns its output.
fn end(server: Child) -> String {
    let pid = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let output = server.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn mtcp_server_answers_real_clients() {
    let tools = ["cc", "curl", "wrk"];
    if !is_root("c_library") || !has_programs("c_library", &tools) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let server = compile(folder.path(), MTCP_SERVER, &[]);
    let body: String = (0..5000).map(|n| char::from(b'a' + (n % 26) as u8)).collect();
    let check = |testbed: &Testbed, config: &str, cores: &str| {
        let mut command = testbed.server().command(server.to_str().unwrap());
        command.args(["-f", config, "-N", cores, "-P", "8080", "-s", "5000"]);
        let child = command.stdout(Stdio::piped()).spawn().unwrap();
        check_http(testbed, 8080, &body);
        assert_eq!(end(child), "ended\n");
    };
    // A file that was written for mTCP: the addresses are those of the interface.
    let testbed = Testbed::shared();
    let lines = format!("io = dpdk\nport = {}\n", testbed.device());
    check(&testbed, &mtcp_config(folder.path(), &lines), "1");
    // A stack for each core.
    let testbed = Testbed::with_queues(2);
    let lines = format!(
        "io = xdp\nport = {}\naddr = {SERVER_V4}/24\naddr = {SERVER_V6}/64\n",
        testbed.device()
    );
    check(&testbed, &mtcp_config(folder.path(), &lines), "2");
    // A daemon, with an attachment for each core.
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let lines = format!("io = daemon\nsocket = {}\n", daemon.socket().display());
    check(&testbed, &mtcp_config(folder.path(), &lines), "2");
}

#[test]
fn mtcp_pipes_join_threads_and_stand_in_epoll_sets() {
    if !is_root("c_library") || !has_programs("c_library", &["cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), MTCP_PIPE, &[]);
    let testbed = Testbed::shared();
    let lines = format!("io = dpdk\nport = {}\n", testbed.device());
    let mut command = testbed.server().command(program.to_str().unwrap());
    assert_eq!(output_of(command.arg(mtcp_config(folder.path(), &lines))), "passed\n");
}

#[test]
fn mtcp_client_gets_from_a_kernel_server() {
    if !is_root("c_library") || !has_programs("c_library", &["cc", "python3"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let get = compile(folder.path(), MTCP_GET, &[]);
    let files = files();
    // IPv4 from the address of the interface, IPv6 from an own one.
    let shared = Testbed::shared();
    let lines = format!("io = netmap\nport = {}\n", shared.device());
    let own = Testbed::new(DeviceKind::Xdp);
    let own_lines = format!("io = xdp\nport = {}\naddr = {SERVER_V6}/64\n", own.device());
    for (testbed, lines, address) in [(shared, lines, CLIENT_V4), (own, own_lines, CLIENT_V6)] {
        let config = mtcp_config(folder.path(), &lines);
        let mut serve = testbed.client().command("python3");
        serve.args(["-m", "http.server", "--bind", address, "--directory"]).arg(files.path());
        let mut serve =
            serve.arg("8000").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        testbed.wait_for_port(address, 8000);
        let mut command = testbed.server().command(get.to_str().unwrap());
        command.args(["-f", &config, "-n", "40", "-c", "8", address, "8000"]);
        assert_eq!(output_of(command.arg("/small")), "40 responses, 440 bytes\n");
        let mut command = testbed.server().command(get.to_str().unwrap());
        command.args(["-f", &config, "-n", "4", "-c", "2", address, "8000"]);
        assert_eq!(output_of(command.arg("/large")), "4 responses, 12000000 bytes\n");
        serve.kill().unwrap();
        serve.wait().unwrap();
    }
}

#[test]
fn ff_server_answers_real_clients() {
    if !is_root("c_library") || !has_programs("c_library", &["cc", "curl", "wrk"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let server = compile(folder.path(), FF_SERVER, &[]);
    let check = |testbed: &Testbed, text: &str, kind: &str| {
        let config = folder.path().join("config.ini");
        std::fs::write(&config, text).unwrap();
        let mut command = testbed.server().command(server.to_str().unwrap());
        command.args(["8080", kind, "--conf"]).arg(config).args(["--proc-id", "0"]);
        let child = command.stdout(Stdio::piped()).spawn().unwrap();
        check_http(testbed, 8080, "high water\n");
        assert_eq!(end(child), "ended\n");
    };
    let testbed = Testbed::new(DeviceKind::Xdp);
    let own = format!(
        "[dpdk]\nlcore_mask=1\nport_list=0\n[port0]\naddr={SERVER_V4}\nnetmask=255.255.255.0\n\
         addr6={SERVER_V6}\nprefix_len=64\n[tidegate]\niface={}\n",
        testbed.device()
    );
    check(&testbed, &own, "kqueue");
    check(&testbed, &own, "epoll");
    check(&testbed, &own, "mbuf");
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let attached = format!("[tidegate]\nsocket={}\n", daemon.socket().display());
    check(&testbed, &attached, "kqueue");
}

#[test]
fn calls_return_what_the_kernel_returns() {
    if !is_root("c_library") || !has_programs("c_library", &["cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let echo = compile_for_kernel(folder.path(), ECHO);
    let calls = compile(folder.path(), CALLS, &[]);
    let on_kernel = compile_for_kernel(folder.path(), CALLS);
    let addresses = [(SERVER_V4, CLIENT_V4), (SERVER_V6, CLIENT_V6)];
    let serve = |testbed: &Testbed| {
        let mut serve = testbed.client().command(echo.to_str().unwrap());
        let server = ChildProcess::new(serve.args(["serve", "7000"]));
        addresses.iter().for_each(|(_, client)| testbed.wait_for_port(client, 7000));
        server
    };
    let testbed = Testbed::shared();
    let _server = serve(&testbed);
    let expected = addresses.map(|(own, peer)| {
        let mut command = testbed.server().command(on_kernel.to_str().unwrap());
        output_of(command.args([own, peer, "7000"]))
    });
    StackHost::each(|testbed, place| {
        let _server = serve(testbed);
        for ((own, peer), expected) in addresses.iter().zip(&expected) {
            let got = output_of(&mut place.command(&calls, &[own, peer, "7000"]));
            for (got, expected) in got.lines().zip(expected.lines()) {
                assert_eq!(got, expected, "{own}");
            }
            assert_eq!(got.lines().count(), expected.lines().count());
        }
    });
}

#[test]
fn data_is_transferred_in_place() {
    if !is_root("c_library") || !has_programs("c_library", &["cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let echo = compile_for_kernel(folder.path(), ECHO);
    let program = compile(folder.path(), ZERO_COPY, &[]);
    StackHost::each(|testbed, host| {
        let mut serve = testbed.client().command(echo.to_str().unwrap());
        let _echo = ChildProcess::new(serve.args(["serve", "7000"]));
        for address in [CLIENT_V4, CLIENT_V6] {
            testbed.wait_for_port(address, 7000);
            let output = output_of(&mut host.command(&program, &["call", address, "7000"]));
            assert_eq!(output, "echoed\n");
        }
    });
    StackHost::each(|testbed, host| {
        let mut serve = host.command(&program, &["serve", "7000"]);
        let mut child = serve.stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n");
        for (own, address) in [(CLIENT_V4, SERVER_V4), (CLIENT_V6, SERVER_V6)] {
            let socket = testbed.client().enter(|| UdpSocket::bind((own, 0))).unwrap().unwrap();
            socket.connect((address, 7000)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
            let mut answer = [0; 64];
            // A datagram may be lost; that of one byte is never answered.
            let asked = (0..20).find_map(|_| {
                socket.send(b"x").unwrap();
                socket.send(b"high water").unwrap();
                socket.recv(&mut answer).ok()
            });
            assert_eq!(&answer[..asked.unwrap()], b"HIGH WATER");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    });
}
