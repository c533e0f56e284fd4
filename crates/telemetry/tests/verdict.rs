//! Verdicts, case by case: a run is told as events, then judged at a time.

use drafthorse_telemetry::*;

/// What it is, the run as `(t, event)`, the time of judgement, the state, words of the headline and of the advice.
type Case = (&'static str, Vec<(u64, Event)>, u64, &'static str, &'static str, &'static str);

/// A run told as `(t, event)` pairs.
fn status_of(events: Vec<(u64, Event)>) -> Status {
    let mut status = Status::default();
    for (seq, (t, event)) in events.into_iter().enumerate() {
        status.apply(&Envelope { v: SCHEMA_VERSION, t, run_id: "r".into(), seq: seq as u64 + 1, event });
    }
    status
}

fn run() -> (u64, Event) {
    let identity = Identity { build_id: "b1".into(), config_hash: "c1".into(), started_t: 1_000, ..Default::default() };
    (1_000, Event::Run(identity))
}

fn phase(t: u64, worker: &str, progress: u64, done: bool) -> (u64, Event) {
    let phase = Phase {
        name: "target weights".into(),
        worker: worker.into(),
        device: format!("gpu {}", worker.chars().last().unwrap()),
        progress,
        total: Some(100),
        unit: "shards".into(),
        done,
        deadline_ms: Some(30_000),
    };
    (t, Event::Phase(phase))
}

fn gate(t: u64) -> (u64, Event) {
    (t, Event::Gate(Gate::default()))
}

/// One stage's sample of a 1 s interval.
fn stage(stage: StageKind, device: &str, busy: f64, wait: f64, blocked: f64) -> StageSample {
    StageSample {
        stage,
        worker: format!("{} 0", stage.name()),
        device: device.into(),
        busy_ms: busy * 1e3,
        wait_ms: wait * 1e3,
        blocked_ms: blocked * 1e3,
        at: if busy > 0.5 { "at work".into() } else { "waiting".into() },
    }
}

fn steps(n: u64, loss: impl Fn(u64) -> f64, stages: &[StageSample]) -> Vec<(u64, Event)> {
    let step = |s: u64| Step {
        step: s,
        loss: loss(s),
        step_ms: 1_000.0,
        tokens_per_s: 1_234_567.0,
        pipeline: Pipeline { interval_ms: 1_000.0, stages: stages.to_vec(), ..Default::default() },
        ..Default::default()
    };
    let mut events = vec![run(), gate(2_000)];
    events.extend((1..=n).map(|s| (2_000 + 1_000 * s, Event::Step(step(s)))));
    events
}

fn judged(status: &Status, now_t: u64) -> Verdict {
    judge(status, now_t, &Expected::default(), &Limits::default())
}

fn balanced() -> Vec<StageSample> {
    vec![
        stage(StageKind::Prefetcher, "cpu", 0.2, 0.0, 0.8),
        stage(StageKind::Target, "gpu 0", 0.9, 0.05, 0.05),
        stage(StageKind::Drafter, "gpu 1", 0.95, 0.05, 0.0),
    ]
}

#[test]
fn each_situation_has_its_verdict() {
    use StageKind::{Drafter, Prefetcher, Target};
    let calm = |s: u64| 3.0 - s as f64 * 0.01;
    let few_targets = [stage(Target, "gpu 0", 1.0, 0.0, 0.0), stage(Drafter, "gpu 1", 0.4, 0.6, 0.0)];
    let slow_data =
        [stage(Prefetcher, "cpu", 1.0, 0.0, 0.0), stage(Target, "gpu 0", 0.3, 0.7, 0.0), stage(Drafter, "gpu 1", 0.3, 0.7, 0.0)];
    let one_device = [stage(Target, "cpu", 0.6, 0.0, 0.4), stage(Drafter, "cpu", 0.4, 0.6, 0.0)];
    let many_targets = [stage(Target, "gpu 0", 0.3, 0.0, 0.7), stage(Drafter, "gpu 1", 1.0, 0.0, 0.0)];
    let with = |mut events: Vec<(u64, Event)>, more: Vec<(u64, Event)>| {
        events.extend(more);
        events
    };
    let failure = Event::Failure(Failure {
        worker: "target 0".into(),
        phase: "train".into(),
        device: "gpu 0".into(),
        cause: "out of memory".into(),
    });
    let cases: Vec<Case> = vec![
        ("nothing yet", vec![], 5_000, "unknown", "not said who it is", "log"),
        ("loading", vec![run(), phase(2_000, "target 0", 40, false)], 9_000, "starting", "40 of 100 shards", ""),
        (
            "one of two is stuck while the other loads",
            vec![
                run(),
                phase(2_000, "target 0", 7, false),
                phase(40_000, "target 1", 90, false),
                phase(40_000, "target 0", 7, false),
            ],
            41_000,
            "stalled",
            "target 0 is stuck in start-up phase `target weights` on gpu 0 at 7 of 100 shards",
            "gpu 0",
        ),
        (
            "nothing after the last phase",
            vec![run(), phase(2_000, "target 0", 100, true), (150_000, Event::Warning(Default::default()))],
            150_000,
            "stalled",
            "start-up stands still in start-up phase `target weights`",
            "log",
        ),
        ("gate just open", vec![run(), gate(2_000)], 3_000, "healthy", "first step is on its way", ""),
        ("getting on", steps(50, calm, &balanced()), 52_500, "healthy", "step 50, 1,234,567 tokens/s", ""),
        ("few targets", steps(20, calm, &few_targets), 22_500, "starved", "the drafters wait for the targets 60 %", "`targets`"),
        ("slow data", steps(20, calm, &slow_data), 22_500, "starved", "the drafters wait for the prefetchers 70 %", "dataset"),
        ("too early to say", steps(3, calm, &few_targets), 5_500, "healthy", "step 3", ""),
        ("one device takes turns", steps(20, calm, &one_device), 22_500, "healthy", "step 20", ""),
        ("idle targets", steps(20, calm, &many_targets), 22_500, "healthy", "step 20", "moved from `targets` to `drafters`"),
        (
            "no step for long, though the status is fresh",
            with(steps(20, calm, &balanced()), vec![(100_000, Event::Gpu(Default::default()))]),
            100_000,
            "stalled",
            "no progress for 78 s, after step 20",
            "target 0 on gpu 0 stands at `at work`",
        ),
        ("silence", steps(20, calm, &balanced()), 90_000, "stalled", "no sign of life for 68 s", "exit code"),
        (
            "NaN",
            steps(20, |s| if s == 20 { f64::NAN } else { 2.0 }, &balanced()),
            22_500,
            "diverging",
            "step 20 was not finite (1 in a row)",
            "learning rate",
        ),
        ("NaN long ago", steps(20, |s| if s == 10 { f64::NAN } else { 2.0 }, &balanced()), 22_500, "healthy", "step 20", ""),
        (
            "rising",
            steps(90, |s| if s < 60 { 2.0 } else { 2.0 + (s - 60) as f64 * 0.05 }, &balanced()),
            92_500,
            "diverging",
            "the loss rises",
            "best checkpoint",
        ),
        ("noisy", steps(90, |s| 2.0 + if s % 2 == 0 { 0.5 } else { -0.5 }, &balanced()), 92_500, "healthy", "step 90", ""),
        (
            "failed",
            with(steps(5, calm, &balanced()), vec![(9_000, failure)]),
            999_000,
            "failed",
            "target 0 failed in train on gpu 0: out of memory",
            "--resume",
        ),
        (
            "stopped",
            with(
                steps(5, calm, &balanced()),
                vec![(9_000, Event::Stopped(Stopped { step: 5, reason: "SIGTERM".into(), checkpoint: Some("ck".into()) }))],
            ),
            999_000,
            "stopped",
            "stopped after step 5 (SIGTERM)",
            "ck",
        ),
        (
            "done",
            with(
                steps(5, calm, &balanced()),
                vec![(9_000, Event::Done(Done { steps: 5, tau: Some(4.2), ..Default::default() }))],
            ),
            999_000,
            "finished",
            "finished 5 steps, τ 4.20",
            "",
        ),
    ];
    for (what, events, now_t, state, headline, advice) in cases {
        let verdict = judged(&status_of(events), now_t);
        assert_eq!(verdict.state.name(), state, "{what}: {verdict:?}");
        assert!(verdict.headline.contains(headline), "{what}: {}", verdict.headline);
        assert!(
            verdict.advice.contains(advice) && (advice.is_empty() == verdict.advice.is_empty()),
            "{what}: {}",
            verdict.advice
        );
    }
}

#[test]
fn a_stall_tells_where_everyone_stands() {
    let mut events = steps(20, |_| 2.0, &balanced());
    events.push((100_000, Event::Gpu(Default::default())));
    let State::Stalled { since_t, stalled_ms, alive, stands } = judged(&status_of(events), 100_000).state else { panic!() };
    assert_eq!((since_t, stalled_ms, alive), (22_000, 78_000, true));
    let stands: Vec<_> = stands.iter().map(|s| (s.worker.as_str(), s.at.as_str(), s.for_ms)).collect();
    assert_eq!(stands, [("prefetcher 0", "waiting", 97_000), ("target 0", "at work", 97_000), ("drafter 0", "at work", 97_000)]);
}

#[test]
fn slow_steps_and_announced_pauses_are_no_stall() {
    let slow = |s: u64| (1_000 + 60_000 * s, Event::Step(Step { step: s, step_ms: 60_000.0, ..Default::default() }));
    let mut events = vec![run(), gate(1_000)];
    events.extend((1..=5).map(slow));
    events.push((600_000, Event::Gpu(Default::default())));
    assert_eq!(judged(&status_of(events), 600_000).state.name(), "healthy");

    let mut events = steps(20, |_| 2.0, &balanced());
    let pause = Phase { name: "held-out".into(), worker: "run".into(), deadline_ms: Some(600_000), ..Default::default() };
    events.push((22_500, Event::Phase(pause)));
    events.push((300_000, Event::Gpu(Default::default())));
    let mut status = status_of(events);
    assert_eq!(judged(&status, 300_000).state.name(), "healthy");
    status.t = 700_000;
    assert_eq!(judged(&status, 700_000).state.name(), "stalled");
}

#[test]
fn another_build_config_or_an_older_start_is_not_your_code() {
    let status = status_of(steps(5, |_| 2.0, &balanced()));
    let own =
        Expected { build_id: Some("b1".into()), config_hash: Some("c1".into()), not_before_t: Some(1_000), ..Default::default() };
    assert_eq!(judge(&status, 7_500, &own, &Limits::default()).state.name(), "healthy");
    let cases = [
        (Expected { build_id: Some("b2".into()), ..own.clone() }, "build_id", "does not contain your change"),
        (Expected { config_hash: Some("c2".into()), ..own.clone() }, "config_hash", "another config"),
        (Expected { dataset_hash: Some("d".into()), ..own.clone() }, "dataset_hash", "another dataset"),
        (Expected { not_before_t: Some(1_001), ..own.clone() }, "started_t", "started before yours"),
    ];
    for (expected, field, words) in cases {
        let verdict = judge(&status, 7_500, &expected, &Limits::default());
        assert!(matches!(&verdict.state, State::NotYourCode { field: f, .. } if f == field), "{verdict:?}");
        assert!(verdict.headline.contains(words), "{}", verdict.headline);
    }
}

#[test]
fn the_same_reading_twice_turns_into_a_stall_whatever_the_clocks() {
    let status = status_of(steps(20, |_| 2.0, &balanced()));
    // The watcher's clock is two days ahead, right, or two days behind.
    for offset_ms in [172_800_000i64, 0, -172_800_000] {
        let local = |run_t: u64| (run_t as i64 + 200_000_000 + offset_ms) as u64;
        let shifted = |t: u64| {
            let mut status = status.clone();
            status.last_progress_t += 200_000_000;
            status.t = t + 200_000_000;
            status
        };
        let mut watcher = Watcher::new(Expected::default(), Limits::default());
        watcher.observe(&shifted(22_000), local(22_100));
        assert_eq!(watcher.observe(&shifted(23_000), local(23_100)).state.name(), "healthy", "offset {offset_ms}");
        assert_eq!(watcher.observe(&shifted(23_000), local(30_000)).state.name(), "healthy", "offset {offset_ms}");
        let verdict = watcher.observe(&shifted(23_000), local(90_000));
        assert!(matches!(verdict.state, State::Stalled { alive: false, .. }), "offset {offset_ms}: {verdict:?}");
        // A heartbeat without progress is life, but no progress.
        let verdict = watcher.observe(&shifted(91_000), local(91_100));
        assert!(matches!(verdict.state, State::Stalled { alive: true, .. }), "offset {offset_ms}: {verdict:?}");
    }
}

#[test]
fn the_same_reading_twice_from_the_first_is_a_stall_too() {
    let status = status_of(steps(20, |_| 2.0, &balanced()));
    // By a clock that agrees, and by one that is ten seconds behind, so that the reading seems to come from the future.
    for behind_ms in [0, 10_000] {
        let mut watcher = Watcher::new(Expected::default(), Limits::default());
        let names = [22_100, 90_000, 91_000].map(|t| watcher.observe(&status, t - behind_ms).state.name());
        assert_eq!(names, ["healthy", "stalled", "stalled"], "{behind_ms} ms behind");
    }
}

#[test]
fn an_old_file_of_a_dead_run_is_not_healthy_at_first_sight() {
    let status = status_of(steps(20, |_| 2.0, &balanced()));
    let verdict = Watcher::new(Expected::default(), Limits::default()).observe(&status, 10_000_000);
    assert!(matches!(verdict.state, State::Stalled { alive: false, .. }), "{verdict:?}");
}

#[test]
fn lengths_of_time_in_words() {
    let words: Vec<_> = [5, 1_000, 119_999, 120_000, 7_199_000, 7_200_000].into_iter().map(span).collect();
    assert_eq!(words, ["5 ms", "1 s", "119 s", "2 min 0 s", "119 min 59 s", "2 h 0 min"]);
}
