//! Launching, restarting and rolling back on this machine.
//!
//! Job: one command each: start and see it begin; stop, keep the checkpoint, start what is newer, see its first step; go back. Refuses to call a launch
//! started before its own trainer has said who it is. Invariant: whoever waits here may die; what was begun goes on or is put back without it.

use crate::checkpoints::{keep_checkpoints, put_checkpoints_back};
use crate::error::RemoteError;
use crate::launches::{Ended, Launch, LaunchDir, Launches, Wanted};
use crate::stop::{Patience, Stopped, stop};
use crate::supervise::{Detached, detach};
use drafthorse_telemetry::Status;
use serde::Serialize;
use std::time::{Duration, Instant};

/// What has begun.
#[derive(Clone, Debug, Serialize)]
pub struct Begun {
    /// The launch.
    pub id: String,
    /// Its folder.
    pub folder: std::path::PathBuf,
    /// The run folder.
    pub run_dir: std::path::PathBuf,
    /// The trainer's process.
    pub pid: u32,
    /// What it says it is.
    pub build_id: String,
    /// The config it has, by its own account.
    pub config_hash: String,
    /// The step it goes on after.
    pub resumed_from_step: Option<u64>,
    /// How it is detached: `systemd` or `session`.
    pub detached: &'static str,
}

/// How far a launch must have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The trainer has said who it is.
    Known,
    /// A step is done.
    FirstStep,
}

const LOOK: Duration = Duration::from_millis(50);

/// Starts `wanted` and waits until its trainer has got as far as `until`.
///
/// # Errors
/// When the run goes on already, or the launch fails before.
pub fn start(
    launches: &Launches,
    wanted: Wanted,
    until: Until,
    patience: Duration,
    say: &mut dyn FnMut(String),
) -> Result<Begun, RemoteError> {
    let dir = launches.create(wanted)?;
    begin(&dir, until, patience, say)
}

fn begin(dir: &LaunchDir, until: Until, patience: Duration, say: &mut dyn FnMut(String)) -> Result<Begun, RemoteError> {
    let (how, note) = detach(dir)?;
    note.into_iter().for_each(&mut *say);
    follow(dir, &how, until, patience)
}

fn follow(dir: &LaunchDir, how: &Detached, until: Until, patience: Duration) -> Result<Begun, RemoteError> {
    let launch = dir.launch()?;
    let begun = Instant::now();
    loop {
        if let Some(status) = dir.status()?
            && let Some(identity) = &status.identity
            && (until == Until::Known || status.step.is_some())
        {
            return Ok(Begun {
                id: launch.id.clone(),
                folder: dir.path().to_owned(),
                run_dir: dir.run_dir()?,
                pid: identity.pid,
                build_id: identity.build_id.clone(),
                config_hash: identity.config_hash.clone(),
                resumed_from_step: identity.resumed_from_step,
                detached: if *how == Detached::Session { "session" } else { "systemd" },
            });
        }
        let state = dir.state()?;
        if let Some(state) = state.as_ref().filter(|s| s.ended.is_some() && s.ended != Some(Ended::Done)) {
            let last = state.attempts.last();
            let reason = last.and_then(|a| a.reason.clone()).unwrap_or_else(|| "it was stopped".into());
            let back = state.put_back.as_ref().map_or_else(String::new, |id| format!("; the build before is put back as {id}"));
            return Err(RemoteError::NotStarted {
                what: format!("launch {} failed before its first step: {reason}{back}", launch.id),
                code: last.and_then(|a| a.code),
                todo: format!("its log: {}", dir.log().display()),
            });
        }
        let gone = state.is_some() && !dir.is_supervised()? && dir.state()?.is_some_and(|s| s.ended.is_none());
        let unborn = state.is_none() && begun.elapsed() > Duration::from_secs(20);
        if gone || unborn || begun.elapsed() > patience {
            let what = match begun.elapsed() > patience {
                true => format!("launch {} has not got so far within {} s; it goes on", launch.id, patience.as_secs()),
                false => format!("the supervisor of launch {} is gone", launch.id),
            };
            let todo = format!("its log: {}; watch it with `drafthorse watch {}`", dir.log().display(), launch.name);
            return Err(RemoteError::NotStarted { what, code: None, todo });
        }
        std::thread::sleep(LOOK);
    }
}

/// What a restart changes.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// Another program, with what it says it is.
    pub program: Option<(std::path::PathBuf, String)>,
    /// Another config text.
    pub config: Option<String>,
    /// Go on from the checkpoint; otherwise the trainer decides as it would anew.
    pub resume: bool,
}

/// Stops the newest launch of `name`, keeps its checkpoint, starts it changed, and waits for its first step. If that fails before, the supervisor puts
/// the previous build and checkpoint back by itself.
///
/// # Errors
/// When there is no such launch, it cannot be stopped, or the new one fails before its first step.
pub fn restart(
    launches: &Launches,
    name: &str,
    change: Change,
    patience: Patience,
    first_step: Duration,
    say: &mut dyn FnMut(String),
) -> Result<(Stopped, Begun), RemoteError> {
    let (old_dir, old) = launches.find(name)?;
    let stopped = stop(&old_dir, patience, say)?;
    let wanted = changed(&old, change)?;
    let run_dir = old_dir.run_dir()?;
    let dir = launches.create(wanted)?;
    if let Some(step) = keep_checkpoints(&run_dir, &dir)? {
        say(format!("the checkpoint after step {step} is kept for a rollback"));
    }
    let begun = begin(&dir, Until::FirstStep, first_step, say)?;
    Ok((stopped, begun))
}

fn changed(old: &Launch, change: Change) -> Result<Wanted, RemoteError> {
    let (program, build_id) = change.program.unwrap_or_else(|| (old.program.clone(), old.build_id.clone()));
    let config = match change.config {
        Some(text) => text,
        None => std::fs::read_to_string(&old.config).map_err(RemoteError::io("read", &old.config))?,
    };
    Ok(Wanted {
        name: old.name.clone(),
        program,
        build_id,
        config,
        args: old.args.clone(),
        resume: change.resume,
        restarts: old.restarts,
        backoff_ms: old.backoff_ms,
        previous: Some(old.id.clone()),
        fall_back: true,
    })
}

/// Goes back to the build and config that the newest launch of `name` took over from and, unless `keep_steps`, to the checkpoint it found.
///
/// # Errors
/// When it took over from nothing, cannot be stopped, or the earlier build fails.
pub fn rollback(
    launches: &Launches,
    name: &str,
    keep_steps: bool,
    patience: Patience,
    first_step: Duration,
    say: &mut dyn FnMut(String),
) -> Result<(Stopped, Begun), RemoteError> {
    let (dir, launch) = launches.find(name)?;
    let Some(previous) = &launch.previous else {
        let what = format!("earlier launch of `{name}` to go back to: {} took over from none", launch.id);
        return Err(RemoteError::Unknown { what, todo: "rollback undoes a restart".into() });
    };
    let (_, before) = launches.find(previous)?;
    let stopped = stop(&dir, patience, say)?;
    if !keep_steps {
        match put_checkpoints_back(&dir, say)? {
            Some(step) => say(format!("back to the checkpoint after step {step}")),
            None => say("there was no checkpoint before that launch: it starts anew or from what there is".into()),
        }
    }
    let text = std::fs::read_to_string(&before.config).map_err(RemoteError::io("read", &before.config))?;
    let wanted = Wanted {
        name: before.name,
        program: before.program,
        build_id: before.build_id,
        config: text,
        args: before.args,
        resume: true,
        restarts: before.restarts,
        backoff_ms: before.backoff_ms,
        previous: None,
        fall_back: false,
    };
    let begun = start(launches, wanted, Until::FirstStep, first_step, say)?;
    Ok((stopped, begun))
}

/// One line of `ps`.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// The launch.
    pub id: String,
    /// Run name.
    pub name: String,
    /// `running`, `starting again`, `done`, `stopped`, `failed`, `given up`, `lost` or `unsupervised`.
    pub state: &'static str,
    /// The trainer's process, while it runs.
    pub pid: Option<u32>,
    /// Build that was launched.
    pub build_id: String,
    /// Config by the run's own account.
    pub config_hash: Option<String>,
    /// Last step, and steps in all.
    pub step: Option<u64>,
    /// Steps in all.
    pub total_steps: Option<u64>,
    /// What the run says of itself.
    pub verdict: Option<String>,
    /// Attempts.
    pub attempts: usize,
    /// Why the last attempt ended.
    pub reason: Option<String>,
    /// Unix time in milliseconds of the launch.
    pub created_t: u64,
    /// Its folder.
    pub folder: std::path::PathBuf,
}

/// All launches as they stand.
///
/// # Errors
/// When a record is damaged.
pub fn ps(launches: &Launches) -> Result<Vec<Listed>, RemoteError> {
    launches.list()?.into_iter().map(|(dir, launch)| listed(&dir, launch)).collect()
}

fn listed(dir: &LaunchDir, launch: Launch) -> Result<Listed, RemoteError> {
    let state = dir.state()?;
    let status: Option<Status> = dir.status()?;
    let last = state.as_ref().and_then(|s| s.attempts.last());
    let pid = last.filter(|a| a.trainer.is_alive()).map(|a| a.trainer.pid);
    let supervised = dir.is_supervised()?;
    let word = match (state.as_ref().and_then(|s| s.ended), pid, supervised) {
        (Some(Ended::Done), ..) => "done",
        (Some(Ended::Stopped), ..) => "stopped",
        (Some(Ended::Failed), ..) => "failed",
        (Some(Ended::GivenUp), ..) => "given up",
        (None, Some(_), true) => "running",
        (None, Some(_), false) => "unsupervised",
        (None, None, true) => "starting again",
        // Neither trainer nor supervisor: killed, or the machine went down.
        (None, None, false) => match status.as_ref().and_then(|s| s.outcome.as_ref()) {
            Some(drafthorse_telemetry::Outcome::Done(_)) => "done",
            Some(drafthorse_telemetry::Outcome::Stopped(_)) => "stopped",
            _ => "lost",
        },
    };
    let verdict =
        status.as_ref().filter(|_| pid.is_some()).map(|s| format!("{}: {}", s.verdict.state.name(), s.verdict.headline));
    Ok(Listed {
        id: launch.id,
        name: launch.name,
        state: word,
        pid,
        build_id: launch.build_id,
        config_hash: status.as_ref().and_then(|s| s.identity.as_ref()).map(|i| i.config_hash.clone()),
        step: status.as_ref().and_then(|s| s.step.as_ref()).map(|s| s.step).or(last.and_then(|a| a.step)),
        total_steps: status.as_ref().and_then(|s| s.total_steps),
        verdict,
        attempts: state.as_ref().map_or(0, |s| s.attempts.len()),
        reason: last.and_then(|a| a.reason.clone()),
        created_t: launch.created_t,
        folder: dir.path().to_owned(),
    })
}
