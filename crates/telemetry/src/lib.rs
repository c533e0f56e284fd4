//! Telemetry of a run: typed events, their files, verdicts, and the ways to look at them.
//!
//! Refuses: to know what training is (plain data only, no other crate of this project) and to hold training up (it may lose
//! events, never steps).
//! Invariants: everything shown anywhere comes from one [`Status`] or from `events.jsonl`; progress means that a counter grew.

mod error;
mod event;
mod float;
mod follow;
mod gpus;
mod history;
mod http;
mod page;
mod prometheus;
mod recorder;
mod status;
mod tensorboard;
mod term;
mod verdict;

pub use error::TelemetryError;
pub use event::{
    ChannelSample, Checkpoint, DevicePlan, Done, Envelope, Event, Export, Failure, Gate, GpuSample, HeldOut, Identity,
    MemoryPart, Phase, Pipeline, Plan, SCHEMA_VERSION, SlotSample, StageKind, StageSample, Step, Stopped, Warning,
};
pub use follow::{LineTail, Lines, RunFolder, Source, Update, read_status};
pub use gpus::{GpuWatch, parse_gpus, read_gpus};
pub use history::{History, Series};
pub use http::{HTTP_FILE, HttpInfo, HttpServer, MAX_CONNECTIONS, read_http_info};
pub use page::{page_dump, page_html};
pub use prometheus::exposition;
pub use recorder::{EVENTS_FILE, Options, Recorder, STATUS_FILE, Stamped, StatusReader, Subscription, Telemetry, unix_ms};
pub use status::{
    LossTrend, Outcome, PhaseState, Rates, StageState, Status, TelemetryHealth, Totals, VariantState, WarningState,
};
pub use tensorboard::TensorBoardWriter;
pub use term::{View, render, run_terminal_view};
pub use verdict::{Expected, Limits, Stand, State, Verdict, Watcher, judge, span};
