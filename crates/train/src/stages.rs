//! The board and the conveyor, told as telemetry.
//!
//! Job: differences of busy and waiting times between two looks, as a [`Pipeline`] sample. Refuses to decide anything.
//! Invariant: what a worker waits for is counted as *wait* when the stage before it is slow and as *blocked* when the one after it is.

use crate::pipeline::board::{Board, Doing};
use crate::pipeline::conveyor::Counters;
use crate::pipeline::flow::{ROOM, SLOT_OF_DRAFTER, SLOT_OF_POOL};
use drafthorse_telemetry::{ChannelSample, Pipeline, SlotSample, StageKind, StageSample};
use std::collections::HashMap;
use std::time::Duration;

/// Remembers the last look.
#[derive(Default)]
pub struct Stages {
    last_ns: u64,
    seen: HashMap<String, (u64, u64, u64)>,
}

/// Labels of waits for the stage after, as the conveyor gives them.
const BLOCKED: [&str; 3] = [ROOM, SLOT_OF_DRAFTER, SLOT_OF_POOL];

impl Stages {
    /// Whether the last look is longer ago than `age`.
    pub fn is_old(&self, board: &Board, age: Duration) -> bool {
        board.now_ns().saturating_sub(self.last_ns) > u64::try_from(age.as_nanos()).unwrap_or(u64::MAX)
    }

    /// What happened since the last look.
    pub fn sample(&mut self, board: &Board, counters: &Counters, queue_depth: usize, slots_per_pool: usize) -> Pipeline {
        let now = board.now_ns();
        let interval_ms = ms(now.saturating_sub(std::mem::replace(&mut self.last_ns, now)));
        let mut stages = Vec::new();
        let mut progress = 0;
        for view in board.snapshot() {
            progress += view.progress;
            let Some(stage) = kind(&view.name) else { continue };
            let busy: u64 = view.busy_ns.values().sum();
            let (mut wait, mut blocked) = (0, 0);
            for (label, ns) in &view.wait_ns {
                if BLOCKED.contains(label) { blocked += ns } else { wait += ns }
            }
            let (b, w, k) = self.seen.insert(view.name.clone(), (busy, wait, blocked)).unwrap_or_default();
            let at = match view.doing {
                Doing::Waiting => format!("waiting for {}", view.what),
                Doing::Busy => view.what.to_string(),
                Doing::Idle => "idle".into(),
                Doing::Done => "done".into(),
            };
            stages.push(StageSample {
                stage,
                worker: view.name,
                device: view.device.unwrap_or_else(|| "cpu".into()),
                busy_ms: ms(busy.saturating_sub(b)),
                wait_ms: ms(wait.saturating_sub(w)),
                blocked_ms: ms(blocked.saturating_sub(k)),
                at,
            });
        }
        let channels =
            vec![ChannelSample { name: "batches".into(), depth: counters.queue_depth as u64, capacity: queue_depth as u64 }];
        let slots = counters
            .free_slots
            .iter()
            .enumerate()
            .map(|(i, &free)| SlotSample {
                worker: format!("drafter {i}"),
                free: free as u64,
                filled: counters.filled_slots.get(i).copied().unwrap_or(0) as u64,
                total: slots_per_pool as u64,
            })
            .collect();
        Pipeline { interval_ms, stages, channels, slots, progress }
    }
}

fn kind(worker: &str) -> Option<StageKind> {
    [("prefetcher", StageKind::Prefetcher), ("target", StageKind::Target), ("drafter", StageKind::Drafter)]
        .into_iter()
        .find_map(|(name, kind)| worker.starts_with(name).then_some(kind))
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::cancel::Cancel;
    use crate::pipeline::conveyor::Conveyor;
    use crate::pipeline::layout::{Assignment, Batch, Layout, Mode};

    #[test]
    fn work_between_two_steps_shows_and_a_look_grows_old() {
        let clock = std::sync::Arc::new(crate::pipeline::board::ManualClock::default());
        let board = Board::new(clock.clone());
        let cancel = Cancel::new();
        let layout = Layout { targets: 1, drafters: 1, mode: Mode::Replicas, assignment: Assignment::FirstFree, queue_depth: 4 };
        let conveyor = Conveyor::<Numbered, ()>::new(layout, &cancel, &board).unwrap();
        let drafter = board.register("drafter 0", None);
        let (mut stages, second) = (Stages::default(), Duration::from_secs(1));
        let look = |stages: &mut Stages| stages.sample(&board, &conveyor.counters(), 4, 1);
        look(&mut stages);
        assert!(!stages.is_old(&board, second));
        clock.advance(2 * second);
        assert!(stages.is_old(&board, second), "a long step");
        drafter.busy("training");
        drafter.advance(3);
        clock.advance(second);
        let (first, again) = (look(&mut stages), look(&mut stages));
        assert_eq!((first.progress, again.progress), (3, 3));
        assert_eq!((first.interval_ms, first.stages[0].busy_ms, again.stages[0].busy_ms), (3_000.0, 1_000.0, 0.0));
        assert!(!stages.is_old(&board, second));
    }

    struct Numbered(u64);

    impl Batch for Numbered {
        fn index(&self) -> u64 {
            self.0
        }
    }

    /// A target with a batch and no slot is held up by the drafters, and one without a batch waits for the prefetcher: real waits on a conveyor.
    #[test]
    fn what_holds_a_target_up_is_told_apart() {
        for (batches, mode) in [(2, Mode::Replicas), (2, Mode::Sweep), (1, Mode::Replicas)] {
            let (cancel, board) = (Cancel::new(), Board::default());
            let layout = Layout { targets: 1, drafters: 1, mode, assignment: Assignment::FirstFree, queue_depth: 4 };
            let conveyor = Conveyor::<Numbered, ()>::new(layout, &cancel, &board).unwrap();
            conveyor.stock(0, vec![()]).unwrap();
            let (feeding, target) = (board.register("prefetcher", None), board.register("target 0", None));
            let mut feeder = conveyor.feeder(&feeding).unwrap();
            (0..batches).for_each(|i| assert!(feeder.put(Numbered(i)).unwrap()));
            let sample = std::thread::scope(|scope| {
                let worker = scope.spawn(|| {
                    let mut end = conveyor.target(0, &target).unwrap();
                    end.take().unwrap().unwrap().fill();
                    // Cancelled below, which is how this wait ends.
                    assert!(end.take().is_err());
                });
                while target.current().0 != Doing::Waiting {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(5));
                let sample = Stages::default().sample(&board, &conveyor.counters(), 4, 1);
                cancel.cancel(crate::pipeline::cancel::Cause::new(crate::pipeline::cancel::Kind::Stopped, "test", "done"));
                worker.join().unwrap();
                sample
            });
            let stage = sample.stages.iter().find(|s| s.worker == "target 0").unwrap();
            let blocked = batches == 2;
            assert_eq!((stage.blocked_ms > 0.0, stage.wait_ms > 0.0), (blocked, !blocked), "{mode:?}: {stage:?}");
        }
    }
}
