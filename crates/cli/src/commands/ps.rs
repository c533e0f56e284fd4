//! `drafthorse ps`: the launches there are and how they stand.
//!
//! Refuses to call a launch running because a file says so: its process and its lock are asked. Invariant: newest last.

use crate::exit::{Exit, Failure};
use crate::place::{Place, run_there, runs_there};
use crate::screen::Screen;
use clap::Args;
use drafthorse_remote::launches::Launches;
use drafthorse_remote::restart::ps;
use drafthorse_telemetry::{span, unix_ms};
use std::path::PathBuf;

/// List launches and how they stand
///
/// A state is one of running, starting again (after a crash), unsupervised (the trainer runs, its supervisor is gone), done, stopped, failed, given up, lost (its
/// processes are gone and said nothing).
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse ps
  drafthorse ps --to lab
  drafthorse ps --json")]
pub struct Ps {
    /// Folder of runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    #[command(flatten)]
    place: Place,
}

/// Runs the command.
pub fn run(args: &Ps, screen: Screen) -> Result<Exit, Failure> {
    if let Some(to) = args.place.destination()? {
        return run_there(&to, &["ps".into(), "--runs".into(), runs_there(&to)], screen);
    }
    let all = ps(&Launches::new(&args.runs))?;
    screen.json(&all)?;
    if all.is_empty() {
        screen.note(format!("nothing has been launched in {}", args.runs.display()));
    }
    for launch in &all {
        let steps = match (launch.step, launch.total_steps) {
            (Some(step), Some(total)) => format!("step {step} of {total}"),
            (None, Some(total)) => format!("step 0 of {total}"),
            _ => "no step".into(),
        };
        let pid = launch.pid.map_or_else(String::new, |p| format!("  pid {p}"));
        let again = if launch.attempts > 1 { format!("  attempt {}", launch.attempts) } else { String::new() };
        let age = span(unix_ms().saturating_sub(launch.created_t));
        screen
            .say(format!("{:<32} {:<14} {steps}{pid}  build {}  {age} ago{again}", launch.id, launch.state, launch.build_id))?;
        if let Some(line) = launch.verdict.as_ref().or(launch.reason.as_ref()) {
            screen.say(format!("    {line}"))?;
        }
    }
    Ok(Exit::Done)
}
