//! Writes tokenized rows as Hugging Face `datasets.save_to_disk` does: Arrow stream files, state.json, dataset_info.json.
//!
//! It writes into a folder that the caller names and publishes later; it refuses nothing, because rows were checked before.
//! Invariants: columns `input_ids` `list<int32>`, `loss_mask` `list<int8>`, `seq_len` `int32`; files are closed with their end
//! mark and fsynced; names carry the final number of files.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{Int8Builder, Int32Builder, ListBuilder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, DataType, Field, Schema};
use serde_json::json;

use crate::error::{DataError, Result};

/// Rows per record batch, as `datasets` writes by default.
const ROWS_PER_BATCH: usize = 1000;
/// A batch is closed earlier when it holds this many tokens, which bounds memory for long rows.
const TOKENS_PER_BATCH: usize = 4 << 20;

/// An open dataset writer.
pub(crate) struct ArrowOut {
    dir: PathBuf,
    shard_bytes: u64,
    schema: Arc<Schema>,
    open: Option<(PathBuf, StreamWriter<BufWriter<File>>)>,
    shard_size: u64,
    closed: Vec<PathBuf>,
    ids: ListBuilder<Int32Builder>,
    mask: ListBuilder<Int8Builder>,
    seq_len: Int32Builder,
    rows: usize,
    tokens: usize,
}

/// The features as `datasets` writes them into the schema and dataset_info.json. `Sequence` is the spelling that every
/// release since 2.0 reads; releases from 4.0 on write `List` and read both.
fn features() -> serde_json::Value {
    let list = |dtype: &str| json!({"feature": {"dtype": dtype, "_type": "Value"}, "_type": "Sequence"});
    json!({"input_ids": list("int32"), "loss_mask": list("int8"), "seq_len": {"dtype": "int32", "_type": "Value"}})
}

impl ArrowOut {
    /// Starts writing into the existing folder `dir`, with a new file after about `shard_bytes` bytes.
    pub fn new(dir: &Path, shard_bytes: u64) -> Self {
        let list = |t: DataType| DataType::List(Arc::new(Field::new("item", t, true)));
        let metadata: HashMap<_, _> = [("huggingface".to_owned(), json!({"info": {"features": features()}}).to_string())].into();
        let schema = Schema::new_with_metadata(
            vec![
                Field::new("input_ids", list(DataType::Int32), true),
                Field::new("loss_mask", list(DataType::Int8), true),
                Field::new("seq_len", DataType::Int32, true),
            ],
            metadata,
        );
        Self {
            dir: dir.to_owned(),
            shard_bytes,
            schema: Arc::new(schema),
            open: None,
            shard_size: 0,
            closed: Vec::new(),
            ids: ListBuilder::new(Int32Builder::new()),
            mask: ListBuilder::new(Int8Builder::new()),
            seq_len: Int32Builder::new(),
            rows: 0,
            tokens: 0,
        }
    }

    /// Appends one row; both slices have one length.
    pub fn push(&mut self, ids: &[i32], mask: &[i8]) -> Result<()> {
        self.ids.values().append_slice(ids);
        self.ids.append(true);
        self.mask.values().append_slice(mask);
        self.mask.append(true);
        self.seq_len.append_value(ids.len() as i32);
        self.rows += 1;
        self.tokens += ids.len();
        if self.rows >= ROWS_PER_BATCH || self.tokens >= TOKENS_PER_BATCH { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        if self.rows == 0 && !(self.closed.is_empty() && self.open.is_none()) {
            return Ok(());
        }
        let columns: Vec<ArrayRef> =
            vec![Arc::new(self.ids.finish()), Arc::new(self.mask.finish()), Arc::new(self.seq_len.finish())];
        if self.shard_size >= self.shard_bytes {
            self.close()?;
        }
        let (path, writer) = match &mut self.open {
            Some(open) => open,
            none => {
                let path = self.dir.join(format!("data-{:05}.partial", self.closed.len()));
                let file = File::create(&path).map_err(DataError::io("write", &path))?;
                let writer = StreamWriter::try_new(BufWriter::new(file), &self.schema).map_err(arrow_error(&path))?;
                none.insert((path, writer))
            }
        };
        let batch = RecordBatch::try_new(self.schema.clone(), columns).map_err(arrow_error(path))?;
        writer.write(&batch).map_err(arrow_error(path))?;
        self.shard_size += (5 * self.tokens + 12 * self.rows) as u64;
        (self.rows, self.tokens) = (0, 0);
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        let Some((path, mut writer)) = self.open.take() else { return Ok(()) };
        writer.finish().map_err(arrow_error(&path))?;
        let buffered = writer.into_inner().map_err(arrow_error(&path))?;
        let file = buffered.into_inner().map_err(|e| DataError::io("write", &path)(e.into_error()))?;
        file.sync_all().map_err(DataError::io("write", &path))?;
        self.closed.push(path);
        self.shard_size = 0;
        Ok(())
    }

    /// Closes the files, gives them their names and returns those. state.json is written by [`write_state`], once the
    /// fingerprint is known.
    pub fn finish(mut self) -> Result<Vec<String>> {
        self.flush()?;
        self.close()?;
        let n = self.closed.len();
        let mut names = Vec::with_capacity(n);
        for (i, path) in self.closed.iter().enumerate() {
            let name = format!("data-{i:05}-of-{n:05}.arrow");
            std::fs::rename(path, self.dir.join(&name)).map_err(DataError::io("rename", path))?;
            names.push(name);
        }
        Ok(names)
    }
}

/// Writes state.json and dataset_info.json. `fingerprint` is shortened to the 16 digits that `datasets` uses.
pub(crate) fn write_state(dir: &Path, names: &[String], fingerprint: &str) -> Result<()> {
    let files: Vec<_> = names.iter().map(|n| json!({"filename": n})).collect();
    let state = json!({
        "_data_files": files,
        "_fingerprint": &fingerprint[..16],
        "_format_columns": null,
        "_format_kwargs": {},
        "_format_type": null,
        "_output_all_columns": false,
        "_split": null,
    });
    let info = json!({"citation": "", "description": "", "features": features(), "homepage": "", "license": ""});
    for (name, value) in [("state.json", state), ("dataset_info.json", info)] {
        write_synced(&dir.join(name), format!("{value:#}").as_bytes())?;
    }
    Ok(())
}

/// Writes a small file and forces it to disk.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).and_then(|()| File::open(path)?.sync_all()).map_err(DataError::io("write", path))
}

fn arrow_error(path: &Path) -> impl FnOnce(ArrowError) -> DataError {
    let path = path.to_owned();
    move |e| {
        let source = match e {
            ArrowError::IoError(_, source) => source,
            other => std::io::Error::other(other),
        };
        DataError::Io { action: "write", path, source }
    }
}
