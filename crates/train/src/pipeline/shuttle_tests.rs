//! The conveyor, the gate, meetings and the crew under a model checker: every schedule it draws must end, with every batch delivered once and no
//! slot lost or doubled, also when the run is cancelled at any point. The checker itself is checked: it must find the deadlock of a monitor that
//! takes a batch and reserves its slot in two acts, and the lost wake-up of a canceller that does not take the waiters' lock.
//! Run with `RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle cargo test -p drafthorse-train --lib pipeline`.

use super::board::{Board, Station};
use super::cancel::{Cancel, Cause, Kind};
use super::conveyor::{Conveyor, Turn};
use super::crew::{self, BoxError, Crew};
use super::gate::{Gate, Limits, Role};
use super::layout::{Assignment, Batch, Layout, Mode};
use super::reduce::{AllReduce, Meeting};
use super::sync::{Arc, Condvar, Mutex, lock, wait};
use std::collections::{BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

struct Number(u64);

impl Batch for Number {
    fn index(&self) -> u64 {
        self.0
    }
}

/// A slot that counts who is at it: two writers, or a writer and a reader, are a doubled slot.
#[derive(Default)]
struct Slot {
    content: u64,
    users: AtomicUsize,
}

#[derive(Clone, Copy)]
struct Scenario {
    layout: Layout,
    slots: usize,
    batches: u64,
    fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// Another thread cancels; the scheduler chooses when.
    Cancel,
    /// Target 0 fails with its first slot in hand.
    TargetFails,
    /// Drafter 0 panics with its first lease in hand.
    DrafterPanics,
    /// The prefetcher fails after its first batch.
    FeederFails,
    /// Drafter 0 halts the stream after its first batch.
    Halt,
}

const BASE: Layout = Layout { targets: 2, drafters: 2, mode: Mode::Replicas, assignment: Assignment::FirstFree, queue_depth: 1 };

fn feed(scenario: Scenario, conveyor: &Conveyor<Number, Slot>, station: &Station) -> Result<(), BoxError> {
    let mut feeder = conveyor.feeder(station)?;
    for index in 0..scenario.batches {
        if !feeder.put(Number(index))? {
            break;
        }
        if scenario.fault == Fault::FeederFails {
            return Err("the dataset is gone".into());
        }
    }
    feeder.close();
    Ok(())
}

fn forward(scenario: Scenario, conveyor: &Conveyor<Number, Slot>, number: usize, station: &Station) -> Result<(), BoxError> {
    let mut end = conveyor.target(number, station)?;
    while let Some(mut work) = end.take()? {
        if scenario.fault == Fault::TargetFails && number == 0 {
            return Err("out of memory".into());
        }
        assert_eq!(work.users.fetch_add(1, SeqCst), 0, "doubled slot");
        work.content = work.batch().0;
        shuttle::thread::yield_now();
        work.users.fetch_sub(1, SeqCst);
        work.fill();
    }
    Ok(())
}

fn train(scenario: Scenario, conveyor: &Conveyor<Number, Slot>, number: usize, station: &Station) -> Result<Vec<u64>, BoxError> {
    let mut end = conveyor.drafter(number, station)?;
    let mut got = Vec::new();
    while let Some(filled) = end.next()? {
        if scenario.fault == Fault::DrafterPanics && number == 0 {
            // Without the panic hook, whose output would drown the checker's.
            resume_unwind(Box::new("bad index"));
        }
        filled.slot().users.fetch_add(1, SeqCst);
        shuttle::thread::yield_now();
        assert_eq!(filled.slot().content, filled.batch().0, "another batch's features");
        filled.slot().users.fetch_sub(1, SeqCst);
        got.push(filled.batch().0);
        filled.release();
        if scenario.fault == Fault::Halt && number == 0 {
            conveyor.halt();
        }
    }
    Ok(got)
}

/// One whole run under whatever schedule the checker has chosen.
fn play(scenario: Scenario) {
    let Scenario { layout, slots, batches, fault } = scenario;
    let (cancel, board) = (Cancel::new(), Board::default());
    let conveyor = Conveyor::<Number, Slot>::new(layout, &cancel, &board).unwrap();
    for pool in 0..layout.pools() {
        conveyor.stock(pool, (0..slots).map(|_| Slot::default()).collect()).unwrap();
    }
    let received: Vec<_> = (0..layout.drafters).map(|_| std::sync::Mutex::new(Vec::new())).collect();
    let coordinator = board.register("coordinator", None);
    let outcome = crew::run(&cancel, &board, &coordinator, None, |crew: &Crew<'_, '_>| {
        crew.spawn_named("prefetcher", None, |station| feed(scenario, &conveyor, station));
        for number in 0..layout.targets {
            let conveyor = &conveyor;
            crew.spawn_named(format!("target {number}"), None, move |station| forward(scenario, conveyor, number, station));
        }
        for (number, received) in received.iter().enumerate() {
            let conveyor = &conveyor;
            crew.spawn_named(format!("drafter {number}"), None, move |station| {
                *received.lock().unwrap() = train(scenario, conveyor, number, station)?;
                Ok(())
            });
        }
        if fault == Fault::Cancel {
            cancel.cancel(Cause::new(Kind::Stopped, "user", "second SIGINT"));
        }
        Ok(())
    });
    let census = conveyor.census();
    match fault {
        Fault::None | Fault::Halt => outcome.unwrap(),
        Fault::Cancel => assert_eq!(outcome.unwrap_err().cause.error, "second SIGINT"),
        Fault::TargetFails => {
            // Target 1 may have taken every batch.
            if let Err(error) = outcome {
                assert_eq!((error.cause.worker.as_str(), error.cause.error.as_str()), ("target 0", "out of memory"));
            }
        }
        Fault::DrafterPanics => assert_eq!(outcome.unwrap_err().cause.error, "panicked: bad index"),
        Fault::FeederFails => assert_eq!(outcome.unwrap_err().cause.error, "the dataset is gone"),
    }
    // Nobody holds a slot any more: each is free, filled and undelivered, or set aside after a panic.
    assert_eq!(census.writing, 0);
    // All tasks of the checker share one machine thread and so one `panicking` flag: a holder that lets go while another unwinds is set aside too.
    assert_eq!(census.quarantined > 0, fault == Fault::DrafterPanics, "{census:?}");
    assert_eq!(census.free + census.filled + census.leased + census.quarantined, slots * layout.pools(), "{census:?}");
    if matches!(fault, Fault::None | Fault::Halt) {
        assert_eq!((census.filled, census.leased, census.free), (0, 0, slots * layout.pools()));
    }
    for (number, received) in received.iter().enumerate() {
        let got = received.lock().unwrap();
        let mine = |index: &u64| layout.mode == Mode::Sweep || index % layout.drafters as u64 == number as u64;
        let expected: Vec<u64> = (0..batches).filter(mine).collect();
        if fault == Fault::None {
            assert_eq!(*got, expected);
        }
        assert!(expected.starts_with(&got), "{got:?} is not the beginning of {expected:?}");
    }
}

fn check(scenario: Scenario, schedules: usize) {
    shuttle::check_random(move || play(scenario), schedules);
    shuttle::check_pct(move || play(scenario), schedules / 2, 3);
}

#[test]
fn replicas_deliver_every_batch_once_in_order() {
    check(Scenario { layout: BASE, slots: 1, batches: 4, fault: Fault::None }, 1_500);
    let layout = Layout { targets: 3, drafters: 1, queue_depth: 2, ..BASE };
    check(Scenario { layout, slots: 1, batches: 4, fault: Fault::None }, 1_500);
}

#[test]
fn fixed_assignment_delivers_too() {
    let layout = Layout { assignment: Assignment::Fixed, queue_depth: 2, ..BASE };
    check(Scenario { layout, slots: 1, batches: 5, fault: Fault::None }, 1_500);
}

#[test]
fn a_sweep_delivers_every_batch_to_all_and_frees_its_slot_once() {
    let layout = Layout { mode: Mode::Sweep, ..BASE };
    check(Scenario { layout, slots: 1, batches: 3, fault: Fault::None }, 1_500);
    check(Scenario { layout, slots: 2, batches: 4, fault: Fault::None }, 1_500);
}

#[test]
fn a_fault_at_any_point_ends_every_thread_and_loses_no_slot() {
    for fault in [Fault::Cancel, Fault::TargetFails, Fault::DrafterPanics, Fault::FeederFails, Fault::Halt] {
        for mode in [Mode::Replicas, Mode::Sweep] {
            let layout = Layout { mode, ..BASE };
            check(Scenario { layout, slots: 1, batches: 3, fault }, 800);
        }
    }
}

#[test]
fn every_schedule_of_the_smallest_conveyor_ends() {
    // One batch through one slot, with nothing but the conveyor: small enough to walk the whole tree of schedules.
    let schedules = Arc::new(AtomicUsize::new(0));
    let counted = schedules.clone();
    let tiny = move || {
        counted.fetch_add(1, SeqCst);
        let (cancel, board) = (Cancel::new(), Board::default());
        let layout = Layout { targets: 1, drafters: 1, queue_depth: 1, ..BASE };
        let conveyor = Conveyor::<Number, Slot>::new(layout, &cancel, &board).unwrap();
        conveyor.stock(0, vec![Slot::default()]).unwrap();
        let mut feeder = conveyor.feeder(&board.register("f", None)).unwrap();
        let mut target = conveyor.target(0, &board.register("t", None)).unwrap();
        let mut drafter = conveyor.drafter(0, &board.register("d", None)).unwrap();
        let thread = shuttle::thread::spawn(move || {
            while let Some(turn) = drafter.turn(&mut target).unwrap() {
                match turn {
                    Turn::Compute(work) => work.fill(),
                    Turn::Train(filled) => assert_eq!(filled.batch().0, 0),
                }
            }
        });
        assert!(feeder.put(Number(0)).unwrap());
        feeder.close();
        thread.join().unwrap();
        assert_eq!(conveyor.census().free, 1);
    };
    shuttle::check_dfs(tiny, Some(20_000));
    let schedules = schedules.load(SeqCst);
    assert!((100..20_000).contains(&schedules), "{schedules} schedules: not walked to the end, or nothing to choose");
}

/// Two devices with both roles, steps of `g` batches, and an all-reduce after each: the loop that a shared GPU runs.
fn shared_devices(targets: usize, g: u64, batches: u64) {
    let (cancel, board) = (Cancel::new(), Board::default());
    let layout = Layout { targets, ..BASE };
    let conveyor = Conveyor::<Number, Slot>::new(layout, &cancel, &board).unwrap();
    let group = AllReduce::new(2, 1, &cancel);
    let coordinator = board.register("coordinator", None);
    crew::run(&cancel, &board, &coordinator, None, |crew: &Crew<'_, '_>| {
        let (conveyor, group) = (&conveyor, &group);
        let scenario = Scenario { layout, slots: 1, batches, fault: Fault::None };
        crew.spawn_named("prefetcher", None, move |station| feed(scenario, conveyor, station));
        for number in 0..2 {
            crew.spawn_named(format!("device {number}"), None, move |station| {
                let mut reducer = group.join(number, station)?;
                let mut drafter = conveyor.drafter(number, station)?;
                let mut target = if number < targets { Some(conveyor.target(number, station)?) } else { None };
                conveyor.stock(number, vec![Slot::default()])?;
                let mut next = |target: &mut Option<_>| -> Result<Option<u64>, BoxError> {
                    let Some(target) = target else { return Ok(drafter.next()?.map(|filled| filled.batch().0)) };
                    loop {
                        match drafter.turn(target)? {
                            None => return Ok(None),
                            Some(Turn::Train(filled)) => return Ok(Some(filled.batch().0)),
                            Some(Turn::Compute(work)) => work.fill(),
                        }
                    }
                };
                for step in 0..batches.div_ceil(g) {
                    let range = step * g..((step + 1) * g).min(batches);
                    let mut sums = [0.0f32; 2];
                    for index in range.clone().filter(|index| index % 2 == number as u64) {
                        assert_eq!(next(&mut target)?, Some(index));
                        sums[0] += index as f32;
                        sums[1] += 1.0;
                    }
                    if let Some(target) = &mut target {
                        while let Some(work) = target.take_if(|batch| batch.0 < range.end)? {
                            work.fill();
                        }
                    }
                    reducer.sum(&mut [&mut sums])?;
                    assert_eq!(sums, [range.clone().sum::<u64>() as f32, range.count() as f32]);
                }
                assert_eq!(next(&mut target)?, None);
                if let Some(mut target) = target {
                    assert!(target.take()?.is_none());
                }
                Ok(())
            });
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn threads_with_both_roles_do_not_wait_for_themselves() {
    for (targets, g) in [(1, 2), (2, 3), (1, 1)] {
        shuttle::check_random(move || shared_devices(targets, g, 4), 500);
        shuttle::check_pct(move || shared_devices(targets, g, 4), 250, 3);
    }
}

#[test]
fn the_gate_opens_for_all_or_cancels_all() {
    for sabotage in [false, true] {
        let play = move || {
            let (cancel, board) = (Cancel::new(), Board::default());
            let opened = Arc::new(AtomicUsize::new(0));
            let told = opened.clone();
            let gate = Gate::new(&cancel, &board, Limits::default(), move |_| {
                told.fetch_add(1, SeqCst);
            });
            let coordinator = board.register("coordinator", None);
            let outcome = crew::run(&cancel, &board, &coordinator, None, |crew: &Crew<'_, '_>| {
                for (name, role) in [("target 0", Role::Target), ("drafter 0", Role::Drafter), ("prefetcher", Role::Other)] {
                    let station = board.register(name, None);
                    let entrant = gate.register(&station, role)?;
                    crew.spawn(station, move |_| {
                        if sabotage && role == Role::Other {
                            return Err("no such dataset".into());
                        }
                        Ok(entrant.pass()?)
                    });
                }
                gate.seal();
                Ok(())
            });
            assert_eq!(outcome.is_err(), sabotage);
            assert_eq!(gate.is_open(), !sabotage);
            match outcome {
                Err(error) => assert_eq!(error.cause.error, "no such dataset"),
                Ok(()) => assert_eq!(opened.load(SeqCst), 3),
            }
        };
        shuttle::check_random(play, 1_500);
        shuttle::check_pct(play, 500, 3);
    }
}

#[test]
fn a_rank_that_leaves_never_hangs_the_others() {
    let play = || {
        let (cancel, board) = (Cancel::new(), Board::default());
        let meeting = Meeting::new(3, &cancel);
        let coordinator = board.register("coordinator", None);
        let outcome = crew::run(&cancel, &board, &coordinator, None, |crew: &Crew<'_, '_>| {
            for rank in 0..3u64 {
                let meeting = &meeting;
                crew.spawn_named(format!("drafter {rank}"), None, move |station| {
                    let mut member = meeting.join(rank as usize, station)?;
                    for round in 0..if rank == 1 { 1 } else { 2 } {
                        assert_eq!(*member.gather(rank * 10 + round)?, [round, 10 + round, 20 + round]);
                    }
                    Ok(())
                });
            }
            Ok(())
        });
        assert_eq!(outcome.unwrap_err().cause.worker, "drafter 1");
    };
    shuttle::check_random(play, 1_500);
    shuttle::check_pct(play, 500, 3);
}

/// What the checker says about a program that must fail under it.
fn verdict(play: impl Fn() + Send + Sync + 'static) -> String {
    let caught = catch_unwind(AssertUnwindSafe(|| shuttle::check_random(play, 5_000)));
    let payload = caught.expect_err("the checker did not find the fault");
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// The conveyor as it must not be: a target takes the head of the queue in one act and reserves a slot in a second one.
struct Faulty {
    state: Mutex<FaultyState>,
    changed: Condvar,
}

struct FaultyState {
    queue: VecDeque<u64>,
    free: usize,
    filled: BTreeSet<u64>,
}

fn faulty(atomic: bool) {
    let state = FaultyState { queue: (0..2).collect(), free: 1, filled: BTreeSet::new() };
    let faulty = Arc::new(Faulty { state: Mutex::new(state), changed: Condvar::new() });
    let until = |faulty: &Faulty, act: &mut dyn FnMut(&mut FaultyState) -> bool| {
        let mut state = lock(&faulty.state);
        while !act(&mut state) {
            state = wait(&faulty.changed, state);
        }
        faulty.changed.notify_all();
    };
    for _ in 0..2 {
        let faulty = faulty.clone();
        shuttle::thread::spawn(move || {
            let mut mine = None;
            if atomic {
                until(&faulty, &mut |state| {
                    if state.free > 0 {
                        state.free -= 1;
                        mine = state.queue.pop_front();
                    }
                    mine.is_some()
                });
            } else {
                until(&faulty, &mut |state| {
                    mine = state.queue.pop_front();
                    mine.is_some()
                });
                until(&faulty, &mut |state| {
                    let free = state.free > 0;
                    state.free -= usize::from(free);
                    free
                });
            }
            until(&faulty, &mut |state| state.filled.insert(mine.unwrap()));
        });
    }
    for index in 0..2 {
        until(&faulty, &mut |state| {
            let there = state.filled.remove(&index);
            state.free += usize::from(there);
            there
        });
    }
}

#[test]
fn the_checker_finds_the_deadlock_of_taking_and_reserving_in_two_acts() {
    let text = verdict(|| faulty(false));
    assert!(text.contains("deadlock"), "{text}");
    // The same little monitor with both in one act passes, and so does the real conveyor with one slot.
    shuttle::check_random(|| faulty(true), 5_000);
    let layout = Layout { drafters: 1, queue_depth: 2, ..BASE };
    check(Scenario { layout, slots: 1, batches: 2, fault: Fault::None }, 2_000);
}

#[test]
fn the_checker_finds_the_lost_wake_up_of_a_canceller_without_the_lock() {
    let play = |locked: bool| {
        move || {
            let shared = Arc::new((Mutex::new(()), Condvar::new(), Cancel::new()));
            let other = shared.clone();
            shuttle::thread::spawn(move || {
                other.2.cancel(Cause::new(Kind::Failed, "w", "e"));
                let _guard = locked.then(|| lock(&other.0));
                other.1.notify_all();
            });
            let mut guard = lock(&shared.0);
            while !shared.2.is_cancelled() {
                guard = wait(&shared.1, guard);
            }
        }
    };
    let text = verdict(play(false));
    assert!(text.contains("deadlock"), "{text}");
    shuttle::check_random(play(true), 5_000);
}
