//! Files below the document root.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use rustix::fs::{Mode, OFlags, ResolveFlags, fstat, open, openat2};

use super::conditions::Validators;

/// Directory whose files are served. No path and no symbolic link leads out of it.
#[derive(Debug)]
pub struct DocumentRoot {
    fd: OwnedFd,
}

/// Result of looking up a request path.
#[derive(Debug)]
pub(super) enum FileLookup {
    File(FileEntry),
    /// A directory, but the path does not end in `/`.
    DirectoryWithoutSlash,
    NotFound,
    /// The path exists but may not be served.
    Forbidden,
}

/// Open file with its metadata.
#[derive(Debug)]
pub(super) struct FileEntry {
    pub(super) file: File,
    pub(super) len: u64,
    pub(super) validators: Validators,
    pub(super) media_type: String,
}

impl DocumentRoot {
    /// Opens a directory.
    ///
    /// # Errors
    /// When there is no such directory, or the process may not open it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { fd: open(path, flags, Mode::empty())? })
    }

    /// Looks up the file that a request path names. A path that ends in `/` names the
    /// `index.html` in that directory.
    pub(super) fn find(&self, path: &str) -> io::Result<FileLookup> {
        let Some(name) = decode_path(path) else { return Ok(FileLookup::NotFound) };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let file = match openat2(&self.fd, &name, flags, Mode::empty(), resolve) {
            Ok(file) => File::from(file),
            Err(error) => return lookup_error(error),
        };
        let stat = fstat(&file)?;
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::RegularFile => {}
            rustix::fs::FileType::Directory => return Ok(FileLookup::DirectoryWithoutSlash),
            _ => return Ok(FileLookup::Forbidden),
        }
        let len = u64::try_from(stat.st_size).unwrap_or(0);
        let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
        let modified = Duration::new(seconds, stat.st_mtime_nsec as u32);
        let validators = Validators::new(modified, len);
        Ok(FileLookup::File(FileEntry { file, len, validators, media_type: media_type(&name) }))
    }
}

/// Maps an error of `openat2` to a lookup result; server-side failures stay errors.
fn lookup_error(error: rustix::io::Errno) -> io::Result<FileLookup> {
    use rustix::io::Errno;
    match error {
        Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG | Errno::INVAL | Errno::ILSEQ => {
            Ok(FileLookup::NotFound)
        }
        // XDEV: the path leads out of the document root.
        Errno::ACCESS | Errno::PERM | Errno::XDEV | Errno::LOOP | Errno::NXIO | Errno::ISDIR => {
            Ok(FileLookup::Forbidden)
        }
        error => Err(error.into()),
    }
}

/// Decodes a request path into a relative file path; `None` when a component is `.` or `..`.
fn decode_path(path: &str) -> Option<PathBuf> {
    let decoded = percent_decode_str(path).decode_utf8().ok()?;
    let rest = decoded.strip_prefix('/')?;
    let is_directory = rest.is_empty() || rest.ends_with('/');
    let mut name = PathBuf::from(".");
    for part in rest.split('/').filter(|part| !part.is_empty()) {
        if part == "." || part == ".." || part.contains('\0') {
            return None;
        }
        name.push(part);
    }
    if is_directory {
        name.push("index.html");
    }
    Some(name)
}

fn media_type(name: &Path) -> String {
    let guess = mime_guess::from_path(name).first_or_octet_stream();
    match guess.type_() {
        mime_guess::mime::TEXT => format!("{guess}; charset=utf-8"),
        _ => guess.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_request_paths() {
        let name = |path| decode_path(path).map(|name| name.to_str().unwrap().to_owned());
        assert_eq!(name("/").as_deref(), Some("./index.html"));
        assert_eq!(name("/a/b.txt").as_deref(), Some("./a/b.txt"));
        assert_eq!(name("//a///b").as_deref(), Some("./a/b"));
        assert_eq!(name("/a%20b%2Fc").as_deref(), Some("./a b/c"));
        assert_eq!(name("/a/").as_deref(), Some("./a/index.html"));
        for path in ["", "a", "/..", "/a/../b", "/%2e%2e/b", "/a%2f..%2fb", "/%00", "/%ff", "/./a"]
        {
            assert_eq!(name(path), None, "{path}");
        }
    }

    #[test]
    fn rejects_paths_outside_the_root() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "x").unwrap();
        let root = outside.path().join("root");
        std::fs::create_dir_all(root.join("inner")).unwrap();
        std::fs::write(root.join("page.html"), "hello").unwrap();
        let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, root.join(name)).unwrap();
        link(Path::new("../secret"), "up");
        link(&outside.path().join("secret"), "absolute");
        link(Path::new("page.html"), "inside");
        link(Path::new("loop"), "loop");
        rustix::fs::mkfifoat(rustix::fs::CWD, root.join("pipe"), Mode::RWXU).unwrap();
        let document_root = DocumentRoot::open(&root).unwrap();
        let found = |path: &str| document_root.find(path).unwrap();
        for path in ["/up", "/absolute", "/loop", "/pipe"] {
            assert!(matches!(found(path), FileLookup::Forbidden), "{path}");
        }
        for path in ["/../secret", "/%2e%2e/secret", "/none", "/page.html/x", "/inner/"] {
            assert!(matches!(found(path), FileLookup::NotFound), "{path}");
        }
        assert!(matches!(found(&format!("/{}", "n".repeat(10_000))), FileLookup::NotFound));
        assert!(matches!(found("/inner"), FileLookup::DirectoryWithoutSlash));
        for path in ["/page.html", "/inside"] {
            assert!(matches!(found(path), FileLookup::File(entry) if entry.len == 5), "{path}");
        }
        let FileLookup::File(entry) = found("/page.html") else {
            panic!("/page.html was not found")
        };
        assert_eq!(entry.media_type, "text/html; charset=utf-8");
    }
}
