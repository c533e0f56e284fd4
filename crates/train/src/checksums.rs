//! `SHA256SUMS` of a folder: what each of its files must hold, in the form that `sha256sum --check` reads.
//!
//! Job: write the list when a folder is complete, and hold bytes read later to it. Refuses to repair. Invariants: the list names files of its own folder
//! only; a folder without a list is not proven, which the caller says aloud.

use drafthorse_data::{DataError, sha256_file, sha256_hex};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// Name of the list.
pub const SUMS_FILE: &str = "SHA256SUMS";

/// File name → SHA-256 in hexadecimal.
pub(crate) struct Sums(BTreeMap<String, String>);

impl Sums {
    /// Hashes `names` of `folder` as they lie on the disk and writes the list; does not sync it.
    ///
    /// # Errors
    /// When a file cannot be read or the list cannot be written.
    pub(crate) fn write(folder: &Path, names: &[&str]) -> io::Result<()> {
        let mut text = String::new();
        for name in names {
            let sum = sha256_file(&folder.join(name)).map_err(|e| match e {
                DataError::Io { source, .. } => source,
                other => io::Error::other(other.to_string()),
            })?;
            text.push_str(&format!("{sum}  {name}\n"));
        }
        fs::write(folder.join(SUMS_FILE), text)
    }

    /// Reads the list of `folder`; `None` when there is none.
    ///
    /// # Errors
    /// When it cannot be read; a list that is not one is [`io::ErrorKind::InvalidData`].
    pub(crate) fn read(folder: &Path) -> io::Result<Option<Sums>> {
        let text = match fs::read_to_string(folder.join(SUMS_FILE)) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let pairs = text.lines().map(|line| {
            let (sum, name) = line.split_once("  ")?;
            (sum.len() == 64 && sum.bytes().all(|b| b.is_ascii_hexdigit())).then(|| (name.to_owned(), sum.to_owned()))
        });
        let pairs: Option<BTreeMap<String, String>> = pairs.collect();
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "it is no list of SHA-256 sums");
        pairs.map(|pairs| Some(Sums(pairs))).ok_or_else(invalid)
    }

    /// What is wrong with file `name` that holds `bytes`, if anything.
    pub(crate) fn fault(&self, name: &str, bytes: &[u8]) -> Option<String> {
        let Some(wanted) = self.0.get(name) else { return Some(format!("{SUMS_FILE} does not list it")) };
        let got = sha256_hex(bytes);
        (got != *wanted).then(|| format!("its SHA-256 is {got:.12}…, {SUMS_FILE} says {wanted:.12}…"))
    }
}
