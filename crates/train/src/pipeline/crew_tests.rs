//! Tests of the crew: first causes, echoes, panics, stop requests, stalls, and threads that do not come back.

use super::super::board::{ManualClock, SystemClock};
use super::super::reduce::Meeting;
use super::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

#[test]
fn the_value_of_the_body_comes_back_after_all_workers_have_ended() {
    let (cancel, board) = (Cancel::new(), Board::default());
    let ended = AtomicBool::new(false);
    let coordinator = board.register("coordinator", None);
    let value = run(&cancel, &board, &coordinator, None, |crew| {
        crew.spawn_named("worker", None, |_| {
            std::thread::yield_now();
            ended.store(true, Ordering::SeqCst);
            Ok(())
        });
        Ok(7)
    });
    assert_eq!(value.unwrap(), 7);
    assert!(ended.load(Ordering::SeqCst));
}

#[test]
fn the_first_error_cancels_all_and_echoes_are_not_failures() {
    let (cancel, board) = (Cancel::new(), Board::default());
    let meeting = Meeting::new(3, &cancel);
    let coordinator = board.register("coordinator", None);
    let error = run(&cancel, &board, &coordinator, None, |crew| {
        for rank in 0..2 {
            let meeting = meeting.clone();
            crew.spawn_named(format!("drafter {rank}"), None, move |station| {
                meeting.join(rank, station)?.gather(())?;
                Ok(())
            });
        }
        crew.spawn_named("target 0", Some("cuda:0".into()), |station| {
            station.busy("forward");
            Err(Box::new(std::io::Error::other("illegal address")))
        });
        Ok(())
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "target 0 failed in forward on cuda:0: illegal address");
    assert_eq!(error.kind(), Kind::Failed);
    assert!(error.others.is_empty(), "{:?}", error.others);
}

#[test]
fn panics_of_workers_and_of_the_body_are_causes() {
    let text = |in_body: bool| {
        let (cancel, board) = (Cancel::new(), Board::default());
        let coordinator = board.register("coordinator", None);
        let outcome = run(&cancel, &board, &coordinator, None, |crew| {
            crew.spawn_named("drafter 1", None, move |_| if in_body { Ok(()) } else { panic!("index {} out of range", 3) });
            if in_body { panic!("no plan") } else { Ok(()) }
        });
        outcome.unwrap_err().to_string()
    };
    assert_eq!(text(false), "drafter 1 failed: panicked: index 3 out of range");
    assert_eq!(text(true), "coordinator failed: panicked: no plan");
}

#[test]
fn a_run_cancelled_on_request_is_not_good_whatever_the_workers_return() {
    let (cancel, board) = (Cancel::new(), Board::default());
    let coordinator = board.register("coordinator", None);
    let outcome = run(&cancel, &board, &coordinator, None, |_| {
        assert!(cancel.request_stop("SIGINT"));
        assert!(!cancel.request_stop("SIGINT"));
        cancel.cancel(Cause::new(Kind::Stopped, "coordinator", "second SIGINT"));
        Ok(())
    });
    let error = outcome.unwrap_err();
    assert_eq!((error.kind(), error.to_string().as_str()), (Kind::Stopped, "coordinator stopped on request: second SIGINT"));
}

#[test]
fn a_missing_rank_is_found_by_the_watchdog() {
    let clock = Arc::new(ManualClock::default());
    let (cancel, board) = (Cancel::new(), Board::new(clock.clone()));
    let meeting = Meeting::new(2, &cancel);
    let coordinator = board.register("coordinator", None);
    let mut alarms = Vec::new();
    let watch = Watch {
        watchdog: Watchdog::new(&board, &cancel, Duration::from_secs(60)),
        every: Duration::from_millis(1),
        grace: Duration::from_secs(3_600),
        on_alarm: Box::new(|alarm| {
            if let Alarm::Stalled(cause) = alarm {
                alarms.push(cause.clone());
            }
        }),
    };
    let error = run(&cancel, &board, &coordinator, Some(watch), |crew| {
        let member = meeting.clone();
        crew.spawn_named("drafter 0", None, move |station| {
            member.join(0, station)?.gather(())?;
            Ok(())
        });
        crew.spawn_named("drafter 1", Some("cuda:6".into()), |station| {
            station.busy("the backward kernel");
            // Device waits poll an event; this one never comes.
            loop {
                cancel.check()?;
                clock.advance(Duration::from_secs(1));
                std::thread::yield_now();
            }
        });
        Ok(())
    })
    .unwrap_err();
    assert_eq!(error.kind(), Kind::Stalled);
    assert_eq!((error.cause.worker.as_str(), error.cause.phase.as_str()), ("drafter 1", "the backward kernel"));
    let report = error.cause.report.as_ref().unwrap();
    assert!(report.contains("drafter 0: waiting for the other drafters, first of all rank 1"), "{report}");
    assert_eq!(alarms.len(), 1);
}

#[test]
fn a_thread_that_does_not_come_back_is_named() {
    let (cancel, board) = (Cancel::new(), Board::new(Arc::new(SystemClock::default())));
    let coordinator = board.register("coordinator", None);
    let (stuck, come_back) = mpsc::channel::<()>();
    let mut named = Vec::new();
    let watch = Watch {
        watchdog: Watchdog::new(&board, &cancel, Duration::from_secs(3_600)),
        every: Duration::from_millis(1),
        grace: Duration::from_millis(1),
        on_alarm: Box::new(|alarm| {
            if let Alarm::NotComingBack(names) = alarm {
                named.extend(names.iter().cloned());
                // A real listener ends the process here; this one lets the thread go.
                let _ = stuck.send(());
            }
        }),
    };
    let outcome = run(&cancel, &board, &coordinator, Some(watch), |crew| {
        crew.spawn_named("target 2", None, move |_| Ok(come_back.recv()?));
        Err::<(), _>("disk full".into())
    });
    assert_eq!(outcome.unwrap_err().to_string(), "coordinator failed: disk full");
    assert_eq!(named, ["target 2"]);
}
