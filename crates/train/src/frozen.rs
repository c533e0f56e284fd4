//! Content of frozen tensors: the target's weights and the RoPE tables, by tensor name.
//!
//! Job: one place that knows where each frozen tensor of a program comes from, and the backends that turn them into executors.
//! Refuses tensors whose name it does not know (a bug of the model code). Invariant: each shard is mapped once per process, and on the CPU each
//! tensor is widened once and shared by all executors.

use drafthorse_cpu::{CpuExecutor, FrozenSet, Options};
use drafthorse_graph::{DType, ExecError, Executor, Program, Role};
use drafthorse_models::checkpoint::{Checkpoint, CheckpointError};
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_models::hf_config::TargetConfig;
use drafthorse_models::rope::RopeSpec;
use drafthorse_models::tensor_names::{FusedTensor, target_sources};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A target opened for reading: config and mapped weights.
pub struct TargetFiles {
    /// The folder.
    pub folder: PathBuf,
    /// Its config.
    pub config: TargetConfig,
    checkpoint: Checkpoint,
    sources: Vec<FusedTensor>,
    /// Things a person should know: unknown config keys, tensors that are not used.
    pub notices: Vec<String>,
}

/// Errors of opening a target or making an executor.
#[derive(Debug, thiserror::Error)]
pub enum FrozenError {
    /// config.json is not what this program computes.
    #[error(transparent)]
    Config(Box<drafthorse_models::config_fields::ConfigError>),
    /// The weights are not what the config says.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The device failed.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// The build lacks the backend.
    #[error("{what}\n  {todo}")]
    Missing {
        /// What is missing.
        what: String,
        /// How to get it.
        todo: String,
    },
}

impl From<drafthorse_models::config_fields::ConfigError> for FrozenError {
    fn from(error: drafthorse_models::config_fields::ConfigError) -> Self {
        FrozenError::Config(Box::new(error))
    }
}

impl TargetFiles {
    /// Opens and checks an HF folder; reads no weight.
    ///
    /// # Errors
    /// [`FrozenError`], naming the file, key or tensor.
    pub fn open(folder: &Path) -> Result<TargetFiles, FrozenError> {
        let config = TargetConfig::open(folder)?;
        let (checkpoint, extra) = Checkpoint::open_target(folder, &config)?;
        let mut notices = config.warnings.clone();
        notices.extend(
            extra.iter().map(|e| format!("{} tensors `{}` of the target are not used ({} bytes)", e.count, e.pattern, e.bytes)),
        );
        let sources = target_sources(&config);
        Ok(TargetFiles { folder: folder.to_path_buf(), config, checkpoint, sources, notices })
    }

    /// What tells one target from another without reading its weights: SHA-256 over config.json and the names and sizes of the weight files.
    pub fn identity(&self) -> String {
        let mut text = std::fs::read_to_string(self.folder.join("config.json")).unwrap_or_default();
        let mut files: Vec<(String, u64)> = std::fs::read_dir(&self.folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|e| e.path().extension().is_some_and(|x| x == "safetensors"))
            .filter_map(|e| Some((e.file_name().to_string_lossy().into_owned(), std::fs::metadata(e.path()).ok()?.len())))
            .collect();
        files.sort();
        files.iter().for_each(|(name, bytes)| text.push_str(&format!("\n{name} {bytes}")));
        drafthorse_data::sha256_hex(text.as_bytes())
    }

    /// What tells one target's weights from another's of equal shape, at the price of a few reads: SHA-256 over name, dtype, shape and the first 4 KiB of
    /// every tensor. How the files are cut into shards and what else config.json says do not matter.
    pub fn weights_id(&self) -> String {
        const HEAD_BYTES: usize = 4096;
        let mut digest = String::new();
        for part in self.sources.iter().flat_map(|fused| &fused.parts) {
            let view = self.checkpoint.tensor(&part.name).expect("every tensor was checked when the target was opened");
            let head = &view.bytes[..view.bytes.len().min(HEAD_BYTES)];
            let sum = drafthorse_data::sha256_hex(head);
            digest.push_str(&format!("{} {:?} {:?} {sum}\n", part.name, view.dtype, view.shape));
        }
        drafthorse_data::sha256_hex(digest.as_bytes())
    }

    /// All parameters; a tied head is the embedding and counts once.
    pub fn parameters(&self) -> u64 {
        let tied = self.config.tie_embeddings;
        self.sources.iter().filter(|s| !(tied && s.name == "head")).map(|s| s.elements() as u64).sum()
    }
}

/// Everything frozen that a program may name.
pub struct FrozenSource<'a> {
    /// The target.
    pub target: &'a TargetFiles,
    /// The drafter's own RoPE.
    pub draft: Option<&'a DraftConfig>,
}

impl FrozenSource<'_> {
    /// The tensor `name` of `len` elements as F32.
    ///
    /// # Errors
    /// When the checkpoint cannot be read.
    ///
    /// # Panics
    /// On a name that no model code declares.
    pub fn f32(&self, name: &str, len: usize) -> Result<Vec<f32>, FrozenError> {
        if let Some((rope, which)) = self.rope(name) {
            let (cos, sin) = rope.tables(len / (rope.rotary_dim / 2));
            return Ok(if which == "cos" { cos } else { sin });
        }
        let mut out = vec![0.0f32; len];
        self.target.checkpoint.read_f32(self.fused(name), &mut out)?;
        Ok(out)
    }

    /// The tensor `name` of `len` elements as bf16 bit patterns; `None` for tables, which are F32.
    ///
    /// # Errors
    /// When the checkpoint cannot be read.
    pub fn bf16(&self, name: &str, len: usize) -> Result<Option<Vec<u16>>, FrozenError> {
        if self.rope(name).is_some() {
            return Ok(None);
        }
        let mut out = vec![0u16; len];
        self.target.checkpoint.read_bf16(self.fused(name), &mut out)?;
        Ok(Some(out))
    }

    fn rope<'n>(&self, name: &'n str) -> Option<(&RopeSpec, &'n str)> {
        if let Some(which) = name.strip_prefix("target.rope.") {
            return Some((&self.target.config.rope, which));
        }
        let which = name.strip_prefix("draft.rope.")?;
        Some((&self.draft.expect("a program with a drafter was given the drafter's config").rope, which))
    }

    fn fused(&self, name: &str) -> &FusedTensor {
        let own = name.strip_prefix("target.").unwrap_or(name);
        self.target.sources.iter().find(|s| s.name == own).unwrap_or_else(|| panic!("frozen tensor `{name}` has no source"))
    }
}

/// A kind of device. Executors are made in the thread that owns the device and stay there.
pub trait Backend: Sync {
    /// Its executor.
    type Exec: Executor<Slot: Sync>;

    /// Element type of activations and trainable weights.
    fn act(&self) -> DType;

    /// Name of device `index`, for messages.
    fn device_name(&self, index: u32) -> String;

    /// What this backend chose by timing and its results depend on, to be kept in the run folder; `None` where it chooses nothing.
    fn choices(&self) -> Option<String> {
        None
    }

    /// Takes the choices of an earlier run instead of timing again.
    ///
    /// # Errors
    /// What is wrong with the text.
    fn adopt_choices(&self, _text: &str) -> Result<(), String> {
        Ok(())
    }

    /// Plans `program` on device `index`, allocates, and loads the frozen tensors. `progress` gets (bytes loaded, bytes in all).
    ///
    /// # Errors
    /// [`FrozenError`].
    fn executor(
        &self,
        index: u32,
        program: Arc<Program>,
        source: &FrozenSource<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self::Exec, FrozenError>;
}

/// The CPU: one rayon pool and one copy of every frozen tensor for all executors.
pub struct CpuBackend {
    options: Options,
    shared: Mutex<FrozenSet>,
}

impl CpuBackend {
    /// A backend with `threads` compute threads (all cores when absent).
    ///
    /// # Errors
    /// When the pool cannot be started.
    pub fn new(threads: Option<usize>) -> Result<CpuBackend, FrozenError> {
        let builder =
            rayon::ThreadPoolBuilder::new().thread_name(|i| format!("compute {i}")).num_threads(CpuBackend::threads(threads));
        let pool = builder.build().map_err(|e| FrozenError::Missing {
            what: format!("cannot start compute threads: {e}"),
            todo: "raise the process limit, or set pipeline.threads".into(),
        })?;
        Ok(CpuBackend { options: Options { pool: Arc::new(pool), round: false }, shared: Mutex::default() })
    }

    /// Compute threads that a backend of `threads` would have.
    pub fn threads(threads: Option<usize>) -> usize {
        threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// The compute pool.
    pub fn pool(&self) -> &rayon::ThreadPool {
        &self.options.pool
    }
}

impl Backend for CpuBackend {
    type Exec = CpuExecutor;

    fn act(&self) -> DType {
        DType::F32
    }

    fn device_name(&self, _index: u32) -> String {
        "cpu".into()
    }

    fn executor(
        &self,
        _index: u32,
        program: Arc<Program>,
        source: &FrozenSource<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CpuExecutor, FrozenError> {
        let frozen = program.of_role(Role::Frozen);
        let total: u64 = frozen.iter().map(|&t| 4 * program.get(t).len() as u64).sum();
        let mut set = FrozenSet::new();
        let mut done = 0;
        for t in frozen {
            let tensor = program.get(t);
            // The lock is held while a tensor is widened, so that two workers never do it twice.
            let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
            let data = match shared.get(&tensor.name).filter(|d| d.len() == tensor.len()) {
                Some(data) => Arc::clone(data),
                None => {
                    let data = Arc::new(self.options.pool.install(|| source.f32(&tensor.name, tensor.len()))?);
                    shared.insert(tensor.name.clone(), Arc::clone(&data));
                    data
                }
            };
            drop(shared);
            set.insert(tensor.name.clone(), data);
            done += 4 * tensor.len() as u64;
            progress(done, total);
        }
        // The widened copy is what is read from here on.
        source.target.checkpoint.release();
        Ok(CpuExecutor::new(program, &set, self.options.clone())?)
    }
}
