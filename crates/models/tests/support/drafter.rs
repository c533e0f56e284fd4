//! A DFlash drafter in training on the CPU executor, fed from plain arrays.
//!
//! Job: declare program and weights as a training run does, write micro-batches, run the phases of a step, read results.

use crate::machine::Machine;
use drafthorse_cpu::FrozenSet;
use drafthorse_graph::op::Op;
use drafthorse_graph::op::optim::AdamConfig;
use drafthorse_graph::{DType, Executor, HostMut, PhaseId, Program, Role, SlotArg, TensorId};
use drafthorse_models::draft::dflash::{Dflash, Shared, TrainPasses, TrainShape};
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_models::tensor_names::draft_sources;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Optimizer of the golden values, and a published default.
pub const ADAM: AdamConfig = AdamConfig { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, clip: 1.0 };

/// Positions of the RoPE tables.
pub const POSITIONS: usize = 128;

/// Everything that a program is given at the start.
#[derive(Clone)]
pub struct Weights {
    pub draft: BTreeMap<String, Vec<f32>>,
    pub embed: Arc<Vec<f32>>,
    pub head: Arc<Vec<f32>>,
}

/// One batch of blocks over packed samples.
#[derive(Clone)]
pub struct Blocks {
    /// `[rows, n·H]`.
    pub features: Vec<f32>,
    /// `[rows]`.
    pub tokens: Vec<i32>,
    /// `[rows]`.
    pub positions: Vec<i32>,
    /// Of each block.
    pub ctx_start: Vec<i32>,
    /// Of each block.
    pub anchor: Vec<i32>,
    /// `[N·B]`, slot 0 included.
    pub labels: Vec<i32>,
    /// `[N·B]`, slot 0 included.
    pub weights: Vec<f32>,
}

/// Per-row results of a micro phase, by (block, slot) of the whole batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowResults {
    pub at: Vec<(usize, usize)>,
    pub ce: Vec<f32>,
    pub prob: Vec<f32>,
    pub hit: Vec<i32>,
}

pub struct Trainer {
    pub m: Machine,
    pub passes: TrainPasses,
    config: DraftConfig,
    shape: TrainShape,
    slot: Vec<f32>,
    /// `[M·B, H]`: the final hidden rows of the last measured micro-batch, and the phase that copies them out.
    hidden: Option<(PhaseId, TensorId)>,
}

impl Trainer {
    /// A trainer; `watch` lets it read the final hidden rows, which turns them into a step tensor.
    pub fn new(config: &DraftConfig, weights: &Weights, shape: TrainShape, watch: bool) -> Trainer {
        let mut program = Program::new(DType::F32);
        let tables = [config.vocab, config.hidden];
        let embed = program.tensor("target.embed", &tables, DType::F32, Role::Frozen);
        let head = program.tensor("target.head", &tables, DType::F32, Role::Frozen);
        let features = program.tensor("slot", &[shape.budget, config.fc_columns()], DType::F32, Role::Slot);
        let drafter = Dflash::declare(&mut program, config, Shared { embed, head }, POSITIONS);
        let passes = drafter.train_passes(&mut program, features, shape, ADAM);
        let hidden = watch.then(|| {
            let nodes = &program.phase(passes.measure).nodes;
            let rows = nodes.iter().find_map(|n| if let Op::GatherRows(g) = &n.op { Some(g.x) } else { None });
            let rows = rows.expect("measure compacts its rows");
            let extents = program.get(rows).shape.clone();
            let out = program.tensor("watched", &extents, DType::F32, Role::Output);
            let mut b = program.begin("watch");
            b.capture(rows, 0, out, 0, extents[1]);
            (b.id(), out)
        });
        let (cos, sin) = config.rope.tables(POSITIONS);
        let frozen = FrozenSet::from([
            ("target.embed".to_owned(), Arc::clone(&weights.embed)),
            ("target.head".to_owned(), Arc::clone(&weights.head)),
            ("draft.rope.cos".to_owned(), Arc::new(cos)),
            ("draft.rope.sin".to_owned(), Arc::new(sin)),
        ]);
        let mut m = Machine::new(program, &frozen);
        assert_eq!(weights.draft.len(), draft_sources(config).len(), "every tensor is given");
        for (name, t) in &drafter.parameters.weights {
            m.set(*t, &weights.draft[name]);
        }
        let slot = vec![0.0; shape.budget * config.fc_columns()];
        Trainer { m, passes, config: config.clone(), shape, slot, hidden }
    }

    /// Runs the context phase over the batch; rows past it hold zeros.
    pub fn context(&mut self, batch: &Blocks) {
        self.slot.fill(0.0);
        self.slot[..batch.features.len()].copy_from_slice(&batch.features);
        let mut positions = batch.positions.clone();
        positions.resize(self.shape.budget, 0);
        self.m.set_ints(self.passes.positions, &positions);
        self.m.exec.run(self.passes.context, SlotArg::Read(&self.slot)).unwrap();
    }

    /// Writes the micro-batch of `blocks`, compacted to the slots with weight; returns those slots.
    fn write_micro(&mut self, batch: &Blocks, blocks: std::ops::Range<usize>) -> Vec<(usize, usize)> {
        let (m, b) = (self.shape.micro_blocks, self.config.block_size);
        assert!(blocks.len() <= m);
        let mut ids = vec![self.config.mask_token_id as i32; m * b];
        let mut positions: Vec<i32> = (0..m * b).map(|r| (r % b) as i32).collect();
        let (mut ctx_start, mut anchor) = (vec![0; m], vec![0; m]);
        let (mut rows, mut inverse) = (vec![0; m * (b - 1)], vec![-1; m * b]);
        let (mut labels, mut weights) = (vec![0; m * (b - 1)], vec![0.0; m * (b - 1)]);
        let mut at = Vec::new();
        for (i, n) in blocks.clone().enumerate() {
            (ctx_start[i], anchor[i]) = (batch.ctx_start[n], batch.anchor[n]);
            ids[i * b] = batch.tokens[(ctx_start[i] + anchor[i]) as usize];
            for k in 0..b {
                positions[i * b + k] = anchor[i] + k as i32;
                if batch.weights[n * b + k] > 0.0 {
                    let row = at.len();
                    rows[row] = (i * b + k) as i32;
                    inverse[i * b + k] = row as i32;
                    labels[row] = batch.labels[n * b + k];
                    weights[row] = batch.weights[n * b + k];
                    at.push((n, k));
                }
            }
        }
        let i = self.passes.micro_inputs;
        self.m.set_ints(i.ids, &ids);
        self.m.set_ints(i.positions, &positions);
        self.m.set_ints(i.ctx_start, &ctx_start);
        self.m.set_ints(i.anchor, &anchor);
        self.m.set_ints(i.n_blocks, &[blocks.len() as i32]);
        self.m.set_ints(i.rows, &rows);
        self.m.set_ints(i.inverse, &inverse);
        self.m.set_ints(i.labels, &labels);
        self.m.set(i.weights, &weights);
        self.m.set_ints(i.n_rows, &[at.len() as i32]);
        at
    }

    /// Runs `phase` (micro or measure) over all blocks, M at a time, and gathers the row results.
    fn micros(&mut self, batch: &Blocks, phase: PhaseId, mut after: impl FnMut(&mut Self, usize)) -> RowResults {
        let n = batch.anchor.len();
        let mut out = RowResults::default();
        for first in (0..n).step_by(self.shape.micro_blocks) {
            let blocks = first..(first + self.shape.micro_blocks).min(n);
            let count = blocks.len();
            let at = self.write_micro(batch, blocks);
            self.m.run(phase);
            let metrics = self.passes.metrics;
            out.ce.extend_from_slice(&self.m.get(metrics.ce)[..at.len()]);
            out.prob.extend_from_slice(&self.m.get(metrics.prob)[..at.len()]);
            let mut hit = vec![-1; self.m.program.get(metrics.hit).len()];
            self.m.exec.read(metrics.hit, HostMut::I32(&mut hit)).unwrap();
            out.hit.extend_from_slice(&hit[..at.len()]);
            out.at.extend(at);
            after(self, count);
        }
        out
    }

    /// Forward and backward of a whole batch: gradients and loss sums are left in their accumulators.
    pub fn gradients(&mut self, batch: &Blocks) -> RowResults {
        self.m.run(self.passes.optimizer.begin);
        self.context(batch);
        let rows = self.micros(batch, self.passes.micro, |_, _| ());
        self.m.exec.run(self.passes.context_backward, SlotArg::Read(&self.slot)).unwrap();
        rows
    }

    /// Forward only: row results, and the final hidden rows `[N·B, H]` of a watching trainer.
    pub fn measure(&mut self, batch: &Blocks) -> (RowResults, Vec<f32>) {
        self.context(batch);
        let (watched, width) = (self.hidden, self.config.block_size * self.config.hidden);
        let mut hidden = Vec::new();
        let rows = self.micros(batch, self.passes.measure, |this, count| {
            if let Some((phase, t)) = watched {
                this.m.run(phase);
                hidden.extend_from_slice(&this.m.get(t)[..count * width]);
            }
        });
        (rows, hidden)
    }
}
