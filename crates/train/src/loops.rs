//! The loops that workers run: prefetcher, target, drafter.
//!
//! Job: what each worker does between its start and its end, in the order that DESIGN 2 fixes. Refuses to start threads (that is [`crate::run`]).
//! A variant of a sweep that diverges is ended alone: its worker goes on giving batches back and voting, so that the others are not held up.
//! Invariants: every rank takes the same decisions at the same step (stop, skip, measure, save), because they decide on gathered votes; a slot is
//! released once its last reader is enqueued, and a backend orders the next write behind that read (on the CPU it has happened); held-out batches follow the step they measure.

use crate::capture::{capture, capture_program};
use crate::checkpoint::{Loaded, Meta, Snapshot};
use crate::drafter::{Drafter, StepReport, drafter_program};
use crate::frozen::{Backend, FrozenSource};
use crate::metrics::Tally;
use crate::pipeline::board::{Board, Station, What};
use crate::pipeline::cancel::{Cancel, Cause, Kind};
use crate::pipeline::conveyor::{Conveyor, DrafterEnd, Filled};
use crate::pipeline::crew::BoxError;
use crate::pipeline::gate::{Entrant, Phase};
use crate::pipeline::layout::Batch as Routed;
use crate::pipeline::reduce::{AllReduce, Meeting, Member, Reducer};
use crate::rounds::{Round, Rounds};
use crate::run::{Options, first_meta, variant_dir};
use crate::setup::{Setup, Variant, adam_config};
use crate::stages::Stages;
use crate::state::{export_weights, load_folder, provenance, restore, snapshot};
use drafthorse_data::batch::Batch;
use drafthorse_graph::Executor;
use drafthorse_models::draft_json::Format;
use drafthorse_models::export::Verifier;
use drafthorse_telemetry::Recorder;
use drafthorse_telemetry::{Event, Export, HeldOut, Pipeline, Step};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// What travels on the conveyor.
pub struct Packet {
    batch: Arc<Batch>,
}

impl Routed for Packet {
    fn index(&self) -> u64 {
        self.batch.index
    }
}

/// Number and device of a loop.
#[derive(Clone, Copy, Debug)]
pub struct Loop {
    /// Its number among its kind; a drafter's rank.
    pub number: usize,
    /// Device index.
    pub device: u32,
}

/// What a rank brings to the end of a step.
#[derive(Clone, Debug)]
pub struct Vote {
    stop: Option<String>,
    /// This variant has diverged and only passes batches on.
    lost: bool,
    tally: Tally,
    tokens: u64,
    rows: u64,
    blocks: u64,
}

/// How a drafter ended.
#[derive(Clone, Debug)]
pub struct End {
    /// Steps done.
    pub step: u64,
    /// Why it stopped early.
    pub stopped: Option<String>,
    /// Its export.
    pub export: Option<PathBuf>,
    /// Last held-out tally.
    pub held_out: Option<Tally>,
    /// How this variant of a sweep diverged, if it did.
    pub diverged: Option<String>,
}

/// What all loops see.
pub struct Shared<'a, B: Backend> {
    /// The run.
    pub setup: &'a Setup,
    /// Devices.
    pub backend: &'a B,
    /// The launch.
    pub options: &'a Options,
    /// Telemetry.
    pub recorder: &'a Recorder,
    /// The token.
    pub cancel: &'a Cancel,
    /// Batches and slots.
    pub conveyor: &'a Conveyor<Packet, <B::Exec as Executor>::Slot>,
    /// Who does what.
    pub board: &'a Board,
    /// What the board showed when it was last told; one memory for steps and for the looks between them, so that no time counts twice.
    pub stages: &'a Mutex<Stages>,
    /// Checkpoints to resume from, per variant.
    pub loaded: &'a Mutex<Vec<Option<Arc<Loaded>>>>,
    /// First step of this launch.
    pub start_step: u64,
    /// Drafters are variants, not replicas.
    pub sweep: bool,
    /// Gradients.
    pub reduce: AllReduce,
    /// Step ends.
    pub votes: Meeting<Vote>,
    /// Held-out results.
    pub tallies: Meeting<Tally>,
    /// Set when a rank gave up on non-finite steps.
    pub diverged: &'a AtomicBool,
    /// How each drafter ended.
    pub ends: &'a Mutex<Vec<Option<End>>>,
}

/// Where everything stands, and how time went since the last look.
pub fn look<S: Send + Sync + 'static>(stages: &Mutex<Stages>, board: &Board, conveyor: &Conveyor<Packet, S>) -> Pipeline {
    let layout = conveyor.layout();
    let mut stages = stages.lock().unwrap_or_else(PoisonError::into_inner);
    stages.sample(board, &conveyor.counters(), layout.queue_depth, layout.slots_per_pool())
}

impl<B: Backend> Shared<'_, B> {
    fn rounds(&self) -> Rounds<impl Fn(u32) -> u64 + '_> {
        Rounds::new(|e| self.setup.builder.schedule().epoch_batches(e), self.setup.config.optimizer.global_batch)
    }

    /// Whether the held-out batches follow after `done` steps.
    fn measures_after(&self, done: u64) -> bool {
        let every = self.setup.config.eval.every;
        every > 0 && (done.is_multiple_of(every) || done == self.setup.total_steps)
    }

    fn held_out_batches(&self) -> u64 {
        self.setup.builder.schedule().held_out().len() as u64
    }
}

/// Builds batches in order and puts them on the conveyor.
///
/// # Errors
/// When a row cannot be read or the run is cancelled.
pub fn prefetcher<B: Backend>(shared: &Shared<'_, B>, entrant: Entrant, station: &Station) -> Result<(), BoxError> {
    let mut feeder = shared.conveyor.feeder(station)?;
    let builder = &shared.setup.builder;
    entrant.report(Phase::Dataset, 1.0, format!("{} rows", builder.dataset().len()))?;
    entrant.pass()?;
    let mut rounds = shared.rounds();
    let held_out = shared.held_out_batches();
    let mut put = |batch: Batch| feeder.put(Packet { batch: Arc::new(batch) });
    if shared.start_step == 0 && shared.measures_after(0) {
        for j in 0..held_out {
            station.busy(What::new("building a held-out batch").batch(j));
            if !put(builder.build_held_out(j)?)? {
                return Ok(());
            }
        }
    }
    'steps: for step in shared.start_step..shared.setup.total_steps {
        let round = rounds.locate(step);
        for i in round.first..round.first + round.count {
            station.busy(What::new("building a batch").batch(i));
            if !put(builder.build(i)?)? {
                break 'steps;
            }
        }
        if shared.measures_after(step + 1) {
            for j in 0..held_out {
                station.busy(What::new("building a held-out batch").batch(j));
                if !put(builder.build_held_out(j)?)? {
                    break 'steps;
                }
            }
        }
    }
    feeder.close();
    Ok(())
}

/// Runs the target over every batch it can take.
///
/// # Errors
/// When the device fails or the run is cancelled.
pub fn target_loop<B: Backend>(shared: &Shared<'_, B>, at: Loop, entrant: Entrant, station: &Station) -> Result<(), BoxError> {
    let setup = shared.setup;
    let b = &setup.config.batch;
    entrant.report(Phase::Plan, 1.0, "capture pass")?;
    let program =
        capture_program(shared.backend.act(), &setup.target.config, b.token_budget as usize, b.max_rows, &setup.captured);
    entrant.report(Phase::Arenas, 0.0, "arena")?;
    let source = FrozenSource { target: &setup.target, draft: None };
    let mut exec = shared.backend.executor(at.device, Arc::clone(&program.program), &source, &mut |done, all| {
        // A cancelled run shows at the next wait; a report that fails only means that.
        let _ = entrant.report(Phase::Weights, done as f32 / all.max(1) as f32, format!("{} of {} MiB", done >> 20, all >> 20));
    })?;
    entrant.report(Phase::WarmUp, 0.0, "capture")?;
    exec.prepare()?;
    let mut end = shared.conveyor.target(at.number, station)?;
    entrant.pass()?;
    while let Some(mut work) = end.take()? {
        let batch = Arc::clone(&work.batch().batch);
        station.busy(What::new("target forward").batch(batch.index));
        capture(&mut exec, &program.pass, &batch, &mut work)?;
        work.fill();
    }
    Ok(())
}

type Snapshots = mpsc::SyncSender<(PathBuf, Snapshot, &'static str)>;

/// Trains one drafter: a replica, or a variant of a sweep.
///
/// # Errors
/// When the device fails, the run diverges, or it is cancelled.
pub fn drafter_loop<B: Backend>(
    shared: &Shared<'_, B>,
    at: Loop,
    snapshots: Snapshots,
    entrant: Entrant,
    station: &Station,
) -> Result<(), BoxError> {
    let setup = shared.setup;
    let index = if shared.sweep { at.number } else { 0 };
    let variant = &setup.variants[index];
    entrant.report(Phase::Plan, 1.0, "training passes")?;
    let (act, target) = (shared.backend.act(), &setup.target.config);
    let program =
        drafter_program(act, target, &variant.draft, &setup.captured, setup.train_shape(), adam_config(&variant.config));
    entrant.report(Phase::Arenas, 0.0, "arena, slots")?;
    let source = FrozenSource { target: &setup.target, draft: Some(&variant.draft) };
    let exec = shared.backend.executor(at.device, Arc::clone(&program.program), &source, &mut |done, all| {
        let _ = entrant.report(Phase::Weights, done as f32 / all.max(1) as f32, "embedding and head");
    })?;
    let pools = shared.conveyor.layout().pools();
    if at.number < pools {
        let slots = (0..shared.conveyor.layout().slots_per_pool()).map(|_| exec.new_slot()).collect::<Result<Vec<_>, _>>()?;
        shared.conveyor.stock(at.number, slots)?;
    }
    let mut drafter = Drafter::new(exec, program);
    let mut meta = first_meta(setup, index, shared.options);
    let loaded = shared.loaded.lock().unwrap_or_else(PoisonError::into_inner).get(index).cloned().flatten();
    match (loaded, &variant.config.drafter.init_from) {
        (Some(loaded), _) => {
            restore(&mut drafter, &loaded)?;
            meta =
                Meta { build_id: meta.build_id, command_line: meta.command_line, drafters: meta.drafters, ..loaded.meta.clone() };
        }
        (None, Some(folder)) => {
            for (name, values) in load_folder(folder, &variant.draft)? {
                let t = drafter.program().weights.iter().find(|(n, _)| *n == name).expect("shapes were compared").1;
                drafter.load_weight(t, &values)?;
            }
        }
        (None, None) => drafter.initialise(variant.config.seed, variant.config.drafter.init_std)?,
    }
    entrant.report(Phase::WarmUp, 0.0, "capture")?;
    drafter.exec().prepare()?;
    let worker = Worker {
        shared,
        rank: at.number,
        variant,
        drafter,
        station,
        end: shared.conveyor.drafter(at.number, station)?,
        reducer: shared.reduce.join(at.number, station)?,
        votes: shared.votes.join(at.number, station)?,
        tallies: shared.tallies.join(at.number, station)?,
        snapshots,
        meta,
        held_out: None,
        lost: None,
        last_step: Instant::now(),
    };
    entrant.pass()?;
    let end = worker.work()?;
    shared.ends.lock().unwrap_or_else(PoisonError::into_inner)[at.number] = Some(end);
    Ok(())
}

struct Worker<'a, B: Backend> {
    shared: &'a Shared<'a, B>,
    rank: usize,
    variant: &'a Variant,
    drafter: Drafter<B::Exec>,
    station: &'a Station,
    end: DrafterEnd<Packet, <B::Exec as Executor>::Slot>,
    reducer: Reducer,
    votes: Member<Vote>,
    tallies: Member<Tally>,
    snapshots: Snapshots,
    meta: Meta,
    held_out: Option<Tally>,
    lost: Option<String>,
    last_step: Instant,
}

impl<B: Backend> Worker<'_, B> {
    fn work(mut self) -> Result<End, BoxError> {
        let shared = self.shared;
        let mut rounds = shared.rounds();
        if shared.start_step == 0 && shared.measures_after(0) {
            self.measure(0)?;
        }
        self.last_step = Instant::now();
        let mut stopped = None;
        for step in shared.start_step..shared.setup.total_steps {
            let round = rounds.locate(step);
            let all = if self.lost.is_some() { self.pass_over(round)? } else { self.step(step, round)? };
            self.station.advance(1);
            if all.iter().all(|v| v.lost) {
                shared.conveyor.halt();
                break;
            }
            stopped = all.iter().find_map(|v| v.stop.clone());
            let done = step + 1;
            if stopped.is_some() && done < shared.setup.total_steps {
                shared.conveyor.halt();
                self.save("stop")?;
                break;
            }
            stopped = None;
            let improved = shared.measures_after(done) && self.measure(done)?;
            let every = shared.setup.config.checkpoint.every;
            let due = done == shared.setup.total_steps || (every > 0 && done.is_multiple_of(every));
            // The best is saved when it is measured: only what is on disk can be kept.
            if improved || due {
                self.save(if improved { "best" } else { "latest" })?;
            }
            self.last_step = Instant::now();
        }
        while self.end.next()?.is_some() {
            // Batches that were under way when the run was halted are given back unread.
        }
        if stopped.is_none() && self.meta.adam_t == 0 && self.lost.is_none() {
            let error =
                "no step of the run was finite, so nothing was trained: look for NaN in the target's weights and in the data";
            self.lose(error.to_owned())?;
        }
        let exports = stopped.is_none() && self.owns_files() && self.lost.is_none();
        let export = if exports { Some(self.export()?) } else { None };
        Ok(End { step: self.meta.step, stopped, export, held_out: self.held_out, diverged: self.lost })
    }

    /// One optimizer step, with its vote.
    fn step(&mut self, step: u64, round: Round) -> Result<Arc<[Vote]>, BoxError> {
        let shared = self.shared;
        let vote = self.train(round)?;
        self.reduce()?;
        self.station.busy("optimizer");
        let report = self.drafter.optimize(self.variant.config.optimizer.rate(step, shared.setup.total_steps))?;
        let vote = Vote { tally: self.drafter.tally()?, stop: shared.cancel.stop_requested(), ..vote };
        let all = self.votes.gather(vote)?;
        self.book(step, &report);
        self.record(step, round, &report, &all);
        if self.meta.skipped_in_row >= self.variant.config.optimizer.max_skipped {
            let skipped = self.meta.skipped_in_row;
            self.lose(format!("{skipped} steps in a row were not finite; the last one is step {}", step + 1))?;
        }
        Ok(all)
    }

    /// A step of a variant that has diverged: gives its batches back unread and votes with the others.
    fn pass_over(&mut self, round: Round) -> Result<Arc<[Vote]>, BoxError> {
        for i in round.first..round.first + round.count {
            self.next(i, false)?.release();
        }
        let tally = Tally::new(self.variant.draft.block_size);
        let stop = self.shared.cancel.stop_requested();
        Ok(self.votes.gather(Vote { stop, lost: true, tally, tokens: 0, rows: 0, blocks: 0 })?)
    }

    /// Gives up: the whole run, or of a sweep this variant alone.
    fn lose(&mut self, error: String) -> Result<(), BoxError> {
        let shared = self.shared;
        let Some(name) = self.variant.name.as_deref().filter(|_| shared.sweep) else {
            shared.diverged.store(true, Ordering::Relaxed);
            shared.cancel.cancel(Cause::new(Kind::Failed, self.station.name(), error.clone()));
            return Err(error.into());
        };
        shared.recorder.warn("diverged", format!("variant `{name}` diverged and is ended here, the others go on: {error}"));
        self.lost = Some(error);
        Ok(())
    }

    /// Rank 0 of replicas, every variant of a sweep.
    fn owns_files(&self) -> bool {
        self.shared.sweep || self.rank == 0
    }

    fn mine(&self, index: u64) -> bool {
        self.shared.sweep || index % self.shared.conveyor.layout().drafters as u64 == self.rank as u64
    }

    fn next(&mut self, index: u64, held_out: bool) -> Result<Filled<Packet, <B::Exec as Executor>::Slot>, BoxError> {
        let filled = self.end.next()?.ok_or("the stream ended inside a step")?;
        let batch = &filled.batch().batch;
        assert_eq!((batch.index, batch.held_out), (index, held_out), "batches arrive in order");
        Ok(filled)
    }

    fn train(&mut self, round: Round) -> Result<Vote, BoxError> {
        self.station.busy("zeroing gradients");
        self.drafter.begin_step()?;
        let mut vote = Vote { stop: None, lost: false, tally: Tally::default(), tokens: 0, rows: 0, blocks: 0 };
        for i in (round.first..round.first + round.count).filter(|&i| self.mine(i)).collect::<Vec<_>>() {
            let filled = self.next(i, false)?;
            self.station.busy(What::new("training").batch(i));
            let batch = &filled.batch().batch;
            self.drafter.train_batch(batch, filled.slot(), &mut || self.station.advance(1))?;
            vote.tokens += batch.n_tokens as u64;
            vote.rows += batch.n_seqs as u64;
            vote.blocks += batch.n_blocks as u64;
            filled.release();
        }
        Ok(vote)
    }

    fn reduce(&mut self) -> Result<(), BoxError> {
        if self.shared.sweep || self.reducer.ranks() == 1 {
            return Ok(());
        }
        self.station.busy("all-reduce");
        let mut outcome = Ok(());
        let reducer = &mut self.reducer;
        self.drafter.exec().with_grads(&mut |grads| outcome = reducer.sum(&mut [grads]))?;
        Ok(outcome?)
    }

    /// Books a step and counts those that were skipped.
    fn book(&mut self, step: u64, report: &StepReport) {
        self.meta.step = step + 1;
        self.meta.adam_t = report.adam_t;
        if report.taken {
            self.meta.skipped_in_row = 0;
            return;
        }
        self.meta.skipped += 1;
        self.meta.skipped_in_row += 1;
        let text = format!("step {} was skipped: loss {}, gradient norm {}", step + 1, report.loss, report.grad_norm);
        self.shared.recorder.warn("non_finite", text);
    }

    fn record(&mut self, step: u64, round: Round, report: &StepReport, votes: &[Vote]) {
        if !self.owns_files() {
            return;
        }
        let shared = self.shared;
        let mine = [votes[self.rank].clone()];
        let votes = if shared.sweep { &mine[..] } else { votes };
        let mut tally = Tally::new(self.variant.draft.block_size);
        votes.iter().for_each(|v| tally.merge(&v.tally));
        let sum = |f: fn(&Vote) -> u64| votes.iter().map(f).sum::<u64>();
        let seconds = self.last_step.elapsed().as_secs_f64();
        let pipeline = look(shared.stages, shared.board, shared.conveyor);
        shared.recorder.record(Event::Step(Step {
            step: step + 1,
            epoch: u64::from(round.epoch),
            batch: round.epoch_done,
            loss: f64::from(report.loss),
            lr: self.variant.config.optimizer.rate(step, shared.setup.total_steps),
            grad_norm: f64::from(report.grad_norm),
            accuracy: tally.accuracy(),
            label_probability: tally.label_probability(),
            expected_acceptance: tally.expected_acceptance(),
            tokens: sum(|v| v.tokens),
            tokens_per_s: sum(|v| v.tokens) as f64 / seconds,
            step_ms: seconds * 1e3,
            rows: sum(|v| v.rows),
            blocks: sum(|v| v.blocks),
            mfu: None,
            skipped: !report.taken,
            non_finite_skipped: self.meta.skipped,
            pipeline,
            variant: self.variant.name.clone(),
        }));
    }

    /// Measures the held-out batches; true when this is the lowest finite loss of the run so far.
    fn measure(&mut self, done: u64) -> Result<bool, BoxError> {
        let shared = self.shared;
        if shared.held_out_batches() == 0 {
            return Ok(false);
        }
        let begun = Instant::now();
        for j in (0..shared.held_out_batches()).filter(|&j| self.mine(j)).collect::<Vec<_>>() {
            let filled = self.next(j, true)?;
            if self.lost.is_some() {
                filled.release();
                continue;
            }
            self.station.busy(What::new("held-out forward").batch(j));
            self.drafter.measure_batch(&filled.batch().batch, filled.slot(), &mut || self.station.advance(1))?;
            filled.release();
        }
        let own = if self.lost.is_some() { Tally::new(self.variant.draft.block_size) } else { self.drafter.tally()? };
        let all = self.tallies.gather(own.clone())?;
        if self.lost.is_some() {
            return Ok(false);
        }
        let mut tally = if shared.sweep { own } else { Tally::new(self.variant.draft.block_size) };
        if !shared.sweep {
            all.iter().for_each(|t| tally.merge(t));
        }
        let loss = tally.loss();
        self.meta.held_out_loss = Some(loss);
        let improved = done > 0 && loss.is_finite() && self.meta.best.is_none_or(|(best, _)| loss < best);
        if improved {
            self.meta.best = Some((loss, done));
        }
        if self.owns_files() {
            shared.recorder.record(Event::HeldOut(HeldOut {
                step: done,
                loss,
                accuracy: tally.accuracy(),
                expected_acceptance: tally.expected_acceptance(),
                tau: None,
                elapsed_s: begun.elapsed().as_secs_f64(),
                variant: self.variant.name.clone(),
            }));
        }
        self.held_out = Some(tally);
        Ok(improved)
    }

    fn save(&mut self, role: &'static str) -> Result<(), BoxError> {
        if !self.owns_files() || self.lost.is_some() {
            return Ok(());
        }
        self.station.busy("snapshot");
        let taken = snapshot(&mut self.drafter, self.meta.clone(), self.variant.config.to_toml())?;
        if self.shared.sweep
            && let Err(error) = taken.check_finite()
        {
            // The writer would end the whole run for it.
            return self.lose(error.to_string().lines().next().unwrap_or_default().to_owned());
        }
        let root = variant_dir(&self.shared.options.run_dir, self.variant.name.as_deref()).join("checkpoints");
        let _waiting = self.station.waiting("the checkpoint writer");
        let mut item = (root, taken, role);
        loop {
            match self.snapshots.try_send(item) {
                Ok(()) => return Ok(()),
                Err(mpsc::TrySendError::Full(back)) => item = back,
                Err(mpsc::TrySendError::Disconnected(_)) => return Err("the checkpoint writer has ended".into()),
            }
            self.shared.cancel.check()?;
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn export(&mut self) -> Result<PathBuf, BoxError> {
        self.station.busy("export");
        let begun = Instant::now();
        let (setup, options) = (self.shared.setup, self.shared.options);
        let folder = variant_dir(&options.run_dir, self.variant.name.as_deref()).join("export");
        let weights = self.drafter.weights()?;
        let target = &setup.target;
        let verifier =
            Verifier { name_or_path: target.folder.display().to_string(), architectures: target.config.architectures.clone() };
        let provenance = provenance(&Meta { build_id: options.build_id.clone(), ..self.meta.clone() });
        let report = export_weights(&folder, Format::Plain, &self.variant.draft, &weights, &verifier, &provenance)?;
        self.shared.recorder.record(Event::Export(Export {
            step: self.meta.step,
            path: folder.display().to_string(),
            format: "dflash".into(),
            size_bytes: report.file_bytes,
            elapsed_s: begun.elapsed().as_secs_f64(),
        }));
        Ok(folder)
    }
}
