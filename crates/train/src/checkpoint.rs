//! Checkpoints: everything that a run needs to go on bit for bit.
//!
//! Job: write a snapshot aside, sync it, rename it into place, prune old ones; find and read the newest complete one.
//! Refuses to write weights that are not finite, to read a file that is not what was written, and to resume a run whose data, drafter or step size differ.
//! Invariants: a folder named `step-N` is complete; a crash at any moment leaves the previous checkpoints readable; nothing is pruned before its successor
//! is in place; no byte is used before its file's SHA-256 was compared.

use crate::checksums::{SUMS_FILE, Sums};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Prefix of a folder that is being written.
const WRITING: &str = ".writing-";
/// The tensors.
const STATE_FILE: &str = "state.safetensors";
/// What is not a tensor.
const META_FILE: &str = "meta.json";
/// The resolved config.
const CONFIG_FILE: &str = "config.toml";
/// Prefix of a complete folder that a later save of the same step replaces.
const REPLACED: &str = ".replaced-";

/// Version of the layout; it grows when an older reader would misunderstand.
pub const VERSION: u32 = 1;

/// Errors of saving and loading.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The filesystem said no.
    #[error("cannot {what} {path}: {source}\n  {todo}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
        /// What to do.
        todo: String,
    },
    /// The folder is not a checkpoint of this program.
    #[error("{path} is not a checkpoint that can be read: {what}\n  resume from another one, or start a new run")]
    Damaged {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A file of the checkpoint is not what was written.
    #[error("{path} is damaged: {what}\n  {todo}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// How that is known.
        what: String,
        /// What to do.
        todo: String,
    },
    /// The checkpoint belongs to another run.
    #[error("cannot resume from {path}: {what}\n  {todo}")]
    Mismatch {
        /// The folder.
        path: PathBuf,
        /// What differs.
        what: String,
        /// What to do.
        todo: String,
    },
    /// A weight is not finite.
    #[error(
        "weight `{tensor}` has an element that is not finite after step {step}; no checkpoint was written\n  the checkpoints before it are intact: resume from one with a lower learning rate"
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// The step.
        step: u64,
    },
}

/// What is not a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// Layout version.
    pub version: u32,
    /// Optimizer steps done; the next step is this number (0-based).
    pub step: u64,
    /// Steps of the whole run: what the learning rate follows.
    pub total_steps: u64,
    /// Adam's t.
    pub adam_t: u64,
    /// Steps skipped because something was not finite.
    pub skipped: u64,
    /// Of these, the last ones in a row.
    pub skipped_in_row: u32,
    /// G.
    pub global_batch: u64,
    /// D when it was written.
    pub drafters: usize,
    /// Fingerprint of the dataset.
    pub dataset: String,
    /// The run's seed.
    pub seed: u64,
    /// The drafter's config as JSON.
    pub drafter: serde_json::Value,
    /// Config keys that decide which batch comes next, with their values.
    pub batches: BTreeMap<String, serde_json::Value>,
    /// Identity of the target: its config and the sizes of its weight files, then `+` and the id of its weights. Older builds wrote the first part alone.
    pub target: String,
    /// Build that wrote it.
    pub build_id: String,
    /// Command line that wrote it.
    pub command_line: Vec<String>,
    /// Held-out loss at this step, if it was measured.
    pub held_out_loss: Option<f64>,
    /// Lowest held-out loss of the run so far, and its step.
    pub best: Option<(f64, u64)>,
}

/// A snapshot in host memory.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Scalars.
    pub meta: Meta,
    /// (name, shape, values) of every weight, first and second moment, fp32.
    pub tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
    /// The resolved config, TOML.
    pub config: String,
}

impl Snapshot {
    /// Refuses a snapshot with an element that is not finite.
    ///
    /// # Errors
    /// [`CheckpointError::NotFinite`], naming the tensor.
    pub fn check_finite(&self) -> Result<(), CheckpointError> {
        match self.tensors.iter().find(|(_, _, x)| x.iter().any(|v| !v.is_finite())) {
            Some((tensor, ..)) => Err(CheckpointError::NotFinite { tensor: tensor.clone(), step: self.meta.step }),
            None => Ok(()),
        }
    }
}

fn io_error(what: &'static str, path: &Path, source: io::Error) -> CheckpointError {
    let todo = match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space on that filesystem; checkpoints already complete are intact, resume with --resume".into()
        }
        io::ErrorKind::PermissionDenied => "make the folder writable".into(),
        _ => "checkpoints already complete are intact".to_owned(),
    };
    CheckpointError::Io { what, path: path.into(), source, todo }
}

/// Name of the folder of step `step`.
pub fn folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Writes `snapshot` under `root` and returns (folder, bytes).
///
/// # Errors
/// [`CheckpointError::NotFinite`] or [`CheckpointError::Io`]; the folder then does not exist and older ones are intact.
pub fn save(root: &Path, snapshot: &Snapshot) -> Result<(PathBuf, u64), CheckpointError> {
    snapshot.check_finite()?;
    fs::create_dir_all(root).map_err(|e| io_error("make", root, e))?;
    let done = root.join(folder_name(snapshot.meta.step));
    let aside = root.join(format!("{WRITING}{}", folder_name(snapshot.meta.step)));
    let written = write_aside(&aside, snapshot).and_then(|bytes| {
        // The same step saved twice (a stop right after a regular save): the later one stands.
        let replaced = root.join(format!("{REPLACED}{}", folder_name(snapshot.meta.step)));
        if done.exists() {
            fs::rename(&done, &replaced).map_err(|e| io_error("move aside", &done, e))?;
        }
        fs::rename(&aside, &done).map_err(|e| io_error("rename into place", &done, e))?;
        sync(root)?;
        if replaced.exists() {
            fs::remove_dir_all(&replaced).map_err(|e| io_error("remove", &replaced, e))?;
        }
        Ok(bytes)
    });
    if written.is_err() {
        // Best effort: the space may be what is missing.
        let _ = fs::remove_dir_all(&aside);
    }
    Ok((done, written?))
}

fn write_aside(aside: &Path, snapshot: &Snapshot) -> Result<u64, CheckpointError> {
    if aside.exists() {
        fs::remove_dir_all(aside).map_err(|e| io_error("remove the remains of", aside, e))?;
    }
    fs::create_dir_all(aside).map_err(|e| io_error("make", aside, e))?;
    let views: Vec<(String, TensorView<'_>)> = snapshot
        .tensors
        .iter()
        .map(|(name, shape, values)| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytemuck::cast_slice(values)).expect("shape and length agree");
            (name.clone(), view)
        })
        .collect();
    let state = aside.join(STATE_FILE);
    safetensors::serialize_to_file(views, None, &state).map_err(|e| match e {
        safetensors::SafeTensorError::IoError(e) => io_error("write", &state, e),
        other => io_error("write", &state, io::Error::other(other.to_string())),
    })?;
    let meta = aside.join(META_FILE);
    let text = serde_json::to_string_pretty(&snapshot.meta).expect("meta is writable");
    fs::write(&meta, text).map_err(|e| io_error("write", &meta, e))?;
    let config = aside.join(CONFIG_FILE);
    fs::write(&config, &snapshot.config).map_err(|e| io_error("write", &config, e))?;
    // Hashed as they lie there, so that a write that went wrong under way is not certified.
    let sums = aside.join(SUMS_FILE);
    Sums::write(aside, &[STATE_FILE, META_FILE, CONFIG_FILE]).map_err(|e| io_error("write", &sums, e))?;
    let mut bytes = 0;
    for file in [&state, &meta, &config, &sums] {
        sync(file)?;
        bytes += fs::metadata(file).map_err(|e| io_error("look at", file, e))?.len();
    }
    sync(aside)?;
    Ok(bytes)
}

fn sync(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|f| f.sync_all()).map_err(|e| io_error("sync", path, e))
}

/// Complete checkpoints under `root`, oldest first.
pub fn list(root: &Path) -> Vec<(u64, PathBuf)> {
    let mut found: Vec<(u64, PathBuf)> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| Some((e.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?, e.path())))
        .collect();
    found.sort();
    found
}

/// Makes `root` ready for a launch that starts after step `start`: remains of interrupted saves are removed, a replaced checkpoint whose successor never
/// came is put back, and checkpoints of later steps — of a run that this launch leaves — are moved aside as `superseded-…`, never deleted.
/// Returns where those are now.
///
/// # Errors
/// When a folder cannot be moved.
pub fn tidy_for_launch(root: &Path, start: u64) -> Result<Vec<PathBuf>, CheckpointError> {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
        if name.starts_with(WRITING) {
            fs::remove_dir_all(&path).map_err(|e| io_error("remove the remains of", &path, e))?;
        } else if let Some(own) = name.strip_prefix(REPLACED) {
            let place = root.join(own);
            if place.exists() {
                fs::remove_dir_all(&path).map_err(|e| io_error("remove", &path, e))?;
            } else {
                fs::rename(&path, &place).map_err(|e| io_error("put back", &path, e))?;
            }
        }
    }
    let mut moved = Vec::new();
    for (step, path) in list(root).into_iter().filter(|(step, _)| *step > start) {
        let free = (1..).map(|n| root.join(format!("superseded-{n}-{}", folder_name(step)))).find(|p| !p.exists());
        let to = free.expect("some number is free");
        fs::rename(&path, &to).map_err(|e| io_error("move aside", &path, e))?;
        moved.push(to);
    }
    Ok(moved)
}

/// Removes all but the newest `keep_last` checkpoints, sparing `best`.
///
/// # Errors
/// When a folder cannot be removed.
pub fn prune(root: &Path, keep_last: usize, best: Option<u64>) -> Result<(), CheckpointError> {
    let all = list(root);
    let old = all.len().saturating_sub(keep_last);
    for (step, path) in &all[..old] {
        if Some(*step) != best {
            fs::remove_dir_all(path).map_err(|e| io_error("remove", path, e))?;
        }
    }
    Ok(())
}

/// A checkpoint read back.
pub struct Loaded {
    /// Where from.
    pub path: PathBuf,
    /// Scalars.
    pub meta: Meta,
    /// Whether its files were compared with their checksums. Checkpoints of builds before [`SUMS_FILE`] have none.
    pub proven: bool,
    bytes: Vec<u8>,
}

impl Loaded {
    /// Reads the checkpoint folder `path`, and holds each file to its checksum before anything of it is used.
    ///
    /// # Errors
    /// [`CheckpointError::Corrupt`], [`CheckpointError::Damaged`] or [`CheckpointError::Io`].
    pub fn open(path: &Path) -> Result<Loaded, CheckpointError> {
        let corrupt = |file: PathBuf, what: String| CheckpointError::Corrupt { path: file, what, todo: instead_of(path) };
        let sums = Sums::read(path).map_err(|e| match e.kind() {
            io::ErrorKind::InvalidData => corrupt(path.join(SUMS_FILE), e.to_string()),
            _ => io_error("read", &path.join(SUMS_FILE), e),
        })?;
        let read = |name: &str| {
            let file = path.join(name);
            let bytes = fs::read(&file).map_err(|e| io_error("read", &file, e))?;
            match sums.as_ref().and_then(|sums| sums.fault(name, &bytes)) {
                Some(what) => Err(corrupt(file, what)),
                None => Ok(bytes),
            }
        };
        let meta = Meta::parse(path, &read(META_FILE)?)?;
        read(CONFIG_FILE)?;
        let bytes = read(STATE_FILE)?;
        let damaged = |what: String| CheckpointError::Damaged { path: path.into(), what };
        SafeTensors::deserialize(&bytes).map_err(|e| damaged(format!("{STATE_FILE}: {e}")))?;
        Ok(Loaded { path: path.into(), meta, proven: sums.is_some(), bytes })
    }

    /// The line to show when the checkpoint is not proven.
    pub fn notice(&self) -> Option<String> {
        let folder = self.path.display();
        (!self.proven)
            .then(|| format!("{folder} has no {SUMS_FILE} (an older build wrote it): a damaged file would not be noticed"))
    }

    /// One tensor.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] when it is missing or has another type or length.
    pub fn tensor(&self, name: &str, len: usize) -> Result<Vec<f32>, CheckpointError> {
        let damaged = |what: String| CheckpointError::Damaged { path: self.path.clone(), what };
        let file = SafeTensors::deserialize(&self.bytes).map_err(|e| damaged(e.to_string()))?;
        let view = file.tensor(name).map_err(|e| damaged(format!("tensor `{name}`: {e}")))?;
        if view.dtype() != Dtype::F32 || view.data().len() != 4 * len {
            return Err(damaged(format!("tensor `{name}` is {:?} {:?}, wanted {len} elements F32", view.dtype(), view.shape())));
        }
        Ok(view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

/// What to do about the damaged checkpoint at `path`, which works for the variants of a sweep too.
fn instead_of(path: &Path) -> String {
    let here = path.file_name().unwrap_or_default();
    let older =
        list(path.parent().unwrap_or(Path::new("."))).into_iter().rfind(|(_, p)| p.file_name().unwrap_or_default() < here);
    match older {
        Some((_, older)) => format!("move that folder away; `--resume auto` then goes on from {}", older.display()),
        None => "no older checkpoint stands next to it: restore the file from a copy, or start a new run".to_owned(),
    }
}

impl Meta {
    fn parse(path: &Path, bytes: &[u8]) -> Result<Meta, CheckpointError> {
        let damaged = |what: String| CheckpointError::Damaged { path: path.into(), what };
        let meta: Meta = serde_json::from_slice(bytes).map_err(|e| damaged(format!("{META_FILE}: {e}")))?;
        if meta.version != VERSION {
            return Err(damaged(format!("its layout is version {}, this build reads {VERSION}", meta.version)));
        }
        Ok(meta)
    }

    /// Refuses the checkpoint at `path`, whose scalars these are, when it belongs to another run than `wanted` describes.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`], naming what differs.
    pub fn check(&self, path: &Path, wanted: &Meta) -> Result<(), CheckpointError> {
        let mismatch = |what: String, todo: &str| Err(CheckpointError::Mismatch { path: path.into(), what, todo: todo.into() });
        if self.dataset != wanted.dataset {
            return mismatch(
                format!("it was trained on dataset {:.12}…, the config names {:.12}…", self.dataset, wanted.dataset),
                "name the dataset of the run, or start a new run with drafter.init_from = an export of this one",
            );
        }
        let all_that_is_recorded = if self.target.contains('+') { wanted.target.as_str() } else { before_plus(&wanted.target) };
        if self.target != all_that_is_recorded {
            return mismatch(
                "it was trained against another target (config.json, the sizes of its weight files or the weights differ)".into(),
                "name the target of the run, or start a new run with drafter.init_from = an export of this one",
            );
        }
        if self.drafter != wanted.drafter {
            return mismatch("its drafter has another shape".into(), "compare its config.toml with yours");
        }
        if (self.global_batch, self.seed) != (wanted.global_batch, wanted.seed) {
            return mismatch(
                format!(
                    "it has global_batch {} and seed {}, the config {} and {}",
                    self.global_batch, self.seed, wanted.global_batch, wanted.seed
                ),
                "both decide which batch comes next: use the checkpoint's",
            );
        }
        let nothing = serde_json::Value::Null;
        let differs = self.batches.keys().chain(wanted.batches.keys()).find(|k| self.batches.get(*k) != wanted.batches.get(*k));
        if let Some(key) = differs {
            let (mine, theirs) = (self.batches.get(key).unwrap_or(&nothing), wanted.batches.get(key).unwrap_or(&nothing));
            return mismatch(
                format!("it has {key} = {mine}, the config {theirs}"),
                "this key decides which batch comes next: use the checkpoint's",
            );
        }
        if self.total_steps != wanted.total_steps {
            return mismatch(
                format!("its learning rate follows {} steps in all, the config's {}", self.total_steps, wanted.total_steps),
                "set optimizer.steps to the checkpoint's number, or start a new run with drafter.init_from",
            );
        }
        Ok(())
    }
}

fn before_plus(text: &str) -> &str {
    text.split_once('+').map_or(text, |(before, _)| before)
}

/// The newest complete checkpoint for `--resume PATH`: PATH is a checkpoint, a folder of them, or a run folder.
pub fn newest(path: &Path) -> Option<PathBuf> {
    if path.join(META_FILE).is_file() {
        return Some(path.into());
    }
    [path.to_path_buf(), path.join("checkpoints")].iter().find_map(|p| list(p).pop()).map(|(_, p)| p)
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    fn snapshot(step: u64, value: f32) -> Snapshot {
        let meta = Meta {
            version: VERSION,
            step,
            total_steps: 10,
            adam_t: step,
            skipped: 0,
            skipped_in_row: 0,
            global_batch: 1,
            drafters: 1,
            dataset: "d".into(),
            seed: 3,
            drafter: serde_json::json!({"layers": 1}),
            batches: BTreeMap::from([("batch.token_budget".to_owned(), 512.into())]),
            target: "t+w".into(),
            build_id: "b".into(),
            command_line: vec![],
            held_out_loss: None,
            best: None,
        };
        Snapshot { meta, tensors: vec![("w".into(), vec![2, 3], vec![value; 6])], config: "seed = 3\n".into() }
    }

    #[test]
    fn what_is_saved_is_loaded_bit_for_bit() {
        let dir = tempfile::tempdir().unwrap();
        let (path, bytes) = save(dir.path(), &snapshot(4, 0.1)).unwrap();
        assert!(bytes > 24);
        let loaded = Loaded::open(&path).unwrap();
        assert_eq!(loaded.meta, snapshot(4, 0.1).meta);
        assert_eq!(loaded.tensor("w", 6).unwrap(), [0.1; 6]);
        assert!(loaded.tensor("w", 5).is_err() && loaded.tensor("v", 6).is_err());
    }

    #[test]
    fn a_half_written_folder_is_not_a_checkpoint_and_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join(".writing-step-00000004")).unwrap();
        fs::write(dir.path().join(".writing-step-00000004/state.safetensors"), b"half").unwrap();
        assert!(newest(dir.path()).is_none());
        save(dir.path(), &snapshot(4, 1.0)).unwrap();
        assert_eq!(list(dir.path()).len(), 1);
        assert!(!dir.path().join(".writing-step-00000004").exists());
    }

    #[test]
    fn a_launch_from_an_earlier_step_keeps_the_later_ones_aside_and_its_own_saves_count() {
        let dir = tempfile::tempdir().unwrap();
        for step in [2, 4, 6] {
            save(dir.path(), &snapshot(step, 1.0)).unwrap();
        }
        fs::create_dir_all(dir.path().join(".writing-step-00000007")).unwrap();
        fs::rename(dir.path().join(folder_name(2)), dir.path().join(".replaced-step-00000002")).unwrap();
        let moved = tidy_for_launch(dir.path(), 3).unwrap();
        assert_eq!(moved.len(), 2);
        assert!(moved.iter().all(|p| Loaded::open(p).is_ok()), "superseded checkpoints stay whole");
        assert_eq!(list(dir.path()).iter().map(|(s, _)| *s).collect::<Vec<_>>(), [2]);
        assert!(!dir.path().join(".writing-step-00000007").exists());
        let (path, _) = save(dir.path(), &snapshot(4, 2.0)).unwrap();
        save(dir.path(), &snapshot(4, 3.0)).unwrap();
        assert_eq!(Loaded::open(&path).unwrap().tensor("w", 6).unwrap(), [3.0; 6], "the later save of a step stands");
        assert_eq!(newest(dir.path()), Some(path));
        assert_eq!(tidy_for_launch(dir.path(), 3).unwrap().len(), 1, "a second name is found");
    }

    #[test]
    fn a_loss_that_is_not_finite_leaves_the_scalars_readable() {
        let dir = tempfile::tempdir().unwrap();
        let mut odd = snapshot(1, 1.0);
        odd.meta.held_out_loss = Some(f64::NAN);
        let (path, _) = save(dir.path(), &odd).unwrap();
        assert_eq!(Loaded::open(&path).unwrap().meta.held_out_loss, None);
    }

    #[test]
    fn pruning_keeps_the_newest_and_the_best() {
        let dir = tempfile::tempdir().unwrap();
        for step in 1..=5 {
            save(dir.path(), &snapshot(step, 1.0)).unwrap();
        }
        prune(dir.path(), 2, Some(1)).unwrap();
        assert_eq!(list(dir.path()).iter().map(|(s, _)| *s).collect::<Vec<_>>(), [1, 4, 5]);
        assert!(newest(dir.path()).unwrap().ends_with("step-00000005"));
    }

    #[test]
    fn refuses_nan_and_other_runs() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(save(dir.path(), &snapshot(1, f32::NAN)), Err(CheckpointError::NotFinite { .. })));
        assert!(list(dir.path()).is_empty());
        let (path, _) = save(dir.path(), &snapshot(1, 1.0)).unwrap();
        let loaded = Loaded::open(&path).unwrap();
        for change in [
            |m: &mut Meta| m.dataset = "other".into(),
            |m: &mut Meta| m.global_batch = 2,
            |m: &mut Meta| m.seed = 4,
            |m: &mut Meta| m.total_steps = 11,
            |m: &mut Meta| m.drafter = serde_json::json!({}),
            |m: &mut Meta| m.target = "other".into(),
            |m: &mut Meta| m.target = "t+other".into(),
            |m: &mut Meta| drop(m.batches.insert("batch.token_budget".to_owned(), 1024.into())),
            |m: &mut Meta| drop(m.batches.insert("drafter.gamma".to_owned(), 5.into())),
        ] {
            let mut wanted = loaded.meta.clone();
            change(&mut wanted);
            assert!(matches!(loaded.meta.check(&path, &wanted), Err(CheckpointError::Mismatch { .. })));
        }
        let mut other_d = loaded.meta.clone();
        other_d.drafters = 2;
        loaded.meta.check(&path, &other_d).unwrap();
        let older = Meta { target: "t".into(), ..loaded.meta.clone() };
        older.check(&path, &loaded.meta).unwrap();
    }

    #[test]
    fn a_flipped_bit_of_any_file_is_refused_by_name_and_the_checkpoint_before_it_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (older, _) = save(dir.path(), &snapshot(2, 1.0)).unwrap();
        let (path, _) = save(dir.path(), &snapshot(4, 1.0)).unwrap();
        for name in [STATE_FILE, META_FILE, CONFIG_FILE, SUMS_FILE] {
            let file = path.join(name);
            let good = fs::read(&file).unwrap();
            for at in [0, good.len() / 2, good.len() - 1] {
                let mut bad = good.clone();
                bad[at] ^= 1;
                fs::write(&file, &bad).unwrap();
                let Err(error) = Loaded::open(&path) else { panic!("{name} byte {at} was accepted") };
                let text = error.to_string();
                assert!(
                    matches!(error, CheckpointError::Corrupt { .. }) && text.lines().count() == 2,
                    "{name} byte {at}: {text}"
                );
                // A flipped bit of the list accuses the file that it lists there.
                assert!(name == SUMS_FILE || text.contains(&file.display().to_string()), "{text}");
                assert!(text.contains(&older.display().to_string()), "{text}");
            }
            fs::write(&file, &good).unwrap();
        }
        let loaded = Loaded::open(&path).unwrap();
        assert!(loaded.proven && loaded.notice().is_none());
        fs::write(older.join(STATE_FILE), b"torn").unwrap();
        let text = Loaded::open(&older).err().unwrap().to_string();
        assert!(text.contains("no older checkpoint"), "{text}");
    }

    #[test]
    fn a_checkpoint_of_an_older_build_is_read_with_a_line_and_its_damage_still_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (path, _) = save(dir.path(), &snapshot(4, 1.0)).unwrap();
        fs::remove_file(path.join(SUMS_FILE)).unwrap();
        let loaded = Loaded::open(&path).unwrap();
        assert!(!loaded.proven && loaded.notice().unwrap().contains(SUMS_FILE));
        fs::write(path.join(STATE_FILE), b"torn").unwrap();
        assert!(matches!(Loaded::open(&path), Err(CheckpointError::Damaged { .. })));
    }
}
