//! Headers of the C library, against the functions in Rust: names, signatures, C11 and C++17.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const SOURCES: [&str; 4] =
    ["src/tg.rs", "src/mtcp/mod.rs", "src/fstack/mod.rs", "src/fstack/log.rs"];
const HEADERS: [&str; 9] = [
    "tidegate.h",
    "mtcp_api.h",
    "mtcp_epoll.h",
    "ff_api.h",
    "ff_epoll.h",
    "ff_event.h",
    "ff_log.h",
    "ff_config.h",
    "ff_errno.h",
];
/// Functions that a header itself defines.
const INLINE: [&str; 3] = ["ff_log", "ff_vlog", "ff_set_kevent"];
const LANGUAGES: [(&str, &str, &str); 2] = [("cc", "c", "-std=c11"), ("c++", "c++", "-std=c++17")];

/// Signature of a function: types of the arguments, and of the result.
type Signature = (Vec<String>, Option<String>);

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(CRATE).join(path)).unwrap()
}

fn without_line_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// Splits a text at the bracket that closes the one it begins with.
fn group(text: &str) -> (&str, &str) {
    let mut depth = 0;
    for (at, one) in text.char_indices() {
        depth += i32::from("([{".contains(one)) - i32::from(")]}".contains(one));
        if depth == 0 {
            return (&text[1..at], &text[at + 1..]);
        }
    }
    panic!("no end: {text:.60}");
}

fn name_at_start(text: &str) -> &str {
    let end = text.find(|one: char| !one.is_alphanumeric() && one != '_').unwrap_or(text.len());
    &text[..end]
}

/// Signature from the arguments and what follows them, up to `end`.
fn signature(arguments: &str, rest: &str, end: char) -> Signature {
    let types = arguments.split(',').filter_map(|one| Some(one.split_once(':')?.1.trim().into()));
    let result = rest.split(end).next().unwrap().trim();
    (types.collect(), result.strip_prefix("->").map(|result| result.trim().into()))
}

/// Functions that the sources export.
fn exported() -> BTreeMap<String, Signature> {
    let mut found = BTreeMap::new();
    for source in SOURCES {
        let text = without_line_comments(&read(source));
        for part in text.split("extern \"C\" fn ").skip(1) {
            let name = name_at_start(part);
            let (arguments, rest) = group(&part[name.len()..]);
            found.insert(name.to_owned(), signature(arguments, rest, '{'));
        }
        for part in text.split("export! ").skip(1) {
            let (mut body, _) = group(part);
            while let Some(start) = body.find(|one: char| one.is_alphabetic()) {
                body = &body[start..];
                let name = name_at_start(body);
                let (arguments, rest) = group(&body[name.len()..]);
                found.insert(name.to_owned(), signature(arguments, rest, '='));
                body = group(&rest[rest.find('{').unwrap()..]).1;
            }
        }
    }
    found
}

/// Type in C. The addresses of F-Stack have a type of their own.
fn to_c(function: &str, rust: &str) -> String {
    let address = match function.starts_with("ff_") {
        true => "struct linux_sockaddr",
        false => "struct sockaddr",
    };
    if let Some(to) = rust.strip_prefix("*const ") {
        return match to.starts_with('*') {
            true => format!("{} const *", to_c(function, to)),
            false => format!("const {} *", to_c(function, to)),
        };
    }
    if let Some(to) = rust.strip_prefix("*mut ") {
        return match to {
            "Context" => "mctx_t".into(),
            _ => format!("{} *", to_c(function, to)),
        };
    }
    match rust {
        "c_int" => "int",
        "c_uint" => "unsigned int",
        "c_ulong" => "unsigned long",
        "c_char" => "char",
        "c_void" => "void",
        "u32" => "uint32_t",
        "size_t" | "ssize_t" | "socklen_t" | "nfds_t" | "in_addr_t" | "fd_set" | "sigset_t" => rust,
        "sockaddr" => address,
        "Kevent" => "struct kevent",
        "FfZcMbuf" => "struct ff_zc_mbuf",
        "MtcpConf" => "struct mtcp_conf",
        "MtcpEpollEvent" => "struct mtcp_epoll_event",
        "msghdr" | "mmsghdr" | "iovec" | "pollfd" | "epoll_event" | "timespec" | "timeval" => {
            return format!("struct {rust}");
        }
        "RingEntry" => "struct tg_ring_entry",
        "RingCompletion" => "struct tg_ring_completion",
        "Option<ReadFn>" => "tg_read_function",
        "Option<WriteFn>" => "tg_write_function",
        "Option<ReplyFn>" => "tg_reply_function",
        "Option<LoopFn>" => "loop_func_t",
        "Option<EachFn>" => "each_function",
        "Option<ThreadFn>" => "thread_function",
        "pthread_t" | "pthread_attr_t" => rust,
        "SignalHandler" => "mtcp_sighandler_t",
        _ => panic!("{function}: no type in C for {rust}"),
    }
    .into()
}

/// Runs a compiler on a text; panics with its messages.
fn compile(language: (&str, &str, &str), text: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (compiler, kind, standard) = language;
    let file = folder.path().join("test.source");
    std::fs::write(&file, text).unwrap();
    let mut command = Command::new(compiler);
    command.args(["-x", kind, standard, "-Wall", "-Wextra", "-Werror", "-pedantic"]);
    command.args(["-fsyntax-only", "-I"]).arg(Path::new(CRATE).join("include")).arg(&file);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{kind}: {}", String::from_utf8_lossy(&output.stderr));
}

/// True if the compilers are there.
fn has_compilers() -> bool {
    let has = |(compiler, ..): (&str, &str, &str)| {
        Command::new(compiler).arg("--version").output().is_ok()
    };
    let all = LANGUAGES.into_iter().all(has);
    if !all {
        tidegate_needs::skip("c++", "cc or c++ is not installed");
    }
    all
}

#[test]
fn signatures_are_those_of_the_sources() {
    if !has_compilers() {
        return;
    }
    let mut text: String = HEADERS.iter().map(|header| format!("#include <{header}>\n")).collect();
    text += "typedef void (*each_function)(void **, struct kevent *);\n";
    text += "typedef void *(*thread_function)(void *);\n";
    let functions = exported();
    assert!(functions.len() > 110, "{}", functions.len());
    for (name, (arguments, result)) in &functions {
        let mut types: Vec<String> = arguments.iter().map(|one| to_c(name, one)).collect();
        match name.as_str() {
            // A variable argument in C.
            "ff_fcntl" | "ff_ioctl" => *types.last_mut().unwrap() = "...".into(),
            _ if types.is_empty() => types.push("void".into()),
            _ => {}
        }
        let result = result.as_deref().map_or("void".into(), |result| to_c(name, result));
        let types = types.join(", ");
        writeln!(text, "{result} (*pointer_{name})({types}) = {name};").unwrap();
    }
    LANGUAGES.into_iter().for_each(|language| compile(language, &text));
}

#[test]
fn headers_declare_what_the_sources_export() {
    let mut declared = BTreeSet::new();
    for header in HEADERS {
        let mut text = read(&format!("include/{header}"));
        while let (Some(start), Some(end)) = (text.find("/*"), text.find("*/")) {
            text.replace_range(start..end + 2, " ");
        }
        for line in text.lines().filter(|line| !line.starts_with([' ', '#', '}'])) {
            let Some(at) = line.find('(').filter(|_| !line.starts_with("typedef")) else {
                continue;
            };
            let before = line[..at].trim_end();
            let name = before.rsplit(|one: char| !one.is_alphanumeric() && one != '_').next();
            declared.insert(name.unwrap().to_owned());
        }
    }
    INLINE.iter().for_each(|name| assert!(declared.remove(*name), "{name}"));
    let exported: BTreeSet<String> = exported().into_keys().collect();
    assert_eq!(declared, exported);
}

#[test]
fn each_header_compiles_alone() {
    if !has_compilers() {
        return;
    }
    for header in HEADERS {
        let text = format!("#include <{header}>\n#include <{header}>\nint unused;\n");
        LANGUAGES.into_iter().for_each(|language| compile(language, &text));
    }
}

#[test]
fn exported_names_have_a_version() {
    let map = read("tidegate.map");
    assert!(map.starts_with("TIDEGATE_0.1 {"));
    let patterns: Vec<&str> =
        map.lines().filter_map(|line| line.trim().strip_suffix(';')).collect();
    for name in exported().keys() {
        let covers = |pattern: &&str| match pattern.strip_suffix('*') {
            Some(start) => !start.is_empty() && name.starts_with(start),
            None => name == pattern,
        };
        assert!(patterns.iter().any(covers), "{name} is not in tidegate.map");
    }
}
