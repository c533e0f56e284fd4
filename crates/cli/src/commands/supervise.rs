//! `drafthorse supervise`: what `launch` detaches. Not meant to be called by hand, and not listed.
//!
//! Refuses to be a second supervisor of a launch. Invariant: it leads its own session before it does anything else.

use crate::exit::{Exit, Failure};
use crate::screen::Screen;
use clap::Args;
use drafthorse_remote::launches::{Ended, LaunchDir};
use drafthorse_remote::supervise::{Codes, own_session, supervise};
use std::path::PathBuf;

/// Look after a launch (used by `launch`)
#[derive(Debug, Args)]
pub struct Supervise {
    /// Launch folder
    folder: PathBuf,
}

/// What the trainer's exit codes mean to its supervisor.
const CODES: Codes = Codes {
    meaning: |code| Exit::from_code(code).map_or_else(|| "no code of this program".into(), |e| e.meaning().into()),
    is_done: |code| Exit::from_code(code) == Some(Exit::Done),
    is_stopped: |code| Exit::from_code(code) == Some(Exit::Stopped),
    // A device may come back, a stall may pass, and even a bug may depend on timing; input, size and divergence do not change by themselves.
    is_crash: |code| matches!(Exit::from_code(code), Some(Exit::Device | Exit::Stalled | Exit::Bug) | None),
};

/// Runs the command.
pub fn run(args: &Supervise, _screen: Screen) -> Result<Exit, Failure> {
    own_session().map_err(|e| Failure::new(Exit::Device, format!("cannot make a session: {e}"), "launch again"))?;
    let state = supervise(&LaunchDir::new(&args.folder), &CODES)?;
    Ok(match state.ended {
        Some(Ended::Done) => Exit::Done,
        Some(Ended::Stopped) => Exit::Stopped,
        _ => state
            .attempts
            .last()
            .and_then(|a| a.code)
            .and_then(Exit::from_code)
            .filter(|e| *e != Exit::Done)
            .unwrap_or(Exit::Device),
    })
}
