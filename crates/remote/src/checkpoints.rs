//! The checkpoint that a launch took over, kept so that it can be put back.
//!
//! Job: hard links to the newest checkpoint of every variant, made before a new build goes on from it, and the way back. Refuses to delete: checkpoints that
//! came later are moved aside. Invariant: checkpoint files are written once and renamed into place, so that a link to one stays what it was.

use crate::error::RemoteError;
use crate::launches::LaunchDir;
use std::path::{Path, PathBuf};

const KEPT: &str = "before";
const ASIDE: &str = "rolled-back";

/// `checkpoints` folders of a run, relative: its own, or one per variant of a sweep.
fn folders(run_dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    if run_dir.join("checkpoints").is_dir() {
        found.push(PathBuf::from("checkpoints"));
    }
    let inner = std::fs::read_dir(run_dir).into_iter().flatten().flatten().map(|e| e.path().join("checkpoints"));
    found.extend(inner.filter(|p| p.is_dir()).filter_map(|p| p.strip_prefix(run_dir).ok().map(Path::to_owned)));
    found.sort();
    found
}

/// Steps of the complete checkpoints in a folder, ascending.
fn steps(folder: &Path) -> Vec<u64> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let complete = entries.filter(|p| p.join("meta.json").is_file());
    let mut steps: Vec<u64> = complete.filter_map(|p| p.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// The newest step that all variants have.
fn common(run_dir: &Path) -> Option<u64> {
    let lists: Vec<Vec<u64>> = folders(run_dir).iter().map(|f| steps(&run_dir.join(f))).collect();
    lists.first()?.iter().rev().copied().find(|s| lists.iter().all(|l| l.contains(s)))
}

fn step_folder(folder: &Path, step: u64) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    entries.into_iter().find(|p| p.file_name().and_then(|n| n.to_str()?.strip_prefix("step-")?.parse::<u64>().ok()) == Some(step))
}

fn link(from: &Path, to: &Path) -> Result<(), RemoteError> {
    std::fs::create_dir_all(to).map_err(RemoteError::io("make", to))?;
    for entry in std::fs::read_dir(from).map_err(RemoteError::io("read", from))? {
        let path = entry.map_err(RemoteError::io("read", from))?.path();
        let target = to.join(path.file_name().expect("it was listed"));
        if path.is_dir() {
            link(&path, &target)?;
        } else {
            std::fs::hard_link(&path, &target).map_err(RemoteError::io("link", &target))?;
        }
    }
    Ok(())
}

/// Keeps the newest checkpoint of the run for the launch in `dir`. Gives its step, if there is one.
///
/// # Errors
/// When the file system has no hard links or no room.
pub fn keep_checkpoints(run_dir: &Path, dir: &LaunchDir) -> Result<Option<u64>, RemoteError> {
    let Some(step) = common(run_dir) else { return Ok(None) };
    for folder in folders(run_dir) {
        let Some(from) = step_folder(&run_dir.join(&folder), step) else { continue };
        link(&from, &dir.path().join(KEPT).join(&folder).join(from.file_name().expect("it was listed")))?;
    }
    Ok(Some(step))
}

/// Puts the kept checkpoint back and moves later ones aside. Gives its step.
///
/// # Errors
/// When files cannot be linked or moved.
pub fn put_checkpoints_back(dir: &LaunchDir, say: &mut dyn FnMut(String)) -> Result<Option<u64>, RemoteError> {
    let run_dir = dir.run_dir()?;
    let kept = dir.path().join(KEPT);
    let Some(step) = common(&kept) else { return Ok(None) };
    for folder in folders(&kept) {
        let here = run_dir.join(&folder);
        for later in steps(&here).into_iter().filter(|s| *s > step) {
            let Some(from) = step_folder(&here, later) else { continue };
            let aside = run_dir.join(ASIDE).join(dir.path().file_name().unwrap_or_default()).join(&folder);
            std::fs::create_dir_all(&aside).map_err(RemoteError::io("make", &aside))?;
            let to = aside.join(from.file_name().expect("it was listed"));
            std::fs::rename(&from, &to).map_err(RemoteError::io("move", &from))?;
            say(format!("the checkpoint after step {later} was moved to {}", to.display()));
        }
        let Some(from) = step_folder(&kept.join(&folder), step) else { continue };
        let to = here.join(from.file_name().expect("it was listed"));
        if !to.join("meta.json").is_file() {
            link(&from, &to)?;
        }
    }
    Ok(Some(step))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(run: &Path, folder: &str, step: u64) {
        let dir = run.join(folder).join(format!("step-{step:08}"));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("meta.json"), step.to_string()).unwrap();
    }

    #[test]
    fn what_was_kept_comes_back_though_it_was_pruned() {
        for folders in [&["checkpoints"][..], &["a/checkpoints", "b/checkpoints"]] {
            let runs = tempfile::tempdir().unwrap();
            let run = runs.path().join("r");
            let dir = LaunchDir::new(runs.path().join(".launches/l"));
            std::fs::create_dir_all(dir.path()).unwrap();
            std::fs::write(dir.path().join("launch.json"), record("r")).unwrap();
            folders.iter().for_each(|f| [3, 7].iter().for_each(|s| checkpoint(&run, f, *s)));
            // Variant a alone is further: the common step counts.
            checkpoint(&run, folders[0], if folders.len() > 1 { 8 } else { 7 });
            assert_eq!(keep_checkpoints(&run, &dir).unwrap(), Some(7));
            for f in folders {
                std::fs::remove_dir_all(run.join(f).join("step-00000007")).unwrap();
                checkpoint(&run, f, 9);
            }
            let mut said = Vec::new();
            assert_eq!(put_checkpoints_back(&dir, &mut |s| said.push(s)).unwrap(), Some(7));
            for f in folders {
                assert_eq!(steps(&run.join(f)), [3, 7], "{f}: {said:?}");
                assert_eq!(std::fs::read_to_string(run.join(f).join("step-00000007/meta.json")).unwrap(), "7");
            }
            assert!(said[0].contains(ASIDE), "{said:?}");
        }
    }

    fn record(name: &str) -> String {
        serde_json::json!({
            "id": "l", "name": name, "program": "p", "program_sha256": "", "build_id": "", "config": "c", "args": [], "resume": true,
            "created_t": 0, "restarts": 0, "backoff_ms": 0, "previous": null, "fall_back": false, "gpu_used_before": []
        })
        .to_string()
    }
}
