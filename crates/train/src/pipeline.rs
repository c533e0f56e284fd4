//! Its job: the concurrency core of training, generic over what a batch and a slot are: how batches flow from one prefetcher through T targets
//! into slots and on to D drafters, how all of them start together, decide together, are watched, and end together.
//! It refuses to know of models, graphs and devices, to print, and to end the process.
//! Invariants: a run never hangs silently and never looks good after a failure. Every wait can be cancelled and stands on the board; the first
//! cause is kept with its worker, activity and device; no thread outlives [`crew::run`]. Device waits are the workers' own: they poll
//! an event, call [`cancel::Cancel::check`] in between, and say on their [`board::Station`] what they wait for.
//!
//! | module | what |
//! |---|---|
//! | [`cancel`] | one token per run; first cause wins; also the polite request to stop |
//! | [`board`] | what every worker does or waits for, its progress and times; the watchdog |
//! | [`gate`] | start-up phases with limits; one gate that opens when all are ready |
//! | [`layout`] | the shape of the conveyor: T, D, replicas or sweep, assignment, slots |
//! | [`conveyor`] | batches, slots, leases; order, back-pressure, end of stream |
//! | [`reduce`] | meetings of the drafters: decide together, all-reduce in rank order |
//! | [`crew`] | named threads, their errors and panics, alarms, the join |
//!
//! # A whole run
//!
//! Two targets, two replicas, steps of four batches, the last one short; the "model" is one number that each step adds to.
//!
//! ```
//! use drafthorse_train::pipeline::board::{Board, Station, Watchdog, What};
//! use drafthorse_train::pipeline::cancel::Cancel;
//! use drafthorse_train::pipeline::conveyor::Conveyor;
//! use drafthorse_train::pipeline::crew::{self, Alarm, BoxError, Watch};
//! use drafthorse_train::pipeline::gate::{Entrant, Gate, Limits, Phase, Role};
//! use drafthorse_train::pipeline::layout::{Assignment, Batch, Layout, Mode};
//! use drafthorse_train::pipeline::reduce::{AllReduce, CHUNK, Meeting};
//! use std::time::Duration;
//!
//! struct Packed { index: u64, step: u64, held_out: bool, tokens: Vec<u32> }
//! impl Batch for Packed {
//!     fn index(&self) -> u64 { self.index }
//! }
//! struct Slot { features: Vec<f32> }
//!
//! const BATCHES: u64 = 10;
//! const G: u64 = 4;
//!
//! fn prefetcher(conveyor: &Conveyor<Packed, Slot>, entrant: Entrant, station: &Station) -> Result<(), BoxError> {
//!     let mut feeder = conveyor.feeder(station)?;
//!     entrant.pass()?;
//!     for index in 0..BATCHES {
//!         station.busy(What::new("packing").batch(index));
//!         let batch = Packed { index, step: index / G, held_out: false, tokens: vec![index as u32; 3] };
//!         if !feeder.put(batch)? {
//!             break; // halted: the drafters want no more
//!         }
//!         if (index + 1) % G == 0 {
//!             // A held-out batch travels the same way, numbered apart, after the step it measures.
//!             feeder.put(Packed { index: index / G, step: index / G, held_out: true, tokens: vec![7] })?;
//!         }
//!     }
//!     feeder.close();
//!     Ok(())
//! }
//!
//! fn target(number: usize, conveyor: &Conveyor<Packed, Slot>, entrant: Entrant, station: &Station) -> Result<(), BoxError> {
//!     entrant.report(Phase::Weights, 1.0, "1 shard of 1")?;
//!     let mut end = conveyor.target(number, station)?;
//!     entrant.pass()?;
//!     while let Some(mut work) = end.take()? {
//!         let batch = work.batch().clone();
//!         station.busy(What::new("forward").batch(batch.index));
//!         work.features.clear();
//!         work.features.extend(batch.tokens.iter().map(|token| *token as f32));
//!         work.fill();
//!     }
//!     Ok(())
//! }
//!
//! fn drafter(
//!     rank: usize, conveyor: &Conveyor<Packed, Slot>, group: &AllReduce, votes: &Meeting<bool>, cancel: &Cancel, entrant: Entrant, station: &Station,
//! ) -> Result<f32, BoxError> {
//!     entrant.report(Phase::Arenas, 1.0, "slots")?;
//!     let slots = conveyor.layout().slots_per_pool();
//!     conveyor.stock(rank, (0..slots).map(|_| Slot { features: Vec::with_capacity(8) }).collect())?;
//!     let (mut reducer, mut vote) = (group.join(rank, station)?, votes.join(rank, station)?);
//!     let mut end = conveyor.drafter(rank, station)?;
//!     entrant.pass()?;
//!     let mut weight = 0.0f32;
//!     for step in 0..BATCHES.div_ceil(G) {
//!         let mut gradient = [0.0f32];
//!         let mine = (step * G..((step + 1) * G).min(BATCHES)).filter(|index| index % 2 == rank as u64);
//!         for _ in mine {
//!             let filled = loop {
//!                 let filled = end.next()?.ok_or("the stream ended inside a step")?;
//!                 if !filled.batch().held_out {
//!                     break filled;
//!                 }
//!                 station.busy("held-out forward");
//!             };
//!             assert_eq!(filled.batch().step, step);
//!             station.busy(What::new("train").batch(filled.batch().index));
//!             gradient[0] += filled.slot().features.iter().sum::<f32>();
//!             filled.release();
//!         }
//!         reducer.sum(&mut [&mut gradient])?; // joins with zeros if it had no batch in this step
//!         weight += gradient[0];
//!         station.advance(1);
//!         if vote.gather(cancel.stop_requested().is_some())?.contains(&true) {
//!             conveyor.halt(); // all ranks see the same votes, so all leave here: save, then
//!             break;
//!         }
//!     }
//!     while end.next()?.is_some() {} // held-out batches after the last step, or the end
//!     Ok(weight)
//! }
//!
//! let (cancel, board) = (Cancel::new(), Board::default());
//! let (events, telemetry) = std::sync::mpsc::channel();
//! let gate = Gate::new(&cancel, &board, Limits::default(), move |event| drop(events.send(event.clone())));
//! let layout = Layout { targets: 2, drafters: 2, mode: Mode::Replicas, assignment: Assignment::FirstFree, queue_depth: 4 };
//! let conveyor = Conveyor::<Packed, Slot>::new(layout, &cancel, &board)?;
//! let (group, votes) = (AllReduce::new(2, CHUNK, &cancel), Meeting::new(2, &cancel));
//! let watch = Watch {
//!     watchdog: Watchdog::new(&board, &cancel, Duration::from_secs(120)).with_gate(&gate),
//!     every: Duration::from_millis(200),
//!     grace: Duration::from_secs(10),
//!     on_alarm: Box::new(|alarm| match alarm {
//!         Alarm::Look => {}
//!         Alarm::Stalled(cause) => eprintln!("{cause}\n{}", cause.report.as_deref().unwrap_or_default()),
//!         Alarm::Overslept(late) => eprintln!("stood still for {late:?}: counting anew"),
//!         Alarm::NotComingBack(names) => { eprintln!("stuck: {names:?}"); std::process::exit(7) }
//!     }),
//! };
//! let coordinator = board.register("coordinator", None);
//! let weights = [const { std::sync::Mutex::new(0.0f32) }; 2];
//! crew::run(&cancel, &board, &coordinator, Some(watch), |crew| {
//!     // Everybody is registered before the first thread starts; the coordinator goes through the gate too.
//!     let own = gate.register(&coordinator, Role::Other)?;
//!     own.report(Phase::Checks, 1.0, "config, disk, memory")?;
//!     let enter = |name: String, role| {
//!         let station = board.register(name, Some("cpu".to_owned()));
//!         gate.register(&station, role).map(|entrant| (entrant, station))
//!     };
//!     let (entrant, station) = enter("prefetcher".to_owned(), Role::Other)?;
//!     crew.spawn(station, { let conveyor = &conveyor; move |station| prefetcher(conveyor, entrant, station) });
//!     for number in 0..2 {
//!         let (entrant, station) = enter(format!("target {number}"), Role::Target)?;
//!         let conveyor = &conveyor;
//!         crew.spawn(station, move |station| target(number, conveyor, entrant, station));
//!     }
//!     for rank in 0..2 {
//!         let (entrant, station) = enter(format!("drafter {rank}"), Role::Drafter)?;
//!         let (conveyor, group, votes, cancel, weights) = (&conveyor, &group, &votes, &cancel, &weights);
//!         crew.spawn(station, move |station| {
//!             *weights[rank].lock().unwrap() = drafter(rank, conveyor, group, votes, cancel, entrant, station)?;
//!             Ok(())
//!         });
//!     }
//!     gate.seal();
//!     own.pass()?;
//!     Ok(())
//! })?;
//! assert_eq!(weights.map(|weight| weight.into_inner().unwrap()), [135.0, 135.0]); // 3 · (0 + 1 + … + 9)
//! assert_eq!(conveyor.counters().free_slots, [3, 3]);
//! assert_eq!(telemetry.try_iter().last().map(|event| event.phase), Some(Phase::Open));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A thread with both roles
//!
//! Where one device has a target and a drafter, its thread asks [`conveyor::DrafterEnd::turn`], and before it joins the all-reduce of a step it
//! computes with [`conveyor::TargetEnd::take_if`] what is left of that step for the others: they may be waiting for it.
//!
//! # How it is checked
//!
//! `cargo test -p drafthorse-train --lib pipeline` runs unit and property tests on real threads.
//! `RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle cargo test -p drafthorse-train --lib pipeline` runs the same code under a model
//! checker that chooses the schedules: random, priority-based with few preemptions, and for the smallest conveyor all of them.

pub mod board;
pub mod cancel;
pub mod conveyor;
pub mod crew;
pub(crate) mod flow;
pub mod gate;
pub mod layout;
pub mod reduce;
mod sync;

#[cfg(all(test, shuttle))]
#[path = "pipeline/shuttle_tests.rs"]
mod shuttle_tests;
