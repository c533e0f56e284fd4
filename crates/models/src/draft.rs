//! Drafter families as programs. A new family is one new file beside [`dflash`].
//!
//! Job: what all families share — the parameters with their optimizer state, and the names that training, decoding and checkpoints use.
//! Refuses to know how a family computes. Invariant: every trainable tensor is named `draft.<internal name>`; its state is
//! `<name>.master` (bf16 programs only), `<name>.m`, `<name>.v`, its accumulator `<name>.grad`.

pub mod dflash;

use crate::tensor_names::FusedTensor;
use drafthorse_graph::backward::accumulators;
use drafthorse_graph::op::optim::{AdamConfig, AdamParam, AdamScalars};
use drafthorse_graph::{DType, PhaseId, Program, Role, TensorId};
use std::collections::HashMap;

/// The trainable tensors of a drafter inside one program.
pub struct Parameters {
    /// (internal name, tensor), in file order.
    pub weights: Vec<(String, TensorId)>,
}

impl Parameters {
    /// Declares every trainable tensor.
    pub fn declare(program: &mut Program, sources: &[FusedTensor]) -> Parameters {
        let act = program.act;
        let weights = sources
            .iter()
            .map(|f| (f.name.clone(), program.tensor(format!("draft.{}", f.name), &f.shape, act, Role::Weight)))
            .collect();
        Parameters { weights }
    }

    /// A tensor by its internal name.
    ///
    /// # Panics
    /// When there is none: model code and tensor list disagree.
    pub fn get(&self, name: &str) -> TensorId {
        self.weights.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("drafter tensor `{name}` was not declared")).1
    }
}

/// Optimizer state and the phases around it.
pub struct Optimizer {
    /// Accumulator of each weight.
    pub grads: HashMap<TensorId, TensorId>,
    /// Parameters in file order, as AdamW sees them.
    pub params: Vec<AdamParam>,
    /// Loss sums, Adam's t, stats and learning rate.
    pub scalars: AdamScalars,
    /// Zeroes the gradient region: once per optimizer step.
    pub begin: PhaseId,
    /// Norm, clip, update.
    pub step: PhaseId,
}

impl Optimizer {
    /// Declares state, accumulators and the two phases. Gradients and loss sums form one region, so one all-reduce covers them.
    pub fn declare(program: &mut Program, parameters: &Parameters, config: AdamConfig) -> Optimizer {
        let weights: Vec<TensorId> = parameters.weights.iter().map(|&(_, t)| t).collect();
        let grads = accumulators(program, &weights, Role::Grad);
        let sums = program.tensor("draft.loss_sums", &[2], DType::F32, Role::Grad);
        let params: Vec<AdamParam> = weights
            .iter()
            .map(|&w| {
                let (name, shape, dtype) = (program.get(w).name.clone(), program.get(w).shape.clone(), program.get(w).dtype);
                let mut state = |part: &str| program.tensor(format!("{name}.{part}"), &shape, DType::F32, Role::State);
                let master = (dtype != DType::F32).then(|| state("master"));
                AdamParam { w, master, m: state("m"), v: state("v"), grad: grads[&w] }
            })
            .collect();
        let scalars = AdamScalars {
            sums,
            adam_t: program.tensor("draft.adam_t", &[1], DType::I32, Role::State),
            stats: program.tensor("draft.stats", &[8], DType::F32, Role::Output),
            lr: program.tensor("draft.lr", &[1], DType::F32, Role::Input),
        };
        let mut b = program.begin("draft.begin");
        b.zero(grads_in_order(&params, sums));
        let begin = b.id();
        let mut b = program.begin("draft.optimizer");
        b.adamw(params.clone(), scalars, config);
        let step = b.id();
        Optimizer { grads, params, scalars, begin, step }
    }
}

fn grads_in_order(params: &[AdamParam], sums: TensorId) -> Vec<TensorId> {
    params.iter().map(|p| p.grad).chain([sums]).collect()
}
