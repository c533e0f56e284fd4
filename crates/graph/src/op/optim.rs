//! `Zero`, `GradNorm`, `AdamW`: the optimizer phase.
//!
//! `GradNorm` turns the (all-reduced) gradients g of Σ w·CE and `sums` = (Σ w·CE, Σ w) into `stats` F32 `[8]`, see [`Stat`]:
//! with s = 1/Σw: loss = s·Σ w·CE, norm = s·(Σ g²)^1/2, finite = all of loss, norm finite and Σw > 0, scale = s·min(1, clip/(norm + 1e-6)),
//! and, only when finite, t += 1 and the bias corrections 1-β₁ᵗ, 1-β₂ᵗ (formed in f64). Decided on the device, so all drafters skip together.
//! `AdamW`, per parameter when finite: g' = scale·g; `m = β₁m + (1-β₁)g'`, `v = β₂v + (1-β₂)g'²`,
//! `p = p·(1 - lr·wd) - lr/bc₁ · m / (v^1/2/bc₂^1/2 + ε)` on the fp32 master, then w = round(master). When not finite nothing changes.
//! Sources: Loshchilov & Hutter 2019, arXiv 1711.05101; `torch.optim.AdamW`; `torch.nn.utils.clip_grad_norm_` (its 1e-6).
//! Sum of squares: per tensor in fixed chunks of 2^16 elements, chunk sums added in order in f64. Bound: memory, 28-32 bytes per parameter.

use super::{Access, Contract};
use crate::dtype::DType;
use crate::program::{PhaseBuilder, Program, TensorId};

/// Fields of `stats`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stat {
    /// Mean loss of the step.
    Loss = 0,
    /// Σ w.
    WeightSum = 1,
    /// Global gradient norm before clipping.
    Norm = 2,
    /// 1 when the step was taken, 0 when it was skipped.
    Finite = 3,
    /// Factor on the raw gradients.
    Scale = 4,
    /// 1 - β₁ᵗ.
    Bias1 = 5,
    /// 1 - β₂ᵗ.
    Bias2 = 6,
    /// Adam's t after this step.
    AdamT = 7,
}

/// Elements whose squares are summed together, in order: fixed, so that the norm does not depend on threads or GPU.
pub const NORM_CHUNK: usize = 1 << 16;

/// Sets tensors to zero.
#[derive(Clone, Debug)]
pub struct Zero {
    /// Any float or integer tensors.
    pub tensors: Vec<TensorId>,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct GradNorm {
    /// F32 accumulators of every parameter.
    pub grads: Vec<TensorId>,
    /// F32 `[2]`.
    pub sums: TensorId,
    /// I32 `[1]`, Adam's t.
    pub adam_t: TensorId,
    /// F32 `[8]`.
    pub stats: TensorId,
    /// F32 `[chunks]`: one sum per [`NORM_CHUNK`] of every gradient.
    pub chunk_sums: TensorId,
    /// Clip threshold of the norm.
    pub clip: f32,
    /// β₁, β₂.
    pub betas: [f32; 2],
}

/// One parameter of [`AdamW`].
#[derive(Clone, Copy, Debug)]
pub struct AdamParam {
    /// The weight that the forward pass reads.
    pub w: TensorId,
    /// F32 master; absent when `w` is itself F32.
    pub master: Option<TensorId>,
    /// F32 first moment.
    pub m: TensorId,
    /// F32 second moment.
    pub v: TensorId,
    /// F32 gradient.
    pub grad: TensorId,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// Every parameter.
    pub params: Vec<AdamParam>,
    /// F32 `[1]`: learning rate of this step.
    pub lr: TensorId,
    /// F32 `[8]` from [`GradNorm`].
    pub stats: TensorId,
    /// β₁, β₂.
    pub betas: [f32; 2],
    /// ε.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
}

impl Contract for Zero {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        for t in &mut self.tensors {
            f(Access::Write, t);
        }
    }

    fn flops(&self, _program: &Program) -> u64 {
        0
    }
}

impl Contract for GradNorm {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        for t in &mut self.grads {
            f(Access::Read, t);
        }
        f(Access::Read, &mut self.sums);
        f(Access::Update, &mut self.adam_t);
        f(Access::Write, &mut self.stats);
        f(Access::Scratch, &mut self.chunk_sums);
    }

    fn flops(&self, program: &Program) -> u64 {
        self.grads.iter().map(|&t| 2 * program.get(t).len() as u64).sum()
    }
}

impl Contract for AdamW {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        for p in &mut self.params {
            // Not `Write`: a step that is skipped leaves the weight as it was.
            f(Access::Update, &mut p.w);
            if let Some(master) = &mut p.master {
                f(Access::Update, master);
            }
            f(Access::Update, &mut p.m);
            f(Access::Update, &mut p.v);
            f(Access::Read, &mut p.grad);
        }
        f(Access::Read, &mut self.lr);
        f(Access::Read, &mut self.stats);
    }

    fn flops(&self, program: &Program) -> u64 {
        self.params.iter().map(|p| 14 * program.get(p.w).len() as u64).sum()
    }
}

/// Hyper-parameters that do not change during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamConfig {
    /// β₁, β₂.
    pub betas: [f32; 2],
    /// ε.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Clip threshold of the global norm.
    pub clip: f32,
}

/// Tensors of an optimizer phase that are not parameters.
#[derive(Clone, Copy, Debug)]
pub struct AdamScalars {
    /// F32 `[2]`.
    pub sums: TensorId,
    /// I32 `[1]`.
    pub adam_t: TensorId,
    /// F32 `[8]`.
    pub stats: TensorId,
    /// F32 `[1]`.
    pub lr: TensorId,
}

impl PhaseBuilder<'_> {
    /// Appends a [`Zero`].
    pub fn zero(&mut self, tensors: Vec<TensorId>) {
        self.push(Zero { tensors }.into());
    }

    /// Appends the norm and the update of all parameters.
    pub fn adamw(&mut self, params: Vec<AdamParam>, scalars: AdamScalars, config: AdamConfig) {
        let grads: Vec<TensorId> = params.iter().map(|p| p.grad).collect();
        let mut chunks = 0;
        for p in &params {
            let (w, len) = (self.program.get(p.w), self.program.get(p.w).len());
            assert_eq!(
                p.master.is_none(),
                w.dtype == DType::F32,
                "`{}`: a master beside F32 weights, or none beside bf16",
                w.name
            );
            for t in [p.m, p.v, p.grad].into_iter().chain(p.master) {
                assert_eq!((self.program.get(t).len(), self.program.get(t).dtype), (len, DType::F32), "state of `{}`", w.name);
            }
            chunks += len.div_ceil(NORM_CHUNK);
        }
        let chunk_sums = self.temp("chunk_sums", &[chunks.max(1)], DType::F32);
        let AdamScalars { sums, adam_t, stats, lr } = scalars;
        self.push(GradNorm { grads, sums, adam_t, stats, chunk_sums, clip: config.clip, betas: config.betas }.into());
        let AdamConfig { betas, eps, weight_decay, .. } = config;
        self.push(AdamW { params, lr, stats, betas, eps, weight_decay }.into());
    }
}
