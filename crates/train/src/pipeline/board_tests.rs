//! Tests of the board and the watchdog on a clock that is moved by hand.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn rig() -> (Arc<ManualClock>, Board, Cancel, Watchdog) {
    let clock = Arc::new(ManualClock::default());
    let board = Board::new(clock.clone());
    let cancel = Cancel::new();
    let watchdog = Watchdog::new(&board, &cancel, 10 * SECOND);
    (clock, board, cancel, watchdog)
}

#[test]
fn time_is_booked_to_the_label_and_a_wait_gives_the_activity_back() {
    let (clock, board, ..) = rig();
    let station = board.register("target 0", Some("cuda:0".into()));
    clock.advance(SECOND);
    station.busy(What::new("forward").batch(4));
    clock.advance(2 * SECOND);
    {
        let span = station.waiting(What::new("free slot of drafter").number(1).batch(5));
        clock.advance(3 * SECOND);
        span.now_for(What::new("a batch"));
        clock.advance(SECOND);
    }
    clock.advance(5 * SECOND);
    let view = &board.snapshot()[0];
    assert_eq!((view.doing, view.what), (Doing::Busy, What::new("forward").batch(4)));
    assert_eq!(view.busy_ns["forward"], 7_000_000_000);
    assert_eq!(view.wait_ns["free slot of drafter"], 3_000_000_000);
    assert_eq!(view.wait_ns["a batch"], 1_000_000_000);
    assert!(board.report().contains("target 0 on cuda:0: busy with forward (batch 4), 5.0 s"), "{}", board.report());
}

#[test]
fn a_talkative_worker_without_progress_stalls_and_the_busy_one_is_blamed() {
    let (clock, board, cancel, mut watchdog) = rig();
    let drafter = board.register("drafter 0", Some("cuda:5".into()));
    let target = board.register("target 0", Some("cuda:0".into()));
    board.note(|| Some("queue 3 of 4".into()));
    drafter.busy("step");
    let _span = drafter.waiting("a filled slot");
    for _ in 0..10 {
        // Alive and chatty, waiting and busy by turns, but nothing done.
        target.busy("forward");
        drop(target.waiting("the device"));
        assert!(watchdog.poll().is_none());
        clock.advance(SECOND);
    }
    assert!(watchdog.poll().is_none());
    clock.advance(SECOND);
    let cause = watchdog.poll().expect("eleven seconds without progress");
    assert_eq!((cause.kind, cause.worker.as_str(), cause.phase.as_str()), (Kind::Stalled, "target 0", "forward"));
    assert_eq!(cause.device.as_deref(), Some("cuda:0"));
    let report = cause.report.unwrap();
    assert!(report.contains("drafter 0 on cuda:5: waiting for a filled slot, 11.0 s"), "{report}");
    assert!(report.contains("queue 3 of 4"), "{report}");
    assert!(cancel.is_cancelled());
    assert!(watchdog.poll().is_none(), "it fires once");
}

#[test]
fn one_busy_worker_is_found_while_the_others_advance_but_a_long_wait_before_does_not_count() {
    let (clock, board, _cancel, mut watchdog) = rig();
    let prefetcher = board.register("prefetcher", None);
    let target = board.register("target 1", None);
    target.busy("forward");
    let span = target.waiting("a batch");
    for _ in 0..30 {
        clock.advance(SECOND);
        prefetcher.advance(1);
        assert!(watchdog.poll().is_none());
    }
    drop(span);
    for _ in 0..10 {
        assert!(watchdog.poll().is_none());
        clock.advance(SECOND);
        prefetcher.advance(1);
    }
    assert!(watchdog.poll().is_none());
    clock.advance(SECOND);
    prefetcher.advance(1);
    let cause = watchdog.poll().expect("busy for eleven seconds");
    assert_eq!((cause.worker.as_str(), cause.phase.as_str()), ("target 1", "forward"));
}

#[test]
fn nobody_left_is_not_a_stall() {
    let (clock, board, _cancel, mut watchdog) = rig();
    let station = board.register("prefetcher", None);
    assert!(watchdog.poll().is_none());
    station.done();
    clock.advance(100 * SECOND);
    assert!(watchdog.poll().is_none());
}

#[test]
fn a_process_that_stood_still_itself_is_not_a_stall_but_a_worker_that_stands_still_after_it_is() {
    let (clock, board, _cancel, mut watchdog) = rig();
    let target = board.register("target 0", None);
    target.busy("forward");
    assert!(watchdog.poll().is_none());
    clock.advance(1_000 * SECOND);
    watchdog.start_anew();
    assert!(watchdog.poll().is_none(), "the time asleep does not count");
    clock.advance(10 * SECOND);
    assert!(watchdog.poll().is_none());
    clock.advance(SECOND);
    assert_eq!(watchdog.poll().expect("eleven seconds awake").worker, "target 0");
}

#[test]
fn patience_is_less_than_any_limit() {
    let (_clock, board, cancel, watchdog) = rig();
    assert_eq!(watchdog.patience(), 5 * SECOND);
    assert_eq!(Watchdog::new(&board, &cancel, SECOND).patience(), SECOND / 2);
}
