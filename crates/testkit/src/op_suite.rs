//! The list of op cases that every executor must pass, generic over [`Executor`].
//!
//! Job: for each op a few tiny programs with typical and hostile inputs, run by the executor and compared with the oracle, output by
//! output. Refuses to know any executor: tests in the executors' own crates call [`run_case`] for each of [`suite`].
//! Invariants: what an op is to write holds NaN (`i32::MIN` for integers) before the run; every case has must-fail twins
//! ([`corrupt`]), and a test of this crate proves that each is caught.
//!
//! ```no_run
//! # use drafthorse_graph::DType;
//! # use drafthorse_testkit::{op_suite, oracle::OracleExecutor};
//! for case in op_suite::suite(DType::F32) {
//!     op_suite::run_case(&case, |program, frozen| OracleExecutor::new(program, frozen)).unwrap();
//! }
//! ```

mod attention;
mod build;
mod dense;
mod drafter;
mod heads;
mod loss;
mod optimizer;
mod rows;

pub use drafter::{MiniDrafter, MiniDrafterOptions, mini_drafter};

use crate::compare::{Bound, EPS_BF16, EPS_F32, Mismatch, SumMass, compare};
use crate::inputs::Rng;
use crate::oracle::{Masses, Rounding, Value, Values, round_to, run_op};
use drafthorse_graph::{Access, DType, ExecError, Executor, HostMut, HostRef, PhaseId, Program, Role, SlotArg, TensorId};
use std::collections::HashMap;
use std::sync::Arc;

/// Factor on the error model of [`crate::compare`]. Twice the model leaves room for another order of summation and for approximate
/// exponentials; the must-fail twins show what it still catches.
pub const SLACK: f64 = 2.0;

/// Content of a frozen tensor, handed to an executor when it is made.
#[derive(Clone, Debug, PartialEq)]
pub enum FrozenData {
    /// For F32 and BF16 tensors, already rounded to the declared type.
    F32(Vec<f32>),
}

/// How an output is compared.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// The error model for floats, equality for integers.
    Model,
    /// Equality of the stored values.
    Exact,
    /// The error model at these elements; the contract leaves the others open.
    Only(Vec<usize>),
    /// `abs + rel·|want| + rms·(mean want²)^½`: for programs of many ops, whose masses are not propagated. Where something is rounded to bf16, plus
    /// [`SPREADS`] times the spread of the element over [`JITTERED`] runs of the oracle in which every store is off by up to one rounding error.
    Near {
        /// Whatever the value.
        abs: f64,
        /// Share of the wanted value.
        rel: f64,
        /// Share of the tensor's root mean square.
        rms: f64,
        /// Roots are compared: of second moments, which are then as far off as the gradients they are squares of.
        root: bool,
    },
}

/// Runs of the oracle with jittered stores, from which the spread of each element of a [`Rule::Near`] program is estimated.
pub const JITTERED: u64 = 12;
/// Spreads that an element may be off. Jitter is about twice as wide as rounding, so this is some eight standard deviations.
pub const SPREADS: f64 = 4.0;

/// Where the last term of a case's sums comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastTerm {
    /// The last column of this operand.
    Column(TensorId),
    /// The last row of this operand.
    Row(TensorId),
}

/// One op (or a short chain of phases) with its inputs.
#[derive(Clone, Debug)]
pub struct Case {
    /// Unique in its suite.
    pub name: String,
    /// The program.
    pub program: Arc<Program>,
    /// Run in this order.
    pub phases: Vec<PhaseId>,
    /// Content of every tensor that is read or updated before something writes it.
    pub values: Values,
    /// Rules other than [`Rule::Model`].
    pub rules: HashMap<TensorId, Rule>,
    /// For [`Corruption::DropLastTerm`].
    pub last_term: Option<LastTerm>,
}

/// What an executor computed, or what it should have.
pub type Outputs = HashMap<TensorId, Value>;

/// Results of the oracle.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Unrounded, of every tensor that an op writes.
    pub values: Values,
    /// Masses of the op that wrote a tensor last.
    pub masses: Masses,
    /// Root mean square deviation of each element when stores are jittered; empty for cases without [`Rule::Near`] in bf16.
    pub spread: HashMap<TensorId, Vec<f64>>,
}

/// Why a case failed.
#[derive(Debug, thiserror::Error)]
pub enum CaseError {
    /// The executor refused.
    #[error("case `{case}`: {source}")]
    Exec {
        /// The case.
        case: String,
        /// The executor's error.
        source: ExecError,
    },
    /// An output is wrong.
    #[error("case `{case}`: {source}")]
    Output {
        /// The case.
        case: String,
        /// Where.
        source: Mismatch,
    },
}

/// A fault planted in an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corruption {
    /// One element is left as it was before the run: NaN or `i32::MIN`.
    Unwritten,
    /// Up to 4×4 elements around the largest are zero.
    ZeroTile,
    /// That element has the other sign.
    FlipSign,
    /// Sums lack their last term.
    DropLastTerm,
}

impl Corruption {
    /// All of them.
    pub const ALL: [Corruption; 4] =
        [Corruption::Unwritten, Corruption::ZeroTile, Corruption::FlipSign, Corruption::DropLastTerm];
}

/// Every case, with activations and trainable weights declared as `act` (F32 or BF16).
///
/// An executor that stores wider than declared must round what it stores to pass the BF16 suite.
pub fn suite(act: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(rows::cases(act));
    cases.extend(dense::cases(act));
    cases.extend(heads::cases(act));
    cases.extend(attention::cases(act, None));
    cases.extend(loss::cases(act));
    cases.extend(optimizer::cases(act));
    cases.extend(drafter::cases(act, None));
    cases
}

/// The cases of attention ops and the drafter in miniature with heads of `dim` elements, for executors whose kernels exist for a few widths only.
pub fn suite_with_head_dim(act: DType, dim: usize) -> Vec<Case> {
    let mut cases = attention::cases(act, Some(dim));
    cases.extend(drafter::cases(act, Some(dim)));
    cases
}

/// Runs a case on the executor that `make` gives and compares every output.
///
/// # Errors
/// The first output that is wrong, or the executor's error.
pub fn run_case<E: Executor>(
    case: &Case,
    make: impl FnOnce(Arc<Program>, HashMap<TensorId, FrozenData>) -> E,
) -> Result<(), CaseError> {
    let outputs = execute(case, make).map_err(|source| CaseError::Exec { case: case.name.clone(), source })?;
    case.check(&case.expected(), &outputs)
}

/// Runs a case and reads its outputs, without comparing them.
///
/// # Errors
/// The executor's.
///
/// # Panics
/// When a fetch shows something else than a read.
pub fn execute<E: Executor>(
    case: &Case,
    make: impl FnOnce(Arc<Program>, HashMap<TensorId, FrozenData>) -> E,
) -> Result<Outputs, ExecError> {
    let mut executor = make(Arc::clone(&case.program), case.frozen());
    // Slots exist before the executor prepares itself, and tensors are filled after it: a warm-up may run any phase.
    let mut slot = if case.program.of_role(Role::Slot).is_empty() { None } else { Some(executor.new_slot()?) };
    executor.prepare()?;
    for (id, tensor) in case.program.tensors() {
        let value = match (tensor.role, case.values.get(&id)) {
            (Role::Frozen | Role::Slot | Role::Phase, _) => continue,
            (_, Some(value)) => value.clone(),
            (_, None) => poison(tensor.dtype, tensor.len()),
        };
        match value {
            Value::Float(v) => {
                let v: Vec<f32> = v.iter().map(|&x| x as f32).collect();
                executor.write(id, HostRef::F32(&v))?;
            }
            Value::Int(v) => executor.write(id, HostRef::I32(&v))?,
        }
    }
    for &phase in &case.phases {
        let arg = match (case.program.slot_access(phase), &mut slot) {
            (None, _) => SlotArg::None,
            (Some(Access::Write), Some(slot)) => SlotArg::Write(slot),
            (Some(_), Some(slot)) => SlotArg::Read(slot),
            (Some(_), None) => unreachable!("a program whose phases touch a slot has a slot tensor"),
        };
        executor.run(phase, arg)?;
    }
    let tensors = case.outputs();
    let mut outputs = Outputs::new();
    for &t in &tensors {
        outputs.insert(t, read(&mut executor, &case.program, t)?);
    }
    let fetch = executor.fetch(&tensors)?;
    let mut shown = 0;
    executor.collect(fetch, &mut |i, content| {
        let same = match (content, &outputs[&tensors[i]]) {
            (HostRef::F32(a), Value::Float(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| f64::from(a) == b || (a.is_nan() && b.is_nan()))
            }
            (HostRef::I32(a), Value::Int(b)) => a == b.as_slice(),
            _ => false,
        };
        assert!(same, "case `{}`: fetch and read differ on `{}`", case.name, case.program.get(tensors[i]).name);
        shown += 1;
    })?;
    assert_eq!(shown, tensors.len(), "case `{}`: tensors that a fetch showed", case.name);
    Ok(outputs)
}

fn read<E: Executor>(executor: &mut E, program: &Program, t: TensorId) -> Result<Value, ExecError> {
    let tensor = program.get(t);
    if tensor.dtype.is_float() {
        let mut v = vec![f32::NAN; tensor.len()];
        executor.read(t, HostMut::F32(&mut v))?;
        Ok(Value::Float(v.into_iter().map(f64::from).collect()))
    } else {
        let mut v = vec![i32::MIN; tensor.len()];
        executor.read(t, HostMut::I32(&mut v))?;
        Ok(Value::Int(v))
    }
}

/// Largest relative rounding error of a stored type.
fn eps_of(dtype: DType) -> f64 {
    if dtype == DType::BF16 { EPS_BF16 } else { EPS_F32 }
}

fn poison(dtype: DType, len: usize) -> Value {
    if dtype.is_float() { Value::Float(vec![f64::NAN; len]) } else { Value::Int(vec![i32::MIN; len]) }
}

impl Case {
    /// Tensors that the phases write or update and that outlive them, in declaration order.
    pub fn outputs(&self) -> Vec<TensorId> {
        let mut out: Vec<TensorId> = Vec::new();
        for &phase in &self.phases {
            for node in &self.program.phase(phase).nodes {
                node.op.for_each(|access, t| {
                    let lives = !matches!(self.program.get(t).role, Role::Phase | Role::Slot);
                    if matches!(access, Access::Write | Access::Update) && lives {
                        out.push(t);
                    }
                });
            }
        }
        out.sort_unstable();
        out.dedup();
        out
    }

    /// Content of the frozen tensors.
    pub fn frozen(&self) -> HashMap<TensorId, FrozenData> {
        let of = |t: TensorId| FrozenData::F32(self.values[&t].floats().iter().map(|&x| x as f32).collect());
        self.program.of_role(Role::Frozen).into_iter().map(|t| (t, of(t))).collect()
    }

    /// What the oracle makes of the case's inputs.
    pub fn expected(&self) -> Expected {
        let mut expected = self.expected_of(self.values.clone(), None);
        if self.program.act == DType::BF16 && self.rules.values().any(|r| matches!(r, Rule::Near { .. })) {
            expected.spread = self.spread(&expected.values);
        }
        expected
    }

    fn spread(&self, plain: &Values) -> HashMap<TensorId, Vec<f64>> {
        let mut squares: HashMap<TensorId, Vec<f64>> = HashMap::new();
        for seed in 0..JITTERED {
            let moved = self.expected_of(self.values.clone(), Some(Rng::new(seed))).values;
            for (t, value) in plain {
                let (Value::Float(value), Some(&Rule::Near { root, .. })) = (value, self.rules.get(t)) else { continue };
                let of = |x: f64| if root { x.sqrt() } else { x };
                let sums = squares.entry(*t).or_insert_with(|| vec![0.0; value.len()]);
                sums.iter_mut().zip(value).zip(moved[t].floats()).for_each(|((s, a), b)| *s += (of(*a) - of(*b)).powi(2));
            }
        }
        squares.values_mut().flatten().for_each(|s| *s = (*s / JITTERED as f64).sqrt());
        squares
    }

    fn expected_of(&self, mut values: Values, mut jitter: Option<Rng>) -> Expected {
        for (id, tensor) in self.program.tensors().filter(|(_, t)| t.role != Role::Phase) {
            values.entry(id).or_insert_with(|| poison(tensor.dtype, tensor.len()));
        }
        let mut expected = Expected { values: Values::new(), masses: Masses::new(), spread: HashMap::new() };
        for &phase in &self.phases {
            for node in &self.program.phase(phase).nodes {
                let masses = run_op(&self.program, &node.op, &mut values, Rounding::Declared);
                expected.masses.extend(masses);
                node.op.for_each(|access, t| {
                    if matches!(access, Access::Write | Access::Update) {
                        let value = values.get_mut(&t).expect("the op wrote it");
                        expected.values.insert(t, value.clone());
                        if let Value::Float(v) = value {
                            let dtype = self.program.get(t).dtype;
                            if let Some(rng) = &mut jitter {
                                // Copies, flags and counts have no mass: nothing was computed that could be rounded.
                                let mass = &expected.masses[&t].abs;
                                v.iter_mut()
                                    .zip(mass)
                                    .filter(|(_, mass)| **mass > 0.0)
                                    .for_each(|(x, _)| *x *= 1.0 + eps_of(dtype) * (2.0 * rng.uniform() - 1.0));
                            }
                            v.iter_mut().for_each(|x| *x = round_to(dtype, *x));
                        }
                    }
                });
            }
        }
        expected
    }

    /// Compares every output with what is expected.
    ///
    /// # Errors
    /// The first output that is wrong.
    pub fn check(&self, expected: &Expected, outputs: &Outputs) -> Result<(), CaseError> {
        for t in self.outputs() {
            self.check_output(expected, t, &outputs[&t])
                .map_err(|source| CaseError::Output { case: self.name.clone(), source })?;
        }
        Ok(())
    }

    fn check_output(&self, expected: &Expected, t: TensorId, got: &Value) -> Result<(), Mismatch> {
        let tensor = self.program.get(t);
        let model = |mass| Bound::Sum { slack: SLACK, eps: eps_of(tensor.dtype), inner_eps: eps_of(self.program.act), mass };
        let (got, want) = match (got, &expected.values[&t]) {
            (Value::Int(got), Value::Int(want)) => return compare(&tensor.name, &tensor.shape, got, want, Bound::Exact),
            (got, want) => (got.wide(), want.wide()),
        };
        let mass = &expected.masses[&t];
        match self.rules.get(&t).unwrap_or(&Rule::Model) {
            Rule::Model => compare(&tensor.name, &tensor.shape, &got, &want, model(mass)),
            Rule::Exact => {
                let want: Vec<f64> = want.iter().map(|&w| round_to(tensor.dtype, w)).collect();
                compare(&tensor.name, &tensor.shape, &got, &want, Bound::Exact)
            }
            Rule::Only(at) => {
                let pick = |v: &[f64]| -> Vec<f64> { at.iter().map(|&i| v[i]).collect() };
                let mass = SumMass { terms: mass.terms, abs: pick(&mass.abs), rounded: Vec::new() };
                compare(&tensor.name, &[at.len()], &pick(&got), &pick(&want), model(&mass))
            }
            &Rule::Near { abs, rel, rms, root } => {
                let of = |v: Vec<f64>| if root { v.into_iter().map(f64::sqrt).collect() } else { v };
                let (got, want) = (of(got), of(want));
                let floor = abs + rms * (want.iter().map(|w| w * w).sum::<f64>() / want.len().max(1) as f64).sqrt();
                let spread = |i: usize| expected.spread.get(&t).map_or(0.0, |s| s[i]);
                let bounds: Vec<f64> =
                    want.iter().enumerate().map(|(i, w)| floor + rel * w.abs() + SPREADS * spread(i)).collect();
                compare(&tensor.name, &tensor.shape, &got, &want, Bound::PerElement(&bounds))
            }
        }
    }
}

/// Plants a fault in output `t` (in all outputs for [`Corruption::DropLastTerm`]); false where the fault would change nothing. Of elements that rounding
/// spreads, the one that is largest in units of its spread is hit.
pub fn corrupt(case: &Case, expected: &Expected, outputs: &mut Outputs, t: TensorId, how: Corruption) -> bool {
    if how == Corruption::DropLastTerm {
        return drop_last_term(case, outputs);
    }
    let tensor = case.program.get(t);
    let value = outputs.get_mut(&t).expect("an output of the case");
    let wide = value.wide();
    let looked_at: Vec<usize> = match case.rules.get(&t) {
        Some(Rule::Only(at)) => at.clone(),
        _ => (0..wide.len()).collect(),
    };
    let size = |i: usize| wide[i].abs() / expected.spread.get(&t).map_or(1.0, |s| s[i] + f64::MIN_POSITIVE);
    let Some(&largest) = looked_at.iter().max_by(|&&a, &&b| size(a).total_cmp(&size(b))) else { return false };
    let tile: Vec<usize> = match how {
        Corruption::ZeroTile if !matches!(case.rules.get(&t), Some(Rule::Only(_))) => {
            let cols = tensor.shape[1..].iter().product::<usize>().max(1);
            let (row, col) = (largest / cols / 4 * 4, largest % cols / 4 * 4);
            let rows = row..(row + 4).min(tensor.rows());
            rows.flat_map(|r| (col..(col + 4).min(cols)).map(move |c| r * cols + c)).collect()
        }
        _ => vec![largest],
    };
    if how != Corruption::Unwritten && wide[largest] == 0.0 {
        return false;
    }
    match value {
        Value::Float(v) => tile.iter().for_each(|&i| v[i] = [f64::NAN, 0.0, -v[i]][how as usize]),
        Value::Int(v) => tile.iter().for_each(|&i| v[i] = [i32::MIN, 0, -v[i]][how as usize]),
    }
    true
}

fn drop_last_term(case: &Case, outputs: &mut Outputs) -> bool {
    let Some(last) = case.last_term else { return false };
    let (LastTerm::Column(t) | LastTerm::Row(t)) = last;
    let (rows, cols) = (case.program.get(t).rows(), case.program.get(t).cols());
    let mut values = case.values.clone();
    let Some(Value::Float(v)) = values.get_mut(&t) else { return false };
    for r in 0..rows {
        for c in 0..cols {
            let last = match last {
                LastTerm::Column(_) => c + 1 == cols,
                LastTerm::Row(_) => r + 1 == rows,
            };
            if last {
                v[r * cols + c] = 0.0;
            }
        }
    }
    let without = case.expected_of(values, None);
    for (t, out) in outputs {
        *out = without.values[t].clone();
    }
    true
}
