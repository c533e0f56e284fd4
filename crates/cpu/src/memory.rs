//! The executor's memory: one allocation per region, and disjoint views of it for one op at a time.
//!
//! Job: turn a plan's places into slices without `unsafe`. Refuses overlapping views: a plan that let two operands of one op overlap
//! would panic here. Invariants: region sizes are the plan's; integers live in the same regions, as bit patterns.

use crate::scratch::Scratch;
use drafthorse_graph::op::{Access, Op};
use drafthorse_graph::plan::Region;
use drafthorse_graph::{DType, Plan, Program, Role, TensorId};
use std::collections::HashMap;
use std::sync::Arc;

/// Backing store of all regions but slots.
pub struct Memory {
    regions: Vec<(Region, Vec<f32>)>,
    frozen: HashMap<TensorId, Arc<Vec<f32>>>,
    scratch: Scratch,
    round: bool,
}

enum View<'a> {
    Read(&'a [f32]),
    Write(&'a mut [f32]),
}

/// The operands of one op.
pub struct Views<'a> {
    views: HashMap<TensorId, View<'a>>,
    scratch: &'a Scratch,
    round: bool,
}

impl<'a> Views<'a> {
    /// A float operand that the op only reads.
    pub fn read(&self, t: TensorId) -> &'a [f32] {
        match self.views.get(&t) {
            Some(View::Read(s)) => s,
            _ => panic!("operand {t:?} is not a read operand of this op"),
        }
    }

    /// An integer operand that the op only reads.
    pub fn ints(&self, t: TensorId) -> &'a [i32] {
        bytemuck::cast_slice(self.read(t))
    }

    /// An integer scalar.
    pub fn count(&self, t: TensorId) -> usize {
        usize::try_from(self.ints(t)[0]).expect("counts are not negative")
    }

    /// The executor's working memory.
    pub fn scratch(&self) -> &'a Scratch {
        self.scratch
    }

    /// True when `t` is to hold bf16 values. Ops whose contract rounds a tensor before they read it again ask this.
    pub fn rounds(&self, program: &Program, t: TensorId) -> bool {
        self.round && program.get(t).dtype == DType::BF16
    }

    /// An operand that the op writes or updates; can be taken once.
    pub fn take(&mut self, t: TensorId) -> &'a mut [f32] {
        match self.views.remove(&t) {
            Some(View::Write(s)) => s,
            _ => panic!("operand {t:?} is not a written operand of this op, or was taken before"),
        }
    }

    /// An integer operand that the op writes.
    pub fn take_ints(&mut self, t: TensorId) -> &'a mut [i32] {
        bytemuck::cast_slice_mut(self.take(t))
    }
}

/// The slot an op may touch.
pub enum SlotView<'a> {
    /// No slot is bound.
    None,
    /// Bound for reading.
    Read(&'a [f32]),
    /// Bound for capture.
    Write(&'a mut [f32]),
}

impl Memory {
    /// Allocates every region of `plan`. `frozen` holds the content of each frozen tensor; `round` keeps BF16 tensors at bf16 values.
    pub fn new(plan: &Plan, frozen: HashMap<TensorId, Arc<Vec<f32>>>, scratch: Scratch, round: bool) -> Memory {
        // In the order of `Region`, which `views` walks.
        let owned = [Region::Weight, Region::State, Region::Grad, Region::Step, Region::Input, Region::Output, Region::Arena];
        let regions = owned.iter().map(|&r| (r, vec![0.0f32; plan.bytes(r) / 4])).collect();
        Memory { regions, frozen, scratch, round }
    }

    /// Bytes held, frozen tensors and scratch included.
    pub fn held_bytes(&self) -> u64 {
        let own: usize = self.regions.iter().map(|(_, v)| v.len() * 4).sum();
        let frozen: usize = self.frozen.values().map(|v| (v.len() * 4).next_multiple_of(drafthorse_graph::plan::ALIGN)).sum();
        (own + frozen) as u64 + self.scratch.held_bytes()
    }

    /// One region, whole.
    pub fn region(&mut self, region: Region) -> &mut [f32] {
        &mut self.regions.iter_mut().find(|(r, _)| *r == region).expect("an owned region").1
    }

    /// One tensor outside slots and frozen memory.
    pub fn tensor(&mut self, plan: &Plan, t: TensorId) -> Option<&mut [f32]> {
        let place = plan.place(t)?;
        let region = &mut self.regions.iter_mut().find(|(r, _)| *r == place.region)?.1;
        Some(&mut region[place.offset / 4..(place.offset + place.bytes) / 4])
    }

    /// Disjoint views of the operands of `op`.
    ///
    /// # Panics
    /// When two operands overlap and one is written, or a slot operand has no bound slot: bugs of the plan or of the caller.
    pub fn views<'a>(&'a mut self, plan: &Plan, program: &Program, op: &Op, slot: SlotView<'a>) -> Views<'a> {
        let mut views = HashMap::new();
        let mut wanted: Vec<(Region, usize, usize, TensorId, bool)> = Vec::new();
        let mut slot_operand = None;
        let mut frozen_operands = Vec::new();
        op.for_each(|access, t| match program.get(t).role {
            Role::Slot => slot_operand = Some((t, access)),
            Role::Frozen => frozen_operands.push(t),
            _ => {
                let place = plan.place(t).unwrap_or_else(|| panic!("`{}` has no place", program.get(t).name));
                let (start, end) = (place.offset / 4, (place.offset + place.bytes) / 4);
                if !wanted.iter().any(|w| w.3 == t) {
                    wanted.push((place.region, start, end, t, access != Access::Read));
                }
            }
        });
        for t in frozen_operands {
            let data = self.frozen.get(&t).unwrap_or_else(|| panic!("frozen tensor `{}` was not given", program.get(t).name));
            views.insert(t, View::Read(data.as_slice()));
        }
        match (slot_operand, slot) {
            (None, _) => {}
            (Some((t, Access::Read)), SlotView::Read(s)) => drop(views.insert(t, View::Read(s))),
            (Some((t, Access::Read)), SlotView::Write(s)) => drop(views.insert(t, View::Read(s))),
            (Some((t, _)), SlotView::Write(s)) => drop(views.insert(t, View::Write(s))),
            (Some((t, _)), _) => panic!("slot `{}` is not bound the way {} needs it", program.get(t).name, op.name()),
        }
        wanted.sort_unstable_by_key(|w| (w.0, w.1));
        let mut wanted = wanted.into_iter().peekable();
        for (region, data) in &mut self.regions {
            let mut rest = data.as_mut_slice();
            let mut consumed = 0;
            while let Some((_, start, end, t, written)) = wanted.next_if(|w| w.0 == *region) {
                assert!(start >= consumed, "{}: operand `{}` overlaps another", op.name(), program.get(t).name);
                let (_, tail) = rest.split_at_mut(start - consumed);
                let (mine, tail) = tail.split_at_mut(end - start);
                rest = tail;
                consumed = end;
                views.insert(t, if written { View::Write(mine) } else { View::Read(mine) });
            }
        }
        Views { views, scratch: &self.scratch, round: self.round }
    }
}
