//! Computes the build id: a hash of the sources of the product. The laboratory is no part of the
//! product, so its changes rebuild only the laboratory.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Parts of a crate that are compiled into it.
const COMPILED: [&str; 5] = ["Cargo.toml", "build.rs", "src", "bpf", "dpdk"];
/// Folders of the crates that only the laboratory or tests use.
const LABORATORY: [&str; 4] = ["lab", "needs", "queues", "sim"];

fn main() -> io::Result<()> {
    let own = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let crates = own.parent().unwrap_or(&own);
    let mut inputs = vec![crates.join("../Cargo.lock")];
    for entry in fs::read_dir(crates)? {
        let entry = entry?;
        if !LABORATORY.iter().any(|folder| entry.file_name() == *folder) {
            inputs.extend(COMPILED.map(|part| entry.path().join(part)));
        }
    }
    let mut files = BTreeSet::new();
    for input in inputs.iter().filter(|input| input.exists()) {
        println!("cargo::rerun-if-changed={}", input.display());
        collect(input, &mut files)?;
    }
    let mut hasher = DefaultHasher::new();
    for variable in ["PROFILE", "OPT_LEVEL", "TARGET"] {
        env::var(variable).ok().hash(&mut hasher);
    }
    for file in &files {
        file.strip_prefix(crates).unwrap_or(file).hash(&mut hasher);
        fs::read(file)?.hash(&mut hasher);
    }
    println!("cargo::rustc-env=TIDEGATE_BUILD_ID={:016x}", hasher.finish());
    Ok(())
}

/// Adds a file, or all files in a folder.
fn collect(path: &Path, files: &mut BTreeSet<PathBuf>) -> io::Result<()> {
    if !path.is_dir() {
        files.insert(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        collect(&entry?.path(), files)?;
    }
    Ok(())
}
