//! Which files hold a folder's weights, and whether each is as long as its header says.
//!
//! Job: find the single file or the index with its shards, and read headers. It refuses a missing shard, an index that leads out of the folder, a file that is
//! shorter or longer than its header asks for, and a Git LFS pointer, which only names the weights. It reads no weight.
//! Invariant: what is returned exists and lies in the folder.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::Metadata;
use serde_json::Value;

use crate::checkpoint::CheckpointError;
use crate::config_fields::{ConfigError, read_object};

/// The folder's weight files in order, and the index's placement of tensors if there is an index.
pub(crate) type WeightFiles = (Vec<PathBuf>, Option<(PathBuf, BTreeMap<String, String>)>);

/// Finds the weight files of `folder`.
pub(crate) fn weight_files(folder: &Path) -> Result<WeightFiles, CheckpointError> {
    let single = folder.join("model.safetensors");
    if single.exists() {
        return Ok((vec![single], None));
    }
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        return Err(CheckpointError::NoWeights { folder: folder.to_owned(), advice: no_weights_advice(folder) });
    }
    let bad = |detail: String| CheckpointError::Index { path: index.clone(), detail };
    let object = read_object(&index).map_err(|error| match error {
        ConfigError::Read { path, source } => CheckpointError::Io { path, source },
        other => bad(other.to_string().lines().next().unwrap_or_default().to_owned()),
    })?;
    let map =
        object.get("weight_map").and_then(Value::as_object).ok_or_else(|| bad("it has no object `weight_map`".to_owned()))?;
    let mut placed = BTreeMap::new();
    for (tensor, shard) in map {
        // A shard is a plain file name; anything else could reach outside of the folder.
        let shard = shard.as_str().filter(|shard| Path::new(shard).file_name().is_some_and(|name| name == *shard));
        let shard = shard.ok_or_else(|| bad(format!("the shard of tensor `{tensor}` is not a file name")))?;
        placed.insert(tensor.clone(), shard.to_owned());
    }
    let shards: BTreeSet<&String> = placed.values().collect();
    let missing: Vec<String> = shards.iter().filter(|shard| !folder.join(shard).exists()).map(|s| (*s).clone()).collect();
    if !missing.is_empty() {
        return Err(CheckpointError::MissingShards { folder: folder.to_owned(), shards: missing });
    }
    Ok((shards.into_iter().map(|shard| folder.join(shard)).collect(), Some((index, placed))))
}

fn no_weights_advice(folder: &Path) -> String {
    let names: Vec<String> = std::fs::read_dir(folder)
        .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    match names.iter().find(|name| name.ends_with(".bin") || name.ends_with(".gguf") || name.ends_with(".pth")) {
        Some(other) => format!("it has {other}; convert the weights to safetensors"),
        None => "name a folder with downloaded weights".to_owned(),
    }
}

/// Checks a file's length against its header. Returns where the data starts.
pub(crate) fn read_header(path: &Path, file: &[u8]) -> Result<(usize, Metadata), CheckpointError> {
    let have = file.len() as u64;
    if is_lfs_pointer(file) {
        return Err(CheckpointError::LfsPointer { path: path.to_owned() });
    }
    let length = |want: u64| CheckpointError::Length { path: path.to_owned(), have, want };
    let Some((prefix, rest)) = file.split_first_chunk::<8>() else { return Err(length(8)) };
    let header_bytes = u64::from_le_bytes(*prefix);
    let asked = header_bytes.saturating_add(8);
    if asked > have && header_bytes < 100_000_000 {
        return Err(length(asked));
    }
    match SafeTensors::read_metadata(file) {
        Ok((n, metadata)) => Ok((8 + n, metadata)),
        Err(safetensors::SafeTensorError::MetadataIncompleteBuffer) => {
            let header = usize::try_from(header_bytes).ok().and_then(|n| rest.get(..n)).unwrap_or_default();
            let tensors: HashMap<String, Value> = serde_json::from_slice(header).unwrap_or_default();
            let end = |info: &Value| info["data_offsets"][1].as_u64();
            Err(length(asked + tensors.values().filter_map(end).max().unwrap_or(0)))
        }
        Err(error) => Err(CheckpointError::Header { path: path.to_owned(), detail: error.to_string() }),
    }
}

/// Whether a file is what Git LFS leaves in the place of a file that was not downloaded: a few lines of text that name it.
pub fn is_lfs_pointer(file: &[u8]) -> bool {
    file.starts_with(b"version https://git-lfs.github.com/spec/")
}
