//! `drafthorse rollback`: undo a restart.
//!
//! Refuses to delete: checkpoints of the steps that are undone are moved aside. Invariant: what runs afterwards is the build and config from before.

use super::launch::tell as tell_begun;
use super::stop::{patience, tell as tell_stopped};
use crate::exit::{Exit, Failure};
use crate::place::{Place, run_there, runs_there};
use crate::screen::Screen;
use clap::Args;
use drafthorse_remote::launches::Launches;
use drafthorse_remote::restart::rollback;
use std::path::PathBuf;
use std::time::Duration;

/// Go back to the build, config and checkpoint from before a restart
///
/// Stops the run, puts back the checkpoint that the restart found (later ones are moved aside), and launches the build and config from before.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse rollback first
  drafthorse rollback first --keep-steps --to lab     # the old build, with the newest checkpoint")]
pub struct Rollback {
    /// Run name
    run: String,
    /// Go on from the newest checkpoint instead of the one from before
    #[arg(long)]
    keep_steps: bool,
    /// Seconds for the step to end and the checkpoint to be saved
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    wait: u64,
    /// Seconds for the first step afterwards
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    first_step: u64,
    /// Folder of runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    #[command(flatten)]
    place: Place,
}

/// Runs the command.
pub fn run(args: &Rollback, screen: Screen) -> Result<Exit, Failure> {
    if let Some(to) = args.place.destination()? {
        let (wait, first, runs) = (args.wait.to_string(), args.first_step.to_string(), runs_there(&to));
        let mut argv: Vec<String> =
            ["rollback", &args.run, "--wait", &wait, "--first-step", &first, "--runs", &runs].map(str::to_owned).into();
        argv.extend(args.keep_steps.then(|| "--keep-steps".to_owned()));
        return run_there(&to, &argv, screen);
    }
    let launches = Launches::new(&args.runs);
    let first_step = Duration::from_secs(args.first_step);
    let mut note = |line| screen.note(line);
    let (stopped, begun) = rollback(&launches, &args.run, args.keep_steps, patience(args.wait), first_step, &mut note)?;
    tell_stopped(&stopped, screen)?;
    tell_begun(&begun, screen)?;
    screen.json(&serde_json::json!({ "stopped": stopped, "begun": begun }))?;
    Ok(Exit::Done)
}
