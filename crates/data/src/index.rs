//! The index of a tokenized dataset: per row its length, supervised tokens and anchor candidates, and where each record
//! batch's buffers lie in its file. With it a dataset of any size opens without touching a data file.
//!
//! File layout (little endian): magic `DHINDEX` + version byte; u64 length of the JSON header; the header; per record batch
//! eight u64; then three arrays of u32, one value per row each; then the SHA-256 of all bytes before it.
//! It refuses an index of another version, of other data files (names and byte lengths), or with a wrong checksum.
//! Invariants: rows are numbered over all files in the order of state.json; the fingerprint is the SHA-256 over every row's
//! length, ids (int32) and mask (int8), so that it does not depend on sharding or dtypes.

use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{Int8Type, Int32Type, Int64Type};
use arrow_array::{Array, ArrayRef, OffsetSizeTrait, RecordBatch};
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::DataType;
use bytes::Bytes;
use drafthorse_models::mmap::MappedFile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{DataError, Result};
use crate::hash::hex;

const MAGIC: [u8; 8] = *b"DHINDEX\x01";
/// The smallest ids that never occur which a header keeps.
const UNUSED_IDS_KEPT: usize = 64;
const REWRITE: &str = "write the dataset again with `datasets.save_to_disk` or `drafthorse prepare`";

/// Element type of a list column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ElementType {
    /// 8-bit integers.
    Int8,
    /// 32-bit integers.
    Int32,
    /// 64-bit integers.
    Int64,
    /// Bits.
    Bool,
}

/// How a list column is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnType {
    /// Type of the elements.
    pub element: ElementType,
    /// List offsets are 64 bits wide (`large_list`).
    pub large: bool,
}

/// A data file of the dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFile {
    /// Name inside the dataset folder.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
}

/// What is known about the dataset as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexHeader {
    /// SHA-256 over the content of all rows.
    pub fingerprint: String,
    /// Data files, in row order.
    pub files: Vec<DataFile>,
    /// Number of rows.
    pub rows: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of supervised tokens.
    pub supervised: u64,
    /// Number of anchor candidates.
    pub candidates: u64,
    /// Largest token id.
    pub max_token_id: u32,
    /// A row that holds it.
    pub max_token_row: u64,
    /// The smallest ids that occur in no row (at most 64 of them).
    pub unused_ids: Vec<u32>,
    /// Storage of `input_ids`.
    pub ids: ColumnType,
    /// Storage of `loss_mask`.
    pub mask: ColumnType,
    /// Number of record batches.
    pub batches: u64,
}

/// Where one record batch lies. Positions are byte offsets in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BatchPlace {
    /// Index into [`IndexHeader::files`].
    pub file: u64,
    /// Number of the batch's first row.
    pub first_row: u64,
    /// Rows in the batch.
    pub rows: u64,
    /// List offsets of `input_ids`.
    pub ids_offsets: u64,
    /// Values of `input_ids`.
    pub ids_values: u64,
    /// List offsets of `loss_mask`.
    pub mask_offsets: u64,
    /// Values of `loss_mask`.
    pub mask_values: u64,
    /// Bit at which `loss_mask` begins inside its values (bool only).
    pub mask_bit: u64,
}

/// The whole index, in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// What is known about the dataset as a whole.
    pub header: IndexHeader,
    /// Record batches in row order.
    pub batches: Vec<BatchPlace>,
    /// Tokens per row.
    pub lengths: Vec<u32>,
    /// Supervised tokens per row.
    pub supervised: Vec<u32>,
    /// Anchor candidates per row: i with tokens i and i+1 supervised.
    pub candidates: Vec<u32>,
}

impl Index {
    /// Writes the index to `path`, aside first and then renamed.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let header = serde_json::to_vec(&self.header).map_err(|e| DataError::io("write", path)(e.into()))?;
        let mut bytes = Vec::with_capacity(header.len() + 64 * self.batches.len() + 12 * self.lengths.len() + 64);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&(header.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&header);
        for place in &self.batches {
            let fields: &[u64] = bytemuck::cast_slice(std::slice::from_ref(place));
            bytes.extend(fields.iter().flat_map(|f| f.to_le_bytes()));
        }
        for list in [&self.lengths, &self.supervised, &self.candidates] {
            bytes.extend(list.iter().flat_map(|v| v.to_le_bytes()));
        }
        let sum = Sha256::digest(&bytes);
        bytes.extend_from_slice(&sum);
        let aside = path.with_extension(format!("partial-{}", std::process::id()));
        std::fs::write(&aside, &bytes)
            .and_then(|()| std::fs::File::open(&aside)?.sync_all())
            .and_then(|()| std::fs::rename(&aside, path))
            .map_err(DataError::io("write", path))
    }

    /// Reads the index at `path`.
    ///
    /// # Errors
    /// When it cannot be read, is of another version, or damaged.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(DataError::io("read", path))?;
        let damaged =
            |what: &str| DataError::dataset(path, format!("the index is {what}"), "delete the index file; it is built again");
        if bytes.len() < 48 || bytes[..7] != MAGIC[..7] {
            return Err(damaged("not an index"));
        }
        if bytes[7] != MAGIC[7] {
            return Err(damaged(&format!("of version {}, this program reads version {}", bytes[7], MAGIC[7])));
        }
        let (body, sum) = bytes.split_at(bytes.len() - 32);
        if Sha256::digest(body)[..] != *sum {
            return Err(damaged("damaged: its checksum does not match"));
        }
        let header_len = u64::from_le_bytes(body[8..16].try_into().unwrap_or_default()) as usize;
        let header_end = 16usize.checked_add(header_len).filter(|&e| e <= body.len()).ok_or_else(|| damaged("cut short"))?;
        let header: IndexHeader =
            serde_json::from_slice(&body[16..header_end]).map_err(|e| damaged(&format!("unreadable: {e}")))?;
        let rest = &body[header_end..];
        let (n, n_batches) = (header.rows as usize, header.batches as usize);
        if rest.len() != 64 * n_batches + 12 * n {
            return Err(damaged("not as long as its header says"));
        }
        let (places, lists) = rest.split_at(64 * n_batches);
        let fields: Vec<u64> = places.as_chunks::<8>().0.iter().map(|c| u64::from_le_bytes(*c)).collect();
        let batches = bytemuck::cast_slice::<u64, BatchPlace>(&fields).to_vec();
        let list = |i: usize| {
            lists[4 * n * i..4 * n * (i + 1)].as_chunks::<4>().0.iter().map(|c| u32::from_le_bytes(*c)).collect::<Vec<u32>>()
        };
        Ok(Self { batches, lengths: list(0), supervised: list(1), candidates: list(2), header })
    }

    /// Reads every row of the data files `names` in `dir` once, checks it, and builds the index.
    /// `progress` receives (bytes done, bytes in all).
    ///
    /// # Errors
    /// When a file is cut short, a column is absent or of another type, a row's two lists differ in length, an id is
    /// negative, or the mask is all zero or all one over the whole dataset.
    pub fn scan(dir: &Path, names: &[String], progress: &dyn Fn(u64, u64)) -> Result<Self> {
        let mut scan = Scan::new(dir);
        let mut maps = Vec::with_capacity(names.len());
        for name in names {
            let path = dir.join(name);
            maps.push(MappedFile::open(&path).map_err(DataError::io("map", &path))?);
        }
        let total: u64 = maps.iter().map(|m| m.len() as u64).sum();
        let mut done = 0;
        for (file, (name, map)) in names.iter().zip(&maps).enumerate() {
            map.advise_sequential();
            scan.file(file, &dir.join(name), map, &|at| progress(done + at, total))?;
            done += map.len() as u64;
            scan.files.push(DataFile { name: name.clone(), bytes: map.len() as u64 });
        }
        scan.finish()
    }
}

struct Scan<'a> {
    dir: &'a Path,
    files: Vec<DataFile>,
    types: Option<(ColumnType, ColumnType)>,
    hasher: Sha256,
    batches: Vec<BatchPlace>,
    lengths: Vec<u32>,
    supervised: Vec<u32>,
    candidates: Vec<u32>,
    max_token: (i32, u64),
    /// Bit per token id: it occurs.
    seen: Vec<u64>,
    ids: Vec<i32>,
    mask: Vec<i8>,
}

impl<'a> Scan<'a> {
    fn new(dir: &'a Path) -> Self {
        Self {
            dir,
            files: Vec::new(),
            types: None,
            hasher: Sha256::new(),
            batches: Vec::new(),
            lengths: Vec::new(),
            supervised: Vec::new(),
            candidates: Vec::new(),
            max_token: (-1, 0),
            seen: Vec::new(),
            ids: Vec::new(),
            mask: Vec::new(),
        }
    }

    fn file(&mut self, file: usize, path: &Path, map: &MappedFile, progress: &dyn Fn(u64)) -> Result<()> {
        let broken = |e: arrow_schema::ArrowError| {
            DataError::dataset(path, format!("not a whole Arrow stream: {e}"), "copy the file again; it may be cut short")
        };
        let whole = Buffer::from(Bytes::from_owner(map.clone()));
        let mut buffer = whole.clone();
        let mut decoder = StreamDecoder::new();
        while !buffer.is_empty() {
            let Some(batch) = decoder.decode(&mut buffer).map_err(broken)? else { break };
            self.batch(file, path, map, &batch)?;
            progress((whole.len() - buffer.len()) as u64);
        }
        // A stream that lacks its end mark was cut between two batches.
        decoder.finish().map_err(broken)?;
        if decoder.schema().is_none() {
            return Err(DataError::dataset(path, "empty: it holds no Arrow schema", "copy the file again"));
        }
        Ok(())
    }

    fn batch(&mut self, file: usize, path: &Path, map: &MappedFile, batch: &RecordBatch) -> Result<()> {
        let column = |name: &str| {
            batch.column_by_name(name).ok_or_else(|| {
                let have: Vec<_> = batch.schema_ref().fields().iter().map(|f| f.name().clone()).collect();
                DataError::dataset(
                    path,
                    format!("no column `{name}`; it has {}", have.join(", ")),
                    "use a dataset with input_ids and loss_mask lists, or prepare chats",
                )
            })
        };
        let (ids, mask) = (column("input_ids")?, column("loss_mask")?);
        let types = (column_type(path, "input_ids", ids, &IDS)?, column_type(path, "loss_mask", mask, &MASK)?);
        if *self.types.get_or_insert(types) != types {
            return Err(DataError::dataset(path, "its columns differ in type from the other files'", REWRITE));
        }
        for (name, list) in [("input_ids", ids), ("loss_mask", mask)] {
            if list.null_count() > 0 {
                let row = (0..list.len()).find(|&r| list.is_null(r)).unwrap_or(0);
                return Err(self.row_error(self.lengths.len() + row, format!("`{name}` is null")));
            }
        }
        let place = |buffer: &Buffer| {
            // Compressed buffers are decoded into memory of their own, which a mapped reader cannot serve from.
            let at = (buffer.as_ptr() as usize).wrapping_sub(map.as_ptr() as usize);
            if at.checked_add(buffer.len()).is_none_or(|end| end > map.len()) || !at.is_multiple_of(8) {
                return Err(DataError::dataset(path, "its buffers are compressed or not aligned to 8 bytes", REWRITE));
            }
            Ok(at as u64)
        };
        let ids = ListColumn::of(ids, types.0.large);
        let mask = ListColumn::of(mask, types.1.large);
        let (mask_values, mask_bit) = match types.1.element {
            ElementType::Bool => (mask.values.as_boolean().values().inner().clone(), mask.values.as_boolean().offset()),
            ElementType::Int64 => (mask.values.as_primitive::<Int64Type>().values().inner().clone(), 0),
            _ => (mask.values.as_primitive::<Int8Type>().values().inner().clone(), 0),
        };
        let ids_values = match types.0.element {
            ElementType::Int64 => ids.values.as_primitive::<Int64Type>().values().inner().clone(),
            _ => ids.values.as_primitive::<Int32Type>().values().inner().clone(),
        };
        if batch.num_rows() > 0 {
            let empty = |len: usize, b: &Buffer| if len == 0 { Ok(0) } else { place(b) };
            self.batches.push(BatchPlace {
                file: file as u64,
                first_row: self.lengths.len() as u64,
                rows: batch.num_rows() as u64,
                ids_offsets: place(&ids.offsets_buffer)?,
                ids_values: empty(ids.values.len(), &ids_values)?,
                mask_offsets: place(&mask.offsets_buffer)?,
                mask_values: empty(mask.values.len(), &mask_values)?,
                mask_bit: mask_bit as u64,
            });
        }
        for r in 0..batch.num_rows() {
            self.row(&ids, &mask, types, r)?;
        }
        Ok(())
    }

    fn row(&mut self, ids: &ListColumn, mask: &ListColumn, types: (ColumnType, ColumnType), r: usize) -> Result<()> {
        let row = self.lengths.len();
        let (a, b) = (ids.bounds(r), mask.bounds(r));
        if a.len() != b.len() {
            return Err(self.row_error(row, format!("{} token ids but {} mask values", a.len(), b.len())));
        }
        self.ids.clear();
        match types.0.element {
            ElementType::Int64 => {
                let values = &ids.values.as_primitive::<Int64Type>().values()[a];
                self.ids.extend(values.iter().map(|&v| i32::try_from(v).unwrap_or(-1)));
            }
            _ => self.ids.extend_from_slice(&ids.values.as_primitive::<Int32Type>().values()[a]),
        }
        self.mask.clear();
        match types.1.element {
            ElementType::Bool => self.mask.extend(b.map(|i| i8::from(mask.values.as_boolean().value(i)))),
            ElementType::Int64 => {
                let values = &mask.values.as_primitive::<Int64Type>().values()[b];
                self.mask.extend(values.iter().map(|&v| i8::try_from(v).unwrap_or(-1)));
            }
            _ => self.mask.extend_from_slice(&mask.values.as_primitive::<Int8Type>().values()[b]),
        }
        if let Some(i) = self.ids.iter().position(|&id| id < 0) {
            return Err(self.row_error(row, format!("token {i} is no token id (negative or above 2^31)")));
        }
        if let Some(&m) = self.mask.iter().find(|m| !(0..=1).contains(*m)) {
            return Err(self.row_error(row, format!("its loss mask holds {m}, which is neither 0 nor 1")));
        }
        for &id in &self.ids {
            let word = id as usize / 64;
            if word >= self.seen.len() {
                self.seen.resize(word + 1, 0);
            }
            self.seen[word] |= 1 << (id % 64);
            if id > self.max_token.0 {
                self.max_token = (id, row as u64);
            }
        }
        self.hasher.update((self.ids.len() as u32).to_le_bytes());
        self.hasher.update(bytemuck::cast_slice(&self.ids));
        self.hasher.update(bytemuck::cast_slice(&self.mask));
        self.lengths.push(self.ids.len() as u32);
        self.supervised.push(self.mask.iter().map(|&m| u32::from(m == 1)).sum());
        self.candidates.push(count_candidates(&self.mask) as u32);
        Ok(())
    }

    fn row_error(&self, row: usize, what: String) -> DataError {
        DataError::Row { path: self.dir.to_owned(), row: row as u64, what }
    }

    fn finish(self) -> Result<Index> {
        let sum = |list: &[u32]| list.iter().map(|&v| u64::from(v)).sum::<u64>();
        let (tokens, supervised) = (sum(&self.lengths), sum(&self.supervised));
        let refuse = |what: &str, todo: &str| Err(DataError::dataset(self.dir, what, todo));
        let Some((ids, mask)) = self.types.filter(|_| tokens > 0) else {
            return refuse("it holds no tokens", "check what made it");
        };
        if supervised == 0 {
            return refuse("the loss mask is 0 everywhere: nothing is supervised", "check the chat template that made it");
        }
        if supervised == tokens {
            return refuse("the loss mask is 1 everywhere: prompts are supervised too", "mask what the model does not generate");
        }
        let occurs = |id: u32| self.seen.get(id as usize / 64).is_some_and(|w| w >> (id % 64) & 1 == 1);
        let header = IndexHeader {
            fingerprint: hex(&self.hasher.finalize()),
            rows: self.lengths.len() as u64,
            tokens,
            supervised,
            candidates: sum(&self.candidates),
            max_token_id: self.max_token.0 as u32,
            max_token_row: self.max_token.1,
            unused_ids: (0..u32::MAX).filter(|&id| !occurs(id)).take(UNUSED_IDS_KEPT).collect(),
            files: self.files,
            ids,
            mask,
            batches: self.batches.len() as u64,
        };
        Ok(Index {
            header,
            batches: self.batches,
            lengths: self.lengths,
            supervised: self.supervised,
            candidates: self.candidates,
        })
    }
}

/// Number of i with i and i+1 supervised.
pub(crate) fn count_candidates(mask: &[i8]) -> usize {
    mask.windows(2).filter(|w| w[0] == 1 && w[1] == 1).count()
}

const IDS: [(DataType, ElementType); 2] = [(DataType::Int32, ElementType::Int32), (DataType::Int64, ElementType::Int64)];
const MASK: [(DataType, ElementType); 3] =
    [(DataType::Int8, ElementType::Int8), (DataType::Int64, ElementType::Int64), (DataType::Boolean, ElementType::Bool)];

fn column_type(path: &Path, name: &str, array: &ArrayRef, allowed: &[(DataType, ElementType)]) -> Result<ColumnType> {
    let found = match array.data_type() {
        DataType::List(f) => allowed.iter().find(|(t, _)| t == f.data_type()).map(|(_, e)| (*e, false)),
        DataType::LargeList(f) => allowed.iter().find(|(t, _)| t == f.data_type()).map(|(_, e)| (*e, true)),
        _ => None,
    };
    found.map(|(element, large)| ColumnType { element, large }).ok_or_else(|| {
        let allowed: Vec<_> = allowed.iter().map(|(t, _)| t.to_string().to_lowercase()).collect();
        DataError::dataset(
            path,
            format!("column `{name}` is {}, not a list of {}", array.data_type(), allowed.join(" or ")),
            "cast the column and save the dataset again",
        )
    })
}

/// A list column with its offsets widened on demand.
struct ListColumn {
    offsets: Vec<usize>,
    offsets_buffer: Buffer,
    values: ArrayRef,
}

impl ListColumn {
    fn of(array: &ArrayRef, large: bool) -> Self {
        fn build<O: OffsetSizeTrait>(array: &ArrayRef) -> ListColumn {
            let list = array.as_list::<O>();
            ListColumn {
                offsets: list.value_offsets().iter().map(|o| o.as_usize()).collect(),
                offsets_buffer: list.offsets().inner().inner().clone(),
                values: list.values().clone(),
            }
        }
        if large { build::<i64>(array) } else { build::<i32>(array) }
    }

    fn bounds(&self, r: usize) -> std::ops::Range<usize> {
        self.offsets[r]..self.offsets[r + 1]
    }
}
