//! A worker that hangs during start-up: the run that never said where.
//!
//! What happened: one of eight workers hung while it compiled or loaded; the others waited without a word. Here a whole crew starts, one worker
//! stands still in one start-up phase, and the run must end by itself, naming worker, phase and device. The clock is moved by hand.

use drafthorse_train::pipeline::board::{Board, ManualClock, Station, Watchdog};
use drafthorse_train::pipeline::cancel::{Cancel, Kind};
use drafthorse_train::pipeline::crew::{self, BoxError, Watch};
use drafthorse_train::pipeline::gate::{Entrant, Gate, Limits, Phase, Role};
use std::sync::Arc;
use std::time::Duration;

/// The phases in which a worker works; the last three are the run's own milestones.
const WORKING: usize = 8;
const WORKERS: [(&str, &str, Role); 4] = [
    ("prefetcher", "host", Role::Other),
    ("target 0", "cuda:0", Role::Target),
    ("target 1", "cuda:1", Role::Target),
    ("drafter 0", "cuda:2", Role::Drafter),
];

/// Goes through all phases; stands still in `stuck`, as in a call that never returns, but sees the cancellation as device waits do.
fn start_up(entrant: Entrant, station: &Station, cancel: &Cancel, stuck: Option<Phase>) -> Result<(), BoxError> {
    for phase in &Phase::ALL[..WORKING] {
        entrant.report(*phase, 0.0, "")?;
        if stuck == Some(*phase) {
            loop {
                cancel.check()?;
                std::thread::yield_now();
            }
        }
        entrant.report(*phase, 1.0, "")?;
    }
    entrant.pass()?;
    station.busy("training");
    Ok(())
}

/// Starts everybody; worker `who` stands still in `phase`. Gives how the run ended.
fn launch(stuck: Option<(usize, Phase)>) -> Result<(), crew::RunError> {
    let clock = Arc::new(ManualClock::default());
    let board = Board::new(clock.clone());
    let cancel = Cancel::new();
    let gate = Gate::new(&cancel, &board, Limits::default(), |_| {});
    let watch = Watch {
        watchdog: Watchdog::new(&board, &cancel, Duration::from_secs(120)).with_gate(&gate),
        every: Duration::from_millis(1),
        grace: Duration::from_secs(60),
        on_alarm: Box::new(|_| {}),
    };
    let coordinator = board.register("coordinator", None);
    crew::run(&cancel, &board, &coordinator, Some(watch), |crew| {
        for (i, (name, device, role)) in WORKERS.into_iter().enumerate() {
            let station = board.register(name, Some(device.to_owned()));
            let entrant = gate.register(&station, role)?;
            let stuck = stuck.filter(|(who, _)| *who == i).map(|(_, phase)| phase);
            let cancel = &cancel;
            crew.spawn(station, move |station| start_up(entrant, station, cancel, stuck));
        }
        gate.seal();
        // Time passes only once everybody but the stuck worker has arrived, so that nobody else can be late.
        let waiting = || board.report().matches("waiting for the gate").count();
        while stuck.is_some() && !cancel.is_cancelled() {
            if waiting() == WORKERS.len() - 1 {
                clock.advance(Duration::from_secs(60));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    })
}

#[test]
fn a_worker_stuck_in_any_phase_ends_the_run_by_name() {
    for phase in &Phase::ALL[..WORKING] {
        for (who, (name, device, _)) in WORKERS.iter().enumerate() {
            let error = launch(Some((who, *phase))).expect_err("a hung start-up is no success");
            let cause = &error.cause;
            assert_eq!(cause.kind, Kind::Stalled, "{cause}");
            assert_eq!((cause.worker.as_str(), cause.phase.as_str()), (*name, phase.label()), "{cause}");
            assert_eq!(cause.device.as_deref(), Some(*device), "{cause}");
            let report = cause.report.as_deref().expect("where every stage stood");
            for (other, ..) in WORKERS {
                assert!(report.contains(other), "{other} is not in\n{report}");
            }
        }
    }
}

#[test]
fn a_start_up_without_a_hang_opens_the_gate() {
    launch(None).expect("everybody arrives");
}
