//! `drafthorse runs diff`: what differed between two runs.
//!
//! Refuses to say what a difference means. Invariant: two runs without a line have the same config, build, dataset and results so far.

use super::watch::run_folder;
use crate::exit::{Exit, Failure};
use crate::launch::CONFIG_FILE;
use crate::screen::Screen;
use clap::{Args, Subcommand};
use drafthorse_telemetry::read_status;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Compare runs
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse runs diff first second
  drafthorse runs diff runs/first /elsewhere/second --json")]
pub struct Runs {
    #[command(subcommand)]
    what: What,
}

/// What to do with runs.
#[derive(Debug, Subcommand)]
enum What {
    /// Show what differed: config keys, build, dataset, results
    Diff {
        /// One run: name or folder
        a: String,
        /// The other
        b: String,
        /// Folder of runs
        #[arg(long, value_name = "DIR", default_value = "runs")]
        runs: PathBuf,
    },
}

#[derive(Serialize)]
struct Difference {
    key: String,
    a: Option<String>,
    b: Option<String>,
}

/// Runs the command.
pub fn run(args: &Runs, screen: Screen) -> Result<Exit, Failure> {
    let What::Diff { a, b, runs } = &args.what;
    let (facts_a, facts_b) = (facts(&run_folder(a, runs)?)?, facts(&run_folder(b, runs)?)?);
    let keys: BTreeSet<&String> = facts_a.keys().chain(facts_b.keys()).collect();
    let differences: Vec<Difference> = keys
        .into_iter()
        .map(|key| Difference { key: key.clone(), a: facts_a.get(key).cloned(), b: facts_b.get(key).cloned() })
        .filter(|d| d.a != d.b)
        .collect();
    screen.json(&differences)?;
    if differences.is_empty() {
        screen.say("nothing differs")?;
    }
    let shown = |v: &Option<String>| v.clone().unwrap_or_else(|| "-".into());
    let width = differences.iter().map(|d| d.key.len()).max().unwrap_or(0);
    for d in &differences {
        screen.say(format!("{:<width$}  {}  →  {}", d.key, shown(&d.a), shown(&d.b)))?;
    }
    Ok(Exit::Done)
}

/// Config keys, and what the run says of itself, flat.
fn facts(folder: &Path) -> Result<BTreeMap<String, String>, Failure> {
    let mut facts = BTreeMap::new();
    let file = folder.join(CONFIG_FILE);
    let text = std::fs::read_to_string(&file).map_err(|e| Failure::file("read", &file, &e))?;
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
        Failure::new(Exit::BadInput, format!("{}: {}", file.display(), e.message()), "the run's folder is damaged")
    })?;
    flatten("config", &toml::Value::Table(table), &mut facts);
    if let Some(status) = read_status(folder)? {
        let mut add = |key: &str, value: Option<String>| facts.extend(value.map(|v| (key.to_owned(), v)));
        if let Some(identity) = &status.identity {
            add("run.build_id", Some(identity.build_id.clone()));
            add("run.dataset", Some(identity.dataset_hash.clone()));
            add("run.backend", Some(identity.backend.clone()));
            add("run.host", Some(identity.host.clone()));
        }
        add("result.step", status.step.as_ref().map(|s| s.step.to_string()));
        add("result.loss", status.step.as_ref().map(|s| format!("{:.4}", s.loss)));
        add("result.skipped", Some(status.totals.non_finite_skipped.to_string()));
        add("result.tokens_per_s", status.step.as_ref().map(|_| format!("{:.0}", status.rates.tokens_per_s)));
        add("result.held_out_loss", status.held_out.as_ref().map(|h| format!("{:.4}", h.loss)));
        add("result.held_out_expected_acceptance", status.held_out.as_ref().map(|h| format!("{:.3}", h.expected_acceptance)));
        add("result.verdict", Some(status.verdict.state.name().to_owned()));
    }
    Ok(facts)
}

fn flatten(prefix: &str, value: &toml::Value, into: &mut BTreeMap<String, String>) {
    match value {
        toml::Value::Table(table) => table.iter().for_each(|(k, v)| flatten(&format!("{prefix}.{k}"), v, into)),
        other => {
            into.insert(prefix.to_owned(), other.to_string());
        }
    }
}
