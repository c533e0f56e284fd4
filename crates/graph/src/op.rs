//! The coarse ops. One file per op holds its contract: shapes, mathematics forward and backward, FLOPs and bytes.
//!
//! Job: the closed list of ops, and uniform access to what each reads and writes. Refuses open extension: an executor matches
//! [`Op`] exhaustively, so a backend that lacks an op does not compile. Invariant: [`Contract::visit`] names every tensor the
//! op touches, each once, in a fixed order.

pub mod block_attention;
pub mod cached_attention;
pub mod capture;
pub mod causal_attention;
pub mod embed;
pub mod gather;
pub mod head_loss;
pub mod linear;
pub mod optim;
pub mod pick_tokens;
pub mod qk_norm_rope;
pub mod rms_norm;
pub mod swiglu;

use crate::backward::Backward;
use crate::program::{Program, TensorId};

pub use block_attention::{BlockAttention, BlockAttentionBwd};
pub use cached_attention::{CachedAttention, KvAppend};
pub use capture::Capture;
pub use causal_attention::CausalAttention;
pub use embed::Embed;
pub use gather::{GatherRows, ScatterRows};
pub use head_loss::HeadLoss;
pub use linear::{Linear, LinearDw, LinearDx};
pub use optim::{AdamParam, AdamW, GradNorm, Zero};
pub use pick_tokens::PickTokens;
pub use qk_norm_rope::{QkNormRope, QkNormRopeBwd};
pub use rms_norm::{RmsNorm, RmsNormBwd};
pub use swiglu::{SwiGlu, SwiGluBwd};

/// How an op touches a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Every element is written; the old content is not read.
    Write,
    /// Read and written in place (accumulators, caches, parameters).
    Update,
    /// Working memory whose content is meaningless before and after the op.
    Scratch,
}

/// What an op costs at the shapes of its plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Floating point operations the mathematics needs (a multiply-add is two); see DESIGN "useful FLOPs".
    pub flops: u64,
    /// Bytes that must cross device memory: each input read once, each output written once, at declared dtypes.
    pub bytes: u64,
}

/// What every op's file provides.
pub trait Contract {
    /// Shows every tensor of the op, each once, in a fixed order; the callback may rename it.
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId));

    /// Floating point operations at the plan's shapes.
    fn flops(&self, program: &Program) -> u64;

    /// Appends the ops that turn the gradients of this op's outputs into gradients of its inputs.
    ///
    /// # Panics
    /// For ops that are not differentiable and on a gradient that nothing asked for: a bug of the model code.
    fn vjp(&self, _backward: &mut Backward<'_, '_>) {
        panic!("{} has no gradient", std::any::type_name::<Self>());
    }
}

macro_rules! ops {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// One op with its operands.
        #[derive(Clone, Debug)]
        pub enum Op { $($(#[$doc])* $name($name)),+ }

        impl Op {
            /// The op's name, for messages.
            pub fn name(&self) -> &'static str {
                match self { $(Op::$name(_) => stringify!($name)),+ }
            }

            fn contract(&self) -> &dyn Contract {
                match self { $(Op::$name(op) => op),+ }
            }

            fn contract_mut(&mut self) -> &mut dyn Contract {
                match self { $(Op::$name(op) => op),+ }
            }
        }

        $(impl From<$name> for Op { fn from(op: $name) -> Op { Op::$name(op) } })+
    };
}

ops! {
    /// Rows of an embedding table.
    Embed,
    /// `y = x Wᵀ (+ b)`.
    Linear,
    /// Gradient of a linear with respect to its input.
    LinearDx,
    /// Gradient of a linear with respect to its weight, added into an fp32 accumulator.
    LinearDw,
    /// RMSNorm, optionally after adding a residual branch.
    RmsNorm,
    /// Its backward.
    RmsNormBwd,
    /// Per-head norm, rotary embedding and split of a packed qkv row.
    QkNormRope,
    /// Its backward.
    QkNormRopeBwd,
    /// `silu(gate) ⊙ up`.
    SwiGlu,
    /// Its backward.
    SwiGluBwd,
    /// Causal attention over packed samples.
    CausalAttention,
    /// Rows appended to a KV cache.
    KvAppend,
    /// Attention of a few rows over a KV cache.
    CachedAttention,
    /// Block-diffusion attention.
    BlockAttention,
    /// Its backward.
    BlockAttentionBwd,
    /// Strided column copy between a stream and a slot.
    Capture,
    /// Row compaction.
    GatherRows,
    /// Its backward.
    ScatterRows,
    /// Language-model head with weighted cross-entropy and its gradient.
    HeadLoss,
    /// Argmax, top-2, probe probability and sampling.
    PickTokens,
    /// Sets tensors to zero.
    Zero,
    /// Global gradient norm and the scalars of an optimizer step.
    GradNorm,
    /// AdamW over all parameters.
    AdamW,
}

impl Op {
    /// Shows every tensor of the op with its access.
    pub fn for_each(&self, mut f: impl FnMut(Access, TensorId)) {
        self.clone().contract_mut().visit(&mut |access, t| f(access, *t));
    }

    /// Renames tensors.
    pub(crate) fn rename(&mut self, mut f: impl FnMut(Access, TensorId) -> TensorId) {
        self.contract_mut().visit(&mut |access, t| *t = f(access, *t));
    }

    /// Cost at the plan's shapes.
    pub fn work(&self, program: &Program) -> Work {
        let mut bytes = 0u64;
        self.for_each(|access, t| {
            let tensor = program.get(t);
            let size = (tensor.len() * tensor.dtype.bytes()) as u64;
            bytes += match access {
                Access::Read | Access::Write => size,
                Access::Update => 2 * size,
                Access::Scratch => 0,
            };
        });
        Work { flops: self.contract().flops(program), bytes }
    }

    /// Appends this op's backward; see [`Contract::vjp`].
    pub(crate) fn vjp(&self, backward: &mut Backward<'_, '_>) {
        self.contract().vjp(backward);
    }

    /// `Name(tensor[shape] …)`, for error messages.
    pub fn describe(&self, program: &Program) -> String {
        let mut parts = Vec::new();
        self.for_each(|_, t| {
            let tensor = program.get(t);
            parts.push(format!("{}{:?}", tensor.name, tensor.shape));
        });
        format!("{}({})", self.name(), parts.join(" "))
    }
}

/// Rows over which parameter gradients of norms are reduced before the final sum: fixed, so that the order of the
/// sum depends neither on the number of threads nor on the GPU.
pub const PARTIALS: usize = 256;

/// Attention geometry shared by every attention op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Query heads.
    pub q: usize,
    /// Key/value heads; divides `q`.
    pub kv: usize,
    /// Elements of one head.
    pub dim: usize,
}

impl Heads {
    /// Query heads that share one key/value head.
    pub fn group(self) -> usize {
        self.q / self.kv
    }

    /// Elements of one row of all query heads.
    pub fn q_cols(self) -> usize {
        self.q * self.dim
    }

    /// Elements of one row of all key (or value) heads.
    pub fn kv_cols(self) -> usize {
        self.kv * self.dim
    }

    /// `dim^-1/2`, the scale of the scores.
    pub fn scale(self) -> f32 {
        (self.dim as f32).powf(-0.5)
    }

    pub(crate) fn check(self) {
        assert!(
            self.kv > 0 && self.q.is_multiple_of(self.kv),
            "{} query heads do not divide over {} key/value heads",
            self.q,
            self.kv
        );
    }
}
