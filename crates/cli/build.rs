//! Embeds what was built: the commit, where there is one, and a hash of the workspace's sources.
//!
//! Refuses to fail: without git the package version stands for the commit. Invariant: equal sources give an equal hash, wherever they are built.

use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package's folder, asked for when the script runs: two checkouts may share a target folder, and with it the compiled script.
fn package() -> PathBuf {
    PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"))
}

fn main() {
    embed_demo();
    let root = package().join("../..");
    let mut files = Vec::new();
    for folder in ["crates", "xtask"] {
        collect(&root.join(folder), &mut files);
        println!("cargo:rerun-if-changed={}", root.join(folder).display());
    }
    files.push(root.join("Cargo.lock"));
    files.sort();
    let mut hasher = Sha256::new();
    for file in files.iter().filter(|f| f.is_file()) {
        let name = file.strip_prefix(&root).unwrap_or(file);
        hasher.update(name.to_string_lossy().as_bytes());
        hasher.update([0]);
        hasher.update(std::fs::read(file).unwrap_or_default());
    }
    let hash: String = hasher.finalize().iter().take(6).map(|b| format!("{b:02x}")).collect();
    println!("cargo:rerun-if-changed={}", root.join("Cargo.lock").display());
    println!("cargo:rerun-if-changed={}", root.join(".git/HEAD").display());
    println!("cargo:rustc-env=DRAFTHORSE_COMMIT={}", commit(&root));
    println!("cargo:rustc-env=DRAFTHORSE_SOURCES={hash}");
    println!("cargo:rustc-env=DRAFTHORSE_TARGET={}", std::env::var("TARGET").unwrap_or_default());
    println!("cargo:rustc-env=DRAFTHORSE_PROFILE={}", std::env::var("PROFILE").unwrap_or_default());
}

/// `git describe`, or `v` and the version where there is no git.
fn commit(root: &Path) -> String {
    let described = Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(root).output();
    let text = described.ok().filter(|o| o.status.success()).and_then(|o| String::from_utf8(o.stdout).ok());
    text.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()).unwrap_or_else(|| format!("v{}", env!("CARGO_PKG_VERSION")))
}

/// Rust and CUDA sources and manifests under `folder`.
fn collect(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, into);
        } else if path.extension().is_some_and(|e| ["rs", "cu", "cuh", "toml", "html", "js", "css"].iter().any(|x| e == *x)) {
            into.push(path);
        }
    }
}

/// Writes `DEMO_FILES`, the content of demo/ by relative path; empty where the folder is absent.
fn embed_demo() {
    let root = package().join("demo");
    println!("cargo:rerun-if-changed={}", root.display());
    let mut files = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            if entry.path().is_dir() { folders.push(entry.path()) } else { files.push(entry.path()) }
        }
    }
    files.sort();
    let mut text = String::from("/// Files of the demo by relative path.\nconst DEMO_FILES: &[(&str, &[u8])] = &[\n");
    for file in &files {
        let name = file.strip_prefix(&root).expect("it was found below").to_string_lossy().replace('\\', "/");
        text.push_str(&format!("    ({name:?}, include_bytes!({:?})),\n", file.display().to_string()));
    }
    text.push_str("];\n");
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("demo_files.rs");
    std::fs::write(&out, text).expect("OUT_DIR is writable");
}
