//! `drafthorse restart`: stop, and go on with what is newer.
//!
//! Refuses to begin anew under an old name. Invariant: a restart that fails before its first step leaves the previous build running from its checkpoint.

use super::launch::{standing_config, tell as tell_begun};
use super::stop::{patience, tell as tell_stopped};
use crate::build_id::BUILD_ID;
use crate::deployment::config_there;
use crate::exit::{Exit, Failure};
use crate::place::{Place, run_there, runs_there};
use crate::screen::Screen;
use clap::Args;
use drafthorse_remote::launches::Launches;
use drafthorse_remote::restart::{Change, restart};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Stop a launched run and go on from its checkpoint with this build
///
/// Keeps the checkpoint for a rollback, starts this program (at a destination: the deployed one) with the run's config, or with --config, and waits for its
/// first step. If it fails before, the previous build and checkpoint are put back, also when this command is interrupted.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse restart first --resume
  drafthorse restart first --resume --config run.toml optimizer.lr=3e-4
  drafthorse deploy run.toml --to lab && drafthorse restart first --resume --to lab")]
pub struct Restart {
    /// Run name
    run: String,
    /// Overrides for --config
    #[arg(value_name = "KEY=VALUE", requires = "config")]
    overrides: Vec<String>,
    /// Go on from the checkpoint; the only way there is
    #[arg(long)]
    resume: bool,
    /// Another config for the run [default: the one it has; at a destination, the deployed one]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Seconds for the step to end and the checkpoint to be saved
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    wait: u64,
    /// Seconds for the first step after the restart
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    first_step: u64,
    /// Folder of runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    #[command(flatten)]
    place: Place,
}

/// Runs the command.
pub fn run(args: &Restart, screen: Screen) -> Result<Exit, Failure> {
    if !args.resume {
        let todo = "say --resume; to begin anew, launch under another name";
        return Err(Failure::new(Exit::Usage, "a restart goes on from the run's checkpoint", todo));
    }
    if let Some(to) = args.place.destination()? {
        if args.config.is_some() {
            let what = "at a destination the deployed config is used, not --config";
            return Err(Failure::new(Exit::Usage, what, "deploy the config first: drafthorse deploy CONFIG --to NAME"));
        }
        let (wait, first, runs) = (args.wait.to_string(), args.first_step.to_string(), runs_there(&to));
        let mut argv: Vec<String> = ["restart", &args.run, "--resume", "--wait", &wait, "--first-step", &first, "--runs", &runs]
            .map(str::to_owned)
            .into();
        if super::deploy::deployed(&to, &args.run)?.is_some() {
            argv.extend(["--config".into(), config_there(&to, &args.run)]);
        } else {
            screen.note(format!("nothing is deployed for `{}` there: its own config stays", args.run));
        }
        return run_there(&to, &argv, screen);
    }
    let launches = Launches::new(&args.runs);
    let (_, launch) = launches.find(&args.run)?;
    let config = match &args.config {
        None => None,
        Some(path) => {
            let (name, runs, text) = standing_config(path, &args.overrides)?;
            if name != launch.name || !same_folder(&runs, &args.runs) {
                let what =
                    format!("{} is the config of run {}, not of {}", path.display(), runs.join(&name).display(), launch.name);
                return Err(Failure::new(
                    Exit::BadInput,
                    what,
                    "set `name` and `out` to those of the run, or launch it as a run of its own",
                ));
            }
            Some(text)
        }
    };
    let program = std::env::current_exe().map_err(|e| Failure::file("find", Path::new("/proc/self/exe"), &e))?;
    let change = Change { program: Some((program, BUILD_ID.into())), config, resume: true };
    let mut note = |line| screen.note(line);
    let (stopped, begun) =
        restart(&launches, &launch.name, change, patience(args.wait), Duration::from_secs(args.first_step), &mut note)?;
    tell_stopped(&stopped, screen)?;
    tell_begun(&begun, screen)?;
    screen.json(&serde_json::json!({ "stopped": stopped, "begun": begun }))?;
    Ok(Exit::Done)
}

fn same_folder(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
