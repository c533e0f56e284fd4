//! From a config file to a run folder and a backend: what `train`, `overfit` and `demo` share.
//!
//! Job: load a config with overrides and resolve its target, check disk, record who runs, train with telemetry, and shape the outcome.
//! Refuses to print results. Invariants: the run folder holds the resolved config before the first step; telemetry is shut down whatever happened.

use crate::build_id::BUILD_ID;
use crate::device::{self, Device, Opened};
use crate::estimate::{self, Placement, Programs, available_memory};
use crate::exit::{Exit, Failure, exit_of_cause};
use crate::screen::{Screen, tell};
use crate::target_folder::resolve;
use drafthorse_data::sha256_hex;
use drafthorse_telemetry::{
    DevicePlan, Event, GpuWatch, HttpServer, Identity, MemoryPart, Options as TelemetryOptions, Plan, Subscription, Telemetry,
    unix_ms,
};
use drafthorse_train::checkpoint::newest;
use drafthorse_train::config::RunConfig;
use drafthorse_train::frozen::{Backend, CpuBackend};
use drafthorse_train::pipeline::cancel::{Cancel, Cause, Kind};
use drafthorse_train::run::{Options, Outcome, Resume, RunFailure, train, variant_dir};
use drafthorse_train::setup::Setup;
use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// File in a run folder that holds the resolved config.
pub const CONFIG_FILE: &str = "config.toml";
/// How long threads may take to come back after a cancellation.
const GRACE: Duration = Duration::from_secs(10);

/// Loads a config and finds its target.
///
/// # Errors
/// When the config or an override is wrong, or there is no such target.
pub fn load_config(path: &Path, overrides: &[String]) -> Result<RunConfig, Failure> {
    if let Some(flag) = overrides.iter().find(|o| !o.contains('=')) {
        return Err(Failure::new(
            Exit::Usage,
            format!("`{flag}` is no override"),
            "write section.key=value, e.g. drafter.layers=5",
        ));
    }
    let mut config = RunConfig::load(path, overrides)?;
    config.target = resolve(&config.target)?;
    Ok(config)
}

/// The device on which a run's drafter is decoded with: the first drafter's.
pub fn decoding_device(config: &RunConfig) -> Device {
    match config.pipeline.device.as_str() {
        "cuda" => Device::Cuda(config.pipeline.drafters[0]),
        _ => Device::Cpu,
    }
}

/// The backend of the config's device.
///
/// # Errors
/// Exit 5 where it cannot be had.
pub fn open_backend(config: &RunConfig) -> Result<Opened, Failure> {
    device::open(decoding_device(config), config.pipeline.threads, Duration::from_secs(config.pipeline.stall_s))
}

/// The CPU backend, for what computes nowhere else.
///
/// # Errors
/// When the config names another device.
pub fn cpu_backend(config: &RunConfig) -> Result<CpuBackend, Failure> {
    if config.pipeline.device != "cpu" {
        let what = format!("this command computes on the CPU alone, and pipeline.device is \"{}\"", config.pipeline.device);
        return Err(Failure::new(Exit::Device, what, "set pipeline.device=cpu"));
    }
    Ok(CpuBackend::new(config.pipeline.threads)?)
}

/// A launch.
pub struct Launch<'a> {
    /// The run.
    pub setup: &'a Setup,
    /// Its folder; exists.
    pub run_dir: PathBuf,
    /// Checkpoints to resume from, one per variant.
    pub resume: Vec<PathBuf>,
    /// Step resumed from.
    pub resumed_from: Option<u64>,
    /// Identity of this launch.
    pub run_id: String,
    /// Port of the live page on 127.0.0.1 (0: any free one), if one is wanted.
    pub http: Option<u16>,
}

/// What the run will use, by the same plan that `drafthorse plan` prints.
fn plan_event(setup: &Setup) -> Plan {
    let p = &setup.config.pipeline;
    let kind = if p.device == "cuda" { estimate::Kind::Gpu } else { estimate::Kind::Cpu };
    let placement = Placement { targets: p.targets.clone(), drafters: p.drafters.clone() };
    let memory = Programs::new(setup, &setup.config.batch, kind).memory(&placement, setup.variants[0].name.is_some());
    let capacity_bytes = if kind == estimate::Kind::Cpu { available_memory() } else { None };
    let devices = memory
        .into_iter()
        .map(|d| DevicePlan {
            device: d.device,
            planned_bytes: d.total_bytes,
            capacity_bytes,
            parts: d.parts.into_iter().map(|p| MemoryPart { name: p.name, size_bytes: p.size_bytes }).collect(),
        })
        .collect();
    Plan { devices, total_steps: Some(setup.total_steps), predicted_tokens_per_s: None }
}

/// What a launch checks before it begins, without beginning; gives what a person should know.
///
/// # Errors
/// As the launch itself: a checkpoint or a drafter to start from that cannot be used.
pub fn check_begin(setup: &Setup, run_dir: &Path, resume: &[PathBuf]) -> Result<Vec<String>, Failure> {
    Ok(Resume::open(setup, &options(run_dir, resume.to_owned()))?.notices)
}

fn options(run_dir: &Path, resume: Vec<PathBuf>) -> Options {
    let command_line = std::env::args().collect();
    Options { run_dir: run_dir.to_owned(), resume, build_id: BUILD_ID.into(), command_line, grace: GRACE, on_stuck: end_stuck }
}

/// SHA-256 of the resolved config.
pub fn config_hash(config: &RunConfig) -> String {
    sha256_hex(config.to_toml().as_bytes())
}

/// Threads that hang in a driver or on a dead disk cannot be joined: says who, and ends the process.
fn end_stuck(names: &[String], cause: &Cause) {
    tell(format!("error: {cause}"));
    tell(format!(
        "  {} did not come back within {} s and cannot be waited for; checkpoints on disk are intact",
        names.join(", "),
        GRACE.as_secs()
    ));
    std::process::exit(i32::from(exit_of_cause(cause).code()));
}

/// Takes the run folder for this process; the lock ends with it, however it ends.
fn lock_run(run_dir: &Path) -> Result<File, Failure> {
    let path = run_dir.join("lock");
    let open = || File::options().create(true).truncate(false).read(true).write(true).open(&path);
    let mut file = open().map_err(|e| Failure::file("open", &path, &e))?;
    match file.try_lock() {
        Ok(()) => {
            let pid = std::process::id().to_string();
            file.set_len(0).and_then(|()| file.write_all(pid.as_bytes())).map_err(|e| Failure::file("write", &path, &e))?;
            Ok(file)
        }
        Err(TryLockError::WouldBlock) => {
            let holder = std::fs::read_to_string(&path).unwrap_or_default();
            let what = format!("{} is the folder of a run that is going on (process {})", run_dir.display(), holder.trim());
            Err(Failure::new(Exit::BadInput, what, "wait for it or stop it, or give this run another name"))
        }
        Err(TryLockError::Error(e)) => Err(Failure::file("lock", &path, &e)),
    }
}

/// Trains on the config's device. `watch` runs on its own thread and reads events until they end.
///
/// # Errors
/// Whatever ended the run before its time.
pub fn launch<B: Backend>(
    launch: Launch<'_>,
    backend: &B,
    cancel: &Cancel,
    screen: Screen,
    watch: impl FnOnce(Subscription) + Send,
) -> Result<Outcome, Failure> {
    let setup = launch.setup;
    let _lock = lock_run(&launch.run_dir)?;
    let options = options(&launch.run_dir, launch.resume);
    // Before the folder's record is replaced: a refused resume leaves it as it was.
    let resume = Resume::open(setup, &options)?;
    let file = launch.run_dir.join(CONFIG_FILE);
    std::fs::write(&file, setup.config.to_toml()).map_err(|e| Failure::file("write", &file, &e))?;
    let telemetry = Telemetry::start(TelemetryOptions::new(&launch.run_dir, &launch.run_id))?;
    let events = telemetry.subscribe(4096);
    let recorder = telemetry.recorder();
    recorder.record(Event::Run(Identity {
        build_id: BUILD_ID.into(),
        config_hash: config_hash(&setup.config),
        dataset_hash: setup.builder.dataset().fingerprint().to_owned(),
        command_line: options.command_line.clone(),
        host: std::fs::read_to_string("/proc/sys/kernel/hostname").map(|h| h.trim().to_owned()).unwrap_or_default(),
        pid: std::process::id(),
        started_t: unix_ms(),
        backend: setup.config.pipeline.device.clone(),
        total_steps: Some(setup.total_steps),
        resumed_from_step: launch.resumed_from,
    }));
    recorder.record(Event::Plan(plan_event(setup)));
    let server = launch.http.map(|port| HttpServer::start(&telemetry, port)).transpose()?;
    if let Some(server) = &server {
        screen.note(format!("live page  {} (this machine only)", server.info().url));
    }
    let gpus = if setup.config.pipeline.device == "cuda" { GpuWatch::start(recorder.clone()) } else { None };
    if setup.config.pipeline.device == "cuda" && gpus.is_none() {
        recorder.warn(
            "no_gpu_readings",
            "nvidia-smi is not there, so GPU use, power and temperature are not recorded\nput it on PATH",
        );
    }
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(events));
        let outcome = train(setup, backend, &options, resume, &recorder, cancel);
        drop(gpus);
        drop(server);
        // The writer ends first, which ends the watcher's events; the run's own result matters more than telemetry's.
        let closed = telemetry.shutdown();
        if let Err(panic) = watcher.join() {
            std::panic::resume_unwind(panic);
        }
        let outcome = outcome.map_err(|e| stopped(&launch.run_dir, setup, e))?;
        closed?;
        Ok(outcome)
    })
}

/// A run that ended on request without finishing its step is no failure of anybody's: says what is left of it.
fn stopped(run_dir: &Path, setup: &Setup, failure: RunFailure) -> Failure {
    match failure {
        RunFailure::Run(e) if e.kind() == Kind::Stopped => {
            let newest = newest(&variant_dir(run_dir, setup.variants[0].name.as_deref()));
            let todo = match newest {
                Some(path) => format!("steps after {} are lost; `--resume auto` goes on from there", path.display()),
                None => "there is no checkpoint yet, so the next start begins anew".to_owned(),
            };
            Failure::new(Exit::Stopped, format!("aborted: {}", e.cause.error), todo)
        }
        other => other.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_folder_belongs_to_one_process_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = lock_run(dir.path()).unwrap();
        let told = lock_run(dir.path()).unwrap_err().lines().unwrap();
        assert!(told.contains(&format!("process {}", std::process::id())), "{told}");
        drop(first);
        lock_run(dir.path()).unwrap();
    }
}
