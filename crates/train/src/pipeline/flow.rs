//! Its job: the rules of the conveyor as a plain state machine: who may take which batch into which slot, and who gets it next.
//! It refuses to wait, to lock, to touch a clock, and to run a payload's destructor (payloads that leave are handed to the caller).
//! Invariants: every slot is at any moment in exactly one place: a pool, a writer, in flight (filled, with readers to come or reading), or
//! quarantined after its holder panicked. A drafter receives its batches in the order in which they were put. Only the head of the queue
//! can be taken, and only together with a slot of its pool: a later batch never holds a slot that an older one waits for.

use super::board::What;
use super::layout::{Assignment, Batch, Layout, Mode};
use super::sync::Arc;
use std::collections::{BTreeMap, VecDeque};

/// What the prefetcher waits for when the queue is full.
pub(crate) const ROOM: &str = "room in the batch queue";
/// What a target waits for when the slots of a replica are all in use.
pub(crate) const SLOT_OF_DRAFTER: &str = "a free slot of drafter";
/// The same in a sweep, whose drafters share one pool.
pub(crate) const SLOT_OF_POOL: &str = "a free slot of pool";

/// A batch that waits for a target.
struct Queued<B> {
    seq: u64,
    batch: Arc<B>,
}

/// A slot that holds features.
struct InFlight<B, S> {
    batch: Arc<B>,
    slot: Arc<S>,
    pool: usize,
    /// Drafters that have not received it yet.
    undelivered: usize,
    /// Drafters that hold a lease on it.
    reading: usize,
}

/// What a target takes away: a batch and a slot to write.
pub(crate) struct Taken<B, S> {
    pub seq: u64,
    pub batch: Arc<B>,
    pub slot: Arc<S>,
    pub pool: usize,
}

/// What a drafter receives: a batch and a slot to read.
pub(crate) struct Delivered<B, S> {
    pub seq: u64,
    pub batch: Arc<B>,
    pub slot: Arc<S>,
}

/// The answer of the rules to a request.
pub(crate) enum Answer<T> {
    /// Here it is.
    Now(T),
    /// Not yet; this is what is missing.
    Wait(What),
    /// Never again.
    End,
}

/// How many batches and slots are where, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census {
    pub queued: usize,
    pub free: usize,
    pub writing: usize,
    pub filled: usize,
    pub leased: usize,
    pub quarantined: usize,
}

pub(crate) struct Flow<B, S> {
    layout: Layout,
    queue: VecDeque<Queued<B>>,
    next_seq: u64,
    closed: bool,
    halted: bool,
    pools: Vec<VecDeque<Arc<S>>>,
    stocked: Vec<bool>,
    /// Per drafter, the sequence numbers that are taken and not yet delivered to it, ascending.
    due: Vec<VecDeque<u64>>,
    in_flight: BTreeMap<u64, InFlight<B, S>>,
    writing: usize,
    quarantined: usize,
}

impl<B: Batch, S> Flow<B, S> {
    pub(crate) fn new(layout: Layout) -> Self {
        let pools = layout.pools();
        Self {
            layout,
            queue: VecDeque::with_capacity(layout.queue_depth),
            next_seq: 0,
            closed: false,
            halted: false,
            pools: (0..pools).map(|_| VecDeque::new()).collect(),
            stocked: vec![false; pools],
            due: (0..layout.drafters).map(|_| VecDeque::new()).collect(),
            in_flight: BTreeMap::new(),
            writing: 0,
            quarantined: 0,
        }
    }

    /// Puts the slots of a pool in their place, once. False if they are there already.
    pub(crate) fn stock(&mut self, pool: usize, slots: impl IntoIterator<Item = S>) -> bool {
        if std::mem::replace(&mut self.stocked[pool], true) {
            return false;
        }
        self.pools[pool].extend(slots.into_iter().map(Arc::new));
        true
    }

    /// Queues `batch` (taking it out of the option) if there is room.
    pub(crate) fn put(&mut self, batch: &mut Option<B>) -> Answer<()> {
        if self.halted {
            return Answer::End;
        }
        if self.queue.len() >= self.layout.queue_depth {
            return Answer::Wait(What::new(ROOM));
        }
        if let Some(batch) = batch.take() {
            self.queue.push_back(Queued { seq: self.next_seq, batch: Arc::new(batch) });
            self.next_seq += 1;
        }
        Answer::Now(())
    }

    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// Ends the stream now: what is queued or filled and not yet delivered goes back. The batches are returned to be dropped elsewhere.
    pub(crate) fn halt(&mut self) -> Vec<Arc<B>> {
        self.halted = true;
        let mut dropped: Vec<_> = self.queue.drain(..).map(|queued| queued.batch).collect();
        self.due.iter_mut().for_each(VecDeque::clear);
        for entry in self.in_flight.values_mut() {
            entry.undelivered = 0;
        }
        let idle: Vec<u64> = self.in_flight.iter().filter(|(_, entry)| entry.reading == 0).map(|(seq, _)| *seq).collect();
        dropped.extend(idle.into_iter().filter_map(|seq| self.retire(seq)));
        dropped
    }

    /// Takes the head batch for `target` together with a slot, in one act. `wanted` refuses a batch: the answer is then `End` for this call.
    pub(crate) fn take(&mut self, target: usize, wanted: &dyn Fn(&B) -> bool) -> Answer<Taken<B, S>> {
        let Some(head) = self.queue.front() else {
            return if self.closed || self.halted { Answer::End } else { Answer::Wait(What::new("a batch")) };
        };
        if !wanted(&head.batch) {
            return Answer::End;
        }
        let index = head.batch.index();
        if self.layout.assignment == Assignment::Fixed {
            let owner = modulo(index, self.layout.targets);
            if owner != target {
                return Answer::Wait(What::new("target that takes the batch before, target").number(owner).batch(index));
            }
        }
        let pool = self.pool_of(index);
        let Some(slot) = self.pools[pool].pop_front() else {
            let label = match self.layout.mode {
                Mode::Replicas => SLOT_OF_DRAFTER,
                Mode::Sweep => SLOT_OF_POOL,
            };
            return Answer::Wait(What::new(label).number(pool).batch(index));
        };
        let Some(Queued { seq, batch }) = self.queue.pop_front() else { return Answer::End };
        for drafter in self.readers_of(index) {
            self.due[drafter].push_back(seq);
        }
        self.writing += 1;
        Answer::Now(Taken { seq, batch, slot, pool })
    }

    pub(crate) fn is_halted(&self) -> bool {
        self.halted
    }

    /// A target has written its slot. Returns what is to be dropped if the stream was halted meanwhile.
    pub(crate) fn fill(&mut self, taken: Taken<B, S>) -> Option<Arc<B>> {
        let Taken { seq, batch, slot, pool } = taken;
        self.writing -= 1;
        if self.halted {
            self.pools[pool].push_back(slot);
            return Some(batch);
        }
        let undelivered = self.readers_of(batch.index()).len();
        self.in_flight.insert(seq, InFlight { batch, slot, pool, undelivered, reading: 0 });
        None
    }

    /// A target gives a slot back unfilled, or its holder panicked. The run is being cancelled: the batch is not delivered.
    pub(crate) fn abandon(&mut self, taken: Taken<B, S>, panicked: bool) -> Arc<B> {
        self.writing -= 1;
        if panicked {
            self.quarantined += 1;
        } else {
            self.pools[taken.pool].push_back(taken.slot);
        }
        taken.batch
    }

    /// The drafter's next batch in order.
    pub(crate) fn next(&mut self, drafter: usize) -> Answer<Delivered<B, S>> {
        let Some(&seq) = self.due[drafter].front() else {
            let coming = |queued: &Queued<B>| self.readers_of(queued.batch.index()).contains(&drafter);
            return if self.halted || (self.closed && !self.queue.iter().any(coming)) {
                Answer::End
            } else {
                Answer::Wait(What::new("a batch that a target has taken, for drafter").number(drafter))
            };
        };
        let Some(entry) = self.in_flight.get_mut(&seq) else {
            return Answer::Wait(What::new("the filled slot of drafter").number(drafter));
        };
        entry.undelivered -= 1;
        entry.reading += 1;
        self.due[drafter].pop_front();
        Answer::Now(Delivered { seq, batch: entry.batch.clone(), slot: entry.slot.clone() })
    }

    /// A drafter has read its slot; the caller has already dropped its own handles to slot and batch. The last reader frees it.
    pub(crate) fn release(&mut self, seq: u64) -> Option<Arc<B>> {
        let entry = self.in_flight.get_mut(&seq)?;
        entry.reading -= 1;
        if entry.reading + entry.undelivered > 0 {
            return None;
        }
        self.retire(seq)
    }

    /// A reader panicked: the slot goes to nobody any more.
    pub(crate) fn quarantine(&mut self, seq: u64) -> Option<Arc<B>> {
        let entry = self.in_flight.remove(&seq)?;
        self.quarantined += 1;
        Some(entry.batch)
    }

    fn retire(&mut self, seq: u64) -> Option<Arc<B>> {
        let entry = self.in_flight.remove(&seq)?;
        self.pools[entry.pool].push_back(entry.slot);
        Some(entry.batch)
    }

    pub(crate) fn census(&self) -> Census {
        Census {
            queued: self.queue.len(),
            free: self.pools.iter().map(VecDeque::len).sum(),
            writing: self.writing,
            filled: self.in_flight.values().filter(|entry| entry.reading == 0).count(),
            leased: self.in_flight.values().filter(|entry| entry.reading > 0).count(),
            quarantined: self.quarantined,
        }
    }

    /// Slots that wait for `drafter`, filled.
    pub(crate) fn filled_for(&self, drafter: usize) -> usize {
        self.due[drafter].iter().filter(|seq| self.in_flight.contains_key(seq)).count()
    }

    /// Free slots of a pool.
    pub(crate) fn free_in(&self, pool: usize) -> usize {
        self.pools[pool].len()
    }

    fn pool_of(&self, index: u64) -> usize {
        match self.layout.mode {
            Mode::Replicas => modulo(index, self.layout.drafters),
            Mode::Sweep => 0,
        }
    }

    fn readers_of(&self, index: u64) -> std::ops::Range<usize> {
        match self.layout.mode {
            Mode::Replicas => {
                let drafter = modulo(index, self.layout.drafters);
                drafter..drafter + 1
            }
            Mode::Sweep => 0..self.layout.drafters,
        }
    }
}

/// `index mod count`, which fits the count's type.
fn modulo(index: u64, count: usize) -> usize {
    (index % count as u64) as usize
}
