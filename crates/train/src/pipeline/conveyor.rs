//! Its job: one monitor that moves batches from the prefetcher through targets into slots, and filled slots to drafters.
//! It refuses to know what a batch or a slot is, to copy one, and to let a worker leave early unnoticed.
//! Invariants: those of the `flow` module, and: every wait ends when the run is cancelled; a [`Work`] that is dropped unfilled, a holder
//! that panics, and an end that is dropped before the end of the stream cancel the run. One lock and one condition variable serve everybody:
//! the traffic is tens of events per second, and a single condition cannot lose a wake-up to the wrong waiter.

use super::board::{Board, Span, Station, What};
use super::cancel::{Cancel, Cancelled, Kind, Wake};
use super::flow::{Answer, Delivered, Flow, Taken};
use super::layout::{Batch, ConveyorError, Layout, Mode};
use super::sync::{Arc, Condvar, Mutex, MutexGuard, lock, wait};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// How much has passed and what stands where, read without the conveyor's lock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Batches put into the queue.
    pub put: u64,
    /// Slots filled by targets.
    pub filled: u64,
    /// Leases given back by drafters.
    pub released: u64,
    /// Batches that wait for a target.
    pub queue_depth: usize,
    /// Slots that targets are writing.
    pub writing: usize,
    /// Slots that drafters are reading.
    pub leased: usize,
    /// Per pool, free slots.
    pub free_slots: Vec<usize>,
    /// Per drafter, filled slots that wait for it.
    pub filled_slots: Vec<usize>,
    /// Slots lost to a panicking holder; the run is then cancelled.
    pub quarantined: usize,
    /// Nanoseconds the prefetcher waited for room: the targets are the bottleneck.
    pub put_wait_ns: u64,
    /// Nanoseconds the targets waited, all together: for batches (the prefetcher is slow) or for slots (the drafters are).
    pub take_wait_ns: u64,
    /// Nanoseconds the drafters waited, all together: the targets are slow.
    pub next_wait_ns: u64,
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "conveyor: {} put, {} queued, {} being written, {} filled so far, waiting filled per drafter {:?}, {} being read, free per pool {:?}",
            self.put, self.queue_depth, self.writing, self.filled, self.filled_slots, self.leased, self.free_slots
        )
    }
}

#[derive(Default)]
struct Gauges {
    put: AtomicU64,
    filled: AtomicU64,
    released: AtomicU64,
    queue_depth: AtomicUsize,
    writing: AtomicUsize,
    leased: AtomicUsize,
    quarantined: AtomicUsize,
    free_slots: Vec<AtomicUsize>,
    filled_slots: Vec<AtomicUsize>,
    put_wait_ns: AtomicU64,
    take_wait_ns: AtomicU64,
    next_wait_ns: AtomicU64,
}

struct State<B, S> {
    flow: Flow<B, S>,
    feeder_taken: bool,
    targets_taken: Vec<bool>,
    drafters_taken: Vec<bool>,
}

struct Shared<B, S> {
    state: Mutex<State<B, S>>,
    changed: Condvar,
    gauges: Gauges,
    cancel: Cancel,
    board: Board,
    layout: Layout,
}

impl<B: Batch, S: Send + Sync + 'static> Wake for Shared<B, S> {
    fn wake(&self) {
        let _state = lock(&self.state);
        self.changed.notify_all();
    }
}

impl<B: Batch, S: Send + Sync + 'static> Shared<B, S> {
    /// Asks the rules until they say now or end. `asks` runs under the lock.
    fn wait_for<T>(
        &self,
        station: &Station,
        waited: &AtomicU64,
        mut asks: impl FnMut(&mut Flow<B, S>) -> Answer<T>,
    ) -> Result<Option<T>, Cancelled> {
        let mut span: Option<(Span<'_>, u64)> = None;
        let mut state = lock(&self.state);
        let outcome = loop {
            // Asked under the lock: whoever cancels takes this lock before it notifies.
            if let Err(cancelled) = self.cancel.check() {
                break Err(cancelled);
            }
            match asks(&mut state.flow) {
                Answer::Now(value) => {
                    self.publish(&state);
                    break Ok(Some(value));
                }
                Answer::End => break Ok(None),
                Answer::Wait(what) => {
                    match &span {
                        Some((span, _)) => span.now_for(what),
                        None => span = Some((station.waiting(what), self.board.now_ns())),
                    }
                    state = wait(&self.changed, state);
                }
            }
        };
        drop(state);
        if let Some((_, since)) = span {
            waited.fetch_add(self.board.now_ns().saturating_sub(since), Relaxed);
        }
        outcome
    }

    /// Changes the state without waiting, and tells everybody. What `change` returns is dropped after the lock is free.
    fn update<T>(&self, change: impl FnOnce(&mut Flow<B, S>) -> T) -> T {
        let mut state = lock(&self.state);
        let value = change(&mut state.flow);
        self.publish(&state);
        drop(state);
        value
    }

    /// Called with the lock held, after every change.
    fn publish(&self, state: &MutexGuard<'_, State<B, S>>) {
        let census = state.flow.census();
        let gauges = &self.gauges;
        gauges.queue_depth.store(census.queued, Relaxed);
        gauges.writing.store(census.writing, Relaxed);
        gauges.leased.store(census.leased, Relaxed);
        gauges.quarantined.store(census.quarantined, Relaxed);
        for (pool, gauge) in gauges.free_slots.iter().enumerate() {
            gauge.store(state.flow.free_in(pool), Relaxed);
        }
        for (drafter, gauge) in gauges.filled_slots.iter().enumerate() {
            gauge.store(state.flow.filled_for(drafter), Relaxed);
        }
        self.changed.notify_all();
    }

    /// Something was dropped that should have been finished. The worker's own error, if it has one, replaces this cause.
    fn complain(&self, station: &Station, error: String) {
        if !self.cancel.is_cancelled() {
            self.cancel.cancel(station.cause(Kind::Failed, error).provisional());
        }
    }
}

/// The conveyor. Clones are the same conveyor; workers take their ends from it.
pub struct Conveyor<B, S>(Arc<Shared<B, S>>);

impl<B, S> Clone for Conveyor<B, S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: Batch, S: Send + Sync + 'static> Conveyor<B, S> {
    /// An empty conveyor without slots: the owners of the devices [`stock`](Self::stock) them during start-up.
    ///
    /// # Errors
    /// [`ConveyorError::EmptyLayout`] if a count is zero.
    pub fn new(layout: Layout, cancel: &Cancel, board: &Board) -> Result<Self, ConveyorError> {
        if layout.targets == 0 || layout.drafters == 0 || layout.queue_depth == 0 {
            return Err(ConveyorError::EmptyLayout(layout));
        }
        let state = State {
            flow: Flow::new(layout),
            feeder_taken: false,
            targets_taken: vec![false; layout.targets],
            drafters_taken: vec![false; layout.drafters],
        };
        let gauges = Gauges {
            free_slots: (0..layout.pools()).map(|_| AtomicUsize::new(0)).collect(),
            filled_slots: (0..layout.drafters).map(|_| AtomicUsize::new(0)).collect(),
            ..Gauges::default()
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            gauges,
            cancel: cancel.clone(),
            board: board.clone(),
            layout,
        });
        let waker = Arc::downgrade(&shared);
        cancel.register(waker);
        let conveyor = Self(shared);
        let weak = Arc::downgrade(&conveyor.0);
        board.note(move || weak.upgrade().map(|shared| Self(shared).counters().to_string()));
        Ok(conveyor)
    }

    /// The shape it was made with.
    pub fn layout(&self) -> Layout {
        self.0.layout
    }

    /// Gives pool `pool` its slots, once: pool d belongs to drafter d, pool 0 to all in a sweep. Slots circulate first in, first out.
    ///
    /// # Errors
    /// [`ConveyorError::BadStock`].
    pub fn stock(&self, pool: usize, slots: Vec<S>) -> Result<(), ConveyorError> {
        let (count, pools) = (slots.len(), self.0.layout.pools());
        if pool < pools && count > 0 && self.0.update(|flow| flow.stock(pool, slots)) {
            return Ok(());
        }
        Err(ConveyorError::BadStock { pool, slots: count, pools })
    }

    /// The prefetcher's end.
    ///
    /// # Errors
    /// [`ConveyorError::NoSuchEnd`] if it was taken.
    pub fn feeder(&self, station: &Station) -> Result<Feeder<B, S>, ConveyorError> {
        if std::mem::replace(&mut lock(&self.0.state).feeder_taken, true) {
            return Err(ConveyorError::NoSuchEnd { kind: "feeder", number: 0 });
        }
        Ok(Feeder { end: End::new(self, station) })
    }

    /// Target `number`'s end.
    ///
    /// # Errors
    /// [`ConveyorError::NoSuchEnd`] if it was taken or there are fewer targets.
    pub fn target(&self, number: usize, station: &Station) -> Result<TargetEnd<B, S>, ConveyorError> {
        claim(&mut lock(&self.0.state).targets_taken, "target", number)?;
        Ok(TargetEnd { number, end: End::new(self, station) })
    }

    /// Drafter `number`'s end.
    ///
    /// # Errors
    /// [`ConveyorError::NoSuchEnd`] if it was taken or there are fewer drafters.
    pub fn drafter(&self, number: usize, station: &Station) -> Result<DrafterEnd<B, S>, ConveyorError> {
        claim(&mut lock(&self.0.state).drafters_taken, "drafter", number)?;
        Ok(DrafterEnd { number, end: End::new(self, station) })
    }

    /// Ends the stream now, as a success: the drafters have decided together that they want no more. The feeder is told, targets and drafters
    /// get their end (or may just leave), what is queued or filled is dropped. Leases that are held stay valid.
    pub fn halt(&self) {
        let dropped = self.0.update(Flow::halt);
        drop(dropped);
    }

    /// What has passed and what stands where. Takes no lock; figures of one instant may differ by an event.
    pub fn counters(&self) -> Counters {
        let gauges = &self.0.gauges;
        let load = |list: &[AtomicUsize]| list.iter().map(|gauge| gauge.load(Relaxed)).collect();
        Counters {
            put: gauges.put.load(Relaxed),
            filled: gauges.filled.load(Relaxed),
            released: gauges.released.load(Relaxed),
            queue_depth: gauges.queue_depth.load(Relaxed),
            writing: gauges.writing.load(Relaxed),
            leased: gauges.leased.load(Relaxed),
            free_slots: load(&gauges.free_slots),
            filled_slots: load(&gauges.filled_slots),
            quarantined: gauges.quarantined.load(Relaxed),
            put_wait_ns: gauges.put_wait_ns.load(Relaxed),
            take_wait_ns: gauges.take_wait_ns.load(Relaxed),
            next_wait_ns: gauges.next_wait_ns.load(Relaxed),
        }
    }

    #[cfg(all(test, shuttle))]
    pub(crate) fn census(&self) -> super::flow::Census {
        lock(&self.0.state).flow.census()
    }
}

fn claim(taken: &mut [bool], kind: &'static str, number: usize) -> Result<(), ConveyorError> {
    match taken.get_mut(number) {
        Some(taken) if !*taken => {
            *taken = true;
            Ok(())
        }
        _ => Err(ConveyorError::NoSuchEnd { kind, number }),
    }
}

/// What the three kinds of end share: they complain when they are dropped before the stream has ended for them.
struct End<B: Batch, S: Send + Sync + 'static> {
    shared: Arc<Shared<B, S>>,
    station: Station,
    finished: bool,
}

impl<B: Batch, S: Send + Sync + 'static> End<B, S> {
    fn new(conveyor: &Conveyor<B, S>, station: &Station) -> Self {
        Self { shared: conveyor.0.clone(), station: station.clone(), finished: false }
    }

    fn work(&self, taken: Taken<B, S>) -> Work<B, S> {
        self.station.busy(What::new("writing its slot").batch(taken.batch.index()));
        Work { shared: self.shared.clone(), station: self.station.clone(), taken: Some(taken) }
    }

    fn filled(&self, delivered: Delivered<B, S>) -> Filled<B, S> {
        self.station.busy(What::new("reading its slot").batch(delivered.batch.index()));
        Filled { shared: self.shared.clone(), station: self.station.clone(), delivered: Some(delivered) }
    }
}

impl<B: Batch, S: Send + Sync + 'static> Drop for End<B, S> {
    fn drop(&mut self) {
        if !self.finished && !lock(&self.shared.state).flow.is_halted() {
            self.shared.complain(&self.station, "left the conveyor before the end of the stream".to_owned());
        }
    }
}

/// The prefetcher's end. It must be closed: a prefetcher that merely goes away is not the end of the data.
pub struct Feeder<B: Batch, S: Send + Sync + 'static> {
    end: End<B, S>,
}

impl<B: Batch, S: Send + Sync + 'static> Feeder<B, S> {
    /// Queues a batch; waits while the queue is full. False once the stream was [halted](Conveyor::halt): feed no more.
    ///
    /// # Errors
    /// [`Cancelled`].
    pub fn put(&mut self, batch: B) -> Result<bool, Cancelled> {
        let shared = &self.end.shared;
        let mut batch = Some(batch);
        let queued = shared.wait_for(&self.end.station, &shared.gauges.put_wait_ns, |flow| flow.put(&mut batch))?;
        if queued.is_some() {
            shared.gauges.put.fetch_add(1, Relaxed);
            self.end.station.advance(1);
        }
        Ok(queued.is_some())
    }

    /// No batch follows. Takers and drafters get what is under way, then their end.
    pub fn close(mut self) {
        self.end.finished = true;
        self.end.shared.update(Flow::close);
    }
}

/// A target's end.
pub struct TargetEnd<B: Batch, S: Send + Sync + 'static> {
    number: usize,
    end: End<B, S>,
}

impl<B: Batch, S: Send + Sync + 'static> TargetEnd<B, S> {
    /// The next batch with a slot to write, in the order of `put`; `None` at the end of the stream. The board then says that the worker is busy
    /// writing the slot, until it says something better itself.
    ///
    /// # Errors
    /// [`Cancelled`].
    pub fn take(&mut self) -> Result<Option<Work<B, S>>, Cancelled> {
        let taken = self.ask(&|_| true)?;
        self.end.finished |= taken.is_none();
        Ok(taken)
    }

    /// Like [`take`](Self::take), but `None` as well when the next batch is not `wanted`. A thread that runs a target and a drafter calls this
    /// until `None`, with "belongs to the step that I am about to reduce", before it joins the all-reduce: otherwise the other drafters
    /// may wait for batches that only this thread computes.
    ///
    /// # Errors
    /// [`Cancelled`].
    pub fn take_if(&mut self, wanted: impl Fn(&B) -> bool) -> Result<Option<Work<B, S>>, Cancelled> {
        self.ask(&wanted)
    }

    fn ask(&self, wanted: &dyn Fn(&B) -> bool) -> Result<Option<Work<B, S>>, Cancelled> {
        let shared = &self.end.shared;
        let number = self.number;
        let taken = shared.wait_for(&self.end.station, &shared.gauges.take_wait_ns, |flow| flow.take(number, wanted))?;
        Ok(taken.map(|taken| self.end.work(taken)))
    }
}

/// A drafter's end.
pub struct DrafterEnd<B: Batch, S: Send + Sync + 'static> {
    number: usize,
    end: End<B, S>,
}

impl<B: Batch, S: Send + Sync + 'static> DrafterEnd<B, S> {
    /// The drafter's next batch with its filled slot, in the order of `put` whichever target was faster; `None` at the end of the stream.
    ///
    /// # Errors
    /// [`Cancelled`].
    #[expect(clippy::should_implement_trait, reason = "it waits and can fail, which an iterator must not")]
    pub fn next(&mut self) -> Result<Option<Filled<B, S>>, Cancelled> {
        let shared = &self.end.shared;
        let number = self.number;
        let delivered = shared.wait_for(&self.end.station, &shared.gauges.next_wait_ns, |flow| flow.next(number))?;
        self.end.finished |= delivered.is_none();
        Ok(delivered.map(|delivered| self.end.filled(delivered)))
    }

    /// For a thread that owns a target as well: whichever comes first, a filled slot for its drafter (preferred: it frees a slot) or a batch
    /// for its target. `None` when the stream has ended for both.
    ///
    /// # Errors
    /// [`Cancelled`].
    pub fn turn(&mut self, target: &mut TargetEnd<B, S>) -> Result<Option<Turn<B, S>>, Cancelled> {
        enum Either<B, S> {
            Read(Delivered<B, S>),
            Write(Taken<B, S>),
        }
        let shared = &self.end.shared;
        let (drafter, number) = (self.number, target.number);
        let turn = shared.wait_for(&self.end.station, &shared.gauges.next_wait_ns, |flow| match flow.next(drafter) {
            Answer::Now(delivered) => Answer::Now(Either::Read(delivered)),
            read => match (flow.take(number, &|_| true), read) {
                (Answer::Now(taken), _) => Answer::Now(Either::Write(taken)),
                (Answer::Wait(what), _) | (Answer::End, Answer::Wait(what)) => Answer::Wait(what),
                (Answer::End, _) => Answer::End,
            },
        })?;
        let ended = turn.is_none();
        self.end.finished |= ended;
        target.end.finished |= ended;
        Ok(turn.map(|turn| match turn {
            Either::Read(delivered) => Turn::Train(self.end.filled(delivered)),
            Either::Write(taken) => Turn::Compute(target.end.work(taken)),
        }))
    }
}

/// What a thread with both roles does next.
pub enum Turn<B: Batch, S: Send + Sync + 'static> {
    /// Train on this slot.
    Train(Filled<B, S>),
    /// Run the target into this slot.
    Compute(Work<B, S>),
}

/// A batch to compute and the slot to write it to; `*work` is the slot. It must be [filled](Work::fill).
pub struct Work<B: Batch, S: Send + Sync + 'static> {
    shared: Arc<Shared<B, S>>,
    station: Station,
    taken: Option<Taken<B, S>>,
}

const HELD: &str = "present until consumed";

impl<B: Batch, S: Send + Sync + 'static> Work<B, S> {
    /// The batch.
    pub fn batch(&self) -> &Arc<B> {
        &self.taken.as_ref().expect(HELD).batch
    }

    /// The drafter that will read the slot; `None` when all do.
    pub fn drafter(&self) -> Option<usize> {
        match self.shared.layout.mode {
            Mode::Replicas => Some(self.taken.as_ref().expect(HELD).pool),
            Mode::Sweep => None,
        }
    }

    /// Hands the written slot to its readers. Never waits: their place was reserved when the batch was taken.
    pub fn fill(mut self) {
        if let Some(taken) = self.taken.take() {
            self.shared.gauges.filled.fetch_add(1, Relaxed);
            let dropped = self.shared.update(|flow| flow.fill(taken));
            drop(dropped);
            self.station.advance(1);
        }
    }
}

impl<B: Batch, S: Send + Sync + 'static> Deref for Work<B, S> {
    type Target = S;
    fn deref(&self) -> &S {
        &self.taken.as_ref().expect(HELD).slot
    }
}

impl<B: Batch, S: Send + Sync + 'static> DerefMut for Work<B, S> {
    fn deref_mut(&mut self) -> &mut S {
        Arc::get_mut(&mut self.taken.as_mut().expect(HELD).slot).expect("a slot that is being written has no reader")
    }
}

impl<B: Batch, S: Send + Sync + 'static> Drop for Work<B, S> {
    fn drop(&mut self) {
        let Some(taken) = self.taken.take() else { return };
        let (index, panicked) = (taken.batch.index(), std::thread::panicking());
        let batch = self.shared.update(|flow| flow.abandon(taken, panicked));
        drop(batch);
        let how = if panicked { "panicked while it wrote" } else { "dropped unfilled" };
        self.shared.complain(&self.station, format!("{how} the slot of batch {index}"));
    }
}

/// A lease on a filled slot. It goes back when it is released or dropped; until then `slot` may be read.
pub struct Filled<B: Batch, S: Send + Sync + 'static> {
    shared: Arc<Shared<B, S>>,
    station: Station,
    delivered: Option<Delivered<B, S>>,
}

impl<B: Batch, S: Send + Sync + 'static> Filled<B, S> {
    /// The batch.
    pub fn batch(&self) -> &Arc<B> {
        &self.delivered.as_ref().expect(HELD).batch
    }

    /// The features.
    pub fn slot(&self) -> &S {
        &self.delivered.as_ref().expect(HELD).slot
    }

    /// Gives the slot back. Reads of it may still be queued on a device: a slot type for devices orders the next write behind them.
    pub fn release(self) {}
}

impl<B: Batch, S: Send + Sync + 'static> Drop for Filled<B, S> {
    fn drop(&mut self) {
        let Some(Delivered { seq, batch, slot }) = self.delivered.take() else { return };
        let index = batch.index();
        // Before the count goes down: the last reader's slot must have no handle left when it is written again.
        drop((batch, slot));
        if std::thread::panicking() {
            let batch = self.shared.update(|flow| flow.quarantine(seq));
            drop(batch);
            self.shared.complain(&self.station, format!("panicked while it read the slot of batch {index}"));
        } else {
            let batch = self.shared.update(|flow| flow.release(seq));
            drop(batch);
            self.shared.gauges.released.fetch_add(1, Relaxed);
            self.station.advance(1);
        }
    }
}

#[cfg(all(test, not(shuttle)))]
#[path = "conveyor_tests.rs"]
mod tests;
