//! `prepare`: chat files in, a published dataset folder out.
//!
//! One thread reads and hashes lines, a rayon pool renders and tokenizes them, one thread writes; bounded channels between
//! them keep memory flat whatever the input's size. Rows are written in input order, so equal inputs give equal folders.
//! It refuses to leave a half-written dataset (everything is written aside and renamed), to drop a row without counting
//! why, and to publish a dataset on which nothing could be trained.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::arrow_out::{ArrowOut, write_state, write_synced};
use crate::card::{CARD_FILE, Card, Dropped, Source, length_histogram};
use crate::chat::{LineFault, Record, RoleMap, parse_line};
use crate::dataset::INDEX_FILE;
use crate::error::{DataError, Result};
use crate::hash::hex;
use crate::index::{Index, count_candidates};
use crate::spans::Drop;
use crate::tokenize::ChatTokenizer;

/// What to do with a line that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnError {
    /// End with an error that names file, line and byte.
    #[default]
    Stop,
    /// Drop and count it.
    Skip,
}

/// Settings of [`prepare`].
#[derive(Debug, Clone)]
pub struct PrepareOptions {
    /// JSONL files, read in this order.
    pub inputs: Vec<PathBuf>,
    /// The dataset folder to publish.
    pub out: PathBuf,
    /// Replace an existing dataset at `out`.
    pub overwrite: bool,
    /// Rows are cut to this many tokens.
    pub max_len: usize,
    /// A row with fewer supervised tokens is too short for an anchor. The default of 3 is two tokens of an answer and its
    /// end: with less, the only label of the only anchor is the end-of-turn token.
    pub min_supervised: usize,
    /// What extra role names mean.
    pub roles: RoleMap,
    /// What to do with unreadable lines.
    pub on_error: OnError,
    /// Drop rows whose answer a length limit cut, instead of keeping them with their end-of-turn token masked.
    pub drop_truncated: bool,
    /// Threads that tokenize; all cores by default.
    pub threads: Option<usize>,
    /// A new data file is begun after about this many bytes.
    pub shard_bytes: u64,
    /// The date given to the template, for the card: `YYYY-MM-DD`.
    pub template_date: Option<String>,
    /// Set from elsewhere to end early; nothing is left at `out` then.
    pub stop: Arc<AtomicBool>,
}

impl PrepareOptions {
    /// Defaults: 4,096 tokens, stop at errors, 500 MB per file.
    pub fn new(inputs: Vec<PathBuf>, out: PathBuf) -> Self {
        Self {
            inputs,
            out,
            overwrite: false,
            max_len: 4096,
            min_supervised: 3,
            roles: RoleMap::default(),
            on_error: OnError::Stop,
            drop_truncated: false,
            threads: None,
            shard_bytes: 500_000_000,
            template_date: None,
            stop: Arc::default(),
        }
    }
}

/// How far [`prepare`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrepareProgress {
    /// Input bytes done.
    pub bytes: u64,
    /// Input bytes in all.
    pub bytes_total: u64,
    /// Rows read.
    pub rows: u64,
    /// Rows kept.
    pub kept: u64,
    /// Tokens kept.
    pub tokens: u64,
}

struct Line {
    source: usize,
    number: u64,
    start: u64,
    bytes: Vec<u8>,
}

struct Chunk {
    lines: Vec<Line>,
    bytes: u64,
}

struct Kept {
    ids: Vec<i32>,
    mask: Vec<i8>,
    cut: bool,
    truncated: bool,
    straddling: u32,
    turns_without_end: u32,
    opening_masked: bool,
    special_text: bool,
    messages: BTreeMap<&'static str, u64>,
}

enum Outcome {
    Kept(Box<Kept>),
    Dropped(Drop),
}

#[derive(Default)]
struct Counts {
    rows_read: u64,
    rows: u64,
    cut: u64,
    truncated: u64,
    special_text: u64,
    straddling: u64,
    turns_without_end: u64,
    openings_masked: u64,
    tokens: u64,
    messages: BTreeMap<String, u64>,
    dropped: BTreeMap<String, Dropped>,
}

/// Reads `options.inputs`, tokenizes them for the target of `tokenizer`, and publishes the dataset at `options.out`.
/// `progress` is called from one thread, about once per chunk of lines.
///
/// # Errors
/// The first unreadable line (under [`OnError::Stop`]), a failing tokenizer or disk, a dataset on which nothing could be
/// trained, or [`DataError::Stopped`]. Nothing is left at `options.out` then.
pub fn prepare(tokenizer: &ChatTokenizer, options: &PrepareOptions, progress: &(dyn Fn(PrepareProgress) + Sync)) -> Result<Card> {
    check_out(options)?;
    let mut bytes_total = 0;
    for path in &options.inputs {
        bytes_total += std::fs::metadata(path).map_err(DataError::io("read", path))?.len();
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads.unwrap_or(0)).build().map_err(|e| {
        DataError::Config { key: "threads", what: format!("no thread pool: {e}"), todo: "ask for fewer threads".into() }
    })?;
    let aside = Aside::create(&options.out)?;
    let chunk_bytes = (pool.current_num_threads() * (256 << 10)).max(1 << 20);
    let (counts, sources, names) = std::thread::scope(|scope| {
        let (send_chunk, chunks) = sync_channel(2);
        let (send_rows, rows) = sync_channel::<Vec<Kept>>(2);
        let reader = scope.spawn(move || read_chunks(&options.inputs, chunk_bytes, &send_chunk));
        let out = ArrowOut::new(&aside.path, options.shard_bytes);
        let writer = scope.spawn(move || write_rows(out, &rows));
        let counts = tokenize_chunks(tokenizer, options, &pool, &chunks, &send_rows, bytes_total, progress);
        // Both channels end here, so that the two threads do, whatever has happened.
        drop((send_rows, chunks));
        let names = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let sources = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // A failed writer closes its channel and makes the others stop: its error is the cause, so it comes first.
        let names = names?;
        let counts = counts?;
        Ok::<_, DataError>((counts, sources?, names))
    })?;
    refuse_untrainable(&counts)?;
    let index = Index::scan(&aside.path, &names, &|_, _| {})?;
    if tokenizer.model_size("vocab_size").is_some_and(|rows| u64::from(index.header.max_token_id) >= rows) {
        let what = format!("it gives token id {}, which config.json's vocab_size leaves out", index.header.max_token_id);
        return Err(DataError::target(
            &tokenizer.dir().join("tokenizer.json"),
            what,
            "tokenizer and weights must be of one model",
        ));
    }
    index.write(&aside.path.join(INDEX_FILE))?;
    write_state(&aside.path, &names, &index.header.fingerprint)?;
    let card = card(tokenizer, options, counts, sources, &index);
    let json = serde_json::to_vec_pretty(&card).map_err(|e| DataError::io("write", &aside.path)(e.into()))?;
    write_synced(&aside.path.join(CARD_FILE), &json)?;
    write_synced(&aside.path.join("README.md"), card.markdown().as_bytes())?;
    check_stop(options)?;
    aside.publish(&options.out)?;
    Ok(card)
}

fn check_stop(options: &PrepareOptions) -> Result<()> {
    match options.stop.load(Ordering::Relaxed) {
        true => Err(DataError::Stopped { out: options.out.clone() }),
        false => Ok(()),
    }
}

fn check_out(options: &PrepareOptions) -> Result<()> {
    if options.inputs.is_empty() {
        return Err(DataError::Config {
            key: "inputs",
            what: "no input file is named".into(),
            todo: "name one or more JSONL files".into(),
        });
    }
    let out = &options.out;
    let is_empty = std::fs::read_dir(out).map(|mut d| d.next().is_none()).unwrap_or(true);
    if is_empty && (out.is_dir() || !out.exists()) {
        return Ok(());
    }
    if !out.join("state.json").exists() {
        return Err(DataError::dataset(out, "something other than a dataset is there", "choose another output folder"));
    }
    if !options.overwrite {
        return Err(DataError::dataset(out, "a dataset is there already", "pass --overwrite to replace it"));
    }
    Ok(())
}

/// A folder beside the final one; removed unless published.
struct Aside {
    path: PathBuf,
}

impl Aside {
    fn create(out: &Path) -> Result<Self> {
        let name = out.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_else(|| "dataset".into());
        let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(DataError::io("write", parent))?;
        let path = parent.join(format!(".{name}.partial-{}", std::process::id()));
        // What lies here is from a killed run whose process id has come round again.
        if path.exists() {
            std::fs::remove_dir_all(&path).map_err(DataError::io("write", &path))?;
        }
        std::fs::create_dir(&path).map_err(DataError::io("write", &path))?;
        Ok(Self { path })
    }

    fn publish(self, out: &Path) -> Result<()> {
        let sync = |dir: &Path| std::fs::File::open(dir).and_then(|d| d.sync_all()).map_err(DataError::io("write", dir));
        sync(&self.path)?;
        let old = self.path.with_extension("old");
        let replaces = out.exists();
        if replaces {
            std::fs::rename(out, &old).map_err(DataError::io("replace", out))?;
        }
        std::fs::rename(&self.path, out).map_err(DataError::io("write", out))?;
        if let Some(parent) = out.parent().filter(|p| !p.as_os_str().is_empty()) {
            sync(parent)?;
        }
        if replaces {
            std::fs::remove_dir_all(&old).map_err(DataError::io("remove", &old))?;
        }
        Ok(())
    }
}

impl std::ops::Drop for Aside {
    fn drop(&mut self) {
        // After publishing there is nothing here; otherwise the caller already carries the error that matters.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Reads all inputs line by line; returns what the card says about them.
fn read_chunks(inputs: &[PathBuf], chunk_bytes: usize, send: &SyncSender<Chunk>) -> Result<Vec<Source>> {
    let mut sources = Vec::with_capacity(inputs.len());
    let mut chunk = Chunk { lines: Vec::new(), bytes: 0 };
    for (source, path) in inputs.iter().enumerate() {
        let file = std::fs::File::open(path).map_err(DataError::io("read", path))?;
        let mut reader = BufReader::with_capacity(1 << 20, Hashed { inner: file, hasher: Sha256::new() });
        let (mut number, mut start, mut rows) = (0, 0, 0);
        loop {
            let mut bytes = Vec::new();
            let n = reader.read_until(b'\n', &mut bytes).map_err(DataError::io("read", path))? as u64;
            if n == 0 {
                break;
            }
            number += 1;
            while bytes.last().is_some_and(|b| b"\r\n".contains(b)) {
                bytes.pop();
            }
            // A byte-order mark is no part of the first record.
            if number == 1 && bytes.starts_with(b"\xef\xbb\xbf") {
                bytes.drain(..3);
            }
            chunk.bytes += n;
            if !bytes.iter().all(u8::is_ascii_whitespace) {
                rows += 1;
                chunk.lines.push(Line { source, number, start, bytes });
            }
            start += n;
            if chunk.bytes >= chunk_bytes as u64
                && send.send(std::mem::replace(&mut chunk, Chunk { lines: Vec::new(), bytes: 0 })).is_err()
            {
                // The receiver has stopped with an error of its own, which the caller reports.
                return Ok(sources);
            }
        }
        let sha256 = hex(&reader.into_inner().hasher.finalize());
        sources.push(Source { path: path.display().to_string(), bytes: start, sha256, rows });
    }
    // When the receiver is gone it carries the error.
    let _ = send.send(chunk);
    Ok(sources)
}

struct Hashed {
    inner: std::fs::File,
    hasher: Sha256,
}

impl Read for Hashed {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..n]);
        Ok(n)
    }
}

fn write_rows(mut out: ArrowOut, rows: &Receiver<Vec<Kept>>) -> Result<Vec<String>> {
    for list in rows {
        for row in list {
            out.push(&row.ids, &row.mask)?;
        }
    }
    out.finish()
}

fn tokenize_chunks(
    tokenizer: &ChatTokenizer,
    options: &PrepareOptions,
    pool: &rayon::ThreadPool,
    chunks: &Receiver<Chunk>,
    send: &SyncSender<Vec<Kept>>,
    bytes_total: u64,
    progress: &(dyn Fn(PrepareProgress) + Sync),
) -> Result<Counts> {
    let mut counts = Counts::default();
    let mut bytes = 0;
    for chunk in chunks {
        let outcomes: Vec<Result<Outcome>> =
            pool.install(|| chunk.lines.par_iter().with_max_len(4).map(|line| row(tokenizer, options, line)).collect());
        let mut kept = Vec::with_capacity(outcomes.len());
        for (line, outcome) in chunk.lines.iter().zip(outcomes) {
            counts.rows_read += 1;
            match outcome? {
                Outcome::Kept(row) => {
                    counts.add(&row);
                    kept.push(*row);
                }
                Outcome::Dropped(drop) => counts.drop(&options.inputs[line.source], line.number, &drop),
            }
        }
        bytes += chunk.bytes;
        if send.send(kept).is_err() {
            // The writer has failed; its error is reported by the caller.
            return Ok(counts);
        }
        progress(PrepareProgress { bytes, bytes_total, rows: counts.rows_read, kept: counts.rows, tokens: counts.tokens });
    }
    Ok(counts)
}

fn row(tokenizer: &ChatTokenizer, options: &PrepareOptions, line: &Line) -> Result<Outcome> {
    check_stop(options)?;
    let record = match parse_line(&line.bytes, &options.roles).and_then(|record| embedded(record, tokenizer)) {
        Ok(record) => record,
        Err(fault) if options.on_error == OnError::Skip => {
            return Ok(Outcome::Dropped(match fault {
                LineFault::Broken { at, what } => Drop::BadLine(format!("byte {}: {what}", line.start + at as u64)),
                LineFault::UnknownRole(role) => Drop::UnknownRole(role),
            }));
        }
        Err(fault) => return Err(fault.into_error(&options.inputs[line.source], line.number, line.start)),
    };
    let mut kept = match record {
        Record::Tokens { input_ids, loss_mask } => Kept {
            ids: input_ids,
            mask: loss_mask,
            cut: false,
            truncated: false,
            straddling: 0,
            turns_without_end: 0,
            opening_masked: false,
            special_text: false,
            messages: BTreeMap::new(),
        },
        Record::Chat(conversation) => {
            if conversation.truncated && options.drop_truncated {
                return Ok(Outcome::Dropped(Drop::TruncatedAnswer));
            }
            let tokens = match tokenizer.tokenize(&conversation)? {
                Ok(tokens) => tokens,
                // Every row would take as long: that is no property of this one.
                Err(Drop::EndlessTemplate(what)) if options.on_error == OnError::Stop => {
                    let fault = LineFault::Broken { at: 0, what };
                    return Err(fault.into_error(&options.inputs[line.source], line.number, line.start));
                }
                Err(drop) => return Ok(Outcome::Dropped(drop)),
            };
            let mut messages = BTreeMap::new();
            for i in 0..conversation.messages.len() {
                let role = match conversation.role(i) {
                    "system" => "system",
                    "user" => "user",
                    "assistant" => "assistant",
                    "tool" => "tool",
                    _ => "developer",
                };
                *messages.entry(role).or_default() += 1;
            }
            Kept {
                ids: tokens.input_ids,
                mask: tokens.loss_mask,
                cut: false,
                truncated: conversation.truncated,
                straddling: tokens.straddling,
                turns_without_end: tokens.turns_without_end,
                opening_masked: tokens.opening_masked,
                special_text: tokens.special_text,
                messages,
            }
        }
    };
    kept.cut = kept.ids.len() > options.max_len;
    kept.ids.truncate(options.max_len);
    kept.mask.truncate(options.max_len);
    let supervised = kept.mask.iter().filter(|&&m| m == 1).count();
    if supervised < options.min_supervised || count_candidates(&kept.mask) == 0 {
        return Ok(Outcome::Dropped(Drop::NoAnchor));
    }
    Ok(Outcome::Kept(Box::new(kept)))
}

/// Refuses a pre-tokenized record with ids that the target has no embedding for.
fn embedded(record: Record, tokenizer: &ChatTokenizer) -> std::result::Result<Record, LineFault> {
    if let (Record::Tokens { input_ids, .. }, Some(rows)) = (&record, tokenizer.model_size("vocab_size"))
        && let Some((at, id)) = input_ids.iter().enumerate().find(|(_, id)| **id as u64 >= rows)
    {
        let what = format!("`input_ids` holds {id} at index {at}, but the target's vocab_size is {rows}");
        return Err(LineFault::Broken { at: 0, what });
    }
    Ok(record)
}

const EXAMPLES_KEPT: usize = 5;

impl Counts {
    fn add(&mut self, row: &Kept) {
        self.rows += 1;
        self.cut += u64::from(row.cut);
        self.truncated += u64::from(row.truncated);
        self.special_text += u64::from(row.special_text);
        self.straddling += u64::from(row.straddling);
        self.turns_without_end += u64::from(row.turns_without_end);
        self.openings_masked += u64::from(row.opening_masked);
        self.tokens += row.ids.len() as u64;
        for (&role, n) in &row.messages {
            *self.messages.entry(role.to_owned()).or_default() += n;
        }
    }

    fn drop(&mut self, path: &Path, line: u64, drop: &Drop) {
        let entry = self.dropped.entry(drop.reason().to_owned()).or_default();
        entry.rows += 1;
        if entry.examples.len() < EXAMPLES_KEPT {
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let detail = drop.detail().map(|d| format!(" ({d})")).unwrap_or_default();
            entry.examples.push(format!("{name}:{line}{detail}"));
        }
    }
}

fn refuse_untrainable(counts: &Counts) -> Result<()> {
    if counts.rows > 0 {
        return Ok(());
    }
    let reasons: Vec<String> = counts
        .dropped
        .iter()
        .map(|(reason, d)| format!("{reason}: {} (first at {})", d.rows, d.examples.first().map_or("?", String::as_str)))
        .collect();
    let what = if counts.rows_read == 0 {
        "the input holds no rows".to_owned()
    } else {
        format!("no row has an anchor: all {} rows were dropped ({})", counts.rows_read, reasons.join("; "))
    };
    Err(DataError::Refused { what, todo: "use chats with longer answers, or fix what the reasons name".into() })
}

fn card(tokenizer: &ChatTokenizer, options: &PrepareOptions, counts: Counts, sources: Vec<Source>, index: &Index) -> Card {
    let header = &index.header;
    let mut variables = tokenizer.template().variables().clone();
    // Special token texts come with the tokenizer, whose hash is in the card.
    variables.retain(|key, _| !key.ends_with("_token"));
    Card {
        version: 1,
        target: tokenizer.name().to_owned(),
        tokenizer_sha256: tokenizer.tokenizer_hash().to_owned(),
        template_sha256: tokenizer.template().hash().to_owned(),
        template_variables: variables,
        template_date: options.template_date.clone().filter(|_| tokenizer.template().mentions("strftime_now")),
        roles: options.roles.pairs().map(|(a, b)| (a.to_owned(), b.to_owned())).collect(),
        sources,
        max_len: options.max_len as u32,
        rows_read: counts.rows_read,
        rows: counts.rows,
        dropped: counts.dropped,
        rows_cut: counts.cut,
        truncated_answers: counts.truncated,
        special_text_rows: counts.special_text,
        straddling_tokens: counts.straddling,
        turns_without_end: counts.turns_without_end,
        openings_masked: counts.openings_masked,
        messages: counts.messages,
        tokens: header.tokens,
        supervised: header.supervised,
        supervised_share: header.supervised as f64 / header.tokens.max(1) as f64,
        candidates: header.candidates,
        max_positions: tokenizer.model_size("max_position_embeddings"),
        rows_beyond_positions: match tokenizer.model_size("max_position_embeddings") {
            Some(most) => index.lengths.iter().filter(|&&length| u64::from(length) > most).count() as u64,
            None => 0,
        },
        lengths: length_histogram(&index.lengths),
        max_token_id: header.max_token_id,
        unused_ids: header.unused_ids.clone(),
        fingerprint: header.fingerprint.clone(),
    }
}
