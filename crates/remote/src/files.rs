//! Files here: their hashes, remembered by path, size and time of change.
//!
//! Refuses to trust a remembered hash when size or time differ. Invariant: the memory is a hint on disk; losing it costs time only.

use crate::error::RemoteError;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// SHA-256 in hex digits of all that `from` gives.
///
/// # Errors
/// What the reader answers.
pub fn sha256(mut from: impl Read) -> std::io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()),
            n => hasher.update(&buffer[..n]),
        }
    }
}

/// SHA-256 of a file.
///
/// # Errors
/// When it cannot be read.
pub fn sha256_file(path: &Path) -> Result<String, RemoteError> {
    File::open(path).and_then(sha256).map_err(RemoteError::io("read", path))
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Known {
    size_bytes: u64,
    mtime_ns: i128,
    sha256: String,
}

/// Remembered hashes.
#[derive(Debug)]
pub struct HashCache {
    file: Option<PathBuf>,
    known: BTreeMap<PathBuf, Known>,
    changed: bool,
}

impl HashCache {
    /// Those in `file`; without a file nothing is remembered.
    pub fn open(file: Option<PathBuf>) -> HashCache {
        let text = file.as_ref().and_then(|f| std::fs::read(f).ok());
        let known = text.and_then(|t| serde_json::from_slice(&t).ok()).unwrap_or_default();
        HashCache { file, known, changed: false }
    }

    /// Size and SHA-256 of a file.
    ///
    /// # Errors
    /// When it cannot be read, or changes while it is.
    pub fn hash(&mut self, path: &Path) -> Result<(u64, String), RemoteError> {
        let full = path.canonicalize().map_err(RemoteError::io("find", path))?;
        let (size_bytes, mtime_ns) = stamp(&full)?;
        if let Some(known) = self.known.get(&full).filter(|k| (k.size_bytes, k.mtime_ns) == (size_bytes, mtime_ns)) {
            return Ok((size_bytes, known.sha256.clone()));
        }
        let sha256 = sha256_file(&full)?;
        if stamp(&full)? != (size_bytes, mtime_ns) {
            return Err(RemoteError::Changed { path: path.into() });
        }
        self.known.insert(full, Known { size_bytes, mtime_ns, sha256: sha256.clone() });
        self.changed = true;
        Ok((size_bytes, sha256))
    }

    /// Writes what was learnt; a disk that does not take it costs time the next time and nothing else.
    pub fn save(&self) {
        let Some(file) = self.file.as_ref().filter(|_| self.changed) else { return };
        let aside = file.with_extension(format!("{}.new", std::process::id()));
        let written = file.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| {
            std::fs::write(&aside, serde_json::to_vec(&self.known)?)?;
            std::fs::rename(&aside, file)
        });
        if written.is_err() {
            let _ = std::fs::remove_file(&aside);
        }
    }
}

fn stamp(path: &Path) -> Result<(u64, i128), RemoteError> {
    let meta = std::fs::metadata(path).map_err(RemoteError::io("look at", path))?;
    Ok((meta.len(), i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec())))
}

/// All files under `folder`, relative, ascending; hidden ones too. Links are followed, as reading would.
///
/// # Errors
/// When a folder cannot be read.
pub fn walk(folder: &Path) -> Result<Vec<PathBuf>, RemoteError> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(dir) = folders.pop() {
        for entry in std::fs::read_dir(&dir).map_err(RemoteError::io("read", &dir))? {
            let path = entry.map_err(RemoteError::io("read", &dir))?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path.strip_prefix(folder).unwrap_or(&path).to_owned());
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_remembered_until_the_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let (file, memory) = (dir.path().join("f"), dir.path().join("cache/hashes.json"));
        std::fs::write(&file, "abc").unwrap();
        let mut cache = HashCache::open(Some(memory.clone()));
        let (size, hash) = cache.hash(&file).unwrap();
        assert_eq!((size, &hash[..12]), (3, "ba7816bf8f01"));
        cache.save();
        // A planted hash shows that the memory is used as long as size and time are the same.
        let text = std::fs::read_to_string(&memory).unwrap().replace(&hash, "planted");
        std::fs::write(&memory, text).unwrap();
        let mut cache = HashCache::open(Some(memory));
        assert_eq!(cache.hash(&file).unwrap().1, "planted");
        std::fs::write(&file, "abd").unwrap();
        assert_ne!(cache.hash(&file).unwrap().1, "planted");
    }

    #[test]
    fn a_broken_memory_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("m"), "{").unwrap();
        std::fs::write(dir.path().join("f"), "").unwrap();
        let mut cache = HashCache::open(Some(dir.path().join("m")));
        assert_eq!(&cache.hash(&dir.path().join("f")).unwrap().1[..12], "e3b0c44298fc");
    }
}
