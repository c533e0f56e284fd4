//! Tests of the gate: order of events, deadlines, and workers that never arrive.

use super::super::board::{ManualClock, Watchdog};
use super::*;
use std::sync::Mutex as StdMutex;

type Seen = Arc<StdMutex<Vec<GateEvent>>>;

fn rig(limits: Limits) -> (Arc<ManualClock>, Board, Cancel, Gate, Seen) {
    let clock = Arc::new(ManualClock::default());
    let board = Board::new(clock.clone());
    let cancel = Cancel::new();
    let seen: Seen = Arc::default();
    let log = seen.clone();
    let gate = Gate::new(&cancel, &board, limits, move |event| log.lock().unwrap().push(event.clone()));
    (clock, board, cancel, gate, seen)
}

fn tight() -> Limits {
    let mut limits = Limits::default();
    for phase in Phase::ALL {
        limits.set(phase, Limit { total: Duration::from_secs(100), quiet: Duration::from_secs(10) });
    }
    limits
}

#[test]
fn the_gate_opens_when_all_are_ready_and_the_milestones_come_in_order() {
    let (_clock, board, cancel, gate, seen) = rig(Limits::default());
    let worker = |name: &str, role| gate.register(&board.register(name, Some("cpu".into())), role).unwrap();
    let (drafter, target, other) =
        (worker("drafter 0", Role::Drafter), worker("target 0", Role::Target), worker("prefetcher", Role::Other));
    gate.seal();
    assert!(matches!(gate.register(&board.register("late", None), Role::Other), Err(GateError::Sealed { .. })));
    std::thread::scope(|scope| {
        scope.spawn(move || drafter.pass().unwrap());
        scope.spawn(move || other.pass().unwrap());
        // The drafter and the prefetcher may be ready long before; the target decides.
        target.report(Phase::Weights, 0.5, "shard 1 of 2").unwrap();
        assert!(!gate.is_open());
        target.report(Phase::WarmUp, 1.0, "captured").unwrap();
        target.pass().unwrap();
    });
    assert!(gate.is_open());
    assert!(!cancel.is_cancelled());
    let seen = seen.lock().unwrap();
    assert_eq!(
        seen.iter().map(|event| event.phase).collect::<Vec<_>>(),
        [Phase::Weights, Phase::WarmUp, Phase::TargetsReady, Phase::DraftersReady, Phase::Open]
    );
    assert_eq!(seen[0].worker.as_deref(), Some("target 0"));
    assert_eq!((seen[0].progress, seen[0].text.as_str()), (0.5, "shard 1 of 2"));
    assert_eq!(seen[0].deadline, Some(Duration::from_secs(7_200)));
}

#[test]
fn a_worker_stuck_in_any_phase_ends_the_run_by_name_phase_and_device() {
    for phase in &Phase::ALL[..8] {
        let (clock, board, cancel, gate, _seen) = rig(tight());
        let mut watchdog = Watchdog::new(&board, &cancel, Duration::from_secs(1)).with_gate(&gate);
        let stuck = gate.register(&board.register("target 3", Some("cuda:3".into())), Role::Target).unwrap();
        let fine = gate.register(&board.register("drafter 0", Some("cuda:5".into())), Role::Drafter).unwrap();
        gate.seal();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(move || fine.pass());
            while !board.report().contains("drafter 0 on cuda:5: waiting for the gate") {
                std::thread::yield_now();
            }
            stuck.report(*phase, 0.25, "going").unwrap();
            for _ in 0..10 {
                clock.advance(Duration::from_secs(1));
                // The same fraction again is not progress, however often it is told.
                stuck.report(*phase, 0.25, "still going").unwrap();
                assert!(watchdog.poll().is_none());
            }
            clock.advance(Duration::from_secs(1));
            let cause = watchdog.poll().expect("eleven seconds without progress");
            assert_eq!((cause.kind, cause.worker.as_str()), (Kind::Stalled, "target 3"));
            assert_eq!((cause.phase.as_str(), cause.device.as_deref()), (phase.label(), Some("cuda:3")));
            assert!(cause.error.contains("no progress beyond 25 %"), "{}", cause.error);
            assert!(waiter.join().unwrap().is_err());
        });
        assert!(!gate.is_open());
    }
}

#[test]
fn progress_feeds_the_quiet_limit_but_not_the_deadline() {
    let (clock, board, cancel, gate, _seen) = rig(tight());
    let mut watchdog = Watchdog::new(&board, &cancel, Duration::from_secs(1)).with_gate(&gate);
    let slow = gate.register(&board.register("target 0", None), Role::Target).unwrap();
    gate.seal();
    for step in 0..=20 {
        slow.report(Phase::Weights, step as f32 / 100.0, "").unwrap();
        assert!(watchdog.poll().is_none(), "step {step}");
        clock.advance(Duration::from_secs(5));
    }
    let cause = watchdog.poll().expect("past the deadline");
    assert_eq!(cause.error, "still not through after 100.0 s");
}

#[test]
fn time_that_the_process_slept_counts_for_no_limit_of_the_start_up() {
    let (clock, board, cancel, gate, _seen) = rig(tight());
    let mut watchdog = Watchdog::new(&board, &cancel, Duration::from_secs(1)).with_gate(&gate);
    let loading = gate.register(&board.register("target 0", None), Role::Target).unwrap();
    gate.seal();
    loading.report(Phase::Weights, 0.5, "").unwrap();
    clock.advance(Duration::from_secs(1_000));
    watchdog.start_anew();
    assert!(watchdog.poll().is_none());
    clock.advance(Duration::from_secs(11));
    assert_eq!(watchdog.poll().expect("eleven seconds awake").phase, Phase::Weights.label());
}

#[test]
fn a_worker_that_waits_for_another_is_not_blamed() {
    let (clock, board, cancel, gate, _seen) = rig(tight());
    let mut watchdog = Watchdog::new(&board, &cancel, Duration::from_secs(1)).with_gate(&gate);
    let (patient, slow) = (board.register("drafter 0", None), board.register("target 0", None));
    let waiting = gate.register(&patient, Role::Drafter).unwrap();
    let working = gate.register(&slow, Role::Target).unwrap();
    gate.seal();
    waiting.report(Phase::Communicators, 0.0, "").unwrap();
    let _span = patient.waiting("the other ranks");
    clock.advance(Duration::from_secs(8));
    working.report(Phase::Weights, 0.5, "").unwrap();
    clock.advance(Duration::from_secs(8));
    assert!(watchdog.poll().is_none());
    clock.advance(Duration::from_secs(3));
    assert_eq!(watchdog.poll().unwrap().worker, "target 0");
}

#[test]
fn a_long_warm_up_does_not_count_against_the_limit_after_the_gate() {
    let (clock, board, cancel, gate, _seen) = rig(Limits::default());
    let mut watchdog = Watchdog::new(&board, &cancel, Duration::from_secs(10)).with_gate(&gate);
    let station = board.register("target 0", None);
    let slow = gate.register(&station, Role::Target).unwrap();
    gate.seal();
    slow.report(Phase::WarmUp, 0.0, "").unwrap();
    clock.advance(Duration::from_secs(200));
    assert!(watchdog.poll().is_none());
    slow.pass().unwrap();
    station.busy("forward");
    for _ in 0..10 {
        assert!(watchdog.poll().is_none(), "{:?}", cancel.cause());
        clock.advance(Duration::from_secs(1));
    }
    clock.advance(Duration::from_secs(1));
    assert_eq!(watchdog.poll().unwrap().phase, "forward");
}

#[test]
fn going_back_is_refused_and_leaving_early_cancels() {
    let (_clock, board, cancel, gate, _seen) = rig(Limits::default());
    let entrant = gate.register(&board.register("target 0", None), Role::Target).unwrap();
    entrant.report(Phase::Weights, 0.0, "").unwrap();
    let error = entrant.report(Phase::Arenas, 0.0, "").unwrap_err();
    assert!(error.to_string().starts_with("target 0 went back from target weights to modules and arenas"));
    drop(entrant);
    assert_eq!(cancel.cause().unwrap().to_string(), "target 0 failed in target weights: left before the gate opened");
}
