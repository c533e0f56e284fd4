//! Destinations: where runs may live, by name, in one TOML file.
//!
//! Refuses unknown keys and names (naming the nearest), and to look for machines that are not named. Invariant: a destination says everything that is
//! needed to reach it; nothing comes from the environment of whoever calls.

use crate::chain::{Chain, Hop};
use crate::error::RemoteError;
use crate::far::Far;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the file in the working folder.
pub const DESTINATIONS_FILE: &str = "destinations.toml";

/// One destination.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Destination {
    /// Hops, outermost first: `"ssh root@host"`, `"pct exec 200 --"`, or as a list of words.
    #[serde(default)]
    pub hops: Chain,
    /// Folder at the far end that holds builds, configs, data and runs. Absolute, or relative to where the last hop starts programs.
    pub folder: String,
    /// Environment of every program there.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// GPUs that runs may use there; all when absent.
    #[serde(default)]
    pub gpus: Option<Vec<u32>>,
    /// Files that are there already: path as the config names it → path there. Nothing is sent for them.
    #[serde(default)]
    pub paths: BTreeMap<String, String>,
    /// What starts the program there, when it is not the deployed file.
    #[serde(default)]
    pub program: Option<String>,
}

impl Destination {
    /// A destination from the command line.
    ///
    /// # Errors
    /// What is wrong with a hop.
    pub fn from_hops(hops: &[String], folder: &str) -> Result<Destination, String> {
        let hops = hops.iter().map(|h| Hop::parse(h)).collect::<Result<_, _>>()?;
        Ok(Destination { hops: Chain::new(hops), folder: folder.to_owned(), ..Destination::default() })
    }

    /// The far end.
    pub fn far(&self) -> Far {
        let mut env = self.env.clone();
        if let Some(gpus) = &self.gpus {
            let list: Vec<String> = gpus.iter().map(u32::to_string).collect();
            env.insert("CUDA_VISIBLE_DEVICES".into(), list.join(","));
        }
        Far::new(self.hops.clone(), env)
    }

    /// What is run there.
    pub fn program(&self) -> String {
        self.program.clone().unwrap_or_else(|| format!("{}/drafthorse", self.folder))
    }
}

/// Reads all destinations of a file.
///
/// # Errors
/// When the file cannot be read, or has unknown keys or impossible values.
pub fn read_destinations(path: &Path) -> Result<BTreeMap<String, Destination>, RemoteError> {
    let text = std::fs::read_to_string(path).map_err(RemoteError::io("read", path))?;
    parse_destinations(&text, path)
}

fn parse_destinations(text: &str, path: &Path) -> Result<BTreeMap<String, Destination>, RemoteError> {
    let wrong = |what: String, todo: String| RemoteError::Destinations { path: path.into(), what, todo };
    let all: BTreeMap<String, Destination> = toml::from_str(text).map_err(|e| {
        let line = e.span().map(|s| text[..s.start].matches('\n').count() + 1);
        let at = line.map_or_else(String::new, |l| format!("line {l}: "));
        wrong(format!("{at}{}", e.message()), "a destination has hops, folder, env, gpus, paths and program".into())
    })?;
    for (name, d) in &all {
        if d.folder.trim().is_empty() || d.folder == "/" {
            let todo = "name a folder of its own, e.g. /root/drafthorse".to_owned();
            return Err(wrong(format!("[{name}] folder = {:?} is no place for runs", d.folder), todo));
        }
        let variable = |k: &str| {
            !k.is_empty()
                && !k.starts_with(|c: char| c.is_ascii_digit())
                && k.chars().all(|c| c == '_' || c.is_ascii_alphanumeric())
        };
        if let Some(key) = d.env.keys().find(|k| !variable(k)) {
            return Err(wrong(format!("[{name}] env: `{key}` is no name of a variable"), "use letters, digits and _".into()));
        }
    }
    Ok(all)
}

/// The destination called `name`.
///
/// # Errors
/// When there is none, naming those that there are.
pub fn find<'a>(all: &'a BTreeMap<String, Destination>, name: &str, path: &Path) -> Result<&'a Destination, RemoteError> {
    all.get(name).ok_or_else(|| {
        let known: Vec<&str> = all.keys().map(String::as_str).collect();
        let near = known.iter().max_by(|a, b| strsim::jaro_winkler(a, name).total_cmp(&strsim::jaro_winkler(b, name)));
        let near = near.map_or_else(String::new, |n| format!("; did you mean `{n}`?"));
        let todo = match known.is_empty() {
            true => "the file has no destinations: add one".to_owned(),
            false => format!("known there: {}", known.join(", ")),
        };
        RemoteError::Destinations { path: path.into(), what: format!("there is no destination `{name}`{near}"), todo }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "[lab]\nhops = [\"ssh root@host\", [\"docker\", \"exec\", \"-i\", \"my box\"]]\nfolder = \"/root/dh\"\ngpus = [1, 3]\n\
        env = { HF_HOME = \"/data/a b\" }\npaths = { \"Qwen/Qwen3-8B\" = \"/models/Qwen3-8B\" }\n[here]\nfolder = \"/tmp/dh\"\n";

    #[test]
    fn a_file_is_read() {
        let all = parse_destinations(FILE, Path::new("d.toml")).unwrap();
        let lab = find(&all, "lab", Path::new("d.toml")).unwrap();
        assert_eq!(lab.hops.to_string(), "ssh root@host > docker exec -i 'my box'");
        assert_eq!(lab.program(), "/root/dh/drafthorse");
        assert!(all["here"].hops.hops().is_empty());
    }

    #[test]
    fn faults_are_named() {
        for (text, word) in [
            ("[lab]\nfolder = \"/x\"\nhop = []\n", "unknown field `hop`"),
            ("[lab]\nhops = [\"ssh 'x\"]\nfolder = \"/x\"\n", "open quote"),
            ("[lab]\nfolder = \"/\"\n", "no place for runs"),
            ("[lab]\nfolder = \"/x\"\nenv = { \"A B\" = \"1\" }\n", "no name of a variable"),
        ] {
            let told = parse_destinations(text, Path::new("d.toml")).unwrap_err().to_string();
            assert!(told.contains(word) && told.lines().count() == 2, "{told}");
        }
        let all = parse_destinations(FILE, Path::new("d.toml")).unwrap();
        let told = find(&all, "lba", Path::new("d.toml")).unwrap_err().to_string();
        assert!(told.contains("did you mean `lab`") && told.contains("known there: here, lab"), "{told}");
    }
}
