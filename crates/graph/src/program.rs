//! Tensors and phases: the symbolic program that a plan lays out and an executor runs.
//!
//! Job: the tensor table, its roles, and the builder that appends ops to a phase. Refuses to know what an op means
//! (that is [`crate::op`]). Invariants: ids are dense and never reused; a phase is a list of ops in execution order;
//! a tensor of role [`Role::Phase`] that a later phase reads is promoted to [`Role::Step`], so no reader ever sees recycled memory.

use crate::dtype::DType;
use crate::op::{Access, Op};
use std::collections::HashMap;

/// Index of a tensor in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub(crate) u32);

impl TensorId {
    /// Position in [`Program::tensors`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Index of a phase in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PhaseId(pub(crate) u32);

impl PhaseId {
    /// Position in [`Program::phases`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Who owns a tensor's memory and how long its content lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Read-only and shared between executors: the target's weights, RoPE tables.
    Frozen,
    /// Trainable, in the activation dtype.
    Weight,
    /// Optimizer state: masters, moments, Adam's t. Checkpointed.
    State,
    /// fp32 gradient accumulators and the loss sums; one contiguous region, so that one all-reduce covers it.
    Grad,
    /// Survives the phases of a step (context, K and V of every layer, their gradients) or of a decoding run (caches).
    Step,
    /// Lives inside one phase; its bytes are recycled by liveness.
    Phase,
    /// Written by the host before a phase runs.
    Input,
    /// Written by a phase, read by the host after it.
    Output,
    /// A context-feature slot, bound to a buffer at each run.
    Slot,
}

/// One symbolic tensor: row-major, contiguous.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Unique name; dotted, the layer's index second (`layers.3.qkv`).
    pub name: String,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// Declared element type.
    pub dtype: DType,
    /// Owner and lifetime.
    pub role: Role,
}

impl Tensor {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True when some extent is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Extent of the outermost dimension.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row: the product of all extents but the first.
    pub fn cols(&self) -> usize {
        self.shape[1..].iter().product()
    }
}

/// One op of a phase.
#[derive(Clone, Debug)]
pub struct Node {
    /// What to do.
    pub op: Op,
    /// True when the node repeats a forward op because its result was not kept; such work is not useful FLOPs.
    pub recomputed: bool,
    /// The layer this node belongs to, if any: the unit of recomputation.
    pub layer: Option<u32>,
}

/// A list of ops that runs as one unit (one captured graph on a GPU).
#[derive(Clone, Debug)]
pub struct Phase {
    /// Unique name.
    pub name: String,
    /// Ops in execution order.
    pub nodes: Vec<Node>,
}

/// A tensor table and the phases over it.
#[derive(Clone, Debug)]
pub struct Program {
    tensors: Vec<Tensor>,
    phases: Vec<Phase>,
    by_name: HashMap<String, TensorId>,
    producer: HashMap<TensorId, PhaseId>,
    /// Element type of activations and trainable weights: BF16 on GPUs, F32 on the CPU.
    pub act: DType,
}

impl Program {
    /// An empty program whose activations are stored as `act`.
    pub fn new(act: DType) -> Self {
        Program { tensors: Vec::new(), phases: Vec::new(), by_name: HashMap::new(), producer: HashMap::new(), act }
    }

    /// Declares a tensor.
    ///
    /// # Panics
    /// When the name is taken: two tensors of one name would make checkpoints ambiguous.
    pub fn tensor(&mut self, name: impl Into<String>, shape: &[usize], dtype: DType, role: Role) -> TensorId {
        let name = name.into();
        let id = TensorId(self.tensors.len() as u32);
        assert!(!shape.is_empty(), "tensor `{name}` has no dimension");
        let taken = self.by_name.insert(name.clone(), id);
        assert!(taken.is_none(), "tensor name `{name}` is taken");
        self.tensors.push(Tensor { name, shape: shape.to_vec(), dtype, role });
        id
    }

    /// A tensor by id.
    pub fn get(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// A tensor's id by name.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.by_name.get(name).copied()
    }

    /// All tensors, in declaration order.
    pub fn tensors(&self) -> impl Iterator<Item = (TensorId, &Tensor)> {
        self.tensors.iter().enumerate().map(|(i, t)| (TensorId(i as u32), t))
    }

    /// Ids of the tensors of one role, in declaration order.
    pub fn of_role(&self, role: Role) -> Vec<TensorId> {
        self.tensors().filter(|(_, t)| t.role == role).map(|(id, _)| id).collect()
    }

    /// All phases, in declaration order.
    pub fn phases(&self) -> impl Iterator<Item = (PhaseId, &Phase)> {
        self.phases.iter().enumerate().map(|(i, p)| (PhaseId(i as u32), p))
    }

    /// A phase by id.
    pub fn phase(&self, id: PhaseId) -> &Phase {
        &self.phases[id.index()]
    }

    /// Opens a new phase for writing.
    ///
    /// # Panics
    /// When the name is taken.
    pub fn begin(&mut self, name: impl Into<String>) -> PhaseBuilder<'_> {
        let name = name.into();
        assert!(self.phases.iter().all(|p| p.name != name), "phase name `{name}` is taken");
        let id = PhaseId(self.phases.len() as u32);
        self.phases.push(Phase { name, nodes: Vec::new() });
        PhaseBuilder { program: self, id, layer: None, recomputing: false }
    }

    pub(crate) fn take_nodes(&mut self, phase: PhaseId) -> Vec<Node> {
        std::mem::take(&mut self.phases[phase.index()].nodes)
    }

    pub(crate) fn put_nodes(&mut self, phase: PhaseId, nodes: Vec<Node>) {
        self.phases[phase.index()].nodes = nodes;
    }

    /// How `phase` touches its slot: `Write` when some op writes it, `Read` when ops only read it, `None` without a slot.
    pub fn slot_access(&self, phase: PhaseId) -> Option<Access> {
        let mut found = None;
        for node in &self.phase(phase).nodes {
            node.op.for_each(|access, t| {
                if self.get(t).role == Role::Slot && found != Some(Access::Write) {
                    found = Some(access);
                }
            });
        }
        found
    }
}

/// Appends ops to one phase of a program. Each op's file adds its own method.
pub struct PhaseBuilder<'p> {
    /// The program that is being written.
    pub program: &'p mut Program,
    id: PhaseId,
    layer: Option<u32>,
    recomputing: bool,
}

impl PhaseBuilder<'_> {
    /// The phase's id.
    pub fn id(&self) -> PhaseId {
        self.id
    }

    /// Marks the ops that follow as belonging to layer `layer` (or to none): the unit of recomputation.
    pub fn set_layer(&mut self, layer: Option<u32>) {
        self.layer = layer;
    }

    /// Marks the ops that follow as repeats whose work is not useful.
    pub(crate) fn set_recomputing(&mut self, on: bool) {
        self.recomputing = on;
    }

    /// Shape of a tensor.
    pub fn shape(&self, t: TensorId) -> Vec<usize> {
        self.program.get(t).shape.clone()
    }

    /// A fresh tensor of role [`Role::Phase`], named after this phase and its position in the table.
    pub fn temp(&mut self, stem: &str, shape: &[usize], dtype: DType) -> TensorId {
        let name = match self.layer {
            Some(l) => format!("{}/layers.{l}.{stem}#{}", self.program.phases[self.id.index()].name, self.program.tensors.len()),
            None => format!("{}/{stem}#{}", self.program.phases[self.id.index()].name, self.program.tensors.len()),
        };
        self.program.tensor(name, shape, dtype, Role::Phase)
    }

    /// A fresh activation: [`PhaseBuilder::temp`] in the program's activation dtype.
    pub fn act(&mut self, stem: &str, shape: &[usize]) -> TensorId {
        let dtype = self.program.act;
        self.temp(stem, shape, dtype)
    }

    /// Appends an op.
    ///
    /// # Panics
    /// When the op reads a phase tensor nothing has written yet, or writes a frozen tensor: both are bugs of the model code.
    pub fn push(&mut self, op: Op) {
        let phase = self.id;
        let mut promote = Vec::new();
        op.for_each(|access, t| {
            let tensor = &self.program.tensors[t.index()];
            assert!(
                access == Access::Read || tensor.role != Role::Frozen,
                "op {} writes the frozen tensor `{}`",
                op.name(),
                tensor.name
            );
            if tensor.role == Role::Phase {
                match self.program.producer.get(&t) {
                    Some(&p) if p != phase => promote.push(t),
                    Some(_) => {}
                    None => assert!(
                        matches!(access, Access::Write | Access::Scratch),
                        "op {} reads `{}` before anything wrote it",
                        op.name(),
                        tensor.name
                    ),
                }
            }
        });
        for t in promote {
            self.program.tensors[t.index()].role = Role::Step;
        }
        op.for_each(|access, t| {
            if access != Access::Read {
                self.program.producer.entry(t).or_insert(phase);
            }
        });
        let node = Node { op, recomputed: self.recomputing, layer: self.layer };
        self.program.phases[phase.index()].nodes.push(node);
    }
}
