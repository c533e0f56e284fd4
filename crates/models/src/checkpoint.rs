//! Checkpoints: the safetensors of one folder, mapped, checked against what the model needs, read without a copy.
//!
//! Job: open a single file or an index with its shards, find tensors under any of the usual prefixes, and convert them to
//! f32 or bf16. Before a byte of weights is read it refuses a missing shard, a file shorter or longer than its header says,
//! missing tensors, other shapes and other dtypes than BF16, F16 and F32, and tensors that a model of this config does not
//! have, each by name. Extra tensors that are known to change nothing are counted and listed by pattern.
//! Invariants: names are canonical (`model.` prefix, `lm_head.weight`) whatever the files say; a tied head is the embedding.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::hf_config::TargetConfig;
use crate::mmap::MappedFile;
use crate::tensor_names::{EMBEDDING, FusedTensor, HEAD, expected_tensors};
use crate::weight_files::{read_header, weight_files};

/// Prefixes in use before `layers.` and `embed_tokens.`, longest first.
const PREFIXES: [&str; 3] = ["model.language_model.", "model.", ""];
/// Elements that one task converts.
const CONVERT_CHUNK: usize = 1 << 16;

/// What can be wrong with a checkpoint. Each message has two lines: what and where, then what to do.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file cannot be opened or mapped.
    #[error("cannot read {path}: {source}\ncheck the path and its permissions", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// The folder has no safetensors.
    #[error("{folder} has neither model.safetensors nor model.safetensors.index.json\n{advice}", folder = folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// What to do, by what else lies there.
        advice: String,
    },
    /// The index names shards that are not there.
    #[error(
        "{folder} lacks {count} of the shards that its index names: {names}\ndownload them; nothing was loaded",
        folder = folder.display(), count = shards.len(), names = shards.join(", ")
    )]
    MissingShards {
        /// The folder.
        folder: PathBuf,
        /// Names of the absent files.
        shards: Vec<String>,
    },
    /// The index is not what an index is.
    #[error("{path}: {detail}\ndownload the index again", path = path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// The file has another length than its header asks for.
    #[error("{path} has {have} bytes where its header asks for {want}\nthe download or copy was cut short; fetch it again", path = path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes that it has.
        have: u64,
        /// Bytes that its header asks for.
        want: u64,
    },
    /// The file only says where the weights are.
    #[error(
        "{path} is a Git LFS pointer, not the file itself\nfetch it: run `git lfs pull` in that folder, or download the file", path = path.display()
    )]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// The folder holds tensors that its config does not speak of and that are not known to be harmless.
    #[error(
        "{folder} has tensors that a {model} of its config.json does not have: {list}\nmake config.json say what the weights are (attention_bias, num_hidden_layers …), or use another target; ignoring them would compute another model",
        folder = folder.display(), list = shortened(tensors)
    )]
    NotOfTheModel {
        /// The folder.
        folder: PathBuf,
        /// `model_type` of the config.
        model: &'static str,
        /// Their names: the first of each kind, and how many there are.
        tensors: Vec<String>,
    },
    /// The header cannot be understood.
    #[error("{path} has no valid safetensors header: {detail}\nfetch the file again", path = path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What the parser found.
        detail: String,
    },
    /// One tensor lies in two files, or under two prefixes.
    #[error("tensor `{tensor}` occurs twice in {folder}: in {first} and in {second}\nremove one; which is meant cannot be known", folder = folder.display())]
    Duplicate {
        /// The folder.
        folder: PathBuf,
        /// Canonical name.
        tensor: String,
        /// File and name of the first.
        first: String,
        /// File and name of the second.
        second: String,
    },
    /// Tensors that the model needs are absent.
    #[error(
        "{folder} lacks {count} tensors that its config asks for: {list}\ncheck that config.json and weights belong together",
        folder = folder.display(), count = tensors.len(), list = shortened(tensors)
    )]
    Missing {
        /// The folder.
        folder: PathBuf,
        /// All their names.
        tensors: Vec<String>,
    },
    /// A tensor has another shape than the config gives it.
    #[error("tensor `{tensor}` in {folder} has shape {got:?}, the config asks for {wanted:?}\ncheck that config.json and weights belong together", folder = folder.display())]
    Shape {
        /// The folder.
        folder: PathBuf,
        /// Canonical name.
        tensor: String,
        /// Shape in the file.
        got: Vec<usize>,
        /// Shape by the config.
        wanted: Vec<usize>,
    },
    /// A tensor is stored in a dtype that is not read.
    #[error("tensor `{tensor}` in {folder} is stored as {got}\nconvert the weights to BF16, F16 or F32; quantised weights are not read", folder = folder.display())]
    Dtype {
        /// The folder.
        folder: PathBuf,
        /// Canonical name.
        tensor: String,
        /// Dtype in the file.
        got: String,
    },
    /// The config ties head and embedding, but the files hold two different tables.
    #[error("{folder} has a `lm_head.weight` that differs from the embedding although config.json ties the two\nset tie_word_embeddings to false if the head was trained apart", folder = folder.display())]
    TiedHeadDiffers {
        /// The folder.
        folder: PathBuf,
    },
}

fn shortened(names: &[String]) -> String {
    let shown = names.iter().take(8).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > 8 { format!("{shown} and {} more", names.len() - 8) } else { shown }
}

/// Dtypes that weights are read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredDtype {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl StoredDtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    pub(crate) fn of(dtype: safetensors::Dtype) -> Option<Self> {
        match dtype {
            safetensors::Dtype::BF16 => Some(Self::Bf16),
            safetensors::Dtype::F16 => Some(Self::F16),
            safetensors::Dtype::F32 => Some(Self::F32),
            _ => None,
        }
    }
}

/// A tensor inside a mapped file.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// How elements are stored.
    pub dtype: StoredDtype,
    /// Extents, slowest first.
    pub shape: &'a [usize],
    /// Little-endian elements, row-major; not necessarily aligned.
    pub bytes: &'a [u8],
}

impl TensorView<'_> {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Converts to f32, exactly.
    ///
    /// # Panics
    /// If `out` has not [`TensorView::elements`] elements.
    pub fn to_f32(&self, out: &mut [f32]) {
        match self.dtype {
            StoredDtype::Bf16 => self.convert(out, |b: [u8; 2]| half::bf16::from_le_bytes(b).to_f32()),
            StoredDtype::F16 => self.convert(out, |b: [u8; 2]| half::f16::from_le_bytes(b).to_f32()),
            StoredDtype::F32 => self.convert(out, f32::from_le_bytes),
        }
    }

    /// Converts to bf16 bits, rounding to nearest with ties to even; bf16 sources stay bit for bit.
    ///
    /// # Panics
    /// If `out` has not [`TensorView::elements`] elements.
    pub fn to_bf16(&self, out: &mut [u16]) {
        match self.dtype {
            StoredDtype::Bf16 => self.convert(out, u16::from_le_bytes),
            StoredDtype::F16 => {
                self.convert(out, |b: [u8; 2]| half::bf16::from_f32(half::f16::from_le_bytes(b).to_f32()).to_bits());
            }
            StoredDtype::F32 => self.convert(out, |b: [u8; 4]| half::bf16::from_f32(f32::from_le_bytes(b)).to_bits()),
        }
    }

    fn convert<const N: usize, T: Send>(&self, out: &mut [T], f: impl Fn([u8; N]) -> T + Sync) {
        assert_eq!(out.len(), self.elements(), "the destination must have as many elements as the tensor");
        let (elements, _) = self.bytes.as_chunks::<N>();
        assert_eq!(out.len(), elements.len(), "a view's bytes match its shape");
        out.par_chunks_mut(CONVERT_CHUNK).zip(elements.par_chunks(CONVERT_CHUNK)).for_each(|(out, elements)| {
            for (value, bytes) in out.iter_mut().zip(elements) {
                *value = f(*bytes);
            }
        });
    }
}

/// Where one tensor lies.
#[derive(Debug)]
struct Entry {
    file: usize,
    /// The name that the file gives it.
    stored_name: String,
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    /// Bytes from the start of the file.
    range: std::ops::Range<usize>,
}

/// Tensors that the model does not use, grouped by name with every number written `{i}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtraTensors {
    /// Such as `model.layers.{i}.self_attn.rotary_emb.inv_freq`.
    pub pattern: String,
    /// Name of the first that matches.
    pub first: String,
    /// Tensors that match.
    pub count: usize,
    /// Their bytes together.
    pub bytes: u64,
}

/// All tensors of one folder, mapped.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
    tied_head: bool,
}

impl Checkpoint {
    /// Opens a target's folder: prefixes are resolved to canonical names, a tied head becomes the embedding, and the
    /// headers are checked against `config`. Returns the tensors that the model does not use and that are known to change
    /// nothing; the caller prints them.
    ///
    /// # Errors
    /// A [`CheckpointError`] naming file or tensor; no weights have been read by then.
    pub fn open_target(folder: &Path, config: &TargetConfig) -> Result<(Self, Vec<ExtraTensors>), CheckpointError> {
        let checkpoint = Self::open_canonical(folder, config.tie_embeddings)?;
        let (harmless, foreign): (Vec<_>, Vec<_>) = checkpoint
            .check(&expected_tensors(config))?
            .into_iter()
            .partition(|e| is_harmless(&e.pattern, config.tie_embeddings));
        if foreign.is_empty() {
            return Ok((checkpoint, harmless));
        }
        let tensors = foreign
            .iter()
            .map(|e| if e.count == 1 { e.first.clone() } else { format!("{} (and {} like it)", e.first, e.count - 1) });
        let model = config.family.model_type();
        Err(CheckpointError::NotOfTheModel { folder: folder.to_owned(), model, tensors: tensors.collect() })
    }

    /// Opens a folder with canonical names, without comparing with a config.
    ///
    /// # Errors
    /// As [`Checkpoint::open_target`], less what only a config can tell.
    pub fn open_canonical(folder: &Path, tie_embeddings: bool) -> Result<Self, CheckpointError> {
        let mut checkpoint = Self::open(folder)?;
        let stored = std::mem::take(&mut checkpoint.tensors);
        let prefix = PREFIXES
            .into_iter()
            .find(|prefix| stored.keys().any(|name| name.strip_prefix(prefix).is_some_and(is_decoder_tensor)))
            .unwrap_or("");
        for (name, entry) in stored {
            let canonical = match name.strip_prefix(prefix) {
                Some(rest) if is_decoder_tensor(rest) => format!("model.{rest}"),
                Some(HEAD) => HEAD.to_owned(),
                _ => name,
            };
            checkpoint.insert(canonical, entry)?;
        }
        checkpoint.tied_head = tie_embeddings;
        if tie_embeddings
            && let (Some(head), Some(embedding)) = (checkpoint.tensors.get(HEAD), checkpoint.tensors.get(EMBEDDING))
            && (head.dtype != embedding.dtype || checkpoint.bytes(head) != checkpoint.bytes(embedding))
        {
            return Err(CheckpointError::TiedHeadDiffers { folder: folder.to_owned() });
        }
        Ok(checkpoint)
    }

    /// Opens a folder and keeps the names that its files use.
    ///
    /// # Errors
    /// A [`CheckpointError`] for missing files, lengths that contradict headers, and names that occur twice.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let (paths, placed) = weight_files(folder)?;
        let mut checkpoint = Self {
            folder: folder.to_owned(),
            files: Vec::with_capacity(paths.len()),
            tensors: BTreeMap::new(),
            metadata: BTreeMap::new(),
            tied_head: false,
        };
        for path in paths {
            let file = MappedFile::open(&path).map_err(|source| CheckpointError::Io { path: path.clone(), source })?;
            let (data_start, header) = read_header(&path, &file)?;
            checkpoint.files.push(file);
            for (name, info) in header.tensors() {
                let entry = Entry {
                    file: checkpoint.files.len() - 1,
                    stored_name: name.clone(),
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    range: data_start + info.data_offsets.0..data_start + info.data_offsets.1,
                };
                checkpoint.insert(name, entry)?;
            }
            checkpoint.metadata.extend(header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())));
        }
        if let Some((index, placed)) = placed {
            checkpoint.check_index(&index, &placed)?;
        }
        Ok(checkpoint)
    }

    fn insert(&mut self, name: String, entry: Entry) -> Result<(), CheckpointError> {
        if let Some(first) = self.tensors.get(&name) {
            return Err(CheckpointError::Duplicate {
                folder: self.folder.clone(),
                first: self.place(first),
                second: self.place(&entry),
                tensor: name,
            });
        }
        self.tensors.insert(name, entry);
        Ok(())
    }

    fn place(&self, entry: &Entry) -> String {
        let file = self.files[entry.file].path().file_name().unwrap_or_default();
        format!("{} as `{}`", file.display(), entry.stored_name)
    }

    fn check_index(&self, index: &Path, placed: &BTreeMap<String, String>) -> Result<(), CheckpointError> {
        for (name, shard) in placed {
            let found = self.tensors.get(name).map(|entry| self.files[entry.file].path());
            if found.and_then(Path::file_name).is_none_or(|file| file != shard.as_str()) {
                let detail = format!("it places tensor `{name}` in {shard}, whose header does not list it");
                return Err(CheckpointError::Index { path: index.to_owned(), detail });
            }
        }
        Ok(())
    }

    /// Compares the headers with what a model needs; the result lists what it does not.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`] with every absent name; else [`CheckpointError::Shape`] or
    /// [`CheckpointError::Dtype`] for the first tensor that differs.
    pub fn check(&self, expected: &[(String, Vec<usize>)]) -> Result<Vec<ExtraTensors>, CheckpointError> {
        let missing: Vec<String> =
            expected.iter().filter(|(name, _)| !self.tensors.contains_key(name)).map(|(name, _)| name.clone()).collect();
        if !missing.is_empty() {
            return Err(CheckpointError::Missing { folder: self.folder.clone(), tensors: missing });
        }
        for (name, wanted) in expected {
            let view = self.tensor(name)?;
            if view.shape != wanted {
                return Err(CheckpointError::Shape {
                    folder: self.folder.clone(),
                    tensor: name.clone(),
                    got: view.shape.to_vec(),
                    wanted: wanted.clone(),
                });
            }
        }
        let used: BTreeSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        let mut extras: BTreeMap<String, ExtraTensors> = BTreeMap::new();
        for (name, entry) in self.tensors.iter().filter(|(name, _)| !used.contains(name.as_str())) {
            let none = || ExtraTensors { pattern: pattern(name), first: name.clone(), count: 0, bytes: 0 };
            let extra = extras.entry(pattern(name)).or_insert_with(none);
            extra.count += 1;
            extra.bytes += entry.range.len() as u64;
        }
        Ok(extras.into_values().collect())
    }

    /// The folder that was opened.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether a tensor is there, in whatever dtype. A tied head counts when the embedding is there.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(self.resolve(name))
    }

    /// Extents of a tensor in any dtype.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(self.resolve(name)).map(|entry| entry.shape.as_slice())
    }

    /// The `__metadata__` of all headers together.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// A tensor by name; `lm_head.weight` is the embedding where the two are tied.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`], or [`CheckpointError::Dtype`] when it is stored in another dtype than BF16, F16, F32.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, CheckpointError> {
        let entry = self
            .tensors
            .get(self.resolve(name))
            .ok_or_else(|| CheckpointError::Missing { folder: self.folder.clone(), tensors: vec![name.to_owned()] })?;
        let dtype = StoredDtype::of(entry.dtype).ok_or_else(|| CheckpointError::Dtype {
            folder: self.folder.clone(),
            tensor: name.to_owned(),
            got: format!("{:?}", entry.dtype),
        })?;
        Ok(TensorView { dtype, shape: &entry.shape, bytes: self.bytes(entry) })
    }

    /// Reads a fused tensor as f32, its parts stacked along rows.
    ///
    /// # Errors
    /// As [`Checkpoint::tensor`], and [`CheckpointError::Shape`] for a part of another shape.
    ///
    /// # Panics
    /// If `out` has not as many elements as the fused tensor.
    pub fn read_f32(&self, fused: &FusedTensor, out: &mut [f32]) -> Result<(), CheckpointError> {
        self.read_parts(fused, out, |view, out| view.to_f32(out))
    }

    /// Reads a fused tensor as bf16 bits, its parts stacked along rows.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`].
    ///
    /// # Panics
    /// If `out` has not as many elements as the fused tensor.
    pub fn read_bf16(&self, fused: &FusedTensor, out: &mut [u16]) -> Result<(), CheckpointError> {
        self.read_parts(fused, out, |view, out| view.to_bf16(out))
    }

    /// Gives the pages of its files back to the kernel; see [`MappedFile::release`].
    pub fn release(&self) {
        self.files.iter().for_each(MappedFile::release);
    }

    fn read_parts<T>(
        &self,
        fused: &FusedTensor,
        out: &mut [T],
        convert: impl Fn(&TensorView<'_>, &mut [T]),
    ) -> Result<(), CheckpointError> {
        assert_eq!(out.len(), fused.elements(), "the destination of `{}` must have its size", fused.name);
        let mut rest = out;
        for part in &fused.parts {
            let view = self.tensor(&part.name)?;
            if view.shape != part.shape {
                return Err(CheckpointError::Shape {
                    folder: self.folder.clone(),
                    tensor: part.name.clone(),
                    got: view.shape.to_vec(),
                    wanted: part.shape.clone(),
                });
            }
            let (this, after) = rest.split_at_mut(view.elements());
            convert(&view, this);
            rest = after;
        }
        Ok(())
    }

    fn resolve<'n>(&self, name: &'n str) -> &'n str {
        if self.tied_head && name == HEAD { EMBEDDING } else { name }
    }

    fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.files[entry.file][entry.range.clone()]
    }
}

/// Buffers that configs give again, as some exporters store them.
const BUFFERS: [&str; 3] = ["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"];
/// Parts of larger models that stand beside the text decoder and are not on the way of text through it.
const BESIDE: [&str; 6] = ["visual.", "vision_model.", "vision_tower.", "multi_modal_projector.", "audio_tower.", "mtp."];

/// Whether extra tensors of this pattern leave the hidden states of text and the logits as they are. A tied head has been compared with the embedding.
fn is_harmless(pattern: &str, tied: bool) -> bool {
    let beside = pattern.strip_prefix("model.").unwrap_or(pattern);
    BUFFERS.iter().any(|buffer| pattern.ends_with(buffer))
        || BESIDE.iter().any(|part| beside.starts_with(part))
        || (tied && pattern == HEAD)
}

/// Whether a name without its prefix is one of a decoder's own tensors.
fn is_decoder_tensor(name: &str) -> bool {
    name.starts_with("layers.") || name.starts_with("embed_tokens.") || name == "norm.weight"
}

/// A name with each run of digits between dots written `{i}`.
fn pattern(name: &str) -> String {
    let number = |piece: &&str| !piece.is_empty() && piece.bytes().all(|byte| byte.is_ascii_digit());
    name.split('.').map(|piece| if number(&piece) { "{i}" } else { piece }).collect::<Vec<_>>().join(".")
}
