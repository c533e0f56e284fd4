//! `drafthorse export`: a drafter as servers load it.
//!
//! Refuses weights that are not finite and folders that hold something else. Invariant: what is reported was read back from disk and compared bit for bit.

use crate::drafter_source::{DrafterSource, target_of};
use crate::exit::{Exit, Failure};
use crate::format::{bytes, count};
use crate::screen::Screen;
use clap::{Args, ValueEnum};
use drafthorse_models::export::{Format, Verifier};
use drafthorse_models::serve::serve_commands;
use drafthorse_train::frozen::TargetFiles;
use drafthorse_train::state::export_weights;
use serde_json::json;
use std::path::PathBuf;

/// Write a drafter as vLLM and SGLang load it
///
/// Writes safetensors (bf16) and config.json, reads them back and compares every tensor, and prints the commands that serve them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse export runs/q8 --to plain -o out/
  drafthorse export runs/q8/checkpoints/step-00000500 --to speculators -o out/ --target-name Qwen/Qwen3-8B")]
pub struct Export {
    /// Run folder, checkpoint, or drafter folder
    #[arg(value_name = "RUN_OR_DRAFTER")]
    run: PathBuf,
    /// Spelling of config.json
    #[arg(long, value_enum, default_value_t = To::Plain)]
    to: To,
    /// Folder to write; an earlier export there is replaced
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
    /// Folder of the target [default: the one that the run recorded]
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// What the written config and the serve commands call the target [default: its folder]
    #[arg(long, value_name = "NAME")]
    target_name: Option<String>,
}

/// Spelling of an exported config.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum To {
    /// As published drafters: for vLLM and SGLang
    Plain,
    /// As the speculators library: for vLLM
    Speculators,
}

/// Runs the command.
pub fn run(args: &Export, screen: Screen) -> Result<Exit, Failure> {
    let folder = target_of(args.target.as_deref(), &args.run)?;
    let target = TargetFiles::open(&folder)?;
    let drafter = DrafterSource::open(&args.run, &target)?;
    drafter.notices.iter().for_each(|n| screen.note(format!("note: {n}")));
    drafter.other_target.iter().for_each(|n| screen.warn(n));
    let format = match args.to {
        To::Plain => Format::Plain,
        To::Speculators => Format::Speculators,
    };
    let name = args.target_name.clone().unwrap_or_else(|| folder.display().to_string());
    let verifier = Verifier { name_or_path: name.clone(), architectures: target.config.architectures.clone() };
    if let Some(parent) = args.out.parent().filter(|p| !p.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).map_err(|e| Failure::file("make", parent, &e))?;
    }
    let report = export_weights(&args.out, format, &drafter.config, &drafter.weights, &verifier, &drafter.provenance)?;
    screen.say(format!(
        "wrote {}: {} tensors, {} parameters, {}; {} read back and equal",
        report.folder.display(),
        report.tensors,
        count(report.parameters),
        bytes(report.file_bytes),
        bytes(report.compared_bytes)
    ))?;
    let commands = serve_commands(&name, &args.out.display().to_string(), format, &drafter.config);
    for serve in &commands {
        screen.say(format!("\n{}:\n{}", serve.server, serve.command))?;
    }
    let serve: Vec<_> = commands.iter().map(|c| json!({"server": c.server, "command": c.command})).collect();
    screen.json(&json!({
        "folder": report.folder, "format": format.as_str(), "tensors": report.tensors, "parameters": report.parameters,
        "file_bytes": report.file_bytes, "compared_bytes": report.compared_bytes, "serve": serve,
    }))?;
    Ok(Exit::Done)
}
