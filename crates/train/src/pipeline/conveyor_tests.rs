//! Tests of the conveyor on real threads: order, exactly-once delivery, slots, back-pressure, halting, and what early leavers do.

use super::super::layout::Assignment;
use super::super::reduce::Meeting;
use super::*;
use proptest::prelude::*;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parcel {
    seq: u64,
    index: u64,
    held_out: bool,
}

impl Batch for Parcel {
    fn index(&self) -> u64 {
        self.index
    }
}

/// A slot that notices two writers, or a writer beside a reader.
#[derive(Default)]
struct Slot {
    content: u64,
    /// -1 while it is written, otherwise the number of readers.
    users: AtomicI64,
}

/// Training batches with a held-out batch after every third, numbered apart.
fn parcels(count: u64) -> Vec<Parcel> {
    let (mut train, mut held) = (0, 0);
    (0..count)
        .map(|seq| {
            let held_out = seq % 4 == 3;
            let counter = if held_out { &mut held } else { &mut train };
            *counter += 1;
            Parcel { seq, index: *counter - 1, held_out }
        })
        .collect()
}

fn expected_for(layout: Layout, drafter: usize, parcels: &[Parcel]) -> Vec<Parcel> {
    let mine = |p: &&Parcel| layout.mode == Mode::Sweep || p.index % layout.drafters as u64 == drafter as u64;
    parcels.iter().filter(mine).copied().collect()
}

/// Spends a pseudo-random, schedule-dependent little while.
fn dawdle(seed: u64, salt: u64) {
    let mut x = seed ^ salt.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^= x >> 29;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    match (x >> 32) % 8 {
        0 => std::thread::sleep(std::time::Duration::from_micros((x >> 40) % 200)),
        1..=3 => (0..(x >> 40) % 4).for_each(|_| std::thread::yield_now()),
        _ => {}
    }
}

fn write(work: &mut Work<Parcel, Slot>, seed: u64) {
    assert_eq!(work.users.swap(-1, SeqCst), 0, "somebody else holds the slot that is being written");
    work.content = work.batch().seq;
    dawdle(seed, work.content);
    assert_eq!(work.users.swap(0, SeqCst), -1);
}

fn read(filled: &Filled<Parcel, Slot>, seed: u64) -> Parcel {
    let slot = filled.slot();
    assert!(slot.users.fetch_add(1, SeqCst) >= 0, "the slot is being written while it is read");
    dawdle(seed, slot.content ^ 0xABCD);
    assert_eq!(slot.content, filled.batch().seq, "the slot holds another batch's features");
    assert!(slot.users.fetch_sub(1, SeqCst) > 0);
    **filled.batch()
}

fn stock(conveyor: &Conveyor<Parcel, Slot>, slots: usize) {
    for pool in 0..conveyor.layout().pools() {
        conveyor.stock(pool, (0..slots).map(|_| Slot::default()).collect()).unwrap();
    }
}

fn layouts() -> impl Strategy<Value = Layout> {
    (1usize..6, 1usize..5, any::<bool>(), any::<bool>(), 1usize..5).prop_map(|(targets, drafters, sweep, fixed, queue_depth)| {
        Layout {
            targets,
            drafters,
            mode: if sweep { Mode::Sweep } else { Mode::Replicas },
            assignment: if fixed { Assignment::Fixed } else { Assignment::FirstFree },
            queue_depth,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_reader_gets_every_batch_once_in_order_and_no_slot_is_lost(
        layout in layouts(), slots in 1usize..5, count in 0u64..60, seed in any::<u64>(),
    ) {
        let (cancel, board) = (Cancel::new(), Board::default());
        let conveyor = Conveyor::<Parcel, Slot>::new(layout, &cancel, &board).unwrap();
        stock(&conveyor, slots);
        let parcels = parcels(count);
        let readers = if layout.mode == Mode::Sweep { layout.drafters } else { 1 };
        // Counted just before each release, so that it never runs behind the conveyor.
        let reads = AtomicI64::new(0);
        let received = std::thread::scope(|scope| {
            let (conveyor, board, reads, parcels) = (&conveyor, &board, &reads, &parcels);
            scope.spawn(move || {
                let station = board.register("prefetcher", None);
                let mut feeder = conveyor.feeder(&station).unwrap();
                for (put, parcel) in parcels.iter().enumerate() {
                    dawdle(seed, parcel.seq ^ 0x77);
                    assert!(feeder.put(*parcel).unwrap());
                    let done = reads.load(SeqCst) / readers as i64;
                    let bound = (layout.queue_depth + slots * layout.pools()) as i64;
                    assert!(put as i64 + 1 - done <= bound + 1, "more batches under way than the queue and the slots hold");
                }
                feeder.close();
            });
            for target in 0..layout.targets {
                scope.spawn(move || {
                    let station = board.register(format!("target {target}"), None);
                    let mut end = conveyor.target(target, &station).unwrap();
                    while let Some(mut work) = end.take().unwrap() {
                        if layout.assignment == Assignment::Fixed {
                            assert_eq!(work.batch().index % layout.targets as u64, target as u64);
                        }
                        write(&mut work, seed ^ target as u64);
                        work.fill();
                    }
                });
            }
            let drafters: Vec<_> = (0..layout.drafters).map(|drafter| scope.spawn(move || {
                let station = board.register(format!("drafter {drafter}"), None);
                let mut end = conveyor.drafter(drafter, &station).unwrap();
                let mut got = Vec::new();
                while let Some(filled) = end.next().unwrap() {
                    got.push(read(&filled, seed ^ (drafter as u64) << 8));
                    reads.fetch_add(1, SeqCst);
                    filled.release();
                }
                got
            })).collect();
            drafters.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for (drafter, got) in received.iter().enumerate() {
            prop_assert_eq!(got, &expected_for(layout, drafter, &parcels));
        }
        let counters = conveyor.counters();
        prop_assert_eq!(counters.put, count);
        prop_assert_eq!(counters.filled, count);
        prop_assert_eq!(counters.released, count * readers as u64);
        prop_assert_eq!(counters.free_slots, vec![slots; layout.pools()]);
        prop_assert_eq!((counters.queue_depth, counters.writing, counters.leased, counters.quarantined), (0, 0, 0, 0));
        prop_assert!(!cancel.is_cancelled());
    }

    /// Every thread owns a drafter, some own a target as well, and the drafters meet after every step of `g` batches.
    #[test]
    fn threads_with_both_roles_meet_at_every_step(
        drafters in 1usize..5, both in 1usize..5, slots in 1usize..4, g in 1u64..9, count in 0u64..50, seed in any::<u64>(), fixed in any::<bool>(),
    ) {
        let targets = both.min(drafters);
        let assignment = if fixed { Assignment::Fixed } else { Assignment::FirstFree };
        let layout = Layout { targets, drafters, mode: Mode::Replicas, assignment, queue_depth: 2 };
        let (cancel, board) = (Cancel::new(), Board::default());
        let conveyor = Conveyor::<Parcel, Slot>::new(layout, &cancel, &board).unwrap();
        stock(&conveyor, slots);
        let meeting = Meeting::new(drafters, &cancel);
        let parcels: Vec<Parcel> = (0..count).map(|seq| Parcel { seq, index: seq, held_out: false }).collect();
        let totals = std::thread::scope(|scope| {
            let (conveyor, board, meeting, parcels) = (&conveyor, &board, &meeting, &parcels);
            scope.spawn(move || {
                let mut feeder = conveyor.feeder(&board.register("prefetcher", None)).unwrap();
                parcels.iter().for_each(|parcel| assert!(feeder.put(*parcel).unwrap()));
                feeder.close();
            });
            let threads: Vec<_> = (0..drafters).map(|d| scope.spawn(move || {
                let station = board.register(format!("device {d}"), None);
                let mut drafter = conveyor.drafter(d, &station).unwrap();
                let mut target = (d < targets).then(|| conveyor.target(d, &station).unwrap());
                let mut member = meeting.join(d, &station).unwrap();
                let compute = |mut work: Work<Parcel, Slot>| {
                    write(&mut work, seed);
                    work.fill();
                };
                let mut next = |target: &mut Option<TargetEnd<Parcel, Slot>>| match target {
                    None => drafter.next().unwrap(),
                    Some(target) => loop {
                        match drafter.turn(target).unwrap() {
                            None => break None,
                            Some(Turn::Train(filled)) => break Some(filled),
                            Some(Turn::Compute(work)) => compute(work),
                        }
                    },
                };
                let mut sums = Vec::new();
                for step in 0..count.div_ceil(g) {
                    let range = step * g..((step + 1) * g).min(count);
                    let mut sum = 0;
                    for index in range.clone().filter(|index| index % drafters as u64 == d as u64) {
                        let filled = next(&mut target).expect("a batch of this step is still to come");
                        assert_eq!(read(&filled, seed).index, index);
                        sum += index;
                    }
                    if let Some(target) = &mut target {
                        while let Some(work) = target.take_if(|parcel| parcel.index < range.end).unwrap() {
                            compute(work);
                        }
                    }
                    sums.push(member.gather(sum).unwrap().iter().sum::<u64>());
                }
                assert!(next(&mut target).is_none());
                if let Some(mut target) = target {
                    assert!(target.take().unwrap().is_none());
                }
                sums
            })).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for sums in totals {
            let expected: Vec<u64> = (0..count.div_ceil(g)).map(|step| (step * g..((step + 1) * g).min(count)).sum()).collect();
            prop_assert_eq!(sums, expected);
        }
        prop_assert!(!cancel.is_cancelled());
    }
}

const SMALL: Layout = Layout { targets: 1, drafters: 1, mode: Mode::Replicas, assignment: Assignment::FirstFree, queue_depth: 4 };

fn small() -> (Cancel, Board, Conveyor<Parcel, Slot>) {
    let (cancel, board) = (Cancel::new(), Board::default());
    let conveyor = Conveyor::new(SMALL, &cancel, &board).unwrap();
    stock(&conveyor, 2);
    (cancel, board, conveyor)
}

#[test]
fn slots_per_pool_follow_the_formula() {
    let slots = |targets, drafters, mode| Layout { targets, drafters, mode, ..SMALL }.slots_per_pool();
    assert_eq!([slots(5, 3, Mode::Replicas), slots(1, 3, Mode::Replicas), slots(6, 3, Mode::Replicas)], [4, 3, 4]);
    assert_eq!(slots(5, 3, Mode::Sweep), 7);
}

#[test]
fn ends_and_pools_are_given_once() {
    let (_cancel, board, conveyor) = small();
    let station = board.register("w", None);
    let _ends =
        (conveyor.feeder(&station).unwrap(), conveyor.target(0, &station).unwrap(), conveyor.drafter(0, &station).unwrap());
    assert_eq!(conveyor.feeder(&station).err(), Some(ConveyorError::NoSuchEnd { kind: "feeder", number: 0 }));
    assert_eq!(conveyor.target(0, &station).err(), Some(ConveyorError::NoSuchEnd { kind: "target", number: 0 }));
    assert_eq!(conveyor.drafter(1, &station).err(), Some(ConveyorError::NoSuchEnd { kind: "drafter", number: 1 }));
    assert_eq!(conveyor.stock(0, vec![Slot::default()]), Err(ConveyorError::BadStock { pool: 0, slots: 1, pools: 1 }));
    assert_eq!(conveyor.stock(1, vec![Slot::default()]), Err(ConveyorError::BadStock { pool: 1, slots: 1, pools: 1 }));
    let none = Layout { queue_depth: 0, ..SMALL };
    assert_eq!(Conveyor::<Parcel, Slot>::new(none, &Cancel::new(), &board).err(), Some(ConveyorError::EmptyLayout(none)));
}

type Ends = (Feeder<Parcel, Slot>, TargetEnd<Parcel, Slot>, DrafterEnd<Parcel, Slot>);

/// Puts `count` batches and returns all three ends.
fn primed(count: u64) -> (Cancel, Board, Conveyor<Parcel, Slot>, Ends) {
    let (cancel, board, conveyor) = small();
    let mut feeder = conveyor.feeder(&board.register("prefetcher", None)).unwrap();
    let target = conveyor.target(0, &board.register("target 0", Some("cuda:0".into()))).unwrap();
    let drafter = conveyor.drafter(0, &board.register("drafter 0", None)).unwrap();
    for parcel in parcels(count) {
        feeder.put(parcel).unwrap();
    }
    (cancel, board, conveyor, (feeder, target, drafter))
}

#[test]
fn halting_is_a_good_end_for_everybody_and_returns_every_slot() {
    let (cancel, _board, conveyor, (mut feeder, mut target, mut drafter)) = primed(4);
    target.take().unwrap().unwrap().fill();
    let held = drafter.next().unwrap().unwrap();
    let writing = target.take().unwrap().unwrap();
    conveyor.halt();
    assert!(!feeder.put(parcels(1)[0]).unwrap());
    drop(feeder);
    writing.fill();
    assert!(target.take().unwrap().is_none());
    assert_eq!(held.slot().content, 0);
    held.release();
    assert!(drafter.next().unwrap().is_none());
    assert_eq!(conveyor.counters().free_slots, [2]);
    assert!(!cancel.is_cancelled());
}

#[test]
fn work_dropped_unfilled_cancels_and_the_workers_own_error_takes_its_place() {
    let (cancel, board, conveyor, (_feeder, mut target, mut drafter)) = primed(1);
    drop(target.take().unwrap());
    let cause = cancel.cause().unwrap();
    let text = "target 0 failed in writing its slot (batch 0) on cuda:0: dropped unfilled the slot of batch 0";
    assert_eq!(cause.to_string(), text);
    assert!(drafter.next().is_err());
    assert_eq!(conveyor.counters().free_slots, [2], "the slot went back");
    cancel.cancel(board.register("target 0", None).cause(Kind::Failed, "out of memory"));
    assert_eq!(cancel.cause().unwrap().error, "out of memory");
}

#[test]
fn a_panicking_holder_cancels_and_its_slot_goes_to_nobody() {
    for reader in [false, true] {
        let (cancel, _board, conveyor, (_feeder, mut target, mut drafter)) = primed(1);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let work = target.take().unwrap().unwrap();
            if reader {
                work.fill();
                let _lease = drafter.next().unwrap().unwrap();
                panic!("in the middle of reading");
            }
            panic!("in the middle of writing");
        }));
        assert!(caught.is_err());
        let error = &cancel.cause().unwrap().error;
        let how =
            if reader { "panicked while it read the slot of batch 0" } else { "panicked while it wrote the slot of batch 0" };
        assert_eq!(error, how);
        let counters = conveyor.counters();
        assert_eq!((counters.free_slots, counters.quarantined), (vec![1], 1));
    }
}

#[test]
fn an_end_that_leaves_early_is_a_failure() {
    let (cancel, _board, _conveyor, (feeder, target, mut drafter)) = primed(0);
    drop(feeder);
    assert_eq!(cancel.cause().unwrap().to_string(), "prefetcher failed: left the conveyor before the end of the stream");
    drop(target);
    assert!(drafter.next().is_err());
}

#[test]
fn a_wait_says_on_the_board_what_is_missing_and_its_time_is_counted() {
    let (_cancel, board, conveyor, (feeder, mut target, mut drafter)) = primed(0);
    let waits = |text: &str| {
        while !board.report().contains(text) {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(target.take().unwrap().is_none()));
        scope.spawn(|| assert!(drafter.next().unwrap().is_none()));
        waits("target 0 on cuda:0: waiting for a batch,");
        waits("drafter 0: waiting for a batch that a target has taken, for drafter 0,");
        waits("conveyor: 0 put, 0 queued");
        feeder.close();
    });
    let counters = conveyor.counters();
    assert!(counters.take_wait_ns > 0 && counters.next_wait_ns > 0 && counters.put_wait_ns == 0, "{counters:?}");
}
