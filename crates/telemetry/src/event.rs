//! The events of a run: plain, typed, versioned data, one JSON object a line.
//!
//! Refuses: any reference to how training works inside; a field is a number, a string or a list of them.
//! Invariants: field names end in their unit (`step_ms`, `size_bytes`); a float that is not finite is written as the strings
//! `"NaN"`, `"Infinity"` or `"-Infinity"` (JSON has no such numbers, and a loss that is NaN must survive the journey);
//! an event written by this version is read back equal.

use crate::float;
use crate::float::list as floats;
use serde::{Deserialize, Serialize};

/// Version of the event and status format. It grows when a reader of the older format would misunderstand a line.
pub const SCHEMA_VERSION: u32 = 1;

/// One line of `events.jsonl`: an event with its time, run and place in the sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    /// Format version, [`SCHEMA_VERSION`].
    pub v: u32,
    /// Unix time in milliseconds at which the event was recorded (not written).
    pub t: u64,
    /// The launch that this event belongs to; a resumed run has a new one.
    pub run_id: String,
    /// Position in the file, from 1; it goes on when a run folder is reused. A gap means that lines could not be written.
    pub seq: u64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// What happened. `kind` names the variant in the JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    /// Who runs: the first event of a launch.
    Run(Identity),
    /// A start-up phase (or a long pause after the gate) of one worker, with its progress.
    Phase(Phase),
    /// Every worker is ready; training begins.
    Gate(Gate),
    /// What the run will use, known before it starts.
    Plan(Plan),
    /// One optimizer step.
    Step(Step),
    /// Where every stage stands, between steps; sent by the watchdog when a step takes long.
    Pipeline(Pipeline),
    /// A held-out evaluation.
    HeldOut(HeldOut),
    /// A checkpoint that is complete on disk.
    Checkpoint(Checkpoint),
    /// Exported drafter weights that are complete on disk.
    Export(Export),
    /// Something a person should know; it does not stop the run.
    Warning(Warning),
    /// A reading of one GPU.
    Gpu(GpuSample),
    /// A worker failed; the run ends.
    Failure(Failure),
    /// The run ended because it was asked to.
    Stopped(Stopped),
    /// The run ended with all its steps done.
    Done(Done),
}

impl Event {
    /// The `kind` tag of the JSON.
    pub fn kind(&self) -> &'static str {
        match self {
            Event::Run(_) => "run",
            Event::Phase(_) => "phase",
            Event::Gate(_) => "gate",
            Event::Plan(_) => "plan",
            Event::Step(_) => "step",
            Event::Pipeline(_) => "pipeline",
            Event::HeldOut(_) => "held_out",
            Event::Checkpoint(_) => "checkpoint",
            Event::Export(_) => "export",
            Event::Warning(_) => "warning",
            Event::Gpu(_) => "gpu",
            Event::Failure(_) => "failure",
            Event::Stopped(_) => "stopped",
            Event::Done(_) => "done",
        }
    }

    /// Whether the event comes often and each one matters little; these are dropped first when the queue fills.
    pub fn is_bulk(&self) -> bool {
        matches!(self, Event::Step(_) | Event::Pipeline(_) | Event::Gpu(_) | Event::Phase(Phase { done: false, .. }))
    }
}

/// Who runs, so that a watcher can tell whether this is the code it means.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Identity of the executable that runs (as reported by the executable itself).
    pub build_id: String,
    /// Hash of the resolved config.
    pub config_hash: String,
    /// Hash of the dataset.
    pub dataset_hash: String,
    /// Command line, program first.
    pub command_line: Vec<String>,
    /// Host name as seen from inside.
    pub host: String,
    /// Process id as seen from inside.
    pub pid: u32,
    /// Unix time in milliseconds at which the process started.
    pub started_t: u64,
    /// `cpu`, `cuda`, …
    pub backend: String,
    /// Optimizer steps of the whole run, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// The step that this launch resumes after, if it resumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_from_step: Option<u64>,
}

/// Progress of one worker in one phase.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// Phase, e.g. `target weights`.
    pub name: String,
    /// Worker, e.g. `target 0` or `run`.
    pub worker: String,
    /// Device, e.g. `gpu 3` or `cpu`.
    pub device: String,
    /// Units done so far; must grow to count as progress.
    pub progress: u64,
    /// Units in all, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// What is counted: `bytes`, `rows`, `graphs`, …
    pub unit: String,
    /// Whether the phase has ended well.
    pub done: bool,
    /// How long this phase may go without progress before it counts as stalled; the reader's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
}

/// The gate opened.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Gate {
    /// Milliseconds from process start to the gate.
    pub startup_ms: u64,
}

/// What the run will use.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Memory per device.
    pub devices: Vec<DevicePlan>,
    /// Optimizer steps of the whole run, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// Predicted training rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_tokens_per_s: Option<f64>,
}

/// Memory planned on one device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicePlan {
    /// Device, as in the other events.
    pub device: String,
    /// All bytes planned.
    pub planned_bytes: u64,
    /// Bytes that the device has, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<u64>,
    /// What the planned bytes are for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<MemoryPart>,
}

/// A named share of a device's planned memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPart {
    /// E.g. `weights`, `slots`, `arena`, `optimizer`.
    pub name: String,
    /// Bytes.
    pub size_bytes: u64,
}

/// One optimizer step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Step number, from 1, over all launches of the run.
    pub step: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Next batch of the epoch, from 0.
    pub batch: u64,
    /// Σ w·CE / Σ w over the step, in nats.
    #[serde(with = "float")]
    pub loss: f64,
    /// Learning rate of this step.
    #[serde(with = "float")]
    pub lr: f64,
    /// Gradient norm before clipping.
    #[serde(with = "float")]
    pub grad_norm: f64,
    /// Share of right argmaxes per slot 1..B-1.
    #[serde(with = "floats")]
    pub accuracy: Vec<f32>,
    /// Mean probability of the label per slot 1..B-1.
    #[serde(default, with = "floats", skip_serializing_if = "Vec::is_empty")]
    pub label_probability: Vec<f32>,
    /// 1 + mean over blocks of the accepted prefix, in tokens.
    #[serde(with = "float")]
    pub expected_acceptance: f64,
    /// Tokens of the step's batches.
    pub tokens: u64,
    /// Tokens per second of this step.
    #[serde(with = "float")]
    pub tokens_per_s: f64,
    /// Wall time from the end of the step before to the end of this one.
    #[serde(with = "float")]
    pub step_ms: f64,
    /// Samples in the step's batches.
    pub rows: u64,
    /// Draft blocks trained.
    pub blocks: u64,
    /// Useful FLOPs per second over the measured GEMM ceiling, 0..1, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Whether this step's update was skipped because loss or gradient norm was not finite.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// Steps skipped so far for that reason, over the whole run.
    pub non_finite_skipped: u64,
    /// Where time went since the step before.
    #[serde(default)]
    pub pipeline: Pipeline,
    /// Name of the drafter config in a sweep; absent with replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

/// Time and fill of the pipeline over an interval.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Pipeline {
    /// Wall time that the sample covers.
    #[serde(with = "float")]
    pub interval_ms: f64,
    /// One entry per worker.
    #[serde(default)]
    pub stages: Vec<StageSample>,
    /// Fill of the channels now.
    #[serde(default)]
    pub channels: Vec<ChannelSample>,
    /// Fill of the slots now, per drafter.
    #[serde(default)]
    pub slots: Vec<SlotSample>,
    /// Units of work that all workers have done so far in this launch (micro-batches, batches, …); what grows here is progress.
    #[serde(default)]
    pub progress: u64,
}

/// The kinds of stage, in the order in which a batch meets them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageKind {
    /// Reads and packs batches on the CPU.
    Prefetcher,
    /// Runs the frozen target.
    Target,
    /// Trains the drafter.
    Drafter,
}

impl StageKind {
    /// Name, singular.
    pub fn name(self) -> &'static str {
        match self {
            StageKind::Prefetcher => "prefetcher",
            StageKind::Target => "target",
            StageKind::Drafter => "drafter",
        }
    }
}

/// How one worker spent an interval. What is left of it after busy, wait and blocked is unaccounted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageSample {
    /// Kind of stage.
    pub stage: StageKind,
    /// Worker, e.g. `target 0`.
    pub worker: String,
    /// Device, e.g. `gpu 0`. Workers that share a device name the same one.
    pub device: String,
    /// Time at work.
    #[serde(with = "float")]
    pub busy_ms: f64,
    /// Time without input: it waited for the stage before it.
    #[serde(with = "float")]
    pub wait_ms: f64,
    /// Time without room for output: it was held up by the stage after it.
    #[serde(with = "float")]
    pub blocked_ms: f64,
    /// Where the worker stands now, e.g. `backward, micro-batch 3 of 16`. When it waits for another worker it begins with
    /// `waiting`, as in `waiting for a filled slot`: in a stall the one that does not wait is the one to look at.
    pub at: String,
}

/// Fill of one channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelSample {
    /// E.g. `batches` or `filled slots 0`.
    pub name: String,
    /// Items in it now.
    pub depth: u64,
    /// Items that fit.
    pub capacity: u64,
}

/// Fill of one drafter's slots. Those neither free nor filled are being written or read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotSample {
    /// The drafter that owns the slots.
    pub worker: String,
    /// Empty slots.
    pub free: u64,
    /// Slots with features that no one reads yet.
    pub filled: u64,
    /// All slots.
    pub total: u64,
}

/// A held-out evaluation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HeldOut {
    /// The step after which it was made.
    pub step: u64,
    /// Σ w·CE / Σ w in nats.
    #[serde(with = "float")]
    pub loss: f64,
    /// Share of right argmaxes per slot 1..B-1.
    #[serde(with = "floats")]
    pub accuracy: Vec<f32>,
    /// 1 + mean over blocks of the accepted prefix, in tokens.
    #[serde(with = "float")]
    pub expected_acceptance: f64,
    /// Acceptance length measured by real speculative decoding, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tau: Option<f64>,
    /// Time that it took.
    #[serde(with = "float")]
    pub elapsed_s: f64,
    /// Name of the drafter config in a sweep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

/// A checkpoint that is complete on disk.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The step after which it was made.
    pub step: u64,
    /// Where it lies.
    pub path: String,
    /// `latest`, `best`, `stop`, …
    pub role: String,
    /// Bytes written.
    pub size_bytes: u64,
    /// Time that it took.
    #[serde(with = "float")]
    pub elapsed_s: f64,
}

/// Exported weights that are complete on disk.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Export {
    /// The step whose weights these are.
    pub step: u64,
    /// Where they lie.
    pub path: String,
    /// Layout, e.g. `dflash` or `speculators`.
    pub format: String,
    /// Bytes written.
    pub size_bytes: u64,
    /// Time that it took.
    #[serde(with = "float")]
    pub elapsed_s: f64,
}

/// Something a person should know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Short stable name, e.g. `non_finite`; warnings with one code are counted together.
    pub code: String,
    /// What, where and what to do.
    pub text: String,
}

/// A reading of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuSample {
    /// Device, as in the other events.
    pub device: String,
    /// Model name.
    pub name: String,
    /// Share of time with a kernel running, 0..100.
    #[serde(with = "float")]
    pub utilization_percent: f64,
    /// Bytes in use on the device, by everyone.
    pub memory_used_bytes: u64,
    /// Bytes that the device has.
    pub memory_total_bytes: u64,
    /// Power drawn.
    #[serde(with = "float")]
    pub power_w: f64,
    /// Temperature.
    #[serde(with = "float")]
    pub temperature_c: f64,
}

/// A worker failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Worker, e.g. `target 0`.
    pub worker: String,
    /// Phase, e.g. `warm-up and capture` or `train`.
    pub phase: String,
    /// Device.
    pub device: String,
    /// What went wrong, and what to do.
    pub cause: String,
}

/// The run ended because it was asked to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// Last step done.
    pub step: u64,
    /// Who asked, e.g. `SIGTERM`.
    pub reason: String,
    /// The checkpoint to resume from, if one was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
}

/// The run ended with all its steps done.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Steps done in all.
    pub steps: u64,
    /// Wall time of this launch.
    #[serde(with = "float")]
    pub elapsed_s: f64,
    /// Last measured acceptance length, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tau: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope(event: Event) -> Envelope {
        Envelope { v: SCHEMA_VERSION, t: 1_700_000_000_123, run_id: "r1".into(), seq: 7, event }
    }

    fn round_trip(event: Event) -> Envelope {
        let line = serde_json::to_string(&envelope(event)).unwrap();
        assert!(!line.contains('\n'));
        serde_json::from_str(&line).unwrap()
    }

    fn one_of_each() -> Vec<Event> {
        let stage = StageSample {
            stage: StageKind::Target,
            worker: "target 0".into(),
            device: "gpu 0".into(),
            busy_ms: 10.5,
            wait_ms: 0.25,
            blocked_ms: 1.0,
            at: "layer 3".into(),
        };
        let pipeline = Pipeline {
            interval_ms: 12.0,
            stages: vec![stage],
            channels: vec![ChannelSample { name: "batches".into(), depth: 1, capacity: 4 }],
            slots: vec![SlotSample { worker: "drafter 0".into(), free: 1, filled: 2, total: 4 }],
            progress: 17,
        };
        vec![
            Event::Run(Identity { build_id: "b".into(), total_steps: Some(9), ..Default::default() }),
            Event::Phase(Phase { name: "target weights".into(), progress: 3, total: Some(5), ..Default::default() }),
            Event::Gate(Gate { startup_ms: 1234 }),
            Event::Plan(Plan {
                devices: vec![DevicePlan {
                    device: "gpu 0".into(),
                    planned_bytes: 5,
                    capacity_bytes: Some(6),
                    parts: vec![MemoryPart { name: "arena".into(), size_bytes: 5 }],
                }],
                total_steps: None,
                predicted_tokens_per_s: Some(1.5),
            }),
            Event::Step(Step {
                step: 3,
                loss: 0.1 + 0.2,
                lr: 6e-4,
                accuracy: vec![0.1, 0.7],
                label_probability: vec![0.3],
                mfu: Some(0.41),
                skipped: true,
                pipeline: pipeline.clone(),
                variant: Some("a".into()),
                ..Default::default()
            }),
            Event::Pipeline(pipeline),
            Event::HeldOut(HeldOut { step: 3, tau: Some(4.2), ..Default::default() }),
            Event::Checkpoint(Checkpoint { step: 3, role: "best".into(), ..Default::default() }),
            Event::Export(Export { format: "dflash".into(), ..Default::default() }),
            Event::Warning(Warning { code: "c".into(), text: "two\nlines".into() }),
            Event::Gpu(GpuSample { device: "gpu 0".into(), power_w: 300.5, ..Default::default() }),
            Event::Failure(Failure { worker: "target 0".into(), cause: "x".into(), ..Default::default() }),
            Event::Stopped(Stopped { step: 3, reason: "SIGTERM".into(), checkpoint: Some("p".into()) }),
            Event::Done(Done { steps: 3, elapsed_s: 1.5, tau: None }),
        ]
    }

    #[test]
    fn every_kind_survives_one_line_of_json() {
        for event in one_of_each() {
            let value = serde_json::to_value(envelope(event.clone())).unwrap();
            assert_eq!(value["kind"], event.kind());
            assert_eq!(round_trip(event.clone()), envelope(event));
        }
    }

    #[test]
    fn floats_that_are_not_finite_survive() {
        let back = round_trip(Event::Step(Step {
            loss: f64::NAN,
            grad_norm: f64::INFINITY,
            lr: f64::NEG_INFINITY,
            accuracy: vec![f32::NAN, 0.5],
            ..Default::default()
        }));
        let Event::Step(step) = back.event else { panic!("kind changed") };
        assert!(step.loss.is_nan());
        assert_eq!(step.grad_norm, f64::INFINITY);
        assert_eq!(step.lr, f64::NEG_INFINITY);
        assert!(step.accuracy[0].is_nan() && step.accuracy[1] == 0.5);
    }

    #[test]
    fn the_line_has_the_documented_head() {
        let line = serde_json::to_string(&envelope(Event::Gate(Gate { startup_ms: 5 }))).unwrap();
        assert_eq!(line, r#"{"v":1,"t":1700000000123,"run_id":"r1","seq":7,"kind":"gate","startup_ms":5}"#);
    }
}
