//! What a config needs at a destination: program, config, target, data, each with its place there.
//!
//! Job: rewrite a config for the far end, list the files it needs with their hashes. Refuses to send what the destination says is there already. Invariants: a
//! folder at the far end is named by the hash of what is in it, so that a changed dataset never mixes with an old one; the rewritten config
//! reads the same there as here, so that its hash can be compared.

use crate::exit::{Exit, Failure};
use crate::launch::config_hash;
use crate::target_folder::resolve;
use drafthorse_data::sha256_hex;
use drafthorse_remote::destination::Destination;
use drafthorse_remote::files::{HashCache, walk};
use drafthorse_remote::transfer::Item;
use drafthorse_train::config::RunConfig;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What lies beside a deployed config.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deployed {
    /// Run name.
    pub name: String,
    /// Build id of the program.
    pub build_id: String,
    /// SHA-256 of the program.
    pub program_sha256: String,
    /// Hash of the config, as runs report it.
    pub config_hash: String,
    /// Unix time in milliseconds, by the far end's clock.
    pub deployed_t: u64,
}

/// A config and its files, ready to go.
pub struct Deployment {
    /// Run name.
    pub name: String,
    /// The config as it reads at the far end.
    pub config: RunConfig,
    /// Files of target, data and initial drafter.
    pub files: Vec<Item>,
    /// What is there already and is not sent: name here, place there.
    pub referenced: Vec<(String, String)>,
}

impl Deployment {
    /// Plans for `path` with `overrides`. `progress` is told each file that is hashed.
    ///
    /// # Errors
    /// When the config is wrong or a file cannot be read.
    pub fn plan(path: &Path, overrides: &[String], to: &Destination, cache: &mut HashCache) -> Result<Deployment, Failure> {
        if let Some(flag) = overrides.iter().find(|o| !o.contains('=')) {
            return Err(Failure::new(
                Exit::Usage,
                format!("`{flag}` is no override"),
                "write section.key=value, e.g. drafter.layers=5",
            ));
        }
        let mut config = RunConfig::load(path, overrides)?;
        let name = run_name(&config, path);
        let mut files = Vec::new();
        let mut referenced = Vec::new();
        let mut place = |what: &str, here: &Path, known: bool| -> Result<PathBuf, Failure> {
            let text = here.display().to_string();
            if let Some(there) = to.paths.get(&text) {
                referenced.push((text, there.clone()));
                return Ok(there.into());
            }
            let local = if known { resolve(here)? } else { here.to_owned() };
            let there = folder_there(what, &local, to, cache, &mut files)?;
            Ok(there.into())
        };
        config.target = place("target", &config.target, true)?;
        config.data = place("data", &config.data, false)?;
        if let Some(folder) = config.drafter.init_from.clone() {
            config.drafter.init_from = Some(place("drafter", &folder, false)?);
        }
        cache.save();
        config.out = format!("{}/runs", to.folder).into();
        config.name = Some(name.clone());
        // What is written must read back as itself, or the far end would report another hash.
        let config = RunConfig::parse(&config.to_toml(), "the config for the destination", &[])?;
        Ok(Deployment { name, config, files, referenced })
    }

    /// Hash that a run of this config reports.
    pub fn config_hash(&self) -> String {
        config_hash(&self.config)
    }
}

/// Name of the run that a config makes: its own, or the file's.
pub fn run_name(config: &RunConfig, path: &Path) -> String {
    let stem = || path.file_stem().map_or_else(|| "run".into(), |s| s.to_string_lossy().into_owned());
    config.name.clone().unwrap_or_else(stem)
}

/// Where the config called `name` lies at the far end.
pub fn config_there(to: &Destination, name: &str) -> String {
    format!("{}/configs/{name}.toml", to.folder)
}

/// Where the record of what was deployed for `name` lies.
pub fn record_there(to: &Destination, name: &str) -> String {
    format!("{}/configs/{name}.json", to.folder)
}

/// Where a program with this hash lies.
pub fn program_there(to: &Destination, sha256: &str) -> String {
    format!("{}/builds/{sha256:.16}/drafthorse", to.folder)
}

/// Lists the files of `local`; gives the folder for them at the far end.
fn folder_there(
    what: &str,
    local: &Path,
    to: &Destination,
    cache: &mut HashCache,
    files: &mut Vec<Item>,
) -> Result<String, Failure> {
    if !local.is_dir() {
        let what = format!("{what}: there is no folder {}", local.display());
        return Err(Failure::new(
            Exit::BadInput,
            what,
            "check the path, or map it under `paths` of the destination if it lies there",
        ));
    }
    let mut listed = Vec::new();
    for file in walk(local)? {
        let (size_bytes, sha256) = cache.hash(&local.join(&file))?;
        listed.push((file, size_bytes, sha256));
    }
    let manifest: String = listed.iter().map(|(file, _, sha256)| format!("{sha256} {}\n", file.display())).collect();
    let base = local.canonicalize().ok().and_then(|p| p.file_name().map(|n| n.to_string_lossy().into_owned()));
    let base = base.unwrap_or_else(|| what.to_owned());
    let there = format!("{}/files/{base}-{:.12}", to.folder, sha256_hex(manifest.as_bytes()));
    files.extend(listed.into_iter().map(|(file, size_bytes, sha256)| Item {
        what: format!("{what}: {}", file.display()),
        local: local.join(&file),
        size_bytes,
        sha256,
        to: format!("{there}/{}", file.display()),
        executable: false,
    }));
    Ok(there)
}

/// Where hashes of large files are remembered.
pub fn hash_cache() -> HashCache {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let folder = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|h| h.join(".cache")));
    HashCache::open(folder.map(|f| f.join("drafthorse/hashes.json")))
}
