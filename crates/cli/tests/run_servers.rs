//! Servers from Debian packages, attached to a daemon and with an embedded stack, with the
//! kernel's tools on the client side.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::run::{ChildProcess, ServerHost, library};
use support::{
    CLIENT_V4, CLIENT_V6, SERVER_V4, SERVER_V6, Testbed, can_run, files, url, wait_until,
};

const SERVERS: [&str; 2] = [SERVER_V4, SERVER_V6];

/// Fetches both files from port 8080, over both families.
fn fetch_all(testbed: &Testbed, folder: &Path) {
    let got = folder.join("got");
    for address in SERVERS {
        for name in ["small", "large"] {
            let from = url(address, &format!(":8080/{name}"));
            testbed.tool("curl", &["-sS", "--max-time", "20", "-o", got.to_str().unwrap(), &from]);
            let same = fs::read(&got).unwrap() == fs::read(folder.join(name)).unwrap();
            assert!(same, "{from}");
            fs::remove_file(&got).unwrap();
        }
    }
}

/// Starts a web server on the folder and fetches both files from it.
fn check_web_server(host: &ServerHost<'_>, folder: &Path, server: &[&str]) {
    let _server = host.run_server(server, 8080);
    fetch_all(host.testbed(), folder);
}

#[test]
fn netcat_listens_and_connects() {
    if !can_run("run_servers_netcat", &["nc", "sh"]) {
        return;
    }
    ServerHost::each(|host| {
        let testbed = host.testbed();
        for (family, server, client) in [("-4", SERVER_V4, CLIENT_V4), ("-6", SERVER_V6, CLIENT_V6)]
        {
            let folder = tempfile::tempdir().unwrap();
            let got = folder.path().join("got");
            // nc serves a single connection, so a probe for readiness would consume it.
            let listen = |command: &mut Command| {
                command.stdin(Stdio::null()).stdout(fs::File::create(&got).unwrap());
                command.spawn().unwrap()
            };
            let send = |address: &str| {
                format!("while ! echo high water | nc -N -w 10 {address} 7000; do sleep 0.02; done")
            };
            let mut on_tidegate = listen(&mut host.run(&["nc", family, "-l", "7000"]));
            testbed.tool("timeout", &["60", "sh", "-c", &send(server)]);
            assert!(on_tidegate.wait().unwrap().success());
            assert_eq!(fs::read_to_string(&got).unwrap(), "high water\n", "{server}");
            // The other direction: the client is on Tidegate.
            let mut on_kernel = listen(testbed.client().command("nc").args([family, "-l", "7000"]));
            let sent = host.run(&["timeout", "60", "sh", "-c", &send(client)]).status().unwrap();
            assert!(sent.success() && on_kernel.wait().unwrap().success());
            assert_eq!(fs::read_to_string(&got).unwrap(), "high water\n", "{client}");
        }
    });
}

/// A client that numbers its connections by their descriptors: the low ones are the program's.
#[test]
fn wrk_measures_with_several_connections() {
    if !can_run("run_servers_wrk", &["wrk", "python3"]) {
        return;
    }
    let folder = files();
    let root = folder.path().to_str().unwrap();
    ServerHost::each(|host| {
        let testbed = host.testbed();
        let server = ["-m", "http.server", "8080", "--bind", "::", "--directory", root];
        let mut on_kernel = testbed.client().command("python3");
        let _on_kernel = ChildProcess::new(on_kernel.args(server).stderr(Stdio::null()));
        for address in [CLIENT_V4, CLIENT_V6] {
            testbed.wait_for_port(address, 8080);
            let page = url(address, ":8080/small");
            let output = host.run(&["wrk", "-t1", "-c5", "-d1s", &page]).output().unwrap();
            let printed = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{printed}");
            let requests = printed.lines().find_map(|line| line.split_once(" requests in "));
            let requests: u64 = requests.unwrap().0.trim().parse().unwrap();
            assert!(requests > 5 && !printed.contains("Socket errors"), "{printed}");
        }
    });
}

#[test]
fn lighttpd_serves_files() {
    if !can_run("run_servers_lighttpd", &["lighttpd", "curl"]) {
        return;
    }
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let config = format!("{root}/lighttpd.conf");
    let text = format!(
        "server.document-root = \"{root}\"\nserver.port = 8080\n\
         server.bind = \"0.0.0.0\"\n$SERVER[\"socket\"] == \"[::]:8080\" {{ }}\n\
         server.errorlog = \"{root}/errors\"\n"
    );
    fs::write(&config, text).unwrap();
    ServerHost::each(|host| {
        check_web_server(host, folder.path(), &["lighttpd", "-D", "-f", &config]);
    });
}

#[test]
fn java_serves_files_from_its_threads() {
    if !can_run("run_servers_java", &["java", "javac", "curl", "ab"]) {
        return;
    }
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/Serve.java");
    let compiled = Command::new("javac").args(["-d", root, source]).status().unwrap();
    assert!(compiled.success());
    ServerHost::each(|host| {
        let java = ["java", "-cp", root, "Serve", root];
        let on_both = host.run_server(&[&java[..], &["::"]].concat(), 8080);
        fetch_all(host.testbed(), folder.path());
        for address in SERVERS {
            let small = url(address, ":8080/small");
            let printed = host.testbed().tool("ab", &["-q", "-n", "500", "-c", "8", &small]);
            assert!(printed.contains("Failed requests:        0"), "{printed}");
        }
        drop(on_both);
        for address in SERVERS {
            // Java has IPv6 sockets only: an IPv4 address is mapped there.
            let _server = ChildProcess::new(&mut host.run(&[&java[..], &[address]].concat()));
            host.testbed().wait_for_port(address, 8080);
            let small = url(address, ":8080/small");
            let request = ["-sS", "--max-time", "20", &small];
            assert_eq!(host.testbed().tool("curl", &request), "high water\n", "{address}");
        }
    });
}

#[test]
fn ruby_serves_files() {
    if !can_run("run_servers_ruby", &["ruby", "curl"]) {
        return;
    }
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let httpd = ["ruby", "-run", "-e", "httpd", "--", root, "-p", "8080"];
    ServerHost::each(|host| check_web_server(host, folder.path(), &httpd));
}

#[test]
fn php_serves_files() {
    if !can_run("run_servers_php", &["php", "curl"]) {
        return;
    }
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let php = ["php", "-q", "-S", "[::]:8080", "-t", root];
    ServerHost::each(|host| check_web_server(host, folder.path(), &php));
}

#[test]
fn gunicorn_workers_serve_and_reload() {
    if !can_run("run_servers_gunicorn", &["gunicorn", "curl"]) {
        return;
    }
    ServerHost::attached(|host| {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_str().unwrap();
        let answer_with = |body: &str| {
            let program = format!(
                "def app(environ, start):\n    start('200 OK', [])\n    return [b'{body}']\n"
            );
            fs::write(folder.path().join("tide.py"), program).unwrap();
        };
        answer_with("low");
        let bind = ["-b", "[::]:8080"];
        let workers = ["gunicorn", "-w", "2", "--chdir", root, "-p", &format!("{root}/pid")];
        // Without bytecode files, new workers read the changed source.
        let plain = ["env", "PYTHONDONTWRITEBYTECODE=1"];
        let server = [&plain[..], &workers, &bind, &["tide:app"]].concat();
        let _server = host.run_server(&server, 8080);
        let fetch = |address: &str| {
            let from = url(address, ":8080/");
            host.testbed().tool("curl", &["-sS", "--max-time", "20", &from])
        };
        SERVERS.iter().for_each(|address| assert_eq!(fetch(address), "low"));
        answer_with("high");
        let pid = fs::read_to_string(folder.path().join("pid")).unwrap();
        host.testbed().server().command("kill").args(["-HUP", pid.trim()]).status().unwrap();
        for address in SERVERS {
            // The previous workers may answer until they have exited.
            wait_until("the reloaded workers answer", || fetch(address) == "high");
        }
        host.testbed().server().command("kill").arg(pid.trim()).status().unwrap();
        wait_until("gunicorn has stopped its workers", || !folder.path().join("pid").exists());
    });
}

#[test]
fn rsync_moves_files_both_ways() {
    if !can_run("run_servers_rsync", &["rsync"]) {
        return;
    }
    ServerHost::attached(|host| {
        let (here, there) = (files(), files());
        let path = |folder: &tempfile::TempDir, name: &str| {
            folder.path().join(name).to_str().unwrap().to_owned()
        };
        let config = format!(
            "use chroot = no\nuid = root\ngid = root\npid file = {}\nlog file = {}\n[tide]\n\
             path = {}\nread only = no\n",
            path(&there, "pid"),
            path(&there, "log"),
            there.path().display(),
        );
        fs::write(path(&there, "rsyncd.conf"), config).unwrap();
        let config = format!("--config={}", path(&there, "rsyncd.conf"));
        let daemon = ["rsync", "--daemon", "--no-detach", "--port=8730", &config];
        let _server = host.run_server(&daemon, 8730);
        let large = fs::read(path(&here, "large")).unwrap();
        for address in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
            let remote = |name: &str| format!("rsync://{address}:8730/tide/{name}");
            host.testbed().tool("rsync", &["-W", &remote("large"), &path(&here, "fetched")]);
            assert!(fs::read(path(&here, "fetched")).unwrap() == large, "from {address}");
            host.testbed().tool("rsync", &["-W", &path(&here, "fetched"), &remote("sent")]);
            assert!(fs::read(path(&there, "sent")).unwrap() == large, "to {address}");
            fs::remove_file(path(&here, "fetched")).unwrap();
            fs::remove_file(path(&there, "sent")).unwrap();
        }
    });
}

#[test]
fn mosquitto_delivers_messages() {
    if !can_run("run_servers_mosquitto", &["mosquitto", "mosquitto_sub", "mosquitto_pub"]) {
        return;
    }
    ServerHost::each(|host| {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("mosquitto.conf");
        fs::write(&config, "listener 1883\nallow_anonymous true\nuser root\n").unwrap();
        let _server = host.run_server(&["mosquitto", "-c", config.to_str().unwrap()], 1883);
        for address in SERVERS {
            let got = folder.path().join("got");
            let mut subscriber = host.testbed().client().command("mosquitto_sub");
            subscriber.args(["-h", address, "-t", "tide", "-C", "2", "-W", "60"]);
            subscriber.stdout(fs::File::create(&got).unwrap());
            let mut subscriber = subscriber.spawn().unwrap();
            // A retained message reaches late subscribers.
            for message in ["low", "high"] {
                let publish = ["-h", address, "-t", "tide", "-q", "1", "-m", message];
                let kept = if message == "low" { &["-r"][..] } else { &[] };
                host.testbed().tool("mosquitto_pub", &[&publish, kept].concat());
                wait_until("the message arrives", || {
                    fs::read_to_string(&got).unwrap().ends_with(&format!("{message}\n"))
                });
            }
            assert!(subscriber.wait().unwrap().success());
            host.testbed().tool("mosquitto_pub", &["-h", address, "-t", "tide", "-r", "-n"]);
        }
    });
}

/// Queries the address of `ns.example.com` over UDP and TCP.
fn check_dns_names(testbed: &Testbed) {
    for address in SERVERS {
        let server = format!("@{address}");
        // Some servers listen before they have loaded their names.
        let request = [&*server, "ns.example.com", "A", "+short", "+tcp"];
        wait_until("the server has loaded its names", || {
            !testbed.tool("kdig", &request).is_empty()
        });
        for more in ["+notcp", "+tcp"] {
            let request = [&server, "ns.example.com", "A", "+short", "+timeout=10", more];
            // Several source ports, so that each thread is queried.
            for _ in 0..10 {
                assert_eq!(testbed.tool("kdig", &request), "192.0.2.1\n", "{address} {more}");
            }
        }
    }
}

#[test]
fn unbound_answers_from_two_threads() {
    if !can_run("run_servers_unbound", &["unbound", "kdig"]) {
        return;
    }
    ServerHost::each(|host| {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("unbound.conf");
        let text = format!(
            "server:\n interface: {SERVER_V4}\n interface: {SERVER_V6}\n username: \"\"\n\
             chroot: \"\"\n directory: \"{0}\"\n pidfile: \"\"\n use-syslog: no\n\
             num-threads: 2\n so-reuseport: yes\n module-config: \"iterator\"\n\
             access-control: 0.0.0.0/0 allow\n access-control: ::/0 allow\n\
             local-zone: \"example.com.\" static\n\
             local-data: \"ns.example.com. 60 IN A 192.0.2.1\"\n\
             remote-control:\n control-enable: no\n",
            folder.path().display()
        );
        fs::write(&config, text).unwrap();
        let _server = host.run_server(&["unbound", "-d", "-c", config.to_str().unwrap()], 53);
        check_dns_names(host.testbed());
    });
}

/// Runs the test attached to a daemon, on shared addresses and on addresses of the daemon's
/// own. Some servers look up interface addresses: for these, `lo` has the addresses too.
fn on_discoverable_addresses(test: impl Fn(&ServerHost<'_>)) {
    ServerHost::attached_shared(&test);
    ServerHost::attached(|host| {
        for address in [format!("{SERVER_V4}/32"), format!("{SERVER_V6}/128")] {
            host.testbed().server().ip(&["addr", "add", &address, "dev", "lo"]).unwrap();
        }
        test(host);
    });
}

#[test]
fn named_answers_queries() {
    if !can_run("run_servers_named", &["named", "kdig"]) {
        return;
    }
    on_discoverable_addresses(|host| {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_str().unwrap();
        let zone = "$TTL 60\n@ SOA ns h 1 2 3 4 5\n@ NS ns\nns A 192.0.2.1\n";
        fs::write(folder.path().join("zone"), zone).unwrap();
        let config = folder.path().join("named.conf");
        let text = format!(
            "options {{ directory \"{root}\"; listen-on {{ {SERVER_V4}; }};\n\
             listen-on-v6 {{ {SERVER_V6}; }}; recursion no; pid-file none;\n\
             session-keyfile none; dnssec-validation no; }};\ncontrols {{ }};\n\
             zone \"example.com\" {{ type primary; file \"zone\"; }};\n"
        );
        fs::write(&config, text).unwrap();
        let _server = host.run_server(&["named", "-g", "-c", config.to_str().unwrap()], 53);
        check_dns_names(host.testbed());
    });
}

#[test]
fn dnsmasq_answers_queries() {
    if !can_run("run_servers_dnsmasq", &["dnsmasq", "kdig"]) {
        return;
    }
    on_discoverable_addresses(|host| {
        let own = ["-k", "-C", "/dev/null", "-u", "root", "--no-resolv", "--no-hosts"];
        let addresses = format!("--listen-address={SERVER_V4},{SERVER_V6}");
        let listen = ["--bind-interfaces", "--pid-file", &addresses];
        let names = ["--host-record=ns.example.com,192.0.2.1", "--local=/example.com/"];
        let _server = host.run_server(&[&["dnsmasq"], &own[..], &listen, &names].concat(), 53);
        check_dns_names(host.testbed());
    });
}

#[test]
fn dovecot_transfers_connections_between_processes() {
    if !can_run("run_servers_dovecot", &["dovecot", "curl"]) {
        return;
    }
    let version = Command::new("dovecot").arg("--version").output().unwrap();
    if !version.stdout.starts_with(b"2.3.") {
        return tidegate_needs::skip("dovecot 2.3", "the settings are not those of this version");
    }
    // A process that has dropped its privileges passes the connection on.
    ServerHost::attached_with(&["--socket-mode", "666"], |host| {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_str().unwrap();
        fs::set_permissions(root, PermissionsExt::from_mode(0o777)).unwrap();
        let config = folder.path().join("dovecot.conf");
        let text = format!(
            "base_dir = {root}/run\nstate_dir = {root}/state\nlog_path = {root}/log\n\
             import_environment = $import_environment LD_PRELOAD TIDEGATE_RUN\n\
             default_vsz_limit = 0\nprotocols = imap\nlisten = 0.0.0.0, ::\nssl = no\n\
             disable_plaintext_auth = no\nmail_location = maildir:{root}/mail\n\
             first_valid_uid = 1\n\
             passdb {{\n driver = static\n args = password=tide\n}}\n\
             userdb {{\n driver = static\n args = uid=mail gid=mail home={root}/home\n}}\n\
             service imap-login {{\n chroot =\n}}\n"
        );
        fs::write(&config, text).unwrap();
        let server = ["dovecot", "-F", "-c", config.to_str().unwrap()];
        let _server = host.run_server(&server, 143);
        let letter = folder.path().join("letter");
        fs::write(&letter, "Subject: tide\r\n\r\nhigh water\r\n".repeat(3000)).unwrap();
        for address in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
            let imap = |rest: &[&str], path: &str| {
                let inbox = format!("imap://{address}/INBOX{path}");
                let login = ["-sS", "--max-time", "20", "-u", "joe:tide"];
                host.testbed().tool("curl", &[&login, rest, &[&inbox]].concat())
            };
            imap(&["-T", letter.to_str().unwrap()], "");
            let got = imap(&[], ";MAILINDEX=1");
            assert!(got.as_bytes() == fs::read(&letter).unwrap(), "{address}");
        }
        // dovecot ends its processes on SIGTERM.
        let pid = folder.path().join("run/master.pid");
        let number = fs::read_to_string(&pid).unwrap();
        host.testbed().server().command("kill").arg(number.trim()).status().unwrap();
        wait_until("dovecot has exited", || !pid.exists());
    });
}

/// Folder of the executables of the newest PostgreSQL that Debian has installed, if any.
fn postgresql() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let programs = versions.map(|version| version.unwrap().path().join("bin"));
    programs.filter(|programs| programs.join("pgbench").exists()).max()
}

#[test]
fn postgresql_serves_from_its_children() {
    if !can_run("run_servers_postgresql", &["setpriv"]) {
        return;
    }
    let Some(programs) = postgresql() else {
        return tidegate_needs::skip("postgresql", "postgresql is not installed");
    };
    let program = |name: &str| programs.join(name).to_str().unwrap().to_owned();
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    // PostgreSQL does not run as root, and the build folder may be inaccessible to other users.
    fs::copy(library(), path("library.so")).unwrap();
    let user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"];
    let make = [&program("initdb"), "-D", &path("data"), "-A", "trust", "-N"];
    let made = Command::new(user[0]).args(&user[1..]).args(make).stdout(Stdio::null()).status();
    assert!(made.unwrap().success());
    let allow = "host all all all trust\nlocal all all trust\n";
    fs::write(path("data/pg_hba.conf"), allow).unwrap();
    ServerHost::attached_with(&["--socket-mode", "666"], |host| {
        let settings = ["listen_addresses=*", "fsync=off", "shared_memory_type=mmap"];
        let sockets = format!("unix_socket_directories={}", folder.path().display());
        let server = program("postgres");
        let data = path("data");
        let mut all = [&user[..], &[&server, "-D", &data]].concat();
        for setting in settings.iter().copied().chain([&*sockets]) {
            all.extend(["-c", setting]);
        }
        let mut command = host.run(&all);
        command.env("TIDEGATE_PRELOAD_LIBRARY", path("library.so"));
        let _server = host.testbed().wait_for_server(&mut command, 5432);
        // PostgreSQL accepts connections before it serves them.
        let pid_file = || fs::read_to_string(path("data/postmaster.pid")).unwrap();
        wait_until("postgres is ready", || pid_file().lines().any(|line| line.trim() == "ready"));
        for address in SERVERS {
            let to = ["-h", address, "-U", "postgres"];
            let bench = |more: &[&str]| {
                host.testbed().tool(&program("pgbench"), &[&to, more, &["postgres"]].concat())
            };
            bench(&["-i", "-q", "-s", "1"]);
            // One connection for many transactions, then one connection for each.
            for more in [&["-t", "50"][..], &["-t", "10", "-C"]] {
                let printed = bench(&[&["-c", "4", "-n"], more].concat());
                assert!(printed.contains("failed transactions: 0"), "{printed}");
            }
            let large = "select string_agg(n::text, ',') from generate_series(1, 300000) n";
            let request = [&to[..], &["-d", "postgres", "-qtAc", large]].concat();
            let got = host.testbed().tool("psql", &request);
            let expected: Vec<String> = (1..=300_000).map(|n: u32| n.to_string()).collect();
            assert!(got.trim_end() == expected.join(","), "{address}");
        }
        // postgres ends its children on SIGINT.
        let pid = pid_file();
        let number = pid.lines().next().unwrap();
        host.testbed().server().command("kill").args(["-INT", number]).status().unwrap();
        wait_until("postgres has exited", || !folder.path().join("data/postmaster.pid").exists());
    });
}

/// The worker, which listens, runs as a user of its own.
#[test]
fn varnish_serves_from_its_cache() {
    if !can_run("run_servers_varnish", &["varnishd", "curl", "python3", "cc"]) {
        return;
    }
    let folder = files();
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let root = folder.path().to_str().unwrap();
    ServerHost::attached_with(&["--socket-group", "varnish"], |host| {
        let mut backend = host.testbed().client().command("python3");
        backend.args(["-m", "http.server", "8081", "--bind", "::", "--directory", root]);
        let backend = ChildProcess::new(backend.stderr(Stdio::null()));
        for (number, address) in [CLIENT_V4, CLIENT_V6].into_iter().enumerate() {
            host.testbed().wait_for_port(address, 8081);
            let backend = url(address, ":8081").replace("http://", "");
            let state = format!("{root}/state{number}");
            let server = ["varnishd", "-F", "-n", &state, "-a", ":8080", "-b", &backend];
            let _server = ChildProcess::new(&mut host.run(&server));
            for server in SERVERS {
                let page = url(server, ":8080/small");
                // The socket listens, and is opened anew, before the worker serves.
                wait_until("the worker serves", || {
                    let request = ["-s", "--max-time", "20", &page];
                    host.testbed().try_tool("curl", &request).stdout == b"high water\n"
                });
            }
            fetch_all(host.testbed(), folder.path());
        }
        drop(backend);
    });
}

/// The process of a session gives up its user, its root and all further descriptors.
#[test]
fn vsftpd_serves_from_one_process_for_each_session() {
    if !can_run("run_servers_vsftpd", &["vsftpd", "curl"]) {
        return;
    }
    let folder = files();
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let (root, got) = (folder.path().to_str().unwrap(), folder.path().join("got"));
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let settings = [
        "listen_ipv6=YES\nlisten=NO\nlisten_port=8080\nbackground=NO\nanonymous_enable=YES".into(),
        format!("anon_root={root}\nsecure_chroot_dir={}", empty.display()),
        "one_process_model=YES\nseccomp_sandbox=NO\n".into(),
    ];
    let config = folder.path().join("vsftpd.conf");
    fs::write(&config, settings.join("\n")).unwrap();
    ServerHost::attached(|host| {
        let _server = host.run_server(&["vsftpd", config.to_str().unwrap()], 8080);
        for address in SERVERS {
            for name in ["small", "large"] {
                let from = url(address, &format!(":8080/{name}")).replace("http", "ftp");
                let to = got.to_str().unwrap();
                host.testbed().tool("curl", &["-sS", "--max-time", "20", "-o", to, &from]);
                assert!(fs::read(&got).unwrap() == fs::read(folder.path().join(name)).unwrap());
                fs::remove_file(&got).unwrap();
            }
        }
    });
}
