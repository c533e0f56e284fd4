//! A drafter's state between device, checkpoint and export.
//!
//! Job: read a snapshot off a drafter, put one back, write exports. Refuses files it did not check. Invariant: a drafter restored from a snapshot
//! continues exactly as the one that gave it.

use crate::checkpoint::{CheckpointError, Loaded, Meta, Snapshot};
use crate::drafter::Drafter;
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
    /// The drafter to start from has another shape.
    #[error(
        "drafter.init_from = {folder}: its {field} differs from the config's\n  make [drafter] equal to that drafter's config.json, or leave init_from out"
    )]
    OtherShape {
        /// The folder.
        folder: String,
        /// First field that differs.
        field: &'static str,
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

/// Loads the weights of an exported drafter.
///
/// # Errors
/// When the folder is no drafter of this shape.
pub fn load_folder(folder: &Path, wanted: &DraftConfig) -> Result<Vec<(String, Vec<f32>)>, StateError> {
    let drafter = DraftFolder::open(folder, wanted.target_dims())?;
    let (a, b) = (&drafter.config, wanted);
    let fields = [
        ("layers", a.layers == b.layers),
        ("hidden", a.hidden == b.hidden),
        ("intermediate", a.intermediate == b.intermediate),
        ("heads", (a.heads, a.kv_heads, a.head_dim) == (b.heads, b.kv_heads, b.head_dim)),
        ("target_layer_ids", a.target_layer_ids == b.target_layer_ids),
        ("block_size", a.block_size == b.block_size),
        ("layer_types", a.layer_types == b.layer_types && a.sliding_window == b.sliding_window),
    ];
    if let Some((field, _)) = fields.into_iter().find(|(_, same)| !same) {
        return Err(StateError::OtherShape { folder: folder.display().to_string(), field });
    }
    folder_weights(&drafter)
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
