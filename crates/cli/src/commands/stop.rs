//! `drafthorse stop`: end a launched run, with a checkpoint.
//!
//! Refuses to touch any process but the launch's own. Invariant: asked first, pressed later.

use crate::exit::{Exit, Failure};
use crate::place::{Place, run_there, runs_there};
use crate::screen::Screen;
use clap::Args;
use drafthorse_remote::launches::Launches;
use drafthorse_remote::stop::{Patience, Stopped, stop};
use std::path::PathBuf;
use std::time::Duration;

/// Stop a launched run: save, then end
///
/// Asks the run to finish its step and save, and waits; after --wait it is told to end at once, then killed. Only the launch's own process is told, known by
/// its id and its start. If GPUs still hold more memory than before the launch, whoever holds it is named and left alone.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse stop first
  drafthorse stop first --to lab --wait 120")]
pub struct Stop {
    /// Run name or launch id
    run: String,
    /// Seconds for the step to end and the checkpoint to be saved
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    wait: u64,
    /// Folder of runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    #[command(flatten)]
    place: Place,
}

/// How long a stop may take, with `wait` seconds for the checkpoint.
pub fn patience(wait: u64) -> Patience {
    Patience { save: Duration::from_secs(wait), ..Patience::default() }
}

/// Runs the command.
pub fn run(args: &Stop, screen: Screen) -> Result<Exit, Failure> {
    if let Some(to) = args.place.destination()? {
        let argv = ["stop", &args.run, "--wait", &args.wait.to_string(), "--runs", &runs_there(&to)].map(str::to_owned);
        return run_there(&to, &argv, screen);
    }
    let (dir, _) = Launches::new(&args.runs).find(&args.run)?;
    let stopped = stop(&dir, patience(args.wait), &mut |line| screen.note(line))?;
    tell(&stopped, screen)?;
    screen.json(&stopped)?;
    Ok(Exit::Done)
}

/// What was stopped, in words.
pub fn tell(stopped: &Stopped, screen: Screen) -> Result<(), Failure> {
    let step = stopped.step.map_or_else(|| "before its first step".into(), |s| format!("after step {s}"));
    screen.say(match (stopped.was_running, stopped.forced) {
        (false, _) => format!("{} was not running", stopped.id),
        (true, false) => format!("stopped    {} {step}", stopped.id),
        (true, true) => format!("stopped    {} {step}, by force: the newest complete checkpoint stands", stopped.id),
    })?;
    if let Some(checkpoint) = &stopped.checkpoint {
        screen.say(format!("checkpoint {checkpoint}"))?;
    }
    stopped.memory_held.iter().for_each(|line| screen.note(format!("note: {line}")));
    Ok(())
}
