//! `drafthorse launch`: a run that does not depend on who started it.
//!
//! Refuses a run whose name is taken by one that goes on. Invariants: the run has its own session, log and lock; it is called launched when its own
//! trainer has said who it is.

use crate::build_id::BUILD_ID;
use crate::deployment::{config_there, run_name};
use crate::exit::{Exit, Failure};
use crate::launch::load_config;
use crate::place::{Place, run_there};
use crate::screen::Screen;
use clap::Args;
use drafthorse_remote::launches::{Launches, Wanted};
use drafthorse_remote::restart::{Begun, Until, start};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Start a run that goes on when you leave
///
/// The trainer gets a session of its own (a systemd unit where root's systemd is there), a log and a lock, and survives the end of this terminal or connection.
/// After a crash it is started again from its last checkpoint, with growing pauses and a limit. At a destination, what `deploy` put there is launched.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse launch run.toml
  drafthorse launch run.toml --resume
  drafthorse launch run.toml --to lab
  drafthorse ps; drafthorse watch NAME; drafthorse stop NAME")]
pub struct Launch {
    /// Run config
    config: PathBuf,
    /// Overrides, e.g. drafter.layers=3
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Go on from the newest checkpoint of the run, if there is one
    #[arg(long)]
    resume: bool,
    /// Crashes in a row without a new checkpoint after which it is given up
    #[arg(long, value_name = "N", default_value_t = 3)]
    restarts: u32,
    /// Pause before the first restart; doubles each time, up to five minutes
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    backoff: f64,
    /// Serve the live page on 127.0.0.1 while the run lasts; 0 takes any free port
    #[arg(long, value_name = "PORT")]
    http: Option<u16>,
    #[command(flatten)]
    place: Place,
}

/// Longest wait for the trainer to say who it is: it reads the dataset's index before.
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs the command.
pub fn run(args: &Launch, screen: Screen) -> Result<Exit, Failure> {
    if let Some(to) = args.place.destination()? {
        let name = super::deploy::is_deployed(&args.config, &args.overrides, &to)?;
        let mut argv = vec!["launch".to_owned(), config_there(&to, &name)];
        argv.extend(args.resume.then(|| "--resume".to_owned()));
        argv.extend(["--restarts".into(), args.restarts.to_string(), "--backoff".into(), args.backoff.to_string()]);
        argv.extend(args.http.into_iter().flat_map(|p| ["--http".to_owned(), p.to_string()]));
        return run_there(&to, &argv, screen);
    }
    let (name, runs, config) = standing_config(&args.config, &args.overrides)?;
    let wanted = Wanted {
        name: name.clone(),
        program: std::env::current_exe().map_err(|e| Failure::file("find", Path::new("/proc/self/exe"), &e))?,
        build_id: BUILD_ID.into(),
        config,
        args: args.http.into_iter().flat_map(|p| ["--http".to_owned(), p.to_string()]).collect(),
        resume: args.resume,
        restarts: args.restarts,
        backoff_ms: (args.backoff.max(0.0) * 1e3) as u64,
        previous: None,
        fall_back: false,
    };
    let begun = start(&Launches::new(&runs), wanted, Until::Known, PATIENCE, &mut |line| screen.note(line))?;
    tell(&begun, screen)?;
    screen.json(&begun)?;
    Ok(Exit::Done)
}

/// Run name, folder of runs, and the config with every path from the root, so that it reads the same from anywhere.
pub fn standing_config(path: &Path, overrides: &[String]) -> Result<(String, PathBuf, String), Failure> {
    let mut config = load_config(path, overrides)?;
    let full = |path: &Path| std::path::absolute(path).map_err(|e| Failure::file("find", path, &e));
    config.target = full(&config.target)?;
    config.data = full(&config.data)?;
    config.out = full(&config.out)?;
    config.drafter.init_from = config.drafter.init_from.as_deref().map(full).transpose()?;
    let name = run_name(&config, path);
    config.name = Some(name.clone());
    Ok((name, config.out.clone(), config.to_toml()))
}

/// What has begun, in words.
pub fn tell(begun: &Begun, screen: Screen) -> Result<(), Failure> {
    let resumed = begun.resumed_from_step.map_or_else(String::new, |s| format!(", resumed after step {s}"));
    screen.say(format!("launched   {}{resumed}", begun.id))?;
    screen.say(format!("process    {} ({})", begun.pid, begun.detached))?;
    screen.say(format!("build      {}, config {:.12}", begun.build_id, begun.config_hash))?;
    screen.say(format!("run        {}", begun.run_dir.display()))?;
    screen.say(format!("log        {}", begun.folder.join(drafthorse_remote::launches::LOG).display()))
}
