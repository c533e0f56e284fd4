//! Batches over a real dataset folder: every token once per epoch, exact labels and weights, rebuilt identically.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::{CHATML, load, target_dir};
use drafthorse_data::batch::{Batch, BatchBuilder, BlockShape, default_max_blocks};
use drafthorse_data::buckets::Batching;
use drafthorse_data::dataset::{Dataset, OpenOptions, Row};
use drafthorse_data::prepare::{PrepareOptions, prepare};
use drafthorse_data::rng::{CounterRng, Stream};
use drafthorse_data::schedule::{HeldOut, Schedule, ScheduleConfig};
use drafthorse_data::table::StartTable;

const VOCAB: u32 = 5_000;
const MASK: u32 = 4_999;

/// A dataset of `n` rows with lengths 8..120 and one or two supervised spans; row r's tokens are distinct.
fn dataset(n: u64) -> (tempfile::TempDir, Arc<Dataset>) {
    dataset_of((0..n).map(|r| {
        let mut rng = CounterRng::new(11, Stream::Test, 0, r);
        let len = 8 + rng.below(112) as usize;
        let ids: Vec<u64> = (0..len).map(|_| rng.below(4_990)).collect();
        let gap = 2 + rng.below(3) as usize;
        (ids, (0..len).map(|i| u8::from(i >= gap && i % 37 != 5)).collect())
    }))
}

/// A dataset of rows (token ids, loss mask).
fn dataset_of(rows: impl Iterator<Item = (Vec<u64>, Vec<u8>)>) -> (tempfile::TempDir, Arc<Dataset>) {
    let target = target_dir(CHATML);
    std::fs::write(target.path().join("config.json"), serde_json::json!({"vocab_size": VOCAB}).to_string()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("tokens.jsonl");
    let mut text = String::new();
    for (ids, mask) in rows {
        text.push_str(&serde_json::json!({"input_ids": ids, "loss_mask": mask}).to_string());
        text.push('\n');
    }
    std::fs::write(&input, text).unwrap();
    let options = PrepareOptions::new(vec![input], dir.path().join("data"));
    prepare(&load(target.path()), &options, &|_| {}).unwrap();
    let data = Dataset::open(&options.out, &OpenOptions::default(), &|_, _| {}).unwrap();
    (dir, Arc::new(data))
}

fn shape() -> BlockShape {
    BlockShape { block: 16, micro_blocks: 24, max_blocks: 100, max_anchors: 20, gamma: None, mask_token: MASK, vocab_size: VOCAB }
}

fn config(batching: Batching) -> ScheduleConfig {
    ScheduleConfig { max_rows: 12, batching, n_buckets: 3, ..ScheduleConfig::new(3, 600) }
}

fn builder(data: &Arc<Dataset>, config: ScheduleConfig, shape: BlockShape) -> BatchBuilder {
    let schedule = Schedule::new(data, config).unwrap();
    BatchBuilder::new(data.clone(), Arc::new(schedule), shape).unwrap()
}

/// Recomputes every array of a batch from the rows, with plain loops.
fn check(batch: &Batch, data: &Dataset, shape: &BlockShape) {
    let (b, m_max) = (shape.block, shape.micro_blocks);
    assert_eq!((batch.tokens.len(), batch.positions.len(), batch.cu_seqlens.len()), (600, 600, 13));
    let mut rows = Vec::new();
    for (s, &id) in batch.sample_ids.iter().enumerate() {
        let mut row = Row::default();
        data.read_row(id as usize, &mut row).unwrap();
        let (from, to) = (batch.cu_seqlens[s] as usize, batch.cu_seqlens[s + 1] as usize);
        assert_eq!(batch.tokens[from..to], row.ids);
        assert!(batch.positions[from..to].iter().enumerate().all(|(i, &p)| i as i32 == p));
        rows.push(row);
    }
    assert!(batch.cu_seqlens[batch.n_seqs..].iter().all(|&c| c as usize == batch.n_tokens) && batch.n_tokens <= 600);
    assert!(batch.tokens[batch.n_tokens..].iter().chain(&batch.positions[batch.n_tokens..]).all(|&v| v == 0));
    assert_eq!(batch.n_supervised, rows.iter().flat_map(|r| &r.mask).filter(|&&m| m == 1).count());
    assert_eq!(batch.micros.len(), batch.n_blocks.div_ceil(m_max));
    assert!(batch.n_blocks <= shape.max_blocks);
    let mut before = (-1, -1);
    let (mut sum, mut blocks) = (0.0, 0);
    for (j, micro) in batch.micros.iter().enumerate() {
        assert_eq!([micro.ids.len(), micro.positions.len(), micro.inverse.len()], [m_max * b; 3]);
        assert_eq!([micro.rows.len(), micro.labels.len(), micro.weights.len()], [m_max * (b - 1); 3]);
        assert!(j + 1 == batch.micros.len() || micro.n_blocks == m_max);
        blocks += micro.n_blocks;
        let mut expected_rows = Vec::new();
        for m in 0..m_max {
            let (start, a) = (micro.ctx_start[m], micro.anchor[m]);
            let ids = &micro.ids[m * b..(m + 1) * b];
            assert!(ids[1..].iter().all(|&id| id as u32 == MASK));
            assert!((0..b).all(|k| micro.positions[m * b + k] == a + k as i32));
            if m >= micro.n_blocks {
                assert_eq!((start, a, ids[0] as u32), (0, 0, MASK));
                continue;
            }
            assert!((start, a) > before, "blocks are sorted and distinct");
            before = (start, a);
            let s = batch.cu_seqlens[..batch.n_seqs].iter().position(|&c| c == start).expect("a sample starts here");
            let (row, a) = (&rows[s], a as usize);
            assert!(row.mask[a] == 1 && row.mask[a + 1] == 1, "the anchor is a candidate");
            assert_eq!(ids[0], row.ids[a]);
            for k in 1..b {
                if row.mask.get(a + k) != Some(&1) {
                    continue;
                }
                // Labels and weights are compacted like the rows they belong to.
                let i = expected_rows.len();
                assert!((f64::from(micro.weights[i]) - (-(k as f64 - 1.0) / 7.0).exp()).abs() < 1e-7);
                assert_eq!(micro.labels[i], row.ids[a + k]);
                sum += f64::from(micro.weights[i]);
                expected_rows.push((m * b + k) as i32);
            }
        }
        assert_eq!(micro.rows[..micro.n_rows], expected_rows);
        assert!(micro.labels[micro.n_rows..].iter().all(|&l| l == 0) && micro.weights[micro.n_rows..].iter().all(|&w| w == 0.0));
        for (r, &at) in micro.inverse.iter().enumerate() {
            assert_eq!(at, expected_rows.iter().position(|&e| e as usize == r).map_or(-1, |p| p as i32));
        }
    }
    assert_eq!(blocks, batch.n_blocks);
    assert!((batch.weight_sum - sum).abs() < 1e-9 * sum.max(1.0));
}

#[test]
fn every_batch_is_exact_and_an_epoch_holds_every_row_once() {
    let (_dir, data) = dataset(300);
    for batching in [Batching::Packed, Batching::Padded] {
        let build = builder(&data, config(batching), shape());
        let mut requests = BTreeMap::new();
        for epoch in 0..2 {
            let (first, n) = (build.schedule().total_batches(epoch), build.schedule().epoch_batches(epoch));
            let mut seen = BTreeSet::new();
            for i in first..first + n {
                let batch = build.build(i).unwrap();
                assert_eq!((batch.index, batch.epoch, batch.held_out), (i, epoch, false));
                check(&batch, &data, &shape());
                let asked: u32 = batch.sample_ids.iter().map(|&s| data.index().candidates[s as usize].min(20)).sum();
                assert_eq!(batch.n_blocks as u32, asked.min(100));
                requests.insert(asked > 100, ());
                assert!(batch.sample_ids.iter().all(|&s| seen.insert(s)), "a row twice in an epoch");
            }
            assert_eq!(seen.len(), 300);
            let tokens: u64 = build.schedule().epoch(epoch).iter().map(|g| u64::from(g.tokens)).sum();
            assert_eq!(tokens, data.index().header.tokens);
        }
        assert_eq!(requests.len(), 2, "the test covers scaled and unscaled batches");
    }
}

#[test]
fn a_batch_depends_on_seed_epoch_and_index_alone() {
    let (_dir, data) = dataset(200);
    let one = builder(&data, config(Batching::Packed), shape());
    let n = one.schedule().epoch_batches(0);
    let forward: Vec<Batch> = (0..2 * n).map(|i| one.build(i).unwrap()).collect();
    // Another builder, asked backwards and over the epoch's end first.
    let other = builder(&data, config(Batching::Packed), shape());
    for i in (0..2 * n).rev() {
        assert_eq!(other.build(i).unwrap(), forward[i as usize]);
    }
    let seed = builder(&data, ScheduleConfig { seed: 4, ..config(Batching::Packed) }, shape());
    assert_ne!(seed.build(0).unwrap().sample_ids, forward[0].sample_ids);
    let at = one.schedule().locate(n);
    assert_eq!((at.epoch, at.index), (1, 0));
    let at = one.schedule().locate(n - 1);
    assert_eq!((at.epoch, at.index, at.epoch_batches), (0, n - 1, n));
}

#[test]
fn a_samples_anchors_do_not_depend_on_its_batch() {
    let (_dir, data) = dataset(120);
    let anchors = |config: ScheduleConfig| {
        let build = builder(&data, config, BlockShape { max_blocks: 10_000, ..shape() });
        let mut all: BTreeMap<u32, Vec<i32>> = BTreeMap::new();
        for i in 0..build.schedule().epoch_batches(0) {
            let batch = build.build(i).unwrap();
            for micro in &batch.micros {
                for m in 0..micro.n_blocks {
                    let s = batch.cu_seqlens[..batch.n_seqs].iter().position(|&c| c == micro.ctx_start[m]).unwrap();
                    all.entry(batch.sample_ids[s]).or_default().push(micro.anchor[m]);
                }
            }
        }
        all
    };
    let base = anchors(config(Batching::Packed));
    assert_eq!(base, anchors(ScheduleConfig { max_rows: 3, n_buckets: 1, ..config(Batching::Padded) }));
    assert_ne!(base, anchors(ScheduleConfig { seed: 9, ..config(Batching::Packed) }));
}

#[test]
fn held_out_rows_are_never_trained_and_keep_their_anchors() {
    let (_dir, data) = dataset(200);
    let held = ScheduleConfig { held_out: HeldOut::Share(0.1), ..config(Batching::Packed) };
    let build = builder(&data, held.clone(), shape());
    let rows: BTreeSet<u32> = build.schedule().held_out_rows().iter().copied().collect();
    assert_eq!(rows.len(), 20);
    for i in 0..build.schedule().total_batches(2) {
        assert!(build.build(i).unwrap().sample_ids.iter().all(|s| !rows.contains(s)));
    }
    let n = build.schedule().held_out().len() as u64;
    let first: Vec<Batch> = (0..n).map(|j| build.build_held_out(j).unwrap()).collect();
    assert_eq!(first.iter().flat_map(|b| b.sample_ids.iter().copied()).collect::<BTreeSet<_>>(), rows);
    first.iter().for_each(|b| check(b, &data, &shape()));
    let again = builder(&data, held, shape());
    again.build(3).unwrap();
    assert!((0..n).all(|j| again.build_held_out(j).unwrap() == first[j as usize] && first[j as usize].held_out));
    assert!(build.build_held_out(n).is_err());
}

#[test]
fn long_samples_are_refused_by_row_or_cut_on_request() {
    let (_dir, data) = dataset(100);
    let small = ScheduleConfig { budget: 60, ..config(Batching::Packed) };
    let error = Schedule::new(&data, small.clone()).unwrap_err().to_string();
    let row = data.index().lengths.iter().position(|&l| l > 60).unwrap();
    assert!(error.contains(&format!("row {row} has")) && error.contains("the budget is 60"), "{error}");
    let build = builder(&data, ScheduleConfig { cut_long: true, ..small }, shape());
    let n = build.schedule().epoch_batches(0);
    let longest = (0..n).map(|i| build.build(i).unwrap().n_tokens).max().unwrap();
    assert!(longest <= 60 && build.schedule().rows_cut() > 0);
}

#[test]
fn settings_that_cannot_work_are_named() {
    let (_dir, data) = dataset(20);
    let fail = |shape: BlockShape| {
        let schedule = Arc::new(Schedule::new(&data, config(Batching::Packed)).unwrap());
        BatchBuilder::new(data.clone(), schedule, shape).unwrap_err().to_string()
    };
    assert!(fail(BlockShape { block: 12, ..shape() }).contains("drafter.gamma"));
    assert!(fail(BlockShape { block: 1, ..shape() }).contains("drafter.block_size"));
    assert!(fail(BlockShape { mask_token: VOCAB, ..shape() }).contains("drafter.mask_token_id"));
    assert!(fail(BlockShape { vocab_size: 100, mask_token: 1, ..shape() }).contains("no embedding row"));
    assert_eq!(default_max_blocks(49_152), 8_192);
}

#[test]
fn the_start_table_counts_what_the_epoch_holds() {
    let (_dir, data) = dataset(300);
    let wide = BlockShape { max_blocks: 100_000, max_anchors: 100_000, ..shape() };
    let held = ScheduleConfig { held_out: HeldOut::Rows(5), max_rows: 80, ..config(Batching::Packed) };
    let build = builder(&data, held, wide);
    let table = StartTable::compute(&build, u64::MAX).unwrap();
    assert_eq!((table.samples, table.held_out, table.batches, table.sampled), (295, 5, table.batches, table.batches));
    assert_eq!(table.buckets.iter().map(|b| b.batches).sum::<u64>(), table.batches);
    assert!(table.fill > 0.9 && table.fill <= 1.0);
    // With every candidate an anchor, only the first supervised token after each gap is no label (it may be one of an
    // earlier block), so coverage is nearly complete; with one anchor per sample it is not.
    assert!(table.coverage > 0.95 && table.coverage < 1.0, "{}", table.coverage);
    let one =
        StartTable::compute(&builder(&data, config(Batching::Packed), BlockShape { max_anchors: 1, ..shape() }), 4).unwrap();
    assert!(one.coverage < 0.5 && one.sampled == 4);
    let text = one.to_string();
    assert!(text.contains("estimated from 4 of") && text.contains("samples    300"), "{text}");
    assert!(table.to_string().contains("(exact)"));
}

/// `rows[i]` is (length, first supervised token) of row i; everything behind it is supervised.
fn answers(rows: &[(u64, u64)]) -> (tempfile::TempDir, Arc<Dataset>) {
    dataset_of(rows.iter().map(|&(len, first)| ((0..len).collect(), (0..len).map(|i| u8::from(i >= first)).collect())))
}

#[test]
fn rows_that_are_cut_before_their_answer_are_left_out_and_counted() {
    // Cut to 64 tokens: the answer lies behind, has one token left, has two left; and a row that is not cut.
    let (_dir, data) = answers(&[(90, 70), (90, 63), (90, 62), (30, 4)].repeat(10));
    let by_length = ScheduleConfig { max_len: Some(64), ..config(Batching::Packed) };
    let by_budget = ScheduleConfig { budget: 64, cut_long: true, ..config(Batching::Packed) };
    for cut in [by_length, by_budget] {
        // One row per batch, so that a row without a block would be a batch without a weight.
        let cut = ScheduleConfig { max_rows: 1, held_out: HeldOut::Rows(4), ..cut };
        let build = builder(&data, cut.clone(), shape());
        let schedule = build.schedule();
        assert_eq!((schedule.rows_without_anchor(), schedule.rows_cut()), (20, 30));
        let (train, held) = (schedule.train_rows(), schedule.held_out_rows());
        let usable: BTreeSet<u32> = train.iter().chain(held).copied().collect();
        assert_eq!(usable, (0..40).filter(|r| r % 4 >= 2).collect());
        assert_eq!((schedule.epoch_batches(0), schedule.held_out().len()), (16, 4));
        let batches = (0..16).map(|i| build.build(i)).chain((0..4).map(|j| build.build_held_out(j)));
        for batch in batches.map(Result::unwrap) {
            assert!(batch.weight_sum > 0.0 && batch.n_blocks > 0, "rows {:?} have no block", batch.sample_ids);
        }
        // Rows that are left out do not count for what can be held out.
        let error = Schedule::new(&data, ScheduleConfig { held_out: HeldOut::Rows(20), ..cut }).unwrap_err().to_string();
        assert!(error.contains("has 20 with an anchor (of 40 in all)"), "{error}");
    }
    let error = Schedule::new(&data, ScheduleConfig { max_len: Some(4), ..config(Batching::Packed) }).unwrap_err().to_string();
    assert!(error.contains("none of 40 rows") && error.contains("cut to 4 tokens)\ncut less"), "{error}");
}

#[test]
fn held_out_rows_that_leave_none_to_train_on_are_refused() {
    let refuse = |data: &Dataset, held_out| {
        Schedule::new(data, ScheduleConfig { held_out, ..config(Batching::Packed) }).unwrap_err().to_string()
    };
    let (_dir, data) = dataset(200);
    for n in [200, 201, usize::MAX] {
        let error = refuse(&data, HeldOut::Rows(n));
        assert!(error.starts_with(&format!("eval.held_out: {n} rows are to be held out, but the dataset has 200 ")), "{error}");
        assert!(error.contains("\nhold out fewer rows"), "{error}");
    }
    assert!(refuse(&data, HeldOut::Share(0.999)).contains("200 rows are to be held out"));
    assert!(refuse(&data, HeldOut::Share(1.0)).contains("not a share below 1"));
    assert!(refuse(&data, HeldOut::Share(f64::NAN)).contains("not a share below 1"));
    // Nothing can be held out of one row; without held-out rows it can be overfitted to.
    let (_dir, data) = answers(&[(30, 4)]);
    for held_out in [HeldOut::Rows(1), HeldOut::Rows(64), HeldOut::Share(0.01)] {
        let error = refuse(&data, held_out);
        assert!(error.contains("one row with an anchor") && error.contains("\nprepare more chats"), "{error}");
    }
    assert_eq!(builder(&data, config(Batching::Packed), shape()).schedule().epoch_batches(0), 1);
}

#[test]
fn no_epoch_is_packed_again_while_a_run_goes_forward() {
    let (_dir, data) = dataset(200);
    let schedule = Schedule::new(&data, ScheduleConfig { held_out: HeldOut::Rows(9), ..config(Batching::Packed) }).unwrap();
    // What opening a run does: it counts the batches of all epochs, then looks at the held-out ones.
    schedule.total_batches(6);
    let held_out = schedule.held_out();
    let mut here = schedule.epoch(0);
    for e in 0..6 {
        // Threads around the end of an epoch ask for both in turn, and the evaluator for the held-out batches.
        let next = schedule.epoch(e + 1);
        for _ in 0..2 {
            assert!(Arc::ptr_eq(&here, &schedule.epoch(e)), "epoch {e} was packed again");
            assert!(Arc::ptr_eq(&next, &schedule.epoch(e + 1)), "epoch {} was packed again", e + 1);
            assert!(Arc::ptr_eq(&held_out, &schedule.held_out()), "the held-out batches were packed again");
        }
        here = next;
    }
    // Threads that ask at the same moment share one list.
    for e in 7..27 {
        let start = std::sync::Barrier::new(4);
        let ask = || {
            start.wait();
            schedule.epoch(e)
        };
        let lists = std::thread::scope(|s| [(); 4].map(|()| s.spawn(ask)).map(|t| t.join().unwrap()));
        assert!(lists.iter().all(|l| Arc::ptr_eq(l, &lists[0])), "epoch {e} was packed by several threads");
    }
}
