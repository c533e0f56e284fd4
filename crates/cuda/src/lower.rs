//! Ops to commands: which kernel, which geometry, which arguments.
//!
//! Job: match every [`Op`] and append its commands, with addresses of the plan. Refuses shapes that the kernels do not cover, naming op and limit, before
//! anything runs. Invariants: exhaustive over [`Op`]; the launch rules are those of the kernel files' headers; every element an op's contract writes is written.

mod attention;
mod linear;
mod loss;
mod norms;
mod optim;
mod rows;

use crate::command::{Arg, Command, Launch, Pointer, Work};
use crate::driver::{Buffer, DeviceHandle};
use crate::error::CudaError;
use crate::kernels::Kernels;
use drafthorse_graph::op::Op;
use drafthorse_graph::{DType, Program, TensorId};

/// Rows of the cache that one CTA of cached attention sums: one value for all plans, so that their results agree bit for bit.
pub const CACHE_CHUNK: usize = 256;

/// Everything lowering asks for.
pub struct Lowering<'a> {
    /// The program.
    pub program: &'a Program,
    /// Kernels of the device.
    pub kernels: &'a Kernels,
    /// The device.
    pub device: &'a DeviceHandle,
    /// Where each tensor lies; `None` for tensors that no op touches.
    pub places: &'a [Option<Pointer>],
    /// Scratch of [`attention::scratch_bytes`] bytes.
    pub scratch: u64,
    /// Use sm_90a kernels.
    pub hopper: bool,
    /// Commands so far.
    pub commands: Vec<Command>,
    /// Device tables that commands point at, with their content.
    pub tables: Vec<(Buffer, Vec<u8>)>,
    node: usize,
    op: Option<Op>,
}

impl<'a> Lowering<'a> {
    /// Nothing is lowered yet.
    pub fn new(
        program: &'a Program,
        kernels: &'a Kernels,
        device: &'a DeviceHandle,
        places: &'a [Option<Pointer>],
        scratch: u64,
        hopper: bool,
    ) -> Lowering<'a> {
        Lowering {
            program,
            kernels,
            device,
            places,
            scratch,
            hopper,
            commands: Vec::new(),
            tables: Vec::new(),
            node: 0,
            op: None,
        }
    }

    /// Appends the commands of node `node`.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`], or a kernel that does not load.
    pub fn lower(&mut self, node: usize, op: &Op) -> Result<(), CudaError> {
        (self.node, self.op) = (node, Some(op.clone()));
        match op {
            Op::Embed(op) => self.embed(op),
            Op::Linear(op) => self.linear(op),
            Op::LinearDx(op) => self.linear_dx(op),
            Op::LinearDw(op) => self.linear_dw(op),
            Op::RmsNorm(op) => self.rms_norm(op),
            Op::RmsNormBwd(op) => self.rms_norm_bwd(op),
            Op::QkNormRope(op) => self.qk_norm_rope(op),
            Op::QkNormRopeBwd(op) => self.qk_norm_rope_bwd(op),
            Op::SwiGlu(op) => self.swiglu(op),
            Op::SwiGluBwd(op) => self.swiglu_bwd(op),
            Op::CausalAttention(op) => self.causal_attention(op),
            Op::KvAppend(op) => self.kv_append(op),
            Op::CachedAttention(op) => self.cached_attention(op),
            Op::BlockAttention(op) => self.block_attention(op),
            Op::BlockAttentionBwd(op) => self.block_attention_bwd(op),
            Op::Capture(op) => self.capture(op),
            Op::GatherRows(op) => self.gather_rows(op),
            Op::ScatterRows(op) => self.scatter_rows(op),
            Op::HeadLoss(op) => self.head_loss(op),
            Op::PickTokens(op) => self.pick_tokens(op),
            Op::Zero(op) => self.zero(op),
            Op::GradNorm(op) => self.grad_norm(op),
            Op::AdamW(op) => self.adamw(op),
        }
    }

    fn refuse(&self, why: impl Into<String>) -> CudaError {
        let op = self.op.as_ref().map_or_else(String::new, |op| op.describe(self.program));
        CudaError::Unsupported { op, why: why.into() }
    }

    fn pointer(&self, t: TensorId) -> Pointer {
        self.places[t.index()].expect("the plan places every tensor that an op touches")
    }

    /// The address of a tensor that is no slot.
    fn at(&self, t: TensorId) -> Result<u64, CudaError> {
        match self.pointer(t) {
            Pointer::At(address) => Ok(address),
            Pointer::Slot(_) => {
                Err(self.refuse(format!("`{}` is a slot; only linears and captures take slots", self.program.get(t).name)))
            }
        }
    }

    fn arg(&self, t: TensorId) -> Result<Arg, CudaError> {
        Ok(Arg::Pointer(Pointer::At(self.at(t)?)))
    }

    /// The address, or null when there is no tensor.
    fn arg_or_null(&self, t: Option<TensorId>) -> Result<Arg, CudaError> {
        t.map_or(Ok(Arg::Pointer(Pointer::At(0))), |t| self.arg(t))
    }

    fn rows(&self, t: TensorId) -> usize {
        self.program.get(t).rows()
    }

    fn cols(&self, t: TensorId) -> usize {
        self.program.get(t).cols()
    }

    fn is_f32(&self, t: TensorId) -> Arg {
        Arg::Int(i32::from(self.program.get(t).dtype == DType::F32))
    }

    /// Asserts that tensors are stored as bf16: these kernels read nothing else.
    fn want_bf16(&self, tensors: &[TensorId]) -> Result<(), CudaError> {
        for &t in tensors {
            let tensor = self.program.get(t);
            if tensor.dtype != DType::BF16 {
                return Err(self.refuse(format!("`{}` is {:?}, and this kernel reads bf16", tensor.name, tensor.dtype)));
            }
        }
        Ok(())
    }

    fn push(&mut self, work: Work) {
        self.commands.push(Command { node: self.node, work });
    }

    fn launch(
        &mut self,
        file: &'static str,
        symbol: impl Into<String>,
        grid: [usize; 2],
        block: [usize; 2],
        shared: usize,
        args: Vec<Arg>,
    ) -> Result<(), CudaError> {
        let symbol = symbol.into();
        let function = self.kernels.function(file, &symbol, shared as u32)?;
        if grid.contains(&0) {
            return Ok(());
        }
        if grid[0] > i32::MAX as usize || grid[1] > 65_535 {
            return Err(self.refuse(format!("{symbol} would need a grid of {grid:?}")));
        }
        let grid = [grid[0] as u32, grid[1] as u32, 1];
        let block = [block[0] as u32, block[1] as u32, 1];
        self.push(Work::Launch(Launch { function, symbol, grid, block, shared: shared as u32, args }));
        Ok(())
    }

    /// An extent as a kernel's `int`.
    fn int(&self, n: usize) -> Result<Arg, CudaError> {
        i32::try_from(n).map(Arg::Int).map_err(|_| self.refuse(format!("an extent of {n} exceeds 2^31")))
    }
}

/// `n` rounded up to whole warps.
fn warps(n: usize) -> usize {
    n.max(1).next_multiple_of(32)
}

/// Bytes of scratch that a program's ops share.
pub fn scratch_bytes(program: &Program) -> usize {
    program.phases().flat_map(|(_, p)| &p.nodes).map(|n| attention::scratch_bytes(program, &n.op)).max().unwrap_or(0)
}
