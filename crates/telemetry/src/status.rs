//! The digest of a run: what its events so far amount to, small enough to be rewritten twice a second.
//!
//! Refuses: clocks and files; a status is a function of the events applied to it, so that a watcher who replays the events
//! gets what the run itself wrote (but for the fields that only the writer knows: `t`, `telemetry` and `verdict`).
//! Invariants: `progress` grows only when a counter of the run grows (a step, a phase's units, a finished phase, an evaluation,
//! a file written), never because an event arrived; a new launch in the same folder starts a new status.

use crate::event::{
    ChannelSample, Checkpoint, Done, Envelope, Event, Export, Failure, GpuSample, HeldOut, Identity, Phase, Pipeline, Plan,
    SCHEMA_VERSION, SlotSample, StageKind, Step, Stopped, Warning,
};
use crate::float;
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};

/// Weight that an average keeps from one sample to the next.
const KEEP: f64 = 0.9;
/// Distinct warning codes kept; later codes are counted under `other`.
const MAX_WARNINGS: usize = 50;

/// The digest of a run, as in `status.json` and `/status`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Format version.
    pub v: u32,
    /// Unix time in milliseconds, by the run's clock, at which this was written.
    pub t: u64,
    /// The launch.
    pub run_id: String,
    /// Sequence number of the last event applied.
    pub seq: u64,
    /// What the run is doing, as judged when this was written.
    pub verdict: Verdict,
    /// Who runs.
    pub identity: Option<Identity>,
    /// Last state of every phase of every worker, in order of first appearance.
    pub phases: Vec<PhaseState>,
    /// Time at which the gate opened.
    pub gate_t: Option<u64>,
    /// What the run planned to use.
    pub plan: Option<Plan>,
    /// Steps that the run is to make, if known.
    pub total_steps: Option<u64>,
    /// The last step.
    pub step: Option<Step>,
    /// Per drafter config of a sweep: its last step and evaluation. Empty with replicas.
    pub variants: Vec<VariantState>,
    /// Sums of this launch.
    pub totals: Totals,
    /// Averages of this launch.
    pub rates: Rates,
    /// How the loss moves.
    pub loss_trend: LossTrend,
    /// Counts everything that is progress.
    pub progress: u64,
    /// Time of the last progress.
    pub last_progress_t: u64,
    /// Units of work done by all workers, as the pipeline last said.
    #[serde(default)]
    pub work: u64,
    /// Time shares and whereabouts of every worker.
    pub stages: Vec<StageState>,
    /// Fill of the channels.
    pub channels: Vec<ChannelSample>,
    /// Fill of the slots.
    pub slots: Vec<SlotSample>,
    /// The last evaluation.
    pub held_out: Option<HeldOut>,
    /// The evaluation with the highest τ, or without τ the highest expected acceptance.
    pub best_held_out: Option<HeldOut>,
    /// The last checkpoint.
    pub checkpoint: Option<Checkpoint>,
    /// The last export.
    pub export: Option<Export>,
    /// Last reading per GPU.
    pub gpus: Vec<GpuSample>,
    /// Warnings, by code, newest last.
    pub warnings: Vec<WarningState>,
    /// How the run ended, if it has.
    pub outcome: Option<Outcome>,
    /// What telemetry itself lost.
    pub telemetry: TelemetryHealth,
}

/// Last state of one phase of one worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseState {
    /// As reported.
    #[serde(flatten)]
    pub phase: Phase,
    /// Time of its first event.
    pub started_t: u64,
    /// Time at which its counter last grew.
    pub last_progress_t: u64,
}

/// Last state of one drafter config of a sweep.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VariantState {
    /// Its name.
    pub variant: String,
    /// Last step.
    pub step: u64,
    /// Loss of that step.
    #[serde(with = "float")]
    pub loss: f64,
    /// Expected acceptance of that step.
    #[serde(with = "float")]
    pub expected_acceptance: f64,
    /// Its last evaluation.
    pub held_out: Option<HeldOut>,
}

/// Sums over this launch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Steps done by this launch.
    pub steps: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Samples trained on.
    pub rows: u64,
    /// Draft blocks trained.
    pub blocks: u64,
    /// Steps skipped as not finite, over all launches.
    pub non_finite_skipped: u64,
    /// Warnings of every code.
    pub warnings: u64,
}

/// Averages that forget (each sample keeps 0.9 of the one before it).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Wall time of a step.
    pub step_ms: f64,
    /// Longest step of this launch.
    pub longest_step_ms: f64,
    /// Time to the last step at this rate, if the number of steps is known.
    pub remaining_s: Option<f64>,
}

/// How the loss moves.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LossTrend {
    /// Forgetting average of the finite losses.
    pub average: f64,
    /// Lowest value that the average had once it was warm.
    pub lowest: Option<f64>,
    /// Finite losses seen.
    pub samples: u64,
    /// Steps in a row, up to the last one, whose loss or gradient norm was not finite.
    pub non_finite_in_a_row: u64,
}

/// Time shares and whereabouts of one worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageState {
    /// Kind of stage.
    pub stage: StageKind,
    /// Worker.
    pub worker: String,
    /// Device.
    pub device: String,
    /// Share of time at work, 0..1.
    pub busy_share: f64,
    /// Share of time without input, 0..1.
    pub wait_share: f64,
    /// Share of time without room for output, 0..1.
    pub blocked_share: f64,
    /// Wall time behind the shares, forgetting.
    pub window_ms: f64,
    /// Where it stands.
    pub at: String,
    /// Time since when it has stood there.
    pub at_since_t: u64,
}

/// Warnings of one code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarningState {
    /// Code.
    pub code: String,
    /// Latest text.
    pub text: String,
    /// How many.
    pub count: u64,
    /// Time of the first.
    pub first_t: u64,
    /// Time of the last.
    pub last_t: u64,
}

/// How the run ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// A worker failed.
    Failure(Failure),
    /// Stopped on request.
    Stopped(Stopped),
    /// All steps done.
    Done(Done),
}

/// What telemetry itself lost and wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TelemetryHealth {
    /// Events on disk from this launch.
    pub written_events: u64,
    /// Events dropped because the queue was full.
    pub dropped_events: u64,
    /// Events that could not be written (disk full, say).
    pub unwritten_events: u64,
    /// Failed writes of `status.json` or TensorBoard files.
    pub failed_writes: u64,
    /// Last reason for a failed write.
    pub last_error: Option<String>,
    /// How often `status.json` is rewritten at most; a watcher who sees it stand still for much longer knows the run is gone.
    pub status_interval_ms: u64,
}

impl Status {
    /// Takes in the next event.
    pub fn apply(&mut self, envelope: &Envelope) {
        if let Event::Run(identity) = &envelope.event {
            let telemetry = std::mem::take(&mut self.telemetry);
            *self =
                Status { telemetry, total_steps: identity.total_steps, identity: Some(identity.clone()), ..Default::default() };
            self.advance(envelope.t);
        }
        self.v = SCHEMA_VERSION;
        self.t = self.t.max(envelope.t);
        self.run_id.clone_from(&envelope.run_id);
        self.seq = envelope.seq;
        match &envelope.event {
            Event::Run(_) => {}
            Event::Phase(phase) => self.apply_phase(phase, envelope.t),
            Event::Gate(_) => {
                if self.gate_t.is_none() {
                    self.gate_t = Some(envelope.t);
                    self.advance(envelope.t);
                }
            }
            Event::Plan(plan) => {
                self.total_steps = plan.total_steps.or(self.total_steps);
                self.plan = Some(plan.clone());
            }
            Event::Step(step) => self.apply_step(step, envelope.t),
            Event::Pipeline(pipeline) => self.apply_pipeline(pipeline, envelope.t),
            Event::HeldOut(held_out) => self.apply_held_out(held_out, envelope.t),
            Event::Checkpoint(checkpoint) => {
                if self.checkpoint.as_ref() != Some(checkpoint) {
                    self.advance(envelope.t);
                }
                self.checkpoint = Some(checkpoint.clone());
            }
            Event::Export(export) => {
                if self.export.as_ref() != Some(export) {
                    self.advance(envelope.t);
                }
                self.export = Some(export.clone());
            }
            Event::Warning(warning) => self.apply_warning(warning, envelope.t),
            Event::Gpu(sample) => match self.gpus.iter_mut().find(|gpu| gpu.device == sample.device) {
                Some(gpu) => gpu.clone_from(sample),
                None => self.gpus.push(sample.clone()),
            },
            Event::Failure(failure) => {
                // The first failure is the cause; those after it are workers that were cancelled by it.
                if !matches!(self.outcome, Some(Outcome::Failure(_))) {
                    self.outcome = Some(Outcome::Failure(failure.clone()));
                }
            }
            Event::Stopped(stopped) => self.end(Outcome::Stopped(stopped.clone())),
            Event::Done(done) => self.end(Outcome::Done(done.clone())),
        }
    }

    /// Whether the run has ended.
    pub fn is_over(&self) -> bool {
        self.outcome.is_some()
    }

    fn advance(&mut self, t: u64) {
        self.progress += 1;
        self.last_progress_t = self.last_progress_t.max(t);
    }

    fn end(&mut self, outcome: Outcome) {
        if self.outcome.is_none() {
            self.outcome = Some(outcome);
        }
    }

    fn apply_phase(&mut self, phase: &Phase, t: u64) {
        let known = self.phases.iter_mut().find(|state| state.phase.name == phase.name && state.phase.worker == phase.worker);
        let grew = match known {
            Some(state) => {
                // A phase that starts over after it was done (an evaluation, say) is a new one.
                let restarted = state.phase.done && !phase.done;
                let grew = restarted || phase.progress > state.phase.progress || (phase.done && !state.phase.done);
                if restarted {
                    state.started_t = t;
                }
                if grew {
                    state.last_progress_t = t;
                }
                if grew || phase.progress == state.phase.progress {
                    state.phase.clone_from(phase);
                }
                grew
            }
            None => {
                self.phases.push(PhaseState { phase: phase.clone(), started_t: t, last_progress_t: t });
                true
            }
        };
        if grew {
            self.advance(t);
        }
    }

    fn apply_step(&mut self, step: &Step, t: u64) {
        let last = match &step.variant {
            None => self.step.as_ref().map(|last| last.step),
            Some(name) => self.variants.iter().find(|variant| variant.variant == *name).map(|variant| variant.step),
        };
        if last.is_some_and(|last| step.step <= last) {
            // The same step again is not progress, whatever it says.
            return;
        }
        self.gate_t.get_or_insert(t);
        self.advance(t);
        let first_of_step = self.step.as_ref().is_none_or(|last| step.step > last.step);
        if let Some(name) = &step.variant {
            let variant = self.variant(name);
            variant.step = step.step;
            variant.loss = step.loss;
            variant.expected_acceptance = step.expected_acceptance;
        }
        self.apply_loss(step);
        if first_of_step {
            self.totals.steps += 1;
            self.totals.tokens += step.tokens;
            self.totals.rows += step.rows;
            self.rates.longest_step_ms = self.rates.longest_step_ms.max(step.step_ms);
            let first = self.totals.steps == 1;
            blend(&mut self.rates.tokens_per_s, step.tokens_per_s, first);
            blend(&mut self.rates.step_ms, step.step_ms, first);
            self.rates.remaining_s = self.total_steps.map(|n| n.saturating_sub(step.step) as f64 * self.rates.step_ms / 1e3);
            self.apply_pipeline(&step.pipeline, t);
        }
        self.totals.blocks += step.blocks;
        self.totals.non_finite_skipped = self.totals.non_finite_skipped.max(step.non_finite_skipped);
        self.step = Some(step.clone());
    }

    fn apply_loss(&mut self, step: &Step) {
        let trend = &mut self.loss_trend;
        if step.skipped || !step.loss.is_finite() || !step.grad_norm.is_finite() {
            trend.non_finite_in_a_row += 1;
            return;
        }
        trend.non_finite_in_a_row = 0;
        trend.samples += 1;
        blend(&mut trend.average, step.loss, trend.samples == 1);
        // Thirty samples forget the first loss to within 5 %.
        if trend.samples >= 30 {
            trend.lowest = Some(trend.lowest.map_or(trend.average, |lowest| lowest.min(trend.average)));
        }
    }

    fn apply_pipeline(&mut self, pipeline: &Pipeline, t: u64) {
        // Work inside a long step: a counter that grew, so the run gets on.
        if pipeline.progress > self.work {
            self.work = pipeline.progress;
            self.advance(t);
        }
        for sample in &pipeline.stages {
            let index = match self.stages.iter().position(|state| state.worker == sample.worker) {
                Some(index) => index,
                None => {
                    self.stages.push(StageState {
                        stage: sample.stage,
                        worker: sample.worker.clone(),
                        device: sample.device.clone(),
                        busy_share: 0.0,
                        wait_share: 0.0,
                        blocked_share: 0.0,
                        window_ms: 0.0,
                        at: sample.at.clone(),
                        at_since_t: t,
                    });
                    self.stages.len() - 1
                }
            };
            let state = &mut self.stages[index];
            if state.at != sample.at {
                state.at.clone_from(&sample.at);
                state.at_since_t = t;
            }
            if pipeline.interval_ms > 0.0 {
                let kept_ms = state.window_ms * KEEP;
                let window_ms = kept_ms + pipeline.interval_ms;
                for (share, ms) in [
                    (&mut state.busy_share, sample.busy_ms),
                    (&mut state.wait_share, sample.wait_ms),
                    (&mut state.blocked_share, sample.blocked_ms),
                ] {
                    *share = ((*share * kept_ms + ms) / window_ms).clamp(0.0, 1.0);
                }
                state.window_ms = window_ms;
            }
        }
        self.stages.sort_by_key(|state| state.stage);
        if !pipeline.channels.is_empty() {
            self.channels.clone_from(&pipeline.channels);
        }
        if !pipeline.slots.is_empty() {
            self.slots.clone_from(&pipeline.slots);
        }
    }

    fn apply_held_out(&mut self, held_out: &HeldOut, t: u64) {
        let key = |h: &HeldOut| (h.step, h.tau.is_some(), h.variant.clone());
        if self.held_out.as_ref().map(key) != Some(key(held_out)) {
            self.advance(t);
        }
        if let Some(name) = &held_out.variant {
            self.variant(name).held_out = Some(held_out.clone());
        }
        // A measured τ outranks any expectation; among equals in kind the greater value wins.
        let rank = |h: &HeldOut| (h.tau.is_some(), h.tau.unwrap_or(h.expected_acceptance));
        if self.best_held_out.as_ref().is_none_or(|best| rank(held_out) > rank(best)) {
            self.best_held_out = Some(held_out.clone());
        }
        self.held_out = Some(held_out.clone());
    }

    fn apply_warning(&mut self, warning: &Warning, t: u64) {
        self.totals.warnings += 1;
        let full = self.warnings.len() >= MAX_WARNINGS && !self.warnings.iter().any(|known| known.code == warning.code);
        let code = if full { "other" } else { warning.code.as_str() };
        let mut state = match self.warnings.iter().position(|known| known.code == code) {
            Some(index) => self.warnings.remove(index),
            None => WarningState { code: code.to_owned(), text: String::new(), count: 0, first_t: t, last_t: t },
        };
        state.text.clone_from(&warning.text);
        state.count += 1;
        state.last_t = t;
        self.warnings.push(state);
    }

    fn variant(&mut self, name: &str) -> &mut VariantState {
        let index = match self.variants.iter().position(|variant| variant.variant == name) {
            Some(index) => index,
            None => {
                self.variants.push(VariantState { variant: name.to_owned(), ..Default::default() });
                self.variants.len() - 1
            }
        };
        &mut self.variants[index]
    }
}

fn blend(average: &mut f64, value: f64, first: bool) {
    if value.is_finite() {
        *average = if first { value } else { *average * KEEP + value * (1.0 - KEEP) };
    }
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
