//! A training run: one prefetcher, T target loops, D drafter loops, a checkpoint writer, and the coordinator that starts and ends them.
//!
//! Job: put the workers of DESIGN 2 on their threads, pass the gate, and report how the run ended. The loops themselves are in [`crate::loops`].
//! Refuses to print and to exit: events go to telemetry, the outcome to the caller. Invariants: no thread outlives [`train`]; a failed run returns its first
//! cause; a run that was asked to stop saved a checkpoint first.

use crate::checkpoint::{self, CheckpointError, Loaded, Meta, Snapshot};
use crate::frozen::Backend;
use crate::loops::{Loop, Packet, Shared, Vote, drafter_loop, look, prefetcher, target_loop};
use crate::metrics::Tally;
use crate::pipeline::board::{Board, Watchdog};
use crate::pipeline::cancel::{Cancel, Cause, Kind};
use crate::pipeline::conveyor::Conveyor;
use crate::pipeline::crew::{self, Alarm, RunError, Watch};
use crate::pipeline::gate::{Gate, GateEvent, Limits, Phase, Role};
use crate::pipeline::layout::{Assignment, Layout, Mode};
use crate::pipeline::reduce::{AllReduce, CHUNK, Meeting};
use crate::setup::Setup;
use crate::stages::Stages;
use crate::state::{StateError, check_init};
use drafthorse_telemetry::Recorder;
use drafthorse_telemetry::{Checkpoint, Done, Event, Failure, Gate as GateOpen, Phase as PhaseEvent, Stopped};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// Longest time for which telemetry is not told where the stages stand, however long a step takes.
const PULSE: Duration = Duration::from_secs(2);

/// What the caller decides about a launch.
#[derive(Clone, Debug)]
pub struct Options {
    /// The run folder; exists.
    pub run_dir: PathBuf,
    /// Checkpoint folder to resume from, per variant, in order; empty starts anew.
    pub resume: Vec<PathBuf>,
    /// Build that runs, for provenance.
    pub build_id: String,
    /// Command line, for provenance.
    pub command_line: Vec<String>,
    /// How long threads may take to come back after a cancellation before `on_stuck` is told.
    pub grace: Duration,
    /// Told the workers that have not come back (stuck in a driver or a dead disk) and why the run ended. [`train`] can only wait for them; a
    /// process that must end does so here.
    pub on_stuck: fn(&[String], &Cause),
}

/// How a run that did not fail ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Steps done over all launches.
    pub steps: u64,
    /// Why it stopped early, if it was asked to.
    pub stopped: Option<String>,
    /// Exported drafters, one per variant, when all steps were done.
    pub exports: Vec<PathBuf>,
    /// Last checkpoint of the first variant.
    pub checkpoint: Option<PathBuf>,
    /// Held-out tally of the first variant at the end, if it was measured.
    pub held_out: Option<Tally>,
    /// Variants of a sweep that diverged and were ended alone: name, and how.
    pub diverged: Vec<(String, String)>,
}

/// How a run failed.
#[derive(Debug, thiserror::Error)]
pub enum RunFailure {
    /// A worker failed, stalled, or the run was aborted.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Too many steps in a row were not finite.
    #[error(
        "{0}\n  resume from an earlier checkpoint with a lower optimizer.lr, or look for broken rows with `drafthorse inspect`"
    )]
    Diverged(RunError),
    /// What to begin with cannot be.
    #[error(transparent)]
    Resume(#[from] ResumeError),
}

/// Why a launch cannot begin where it should.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The drafter of `drafter.init_from`.
    #[error(transparent)]
    Init(#[from] StateError),
}

impl From<CheckpointError> for RunFailure {
    fn from(error: CheckpointError) -> RunFailure {
        RunFailure::Resume(error.into())
    }
}

impl RunFailure {
    /// Failed, stopped or stalled.
    pub fn kind(&self) -> Kind {
        match self {
            RunFailure::Run(e) | RunFailure::Diverged(e) => e.kind(),
            RunFailure::Resume(_) => Kind::Failed,
        }
    }
}

/// Bytes of one checkpoint of a variant: fp32 weights and two moments.
pub fn variant_bytes(variant: &crate::setup::Variant) -> u64 {
    drafthorse_models::tensor_names::draft_sources(&variant.draft).iter().map(|t| 12 * t.elements() as u64).sum()
}

/// Bytes of one checkpoint of every variant.
pub fn checkpoint_bytes(setup: &Setup) -> u64 {
    setup.variants.iter().map(variant_bytes).sum()
}

/// Where variant `name` of a run keeps its files.
pub fn variant_dir(run_dir: &Path, name: Option<&str>) -> PathBuf {
    name.map_or_else(|| run_dir.to_path_buf(), |n| run_dir.join(n))
}

/// What a checkpoint of this run says of itself before its first step.
pub fn first_meta(setup: &Setup, variant: usize, options: &Options) -> Meta {
    Meta {
        version: checkpoint::VERSION,
        step: 0,
        total_steps: setup.total_steps,
        adam_t: 0,
        batches: setup.batch_keys(),
        target: format!("{}+{}", setup.target.identity(), setup.target.weights_id()),
        skipped: 0,
        skipped_in_row: 0,
        global_batch: setup.config.optimizer.global_batch,
        drafters: setup.config.pipeline.drafters.len(),
        dataset: setup.builder.dataset().fingerprint().to_owned(),
        seed: setup.config.seed,
        drafter: serde_json::to_value(&setup.variants[variant].draft).expect("a drafter config is writable"),
        build_id: options.build_id.clone(),
        command_line: options.command_line.clone(),
        held_out_loss: None,
        best: None,
    }
}

/// Where a launch begins: anew, or with checkpoints that were read and proven.
pub struct Resume {
    /// The step that it goes on after; 0 anew.
    pub step: u64,
    /// Lines a person should see.
    pub notices: Vec<String>,
    loaded: Vec<Option<Arc<Loaded>>>,
}

impl Resume {
    /// Reads the checkpoints that `options` names, or looks at the drafters that the variants start from. Changes nothing, so that a launch that is refused
    /// here leaves everything as it was.
    ///
    /// # Errors
    /// When a checkpoint is damaged or belongs to another run, or a drafter to start from is not what the config describes.
    pub fn open(setup: &Setup, options: &Options) -> Result<Resume, ResumeError> {
        let mut resume = Resume { step: 0, notices: Vec::new(), loaded: Vec::new() };
        for (i, path) in options.resume.iter().enumerate() {
            let loaded = Loaded::open(path)?;
            loaded.meta.check(path, &first_meta(setup, i, options))?;
            resume.step = loaded.meta.step;
            resume.notices.extend(loaded.notice());
            resume.loaded.push(Some(Arc::new(loaded)));
        }
        if options.resume.is_empty() {
            for variant in &setup.variants {
                if let Some(folder) = &variant.config.drafter.init_from {
                    resume.notices.extend(check_init(folder, &variant.draft, &setup.target)?);
                }
            }
        }
        Ok(resume)
    }
}

/// File in a run folder that holds what the backend chose by timing.
const CHOICES_FILE: &str = "algorithms.tsv";

/// A run that goes on computes as it did before: another algorithm sums in another order.
fn adopt_choices<B: Backend>(backend: &B, run_dir: &Path, recorder: &Recorder) {
    let path = run_dir.join(CHOICES_FILE);
    let Ok(text) = std::fs::read_to_string(&path) else { return };
    if let Err(why) = backend.adopt_choices(&text) {
        recorder.warn(
            "algorithms",
            format!("{} is not used ({why}): products are timed anew, and results may differ in a bit", path.display()),
        );
    }
}

/// Trains. Blocks until every worker has ended.
///
/// # Errors
/// [`RunFailure`].
pub fn train<B: Backend>(
    setup: &Setup,
    backend: &B,
    options: &Options,
    resume: Resume,
    recorder: &Recorder,
    cancel: &Cancel,
) -> Result<Outcome, RunFailure> {
    let started = Instant::now();
    let start_step = resume.step;
    for notice in &resume.notices {
        recorder.warn("resume", notice.clone());
    }
    for variant in &setup.variants {
        let folder = variant_dir(&options.run_dir, variant.name.as_deref());
        // Checkpoints and exports are written by different threads: neither may depend on the other for the folder.
        std::fs::create_dir_all(&folder).map_err(|source| CheckpointError::Io {
            what: "make",
            path: folder.clone(),
            source,
            todo: "check space and permissions".into(),
        })?;
        let root = folder.join("checkpoints");
        for path in checkpoint::tidy_for_launch(&root, start_step)? {
            let text = format!(
                "a checkpoint of a step after {start_step} was moved to {}: this launch goes another way",
                path.display()
            );
            recorder.warn("superseded", text);
        }
    }
    adopt_choices(backend, &options.run_dir, recorder);
    let loaded = Mutex::new(resume.loaded);
    let p = &setup.config.pipeline;
    let sweep = setup.variants[0].name.is_some();
    let layout = Layout {
        targets: p.targets.len(),
        drafters: p.drafters.len(),
        mode: if sweep { Mode::Sweep } else { Mode::Replicas },
        assignment: Assignment::FirstFree,
        queue_depth: p.queue_depth,
    };
    let board = Board::default();
    let gate = Gate::new(cancel, &board, Limits::default(), gate_listener(recorder.clone(), started));
    let conveyor: Conveyor<Packet, <B::Exec as drafthorse_graph::Executor>::Slot> =
        Conveyor::new(layout, cancel, &board).expect("the config has at least one of each");
    let drafters = layout.drafters;
    let diverged = AtomicBool::new(false);
    let ends: Mutex<Vec<Option<crate::loops::End>>> = Mutex::new((0..drafters).map(|_| None).collect());
    let (snapshots, written) = mpsc::sync_channel::<(PathBuf, Snapshot, &'static str)>(0);
    // Owned out here: if the writer fails, its error is the cause before any sender can notice that it is gone.
    let written = Mutex::new(written);
    let stages = Mutex::new(Stages::default());
    let shared = Shared {
        setup,
        backend,
        options,
        recorder,
        cancel,
        conveyor: &conveyor,
        board: &board,
        stages: &stages,
        loaded: &loaded,
        start_step,
        sweep,
        reduce: AllReduce::new(drafters, CHUNK, cancel),
        votes: Meeting::<Vote>::new(drafters, cancel),
        tallies: Meeting::<Tally>::new(drafters, cancel),
        diverged: &diverged,
        ends: &ends,
    };
    let grace = options.grace;
    let watch = Watch {
        watchdog: Watchdog::new(&board, cancel, Duration::from_secs(p.stall_s)).with_gate(&gate),
        every: Duration::from_millis(200),
        grace,
        on_alarm: Box::new(|alarm| match alarm {
            // Said between steps too, so that a long step is not taken for a stall.
            Alarm::Look => {
                if gate.is_open() && stages.lock().unwrap_or_else(PoisonError::into_inner).is_old(&board, PULSE) {
                    recorder.record(Event::Pipeline(look(&stages, &board, &conveyor)));
                }
            }
            Alarm::Stalled(cause) => {
                recorder.warn("stalled", format!("{cause}\n{}", cause.report.as_deref().unwrap_or_default()));
            }
            Alarm::Overslept(late) => {
                let text = format!(
                    "this process stood still for {:.1} s (a stop signal, or the machine slept): pipeline.stall_s is counted anew",
                    late.as_secs_f64()
                );
                recorder.warn("overslept", text);
            }
            Alarm::NotComingBack(names) => {
                recorder.warn("stuck", format!("still waiting for {} after {grace:?}", names.join(", ")));
                if let Some(cause) = cancel.cause() {
                    (options.on_stuck)(names, &cause);
                }
            }
        }),
    };
    let coordinator = board.register("coordinator", None);
    let result = crew::run(cancel, &board, &coordinator, Some(watch), |crew| {
        let own = gate.register(&coordinator, Role::Other)?;
        own.report(Phase::Checks, 1.0, "config, files, disk")?;
        let enter = |name: String, device: Option<String>, role| {
            let station = board.register(name, device);
            gate.register(&station, role).map(|entrant| (entrant, station))
        };
        let shared = &shared;
        let (entrant, station) = enter("prefetcher".into(), None, Role::Other)?;
        crew.spawn(station, move |station| prefetcher(shared, entrant, station));
        for (number, &device) in p.targets.iter().enumerate() {
            let (entrant, station) = enter(format!("target {number}"), Some(backend.device_name(device)), Role::Target)?;
            crew.spawn(station, move |station| target_loop(shared, Loop { number, device }, entrant, station));
        }
        for (number, &device) in p.drafters.iter().enumerate() {
            let (entrant, station) = enter(format!("drafter {number}"), Some(backend.device_name(device)), Role::Drafter)?;
            let snapshots = snapshots.clone();
            crew.spawn(station, move |station| drafter_loop(shared, Loop { number, device }, snapshots, entrant, station));
        }
        drop(snapshots);
        let station = board.register("checkpoint writer", None);
        let written = &written;
        crew.spawn(station, move |station| {
            let written = written.lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                // Waiting, not busy: between two checkpoints nothing is expected of this worker, however long that is.
                let waiting = station.waiting("a snapshot");
                let Ok((root, snapshot, role)) = written.recv() else { return Ok(()) };
                drop(waiting);
                station.busy("writing a checkpoint");
                let begun = Instant::now();
                let (path, size_bytes) = checkpoint::save(&root, &snapshot)?;
                checkpoint::prune(&root, setup.config.checkpoint.keep_last, snapshot.meta.best.map(|(_, step)| step))?;
                recorder.record(Event::Checkpoint(Checkpoint {
                    step: snapshot.meta.step,
                    path: path.display().to_string(),
                    role: role.into(),
                    size_bytes,
                    elapsed_s: begun.elapsed().as_secs_f64(),
                }));
                station.advance(1);
            }
        });
        gate.seal();
        own.pass()?;
        if let Some(text) = backend.choices() {
            let path = options.run_dir.join(CHOICES_FILE);
            std::fs::write(&path, text)
                .map_err(|e| format!("cannot write {}: {e}\n  free space or check permissions", path.display()))?;
        }
        // Every drafter has restored its state: the files' copies in memory are not needed any more.
        shared.loaded.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(())
    });
    let ends = std::mem::take(&mut *ends.lock().unwrap_or_else(PoisonError::into_inner));
    match result {
        Ok(()) if ends.iter().flatten().all(|end| end.diverged.is_some()) => {
            let last = ends.iter().flatten().find_map(|end| end.diverged.clone()).unwrap_or_default();
            let cause =
                Arc::new(Cause::new(Kind::Failed, "the sweep", format!("every variant diverged, the first with: {last}")));
            record_end(setup, options, recorder, &cause);
            Err(RunFailure::Diverged(RunError { cause, others: Vec::new() }))
        }
        Ok(()) => Ok(outcome(setup, options, recorder, &ends, started)),
        Err(error) => {
            record_end(setup, options, recorder, &error.cause);
            Err(if diverged.load(Ordering::Relaxed) { RunFailure::Diverged(error) } else { RunFailure::Run(error) })
        }
    }
}

fn outcome(
    setup: &Setup,
    options: &Options,
    recorder: &Recorder,
    ends: &[Option<crate::loops::End>],
    started: Instant,
) -> Outcome {
    let first = ends[0].as_ref().expect("a run without failure has an end for every drafter");
    let root = variant_dir(&options.run_dir, setup.variants[0].name.as_deref());
    let checkpoint = checkpoint::newest(&root);
    let steps = ends.iter().flatten().map(|end| end.step).max().unwrap_or(first.step);
    let named = |(i, end): (usize, &Option<crate::loops::End>)| {
        Some((setup.variants.get(i)?.name.clone()?, end.as_ref()?.diverged.clone()?))
    };
    let diverged: Vec<(String, String)> = ends.iter().enumerate().filter_map(named).collect();
    if let Some((name, error)) = diverged.first() {
        // Recorded at the end, because a run is over with its first failure.
        let cause = Cause::new(Kind::Failed, format!("variant `{name}`"), error.clone());
        record_end(setup, options, recorder, &cause);
    }
    match &first.stopped {
        Some(reason) => recorder.record(Event::Stopped(Stopped {
            step: steps,
            reason: reason.clone(),
            checkpoint: checkpoint.as_ref().map(|p| p.display().to_string()),
        })),
        None => recorder.record(Event::Done(Done { steps, elapsed_s: started.elapsed().as_secs_f64(), tau: None })),
    }
    Outcome {
        steps,
        stopped: first.stopped.clone(),
        exports: ends.iter().flatten().filter_map(|e| e.export.clone()).collect(),
        checkpoint,
        held_out: first.held_out.clone(),
        diverged,
    }
}

fn record_end(setup: &Setup, options: &Options, recorder: &Recorder, cause: &Cause) {
    if cause.kind == Kind::Stopped {
        // Aborted on request: whatever was done after the newest checkpoint is lost.
        let root = variant_dir(&options.run_dir, setup.variants[0].name.as_deref()).join("checkpoints");
        let newest = checkpoint::list(&root).pop();
        recorder.record(Event::Stopped(Stopped {
            step: newest.as_ref().map_or(0, |(step, _)| *step),
            reason: cause.error.clone(),
            checkpoint: newest.map(|(_, path)| path.display().to_string()),
        }));
        return;
    }
    recorder.record(Event::Failure(Failure {
        worker: cause.worker.clone(),
        phase: cause.phase.clone(),
        device: cause.device.clone().unwrap_or_default(),
        cause: cause.error.clone(),
    }));
}

/// Gate events as telemetry. A phase is done when its worker enters the next one, and all are when the gate opens.
fn gate_listener(recorder: Recorder, started: Instant) -> impl FnMut(&GateEvent) + Send + 'static {
    let mut present: HashMap<String, PhaseEvent> = HashMap::new();
    move |event| {
        if event.phase == Phase::Open {
            present
                .drain()
                .for_each(|(_, left)| recorder.record(Event::Phase(PhaseEvent { progress: 1000, done: true, ..left })));
            recorder.record(Event::Gate(GateOpen { startup_ms: started.elapsed().as_millis() as u64 }));
            return;
        }
        let told = PhaseEvent {
            name: event.phase.label().into(),
            worker: event.worker.clone().unwrap_or_else(|| "run".into()),
            device: event.device.clone().unwrap_or_default(),
            progress: (event.progress * 1000.0) as u64,
            total: Some(1000),
            unit: "‰".into(),
            done: event.progress >= 1.0,
            deadline_ms: event.deadline.map(|d| d.as_millis() as u64),
        };
        match present.insert(told.worker.clone(), told.clone()) {
            Some(left) if left.name != told.name && !left.done => {
                recorder.record(Event::Phase(PhaseEvent { progress: 1000, done: true, ..left }));
            }
            _ => {}
        }
        recorder.record(Event::Phase(told));
    }
}
