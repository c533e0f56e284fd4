//! Naive oracles: every op of [`drafthorse_graph::Op`] as plain loops with f64 sums.
//!
//! Job: what an executor's results are compared with, one file per op, written from the contracts in `drafthorse_graph::op` and
//! sharing no code with an executor. Beside each result it gives the [`SumMass`] of which the comparator makes a bound.
//! Refuses optimisation. Invariant: a tensor is only ever replaced whole, so a missing or stale operand panics with its name.

mod block_attention;
mod cached_attention;
mod capture;
mod causal_attention;
mod embed;
mod executor;
mod gather;
mod head_loss;
mod linear;
mod optim;
mod pick_tokens;
mod qk_norm_rope;
mod rms_norm;
mod softmax_row;
mod swiglu;

pub use executor::OracleExecutor;
pub use pick_tokens::{draw_margin, pick_row};

use crate::compare::SumMass;
use drafthorse_graph::dtype::round_bf16;
use drafthorse_graph::{Access, DType, Op, PhaseId, Program, TensorId};
use std::collections::HashMap;

/// Content of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// F32 and BF16 tensors.
    Float(Vec<f64>),
    /// I32 tensors.
    Int(Vec<i32>),
}

impl Value {
    /// The floats.
    ///
    /// # Panics
    /// On integers.
    pub fn floats(&self) -> &[f64] {
        match self {
            Value::Float(v) => v,
            Value::Int(_) => panic!("integers where floats are expected"),
        }
    }

    /// The integers.
    ///
    /// # Panics
    /// On floats.
    pub fn ints(&self) -> &[i32] {
        match self {
            Value::Int(v) => v,
            Value::Float(_) => panic!("floats where integers are expected"),
        }
    }

    /// The elements as f64, whatever they are.
    pub fn wide(&self) -> Vec<f64> {
        match self {
            Value::Float(v) => v.clone(),
            Value::Int(v) => v.iter().map(|&i| f64::from(i)).collect(),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Value::Float(v) => v.len(),
            Value::Int(v) => v.len(),
        }
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Content of the tensors of a program.
pub type Values = HashMap<TensorId, Value>;

/// Masses of the float tensors that an op wrote.
pub type Masses = HashMap<TensorId, SumMass>;

/// What happens to a value on its way into a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Nothing: f64 throughout. For central differences.
    None,
    /// Values that a contract says are rounded inside an op are rounded to the declared type, and [`run_phase`] rounds every
    /// tensor after the op that wrote it. For comparison with an executor.
    Declared,
}

/// Rounds `x` to binary32 and on to `dtype`, as a value computed in fp32 is when it is stored.
pub fn round_to(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::BF16 => f64::from(round_bf16(x as f32)),
        DType::F32 => f64::from(x as f32),
        DType::I32 => x,
    }
}

/// Runs one op; results are stored unrounded.
///
/// # Panics
/// When an operand has no value or a value of another length, and on indices outside their tensor.
pub fn run_op(program: &Program, op: &Op, values: &mut Values, rounding: Rounding) -> Masses {
    let mut run = Run { program, values, rounding, masses: Masses::new() };
    match op {
        Op::Embed(op) => embed::embed(&mut run, op),
        Op::Linear(op) => linear::linear(&mut run, op),
        Op::LinearDx(op) => linear::linear_dx(&mut run, op),
        Op::LinearDw(op) => linear::linear_dw(&mut run, op),
        Op::RmsNorm(op) => rms_norm::rms_norm(&mut run, op),
        Op::RmsNormBwd(op) => rms_norm::rms_norm_bwd(&mut run, op),
        Op::QkNormRope(op) => qk_norm_rope::qk_norm_rope(&mut run, op),
        Op::QkNormRopeBwd(op) => qk_norm_rope::qk_norm_rope_bwd(&mut run, op),
        Op::SwiGlu(op) => swiglu::swiglu(&mut run, op),
        Op::SwiGluBwd(op) => swiglu::swiglu_bwd(&mut run, op),
        Op::CausalAttention(op) => causal_attention::causal_attention(&mut run, op),
        Op::KvAppend(op) => cached_attention::kv_append(&mut run, op),
        Op::CachedAttention(op) => cached_attention::cached_attention(&mut run, op),
        Op::BlockAttention(op) => block_attention::block_attention(&mut run, op),
        Op::BlockAttentionBwd(op) => block_attention::block_attention_bwd(&mut run, op),
        Op::Capture(op) => capture::capture(&mut run, op),
        Op::GatherRows(op) => gather::gather_rows(&mut run, op),
        Op::ScatterRows(op) => gather::scatter_rows(&mut run, op),
        Op::HeadLoss(op) => head_loss::head_loss(&mut run, op),
        Op::PickTokens(op) => pick_tokens::pick_tokens(&mut run, op),
        Op::Zero(op) => optim::zero(&mut run, op),
        Op::GradNorm(op) => optim::grad_norm(&mut run, op),
        Op::AdamW(op) => optim::adamw(&mut run, op),
    }
    run.masses
}

/// Runs every op of a phase.
///
/// # Panics
/// As [`run_op`].
pub fn run_phase(program: &Program, phase: PhaseId, values: &mut Values, rounding: Rounding) {
    for node in &program.phase(phase).nodes {
        run_op(program, &node.op, values, rounding);
        if rounding == Rounding::Declared {
            node.op.for_each(|access, t| {
                if let (Access::Write | Access::Update, Some(Value::Float(v))) = (access, values.get_mut(&t)) {
                    v.iter_mut().for_each(|x| *x = round_to(program.get(t).dtype, *x));
                }
            });
        }
    }
}

/// One op's view of the values.
pub(crate) struct Run<'a> {
    program: &'a Program,
    values: &'a mut Values,
    rounding: Rounding,
    masses: Masses,
}

impl Run<'_> {
    fn value(&self, t: TensorId) -> &Value {
        let tensor = self.program.get(t);
        let value = self.values.get(&t).unwrap_or_else(|| panic!("tensor `{}` has no value", tensor.name));
        assert_eq!(value.len(), tensor.len(), "tensor `{}` {:?}", tensor.name, tensor.shape);
        value
    }

    /// A copy of a float tensor's content; copies keep the loops free of borrows.
    fn floats(&self, t: TensorId) -> Vec<f64> {
        self.value(t).floats().to_vec()
    }

    fn ints(&self, t: TensorId) -> Vec<i32> {
        self.value(t).ints().to_vec()
    }

    /// The one element of a `[1]` I32 tensor, as a count.
    fn count(&self, t: TensorId) -> usize {
        usize::try_from(self.value(t).ints()[0]).unwrap_or_else(|_| panic!("count `{}` is negative", self.program.get(t).name))
    }

    fn rows(&self, t: TensorId) -> usize {
        self.program.get(t).rows()
    }

    fn cols(&self, t: TensorId) -> usize {
        self.program.get(t).cols()
    }

    /// What `x` becomes where the contract says that it is rounded to the type of `like` inside the op.
    fn rounded(&self, like: TensorId, x: f64) -> f64 {
        match self.rounding {
            Rounding::None => x,
            Rounding::Declared => round_to(self.program.get(like).dtype, x),
        }
    }

    fn put_ints(&mut self, t: TensorId, v: Vec<i32>) {
        assert_eq!(
            (v.len(), self.program.get(t).dtype),
            (self.program.get(t).len(), DType::I32),
            "`{}`",
            self.program.get(t).name
        );
        self.values.insert(t, Value::Int(v));
    }

    /// Stores a result whose elements are sums of `terms` terms with Σ|ab| in `abs`.
    fn put(&mut self, t: TensorId, y: Vec<f64>, terms: usize, abs: Vec<f64>) {
        self.put_rounded(t, y, terms, abs, Vec::new());
    }

    /// [`Run::put`] for an op that rounds factors to the stored type; see [`SumMass::rounded`].
    fn put_rounded(&mut self, t: TensorId, y: Vec<f64>, terms: usize, abs: Vec<f64>, rounded: Vec<f64>) {
        let tensor = self.program.get(t);
        assert!(tensor.dtype.is_float(), "`{}` holds integers", tensor.name);
        assert_eq!((y.len(), abs.len()), (tensor.len(), tensor.len()), "`{}`", tensor.name);
        self.values.insert(t, Value::Float(y));
        self.masses.insert(t, SumMass { terms, abs, rounded });
    }

    /// Stores a result that is a copy: no arithmetic, so no error but the rounding of its type.
    fn put_copy(&mut self, t: TensorId, y: Vec<f64>) {
        let abs = vec![0.0; y.len()];
        self.put(t, y, 0, abs);
    }
}

/// Index `i` as a row of `rows` rows.
fn row(i: i32, rows: usize, what: &str) -> usize {
    usize::try_from(i).ok().filter(|&i| i < rows).unwrap_or_else(|| panic!("{what} {i} is outside 0..{rows}"))
}
