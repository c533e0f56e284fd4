//! The memory plan: an address for every tensor, the bytes of every region, and what each phase costs.
//!
//! Job: liveness over a phase's ops → offsets in one arena that all phases of a program share; regions for the other roles.
//! Refuses to allocate anything. Invariants: two tensors of a phase that are alive at one op never overlap; every offset is a multiple of
//! [`ALIGN`]; the same program gives the same plan; a region's bytes are what an executor allocates, to the byte.

use crate::dtype::DType;
use crate::op::Work;
use crate::program::{Program, Role, TensorId};
use std::collections::BTreeMap;

/// Alignment of every tensor in bytes: what tensor cores, bulk copies and AVX-512 want.
pub const ALIGN: usize = 256;

/// How an executor stores declared dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Every float is stored as F32 (the CPU executor).
    Wide,
    /// As declared (the CUDA executor).
    Declared,
}

impl Storage {
    /// Bytes of one stored element.
    pub fn bytes(self, dtype: DType) -> usize {
        match self {
            Storage::Wide => 4,
            Storage::Declared => dtype.bytes(),
        }
    }
}

/// A region of memory that an executor allocates as one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// Frozen tensors (shared between executors where they can be).
    Frozen,
    /// Trainable weights.
    Weight,
    /// Masters, moments, Adam's t.
    State,
    /// Gradients and loss sums, contiguous.
    Grad,
    /// Tensors that survive phases.
    Step,
    /// Host-written.
    Input,
    /// Host-read.
    Output,
    /// Phase tensors: the largest phase's need.
    Arena,
    /// One slot.
    Slot,
}

impl Region {
    /// All regions, in the order plans are printed.
    pub const ALL: [Region; 9] = [
        Region::Frozen,
        Region::Weight,
        Region::State,
        Region::Grad,
        Region::Step,
        Region::Input,
        Region::Output,
        Region::Arena,
        Region::Slot,
    ];

    /// The region of a role.
    pub fn of(role: Role) -> Region {
        match role {
            Role::Frozen => Region::Frozen,
            Role::Weight => Region::Weight,
            Role::State => Region::State,
            Role::Grad => Region::Grad,
            Role::Step => Region::Step,
            Role::Input => Region::Input,
            Role::Output => Region::Output,
            Role::Phase => Region::Arena,
            Role::Slot => Region::Slot,
        }
    }

    /// What a user calls it.
    pub fn title(self) -> &'static str {
        match self {
            Region::Frozen => "frozen weights",
            Region::Weight => "drafter weights",
            Region::State => "optimizer state",
            Region::Grad => "gradients",
            Region::Step => "step tensors",
            Region::Input => "inputs",
            Region::Output => "outputs",
            Region::Arena => "activations",
            Region::Slot => "one slot",
        }
    }
}

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its region.
    pub region: Region,
    /// Bytes from the region's start; a multiple of [`ALIGN`].
    pub offset: usize,
    /// Bytes it takes, without padding.
    pub bytes: usize,
}

/// Cost of one phase at the plan's shapes.
#[derive(Clone, Debug)]
pub struct PhaseCost {
    /// The phase's name.
    pub name: String,
    /// Useful work: recomputed nodes excluded.
    pub useful: Work,
    /// FLOPs of recomputed nodes.
    pub recomputed_flops: u64,
    /// Arena bytes this phase needs.
    pub arena_bytes: usize,
}

/// The whole plan.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How elements are stored.
    pub storage: Storage,
    places: Vec<Option<Place>>,
    bytes: BTreeMap<Region, usize>,
    /// One entry per phase.
    pub phases: Vec<PhaseCost>,
}

impl Plan {
    /// Lays out a program.
    pub fn new(program: &Program, storage: Storage) -> Plan {
        let stored = |t: TensorId| program.get(t).len() * storage.bytes(program.get(t).dtype);
        let mut places: Vec<Option<Place>> = vec![None; program.tensors().count()];
        let mut bytes: BTreeMap<Region, usize> = Region::ALL.iter().map(|&r| (r, 0)).collect();
        for (id, tensor) in program.tensors().filter(|(_, t)| t.role != Role::Phase) {
            let region = Region::of(tensor.role);
            let end = bytes.get_mut(&region).expect("every region has an entry");
            places[id.index()] = Some(Place { region, offset: *end, bytes: stored(id) });
            *end += stored(id).next_multiple_of(ALIGN);
        }
        let mut phases = Vec::new();
        for (_, phase) in program.phases() {
            let mut lives: BTreeMap<TensorId, (usize, usize)> = BTreeMap::new();
            let mut useful = Work::default();
            let mut recomputed_flops = 0;
            for (i, node) in phase.nodes.iter().enumerate() {
                node.op.for_each(|_, t| {
                    if program.get(t).role == Role::Phase {
                        lives.entry(t).or_insert((i, i)).1 = i;
                    }
                });
                let work = node.op.work(program);
                if node.recomputed {
                    recomputed_flops += work.flops;
                } else {
                    useful.flops += work.flops;
                    useful.bytes += work.bytes;
                }
            }
            let arena_bytes = pack(&lives, stored, &mut places);
            let arena = bytes.get_mut(&Region::Arena).expect("every region has an entry");
            *arena = (*arena).max(arena_bytes);
            phases.push(PhaseCost { name: phase.name.clone(), useful, recomputed_flops, arena_bytes });
        }
        Plan { storage, places, bytes, phases }
    }

    /// Where a tensor lies; `None` for a phase tensor that no op touches.
    pub fn place(&self, t: TensorId) -> Option<Place> {
        self.places[t.index()]
    }

    /// Bytes of a region.
    pub fn bytes(&self, region: Region) -> usize {
        self.bytes[&region]
    }

    /// Bytes an executor holds for itself: everything but slots.
    pub fn total_bytes(&self) -> usize {
        self.bytes.iter().filter(|&(&r, _)| r != Region::Slot).map(|(_, b)| b).sum()
    }
}

/// Greedy by size: the largest tensor first, each at the lowest offset where no placed tensor alive at the same time lies.
fn pack(lives: &BTreeMap<TensorId, (usize, usize)>, stored: impl Fn(TensorId) -> usize, places: &mut [Option<Place>]) -> usize {
    let mut order: Vec<TensorId> = lives.keys().copied().collect();
    order.sort_by_key(|&t| (std::cmp::Reverse(stored(t)), lives[&t].0, t));
    let mut placed: Vec<(usize, usize, TensorId)> = Vec::new();
    let mut total = 0;
    for t in order {
        let (first, last) = lives[&t];
        let need = stored(t).next_multiple_of(ALIGN);
        let mut offset = 0;
        for &(start, end, other) in &placed {
            let (f, l) = lives[&other];
            let both_alive = f <= last && first <= l;
            if both_alive && start < offset + need {
                offset = offset.max(end);
            }
        }
        placed.push((offset, offset + need, t));
        placed.sort_unstable();
        total = total.max(offset + need);
        places[t.index()] = Some(Place { region: Region::Arena, offset, bytes: stored(t) });
    }
    total
}
