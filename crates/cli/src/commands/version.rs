//! `drafthorse version`: which build this is.
//!
//! Refuses nothing. Invariant: what it prints is what run folders and checkpoints record.

use crate::build_id::BUILD;
use crate::exit::{Exit, Failure};
use crate::screen::Screen;
use clap::Args;

/// Show which build this is
///
/// The build id is the commit and a hash of all sources; run folders, checkpoints and exports record it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse version
  drafthorse version --json")]
pub struct Version {}

/// Runs the command.
pub fn run(_args: &Version, screen: Screen) -> Result<Exit, Failure> {
    screen.say(format!(
        "drafthorse {}\nbuild      {}\nplatform   {} ({})\nbackends   {}",
        BUILD.version,
        BUILD.build_id,
        BUILD.target,
        BUILD.profile,
        BUILD.backends.join(", ")
    ))?;
    screen.json(&BUILD)?;
    Ok(Exit::Done)
}
