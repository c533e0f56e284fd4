//! Recorded hidden states: the files that vLLM's extraction connector writes, one per request.
//!
//! Job: open one `{request}.safetensors` and prove it usable before it is trained on. Producers fail silently, so everything
//! that has been seen is refused by a typed [`Reason`] that a caller can count: a file still being written or cut short,
//! fewer rows than tokens (prefix-cache hit), NaN or Inf, a layer of zeros (hybrid targets), another request's tokens.
//! Invariants: rows are tokens, layers are in the order that was asked for, the last one is the final layer *before* its
//! norm. What cannot be seen from one file (an off-by-one layer) is left to the proof against a plain forward pass.

use std::fs::File;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::checkpoint::{StoredDtype, TensorView};
use crate::mmap::MappedFile;

/// Why a recorded file is refused, for counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The file or its lock cannot be read.
    Unreadable,
    /// The writer still holds the lock.
    BeingWritten,
    /// Shorter (or longer) than the header says.
    WrongLength,
    /// Not a safetensors file, or without the two tensors in their dtypes and ranks.
    WrongLayout,
    /// Another number of layers or another width than asked for.
    WrongShape,
    /// Fewer (or more) rows than tokens.
    RowsDiffer,
    /// Tokens of another request.
    OtherTokens,
    /// NaN or infinity.
    NonFinite,
    /// A layer whose every element is zero.
    ZeroLayer,
}

impl Reason {
    /// The name under which reports count it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::BeingWritten => "being_written",
            Self::WrongLength => "wrong_length",
            Self::WrongLayout => "wrong_layout",
            Self::WrongShape => "wrong_shape",
            Self::RowsDiffer => "rows_differ",
            Self::OtherTokens => "other_tokens",
            Self::NonFinite => "non_finite",
            Self::ZeroLayer => "zero_layer",
        }
    }

    fn advice(self) -> &'static str {
        match self {
            Self::Unreadable => "check the path and its permissions",
            Self::BeingWritten => "wait until the server has finished this request",
            Self::WrongLength => "the writer was stopped; record this request again",
            Self::WrongLayout => "this is not a file of the extraction connector",
            Self::WrongShape => "record again with the drafter's target and layer ids",
            Self::RowsDiffer => "record again with prefix caching off",
            Self::OtherTokens => "the file belongs to another request; record again",
            Self::NonFinite => "record again in bf16; deep layers overflow fp16",
            Self::ZeroLayer => "the producer does not record this layer; use another version or other layer ids",
        }
    }
}

/// A recorded file that must not be trained on. Two lines: what and where, then what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {detail}\n{advice}", path = path.display(), advice = reason.advice())]
pub struct HiddenStatesError {
    /// The file.
    pub path: PathBuf,
    /// Its kind, for counting.
    pub reason: Reason,
    /// What was found where.
    pub detail: String,
}

/// What the caller knows about the file beforehand. Whatever is `None` is not compared.
#[derive(Debug, Clone, Copy, Default)]
pub struct Expected<'a> {
    /// n: captured layers.
    pub layers: Option<usize>,
    /// H: width of the target.
    pub hidden: Option<usize>,
    /// The request's tokens.
    pub token_ids: Option<&'a [u32]>,
}

/// One request's states, mapped and proven.
#[derive(Debug)]
pub struct HiddenStates {
    file: MappedFile,
    states: std::ops::Range<usize>,
    dtype: StoredDtype,
    shape: [usize; 3],
    token_ids: Vec<u32>,
}

impl HiddenStates {
    /// Opens and proves one file: header, lengths, shapes, tokens, then every element.
    ///
    /// # Errors
    /// A [`HiddenStatesError`] with its [`Reason`].
    pub fn open(path: &Path, expected: Expected<'_>) -> Result<Self, HiddenStatesError> {
        let fail = |reason, detail: String| HiddenStatesError { path: path.to_owned(), reason, detail };
        refuse_locked(path)?;
        let file = MappedFile::open(path).map_err(|error| fail(Reason::Unreadable, format!("cannot be read: {error}")))?;
        let (states, tokens) = locate(path, &file)?;
        let [rows, layers, hidden] = states.shape;
        for (what, got, wanted) in [("layers", layers, expected.layers), ("elements per row", hidden, expected.hidden)] {
            if let Some(wanted) = wanted.filter(|wanted| *wanted != got) {
                return Err(fail(Reason::WrongShape, format!("it has {got} {what} where {wanted} were asked for")));
            }
        }
        let token_ids = tokens
            .iter()
            .map(|id| u32::try_from(*id))
            .collect::<Result<Vec<u32>, _>>()
            .map_err(|_| fail(Reason::WrongLayout, "token_ids holds a value that is no token id".to_owned()))?;
        if rows != token_ids.len() {
            return Err(fail(Reason::RowsDiffer, format!("it has {rows} rows of states for {} tokens", token_ids.len())));
        }
        if let Some(wanted) = expected.token_ids.filter(|wanted| *wanted != token_ids) {
            let at = wanted.iter().zip(&token_ids).take_while(|(a, b)| a == b).count();
            return Err(fail(Reason::OtherTokens, format!("its tokens differ from the request's from position {at} on")));
        }
        let this = Self { states: states.range, dtype: states.dtype, shape: states.shape, token_ids, file };
        this.prove_elements(path)?;
        Ok(this)
    }

    /// T: tokens, and rows.
    pub fn tokens(&self) -> usize {
        self.shape[0]
    }

    /// n: captured layers.
    pub fn layers(&self) -> usize {
        self.shape[1]
    }

    /// H: width of one state.
    pub fn hidden(&self) -> usize {
        self.shape[2]
    }

    /// The request's tokens, `[T]`.
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// All states, `[T, n, H]`.
    pub fn states(&self) -> TensorView<'_> {
        TensorView { dtype: self.dtype, shape: &self.shape, bytes: &self.file[self.states.clone()] }
    }

    fn prove_elements(&self, path: &Path) -> Result<(), HiddenStatesError> {
        let [rows, layers, hidden] = self.shape;
        let fail = |reason, detail: String| HiddenStatesError { path: path.to_owned(), reason, detail };
        if rows == 0 || layers == 0 || hidden == 0 {
            return Err(fail(Reason::WrongLayout, format!("its states have shape {:?}, which is empty", self.shape)));
        }
        let view = self.states();
        let row_bytes = hidden * self.dtype.bytes();
        let facts: Vec<RowFacts> = view.bytes.par_chunks(row_bytes).map(|row| row_facts(row, self.dtype)).collect();
        if let Some(at) = facts.iter().position(|row| !row.finite) {
            let detail = format!("NaN or infinity at token {}, captured layer {}", at / layers, at % layers);
            return Err(fail(Reason::NonFinite, detail));
        }
        let zero = |layer: &usize| facts.iter().skip(*layer).step_by(layers).all(|row| row.zero);
        if let Some(layer) = (0..layers).find(zero) {
            return Err(fail(Reason::ZeroLayer, format!("captured layer {layer} of {layers} is zero everywhere")));
        }
        Ok(())
    }
}

struct RowFacts {
    finite: bool,
    zero: bool,
}

/// Works on the bits: an exponent of all ones is NaN or infinity, everything but the sign clear is zero.
fn row_facts(row: &[u8], dtype: StoredDtype) -> RowFacts {
    let half = |exponent: u16| {
        let (elements, _) = row.as_chunks::<2>();
        elements.iter().fold(RowFacts { finite: true, zero: true }, |facts, bytes| {
            let bits = u16::from_le_bytes(*bytes);
            RowFacts { finite: facts.finite & (bits & exponent != exponent), zero: facts.zero & (bits & 0x7fff == 0) }
        })
    };
    match dtype {
        StoredDtype::Bf16 => half(0x7f80),
        StoredDtype::F16 => half(0x7c00),
        StoredDtype::F32 => {
            let (elements, _) = row.as_chunks::<4>();
            elements.iter().fold(RowFacts { finite: true, zero: true }, |facts, bytes| {
                let value = f32::from_le_bytes(*bytes);
                RowFacts { finite: facts.finite & value.is_finite(), zero: facts.zero & (value == 0.0) }
            })
        }
    }
}

/// The writer holds `{file}.lock` with flock while it writes.
fn refuse_locked(path: &Path) -> Result<(), HiddenStatesError> {
    let fail = |reason, detail: String| Err(HiddenStatesError { path: path.to_owned(), reason, detail });
    let mut lock = path.as_os_str().to_owned();
    lock.push(".lock");
    let file = match File::open(&lock) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return fail(Reason::Unreadable, format!("its lock file cannot be opened: {error}")),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(()),
        Err(std::fs::TryLockError::WouldBlock) => fail(Reason::BeingWritten, "its writer still holds the lock".to_owned()),
        Err(std::fs::TryLockError::Error(error)) => fail(Reason::Unreadable, format!("its lock cannot be tested: {error}")),
    }
}

struct Located {
    range: std::ops::Range<usize>,
    dtype: StoredDtype,
    shape: [usize; 3],
}

fn locate(path: &Path, file: &[u8]) -> Result<(Located, Vec<i64>), HiddenStatesError> {
    let fail = |reason, detail: String| HiddenStatesError { path: path.to_owned(), reason, detail };
    let (data_start, header) = crate::weight_files::read_header(path, file).map_err(|error| {
        let reason = match error {
            crate::checkpoint::CheckpointError::Length { .. } => Reason::WrongLength,
            _ => Reason::WrongLayout,
        };
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        fail(reason, first.strip_prefix(&format!("{} ", path.display())).unwrap_or(first).to_owned())
    })?;
    let layout = |detail: &str| fail(Reason::WrongLayout, detail.to_owned());
    let states = header.info("hidden_states").ok_or_else(|| layout("it has no tensor `hidden_states`"))?;
    let tokens = header.info("token_ids").ok_or_else(|| layout("it has no tensor `token_ids`"))?;
    let shape: [usize; 3] =
        states.shape.as_slice().try_into().map_err(|_| layout("`hidden_states` is not of shape [tokens, layers, hidden]"))?;
    let dtype = StoredDtype::of(states.dtype).ok_or_else(|| layout("`hidden_states` is not BF16, F16 or F32"))?;
    if tokens.dtype != safetensors::Dtype::I64 || tokens.shape.len() != 1 {
        return Err(layout("`token_ids` is not a list of I64"));
    }
    let slice = |(start, end): (usize, usize)| data_start + start..data_start + end;
    let (ids, _) = file[slice(tokens.data_offsets)].as_chunks::<8>();
    let ids = ids.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
    Ok((Located { range: slice(states.data_offsets), dtype, shape }, ids))
}
