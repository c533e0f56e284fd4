//! The small language in which cases are written: a program, its values, one source of randomness.

use super::{Case, LastTerm, Rule};
use crate::inputs::Rng;
use crate::oracle::{Rounding, Value, Values, round_to, run_op};
use drafthorse_graph::{Access, DType, Op, Program, Role, TensorId};
use std::collections::HashMap;
use std::sync::Arc;

/// A case under construction.
pub(super) struct Build {
    pub(super) program: Program,
    pub(super) values: Values,
    pub(super) rng: Rng,
    name: String,
    rules: HashMap<TensorId, Rule>,
    last_term: Option<LastTerm>,
}

impl Build {
    /// A case of name `name`, which also seeds its inputs.
    pub(super) fn new(name: &str, act: DType) -> Self {
        let seed = name.bytes().fold(17u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        Build {
            program: Program::new(act),
            values: Values::new(),
            rng: Rng::new(seed),
            name: name.to_owned(),
            rules: HashMap::new(),
            last_term: None,
        }
    }

    pub(super) fn act(&self) -> DType {
        self.program.act
    }

    /// A float tensor with content, which is rounded to the dtype.
    pub(super) fn given(&mut self, name: &str, shape: &[usize], dtype: DType, role: Role, content: Vec<f64>) -> TensorId {
        let t = self.program.tensor(name, shape, dtype, role);
        assert_eq!(content.len(), self.program.get(t).len(), "content of `{name}`");
        self.values.insert(t, Value::Float(content.into_iter().map(|x| round_to(dtype, x)).collect()));
        t
    }

    /// A random activation that the host writes.
    pub(super) fn input(&mut self, name: &str, shape: &[usize], std: f64) -> TensorId {
        let content = self.rng.normals(shape.iter().product(), std);
        self.given(name, shape, self.act(), Role::Input, content)
    }

    /// A random tensor of any dtype and role.
    pub(super) fn random(&mut self, name: &str, shape: &[usize], dtype: DType, role: Role, std: f64) -> TensorId {
        let content = self.rng.normals(shape.iter().product(), std);
        self.given(name, shape, dtype, role, content)
    }

    /// A trainable norm weight around 1.
    pub(super) fn norm_weight(&mut self, name: &str, len: usize) -> TensorId {
        let content = self.rng.normals(len, 0.3).into_iter().map(|x| 1.0 + x).collect();
        self.given(name, &[len], self.act(), Role::Weight, content)
    }

    /// An I32 input.
    pub(super) fn ints(&mut self, name: &str, content: Vec<i32>) -> TensorId {
        let t = self.program.tensor(name, &[content.len()], DType::I32, Role::Input);
        self.values.insert(t, Value::Int(content));
        t
    }

    /// An output in the activation dtype.
    pub(super) fn output(&mut self, name: &str, shape: &[usize]) -> TensorId {
        self.program.tensor(name, shape, self.program.act, Role::Output)
    }

    /// An output of another dtype.
    pub(super) fn output_of(&mut self, name: &str, shape: &[usize], dtype: DType) -> TensorId {
        self.program.tensor(name, shape, dtype, Role::Output)
    }

    /// Working memory.
    pub(super) fn scratch(&mut self, name: &str, shape: &[usize], dtype: DType) -> TensorId {
        self.program.tensor(name, shape, dtype, Role::Phase)
    }

    /// Runs `op` by the oracle only, so that its results, as stored, are inputs of the op that is tested.
    pub(super) fn precompute(&mut self, op: impl Into<Op>) {
        let op = op.into();
        run_op(&self.program, &op, &mut self.values, Rounding::Declared);
        op.for_each(|access, t| {
            if let (Access::Write | Access::Update, Some(Value::Float(v))) = (access, self.values.get_mut(&t)) {
                v.iter_mut().for_each(|x| *x = round_to(self.program.get(t).dtype, *x));
            }
        });
    }

    /// A tensor that [`Build::precompute`] fills.
    pub(super) fn precomputed(&mut self, name: &str, shape: &[usize], dtype: DType) -> TensorId {
        self.program.tensor(name, shape, dtype, Role::Input)
    }

    pub(super) fn rule(&mut self, t: TensorId, rule: Rule) {
        self.rules.insert(t, rule);
    }

    pub(super) fn last_term(&mut self, last: LastTerm) {
        self.last_term = Some(last);
    }

    /// The case that runs `ops` in one phase.
    pub(super) fn ops(mut self, ops: Vec<Op>) -> Case {
        let mut phase = self.program.begin("case");
        for op in ops {
            phase.push(op);
        }
        self.finish()
    }

    /// The case that runs one op.
    pub(super) fn op(self, op: impl Into<Op>) -> Case {
        self.ops(vec![op.into()])
    }

    /// The case that runs every phase of the program.
    pub(super) fn finish(self) -> Case {
        let phases = self.program.phases().map(|(id, _)| id).collect();
        Case {
            name: self.name,
            program: Arc::new(self.program),
            phases,
            values: self.values,
            rules: self.rules,
            last_term: self.last_term,
        }
    }
}
