//! An epoch of 59,828 batches and three drafters: the tail that left ranks waiting for ever.
//!
//! What happened: the last step of an epoch had fewer batches than ranks; a rank without one never came to the all-reduce.
//! Here batches, slots, order and meetings are the real ones; a batch is a number and a gradient is a count.

use drafthorse_train::pipeline::board::{Board, Watchdog};
use drafthorse_train::pipeline::cancel::Cancel;
use drafthorse_train::pipeline::conveyor::Conveyor;
use drafthorse_train::pipeline::crew::{self, Watch};
use drafthorse_train::pipeline::layout::{Assignment, Batch, Layout, Mode};
use drafthorse_train::pipeline::reduce::{AllReduce, CHUNK};
use drafthorse_train::rounds::Rounds;
use std::sync::Mutex;
use std::time::Duration;

const DRAFTERS: usize = 3;
const TARGETS: usize = 2;
/// A second epoch, to see that the run goes on behind the short step.
const NEXT_EPOCH: u64 = 10;

struct Number(u64);

impl Batch for Number {
    fn index(&self) -> u64 {
        self.0
    }
}

fn rounds(epoch: u64, global_batch: u64) -> Rounds<impl Fn(u32) -> u64> {
    Rounds::new(move |e| if e == 0 { epoch } else { NEXT_EPOCH }, global_batch)
}

/// Trains an epoch of `epoch` batches and the next; per rank, the batches it trained in order, and per step the batches that the ranks have together.
fn train(epoch: u64, global_batch: u64) -> (Vec<Vec<u64>>, Vec<Vec<f32>>) {
    let steps = rounds(epoch, global_batch).total_steps(2);
    let (cancel, board) = (Cancel::new(), Board::default());
    let layout =
        Layout { targets: TARGETS, drafters: DRAFTERS, mode: Mode::Replicas, assignment: Assignment::FirstFree, queue_depth: 8 };
    let conveyor = Conveyor::<Number, u64>::new(layout, &cancel, &board).unwrap();
    for pool in 0..DRAFTERS {
        conveyor.stock(pool, vec![0; layout.slots_per_pool()]).unwrap();
    }
    let group = AllReduce::new(DRAFTERS, CHUNK, &cancel);
    let results = [const { Mutex::new((Vec::new(), Vec::new())) }; DRAFTERS];
    let coordinator = board.register("coordinator", None);
    // A rank that waits for ever makes this test fail by name instead of hanging.
    let watch = Watch {
        watchdog: Watchdog::new(&board, &cancel, Duration::from_secs(60)),
        every: Duration::from_millis(200),
        grace: Duration::from_secs(60),
        on_alarm: Box::new(|_| {}),
    };
    crew::run(&cancel, &board, &coordinator, Some(watch), |crew| {
        let (conveyor, group, results) = (&conveyor, &group, &results);
        crew.spawn(board.register("prefetcher", None), move |station| {
            let mut feeder = conveyor.feeder(station)?;
            for index in 0..epoch + NEXT_EPOCH {
                assert!(feeder.put(Number(index))?);
            }
            feeder.close();
            Ok(())
        });
        for number in 0..TARGETS {
            crew.spawn(board.register(format!("target {number}"), None), move |station| {
                let mut end = conveyor.target(number, station)?;
                while let Some(mut work) = end.take()? {
                    *work = work.batch().0;
                    work.fill();
                }
                Ok(())
            });
        }
        for (rank, result) in results.iter().enumerate() {
            crew.spawn(board.register(format!("drafter {rank}"), None), move |station| {
                let mut end = conveyor.drafter(rank, station)?;
                let mut reducer = group.join(rank, station)?;
                let mut rounds = rounds(epoch, global_batch);
                let (mut trained, mut sums) = (Vec::new(), Vec::new());
                for step in 0..steps {
                    let round = rounds.locate(step);
                    let mut gradient = [0.0f32];
                    for index in (round.first..round.first + round.count).filter(|i| i % DRAFTERS as u64 == rank as u64) {
                        let filled = end.next()?.ok_or("the stream ended inside a step")?;
                        assert_eq!(
                            (filled.batch().0, *filled.slot()),
                            (index, index),
                            "batches and their features arrive in order"
                        );
                        trained.push(index);
                        gradient[0] += 1.0;
                        filled.release();
                    }
                    reducer.sum(&mut [&mut gradient])?;
                    sums.push(gradient[0]);
                    station.advance(1);
                }
                assert!(end.next()?.is_none(), "nothing is left over");
                *result.lock().unwrap() = (trained, sums);
                Ok(())
            });
        }
        Ok(())
    })
    .unwrap_or_else(|error| panic!("G = {global_batch}: {error}\n{}", error.cause.report.as_deref().unwrap_or_default()));
    assert_eq!(conveyor.counters().free_slots, [layout.slots_per_pool(); DRAFTERS], "every slot came back");
    results.map(|result| result.into_inner().unwrap()).into_iter().unzip()
}

fn check(epoch: u64, global_batch: u64) {
    let (trained, sums) = train(epoch, global_batch);
    let case = format!("{epoch} batches, G = {global_batch}");
    let mut all = trained.concat();
    all.sort_unstable();
    assert!(all.iter().copied().eq(0..epoch + NEXT_EPOCH), "{case}: every batch exactly once");
    let steps = |epoch: u64| (0..epoch).step_by(global_batch as usize).map(move |first| global_batch.min(epoch - first) as f32);
    let expected: Vec<f32> = steps(epoch).chain(steps(NEXT_EPOCH)).collect();
    for (rank, sums) in sums.iter().enumerate() {
        assert_eq!(sums.len(), expected.len(), "{case}: rank {rank} was in every step");
        assert!(*sums == expected, "{case}: rank {rank} has the step's whole sum, the short steps' too");
    }
}

#[test]
fn the_epoch_that_hung_is_trained_to_its_end() {
    // The last of 19,943 steps has two batches, and rank 2 none.
    check(59_828, 3);
}

#[test]
fn every_kind_of_tail_is_joined_by_all_ranks() {
    for global_batch in 1..=7 {
        for epoch in 40..47 {
            check(epoch, global_batch);
        }
    }
}
