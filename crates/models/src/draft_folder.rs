//! A drafter's folder, read: ours, or one that somebody published.
//!
//! Job: open a plain or speculators folder for evaluation, fine-tuning or resuming. It refuses a drafter that was made for
//! another target, tensors that plain DFlash does not have (pruned vocabularies, extra heads), and everything that
//! the config or the checkpoint refuses.
//! Invariants: the config is validated and matches the target; every tensor of the program can be read; embedding and head
//! are always the target's, so copies in the folder are not read, and a warning says so.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::config_fields::{ConfigError, read_object};
use crate::draft_config::{DraftConfig, DraftError, TargetDims};
use crate::draft_json::{self, Format};
use crate::tensor_names::{FusedTensor, draft_sources};

/// Why a drafter's folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DraftFolderError {
    /// Its config.json.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// Its tensors.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its sizes, or another target's.
    #[error("{folder}: {error}", folder = folder.display())]
    Draft {
        /// The folder.
        folder: PathBuf,
        /// The field and what to do.
        error: Box<DraftError>,
    },
    /// Tensors of a relative of DFlash.
    #[error(
        "{folder} has tensors that plain DFlash does not have: {list}\nuse a drafter without a pruned vocabulary or extra heads",
        folder = folder.display(), list = patterns.join(", ")
    )]
    ForeignTensors {
        /// The folder.
        folder: PathBuf,
        /// Their names, numbers written `{i}`.
        patterns: Vec<String>,
    },
}

impl From<ConfigError> for DraftFolderError {
    fn from(error: ConfigError) -> Self {
        Self::Config(Box::new(error))
    }
}

/// An opened drafter.
#[derive(Debug)]
pub struct DraftFolder {
    /// Validated sizes.
    pub config: DraftConfig,
    /// The spelling of its config.json.
    pub format: Format,
    /// Keys that are not known and tensors that are not read, one line each. The caller prints them.
    pub warnings: Vec<String>,
    checkpoint: Checkpoint,
}

impl DraftFolder {
    /// Opens a folder and checks config, tensors and target.
    ///
    /// # Errors
    /// A [`DraftFolderError`] naming file, key, field or tensor.
    pub fn open(folder: &Path, target: TargetDims) -> Result<Self, DraftFolderError> {
        let path = folder.join("config.json");
        let mut warnings = Vec::new();
        let (format, config) = draft_json::read(&path, &read_object(&path)?, target, &mut warnings)?;
        let draft = |error| DraftFolderError::Draft { folder: folder.to_owned(), error: Box::new(error) };
        config.validate().map_err(draft)?;
        config.check_target(target).map_err(draft)?;
        let checkpoint = Checkpoint::open(folder)?;
        let expected: Vec<(String, Vec<usize>)> =
            draft_sources(&config).into_iter().flat_map(|fused| fused.parts).map(|part| (part.name, part.shape)).collect();
        let mut foreign = Vec::new();
        for extra in checkpoint.check(&expected)? {
            match extra.pattern.as_str() {
                "embed_tokens.weight" | "lm_head.weight" => {
                    let wanted = [config.vocab, config.hidden];
                    if checkpoint.shape(&extra.pattern) != Some(&wanted[..]) {
                        foreign.push(extra.pattern);
                        continue;
                    }
                    warnings.push(format!(
                        "{}: `{}` ({} bytes) is not read; the target's own is used",
                        folder.display(),
                        extra.pattern,
                        extra.bytes
                    ));
                }
                pattern if pattern.ends_with("rotary_emb.inv_freq") => {
                    warnings.push(format!("{}: `{pattern}` is not read; frequencies follow from config.json", folder.display()))
                }
                _ => foreign.push(extra.pattern),
            }
        }
        if !foreign.is_empty() {
            return Err(DraftFolderError::ForeignTensors { folder: folder.to_owned(), patterns: foreign });
        }
        Ok(Self { config, format, warnings, checkpoint })
    }

    /// The program's tensors, in the order of the forward pass, with shapes.
    pub fn tensors(&self) -> Vec<FusedTensor> {
        draft_sources(&self.config)
    }

    /// What the writer recorded about itself in the file's header.
    pub fn provenance(&self) -> &BTreeMap<String, String> {
        self.checkpoint.metadata()
    }

    /// Reads one of the program's tensors as f32.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`].
    ///
    /// # Panics
    /// If `out` has not the tensor's size.
    pub fn read_f32(&self, tensor: &FusedTensor, out: &mut [f32]) -> Result<(), CheckpointError> {
        self.checkpoint.read_f32(tensor, out)
    }

    /// Reads one of the program's tensors as bf16 bits.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`].
    ///
    /// # Panics
    /// If `out` has not the tensor's size.
    pub fn read_bf16(&self, tensor: &FusedTensor, out: &mut [u16]) -> Result<(), CheckpointError> {
        self.checkpoint.read_bf16(tensor, out)
    }
}
