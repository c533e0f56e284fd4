//! The DFlash drafter against a float64 PyTorch model: every case of `golden/data/dflash`, trained by the CPU executor as a run trains it.
//!
//! Job: final hidden rows, loss sums, row metrics, every gradient and ten AdamW steps within per-element bounds; micro-batches, padding and
//! recomputation change what they may change and nothing else; decoding drafts what training computes. Refuses bounds without a
//! twin that fails.

#[path = "support/drafter.rs"]
mod drafter;
#[path = "support/machine.rs"]
mod machine;

use drafter::{ADAM, Blocks, POSITIONS, Trainer, Weights};
use drafthorse_cpu::FrozenSet;
use drafthorse_graph::op::optim::Stat;
use drafthorse_graph::{DType, Executor, HostMut, Program, Role};
use drafthorse_models::draft::dflash::{Dflash, Shared, TrainShape};
use drafthorse_models::draft_config::{DraftConfig, LayerKind};
use drafthorse_models::rope::RopeSpec;
use drafthorse_testkit::compare::{Bound, Mismatch, compare};
use drafthorse_testkit::golden::Golden;
use machine::Machine;
use std::collections::BTreeMap;
use std::sync::Arc;

const CASES: [&str; 3] = ["full_b8", "sliding_b8", "full_b16"];

struct Case {
    name: &'static str,
    golden: Golden,
    config: DraftConfig,
    weights: Weights,
    batch: Blocks,
}

fn floats(golden: &Golden, name: &str) -> Vec<f32> {
    golden.tensor(name).unwrap().data.iter().map(|&x| x as f32).collect()
}

fn case(name: &'static str) -> Case {
    let golden = Golden::load(&format!("dflash/{name}")).unwrap();
    let size = |key: &str| golden.number(&format!("/config/{key}")).unwrap() as usize;
    let layer_types: Vec<LayerKind> = serde_json::from_value(golden.scalar("/config/layer_types").unwrap().clone()).unwrap();
    let config = DraftConfig {
        hidden: size("hidden"),
        intermediate: size("inter"),
        layers: layer_types.len(),
        heads: size("heads"),
        kv_heads: size("kv_heads"),
        head_dim: size("head_dim"),
        target_hidden: size("target_hidden"),
        target_layers: 5,
        target_layer_ids: (0..size("captured")).collect(),
        block_size: size("block"),
        mask_token_id: size("mask_token") as u32,
        rms_eps: golden.number("/config/rms_eps").unwrap(),
        rope: RopeSpec::full(golden.number("/config/rope_theta").unwrap(), size("head_dim")),
        layer_types,
        sliding_window: golden.number("/config/window").ok().map(|w| w as usize),
        max_positions: POSITIONS,
        vocab: size("vocab"),
    };
    config.validate().unwrap();
    let draft: BTreeMap<String, Vec<f32>> = golden
        .names()
        .iter()
        .filter_map(|n| n.strip_prefix("w0."))
        .map(|n| (n.to_owned(), floats(&golden, &format!("w0.{n}"))))
        .collect();
    let weights = Weights { draft, embed: Arc::new(floats(&golden, "embed")), head: Arc::new(floats(&golden, "head")) };
    let ints = |name: &str| golden.tensor(name).unwrap().ints();
    let batch = Blocks {
        features: floats(&golden, "features"),
        tokens: ints("token_ids"),
        positions: ints("positions"),
        ctx_start: ints("ctx_start"),
        anchor: ints("anchor"),
        labels: ints("labels"),
        weights: floats(&golden, "weights"),
    };
    Case { name, golden, config, weights, batch }
}

impl Case {
    fn blocks(&self) -> usize {
        self.batch.anchor.len()
    }

    /// Exactly as large as the batch.
    fn shape(&self) -> TrainShape {
        let (budget, micro_blocks) = (self.batch.tokens.len(), self.blocks());
        TrainShape { budget, micro_blocks, loss_chunk: 1024, recompute: false, mean_context: 12 }
    }

    fn trainer(&self, shape: TrainShape) -> Trainer {
        Trainer::new(&self.config, &self.weights, shape, false)
    }

    fn scalar(&self, pointer: &str) -> f64 {
        self.golden.number(pointer).unwrap()
    }
}

/// `rel·|want| + of_rms·rms(want)`: fp32 noise of a sum is of the size of its terms, which the tensor's rms stands for.
fn bounds(want: &[f64], rel: f64, of_rms: f64) -> Vec<f64> {
    let rms = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    want.iter().map(|x| rel * x.abs() + of_rms * rms).collect()
}

fn near(name: &str, shape: &[usize], got: &[f32], want: &[f64], rel: f64, of_rms: f64) -> Result<(), Mismatch> {
    compare(name, shape, got, want, Bound::PerElement(&bounds(want, rel, of_rms)))
}

/// Checks, and checks that one element a thousandth of the rms away would have been seen.
#[track_caller]
fn agrees(name: &str, shape: &[usize], got: &[f32], want: &[f64], rel: f64, of_rms: f64) {
    near(name, shape, got, want, rel, of_rms).unwrap_or_else(|e| panic!("{e}"));
    let rms = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    let smallest = (0..want.len()).min_by(|&a, &b| want[a].abs().total_cmp(&want[b].abs())).unwrap();
    let mut wrong = got.to_vec();
    wrong[smallest] += 1e-3 * rms as f32;
    assert!(near(name, shape, &wrong, want, rel, of_rms).is_err(), "{name}: a fault of a thousandth goes unseen");
}

/// Relative part and part of the rms, for values after a few layers and for gradients, which pass through all of them twice.
const FORWARD: (f64, f64) = (2e-6, 4e-6);
const GRADIENT: (f64, f64) = (1e-5, 1e-5);

#[test]
fn final_hidden_rows_and_row_metrics() {
    for name in CASES {
        let c = case(name);
        let mut t = Trainer::new(&c.config, &c.weights, c.shape(), true);
        let (rows, hidden) = t.measure(&c.batch);
        let want = c.golden.tensor("hidden").unwrap();
        agrees(&format!("{name} hidden"), &want.shape, &hidden, &want.data, FORWARD.0, FORWARD.1);
        check_rows(&c, &rows);
    }
}

fn check_rows(c: &Case, rows: &drafter::RowResults) {
    let logits = c.golden.tensor("logits").unwrap();
    let (b, v) = (c.config.block_size, c.config.vocab);
    let supervised: Vec<(usize, usize)> =
        (0..c.blocks() * b).filter(|&r| c.batch.weights[r] > 0.0).map(|r| (r / b, r % b)).collect();
    assert_eq!(rows.at, supervised);
    let (mut ce, mut prob, mut hit) = (Vec::new(), Vec::new(), Vec::new());
    for &(n, k) in &rows.at {
        let z = &logits.data[(n * b + k) * v..(n * b + k + 1) * v];
        let label = c.batch.labels[n * b + k] as usize;
        let top = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = top + z.iter().map(|x| (x - top).exp()).sum::<f64>().ln();
        ce.push(lse - z[label]);
        prob.push((z[label] - lse).exp());
        hit.push(i32::from(z.iter().position(|&x| x == top) == Some(label)));
    }
    agrees(&format!("{} ce", c.name), &[ce.len()], &rows.ce, &ce, FORWARD.0, FORWARD.1);
    agrees(&format!("{} prob", c.name), &[prob.len()], &rows.prob, &prob, FORWARD.0, 2.0 * FORWARD.1);
    assert_eq!(rows.hit, hit, "{}", c.name);
    let weight = |&(n, k): &(usize, usize)| f64::from(c.batch.weights[n * b + k]);
    let sums = rows.at.iter().zip(&rows.ce).map(|(at, &ce)| weight(at) * f64::from(ce)).sum::<f64>();
    assert!((sums / c.scalar("/initial/loss_sum") - 1.0).abs() < 1e-6, "{}: {sums}", c.name);
}

/// Loss sums and all gradients of Σ w·ce, by name.
fn gradients(t: &mut Trainer, batch: &Blocks) -> (Vec<f32>, BTreeMap<String, Vec<f32>>) {
    t.gradients(batch);
    let optimizer = &t.passes.optimizer;
    let sums = t.m.get(optimizer.scalars.sums);
    let name = |w| t.m.program.get(w).name["draft.".len()..].to_owned();
    let named: Vec<_> = optimizer.params.iter().map(|p| (name(p.w), p.grad)).collect();
    let grads = named.into_iter().map(|(name, g)| (name, t.m.get(g))).collect();
    (sums, grads)
}

fn check_gradients(c: &Case, what: &str, sums: &[f32], grads: &BTreeMap<String, Vec<f32>>) {
    let weight_sum = c.scalar("/initial/weight_sum");
    for (got, want) in [(sums[0], c.scalar("/initial/loss_sum")), (sums[1], weight_sum)] {
        assert!((f64::from(got) / want - 1.0).abs() < 1e-6, "{} {what}: sum {got}, wanted {want}", c.name);
    }
    assert_eq!(grads.len(), c.weights.draft.len());
    for (name, got) in grads {
        let want = c.golden.tensor(&format!("grad.{name}")).unwrap();
        // The golden loss is the mean, the accumulators hold the gradient of the sum.
        let want_sum: Vec<f64> = want.data.iter().map(|g| g * weight_sum).collect();
        agrees(&format!("{} {what}: grad.{name}", c.name), &want.shape, got, &want_sum, GRADIENT.0, GRADIENT.1);
    }
}

#[test]
fn gradients_in_one_micro_batch_in_several_and_padded() {
    for name in CASES {
        let c = case(name);
        let whole = c.shape();
        let shapes = [
            ("one micro-batch", whole),
            ("micro-batches of 5", TrainShape { micro_blocks: 5, ..whole }),
            ("one block at a time", TrainShape { micro_blocks: 1, ..whole }),
            ("loss in chunks of 7", TrainShape { loss_chunk: 7, ..whole }),
            ("more room than blocks and tokens", TrainShape { micro_blocks: whole.micro_blocks + 3, budget: 300, ..whole }),
        ];
        for (what, shape) in shapes {
            let (sums, grads) = gradients(&mut c.trainer(shape), &c.batch);
            check_gradients(&c, what, &sums, &grads);
        }
    }
}

#[test]
fn recomputation_changes_no_bit() {
    for name in CASES {
        let c = case(name);
        for micro_blocks in [c.blocks(), 5] {
            let shape = TrainShape { micro_blocks, ..c.shape() };
            let (mut kept, mut again) = (c.trainer(shape), c.trainer(TrainShape { recompute: true, ..shape }));
            let recomputed = |t: &Trainer| t.m.exec.plan().phases.iter().map(|p| p.recomputed_flops).sum::<u64>();
            assert_eq!(recomputed(&kept), 0);
            assert!(c.config.layers == 1 || recomputed(&again) > 0, "{name}: nothing is recomputed");
            assert_eq!(gradients(&mut kept, &c.batch), gradients(&mut again, &c.batch), "{name}, M = {micro_blocks}");
        }
    }
}

#[test]
fn a_second_step_starts_from_zero() {
    for name in CASES {
        let c = case(name);
        let mut t = c.trainer(TrainShape { micro_blocks: 5, ..c.shape() });
        let first = gradients(&mut t, &c.batch);
        assert_eq!(first, gradients(&mut t, &c.batch), "{name}");
    }
}

#[test]
fn padding_changes_no_bit_of_the_forward_pass() {
    for name in CASES {
        let c = case(name);
        let shape = c.shape();
        let tight = Trainer::new(&c.config, &c.weights, shape, true).measure(&c.batch);
        let roomy = TrainShape { micro_blocks: shape.micro_blocks + 4, budget: 200, ..shape };
        let (rows, hidden) = Trainer::new(&c.config, &c.weights, roomy, true).measure(&c.batch);
        assert_eq!((rows, hidden), tight, "{name}");
    }
}

#[test]
fn ten_steps_of_adamw() {
    for name in CASES {
        let c = case(name);
        let mut t = c.trainer(TrainShape { micro_blocks: 5, ..c.shape() });
        let steps = c.golden.scalar("/steps").unwrap().as_array().unwrap().len();
        assert_eq!(steps, 10);
        let mut travelled = 0.0;
        for step in 0..steps {
            let at = |key: &str| c.scalar(&format!("/steps/{step}/{key}"));
            t.gradients(&c.batch);
            t.m.set(t.passes.optimizer.scalars.lr, &[at("lr") as f32]);
            t.m.run(t.passes.optimizer.step);
            travelled += at("lr");
            let stats = t.m.get(t.passes.optimizer.scalars.stats);
            let stat = |s: Stat| f64::from(stats[s as usize]);
            let clip = stat(Stat::Scale) * stat(Stat::WeightSum);
            for (what, got, want) in [
                ("loss", stat(Stat::Loss), at("loss")),
                ("norm", stat(Stat::Norm), at("grad_norm")),
                ("clip", clip, at("clip_coefficient")),
            ] {
                assert!((got / want - 1.0).abs() < 2e-6 * (1 + step) as f64, "{name} step {step}: {what} {got}, wanted {want}");
            }
            assert_eq!((stat(Stat::Finite), stat(Stat::AdamT)), (1.0, (step + 1) as f64));
            if step == 0 && name == "full_b8" {
                check_weights(&c, &mut t, "w1", travelled);
            }
        }
        check_weights(&c, &mut t, "w10", travelled);
        let last = t.gradients(&c.batch);
        assert!(last.ce.iter().all(|x| x.is_finite()));
        let sums = t.m.get(t.passes.optimizer.scalars.sums);
        let (loss, want) = (f64::from(sums[0]) / f64::from(sums[1]), c.scalar("/final/loss"));
        assert!((loss / want - 1.0).abs() < 2e-5, "{name}: final loss {loss}, wanted {want}");
    }
}

/// A weight moves by about lr·g/|g| a step, so noise δ in g moves it by lr·δ/|g| of the way travelled: nothing for most entries, all of
/// it (twice, in the other direction) for those whose gradient is noise.
fn check_weights(c: &Case, t: &mut Trainer, stem: &str, travelled: f64) {
    for w in t.passes.optimizer.params.clone().into_iter().map(|p| p.w) {
        let name = t.m.program.get(w).name["draft.".len()..].to_owned();
        let want = c.golden.tensor(&format!("{stem}.{name}")).unwrap();
        let gradient = c.golden.tensor(&format!("grad.{name}")).unwrap();
        let noise = bounds(&gradient.data, GRADIENT.0, GRADIENT.1);
        let limit: Vec<f64> = (0..want.data.len())
            .map(|i| want.data[i].abs() / f64::from(1 << 23) + travelled * (noise[i] / gradient.data[i].abs()).min(2.0) + 1e-8)
            .collect();
        let got = t.m.get(w);
        compare(&format!("{} {stem}.{name}", c.name), &want.shape, &got, &want.data, Bound::PerElement(&limit))
            .unwrap_or_else(|e| panic!("{e}"));
        let start = &c.weights.draft[&name];
        let still: Vec<f32> = start.clone();
        assert!(compare("w", &want.shape, &still, &want.data, Bound::PerElement(&limit)).is_err(), "{name}: no step goes unseen");
    }
}

/// One block of one sample, drafted from caches filled chunk by chunk.
#[test]
fn decoding_drafts_what_training_computes() {
    for name in CASES {
        let c = case(name);
        let (config, b, h) = (&c.config, c.config.block_size, c.config.hidden);
        let mut trainer = Trainer::new(config, &c.weights, c.shape(), true);
        let (_, hidden) = trainer.measure(&c.batch);
        let width = config.fc_columns();
        let (prefill_rows, verify_rows) = (4, b);
        let mut program = Program::new(DType::F32);
        let tables = [config.vocab, h];
        let embed = program.tensor("target.embed", &tables, DType::F32, Role::Frozen);
        let head = program.tensor("target.head", &tables, DType::F32, Role::Frozen);
        let prefill = program.tensor("prefill", &[prefill_rows, width], DType::F32, Role::Step);
        let verify = program.tensor("verify", &[verify_rows, width], DType::F32, Role::Step);
        let drafter = Dflash::declare(&mut program, config, Shared { embed, head }, POSITIONS);
        let passes = drafter.draft_passes(&mut program, 64, prefill, verify);
        let (cos, sin) = config.rope.tables(POSITIONS);
        let frozen = FrozenSet::from([
            ("target.embed".to_owned(), Arc::clone(&c.weights.embed)),
            ("target.head".to_owned(), Arc::clone(&c.weights.head)),
            ("draft.rope.cos".to_owned(), Arc::new(cos)),
            ("draft.rope.sin".to_owned(), Arc::new(sin)),
        ]);
        let mut m = Machine::new(program, &frozen);
        for (name, w) in &drafter.parameters.weights {
            m.set(*w, &c.weights.draft[name]);
        }
        let block = &passes.block;
        m.set_ints(block.ctx_start, &[0]);
        m.set_ints(block.n_blocks, &[1]);
        m.set(block.temperature, &[0.0]);
        m.set(block.uniform, &vec![0.0; b]);
        m.set_ints(block.probe, &vec![-1; b]);
        for n in 0..c.blocks() {
            let (start, anchor) = (c.batch.ctx_start[n] as usize, c.batch.anchor[n] as usize);
            // Odd blocks fill their caches by prefill chunks first and verify passes after, even ones by verify passes alone.
            let mut len = 0;
            while len < anchor {
                let (pass, features, rows) = if n % 2 == 1 && len + prefill_rows <= anchor / 2 {
                    (&passes.prefill, prefill, prefill_rows)
                } else {
                    (&passes.verify, verify, verify_rows)
                };
                let valid = rows.min(anchor - len);
                let mut content = c.batch.features[(start + len) * width..(start + len + valid) * width].to_vec();
                content.resize(rows * width, 1.0);
                let positions: Vec<i32> = (0..rows).map(|r| (len + r) as i32).collect();
                m.set(features, &content);
                m.set_ints(pass.positions, &positions);
                m.set_ints(passes.len, &[len as i32]);
                m.run(pass.phase);
                len += valid;
            }
            let mut ids = vec![config.mask_token_id as i32; b];
            ids[0] = c.batch.tokens[start + anchor];
            let positions: Vec<i32> = (0..b).map(|k| (anchor + k) as i32).collect();
            m.set_ints(block.ids, &ids);
            m.set_ints(block.positions, &positions);
            m.set_ints(passes.len, &[anchor as i32]);
            m.run(block.phase);
            let top2 = m.get(block.picks.top2);
            let mut argmax = vec![-1; b];
            m.exec.read(block.picks.argmax, HostMut::I32(&mut argmax)).unwrap();
            for k in 0..b {
                let row = &hidden[(n * b + k) * h..(n * b + k + 1) * h];
                let z: Vec<f64> = c
                    .weights
                    .head
                    .chunks(h)
                    .map(|head| head.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum())
                    .collect();
                let mut order: Vec<usize> = (0..z.len()).collect();
                order.sort_by(|&a, &b| z[b].total_cmp(&z[a]));
                assert!(z[order[0]] - z[order[1]] > 1e-5, "{name} block {n} slot {k} is a tie and proves nothing");
                assert_eq!(argmax[k], order[0] as i32, "{name} block {n} slot {k}");
                for j in 0..2 {
                    let (got, want) = (f64::from(top2[2 * k + j]), z[order[j]]);
                    assert!((got - want).abs() < 5e-6 * (1.0 + want.abs()), "{name} block {n} slot {k}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn the_optimizer_of_these_tests_is_the_golden_one() {
    for name in CASES {
        let c = case(name);
        let close = |a: f32, key: &str| (f64::from(a) / c.scalar(&format!("/optimizer/{key}")) - 1.0).abs() < 1e-6;
        assert!(close(ADAM.betas[0], "betas/0") && close(ADAM.betas[1], "betas/1") && close(ADAM.eps, "eps"));
        assert!(close(ADAM.clip, "clip") && ADAM.weight_decay == 0.0);
    }
}
