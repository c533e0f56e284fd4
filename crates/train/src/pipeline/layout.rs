//! Its job: the shape of a conveyor: how many workers, who reads a slot, who takes a batch, and what can be wrong with it.
//! It refuses to hold anything that moves.
//! Invariant: how a batch is routed depends on its index and the layout alone, never on timing.

/// What the conveyor must know of a batch.
pub trait Batch: Send + Sync + 'static {
    /// The number that routes it: drafter `index mod D`, and with fixed assignment target `index mod T`. Order is the order of `put`, not
    /// this number. Held-out batches travel the same way and are numbered apart by their payload.
    fn index(&self) -> u64;
}

/// Who reads a filled slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One model, data parallel: batch i goes to drafter i mod D, from that drafter's own pool of slots.
    Replicas,
    /// Several models: every batch goes to every drafter, in one slot of one common pool, freed by its last reader.
    Sweep,
}

/// Which target takes a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// Whichever is free first.
    FirstFree,
    /// Batch i goes to target i mod T: with mixed GPU models features then do not depend on timing.
    Fixed,
}

/// The shape of a conveyor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// T, targets.
    pub targets: usize,
    /// D, drafters.
    pub drafters: usize,
    /// Replicas or sweep.
    pub mode: Mode,
    /// First free or fixed.
    pub assignment: Assignment,
    /// Batches that may wait between the prefetcher and the targets.
    pub queue_depth: usize,
}

impl Layout {
    /// Pools of slots: one per drafter, or one for a sweep.
    pub fn pools(&self) -> usize {
        match self.mode {
            Mode::Replicas => self.drafters,
            Mode::Sweep => 1,
        }
    }

    /// Slots in each pool: ceil(T/D) + 2, or T + 2 for a sweep, whose single pool serves every target. With these every target can write
    /// while one slot is read and one waits. Fewer (at least one) are correct but slower.
    pub fn slots_per_pool(&self) -> usize {
        self.targets.div_ceil(self.pools()) + 2
    }
}

/// What can be wrong with how a conveyor is put together.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConveyorError {
    /// A count is zero.
    #[error("a conveyor needs at least one target, one drafter and room for one batch, not {0:?}")]
    EmptyLayout(Layout),
    /// An end was asked for twice, or does not exist.
    #[error("the {kind} end {number} is not there or already taken; each worker takes its own end once")]
    NoSuchEnd {
        /// Feeder, target or drafter.
        kind: &'static str,
        /// Its number.
        number: usize,
    },
    /// A pool was stocked twice, with nothing, or does not exist.
    #[error("pool {pool} cannot be stocked with {slots} slots; stock each of the {pools} pools once, with at least one slot")]
    BadStock {
        /// Number of the pool.
        pool: usize,
        /// Slots offered.
        slots: usize,
        /// Pools there are.
        pools: usize,
    },
}
