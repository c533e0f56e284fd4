//! The repository's files as text, so that rules are plain functions and their tests need no disk.
//!
//! Refuses to follow links and to look into what builds and runs leave behind. Invariant: paths are relative to the root, with `/`, ascending.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Folders that are nobody's source, wherever they are.
const SKIPPED: [&str; 6] = [".git", "target", ".venv", ".cuda", "__pycache__", ".pytest_cache"];
/// Folders at the root that runs and datasets go to; as in `.gitignore`.
const SKIPPED_AT_ROOT: [&str; 2] = ["runs", "data"];
/// What is read as text.
const TEXT: [&str; 12] = ["rs", "toml", "md", "py", "cu", "cuh", "js", "css", "html", "sh", "txt", "svg"];

/// The repository's root.
pub fn root() -> PathBuf {
    // What cargo says when it runs this; what was baked in may be another checkout's, where two share a target folder.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    package.parent().expect("xtask lies in the root").to_path_buf()
}

/// Every file, with its text if it is one of the kinds that rules read.
#[derive(Default)]
pub struct Tree {
    /// Path → text; empty for other kinds.
    pub files: BTreeMap<String, String>,
}

impl Tree {
    /// Reads a checkout.
    pub fn read(root: &Path) -> Result<Tree, String> {
        let mut tree = Tree::default();
        walk(root, root, &mut tree.files).map_err(|e| format!("cannot read {}: {e}", root.display()))?;
        Ok(tree)
    }

    /// A file's text; empty if there is no such file.
    pub fn text(&self, path: &str) -> &str {
        self.files.get(path).map_or("", String::as_str)
    }

    /// Files that end in `.{ext}`.
    pub fn with_ext<'a>(&'a self, ext: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files.iter().filter(move |(p, _)| extension(p) == ext).map(|(p, t)| (p.as_str(), t.as_str()))
    }

    /// Whether a file or a folder has this path.
    pub fn has(&self, path: &str) -> bool {
        let folder = format!("{path}/");
        path.is_empty() || self.files.contains_key(path) || self.files.keys().any(|p| p.starts_with(&folder))
    }

    /// Names of the folders right under `folder` (empty: the root).
    pub fn folders(&self, folder: &str) -> Vec<String> {
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let mut names: Vec<String> =
            self.files.keys().filter_map(|p| p.strip_prefix(&prefix)?.split_once('/').map(|(name, _)| name.to_owned())).collect();
        names.dedup();
        names
    }

    /// Stems of the files right under `folder` that end in `.{ext}`.
    pub fn stems(&self, folder: &str, ext: &str) -> Vec<String> {
        let prefix = format!("{folder}/");
        let suffix = format!(".{ext}");
        let direct = |p: &String| p.strip_prefix(&prefix)?.strip_suffix(&suffix).filter(|s| !s.contains('/')).map(str::to_owned);
        self.files.keys().filter_map(direct).collect()
    }
}

/// What follows the last dot of a file's name.
pub fn extension(path: &str) -> &str {
    path.rsplit('/').next().and_then(|name| name.rsplit_once('.')).map_or("", |(_, ext)| ext)
}

fn walk(root: &Path, folder: &Path, into: &mut BTreeMap<String, String>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let kind = entry.file_type()?;
        if kind.is_dir() {
            let at_root = folder == root;
            if !(SKIPPED.contains(&&*name) || at_root && SKIPPED_AT_ROOT.contains(&&*name)) {
                walk(root, &path, into)?;
            }
        } else if kind.is_file() {
            let relative = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
            let is_text = TEXT.contains(&extension(&relative)) || relative == ".ci/run";
            let text = if is_text { std::fs::read_to_string(&path)? } else { String::new() };
            into.insert(relative, text);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_stems_and_existence_are_read_from_paths() {
        let files = ["a.rs", "crates/x/src/lib.rs", "crates/x/src/op/one.rs", "crates/y/a.md"];
        let tree = Tree { files: files.iter().map(|p| (p.to_string(), String::new())).collect() };
        assert_eq!(tree.folders(""), ["crates"]);
        assert_eq!(tree.folders("crates"), ["x", "y"]);
        assert_eq!(tree.stems("crates/x/src/op", "rs"), ["one"]);
        assert!(tree.has("crates/x/src") && tree.has("a.rs") && !tree.has("crates/x/s"));
        assert_eq!((extension("a/b.c/d"), extension("a/.b"), extension("x.tar.gz")), ("", "b", "gz"));
    }
}
