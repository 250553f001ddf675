//! NFS on devices and on kernel sockets, with libnfs as the client, and with calls that no client
//! makes.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use support::running::Running;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Server, Testbed, has_programs, is_root, tidegate};

const SERVERS: [&str; 2] = [SERVER_V4, SERVER_V6];
const PORT: u16 = 2049;
const TIMEOUT: Duration = Duration::from_secs(20);
const CLIENTS: [&str; 2] = ["nfs-cat", "nfs-ls"];

/// Files in the large directory: more than a reply holds.
const MANY: usize = 1_500;

/// Directory with files of several sizes, a large directory, and links that lead out of it to a
/// secret file.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let files = Self { folder: tempfile::tempdir().unwrap() };
        let root = files.root();
        fs::create_dir_all(root.join("inner/deep")).unwrap();
        fs::create_dir(root.join("many")).unwrap();
        let names = ["empty", "one", "inner/block", "inner/deep/large", "inner/deep/umläut"];
        for (name, len) in names.into_iter().zip([0, 1, 65_536, 3_000_001, 4_097]) {
            let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
            fs::write(root.join(name), bytes).unwrap();
        }
        for number in 0..MANY {
            let name = format!("many/a file with a long name, number {number}");
            fs::write(root.join(name), number.to_string()).unwrap();
        }
        fs::write(files.folder.path().join("secret"), "no").unwrap();
        symlink("../secret", root.join("inner/up")).unwrap();
        symlink(files.folder.path(), root.join("inner/out")).unwrap();
        files
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn root_text(&self) -> String {
        self.root().to_str().unwrap().to_owned()
    }
}

fn serve(testbed: &Testbed, kind: DeviceKind, files: &Files, flags: &[&str]) -> Server {
    let root = files.root_text();
    testbed.serve(kind, &[&["nfs", "--directory", &root], flags].concat())
}

fn url(server: &str, path: &str) -> String {
    format!("nfs://{server}/{path}?nfsport={PORT}&mountport={PORT}")
}

/// Bytes of a file, by libnfs.
fn cat(testbed: &Testbed, server: &str, path: &str) -> Option<Vec<u8>> {
    let output = testbed.try_tool("timeout", &["20", "nfs-cat", &url(server, path)]);
    (output.status.success() && output.stderr.is_empty()).then_some(output.stdout)
}

/// Names in a directory, by libnfs.
fn list(testbed: &Testbed, server: &str, path: &str) -> Vec<String> {
    let text = testbed.tool("timeout", &["20", "nfs-ls", &url(server, path)]);
    // Mode, links, owner, group, size, name.
    let name = |line: &str| {
        let mut rest = line;
        for _ in 0..5 {
            rest = rest.trim_start().split_once(' ').unwrap().1;
        }
        rest.trim_start().to_owned()
    };
    text.lines().map(name).collect()
}

fn check_tree(testbed: &Testbed, files: &Files) {
    for server in SERVERS {
        for name in ["empty", "one"] {
            let read = cat(testbed, server, &format!("./{name}"));
            assert_eq!(read, Some(fs::read(files.root().join(name)).unwrap()), "{name}");
        }
        for name in ["inner/block", "inner/deep/large", "inner/deep/umläut"] {
            let read = cat(testbed, server, name);
            assert!(read == Some(fs::read(files.root().join(name)).unwrap()), "{name}");
        }
        for outside in ["inner/up", "inner/out/secret", "inner/../../secret", "../secret"] {
            assert_eq!(cat(testbed, server, outside), None, "{outside}");
        }
        let listed = list(testbed, server, "many");
        let names = (0..MANY).map(|number| format!("a file with a long name, number {number}"));
        assert_eq!(listed.len(), MANY);
        assert_eq!(BTreeSet::from_iter(listed), BTreeSet::from_iter(names));
    }
}

#[test]
fn tree_is_read_intact_on_devices_and_on_the_kernel() {
    if !is_root("nfs_tree") || !has_programs("nfs_tree", &CLIENTS) {
        return;
    }
    let files = Files::new();
    for kind in [DeviceKind::Xdp, DeviceKind::Packet, DeviceKind::Tap] {
        eprintln!("{kind:?}");
        let testbed = Testbed::new(kind);
        let server = serve(&testbed, kind, &files, &[]);
        check_tree(&testbed, &files);
        let report = server.stop();
        assert!(report["requests"].as_u64().unwrap() > 100, "{report}");
        assert_eq!(report["requests"], report["answers"], "{report}");
    }
    let testbed = Testbed::shared();
    let root = files.root_text();
    let server = testbed.start(&["nfs", "--io", "kernel", "--directory", &root]);
    check_tree(&testbed, &files);
    let report = server.stop();
    assert_eq!(report["requests"], report["answers"], "{report}");
}

#[test]
fn missing_directory_is_an_error() {
    let text = |arguments: &[&str]| {
        let output = tidegate(&[&["serve", "nfs", "--io", "kernel"], arguments].concat());
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let none = text(&[]);
    assert!(none.contains("give --directory"), "{none}");
    let missing = text(&["--directory", "/no/such/directory"]);
    assert!(missing.contains("--directory /no/such/directory: No such file"), "{missing}");
    let memory = text(&["--directory", "/", "--memory", "1"]);
    assert!(memory.contains("give 4 or more"), "{memory}");
}

/// Client that makes calls by itself.
struct Client {
    stream: TcpStream,
    next_xid: u32,
}

/// Value of XDR: words, and bytes with their length and padding.
fn opaque(bytes: &[u8]) -> Vec<u8> {
    let mut value = (bytes.len() as u32).to_be_bytes().to_vec();
    value.extend_from_slice(bytes);
    value.resize(value.len().next_multiple_of(4), 0);
    value
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

const NFS: u32 = 100_003;
const MOUNT: u32 = 100_005;
const LOOKUP: u32 = 3;
const READ: u32 = 6;
const REMOVE: u32 = 12;
const READDIR: u32 = 16;

const STATUS_OK: u32 = 0;
const STATUS_READ_ONLY: u32 = 30;
const STATUS_STALE: u32 = 70;
const STATUS_BAD_HANDLE: u32 = 10_001;

/// Bytes of optional attributes that are present.
const ATTRIBUTES_BYTES: usize = 4 + 84;

impl Client {
    fn connect(testbed: &Testbed, server: &str) -> Self {
        let connect = || TcpStream::connect((server, PORT)).unwrap();
        let stream = testbed.client().enter(connect).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self { stream, next_xid: 1 }
    }

    /// Sends a call; returns the bytes of the results behind the header of an accepted reply.
    fn call(&mut self, program: u32, procedure: u32, arguments: &[u8]) -> Vec<u8> {
        let xid = self.next_xid;
        self.next_xid += 1;
        let mut call = words(&[xid, 0, 2, program, 3, procedure, 0, 0, 0, 0]);
        call.extend_from_slice(arguments);
        let mark = call.len() as u32 | 1 << 31;
        self.stream.write_all(&[&mark.to_be_bytes(), &call[..]].concat()).unwrap();
        let mut mark = [0; 4];
        self.stream.read_exact(&mut mark).unwrap();
        let len = u32::from_be_bytes(mark) & !(1 << 31);
        let mut reply = vec![0; len as usize];
        self.stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..24], words(&[xid, 1, 0, 0, 0, 0]), "accepted and executed");
        reply[24..].to_vec()
    }

    fn mount(&mut self) -> Vec<u8> {
        let reply = self.call(MOUNT, 1, &opaque(b"/"));
        assert_eq!(word(&reply, 0), STATUS_OK);
        take_opaque(&reply, 4)
    }

    fn lookup(&mut self, directory: &[u8], name: &str) -> Vec<u8> {
        let reply = self.call(NFS, LOOKUP, &[opaque(directory), opaque(name.as_bytes())].concat());
        assert_eq!(word(&reply, 0), STATUS_OK, "{name}");
        take_opaque(&reply, 4)
    }

    /// Reads the beginning of a file: the status, or the bytes.
    fn read(&mut self, handle: &[u8], count: u32) -> Result<Vec<u8>, u32> {
        let reply = self.call(NFS, READ, &[opaque(handle), words(&[0, 0, count])].concat());
        match word(&reply, 0) {
            STATUS_OK => Ok(take_opaque(&reply, 4 + ATTRIBUTES_BYTES + 8)),
            status => Err(status),
        }
    }

    /// Lists a directory with replies of at most `max_bytes`. Returns the names, and the number of
    /// replies.
    fn list(&mut self, directory: &[u8], max_bytes: u32) -> (Vec<String>, usize) {
        let (mut names, mut cookie, mut replies) = (Vec::new(), [0; 8], 0);
        loop {
            let rest = [&cookie[..], &[0; 8], &max_bytes.to_be_bytes()].concat();
            let reply = self.call(NFS, READDIR, &[opaque(directory), rest].concat());
            assert_eq!(word(&reply, 0), STATUS_OK);
            assert!(reply.len() <= max_bytes as usize);
            replies += 1;
            let mut at = 4 + ATTRIBUTES_BYTES + 8;
            while word(&reply, at) == 1 {
                let name = take_opaque(&reply, at + 12);
                at += 16 + name.len().next_multiple_of(4);
                cookie.copy_from_slice(&reply[at..at + 8]);
                at += 8;
                names.push(String::from_utf8(name).unwrap());
            }
            if word(&reply, at + 4) == 1 {
                return (names, replies);
            }
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn take_opaque(bytes: &[u8], at: usize) -> Vec<u8> {
    let len = word(bytes, at) as usize;
    bytes[at + 4..at + 4 + len].to_vec()
}

/// A listing of many parts gives each name once, and a handle is good after a restart, even of a
/// file that was moved to a directory beside. The next file of the same name has another handle.
#[test]
fn cookies_continue_listings_and_handles_survive_restarts() {
    if !is_root("nfs_restart") {
        return;
    }
    let files = Files::new();
    let kind = DeviceKind::Xdp;
    let testbed = Testbed::new(kind);
    let server = serve(&testbed, kind, &files, &[]);
    let mut client = Client::connect(&testbed, SERVER_V6);
    let root = client.mount();
    let many = client.lookup(&root, "many");
    let (names, replies) = client.list(&many, 4096);
    assert!(replies > 10, "{replies}");
    assert_eq!(names.len(), MANY + 2, "with . and ..");
    assert_eq!(BTreeSet::from_iter(&names).len(), MANY + 2);
    let inner = client.lookup(&root, "inner");
    let deep = client.lookup(&inner, "deep");
    let large = client.lookup(&deep, "large");
    let block = client.lookup(&inner, "block");
    let one = client.lookup(&root, "one");
    assert_eq!(client.lookup(&deep, ".."), inner);
    assert_eq!(client.lookup(&root, ".."), root, "nothing is above the export");
    let removed = client.call(NFS, REMOVE, &[opaque(&root), opaque(b"one")].concat());
    assert_eq!(word(&removed, 0), STATUS_READ_ONLY);
    server.stop();

    fs::rename(files.root().join("inner/block"), files.root().join("inner/moved")).unwrap();
    fs::rename(files.root().join("one"), files.folder.path().join("outside")).unwrap();
    fs::write(files.root().join("one"), "another").unwrap();
    let server = serve(&testbed, kind, &files, &[]);
    let mut client = Client::connect(&testbed, SERVER_V4);
    assert_eq!(client.read(&large, 5), Ok(vec![0, 1, 2, 3, 4]));
    assert_eq!(client.read(&block, 3), Ok(vec![0, 1, 2]));
    assert_eq!(client.read(&one, 3), Err(STATUS_STALE), "the file is outside now");
    assert_eq!(client.read(&[7; 20], 3), Err(STATUS_BAD_HANDLE));
    let (names, _) = client.list(&many, 65_536);
    assert_eq!(names.len(), MANY + 2);
    server.stop();
}

/// Resident memory of a process in bytes.
fn resident_bytes(pid: impl std::fmt::Display) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Sends bytes, and returns once the server has closed the connection.
fn send_until_closed(testbed: &Testbed, server: &str, bytes: &[u8]) {
    let mut client = Client::connect(testbed, server);
    // The server may close before it has read all.
    let _ = client.stream.write_all(bytes);
    let mut rest = Vec::new();
    match client.stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
    }
}

/// Garbage in every place of a call closes its connection at most, takes no memory, and keeps no
/// other client waiting.
#[test]
fn hostile_calls_close_their_connection_at_most() {
    if !is_root("nfs_hostile") {
        return;
    }
    let files = Files::new();
    let kind = DeviceKind::Xdp;
    let testbed = Testbed::new(kind);
    let server = serve(&testbed, kind, &files, &["--progress-timeout", "1"]);
    let mut other = Client::connect(&testbed, SERVER_V4);
    let root = other.mount();
    let one = other.lookup(&root, "one");
    let before = resident_bytes(server.pid());
    let header = |len: u32| words(&[len, 1, 0, 2, NFS, 3, READ, 0, 0, 0, 0]);
    let mut state = 7_u32;
    let mut random = |len: usize| -> Vec<u8> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..len).map(|_| next()).collect()
    };
    let last = 1 << 31 | 40;
    for server in SERVERS {
        // Marks of 2 GiB, in one fragment and in many; a reply; a call that never ends.
        send_until_closed(&testbed, server, &[0xff; 4]);
        send_until_closed(
            &testbed,
            server,
            &[&[0x7f, 0xff, 0xff, 0xff][..], &random(5000)].concat(),
        );
        send_until_closed(&testbed, server, &[0; 100_000]);
        send_until_closed(&testbed, server, &words(&[last, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]));
        send_until_closed(&testbed, server, &header(last)[..20]);
        for _ in 0..20 {
            send_until_closed(&testbed, server, &random(3000));
        }
        // Lengths above 4 GiB in credentials, and a call shorter than its header.
        let credentials = words(&[last, 1, 0, 2, NFS, 3, READ, 1, u32::MAX, 0, 0]);
        send_until_closed(&testbed, server, &credentials);
        send_until_closed(&testbed, server, &words(&[1 << 31 | 8, 1, 0]));
    }
    for server in SERVERS {
        let mut client = Client::connect(&testbed, server);
        for procedure in 0..30 {
            for arguments in [vec![], words(&[u32::MAX]), words(&[64, 1]), random(200)] {
                let mut call = words(&[9, 0, 2, NFS, 3, procedure, 0, 0, 0, 0]);
                call.extend_from_slice(&arguments);
                let mark = (call.len() as u32 | 1 << 31).to_be_bytes();
                client.stream.write_all(&[&mark, &call[..]].concat()).unwrap();
                let mut mark = [0; 4];
                client.stream.read_exact(&mut mark).unwrap();
                let mut reply = vec![0; (u32::from_be_bytes(mark) & !(1 << 31)) as usize];
                client.stream.read_exact(&mut reply).unwrap();
                assert_eq!(word(&reply, 0), 9, "procedure {procedure}");
            }
        }
        // Invented handles of this export.
        for _ in 0..50 {
            let mut handle = one.clone();
            handle[8..16].copy_from_slice(&random(8));
            assert!(client.read(&handle, 10).is_err());
        }
    }
    assert_eq!(other.read(&one, 10), Ok(vec![0]));
    let grown = resident_bytes(server.pid()).saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes");
    server.stop();
}

/// Clients that ask for much and read nothing are ended before they take more than the memory.
#[test]
fn replies_that_nobody_reads_are_bounded() {
    if !is_root("nfs_memory") {
        return;
    }
    let files = Files::new();
    let kind = DeviceKind::Xdp;
    let testbed = Testbed::new(kind);
    let server = serve(&testbed, kind, &files, &["--memory", "4"]);
    let mut client = Client::connect(&testbed, SERVER_V4);
    let root = client.mount();
    let inner = client.lookup(&root, "inner");
    let block = client.lookup(&inner, "block");
    let before = resident_bytes(server.pid());
    let mut call = words(&[5, 0, 2, NFS, 3, READ, 0, 0, 0, 0]);
    call.extend([opaque(&block), words(&[0, 0, 65_536])].concat());
    let mark = (call.len() as u32 | 1 << 31).to_be_bytes();
    let calls = [&mark, &call[..]].concat().repeat(100);
    let mut greedy = Vec::new();
    for number in 0..200 {
        let mut client = Client::connect(&testbed, SERVERS[number % 2]);
        // The server may end connections meanwhile.
        let _ = client.stream.write_all(&calls);
        greedy.push(client);
    }
    let mut client = Client::connect(&testbed, SERVER_V4);
    assert_eq!(client.read(&block, 3), Ok(vec![0, 1, 2]));
    let grown = resident_bytes(server.pid()).saturating_sub(before);
    assert!(grown < 48 << 20, "{grown} bytes");
    server.stop();
}

#[test]
fn directory_reloads_on_hangup_and_the_server_ends_at_sigterm() {
    if !is_root("nfs_reload") || !has_programs("nfs_reload", &CLIENTS) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("tidegate.toml");
    let select = |name: &str| {
        let directory = folder.path().join(name);
        let text = format!("[nfs]\ndirectory = {:?}\n", directory.to_str().unwrap());
        fs::write(&config, text).unwrap();
        directory
    };
    let make = |directory: &Path, text: &str| {
        fs::create_dir_all(directory).unwrap();
        fs::write(directory.join("page"), text).unwrap();
    };
    make(&select("second"), "second");
    make(&select("first"), "first");
    let testbed = Testbed::shared();
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "nfs", "--io", "kernel", "--config", config.to_str().unwrap()]);
    let mut server = Running::start(&mut command);
    let page =
        |server| cat(&testbed, server, "./page").map(|bytes| String::from_utf8(bytes).unwrap());
    assert_eq!(SERVERS.map(page), [Some("first".to_owned()), Some("first".to_owned())]);
    select("second");
    let line = server.reload();
    assert!(line.starts_with("reloaded: serving") && line.contains("second"), "{line}");
    assert_eq!(SERVERS.map(page), [Some("second".to_owned()), Some("second".to_owned())]);
    select("missing");
    let line = server.reload();
    assert!(line.starts_with("not reloaded") && line.contains("missing"), "{line}");
    assert_eq!(page(SERVER_V4).as_deref(), Some("second"));
    server.stop();
}
