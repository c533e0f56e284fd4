//! A tiny run on the demo's target, for the tests of this folder.
//!
//! Job: the demo's chats as a dataset, a config of seconds, one run of it. Refuses to judge. Invariant: everything goes through the
//! public interface that the command line uses.

pub mod gpu;

use drafthorse_data::prepare::{PrepareOptions, prepare};
use drafthorse_data::tokenize::ChatTokenizer;
use drafthorse_telemetry::{Event, Recorder};
use drafthorse_train::config::RunConfig;
use drafthorse_train::frozen::CpuBackend;
use drafthorse_train::pipeline::cancel::Cancel;
use drafthorse_train::run::{Options, Resume, train};
use drafthorse_train::setup::{Setup, today};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Chats of the demo that are used.
const CHATS: usize = 120;

/// The demo's files.
fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/cli/demo")
}

/// The demo's first chats as a dataset, in `data` of a temporary folder.
///
/// # Panics
/// When they cannot be prepared.
pub fn dataset() -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let target = demo().join("target");
    let tokenizer = ChatTokenizer::load(&target, "demo", &serde_json::Map::new(), today()).expect("the demo's tokenizer");
    let all = std::fs::read_to_string(demo().join("completions.jsonl")).expect("the demo's completions");
    let some: String = all.lines().take(CHATS).map(|line| format!("{line}\n")).collect();
    let chats = dir.path().join("chats.jsonl");
    std::fs::write(&chats, some).expect("room in the temporary folder");
    prepare(&tokenizer, &PrepareOptions::new(vec![chats], dir.path().join("data")), &|_| {}).expect("the demo's chats prepare");
    dir
}

/// A one-layer drafter for the demo's target on `dataset`, four steps of two small batches; `overrides` as on the command line.
///
/// # Panics
/// When an override is wrong.
pub fn config(dataset: &TempDir, overrides: &[&str]) -> RunConfig {
    let text = format!(
        "target = {:?}\ndata = {:?}\nseed = 5\n[drafter]\nlayers = 1\n[batch]\ntoken_budget = 512\nmicro_blocks = 24\nanchors = 8\n\
         [optimizer]\nlr = 2e-3\nsteps = 4\nglobal_batch = 2\n[eval]\nevery = 0\nheld_out = {{ rows = 6 }}\n[checkpoint]\nevery = 0\n",
        demo().join("target"),
        dataset.path().join("data")
    );
    let overrides: Vec<String> = overrides.iter().map(|s| (*s).to_owned()).collect();
    RunConfig::parse(&text, "seed", &overrides).expect("the test's config")
}

/// Trains to the end; gives the run folder and the events.
///
/// # Panics
/// When the run fails.
pub fn run(config: RunConfig) -> (TempDir, Vec<Event>) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let setup = Setup::open(config, &|_, _| {}).expect("the run's checks pass");
    let backend = CpuBackend::new(Some(2)).expect("compute threads");
    let (recorder, events) = Recorder::channel(100_000);
    let options = Options {
        run_dir: dir.path().into(),
        resume: Vec::new(),
        build_id: "seed".into(),
        command_line: vec!["seed".into()],
        grace: Duration::from_secs(30),
        on_stuck: |names, cause| panic!("{names:?} did not come back after: {cause}"),
    };
    let resume = Resume::open(&setup, &options).expect("a new run resumes nothing");
    train(&setup, &backend, &options, resume, &recorder, &Cancel::new()).expect("the run ends well");
    drop(recorder);
    (dir, events.try_iter().map(|stamped| stamped.event).collect())
}
