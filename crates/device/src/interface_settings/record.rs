//! Records of changed settings, one file each, for as long as the change lasts.
//!
//! A record is locked by the process that made the change (fcntl(2)). The kernel releases that lock
//! with the process, so an unlocked record was left behind. A second lock, of the folder, orders
//! those that restore settings and those that change them.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::access::{Settings, SettingsAccess};
use super::change::SettingsChange;

/// Folder of the records that root makes.
const SYSTEM_FOLDER: &str = "/run/tidegate-interfaces";

/// File whose lock orders those that use the folder.
const LOCK_FILE: &str = "lock";

/// Records of this process. The lock of a file tells only other processes that the file is in use.
static HELD: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Folder of records.
pub(super) struct RecordFolder {
    path: PathBuf,
}

/// The folder's lock, held until this value is dropped.
pub(super) struct FolderLock(#[expect(dead_code, reason = "closing the file unlocks")] File);

impl RecordFolder {
    /// The folder of this user's records: for root below `/run`, otherwise, or if `/run` is
    /// read-only, below `/tmp`. `None` if there is no folder that only this user can change.
    pub(super) fn open() -> Option<Self> {
        let user = rustix::process::geteuid();
        let own = PathBuf::from(format!("/tmp/tidegate-interfaces-{}", user.as_raw()));
        let system = user.is_root().then(|| PathBuf::from(SYSTEM_FOLDER));
        system.into_iter().chain([own]).map(|path| Self { path }).find(|folder| {
            // Fails if the folder exists.
            let _ = DirBuilder::new().mode(0o700).create(&folder.path);
            let is_own = fs::symlink_metadata(&folder.path).is_ok_and(|metadata| {
                metadata.is_dir() && metadata.uid() == user.as_raw() && metadata.mode() & 0o022 == 0
            });
            is_own && folder.open_lock().is_ok()
        })
    }

    fn open_lock(&self) -> io::Result<File> {
        let path = self.path.join(LOCK_FILE);
        File::options().create(true).truncate(false).write(true).mode(0o600).open(path)
    }

    /// Waits for the folder's lock.
    pub(super) fn lock(&self) -> io::Result<FolderLock> {
        let file = self.open_lock()?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
        Ok(FolderLock(file))
    }

    /// Path of the record of a change in the network namespace with this cookie.
    pub(super) fn record_path(&self, namespace: u64, index: u32, settings: &Settings) -> PathBuf {
        let mut name = group_prefix(namespace, index, settings);
        // Each network core may change the settings of its own NAPI instances.
        if let Settings::Napis(napis) = settings {
            name.extend(napis.iter().map(|napi| napi.id).min().map(|id| format!("-{id}")));
        }
        self.path.join(name)
    }

    /// Paths of the records of changes to the same group of settings of an interface, by others than
    /// this process.
    pub(super) fn records_of_others(
        &self,
        namespace: u64,
        index: u32,
        settings: &Settings,
    ) -> Vec<PathBuf> {
        let prefix = group_prefix(namespace, index, settings);
        let is_of_group = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            let rest = name.and_then(|name| name.strip_prefix(&prefix));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        };
        let mut records = self.records_in(namespace);
        records.retain(|path| is_of_group(path) && !held().contains(path));
        records
    }

    /// Paths of the records of a network namespace.
    pub(super) fn records_in(&self, namespace: u64) -> Vec<PathBuf> {
        let prefix = format!("{namespace}-");
        let is_record = |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|n| n.starts_with(&prefix))
        };
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(is_record).collect()
    }
}

/// First part of the names of all records of a group of settings.
fn group_prefix(namespace: u64, index: u32, settings: &Settings) -> String {
    let group = match settings {
        Settings::Deferral { .. } | Settings::Napis(_) => "deferral",
        Settings::Gro(_) => "gro",
    };
    format!("{namespace}-{index}-{group}")
}

/// Text of a record whose process has ended; `None` if there is no record.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] if the process lives, otherwise the error of the file.
pub(super) fn left_behind(path: &Path) -> io::Result<Option<String>> {
    if held().iter().any(|held| held == path) {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    let mut file = match File::options().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    match rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::AGAIN | Errno::ACCESS) => return Err(io::ErrorKind::ResourceBusy.into()),
        other => other?,
    }
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(Some(text))
}

fn held() -> std::sync::MutexGuard<'static, Vec<PathBuf>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Record of a change by this process.
pub(super) struct SettingsRecord {
    path: PathBuf,
    /// Locked while the change lasts.
    _file: File,
}

impl SettingsRecord {
    /// Writes a record, in a locked folder.
    pub(super) fn create(path: PathBuf, text: &str) -> io::Result<Self> {
        let mut options = File::options();
        let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&path)?;
        rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.write_all(text.as_bytes())?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        held().push(path.clone());
        Ok(Self { path, _file: file })
    }
}

impl Drop for SettingsRecord {
    fn drop(&mut self) {
        held().retain(|held| *held != self.path);
    }
}

/// Restores the settings of a change that is over, and removes its record. Does nothing if another
/// process has meanwhile changed the settings. `text` is the text of the change's record.
pub(super) fn finish(
    folder: Option<&RecordFolder>,
    path: Option<&Path>,
    text: &str,
    change: &SettingsChange,
    access: &mut SettingsAccess,
) {
    let _lock = folder.and_then(|folder| folder.lock().ok());
    let current = path.map(fs::read_to_string);
    // Errors are ignored: the interface may be gone, and its settings with it.
    match (current, path) {
        (Some(Ok(current)), Some(path)) => {
            if current == text {
                let _ = change.restore(access);
                let _ = fs::remove_file(path);
            }
        }
        _ => {
            let _ = change.restore_if_in_force(access);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn record_is_in_use_until_its_process_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("7-2-gro");
        assert_eq!(left_behind(&path).unwrap(), None);
        let record = SettingsRecord::create(path.clone(), "text").unwrap();
        let error = left_behind(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "this process has the record");
        drop(record);
        assert_eq!(left_behind(&path).unwrap().as_deref(), Some("text"));

        // Another process holds the lock until its standard input ends.
        let script = "import fcntl,sys; f=open(sys.argv[1],'r+'); fcntl.lockf(f,fcntl.LOCK_EX); \
                      print('locked',flush=True); sys.stdin.read()";
        let mut other = Command::new("python3")
            .args(["-c", script])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut byte = [0];
        other.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
        assert_eq!(left_behind(&path).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(left_behind(&path).unwrap().as_deref(), Some("text"));
    }

    #[test]
    fn records_are_listed_by_namespace() {
        let folder = tempfile::tempdir().unwrap();
        let records = RecordFolder { path: folder.path().to_owned() };
        let gro = Settings::Gro(crate::netlink::GroMaxSizes { v6: 1, v4: 1 });
        for namespace in [7, 71] {
            fs::write(records.record_path(namespace, 3, &gro), "").unwrap();
        }
        drop(records.lock().unwrap());
        assert_eq!(records.records_in(7), [folder.path().join("7-3-gro")]);
    }
}
