//! Files below one folder.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use rustix::fs::{Mode, OFlags, ResolveFlags, fstat, open, openat2};

use super::conditions::Validators;

/// A folder whose files are served. Nothing outside of it can be reached, by
/// no name and by no link.
#[derive(Debug)]
pub(super) struct Folder {
    fd: OwnedFd,
}

/// What a name stands for.
#[derive(Debug)]
pub(super) enum Found {
    File(Entry),
    /// A folder, and the name does not end as that of one.
    FolderWithoutSlash,
    Nothing,
    /// There is something, but not for us.
    Forbidden,
}

/// A file.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) file: File,
    pub(super) len: u64,
    pub(super) validators: Validators,
    pub(super) media_type: String,
}

impl Folder {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { fd: open(path, flags, Mode::empty())? })
    }

    /// The file that the path of a request names. A name that ends in `/`
    /// stands for the `index.html` there.
    pub(super) fn find(&self, path: &str) -> io::Result<Found> {
        let Some(name) = name_of(path) else { return Ok(Found::Nothing) };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let file = match openat2(&self.fd, &name, flags, Mode::empty(), resolve) {
            Ok(file) => File::from(file),
            Err(error) => return by_error(error),
        };
        let stat = fstat(&file)?;
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::RegularFile => {}
            rustix::fs::FileType::Directory => return Ok(Found::FolderWithoutSlash),
            _ => return Ok(Found::Forbidden),
        }
        let len = u64::try_from(stat.st_size).unwrap_or(0);
        let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
        let modified = Duration::new(seconds, stat.st_mtime_nsec as u32);
        let validators = Validators::new(modified, len);
        Ok(Found::File(Entry { file, len, validators, media_type: media_type(&name) }))
    }
}

/// What an error of opening means to the client; one of ours is an error.
fn by_error(error: rustix::io::Errno) -> io::Result<Found> {
    use rustix::io::Errno;
    match error {
        Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG | Errno::INVAL | Errno::ILSEQ => {
            Ok(Found::Nothing)
        }
        // XDEV: the name leads out of the folder.
        Errno::ACCESS | Errno::PERM | Errno::XDEV | Errno::LOOP | Errno::NXIO | Errno::ISDIR => {
            Ok(Found::Forbidden)
        }
        error => Err(error.into()),
    }
}

/// The name of a file, from the path of a request: decoded, without steps up.
fn name_of(path: &str) -> Option<PathBuf> {
    let decoded = percent_decode_str(path).decode_utf8().ok()?;
    let rest = decoded.strip_prefix('/')?;
    let is_folder = rest.is_empty() || rest.ends_with('/');
    let mut name = PathBuf::from(".");
    for part in rest.split('/').filter(|part| !part.is_empty()) {
        if part == "." || part == ".." || part.contains('\0') {
            return None;
        }
        name.push(part);
    }
    if is_folder {
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
    fn names() {
        let name = |path| name_of(path).map(|name| name.to_str().unwrap().to_owned());
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
    fn nothing_outside_is_found() {
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
        let folder = Folder::open(&root).unwrap();
        let found = |path: &str| folder.find(path).unwrap();
        for path in ["/up", "/absolute", "/loop", "/pipe"] {
            assert!(matches!(found(path), Found::Forbidden), "{path}");
        }
        for path in ["/../secret", "/%2e%2e/secret", "/none", "/page.html/x", "/inner/"] {
            assert!(matches!(found(path), Found::Nothing), "{path}");
        }
        assert!(matches!(found(&format!("/{}", "n".repeat(10_000))), Found::Nothing));
        assert!(matches!(found("/inner"), Found::FolderWithoutSlash));
        for path in ["/page.html", "/inside"] {
            assert!(matches!(found(path), Found::File(entry) if entry.len == 5), "{path}");
        }
        let Found::File(entry) = found("/page.html") else { panic!("it is there") };
        assert_eq!(entry.media_type, "text/html; charset=utf-8");
    }
}
