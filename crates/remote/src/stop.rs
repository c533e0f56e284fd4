//! Stopping a launch.
//!
//! Job: ask for a checkpoint, wait, then press harder; say what GPUs still hold afterwards and who holds it. Refuses to touch a process that is not the
//! launch's own trainer. Invariants: the request is on disk before a signal is sent, so that no supervisor starts the trainer again; a
//! trainer is told to end exactly once per stage.

use crate::error::RemoteError;
use crate::launches::{Launch, LaunchDir};
use crate::process::{ProcessId, Tell};
use drafthorse_telemetry::{read_gpus, span};
use serde::Serialize;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a stop may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For the step to end and the checkpoint to be saved.
    pub save: Duration,
    /// After it was told to end at once, and again after it was killed.
    pub abort: Duration,
    /// For the driver to give memory back.
    pub memory: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { save: Duration::from_secs(600), abort: Duration::from_secs(15), memory: Duration::from_secs(30) }
    }
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stopped {
    /// The launch.
    pub id: String,
    /// Whether anything ran.
    pub was_running: bool,
    /// Whether more than a request was needed.
    pub forced: bool,
    /// The checkpoint that was saved, if the trainer told of one.
    pub checkpoint: Option<String>,
    /// Last step.
    pub step: Option<u64>,
    /// GPUs that use more than before the launch, and who uses them.
    pub memory_held: Vec<String>,
}

const LOOK: Duration = Duration::from_millis(100);
/// What a driver keeps for itself, so that equality would never come.
const MEMORY_SLACK_BYTES: u64 = 256 << 20;

/// Stops the launch in `dir`.
///
/// # Errors
/// When its process belongs to another user, or does not even end when killed.
pub fn stop(dir: &LaunchDir, patience: Patience, say: &mut dyn FnMut(String)) -> Result<Stopped, RemoteError> {
    let launch = dir.launch()?;
    dir.ask_to_stop()?;
    let mut told: Vec<(ProcessId, Tell)> = Vec::new();
    let was_running = running(dir)?.is_some() || dir.is_supervised()?;
    let stages = [(Tell::Terminate, patience.save), (Tell::Terminate, patience.abort), (Tell::Kill, patience.abort)];
    let mut ended = false;
    let mut forced = false;
    for (stage, (what, limit)) in stages.into_iter().enumerate() {
        let begun = Instant::now();
        let mut spoke = Instant::now();
        told.clear();
        loop {
            let trainer = running(dir)?;
            if trainer.is_none() && !dir.is_supervised()? {
                ended = true;
                break;
            }
            if let Some(id) = trainer.filter(|id| !told.iter().any(|(t, _)| t == id)) {
                match stage {
                    0 => say(format!("process {} is asked to save and end", id.pid)),
                    1 => say(format!(
                        "process {} did not end within {}: told to end at once",
                        id.pid,
                        span(limit_ms(patience.save))
                    )),
                    _ => say(format!("process {} did not end: killed; the last complete checkpoint stands", id.pid)),
                }
                forced |= stage > 0;
                id.tell(what).map_err(RemoteError::io("signal the trainer of", dir.path()))?;
                told.push((id, what));
            }
            if begun.elapsed() > limit {
                break;
            }
            if spoke.elapsed() > Duration::from_secs(5) {
                spoke = Instant::now();
                let step =
                    dir.status()?.and_then(|s| s.step).map_or_else(|| "in start-up".into(), |s| format!("after step {}", s.step));
                say(format!("waiting for {} ({step}, {})", launch.id, span(begun.elapsed().as_millis() as u64)));
            }
            std::thread::sleep(LOOK);
        }
        if ended {
            break;
        }
    }
    if !ended {
        let what = format!("launch {} does not end, not even when killed", launch.id);
        let todo = "its process hangs in the kernel (a driver, a dead disk): look at `ps -o stat,wchan` there";
        return Err(RemoteError::NotStopped { what, todo: todo.into() });
    }
    let status = dir.status()?;
    let checkpoint = status.as_ref().and_then(|s| s.checkpoint.as_ref()).map(|c| c.path.clone());
    let memory_held = if was_running { memory_held(&launch, patience.memory) } else { Vec::new() };
    Ok(Stopped { id: launch.id, was_running, forced, checkpoint, step: status.and_then(|s| s.step).map(|s| s.step), memory_held })
}

fn limit_ms(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
}

/// The trainer, if it runs.
fn running(dir: &LaunchDir) -> Result<Option<ProcessId>, RemoteError> {
    let state = dir.state()?;
    Ok(state.and_then(|s| s.attempts.last().map(|a| a.trainer.clone())).filter(ProcessId::is_alive))
}

/// GPUs that do not come back to what they used before the launch, and the processes on them.
fn memory_held(launch: &Launch, patience: Duration) -> Vec<String> {
    if launch.gpu_used_before.is_empty() {
        return Vec::new();
    }
    let begun = Instant::now();
    loop {
        let held: Vec<String> = read_gpus()
            .into_iter()
            .filter_map(|now| {
                let (_, before) = launch.gpu_used_before.iter().find(|(device, _)| *device == now.device)?;
                let more = now.memory_used_bytes.saturating_sub(*before);
                (more > MEMORY_SLACK_BYTES).then(|| format!("{} uses {} MiB more than before the launch", now.device, more >> 20))
            })
            .collect();
        if held.is_empty() || begun.elapsed() > patience {
            return if held.is_empty() { held } else { held.into_iter().chain(processes()).collect() };
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Processes on the GPUs, in words; none of them is touched.
fn processes() -> Vec<String> {
    let output =
        Command::new("nvidia-smi").args(["--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]).output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    let lines: Vec<String> = text
        .lines()
        .filter(|l| l.contains(','))
        .map(|l| format!("process {} is not this run's and was left alone", l.trim()))
        .collect();
    if lines.is_empty() { vec!["nvidia-smi names no process; one outside this container may hold it".into()] } else { lines }
}
