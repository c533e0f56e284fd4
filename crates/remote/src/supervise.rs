//! The supervisor of one launch: starts the trainer, looks after it, starts it again after a crash.
//!
//! Job: own session, own log, own lock; each attempt and its reason on record. Refuses to start again what another attempt would not mend (a wrong
//! config, a diverged run), what fails before its first step, and anything after a stop was asked for.
//! Invariants: one supervisor per launch, by the kernel's lock; the trainer does not depend on it and outlives it; a launch that took over from another
//! and fails before its first step puts the other back.

use crate::checkpoints::put_checkpoints_back;
use crate::error::RemoteError;
use crate::launches::{Attempt, Ended, LaunchDir, Launches, State, Wanted};
use crate::process::ProcessId;
use drafthorse_telemetry::{Outcome, unix_ms};
use std::fs::File;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// Longest wait before a restart.
const MAX_BACKOFF_MS: u64 = 300_000;
/// How often the trainer is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// What exit codes of the trainer mean.
#[derive(Clone, Copy, Debug)]
pub struct Codes {
    /// The code in words.
    pub meaning: fn(i32) -> String,
    /// Whether all was done.
    pub is_done: fn(i32) -> bool,
    /// Whether it ended because it was asked to.
    pub is_stopped: fn(i32) -> bool,
    /// Whether another attempt may go better.
    pub is_crash: fn(i32) -> bool,
}

/// How a supervised process is detached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detached {
    /// By systemd, as a unit of this name.
    Systemd(String),
    /// In a session of its own.
    Session,
}

/// Starts the supervisor of `dir` so that it survives whoever calls. Under a root systemd it becomes a unit; elsewhere it has a session of its own.
/// Gives how, and a line to say if systemd was there and did not take it.
///
/// # Errors
/// When the program cannot be started.
pub fn detach(dir: &LaunchDir) -> Result<(Detached, Option<String>), RemoteError> {
    let launch = dir.launch()?;
    let systemd = Path::new("/run/systemd/system").is_dir() && rustix::process::geteuid().is_root();
    let mut note = None;
    if systemd {
        let unit = format!("drafthorse-{}", launch.id);
        match by_systemd(&unit, &launch.program, dir.path()) {
            Ok(()) => return Ok((Detached::Systemd(unit), None)),
            Err(why) => note = Some(format!("systemd-run did not take it ({why}); it gets a session of its own instead")),
        }
    }
    let log = open_log(dir)?;
    let err = log.try_clone().map_err(RemoteError::io("open", dir.log()))?;
    // It makes its own session first thing, so that no hang-up of this terminal or connection reaches it. Not waited for: it outlives us.
    let spawned =
        Command::new(&launch.program).arg("supervise").arg(dir.path()).stdin(Stdio::null()).stdout(log).stderr(err).spawn();
    spawned.map_err(RemoteError::io("start", &launch.program))?;
    Ok((Detached::Session, note))
}

fn by_systemd(unit: &str, program: &Path, dir: &Path) -> Result<(), String> {
    let mut command = Command::new("systemd-run");
    command.args([
        "--quiet",
        "--collect",
        "--same-dir",
        "--unit",
        unit,
        "--property=KillMode=mixed",
        "--property=TimeoutStopSec=600",
    ]);
    // The unit gets systemd's environment; the run must have the caller's.
    for (name, value) in std::env::vars().filter(|(name, value)| !name.starts_with("BASH_FUNC") && !value.contains('\n')) {
        command.arg(format!("--setenv={name}={value}"));
    }
    let output =
        command.arg("--").arg(program).arg("supervise").arg(dir).stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")) }
}

fn open_log(dir: &LaunchDir) -> Result<File, RemoteError> {
    File::options().create(true).append(true).open(dir.log()).map_err(RemoteError::io("open", dir.log()))
}

/// Looks after the launch in `dir` until it has ended. Call [`own_session`] before, where it is to survive its caller.
///
/// # Errors
/// When somebody looks after it already, or its records cannot be written.
pub fn supervise(dir: &LaunchDir, codes: &Codes) -> Result<State, RemoteError> {
    let launch = dir.launch()?;
    let Some(_lock) = dir.lock()? else {
        let what = format!("launch {} is looked after by another process", launch.id);
        return Err(RemoteError::Busy { what, todo: "leave it to that".into() });
    };
    let before = dir.state()?;
    let mut state = State {
        supervisor: ProcessId::own(),
        attempts: before.map(|s| s.attempts).unwrap_or_default(),
        next_t: None,
        ended: None,
        put_back: None,
    };
    dir.write_state(&state)?;
    let mut log = open_log(dir)?;
    let mut say = |text: String| drop(writeln!(log, "supervisor: {text}"));
    let (mut crashes, mut saved) = (0, 0);
    loop {
        if dir.is_asked_to_stop() {
            state.ended = Some(Ended::Stopped);
            break;
        }
        let number = state.attempts.len() + 1;
        let started_t = unix_ms();
        let mut child = trainer(dir, &launch.program, &launch.config, &launch.args, launch.resume || number > 1)?;
        let Some(trainer) = ProcessId::of(child.id()).or_else(|| still_there(child.id())) else {
            return Err(RemoteError::Unknown { what: "/proc entry of the trainer".into(), todo: "mount /proc".into() });
        };
        say(format!("attempt {number}: process {} runs {} ({})", trainer.pid, launch.program.display(), launch.build_id));
        let fresh = Attempt { trainer, started_t, ended_t: None, code: None, signal: None, reason: None, step: None };
        state.attempts.push(fresh);
        state.next_t = None;
        dir.write_state(&state)?;
        let status = loop {
            match child.try_wait().map_err(RemoteError::io("wait for", &launch.program))? {
                Some(status) => break status,
                None => std::thread::sleep(LOOK),
            }
        };
        let told = dir.status()?.filter(|s| s.identity.as_ref().is_some_and(|i| i.pid == child.id()));
        let attempt = state.attempts.last_mut().expect("it was pushed");
        attempt.ended_t = Some(unix_ms());
        (attempt.code, attempt.signal) = (status.code(), status.signal());
        attempt.step = told.as_ref().and_then(|s| s.step.as_ref()).map(|s| s.step);
        let cause = told.as_ref().and_then(|s| match &s.outcome {
            Some(Outcome::Failure(f)) => Some(format!("{}: {}", f.worker, f.cause)),
            _ => None,
        });
        let reason = reason(status, cause, dir, codes);
        say(format!("attempt {number} ended: {reason}"));
        attempt.reason = Some(reason);
        let stepped = attempt.step.is_some();
        let newest = told.and_then(|s| s.checkpoint).map_or(0, |c| c.step);
        if newest > saved {
            (saved, crashes) = (newest, 0);
        }
        let ended = match status.code() {
            Some(code) if (codes.is_done)(code) => Some(Ended::Done),
            Some(code) if (codes.is_stopped)(code) => Some(Ended::Stopped),
            _ if dir.is_asked_to_stop() => Some(Ended::Stopped),
            Some(code) if !(codes.is_crash)(code) => Some(Ended::Failed),
            _ if number == 1 && !stepped => Some(Ended::Failed),
            _ if crashes >= launch.restarts => Some(Ended::GivenUp),
            _ => None,
        };
        if ended == Some(Ended::Failed) && number == 1 && !stepped && launch.fall_back {
            state.put_back = put_back(dir, &mut say)?;
        }
        if ended.is_some() {
            state.ended = ended;
            break;
        }
        let wait_ms = launch.backoff_ms.saturating_mul(1 << crashes.min(20)).min(MAX_BACKOFF_MS);
        crashes += 1;
        say(format!("restart {crashes} of {} in {:.1} s", launch.restarts, wait_ms as f64 / 1e3));
        state.next_t = Some(unix_ms() + wait_ms);
        dir.write_state(&state)?;
        while state.next_t.is_some_and(|t| unix_ms() < t) && !dir.is_asked_to_stop() {
            std::thread::sleep(LOOK.min(Duration::from_millis(wait_ms)));
        }
    }
    state.next_t = None;
    dir.write_state(&state)?;
    Ok(state)
}

/// A process that has ended and was not yet waited for has no state but an id and a start; ended is what it is then.
fn still_there(pid: u32) -> Option<ProcessId> {
    Path::new(&format!("/proc/{pid}")).exists().then(|| ProcessId { pid, start_ticks: 0, boot: String::new() })
}

fn trainer(
    dir: &LaunchDir,
    program: &Path,
    config: &Path,
    args: &[String],
    resume: bool,
) -> Result<std::process::Child, RemoteError> {
    let log = open_log(dir)?;
    let err = log.try_clone().map_err(RemoteError::io("open", dir.log()))?;
    let mut command = Command::new(program);
    command.arg("train").arg(config).args(args);
    if resume {
        command.args(["--resume", "auto"]);
    }
    command.stdin(Stdio::null()).stdout(log).stderr(err).spawn().map_err(RemoteError::io("start", program))
}

fn reason(status: ExitStatus, cause: Option<String>, dir: &LaunchDir, codes: &Codes) -> String {
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}, {}", (codes.meaning)(code)),
        (None, Some(9)) => "killed (signal 9): by hand, or by the kernel for want of memory".to_owned(),
        (None, signal) => format!("ended by signal {}", signal.unwrap_or(0)),
    };
    let quiet = status.code().is_some_and(|c| (codes.is_done)(c) || (codes.is_stopped)(c));
    match cause.or_else(|| last_error(dir)).filter(|_| !quiet) {
        Some(cause) => format!("{how}: {cause}"),
        None => how,
    }
}

/// The last `error:` line of the log's end.
fn last_error(dir: &LaunchDir) -> Option<String> {
    let bytes = std::fs::read(dir.log()).ok()?;
    let tail = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(1 << 16)..]).into_owned();
    let lines: Vec<&str> = tail.lines().collect();
    let from = lines.iter().rposition(|l| l.starts_with("supervisor: attempt")).unwrap_or(0);
    lines[from..].iter().rev().find_map(|l| l.strip_prefix("error: ")).map(str::to_owned)
}

/// Starts what this launch took over from.
fn put_back(dir: &LaunchDir, say: &mut impl FnMut(String)) -> Result<Option<String>, RemoteError> {
    let launch = dir.launch()?;
    let Some(previous) = &launch.previous else { return Ok(None) };
    let launches = Launches::new(dir.runs());
    let (before_dir, before) = launches.find(previous)?;
    put_checkpoints_back(dir, say)?;
    let text = std::fs::read_to_string(&before.config).map_err(RemoteError::io("read", &before.config))?;
    let wanted = Wanted {
        name: before.name.clone(),
        program: before.program.clone(),
        build_id: before.build_id.clone(),
        config: text,
        args: before.args.clone(),
        resume: true,
        restarts: before.restarts,
        backoff_ms: before.backoff_ms,
        previous: None,
        fall_back: false,
    };
    let back = launches.write_down(wanted)?;
    let (how, note) = detach(&back)?;
    let id = back.launch()?.id;
    say(format!("failed before its first step: {} is put back as {id} ({how:?})", before_dir.launch()?.id));
    note.into_iter().for_each(say);
    Ok(Some(id))
}

/// Makes this process the leader of its own session, so that no terminal or connection can hang it up.
///
/// # Errors
/// When the kernel refuses; a process that leads a group already (under a job control of its own) has one.
pub fn own_session() -> std::io::Result<()> {
    match rustix::process::setsid() {
        Ok(_) | Err(rustix::io::Errno::PERM) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
