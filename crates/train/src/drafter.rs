//! A drafter on a device: its program, its weights, and the passes of a step as calls.
//!
//! Job: wrap an executor so that training code says "train this batch", not "write tensor 17". Refuses threads, files and schedules.
//! Invariants: gradients accumulate from [`Drafter::begin_step`] to [`Drafter::optimize`]; after `optimize` reports a skipped step no weight has changed.

use crate::metrics::{RowResults, Tally};
use drafthorse_data::batch::{Batch, MicroBatch};
use drafthorse_data::rng::{CounterRng, Stream};
use drafthorse_graph::op::optim::{AdamConfig, Stat};
use drafthorse_graph::{DType, ExecError, Executor, Fetch, HostMut, HostRef, PhaseId, Program, Role, SlotArg, TensorId};
use drafthorse_models::draft::dflash::{Dflash, TrainPasses, TrainShape};
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_models::hf_config::TargetConfig;
use drafthorse_models::target::Target;
use std::sync::Arc;

/// The program of a drafter loop and the ids its calls need.
pub struct DrafterProgram {
    /// The program.
    pub program: Arc<Program>,
    /// Its phases and inputs.
    pub passes: Arc<TrainPasses>,
    /// Copies the drafter's own layers out of a slot that holds more; the passes then read no slot.
    pub select: Option<PhaseId>,
    /// (internal name, weight).
    pub weights: Vec<(String, TensorId)>,
    /// Tokens per block.
    pub block: usize,
}

/// A program that holds only a drafter (and the target's embedding and head). `captured` are the target layers in the slot, ascending.
pub fn drafter_program(
    act: DType,
    target: &TargetConfig,
    config: &DraftConfig,
    captured: &[usize],
    shape: TrainShape,
    adam: AdamConfig,
) -> DrafterProgram {
    let mut program = Program::new(act);
    let shared = Target::declare_tables(&mut program, target);
    let slot = program.tensor("slot", &[shape.budget, captured.len() * target.hidden], act, Role::Slot);
    let drafter = Dflash::declare(&mut program, config, shared, shape.budget + config.block_size);
    let (mut features, mut select) = (slot, None);
    if captured != config.target_layer_ids {
        // A sweep's slot holds the union of all drafters' layers; this drafter copies its own out before its context pass.
        let h = target.hidden;
        features = program.tensor("draft.features", &[shape.budget, config.fc_columns()], act, Role::Step);
        let mut b = program.begin("draft.select_features");
        for (i, id) in config.target_layer_ids.iter().enumerate() {
            let at = captured.iter().position(|c| c == id).expect("the slot holds the union of captured layers");
            b.capture(slot, at * h, features, i * h, h);
        }
        select = Some(b.id());
    }
    let passes = Arc::new(drafter.train_passes(&mut program, features, shape, adam));
    DrafterProgram { program: Arc::new(program), passes, select, weights: drafter.parameters.weights, block: config.block_size }
}

/// The first `len` normals of `rng`, on all cores: a big drafter has a thousand million of them, and every one is its own counter's.
fn normals(rng: &CounterRng, len: usize, std: f32) -> Vec<f32> {
    let mut values = vec![0.0; len];
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let piece = len.div_ceil(workers).max(1 << 16);
    std::thread::scope(|scope| {
        for (n, part) in values.chunks_mut(piece).enumerate() {
            scope.spawn(move || {
                let first = (n * piece) as u64;
                part.iter_mut().zip(first..).for_each(|(x, j)| *x = std * rng.normal_at(j));
            });
        }
    });
    values
}

/// What the optimizer phase reported.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss over all drafters.
    pub loss: f32,
    /// Σ w over all drafters.
    pub weight_sum: f32,
    /// Gradient norm before clipping.
    pub grad_norm: f32,
    /// False when the step was skipped because something was not finite.
    pub taken: bool,
    /// Adam's t afterwards.
    pub adam_t: u64,
}

/// A drafter on a device.
pub struct Drafter<E> {
    exec: E,
    program: DrafterProgram,
    pending: Vec<(Arc<Batch>, usize, Fetch)>,
}

impl<E: Executor> Drafter<E> {
    /// Takes an executor of `program.program`.
    pub fn new(exec: E, program: DrafterProgram) -> Drafter<E> {
        Drafter { exec, program, pending: Vec::new() }
    }

    /// The executor.
    pub fn exec(&mut self) -> &mut E {
        &mut self.exec
    }

    /// Tensor ids and names.
    pub fn program(&self) -> &DrafterProgram {
        &self.program
    }

    /// Fills the linears with N(0, `std`) and the norms with 1, keyed by seed and tensor, the same on every device.
    ///
    /// # Errors
    /// When the device fails.
    pub fn initialise(&mut self, seed: u64, std: f32) -> Result<(), ExecError> {
        for (i, (name, t)) in self.program.weights.clone().into_iter().enumerate() {
            let len = self.program.program.get(t).len();
            let values: Vec<f32> = if name.ends_with("norm") {
                vec![1.0; len]
            } else {
                normals(&CounterRng::new(seed, Stream::Weights, i as u32, 0), len, std)
            };
            self.load_weight(t, &values)?;
        }
        Ok(())
    }

    /// Sets one weight, and its master where there is one.
    ///
    /// # Errors
    /// When the device fails or the length differs.
    pub fn load_weight(&mut self, t: TensorId, values: &[f32]) -> Result<(), ExecError> {
        self.exec.write(t, HostRef::F32(values))?;
        match self.program.passes.optimizer.params.iter().find(|p| p.w == t).and_then(|p| p.master) {
            Some(master) => self.exec.write(master, HostRef::F32(values)),
            None => Ok(()),
        }
    }

    /// Starts an optimizer step: gradients and loss sums become zero.
    ///
    /// # Errors
    /// When the device fails.
    pub fn begin_step(&mut self) -> Result<(), ExecError> {
        let begin = self.program.passes.optimizer.begin;
        self.exec.run(begin, SlotArg::None)
    }

    /// Adds one batch's gradients. Enqueues only: what the rows say is had from [`Drafter::tally`]. `each` is called after every micro-batch,
    /// so that a watchdog sees progress inside a long batch.
    ///
    /// # Errors
    /// When the device fails.
    pub fn train_batch(&mut self, batch: &Arc<Batch>, slot: &E::Slot, each: &mut dyn FnMut()) -> Result<(), ExecError> {
        let passes = Arc::clone(&self.program.passes);
        self.context(batch, slot)?;
        self.micros(batch, passes.micro, each)?;
        self.exec.run(passes.context_backward, self.features(slot))
    }

    /// Measures one held-out batch, forward only. Enqueues only.
    ///
    /// # Errors
    /// When the device fails.
    pub fn measure_batch(&mut self, batch: &Arc<Batch>, slot: &E::Slot, each: &mut dyn FnMut()) -> Result<(), ExecError> {
        let measure = self.program.passes.measure;
        self.context(batch, slot)?;
        self.micros(batch, measure, each)
    }

    /// What the rows of all batches since the last call say; waits for the device.
    ///
    /// # Errors
    /// When the device fails.
    pub fn tally(&mut self) -> Result<Tally, ExecError> {
        let mut tally = Tally::new(self.program.block);
        for (batch, index, fetch) in std::mem::take(&mut self.pending) {
            let (mut ce, mut prob, mut hit) = (Vec::new(), Vec::new(), Vec::new());
            self.exec.collect(fetch, &mut |i, data| match (i, data) {
                (0, HostRef::F32(x)) => ce = x.to_vec(),
                (1, HostRef::F32(x)) => prob = x.to_vec(),
                (2, HostRef::I32(x)) => hit = x.to_vec(),
                _ => unreachable!("row metrics are two float tensors and one of integers"),
            })?;
            tally.add_micro(&batch.micros[index], &RowResults { ce: &ce, prob: &prob, hit: &hit });
        }
        Ok(tally)
    }

    /// Norm, clip and update at learning rate `lr`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn optimize(&mut self, lr: f64) -> Result<StepReport, ExecError> {
        let passes = Arc::clone(&self.program.passes);
        self.exec.write(passes.optimizer.scalars.lr, HostRef::F32(&[lr as f32]))?;
        self.exec.run(passes.optimizer.step, SlotArg::None)?;
        let mut stats = [0.0f32; 8];
        self.exec.read(passes.optimizer.scalars.stats, HostMut::F32(&mut stats))?;
        let stat = |s: Stat| stats[s as usize];
        Ok(StepReport {
            loss: stat(Stat::Loss),
            weight_sum: stat(Stat::WeightSum),
            grad_norm: stat(Stat::Norm),
            taken: stat(Stat::Finite) == 1.0,
            adam_t: stat(Stat::AdamT) as u64,
        })
    }

    /// Reads a tensor as F32.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read(&mut self, t: TensorId) -> Result<Vec<f32>, ExecError> {
        let mut out = vec![0.0; self.program.program.get(t).len()];
        self.exec.read(t, HostMut::F32(&mut out))?;
        Ok(out)
    }

    /// The fp32 weights in file order: masters where there are any.
    ///
    /// # Errors
    /// When the device fails.
    pub fn weights(&mut self) -> Result<Vec<(String, Vec<f32>)>, ExecError> {
        let passes = Arc::clone(&self.program.passes);
        self.program
            .weights
            .clone()
            .into_iter()
            .map(|(name, t)| {
                let source = passes.optimizer.params.iter().find(|p| p.w == t).and_then(|p| p.master).unwrap_or(t);
                Ok((name, self.read(source)?))
            })
            .collect()
    }

    fn context(&mut self, batch: &Batch, slot: &E::Slot) -> Result<(), ExecError> {
        let passes = Arc::clone(&self.program.passes);
        self.exec.write(passes.positions, HostRef::I32(&batch.positions))?;
        if let Some(select) = self.program.select {
            self.exec.run(select, SlotArg::Read(slot))?;
        }
        self.exec.run(passes.context, self.features(slot))
    }

    /// What the passes over context features run with: the slot, unless the features were copied out of it.
    fn features<'s>(&self, slot: &'s E::Slot) -> SlotArg<'s, E::Slot> {
        if self.program.select.is_some() { SlotArg::None } else { SlotArg::Read(slot) }
    }

    fn write_micro(&mut self, micro: &MicroBatch) -> Result<(), ExecError> {
        let i = self.program.passes.micro_inputs;
        let ints: [(TensorId, &[i32]); 9] = [
            (i.ids, &micro.ids),
            (i.positions, &micro.positions),
            (i.ctx_start, &micro.ctx_start),
            (i.anchor, &micro.anchor),
            (i.n_blocks, &[micro.n_blocks as i32]),
            (i.rows, &micro.rows),
            (i.inverse, &micro.inverse),
            (i.labels, &micro.labels),
            (i.n_rows, &[micro.n_rows as i32]),
        ];
        for (t, data) in ints {
            self.exec.write(t, HostRef::I32(data))?;
        }
        self.exec.write(i.weights, HostRef::F32(&micro.weights))
    }

    fn micros(&mut self, batch: &Arc<Batch>, phase: PhaseId, each: &mut dyn FnMut()) -> Result<(), ExecError> {
        let m = self.program.passes.metrics;
        for (i, micro) in batch.micros.iter().enumerate() {
            self.write_micro(micro)?;
            self.exec.run(phase, SlotArg::None)?;
            let fetch = self.exec.fetch(&[m.ce, m.prob, m.hit])?;
            self.pending.push((Arc::clone(batch), i, fetch));
            each();
        }
        Ok(())
    }
}
