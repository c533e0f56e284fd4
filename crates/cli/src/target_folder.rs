//! From what a user calls a target to its folder on this machine.
//!
//! Job: a path stays a path; a hub name is looked for in the local Hugging Face cache. Refuses to download. Invariant: what is returned is a folder
//! that exists.

use crate::exit::{Exit, Failure};
use std::path::{Path, PathBuf};

/// The folder of `name`.
///
/// # Errors
/// When there is neither such a folder nor such a snapshot in the cache.
pub fn resolve(name: &Path) -> Result<PathBuf, Failure> {
    if name.is_dir() {
        return Ok(name.to_owned());
    }
    let text = name.to_string_lossy();
    let hub_name = !name.is_absolute() && text.split('/').count() == 2 && !text.starts_with('.');
    if !hub_name {
        let todo = "name a folder that holds a Hugging Face model, or a hub name that is in the local cache";
        return Err(Failure::new(Exit::BadInput, format!("there is no folder {text}"), todo));
    }
    let cache = cache_folder();
    snapshot(&cache, &text).ok_or_else(|| {
        let what = format!("there is no folder {text}, and no snapshot of it in {}", cache.display());
        Failure::new(Exit::BadInput, what, format!("download it first (`hf download {text}`), or name its folder"))
    })
}

/// Where the Hugging Face libraries keep what they download.
fn cache_folder() -> PathBuf {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    var("HF_HUB_CACHE")
        .or_else(|| var("HF_HOME").map(|h| h.join("hub")))
        .or_else(|| var("XDG_CACHE_HOME").map(|c| c.join("huggingface/hub")))
        .unwrap_or_else(|| var("HOME").unwrap_or_else(|| "/".into()).join(".cache/huggingface/hub"))
}

/// The snapshot that `refs/main` names.
fn snapshot(cache: &Path, name: &str) -> Option<PathBuf> {
    let folder = cache.join(format!("models--{}", name.replace('/', "--")));
    let revision = std::fs::read_to_string(folder.join("refs/main")).ok()?;
    Some(folder.join("snapshots").join(revision.trim())).filter(|f| f.join("config.json").exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hub_name_is_found_in_the_cache() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("models--org--tiny");
        std::fs::create_dir_all(folder.join("refs")).unwrap();
        std::fs::create_dir_all(folder.join("snapshots/abc")).unwrap();
        std::fs::write(folder.join("refs/main"), "abc\n").unwrap();
        assert_eq!(snapshot(dir.path(), "org/tiny"), None, "a snapshot without config.json is not complete");
        std::fs::write(folder.join("snapshots/abc/config.json"), "{}").unwrap();
        assert_eq!(snapshot(dir.path(), "org/tiny"), Some(folder.join("snapshots/abc")));
        assert_eq!(snapshot(dir.path(), "org/other"), None);
    }

    #[test]
    fn a_missing_path_is_named() {
        let text = resolve(Path::new("/no/such/place")).unwrap_err().lines().unwrap();
        assert!(text.contains("/no/such/place") && text.lines().count() == 2, "{text}");
    }
}
