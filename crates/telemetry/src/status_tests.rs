//! Tests of the digest: what is progress and what is not.

use super::*;
use crate::event::{Gate, StageSample};

fn apply(status: &mut Status, t: u64, event: Event) {
    let seq = status.seq + 1;
    status.apply(&Envelope { v: SCHEMA_VERSION, t, run_id: "r".into(), seq, event });
}

fn step(n: u64, loss: f64) -> Event {
    Event::Step(Step { step: n, loss, step_ms: 100.0, tokens: 10, tokens_per_s: 100.0, ..Default::default() })
}

#[test]
fn repeated_events_are_not_progress() {
    let mut status = Status::default();
    apply(&mut status, 10, Event::Run(Identity::default()));
    let phase =
        |progress, done| Event::Phase(Phase { name: "load".into(), worker: "w".into(), progress, done, ..Default::default() });
    apply(&mut status, 20, phase(1, false));
    let after_first = status.progress;
    apply(&mut status, 30, phase(1, false));
    apply(&mut status, 31, phase(0, false));
    assert_eq!((status.progress, status.last_progress_t), (after_first, 20));
    apply(&mut status, 40, phase(2, false));
    apply(&mut status, 50, phase(2, true));
    assert_eq!((status.progress, status.last_progress_t), (after_first + 2, 50));
    apply(&mut status, 60, step(1, 3.0));
    let before = status.clone();
    apply(&mut status, 70, step(1, 2.0));
    assert_eq!((status.progress, status.last_progress_t), (before.progress, 60));
    assert_eq!((status.totals.clone(), status.step.clone()), (before.totals, before.step));
    apply(&mut status, 80, Event::Warning(Warning::default()));
    apply(&mut status, 90, Event::Gpu(GpuSample::default()));
    assert_eq!(status.last_progress_t, 60);
}

#[test]
fn shares_are_weighted_by_time() {
    let mut status = Status::default();
    let sample = |interval_ms, busy_ms, at: &str| {
        let stage = StageSample {
            stage: StageKind::Drafter,
            worker: "drafter 0".into(),
            device: "gpu 0".into(),
            busy_ms,
            wait_ms: interval_ms - busy_ms,
            blocked_ms: 0.0,
            at: at.into(),
        };
        Event::Pipeline(Pipeline { interval_ms, stages: vec![stage], ..Default::default() })
    };
    apply(&mut status, 1, sample(100.0, 100.0, "forward"));
    apply(&mut status, 2, sample(910.0, 0.0, "waiting"));
    apply(&mut status, 3, sample(0.0, 0.0, "waiting"));
    let state = &status.stages[0];
    assert!((state.busy_share - 0.09).abs() < 1e-12, "{state:?}");
    assert!((state.wait_share - 0.91).abs() < 1e-12, "{state:?}");
    assert_eq!((state.at.as_str(), state.at_since_t), ("waiting", 2));
}

#[test]
fn work_inside_a_long_step_is_progress_and_its_repetition_is_not() {
    let mut status = Status::default();
    let pulse = |progress| Event::Pipeline(Pipeline { interval_ms: 1.0, progress, ..Default::default() });
    apply(&mut status, 1, Event::Run(Identity::default()));
    for (t, work, last) in [(10, 3, 10), (20, 3, 10), (30, 2, 10), (40, 4, 40)] {
        apply(&mut status, t, pulse(work));
        assert_eq!(status.last_progress_t, last, "after {work} at {t}");
    }
}

#[test]
fn a_new_launch_starts_over_and_keeps_what_telemetry_lost() {
    let mut status = Status::default();
    apply(&mut status, 1, Event::Run(Identity::default()));
    apply(&mut status, 2, step(5, 1.0));
    apply(&mut status, 3, Event::Stopped(Stopped::default()));
    status.telemetry.dropped_events = 3;
    apply(&mut status, 4, Event::Run(Identity { total_steps: Some(20), ..Default::default() }));
    assert_eq!((status.step.clone(), status.outcome.clone(), status.total_steps), (None, None, Some(20)));
    assert_eq!(status.telemetry.dropped_events, 3);
    apply(&mut status, 5, step(6, 1.0));
    assert_eq!(status.totals.steps, 1);
    assert_eq!(status.rates.remaining_s, Some(1.4));
}

#[test]
fn best_evaluation_prefers_measured_acceptance() {
    let mut status = Status::default();
    for (n, tau, expected_acceptance) in [(1, None, 5.0), (2, Some(3.0), 4.0), (3, None, 9.0), (4, Some(2.5), 9.0)] {
        apply(&mut status, n, Event::HeldOut(HeldOut { step: n, tau, expected_acceptance, ..Default::default() }));
    }
    assert_eq!(status.best_held_out.as_ref().map(|h| h.step), Some(2));
    assert_eq!(status.held_out.as_ref().map(|h| h.step), Some(4));
}

#[test]
fn warnings_gather_by_code_and_the_first_failure_is_the_cause() {
    let mut status = Status::default();
    for n in 0..60 {
        apply(&mut status, n, Event::Warning(Warning { code: format!("c{n}"), text: "x".into() }));
    }
    apply(&mut status, 99, Event::Warning(Warning { code: "c3".into(), text: "again".into() }));
    assert_eq!(status.totals.warnings, 61);
    assert_eq!(status.warnings.len(), MAX_WARNINGS + 1);
    let last = status.warnings.last().unwrap();
    assert_eq!((last.code.as_str(), last.text.as_str(), last.count, last.first_t), ("c3", "again", 2, 3));
    assert_eq!(status.warnings.iter().find(|w| w.code == "other").unwrap().count, 10);
    for cause in ["first", "second"] {
        apply(&mut status, 100, Event::Failure(Failure { cause: cause.into(), ..Default::default() }));
    }
    assert!(matches!(&status.outcome, Some(Outcome::Failure(f)) if f.cause == "first"));
}

#[test]
fn every_config_of_a_sweep_counts_and_tokens_count_once() {
    let mut status = Status::default();
    for (n, name) in [(1, "a"), (1, "b"), (2, "a"), (2, "b")] {
        let event = Step { step: n, tokens: 10, blocks: 3, variant: Some(name.into()), ..Default::default() };
        apply(&mut status, n, Event::Step(event));
    }
    assert_eq!((status.totals.steps, status.totals.tokens, status.totals.blocks), (2, 20, 12));
    assert_eq!(status.variants.iter().map(|v| (v.variant.as_str(), v.step)).collect::<Vec<_>>(), [("a", 2), ("b", 2)]);
}

#[test]
fn a_status_survives_json() {
    let mut status = Status::default();
    apply(&mut status, 1, Event::Run(Identity::default()));
    apply(&mut status, 2, Event::Gate(Gate::default()));
    apply(&mut status, 3, step(1, 0.1 + 0.2));
    apply(&mut status, 4, Event::Done(Done::default()));
    let back: Status = serde_json::from_str(&serde_json::to_string(&status).unwrap()).unwrap();
    assert_eq!(back, status);
}
