//! Batches of ever other shapes: memory that grows, buffers that hold another batch's rows.
//!
//! What happened: every new shape allocated, compiled or captured anew, for hours. Here shapes are fixed and only counts vary: whatever batches
//! come, full, nearly empty or an epoch's last, nothing held grows, and what a batch yields does not depend on the batches before it.

use drafthorse_cpu::CpuExecutor;
use drafthorse_data::batch::Batch;
use drafthorse_graph::Executor;
use drafthorse_train::capture::{capture, capture_program};
use drafthorse_train::drafter::{Drafter, drafter_program};
use drafthorse_train::frozen::{Backend, CpuBackend, FrozenSource};
use drafthorse_train::setup::{Setup, adam_config};
use std::collections::BTreeSet;
use std::sync::Arc;

#[test]
fn no_batch_makes_anything_grow_or_depends_on_the_one_before() {
    let dataset = drafthorse_seed::dataset();
    let setup = Setup::open(drafthorse_seed::config(&dataset, &["batch.max_rows=7"]), &|_, _| {}).unwrap();
    let backend = CpuBackend::new(Some(2)).unwrap();
    let (target, variant) = (&setup.target.config, &setup.variants[0]);
    let budget = setup.config.batch.token_budget as usize;
    let pass = capture_program(backend.act(), target, budget, setup.config.batch.max_rows, &setup.captured);
    let source = FrozenSource { target: &setup.target, draft: None };
    let mut target_exec = backend.executor(0, Arc::clone(&pass.program), &source, &mut |_, _| {}).unwrap();
    let program = drafter_program(
        backend.act(),
        target,
        &variant.draft,
        &setup.captured,
        setup.train_shape(),
        adam_config(&variant.config),
    );
    let source = FrozenSource { target: &setup.target, draft: Some(&variant.draft) };
    let exec = backend.executor(0, Arc::clone(&program.program), &source, &mut |_, _| {}).unwrap();
    let mut drafter = Drafter::new(exec, program);
    drafter.initialise(1, 0.02).unwrap();
    let mut slot = drafter.exec().new_slot().unwrap();
    target_exec.prepare().unwrap();
    drafter.exec().prepare().unwrap();

    let (target_bytes, drafter_bytes, slot_len) = (target_exec.held_bytes(), drafter.exec().held_bytes(), slot.len());
    let scratch = CpuExecutor::scratch_bytes(&drafter.program().program, backend.pool().current_num_threads());
    assert_eq!(drafter_bytes, drafter.exec().plan().total_bytes() as u64 + scratch, "the plan's bytes");
    // One step of each batch alone at a learning rate of zero: the gradient norm and the loss, to the bit.
    let mut yields = |batch: Batch| {
        let batch = Arc::new(batch);
        capture(&mut target_exec, &pass.pass, &batch, &mut slot).unwrap();
        drafter.begin_step().unwrap();
        drafter.train_batch(&batch, &slot, &mut || {}).unwrap();
        let tally = drafter.tally().unwrap();
        let report = drafter.optimize(0.0).unwrap();
        assert_eq!(target_exec.held_bytes(), target_bytes);
        assert_eq!((drafter.exec().held_bytes(), slot.len()), (drafter_bytes, slot_len));
        (report.loss.to_bits(), report.grad_norm.to_bits(), report.weight_sum.to_bits(), tally.accuracy())
    };
    let epoch = setup.builder.schedule().epoch_batches(0);
    let mut order: Vec<Batch> = (0..epoch.min(16)).map(|i| setup.builder.build(i).unwrap()).collect();
    let shapes: BTreeSet<(usize, usize, usize)> = order.iter().map(|b| (b.n_tokens, b.n_seqs, b.n_blocks)).collect();
    assert!(shapes.len() >= 8, "the batches differ: {shapes:?}");
    // From the fullest to the emptiest, then back: each batch once behind a fuller one and once behind an emptier one.
    order.sort_by_key(|b| std::cmp::Reverse(b.n_tokens));
    let down: Vec<_> = order.iter().map(|b| yields(b.clone())).collect();
    let up: Vec<_> = order.iter().rev().map(|b| yields(b.clone())).collect();
    for (i, (a, b)) in down.iter().zip(up.iter().rev()).enumerate() {
        assert_eq!(a, b, "batch {i} ({} tokens) depends on the one before it", order[i].n_tokens);
    }
    let distinct: BTreeSet<_> = down.iter().map(|y| (y.0, y.1)).collect();
    assert_eq!(distinct.len(), down.len(), "different batches yield different gradients, so the comparison can fail");
}
