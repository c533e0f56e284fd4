//! Opens a tokenized dataset in HF `save_to_disk` layout, ours or a foreign one, lazily.
//!
//! Opening reads state.json, the card and the index, and asks the file system for file lengths; data files are mapped when
//! a first row is read, and rows are copied straight out of the mapping. A foreign dataset is read once to build its
//! index, which is kept beside it, or in the cache folder when it is read-only.
//! It refuses files that changed length since they were indexed, and rows whose stored lists disagree with the index.
//! Invariant: after opening, nothing about a dataset changes, so every method takes `&self` and may run on any thread.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use drafthorse_models::mmap::MappedFile;
use serde_json::Value;

use crate::card::Card;
use crate::error::{DataError, Result};
use crate::hash::sha256_hex;
use crate::index::{BatchPlace, ColumnType, ElementType, Index};

/// File name of the index inside a dataset folder.
pub const INDEX_FILE: &str = "drafthorse-index.bin";

/// How to open a dataset.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Where the index of a read-only dataset is kept.
    pub cache_dir: Option<PathBuf>,
}

/// An open dataset. Cheap to share between threads behind an `Arc`.
#[derive(Debug)]
pub struct Dataset {
    dir: PathBuf,
    index: Index,
    card: Option<Card>,
    notices: Vec<String>,
    maps: Vec<OnceLock<MappedFile>>,
}

/// Tokens of one row, reused between reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Row {
    /// Token ids, `[T]`.
    pub ids: Vec<i32>,
    /// 1 where supervised, else 0, `[T]`.
    pub mask: Vec<i8>,
}

impl Dataset {
    /// Opens the dataset in `dir`. `progress` receives (bytes done, bytes in all) while a missing index is built.
    ///
    /// # Errors
    /// When the folder is not a saved dataset, a file is absent or cut short, or the content is refused by
    /// [`Index::scan`].
    pub fn open(dir: &Path, options: &OpenOptions, progress: &dyn Fn(u64, u64)) -> Result<Self> {
        let names = data_files(dir)?;
        let mut notices = Vec::new();
        let beside = dir.join(INDEX_FILE);
        let cached = options.cache_dir.as_ref().map(|c| {
            let canonical = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
            c.join(format!("index-{}.bin", &sha256_hex(canonical.as_os_str().as_encoded_bytes())[..32]))
        });
        let found = [Some(&beside), cached.as_ref()].into_iter().flatten().find(|p| p.exists());
        let index = match found {
            Some(path) => {
                let index = Index::read(path)?;
                match stale(dir, &names, &index)? {
                    None => Some(index),
                    // Our own datasets never change after they were published, so a difference there is damage.
                    Some(what) if dir.join(crate::card::CARD_FILE).exists() => {
                        return Err(DataError::dataset(dir, what, "copy the dataset again; a file is cut short or foreign"));
                    }
                    Some(what) => {
                        notices.push(format!("the index {} is out of date ({what}); building it again", path.display()));
                        None
                    }
                }
            }
            None => None,
        };
        let index = match index {
            Some(index) => index,
            None => {
                let index = Index::scan(dir, &names, progress)?;
                match (index.write(&beside), &cached) {
                    (Ok(()), _) => notices.push(format!("index written to {}", beside.display())),
                    (Err(_), Some(cached)) => {
                        let parent = cached.parent().unwrap_or(Path::new("."));
                        std::fs::create_dir_all(parent).map_err(DataError::io("write", parent))?;
                        index.write(cached)?;
                        notices.push(format!("{} is read-only: index written to {}", dir.display(), cached.display()));
                    }
                    (Err(e), None) => {
                        let why = e.to_string();
                        let why = why.lines().next().unwrap_or_default();
                        notices.push(format!("the index was not kept, and is built at every start: {why}"));
                    }
                }
                index
            }
        };
        let maps = index.header.files.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { dir: dir.to_owned(), index, card: Card::read(dir)?, notices, maps })
    }

    /// The dataset folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.index.lengths.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.index.lengths.is_empty()
    }

    /// Lengths, counts and totals of all rows.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The card that `prepare` wrote; a foreign dataset has none.
    pub fn card(&self) -> Option<&Card> {
        self.card.as_ref()
    }

    /// What opening did that a user should be told.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// SHA-256 over the content of all rows.
    pub fn fingerprint(&self) -> &str {
        &self.index.header.fingerprint
    }

    /// How many data files have been mapped so far.
    pub fn mapped_files(&self) -> usize {
        self.maps.iter().filter(|m| m.get().is_some()).count()
    }

    /// Checks that every token id has an embedding row.
    ///
    /// # Errors
    /// Names a row that holds the largest id when it does not fit.
    pub fn check_vocab(&self, vocab_size: u32) -> Result<()> {
        let header = &self.index.header;
        if header.max_token_id < vocab_size {
            return Ok(());
        }
        Err(DataError::Row {
            path: self.dir.clone(),
            row: header.max_token_row,
            what: format!("token id {} has no embedding row; the target has {vocab_size}", header.max_token_id),
        })
    }

    /// Checks that the dataset was made with the target's tokenizer, by the card's hash. A dataset without a card passes;
    /// the answer is then `false`, for the caller to say aloud.
    ///
    /// # Errors
    /// When the card names another tokenizer.
    pub fn check_tokenizer(&self, tokenizer_sha256: &str) -> Result<bool> {
        let Some(card) = &self.card else { return Ok(false) };
        if card.tokenizer_sha256 == tokenizer_sha256 {
            return Ok(true);
        }
        Err(DataError::dataset(
            &self.dir,
            format!(
                "made with the tokenizer of {} (sha256 {}…), the target's is {}…",
                card.target,
                card.tokenizer_sha256.get(..12).unwrap_or_default(),
                tokenizer_sha256.get(..12).unwrap_or_default()
            ),
            "prepare the chats again for this target",
        ))
    }

    /// Copies row `row` into `out`.
    ///
    /// # Errors
    /// When the row does not exist, its file cannot be mapped, or its stored lists disagree with the index.
    pub fn read_row(&self, row: usize, out: &mut Row) -> Result<()> {
        let bad = |what: String| DataError::Row { path: self.dir.clone(), row: row as u64, what };
        if row >= self.len() {
            return Err(DataError::NoRow { path: self.dir.clone(), row, last: self.len().saturating_sub(1) });
        }
        let at = self.index.batches.partition_point(|b| b.first_row <= row as u64) - 1;
        let place = &self.index.batches[at];
        let map = self.map(place.file as usize)?;
        let in_batch = row - place.first_row as usize;
        let len = self.index.lengths[row] as usize;
        let (ids_type, mask_type) = (self.index.header.ids, self.index.header.mask);
        let damaged = || bad("its file no longer holds what was indexed".into());
        let ids_at = list_start(map, place.ids_offsets, ids_type, in_batch, len).ok_or_else(damaged)?;
        let mask_at = list_start(map, place.mask_offsets, mask_type, in_batch, len).ok_or_else(damaged)?;
        copy_ids(map, place, ids_type, ids_at, len, &mut out.ids).ok_or_else(damaged)?;
        copy_mask(map, place, mask_type, mask_at, len, &mut out.mask).ok_or_else(damaged)?;
        let supervised: u32 = out.mask.iter().map(|&m| u32::from(m == 1)).sum();
        let max = self.index.header.max_token_id as i32;
        if supervised != self.index.supervised[row] || out.ids.iter().any(|&id| id < 0 || id > max) {
            return Err(damaged());
        }
        Ok(())
    }

    fn map(&self, file: usize) -> Result<&MappedFile> {
        if let Some(map) = self.maps[file].get() {
            return Ok(map);
        }
        let path = self.dir.join(&self.index.header.files[file].name);
        let map = MappedFile::open(&path).map_err(DataError::io("map", &path))?;
        Ok(self.maps[file].get_or_init(|| map))
    }
}

/// The data files that state.json names.
fn data_files(dir: &Path) -> Result<Vec<String>> {
    let path = dir.join("state.json");
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let todo = if dir.join("dataset_dict.json").exists() {
                "this folder holds several splits: name one of its sub-folders, e.g. its train folder"
            } else {
                "name a folder written by `drafthorse prepare` or by `datasets.save_to_disk`"
            };
            return Err(DataError::dataset(dir, "no state.json, so not a saved dataset", todo));
        }
        Err(e) => return Err(DataError::io("read", &path)(e)),
    };
    let state: Value = serde_json::from_slice(&bytes)
        .map_err(|e| DataError::dataset(&path, format!("not JSON: {e}"), "save the dataset again"))?;
    let files = state["_data_files"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names: Option<Vec<String>> = files.iter().map(|f| f["filename"].as_str().map(str::to_owned)).collect();
    match names {
        Some(names) if !names.is_empty() && names.iter().all(|n| Path::new(n).file_name().is_some_and(|f| f == n.as_str())) => {
            Ok(names)
        }
        _ => Err(DataError::dataset(&path, "it names no data files inside its folder", "save the dataset again")),
    }
}

/// What makes the index unfit for these files, if anything. Reads no file content.
fn stale(dir: &Path, names: &[String], index: &Index) -> Result<Option<String>> {
    if names.len() != index.header.files.len() || names.iter().zip(&index.header.files).any(|(n, f)| *n != f.name) {
        return Ok(Some("it is the index of other data files".into()));
    }
    for file in &index.header.files {
        let path = dir.join(&file.name);
        let bytes = std::fs::metadata(&path).map_err(DataError::io("read", &path))?.len();
        if bytes != file.bytes {
            return Ok(Some(format!("{} has {bytes} bytes, {} were indexed", file.name, file.bytes)));
        }
    }
    Ok(None)
}

fn slice<T: bytemuck::Pod>(map: &[u8], at: usize, n: usize) -> Option<&[T]> {
    let bytes = map.get(at..at.checked_add(n.checked_mul(size_of::<T>())?)?)?;
    bytemuck::try_cast_slice(bytes).ok()
}

/// Where list `r` begins among the values, provided that it is `len` long.
fn list_start(map: &[u8], offsets: u64, column: ColumnType, r: usize, len: usize) -> Option<usize> {
    let (a, b) = if column.large {
        let o = slice::<i64>(map, offsets as usize + 8 * r, 2)?;
        (o[0], o[1])
    } else {
        let o = slice::<i32>(map, offsets as usize + 4 * r, 2)?;
        (i64::from(o[0]), i64::from(o[1]))
    };
    (b.checked_sub(a)? == len as i64).then(|| usize::try_from(a).ok())?
}

fn copy_ids(map: &[u8], place: &BatchPlace, column: ColumnType, at: usize, len: usize, out: &mut Vec<i32>) -> Option<()> {
    let base = place.ids_values as usize;
    out.clear();
    match column.element {
        ElementType::Int64 => out.extend(slice::<i64>(map, base + 8 * at, len)?.iter().map(|&v| v as i32)),
        _ => out.extend_from_slice(slice::<i32>(map, base + 4 * at, len)?),
    }
    Some(())
}

fn copy_mask(map: &[u8], place: &BatchPlace, column: ColumnType, at: usize, len: usize, out: &mut Vec<i8>) -> Option<()> {
    let base = place.mask_values as usize;
    out.clear();
    match column.element {
        ElementType::Int64 => out.extend(slice::<i64>(map, base + 8 * at, len)?.iter().map(|&v| v as i8)),
        ElementType::Bool => {
            for bit in (place.mask_bit as usize + at)..(place.mask_bit as usize + at + len) {
                out.push((map.get(base + bit / 8)? >> (bit % 8) & 1) as i8);
            }
        }
        _ => out.extend_from_slice(slice::<i8>(map, base + at, len)?),
    }
    Some(())
}
