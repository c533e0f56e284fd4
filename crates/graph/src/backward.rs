//! Differentiation op by op, with recomputation per layer as an option.
//!
//! Job: walk forward nodes in reverse and let each op append its own backward ([`crate::op::Contract::vjp`]), keeping track of which
//! tensor holds whose gradient. Refuses graph rewriting beyond dropping recomputed nodes nobody reads.
//! Invariants: a weight's gradient is *added* into its named fp32 accumulator; an activation's gradient is written once, or, where
//! several ops consume the activation, written by the first and added to by the others in an F32 tensor; a gradient nobody wants is never formed.

use crate::dtype::DType;
use crate::op::{Access, Op};
use crate::program::{Node, PhaseBuilder, PhaseId, Role, TensorId};
use std::collections::{HashMap, HashSet};

/// What to differentiate and where gradients go.
pub struct Differentiate<'a> {
    /// The phase whose forward nodes are walked (may be the phase being written).
    pub forward: PhaseId,
    /// Gradients that are known: (output, its gradient).
    pub seeds: &'a [(TensorId, TensorId)],
    /// fp32 accumulators of weights and of step tensors (context K and V).
    pub accumulators: &'a HashMap<TensorId, TensorId>,
    /// Repeat each layer's forward before its backward instead of keeping its activations.
    pub recompute: bool,
}

/// State of one differentiation, as an op's `vjp` sees it.
pub struct Backward<'b, 'p> {
    builder: &'b mut PhaseBuilder<'p>,
    accumulators: &'b HashMap<TensorId, TensorId>,
    wanted: HashSet<TensorId>,
    consumers: HashMap<TensorId, usize>,
    grads: HashMap<TensorId, TensorId>,
    /// Gradient tensors that were made to be added to.
    sums: HashSet<TensorId>,
    /// Recomputed stand-ins of forward tensors, in force while one layer is walked.
    stand_ins: HashMap<TensorId, TensorId>,
}

impl Backward<'_, '_> {
    /// The gradient of `t` so far, if any op has produced one.
    pub fn grad(&self, t: TensorId) -> Option<TensorId> {
        self.grads.get(&self.original(t)).copied()
    }

    /// True when something upstream of `t` needs its gradient.
    pub fn wants(&self, t: TensorId) -> bool {
        self.wanted.contains(&self.original(t))
    }

    /// The fp32 accumulator of `t`, if it has one.
    pub fn accumulator(&self, t: TensorId) -> Option<TensorId> {
        self.accumulators.get(&self.original(t)).copied()
    }

    /// Shape of a tensor.
    pub fn shape(&self, t: TensorId) -> Vec<usize> {
        self.builder.shape(t)
    }

    /// A fresh activation-dtype tensor of the phase.
    pub fn act(&mut self, stem: &str, shape: &[usize]) -> TensorId {
        self.builder.act(stem, shape)
    }

    /// A fresh tensor of the phase.
    pub fn temp(&mut self, stem: &str, shape: &[usize], dtype: DType) -> TensorId {
        self.builder.temp(stem, shape, dtype)
    }

    /// Appends a backward op.
    pub fn push(&mut self, op: impl Into<Op>) {
        self.builder.push(op.into());
    }

    /// The tensor to put a contribution to `t`'s gradient in, and whether to add (true) or to overwrite (false).
    ///
    /// # Panics
    /// When `t` has a gradient that was not made to be added to: another tensor may share it, or the caller owns it, or it is too
    /// narrow for a sum.
    pub fn grad_to_add(&mut self, t: TensorId) -> (TensorId, bool) {
        let t = self.original(t);
        if let Some(&g) = self.grads.get(&t) {
            assert!(self.sums.contains(&g), "the gradient of `{}` cannot be added to", self.builder.program.get(t).name);
            return (g, true);
        }
        let several = self.consumers.get(&t).copied().unwrap_or(0) > 1;
        let shape = self.builder.shape(t);
        let g = if several { self.builder.temp("d_sum", &shape, DType::F32) } else { self.builder.act("d_input", &shape) };
        self.grads.insert(t, g);
        if several {
            self.sums.insert(g);
        }
        (g, false)
    }

    /// Declares `g` to be the whole gradient of `t`.
    ///
    /// # Panics
    /// When `t` has a gradient from another consumer, which would be lost.
    pub fn replace_grad(&mut self, t: TensorId, g: TensorId) {
        let t = self.original(t);
        if self.wanted.contains(&t) {
            let old = self.grads.insert(t, g);
            assert!(old.is_none(), "two gradients for `{}`", self.builder.program.get(t).name);
        }
    }

    /// Declares `g`, which an op formed from the gradient so far and its own part, to be the whole gradient of `t`.
    pub fn supersede_grad(&mut self, t: TensorId, g: TensorId) {
        let t = self.original(t);
        if self.wanted.contains(&t) {
            self.grads.insert(t, g);
        }
    }

    /// Declares `g` to be the gradient of each of `ts` (an addition passes its gradient to both sides).
    pub fn share_grad(&mut self, g: TensorId, ts: &[TensorId]) {
        for &t in ts {
            self.replace_grad(t, g);
        }
    }

    fn original(&self, t: TensorId) -> TensorId {
        // A stand-in maps back to the tensor it repeats; the map is small (one layer).
        self.stand_ins.iter().find(|&(_, &s)| s == t).map_or(t, |(&o, _)| o)
    }
}

/// Appends the backward of `what.forward` to `builder`'s phase and returns the gradients of tensors that have one.
///
/// # Panics
/// On a forward op without a gradient: a bug of the model code.
pub fn differentiate(builder: &mut PhaseBuilder<'_>, what: Differentiate<'_>) -> HashMap<TensorId, TensorId> {
    let nodes: Vec<Node> = builder.program.phase(what.forward).nodes.clone();
    let seeded: HashSet<TensorId> = what.seeds.iter().map(|&(t, _)| t).collect();
    let (wanted, consumers, last) = reach(&nodes, &seeded, what.accumulators);
    let mut state = Backward {
        builder,
        accumulators: what.accumulators,
        wanted,
        consumers,
        grads: what.seeds.iter().copied().collect(),
        sums: HashSet::new(),
        stand_ins: HashMap::new(),
    };
    let groups = layers(&nodes[..last]);
    let last_layer = groups.iter().rev().find_map(|g| g.layer);
    for group in groups.iter().rev() {
        let nodes = &nodes[group.start..group.end];
        state.builder.set_layer(group.layer);
        // The last layer's activations are alive when its backward starts: repeating them would save nothing.
        let repeat = what.recompute && group.layer.is_some() && group.layer != last_layer;
        let first_emitted = state.builder.program.phase(state.builder.id()).nodes.len();
        let walked: Vec<Node> = if repeat { repeat_nodes(&mut state, nodes) } else { nodes.to_vec() };
        for node in walked.iter().rev() {
            if touches_wanted(&state, &node.op) {
                node.op.vjp(&mut state);
            }
        }
        if repeat {
            drop_unread(state.builder, first_emitted);
            state.stand_ins.clear();
        }
    }
    state.builder.set_layer(None);
    state.grads
}

struct Group {
    layer: Option<u32>,
    start: usize,
    end: usize,
}

fn layers(nodes: &[Node]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        match groups.last_mut() {
            Some(g) if g.layer == node.layer => g.end = i + 1,
            _ => groups.push(Group { layer: node.layer, start: i, end: i + 1 }),
        }
    }
    groups
}

/// Tensors whose gradient is needed, how many ops consume each, and the end of the differentiable part of `nodes`.
fn reach(
    nodes: &[Node],
    seeded: &HashSet<TensorId>,
    accumulators: &HashMap<TensorId, TensorId>,
) -> (HashSet<TensorId>, HashMap<TensorId, usize>, usize) {
    let mut wanted: HashSet<TensorId> = accumulators.keys().copied().collect();
    let mut consumers = HashMap::new();
    let mut last = 0;
    for (i, node) in nodes.iter().enumerate() {
        let (mut needs, mut makes_seed) = (false, false);
        node.op.for_each(|access, t| {
            needs |= access == Access::Read && wanted.contains(&t);
            makes_seed |= access == Access::Write && seeded.contains(&t);
        });
        if needs {
            node.op.for_each(|access, t| match access {
                Access::Read => *consumers.entry(t).or_insert(0) += 1,
                Access::Write => {
                    wanted.insert(t);
                }
                Access::Update | Access::Scratch => {}
            });
        }
        if makes_seed {
            last = i + 1;
        }
    }
    (wanted, consumers, last)
}

fn touches_wanted(state: &Backward<'_, '_>, op: &Op) -> bool {
    let mut touches = false;
    op.for_each(|access, t| touches |= access == Access::Write && state.wants(t));
    touches
}

/// Emits the forward nodes of one layer again, writing fresh tensors, and returns the renamed nodes.
fn repeat_nodes(state: &mut Backward<'_, '_>, nodes: &[Node]) -> Vec<Node> {
    state.builder.set_recomputing(true);
    let mut walked = Vec::with_capacity(nodes.len());
    for node in nodes {
        let mut op = node.op.clone();
        op.for_each(|access, t| {
            if matches!(access, Access::Write | Access::Scratch) && !state.stand_ins.contains_key(&t) {
                let tensor = state.builder.program.get(t).clone();
                let fresh = state.builder.temp("again", &tensor.shape, tensor.dtype);
                state.stand_ins.insert(t, fresh);
            }
        });
        op.rename(|_, t| state.stand_ins.get(&t).copied().unwrap_or(t));
        state.builder.push(op.clone());
        walked.push(Node { op, recomputed: true, layer: node.layer });
    }
    state.builder.set_recomputing(false);
    walked
}

/// Drops recomputed nodes from position `first` on whose results nobody reads.
fn drop_unread(builder: &mut PhaseBuilder<'_>, first: usize) {
    let id = builder.id();
    let nodes = builder.program.take_nodes(id);
    let mut read: HashSet<TensorId> = HashSet::new();
    let mut kept: Vec<Node> = Vec::with_capacity(nodes.len());
    for (i, node) in nodes.into_iter().enumerate().rev() {
        let mut useful = i < first || !node.recomputed;
        node.op.for_each(|access, t| useful |= access == Access::Write && read.contains(&t));
        if useful {
            node.op.for_each(|access, t| {
                if matches!(access, Access::Read | Access::Update) {
                    read.insert(t);
                }
            });
            kept.push(node);
        }
    }
    kept.reverse();
    builder.program.put_nodes(id, kept);
}

/// Declares an F32 accumulator for each tensor: role `Grad` for weights (all-reduced), `Step` for step tensors.
pub fn accumulators(builder: &mut crate::program::Program, tensors: &[TensorId], role: Role) -> HashMap<TensorId, TensorId> {
    tensors
        .iter()
        .map(|&t| {
            let (name, shape) = (builder.get(t).name.clone(), builder.get(t).shape.clone());
            (t, builder.tensor(format!("{name}.grad"), &shape, DType::F32, role))
        })
        .collect()
}
