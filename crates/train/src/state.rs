//! A drafter's state between device, checkpoint and export.
//!
//! Job: read a snapshot off a drafter, put one back, write exports. Refuses files it did not check. Invariant: a drafter restored from a snapshot
//! continues exactly as the one that gave it.

use crate::checkpoint::{CheckpointError, Loaded, Meta, Snapshot};
use crate::drafter::Drafter;
use crate::frozen::TargetFiles;
use drafthorse_graph::{ExecError, Executor, HostMut, HostRef, TensorId};
use drafthorse_models::checkpoint::CheckpointError as FileError;
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_models::draft_folder::{DraftFolder, DraftFolderError};
use drafthorse_models::draft_json::Format;
use drafthorse_models::export::{ExportError, ExportReport, ExportRequest, Verifier, Weights, export};
use std::collections::BTreeMap;
use std::path::Path;

/// Errors of moving state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The device.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A drafter folder.
    #[error(transparent)]
    Folder(#[from] DraftFolderError),
    /// Its weights.
    #[error(transparent)]
    File(#[from] FileError),
    /// An export.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The drafter to start from is another one than the config describes.
    #[error("drafter.init_from = {folder}: its {field} is {theirs}, the run's {ours}\n  {todo}")]
    Other {
        /// The folder.
        folder: String,
        /// First field that differs.
        field: &'static str,
        /// Its value there.
        theirs: String,
        /// Its value by the config.
        ours: String,
        /// What to do.
        todo: String,
    },
}

/// (file name, tensor, length) of everything that is saved.
fn saved<E: Executor>(drafter: &Drafter<E>) -> Vec<(String, TensorId, Vec<usize>)> {
    let (program, passes) = (&drafter.program().program, &drafter.program().passes);
    let mut list = Vec::new();
    for ((name, w), p) in drafter.program().weights.iter().zip(&passes.optimizer.params) {
        assert_eq!(*w, p.w, "parameters are in file order");
        let shape = program.get(*w).shape.clone();
        list.push((name.clone(), p.master.unwrap_or(p.w), shape.clone()));
        list.push((format!("{name}.m"), p.m, shape.clone()));
        list.push((format!("{name}.v"), p.v, shape));
    }
    list
}

/// Copies a drafter's state to host memory.
///
/// # Errors
/// When the device fails.
pub fn snapshot<E: Executor>(drafter: &mut Drafter<E>, meta: Meta, config: String) -> Result<Snapshot, ExecError> {
    let tensors = saved(drafter)
        .into_iter()
        .map(|(name, t, shape)| Ok((name, shape, drafter.read(t)?)))
        .collect::<Result<_, ExecError>>()?;
    Ok(Snapshot { meta, tensors, config })
}

/// Puts a checkpoint's state back.
///
/// # Errors
/// When the checkpoint lacks a tensor or the device fails.
pub fn restore<E: Executor>(drafter: &mut Drafter<E>, loaded: &Loaded) -> Result<(), StateError> {
    for (name, t, shape) in saved(drafter) {
        let values = loaded.tensor(&name, shape.iter().product())?;
        match drafter.program().weights.iter().find(|(n, _)| *n == name) {
            Some(&(_, weight)) => drafter.load_weight(weight, &values)?,
            None => drafter.exec().write(t, HostRef::F32(&values))?,
        }
    }
    let adam_t = drafter.program().passes.optimizer.scalars.adam_t;
    drafter.exec().write(adam_t, HostRef::I32(&[loaded.meta.adam_t as i32]))?;
    let mut back = [0];
    drafter.exec().read(adam_t, HostMut::I32(&mut back))?;
    assert_eq!(back[0] as u64, loaded.meta.adam_t);
    Ok(())
}

/// Opens the exported drafter in `folder` as one that training as `wanted` can begin with. Reads no weight.
///
/// # Errors
/// When the folder is no drafter, or one whose weights mean something else: another shape, mask token, rotary embedding or epsilon.
fn open_init(folder: &Path, wanted: &DraftConfig) -> Result<DraftFolder, StateError> {
    let drafter = DraftFolder::open(folder, wanted.target_dims())?;
    let (a, b) = (&drafter.config, wanted);
    let shown = |value: &dyn std::fmt::Debug| format!("{value:?}");
    let kinds = |c: &DraftConfig| c.layer_types.iter().map(|kind| kind.as_str()).collect::<Vec<_>>().join(", ");
    let fields = [
        ("layers", a.layers.to_string(), b.layers.to_string(), "drafter.layers"),
        ("hidden", a.hidden.to_string(), b.hidden.to_string(), "target"),
        ("intermediate", a.intermediate.to_string(), b.intermediate.to_string(), "drafter.intermediate"),
        ("heads", a.heads.to_string(), b.heads.to_string(), "drafter.heads"),
        ("kv_heads", a.kv_heads.to_string(), b.kv_heads.to_string(), "drafter.kv_heads"),
        ("head_dim", a.head_dim.to_string(), b.head_dim.to_string(), "drafter.head_dim"),
        ("target_layer_ids", shown(&a.target_layer_ids), shown(&b.target_layer_ids), "drafter.target_layer_ids"),
        ("block_size", a.block_size.to_string(), b.block_size.to_string(), "drafter.block_size"),
        ("layer_types", kinds(a), kinds(b), "drafter.sliding_layers"),
        ("sliding_window", shown(&a.sliding_window), shown(&b.sliding_window), "drafter.sliding_window"),
        ("mask_token_id", a.mask_token_id.to_string(), b.mask_token_id.to_string(), "drafter.mask_token_id"),
        ("rope theta", a.rope.theta.to_string(), b.rope.theta.to_string(), "drafter.rope_theta"),
        ("rope scaling", shown(&a.rope.scaling), shown(&b.rope.scaling), ""),
        ("rms_norm_eps", a.rms_eps.to_string(), b.rms_eps.to_string(), ""),
    ];
    match fields.into_iter().find(|(_, theirs, ours, _)| theirs != ours) {
        None => Ok(drafter),
        Some((field, theirs, ours, key)) => {
            let todo = match key {
                "" => "a run cannot change this: start from another drafter, or leave init_from out".to_owned(),
                "target" => "name the target that the drafter was trained for, or leave init_from out".to_owned(),
                key => format!("set {key} as in that drafter's config.json, or leave init_from out"),
            };
            Err(StateError::Other { folder: folder.display().to_string(), field, theirs, ours, todo })
        }
    }
}

/// Refuses a drafter that training as `wanted` cannot begin with, before anything is loaded. Returns what a person should know of it.
///
/// # Errors
/// As for opening it.
pub fn check_init(folder: &Path, wanted: &DraftConfig, target: &TargetFiles) -> Result<Vec<String>, StateError> {
    let drafter = open_init(folder, wanted)?;
    let mut notices = drafter.warnings.clone();
    if let Some(other) = other_target(drafter.provenance().get(TARGET_KEY), target) {
        notices.push(format!("drafter.init_from = {}: {other}", folder.display()));
    }
    Ok(notices)
}

/// Key of an export's provenance that says which target's weights it was trained for.
pub const TARGET_KEY: &str = "drafthorse_target";

/// What a drafter folder records of where its weights come from, for the header of its safetensors file: servers and libraries pass over keys there that
/// they do not know.
pub fn provenance(meta: &Meta) -> BTreeMap<String, String> {
    let mut map = BTreeMap::from([
        ("drafthorse_build".to_owned(), meta.build_id.clone()),
        ("drafthorse_step".to_owned(), meta.step.to_string()),
        ("drafthorse_dataset".to_owned(), meta.dataset.clone()),
    ]);
    map.extend(meta.target.split_once('+').map(|(_, weights)| (TARGET_KEY.to_owned(), weights.to_owned())));
    map
}

/// What to tell when a drafter of the target `recorded` is used with `target`, whose weights are others. Nothing is known without a record.
pub fn other_target(recorded: Option<&String>, target: &TargetFiles) -> Option<String> {
    let theirs = recorded?;
    let ours = target.weights_id();
    (*theirs != ours).then(|| {
        format!(
            "the drafter was trained for other weights than those in {} (weights id {theirs:.12}…, here {ours:.12}…): drafts will be rejected more often",
            target.folder.display()
        )
    })
}

/// Loads the weights of an exported drafter to begin training as `wanted` with.
///
/// # Errors
/// As [`check_init`].
pub fn load_folder(folder: &Path, wanted: &DraftConfig) -> Result<Vec<(String, Vec<f32>)>, StateError> {
    folder_weights(&open_init(folder, wanted)?)
}

/// All weights of an opened drafter folder, by internal name.
///
/// # Errors
/// When a tensor cannot be read.
pub fn folder_weights(drafter: &DraftFolder) -> Result<Vec<(String, Vec<f32>)>, StateError> {
    drafter
        .tensors()
        .iter()
        .map(|fused| {
            let mut values = vec![0.0; fused.elements()];
            drafter.read_f32(fused, &mut values)?;
            Ok((fused.name.clone(), values))
        })
        .collect()
}

/// Writes `weights` as a drafter folder and reads it back.
///
/// # Errors
/// [`ExportError`].
pub fn export_weights(
    folder: &Path,
    format: Format,
    config: &DraftConfig,
    weights: &[(String, Vec<f32>)],
    verifier: &Verifier,
    provenance: &BTreeMap<String, String>,
) -> Result<ExportReport, ExportError> {
    let weights: BTreeMap<String, Weights<'_>> = weights.iter().map(|(n, w)| (n.clone(), Weights::F32(w))).collect();
    export(&ExportRequest { folder, format, config, weights: &weights, verifier, provenance, replace: true })
}
