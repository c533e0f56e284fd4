//! Read-only mapping of a whole file, shared by every reader of large files (checkpoints, Arrow datasets).
//!
//! Job: one safe type over `mmap(2)`. It refuses directories and other non-regular files, because their length means
//! nothing. An empty file maps to an empty slice.
//! Invariants: the mapping is read-only and private; its address and length never change while any clone lives; this is
//! the only file outside `crates/cuda` with `unsafe`. A file that somebody truncates *while it is mapped* ends the
//! process with SIGBUS: the published files this program reads are written aside and renamed, never cut in place.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

/// A file mapped read-only. Clones share the mapping, which is unmapped with the last of them.
#[derive(Clone)]
pub struct MappedFile {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    /// `None` for an empty file: a mapping of length zero is refused by some kernels.
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps the whole file at `path`.
    ///
    /// # Errors
    /// Whatever `open`, `stat` or `mmap` answer; `InvalidInput` when `path` is not a regular file. The error does not
    /// repeat the path: callers name it in their own error.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        let file = File::open(path)?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file, so it cannot be mapped"));
        }
        let map = if meta.len() == 0 {
            None
        } else {
            // SAFETY: the mapping is read-only and private, and `Mmap` keeps it alive for as long as any slice borrowed
            // from `self` can live. Bytes could only change beneath us if another process wrote into this file in
            // place; the files read here are published by rename, and bytes are only ever read as plain integers, for
            // which every bit pattern is valid.
            Some(unsafe { Mmap::map(&file)? })
        };
        Ok(Self { inner: Arc::new(Inner { path: path.to_owned(), map }) })
    }

    /// The path that was opened, as it was given.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Tells the kernel that the file is about to be read from front to back, so that it reads ahead. Advice only: a
    /// kernel that declines it changes nothing but speed, which is why its answer is not an error here.
    pub fn advise_sequential(&self) {
        #[cfg(unix)]
        if let Some(map) = &self.inner.map {
            let _ = map.advise(memmap2::Advice::Sequential);
        }
    }

    /// Gives the pages that were read back to the kernel: what has been copied out no longer counts as this process's memory. A later read brings them
    /// in again from the file. Advice only, as above.
    pub fn release(&self) {
        #[cfg(unix)]
        if let Some(map) = &self.inner.map {
            // SAFETY: the mapping is private, read-only and backed by the file, and nothing writes to it, so dropped pages come back with the same bytes.
            let _ = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.inner.map.as_deref().unwrap_or(&[])
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MappedFile").field("path", &self.inner.path).field("bytes", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_one_mapping_that_outlives_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        std::fs::write(&path, b"drafthorse").unwrap();
        let first = MappedFile::open(&path).unwrap();
        let second = first.clone();
        let address = first.as_ptr();
        drop(first);
        assert_eq!(&second[..], b"drafthorse");
        assert_eq!(second.as_ptr(), address);
        let read_elsewhere = std::thread::spawn(move || second.len()).join().unwrap();
        assert_eq!(read_elsewhere, 10);
    }

    #[test]
    fn released_pages_leave_memory_and_read_the_same_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("big.bin");
        let bytes: Vec<u8> = (0..8u32 << 20).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = MappedFile::open(&path).unwrap();
        assert!(file[..] == bytes[..]);
        file.release();
        // Resident kB of this mapping, by the kernel's account.
        let start = format!("{:x}-", file.as_ptr() as usize);
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let mine = smaps.lines().skip_while(|l| !l.starts_with(&start)).find(|l| l.starts_with("Rss:"));
        if let Some(line) = mine {
            assert_eq!(line.split_whitespace().nth(1), Some("0"), "{line}");
        }
        assert!(file[..] == bytes[..]);
    }

    #[test]
    fn an_empty_file_is_an_empty_slice_and_a_folder_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("empty");
        std::fs::write(&path, b"").unwrap();
        assert!(MappedFile::open(&path).unwrap().is_empty());
        assert_eq!(MappedFile::open(dir.path()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(MappedFile::open(dir.path().join("absent")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
