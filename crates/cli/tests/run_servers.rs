//! Servers of Debian's, attached to a daemon and with the stack inside, with the
//! kernel's tools on the other side.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::run::{Host, library};
use support::{CLIENT_V4, CLIENT_V6, SERVER_V4, SERVER_V6, Site, can, files, url, wait_until};

const SERVERS: [&str; 2] = [SERVER_V4, SERVER_V6];

/// Fetches both files from port 8080, by both families.
fn fetch_all(site: &Site, folder: &Path) {
    let got = folder.join("got");
    for address in SERVERS {
        for name in ["small", "large"] {
            let from = url(address, &format!(":8080/{name}"));
            site.tool("curl", &["-sS", "--max-time", "20", "-o", got.to_str().unwrap(), &from]);
            let same = fs::read(&got).unwrap() == fs::read(folder.join(name)).unwrap();
            assert!(same, "{from}");
            fs::remove_file(&got).unwrap();
        }
    }
}

/// Starts a web server of the folder and fetches from it.
fn serves(host: &Host<'_>, folder: &Path, server: &[&str]) {
    let _server = host.run_server(server, 8080);
    fetch_all(host.site(), folder);
}

#[test]
fn netcat_listens_and_connects() {
    if !can("run_servers_netcat", &["nc", "sh"]) {
        return;
    }
    Host::each(|host| {
        let site = host.site();
        for (family, server, client) in [("-4", SERVER_V4, CLIENT_V4), ("-6", SERVER_V6, CLIENT_V6)]
        {
            let folder = tempfile::tempdir().unwrap();
            let got = folder.path().join("got");
            // It serves one connection, so nobody may try whether it is there.
            let listen = |command: &mut Command| {
                command.stdin(Stdio::null()).stdout(fs::File::create(&got).unwrap());
                command.spawn().unwrap()
            };
            let send = |address: &str| {
                format!("while ! echo high water | nc -N -w 10 {address} 7000; do sleep 0.02; done")
            };
            let mut moved = listen(&mut host.run(&["nc", family, "-l", "7000"]));
            site.tool("timeout", &["60", "sh", "-c", &send(server)]);
            assert!(moved.wait().unwrap().success());
            assert_eq!(fs::read_to_string(&got).unwrap(), "high water\n", "{server}");
            // The other way: the client is on Tidegate.
            let mut kernels = listen(site.client().command("nc").args([family, "-l", "7000"]));
            let sent = host.run(&["timeout", "60", "sh", "-c", &send(client)]).status().unwrap();
            assert!(sent.success() && kernels.wait().unwrap().success());
            assert_eq!(fs::read_to_string(&got).unwrap(), "high water\n", "{client}");
        }
    });
}

#[test]
fn lighttpd_serves_files() {
    if !can("run_servers_lighttpd", &["lighttpd", "curl"]) {
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
    Host::each(|host| serves(host, folder.path(), &["lighttpd", "-D", "-f", &config]));
}

/// Serves a folder on a port of both families from four threads.
const JAVA: &str = "import com.sun.net.httpserver.*;
import java.net.*;
import java.nio.file.*;
import java.util.concurrent.*;
class Serve {
    public static void main(String[] words) throws Exception {
        var server = HttpServer.create(new InetSocketAddress(\"::\", 8080), 50);
        server.setExecutor(Executors.newFixedThreadPool(4));
        server.createContext(\"/\", exchange -> {
            var path = Path.of(words[0], exchange.getRequestURI().getPath());
            exchange.sendResponseHeaders(200, Files.size(path));
            try (var body = exchange.getResponseBody()) { Files.copy(path, body); }
        });
        server.start();
    }
}";

#[test]
fn java_serves_files_from_its_threads() {
    if !can("run_servers_java", &["java", "javac", "curl", "ab"]) {
        return;
    }
    let folder = files();
    let root = folder.path().to_str().unwrap();
    fs::write(folder.path().join("Serve.java"), JAVA).unwrap();
    let mut javac = Command::new("javac");
    let compiled = javac.args(["-d", root, &format!("{root}/Serve.java")]).status().unwrap();
    assert!(compiled.success());
    Host::each(|host| {
        let _server = host.run_server(&["java", "-cp", root, "Serve", root], 8080);
        fetch_all(host.site(), folder.path());
        for address in SERVERS {
            let small = url(address, ":8080/small");
            let said = host.site().tool("ab", &["-q", "-n", "500", "-c", "8", &small]);
            assert!(said.contains("Failed requests:        0"), "{said}");
        }
    });
}

#[test]
fn ruby_serves_files() {
    if !can("run_servers_ruby", &["ruby", "curl"]) {
        return;
    }
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let httpd = ["ruby", "-run", "-e", "httpd", "--", root, "-p", "8080"];
    Host::each(|host| serves(host, folder.path(), &httpd));
}

#[test]
fn php_serves_files() {
    if !can("run_servers_php", &["php", "curl"]) {
        return;
    }
    let folder = files();
    let root = folder.path().to_str().unwrap();
    let php = ["php", "-q", "-S", "[::]:8080", "-t", root];
    Host::each(|host| serves(host, folder.path(), &php));
}

#[test]
fn gunicorn_serves_from_workers_and_reloads() {
    if !can("run_servers_gunicorn", &["gunicorn", "curl"]) {
        return;
    }
    Host::attached(|host| {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_str().unwrap();
        let answer_with = |said: &str| {
            let program = format!(
                "def app(environ, start):\n    start('200 OK', [])\n    return [b'{said}']\n"
            );
            fs::write(folder.path().join("tide.py"), program).unwrap();
        };
        answer_with("low");
        let bind = ["-b", "[::]:8080"];
        let workers = ["gunicorn", "-w", "2", "--chdir", root, "-p", &format!("{root}/pid")];
        // A worker that keeps what it has compiled does not see the new program.
        let plain = ["env", "PYTHONDONTWRITEBYTECODE=1"];
        let server = [&plain[..], &workers, &bind, &["tide:app"]].concat();
        let _server = host.run_server(&server, 8080);
        let fetch = |address: &str| {
            let from = url(address, ":8080/");
            host.site().tool("curl", &["-sS", "--max-time", "20", &from])
        };
        SERVERS.iter().for_each(|address| assert_eq!(fetch(address), "low"));
        answer_with("high");
        let pid = fs::read_to_string(folder.path().join("pid")).unwrap();
        host.site().server().command("kill").args(["-HUP", pid.trim()]).status().unwrap();
        for address in SERVERS {
            // Workers of before may answer until they have gone.
            wait_until("the new program answers", || fetch(address) == "high");
        }
        host.site().server().command("kill").arg(pid.trim()).status().unwrap();
        wait_until("it has ended its workers", || !folder.path().join("pid").exists());
    });
}

#[test]
fn rsync_moves_files_both_ways() {
    if !can("run_servers_rsync", &["rsync"]) {
        return;
    }
    Host::attached(|host| {
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
            host.site().tool("rsync", &["-W", &remote("large"), &path(&here, "fetched")]);
            assert!(fs::read(path(&here, "fetched")).unwrap() == large, "from {address}");
            host.site().tool("rsync", &["-W", &path(&here, "fetched"), &remote("sent")]);
            assert!(fs::read(path(&there, "sent")).unwrap() == large, "to {address}");
            fs::remove_file(path(&here, "fetched")).unwrap();
            fs::remove_file(path(&there, "sent")).unwrap();
        }
    });
}

#[test]
fn mosquitto_passes_messages_on() {
    if !can("run_servers_mosquitto", &["mosquitto", "mosquitto_sub", "mosquitto_pub"]) {
        return;
    }
    Host::each(|host| {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("mosquitto.conf");
        fs::write(&config, "listener 1883\nallow_anonymous true\nuser root\n").unwrap();
        let _server = host.run_server(&["mosquitto", "-c", config.to_str().unwrap()], 1883);
        for address in SERVERS {
            let got = folder.path().join("got");
            let mut subscriber = host.site().client().command("mosquitto_sub");
            subscriber.args(["-h", address, "-t", "tide", "-C", "2", "-W", "60"]);
            subscriber.stdout(fs::File::create(&got).unwrap());
            let mut subscriber = subscriber.spawn().unwrap();
            // What is kept reaches whoever comes late.
            for said in ["low", "high"] {
                let publish = ["-h", address, "-t", "tide", "-q", "1", "-m", said];
                let kept = if said == "low" { &["-r"][..] } else { &[] };
                host.site().tool("mosquitto_pub", &[&publish, kept].concat());
                wait_until("the message arrives", || {
                    fs::read_to_string(&got).unwrap().ends_with(&format!("{said}\n"))
                });
            }
            assert!(subscriber.wait().unwrap().success());
            host.site().tool("mosquitto_pub", &["-h", address, "-t", "tide", "-r", "-n"]);
        }
    });
}

/// Asks for the address of `ns.example.com`, by UDP and TCP.
fn names_are_answered(site: &Site) {
    for address in SERVERS {
        let server = format!("@{address}");
        // Some listen before they have read what they are to answer.
        let ask = [&*server, "ns.example.com", "A", "+short", "+tcp"];
        wait_until("it knows its names", || !site.tool("kdig", &ask).is_empty());
        for more in ["+notcp", "+tcp"] {
            let ask = [&server, "ns.example.com", "A", "+short", "+timeout=10", more];
            // From several ports, so that each thread is asked.
            for _ in 0..10 {
                assert_eq!(site.tool("kdig", &ask), "192.0.2.1\n", "{address} {more}");
            }
        }
    }
}

#[test]
fn unbound_answers_from_two_threads() {
    if !can("run_servers_unbound", &["unbound", "kdig"]) {
        return;
    }
    Host::each(|host| {
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
        names_are_answered(host.site());
    });
}

/// Attached to a daemon on addresses of the kernel's, and on Tidegate's own. Some
/// servers look for the addresses that interfaces have: they find those on `lo`.
fn on_addresses_that_are_found(test: impl Fn(&Host<'_>)) {
    Host::attached_shared(&test);
    Host::attached(|host| {
        for address in [format!("{SERVER_V4}/32"), format!("{SERVER_V6}/128")] {
            host.site().server().ip(&["addr", "add", &address, "dev", "lo"]).unwrap();
        }
        test(host);
    });
}

#[test]
fn named_answers() {
    if !can("run_servers_named", &["named", "kdig"]) {
        return;
    }
    on_addresses_that_are_found(|host| {
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
        names_are_answered(host.site());
    });
}

#[test]
fn dnsmasq_answers() {
    if !can("run_servers_dnsmasq", &["dnsmasq", "kdig"]) {
        return;
    }
    on_addresses_that_are_found(|host| {
        let own = ["-k", "-C", "/dev/null", "-u", "root", "--no-resolv", "--no-hosts"];
        let addresses = format!("--listen-address={SERVER_V4},{SERVER_V6}");
        let listen = ["--bind-interfaces", "--pid-file", &addresses];
        let names = ["--host-record=ns.example.com,192.0.2.1", "--local=/example.com/"];
        let _server = host.run_server(&[&["dnsmasq"], &own[..], &listen, &names].concat(), 53);
        names_are_answered(host.site());
    });
}

#[test]
fn dovecot_hands_connections_on_to_its_processes() {
    if !can("run_servers_dovecot", &["dovecot", "curl"]) {
        return;
    }
    let version = Command::new("dovecot").arg("--version").output().unwrap();
    if !version.stdout.starts_with(b"2.3.") {
        return eprintln!("skipped run_servers_dovecot: the settings are those of dovecot 2.3");
    }
    // A process that has given up its rights hands the connection on.
    Host::attached_with(&["--socket-mode", "666"], |host| {
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
                host.site().tool("curl", &[&login, rest, &[&inbox]].concat())
            };
            imap(&["-T", letter.to_str().unwrap()], "");
            let got = imap(&[], ";MAILINDEX=1");
            assert!(got.as_bytes() == fs::read(&letter).unwrap(), "{address}");
        }
        // It ends its processes when it is asked to.
        let pid = folder.path().join("run/master.pid");
        let number = fs::read_to_string(&pid).unwrap();
        host.site().server().command("kill").arg(number.trim()).status().unwrap();
        wait_until("it has ended", || !pid.exists());
    });
}

/// Where Debian has the programs of a version of PostgreSQL, if there is one.
fn postgresql() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let programs = versions.map(|version| version.unwrap().path().join("bin"));
    programs.filter(|programs| programs.join("pgbench").exists()).max()
}

#[test]
fn postgresql_serves_from_its_children() {
    if !can("run_servers_postgresql", &["setpriv"]) {
        return;
    }
    let Some(programs) = postgresql() else {
        return eprintln!("skipped run_servers_postgresql: postgresql is not installed");
    };
    let program = |name: &str| programs.join(name).to_str().unwrap().to_owned();
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    // It does not run as root, and where this was built may be closed to others.
    fs::copy(library(), path("library.so")).unwrap();
    let user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"];
    let make = [&program("initdb"), "-D", &path("data"), "-A", "trust", "-N"];
    let made = Command::new(user[0]).args(&user[1..]).args(make).stdout(Stdio::null()).status();
    assert!(made.unwrap().success());
    let allow = "host all all all trust\nlocal all all trust\n";
    fs::write(path("data/pg_hba.conf"), allow).unwrap();
    Host::attached_with(&["--socket-mode", "666"], |host| {
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
        let _server = host.site().wait_for_server(&mut command, 5432);
        for address in SERVERS {
            let to = ["-h", address, "-U", "postgres"];
            let bench = |more: &[&str]| {
                host.site().tool(&program("pgbench"), &[&to, more, &["postgres"]].concat())
            };
            bench(&["-i", "-q", "-s", "1"]);
            // One connection for many transactions, and one for each.
            for more in [&["-t", "50"][..], &["-t", "10", "-C"]] {
                let said = bench(&[&["-c", "4", "-n"], more].concat());
                assert!(said.contains("failed transactions: 0"), "{said}");
            }
            let large = "select string_agg(n::text, ',') from generate_series(1, 300000) n";
            let ask = [&to[..], &["-d", "postgres", "-qtAc", large]].concat();
            let got = host.site().tool("psql", &ask);
            let expected: Vec<String> = (1..=300_000).map(|n: u32| n.to_string()).collect();
            assert!(got.trim_end() == expected.join(","), "{address}");
        }
        // It ends its children when it is asked to.
        let pid = fs::read_to_string(path("data/postmaster.pid")).unwrap();
        let number = pid.lines().next().unwrap();
        host.site().server().command("kill").args(["-INT", number]).status().unwrap();
        wait_until("it has ended", || !folder.path().join("data/postmaster.pid").exists());
    });
}
