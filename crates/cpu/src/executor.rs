//! The executor: walks a phase's nodes and hands each op its views.
//!
//! Job: [`Executor`] for the CPU. Refuses shape checks that the builder has done. Invariants: exhaustive over [`Op`]; operand
//! lists come from the op alone.

use crate::memory::{Memory, SlotView, Views};
use crate::scratch::{Need, Scratch};
use crate::{attention, block_attention, elementwise, linear, loss, norm, optim};
use drafthorse_graph::dtype::round_bf16;
use drafthorse_graph::op::{Access, Op};
use drafthorse_graph::plan::Region;
use drafthorse_graph::{
    DType, ExecError, Executor, Fetch, HostMut, HostRef, PhaseId, Plan, Program, Role, SlotArg, Storage, TensorId,
};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Content of frozen tensors by name, shared between executors: one copy of the target's weights per process.
pub type FrozenSet = HashMap<String, Arc<Vec<f32>>>;

/// How a CPU executor runs.
#[derive(Clone)]
pub struct Options {
    /// The pool that all executors of a process share.
    pub pool: Arc<rayon::ThreadPool>,
    /// Round every stored BF16 tensor to bf16 values, so that a GPU can be compared at bf16 ulps.
    pub round: bool,
}

/// Runs programs in f32 on a rayon pool.
pub struct CpuExecutor {
    program: Arc<Program>,
    plan: Plan,
    memory: Memory,
    options: Options,
    slot_len: usize,
    fetches: HashMap<u64, Vec<(bool, Vec<f32>)>>,
    next_fetch: u64,
    times: BTreeMap<&'static str, Duration>,
}

impl CpuExecutor {
    /// Plans `program` and allocates its regions.
    ///
    /// # Errors
    /// [`ExecError::HostShape`] when a frozen tensor is missing from `frozen` or has another length.
    pub fn new(program: Arc<Program>, frozen: &FrozenSet, options: Options) -> Result<CpuExecutor, ExecError> {
        let plan = Plan::new(&program, Storage::Wide);
        let mut bound = HashMap::new();
        for t in program.of_role(Role::Frozen) {
            let tensor = program.get(t);
            let data = frozen.get(&tensor.name).filter(|d| d.len() == tensor.len()).ok_or_else(|| ExecError::HostShape {
                name: tensor.name.clone(),
                want: tensor.len(),
                dtype: "float",
                got: frozen.get(&tensor.name).map_or("nothing".into(), |d| d.len().to_string()),
            })?;
            bound.insert(t, Arc::clone(data));
        }
        let slot_len = program.of_role(Role::Slot).first().map_or(0, |&t| program.get(t).len());
        let scratch = Scratch::new(Need::of(&program), options.pool.current_num_threads());
        let memory = Memory::new(&plan, bound, scratch, options.round);
        Ok(CpuExecutor {
            program,
            plan,
            memory,
            options,
            slot_len,
            fetches: HashMap::new(),
            next_fetch: 0,
            times: BTreeMap::new(),
        })
    }

    /// Bytes of working memory that an executor of `program` allocates beside the plan's regions, on a pool of `threads` threads.
    pub fn scratch_bytes(program: &Program, threads: usize) -> u64 {
        Need::of(program).bytes(threads)
    }

    /// The plan this executor allocated.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Wall time spent in each kind of op since the last call.
    pub fn take_times(&mut self) -> BTreeMap<&'static str, Duration> {
        std::mem::take(&mut self.times)
    }

    fn host_error(&self, t: TensorId, got: String) -> ExecError {
        let tensor = self.program.get(t);
        let dtype = if tensor.dtype.is_float() { "float" } else { "i32" };
        ExecError::HostShape { name: tensor.name.clone(), want: tensor.len(), dtype, got }
    }

    fn run_op(&mut self, op: &Op, slot: SlotView<'_>) {
        let begun = Instant::now();
        let program = Arc::clone(&self.program);
        let mut views = self.memory.views(&self.plan, &program, op, slot);
        dispatch(op, &program, &mut views);
        if self.options.round {
            let mut stored = Vec::new();
            op.for_each(|access, t| {
                let tensor = program.get(t);
                if access != Access::Read && tensor.dtype == DType::BF16 && tensor.role != Role::Slot {
                    stored.push(t);
                }
            });
            for t in stored {
                if let Some(data) = self.memory.tensor(&self.plan, t) {
                    data.par_iter_mut().for_each(|x| *x = round_bf16(*x));
                }
            }
        }
        *self.times.entry(op.name()).or_default() += begun.elapsed();
    }
}

fn dispatch(op: &Op, program: &Program, views: &mut Views<'_>) {
    match op {
        Op::Embed(op) => elementwise::embed(op, program, views),
        Op::Linear(op) => linear::forward(op, program, views),
        Op::LinearDx(op) => linear::dx(op, program, views),
        Op::LinearDw(op) => linear::dw(op, program, views),
        Op::RmsNorm(op) => norm::rms_norm(op, program, views),
        Op::RmsNormBwd(op) => norm::rms_norm_bwd(op, program, views),
        Op::QkNormRope(op) => norm::qk_norm_rope(op, program, views),
        Op::QkNormRopeBwd(op) => norm::qk_norm_rope_bwd(op, program, views),
        Op::SwiGlu(op) => elementwise::swiglu(op, program, views),
        Op::SwiGluBwd(op) => elementwise::swiglu_bwd(op, program, views),
        Op::CausalAttention(op) => attention::causal(op, program, views),
        Op::KvAppend(op) => attention::kv_append(op, program, views),
        Op::CachedAttention(op) => attention::cached(op, program, views),
        Op::BlockAttention(op) => block_attention::forward(op, program, views),
        Op::BlockAttentionBwd(op) => block_attention::backward(op, program, views),
        Op::Capture(op) => elementwise::capture(op, program, views),
        Op::GatherRows(op) => elementwise::gather_rows(op, program, views),
        Op::ScatterRows(op) => elementwise::scatter_rows(op, program, views),
        Op::HeadLoss(op) => loss::head_loss(op, program, views),
        Op::PickTokens(op) => loss::pick_tokens(op, program, views),
        Op::Zero(op) => optim::zero(op, views),
        Op::GradNorm(op) => optim::grad_norm(op, views),
        Op::AdamW(op) => optim::adamw(op, views),
    }
}

impl Executor for CpuExecutor {
    type Slot = Vec<f32>;

    fn write(&mut self, t: TensorId, data: HostRef<'_>) -> Result<(), ExecError> {
        let is_float = self.program.get(t).dtype.is_float();
        let round = self.options.round && self.program.get(t).dtype == DType::BF16;
        let len = match data {
            HostRef::F32(s) => s.len(),
            HostRef::I32(s) => s.len(),
        };
        let fits = len == self.program.get(t).len() && is_float == matches!(data, HostRef::F32(_));
        let Some(target) = self.memory.tensor(&self.plan, t).filter(|_| fits) else {
            return Err(self.host_error(t, format!("{len} elements")));
        };
        match data {
            HostRef::F32(s) if round => target.iter_mut().zip(s).for_each(|(d, &x)| *d = round_bf16(x)),
            HostRef::F32(s) => target.copy_from_slice(s),
            HostRef::I32(s) => bytemuck::cast_slice_mut::<f32, i32>(target).copy_from_slice(s),
        }
        Ok(())
    }

    fn read(&mut self, t: TensorId, out: HostMut<'_>) -> Result<(), ExecError> {
        let is_float = self.program.get(t).dtype.is_float();
        let len = match &out {
            HostMut::F32(s) => s.len(),
            HostMut::I32(s) => s.len(),
        };
        let fits = len == self.program.get(t).len() && is_float == matches!(out, HostMut::F32(_));
        let Some(source) = self.memory.tensor(&self.plan, t).filter(|_| fits) else {
            return Err(self.host_error(t, format!("room for {len} elements")));
        };
        match out {
            HostMut::F32(s) => s.copy_from_slice(source),
            HostMut::I32(s) => s.copy_from_slice(bytemuck::cast_slice(source)),
        }
        Ok(())
    }

    fn fetch(&mut self, tensors: &[TensorId]) -> Result<Fetch, ExecError> {
        let mut copies = Vec::with_capacity(tensors.len());
        for &t in tensors {
            let is_float = self.program.get(t).dtype.is_float();
            match self.memory.tensor(&self.plan, t) {
                Some(data) => copies.push((is_float, data.to_vec())),
                None => return Err(self.host_error(t, "a fetch of memory the executor does not own".into())),
            }
        }
        self.next_fetch += 1;
        self.fetches.insert(self.next_fetch, copies);
        Ok(Fetch(self.next_fetch))
    }

    fn collect(&mut self, fetch: Fetch, each: &mut dyn FnMut(usize, HostRef<'_>)) -> Result<(), ExecError> {
        let copies = self.fetches.remove(&fetch.0).expect("a fetch is collected once, by the executor that started it");
        for (i, (is_float, data)) in copies.iter().enumerate() {
            each(i, if *is_float { HostRef::F32(data) } else { HostRef::I32(bytemuck::cast_slice(data)) });
        }
        Ok(())
    }

    fn run(&mut self, phase: PhaseId, slot: SlotArg<'_, Vec<f32>>) -> Result<(), ExecError> {
        let program = Arc::clone(&self.program);
        let phase_ref = program.phase(phase);
        let slot_error = |what: &str| ExecError::Slot { phase: phase_ref.name.clone(), what: what.into() };
        let bound = match &slot {
            SlotArg::None => None,
            SlotArg::Read(s) => Some((Access::Read, s.len())),
            SlotArg::Write(s) => Some((Access::Write, s.len())),
        };
        match (program.slot_access(phase), bound) {
            (None, None) => {}
            (Some(need), Some((have, len))) if need == have && len == self.slot_len => {}
            (need, have) => return Err(slot_error(&format!("needs slot {need:?} of {} elements, got {have:?}", self.slot_len))),
        }
        let pool = Arc::clone(&self.options.pool);
        pool.install(|| {
            let mut slot = slot;
            for node in &phase_ref.nodes {
                let view = match &mut slot {
                    SlotArg::None => SlotView::None,
                    SlotArg::Read(s) => SlotView::Read(s),
                    SlotArg::Write(s) => SlotView::Write(s),
                };
                self.run_op(&node.op, view);
            }
        });
        Ok(())
    }

    fn prepare(&mut self) -> Result<(), ExecError> {
        Ok(())
    }

    fn new_slot(&self) -> Result<Vec<f32>, ExecError> {
        Ok(vec![0.0; self.slot_len])
    }

    fn with_grads(&mut self, f: &mut dyn FnMut(&mut [f32])) -> Result<(), ExecError> {
        f(self.memory.region(Region::Grad));
        Ok(())
    }

    fn held_bytes(&self) -> u64 {
        self.memory.held_bytes()
    }
}
