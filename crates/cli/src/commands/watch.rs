//! `drafthorse watch`: what a run is doing, judged, here or at a destination.
//!
//! Refuses to call a run healthy that stands still or that is not what was deployed. Invariants: leaving leaves the run alone; the same reading twice is never
//! news; a connection that breaks is made again.

use crate::exit::{Exit, Failure};
use crate::place::{Place, runs_there};
use crate::screen::Screen;
use crate::watch_condition::{Condition, Met, parse_duration};
use crate::watch_web::serve;
use clap::Args;
use drafthorse_remote::destination::Destination;
use drafthorse_remote::stream::{FarRun, Frame};
use drafthorse_telemetry::{
    Expected, Limits, RunFolder, Source, State, Update, Verdict, View, Watcher, run_terminal_view, unix_ms,
};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Watch a run, here or at a destination
///
/// On a terminal a live view; elsewhere a line when something changed. The verdict is one of starting, healthy, starved, stalled, diverging, not your code,
/// finished, failed, stopped. A run at a destination is followed through the chain's standard streams; no port is needed, and a broken connection is
/// made again. Exit codes with --until: 0 when it came to pass, 7 when time ran out or the run stands still, else how the run ended.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse watch first
  drafthorse watch lab:first                          # at a destination
  drafthorse watch first --web                        # the page, in a browser
  drafthorse watch first --until step=100 --timeout 10m && echo good
  drafthorse watch first --json | jq .")]
pub struct Watch {
    /// Run name, run folder, or DESTINATION:RUN
    run: String,
    /// Serve the page on 127.0.0.1 until Ctrl-C; 0 takes any free port
    #[arg(long, value_name = "PORT", num_args = 0..=1, default_missing_value = "0")]
    web: Option<u16>,
    /// End when this has come to pass: step=N, gate, held_out, checkpoint, or end
    #[arg(long, value_name = "WHAT")]
    until: Option<Condition>,
    /// Give up after this long, e.g. 90s, 10m, 2h
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "until")]
    timeout: Option<Duration>,
    /// With --json: only events after this number
    #[arg(long, value_name = "SEQ", default_value_t = 0)]
    after: u64,
    /// Folder of runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    #[command(flatten)]
    place: Place,
}

/// How often the source is asked.
const POLL: Duration = Duration::from_millis(200);
/// Between two lines for a run that only gets on.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Runs the command.
pub fn run(args: &Watch, screen: Screen) -> Result<Exit, Failure> {
    let (to, run) = whereabouts(args)?;
    let (mut source, expected): (Box<dyn Source>, Expected) = match &to {
        Some(to) => (Box::new(far_run(to, &run)?), expected(to, &run)?),
        None => (Box::new(RunFolder::new(run_folder(&run, &args.runs)?)), Expected::default()),
    };
    if let Some(port) = args.web {
        let folder = if to.is_none() { Some(run_folder(&run, &args.runs)?) } else { None };
        return serve(&mut *source, folder.as_deref(), port, screen);
    }
    if screen.json {
        return frames(args, &mut *source, expected, screen);
    }
    if args.until.is_none() && std::io::stdout().is_terminal() {
        let verdict = run_terminal_view(&mut *source, expected, Limits::default(), false)?;
        return Ok(if verdict.state.is_over() { exit_of(&verdict.state) } else { Exit::Done });
    }
    lines(args, &mut *source, expected, screen)
}

/// Destination and run: `lab:first` is short for `first --to lab`.
fn whereabouts(args: &Watch) -> Result<(Option<Destination>, String), Failure> {
    if let Some(to) = args.place.destination()? {
        return Ok((Some(to), args.run.clone()));
    }
    match args.run.split_once(':') {
        Some((name, run)) if !Path::new(&args.run).exists() && !name.is_empty() && !run.is_empty() => {
            Ok((Some(args.place.named(name)?), run.trim_start_matches("runs/").to_owned()))
        }
        _ => Ok((None, args.run.clone())),
    }
}

/// The folder of a run by name or path.
pub fn run_folder(run: &str, runs: &Path) -> Result<PathBuf, Failure> {
    let path = Path::new(run);
    for folder in [path.to_owned(), runs.join(run)] {
        if ["events.jsonl", "status.json", "config.toml"].iter().any(|f| folder.join(f).is_file()) {
            return Ok(folder);
        }
    }
    // A launch that has only just begun has no run folder yet, and will.
    if let Ok((dir, _)) = drafthorse_remote::launches::Launches::new(runs).find(run) {
        return Ok(dir.run_dir()?);
    }
    let what = format!("there is no run {run}, neither as a folder nor in {}", runs.display());
    Err(Failure::new(
        Exit::BadInput,
        what,
        "`drafthorse ps` lists launches; name a run folder, or the folder of runs with --runs",
    ))
}

fn far_run(to: &Destination, run: &str) -> Result<FarRun, Failure> {
    let argv = [to.program().as_str(), "--json", "--quiet", "watch", run, "--runs", &runs_there(to)].map(str::to_owned).to_vec();
    Ok(FarRun::new(to.far(), &to.folder, argv, format!("{}: {run}", to.hops))?)
}

/// What was deployed there is what should run there.
fn expected(to: &Destination, run: &str) -> Result<Expected, Failure> {
    let deployed = super::deploy::deployed(to, run)?;
    Ok(deployed.map_or_else(Expected::default, |d| Expected {
        build_id: Some(d.build_id),
        config_hash: Some(d.config_hash),
        ..Expected::default()
    }))
}

/// Events and statuses, one a line.
fn frames(args: &Watch, source: &mut dyn Source, expected: Expected, screen: Screen) -> Result<Exit, Failure> {
    let mut watch = Watching::new(args, expected);
    let (mut spoke, mut trouble) = (Instant::now(), None);
    loop {
        let update = match source.poll() {
            Ok(update) => {
                trouble = None;
                update
            }
            Err(error) => {
                let text = error.to_string();
                if trouble.as_ref() != Some(&text) {
                    screen.note(&text);
                }
                trouble = Some(text);
                Update::default()
            }
        };
        if update.restarted {
            screen.json_line(&Frame::Restarted)?;
        }
        let more = update.more;
        for envelope in update.events.iter().filter(|e| update.restarted || e.seq > args.after) {
            screen.json_line(&Frame::Event(Box::new(envelope.clone())))?;
        }
        if let Some(status) = &update.status {
            screen.json_line(&Frame::Status(Box::new(status.clone())))?;
        }
        if !update.events.is_empty() || update.status.is_some() {
            spoke = Instant::now();
        } else if spoke.elapsed() > LINE_EVERY {
            screen.json_line(&Frame::Here)?;
            spoke = Instant::now();
        }
        if let Some(exit) = watch.take(update)? {
            return Ok(exit);
        }
        if !more {
            std::thread::sleep(POLL);
        }
    }
}

/// A line when something changed.
fn lines(args: &Watch, source: &mut dyn Source, expected: Expected, screen: Screen) -> Result<Exit, Failure> {
    let mut watch = Watching::new(args, expected);
    let (mut said, mut said_at, mut trouble) = (String::new(), Instant::now(), None);
    loop {
        let mut update = Update::default();
        match source.poll() {
            Ok(news) => {
                trouble = None;
                update = news;
            }
            Err(error) if trouble.as_ref() != Some(&error.to_string()) => {
                screen.note(error.to_string().lines().next().unwrap_or_default());
                trouble = Some(error.to_string());
            }
            Err(_) => {}
        }
        let more = update.more;
        let before = watch.view.verdict.state.name();
        let exit = watch.take(update)?;
        let verdict = &watch.view.verdict;
        let line = format!("{}: {}", verdict.state.name(), verdict.headline);
        let due = said_at.elapsed() >= LINE_EVERY || verdict.state.name() != before || said.is_empty() || exit.is_some();
        if due && line != said && watch.view.status.is_some() {
            screen.say(&line)?;
            if !verdict.advice.is_empty() {
                screen.say(format!("  {}", verdict.advice))?;
            }
            if let State::Stalled { stands, .. } = &verdict.state {
                for s in stands {
                    screen.say(format!(
                        "  {} on {}: {} for {}",
                        s.worker,
                        s.device,
                        s.at,
                        drafthorse_telemetry::span(s.for_ms)
                    ))?;
                }
            }
            (said, said_at) = (line, Instant::now());
        }
        if let Some(exit) = exit {
            return Ok(exit);
        }
        if !more {
            std::thread::sleep(POLL);
        }
    }
}

/// A run as it is watched, and when to stop watching.
struct Watching<'a> {
    args: &'a Watch,
    view: View,
    watcher: Watcher,
    begun: Instant,
}

impl Watching<'_> {
    fn new(args: &Watch, expected: Expected) -> Watching<'_> {
        Watching { args, view: View::default(), watcher: Watcher::new(expected, Limits::default()), begun: Instant::now() }
    }

    /// Takes in news; gives the exit when there is nothing more to wait for.
    fn take(&mut self, update: Update) -> Result<Option<Exit>, Failure> {
        let more = update.more;
        self.view.apply(update);
        self.view.judge(&mut self.watcher, unix_ms());
        let verdict = &self.view.verdict;
        let Some(condition) = &self.args.until else {
            return Ok((verdict.state.is_over() && !more).then(|| exit_of(&verdict.state)));
        };
        if let State::NotYourCode { .. } = verdict.state {
            return Err(told(Exit::BadInput, verdict));
        }
        if let Some(status) = &self.view.status
            && condition.met(status) == Met::Yes
        {
            return Ok(Some(Exit::Done));
        }
        if verdict.state.is_over() && !more {
            let exit = match exit_of(&verdict.state) {
                Exit::Done => Exit::BadInput,
                other => other,
            };
            let what = format!("the run ended before {condition}: {}", verdict.headline);
            return Err(Failure::new(exit, what, "wait for something that it gets to"));
        }
        if let State::Stalled { .. } = verdict.state {
            return Err(told(Exit::Stalled, verdict));
        }
        match self.args.timeout.filter(|t| self.begun.elapsed() > *t) {
            None => Ok(None),
            Some(timeout) => {
                let what = format!(
                    "{condition} did not come to pass within {} s; {}: {}",
                    timeout.as_secs(),
                    verdict.state.name(),
                    verdict.headline
                );
                let todo = if verdict.advice.is_empty() { "the run goes on; wait longer".into() } else { verdict.advice.clone() };
                Err(Failure::new(Exit::Stalled, what, todo))
            }
        }
    }
}

fn told(exit: Exit, verdict: &Verdict) -> Failure {
    let todo = if verdict.advice.is_empty() { "look at the run's log" } else { &verdict.advice };
    Failure::new(exit, format!("{}: {}", verdict.state.name(), verdict.headline), todo)
}

/// The exit code of a run that has ended this way.
fn exit_of(state: &State) -> Exit {
    match state {
        State::Failed { .. } => Exit::Device,
        State::Stopped { .. } => Exit::Stopped,
        _ => Exit::Done,
    }
}
