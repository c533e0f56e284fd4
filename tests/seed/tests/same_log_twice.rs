//! The same log read twice: no progress taken for progress.
//!
//! What happened: a run had died; its log was read again and again, each time with the last good lines in it, and each time called healthy.
//! Here a real run folder is written, its writer ends, and it is read again later, also after its files were copied (fresh times, old content).

use drafthorse_telemetry::*;
use std::path::Path;

/// A run folder of a run that took `steps` steps and then said nothing more.
fn run_folder(steps: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let telemetry = Telemetry::start(Options::new(dir.path(), "r")).unwrap();
    let recorder = telemetry.recorder();
    recorder.record(Event::Run(Identity { build_id: "b".into(), started_t: unix_ms(), ..Default::default() }));
    recorder.record(Event::Gate(Gate::default()));
    for step in 1..=steps {
        recorder.record(Event::Step(Step { step, loss: 2.0, step_ms: 1_000.0, tokens_per_s: 1_000.0, ..Default::default() }));
    }
    telemetry.shutdown().unwrap();
    dir
}

fn read(dir: &Path) -> Status {
    read_status(dir).unwrap().expect("a status")
}

const HOUR_MS: u64 = 3_600_000;

#[test]
fn a_log_that_is_read_again_is_no_progress() {
    let dir = run_folder(20);
    let mut watcher = Watcher::new(Expected::default(), Limits::default());
    let first = read(dir.path());
    let now = first.t;
    assert_eq!(watcher.observe(&first, now + 100).state.name(), "healthy", "the run has only just written this");
    for again in 1..4 {
        let verdict = watcher.observe(&read(dir.path()), now + again * HOUR_MS);
        let State::Stalled { alive, stalled_ms, .. } = verdict.state else { panic!("reading {again}: {verdict:?}") };
        assert!(!alive && stalled_ms >= again * HOUR_MS - 1_000, "reading {again}: {stalled_ms}");
    }
}

#[test]
fn fresh_file_times_do_not_make_old_content_new() {
    let (dir, copy) = (run_folder(20), tempfile::tempdir().unwrap());
    for name in ["status.json", "events.jsonl"] {
        std::fs::copy(dir.path().join(name), copy.path().join(name)).unwrap();
    }
    let mut watcher = Watcher::new(Expected::default(), Limits::default());
    let status = read(dir.path());
    watcher.observe(&status, status.t + 100);
    let verdict = watcher.observe(&read(copy.path()), status.t + HOUR_MS);
    assert!(matches!(verdict.state, State::Stalled { alive: false, .. }), "{verdict:?}");
}

#[test]
fn events_that_were_given_are_not_given_again() {
    let dir = run_folder(20);
    let mut folder = RunFolder::new(dir.path());
    let steps = |update: &Update| update.events.iter().filter(|e| matches!(e.event, Event::Step(_))).count();
    let first = folder.poll().unwrap();
    assert_eq!((steps(&first), first.status.is_some()), (20, true));
    let second = folder.poll().unwrap();
    assert_eq!((second.events.len(), second.status, second.restarted), (0, None, false));
}

#[test]
fn a_run_that_goes_on_is_healthy_however_late_it_is_looked_at() {
    let (early, late) = (run_folder(20), run_folder(30));
    let mut watcher = Watcher::new(Expected::default(), Limits::default());
    let before = read(early.path());
    watcher.observe(&before, before.t);
    let mut after = read(late.path());
    let shift = HOUR_MS;
    (after.t, after.last_progress_t) = (after.t + shift, after.last_progress_t + shift);
    let verdict = watcher.observe(&after, after.t + 200);
    assert_eq!(verdict.state.name(), "healthy", "{verdict:?}");
}
