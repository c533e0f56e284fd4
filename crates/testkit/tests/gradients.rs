//! Gradients of [`differentiate`] against central differences of the oracle, op by op and for a whole drafter in miniature.

use drafthorse_graph::backward::{Differentiate, differentiate};
use drafthorse_graph::op::Heads;
use drafthorse_graph::op::block_attention::{BlockKv, Blocks};
use drafthorse_graph::op::gather::Compaction;
use drafthorse_graph::op::qk_norm_rope::{HeadNorms, Rotary};
use drafthorse_graph::{DType, PhaseBuilder, Program, Role, TensorId};
use drafthorse_testkit::finite_difference::GradientCheck;
use drafthorse_testkit::inputs::{Rng, compaction_arrays, draft_blocks, packed_samples, rotary_tables};
use drafthorse_testkit::op_suite::{MiniDrafterOptions, mini_drafter};
use drafthorse_testkit::oracle::{Rounding, Value, Values, run_phase};
use std::collections::HashMap;

/// A program around one op, whose loss is Σ upstream·output.
struct Lone {
    program: Program,
    values: Values,
    rng: Rng,
    sinks: HashMap<TensorId, TensorId>,
}

impl Lone {
    fn new() -> Self {
        Lone { program: Program::new(DType::F32), values: Values::new(), rng: Rng::new(23), sinks: HashMap::new() }
    }

    fn given(&mut self, name: &str, shape: &[usize], role: Role, content: Vec<f64>) -> TensorId {
        let t = self.program.tensor(name, shape, DType::F32, role);
        self.values.insert(t, Value::Float(content));
        t
    }

    fn frozen(&mut self, name: &str, shape: &[usize]) -> TensorId {
        let content = self.rng.normals(shape.iter().product(), 1.0);
        self.given(name, shape, Role::Input, content)
    }

    /// A tensor whose gradient is checked, with an accumulator that holds zeros.
    fn leaf(&mut self, name: &str, shape: &[usize], role: Role) -> TensorId {
        let content = self.rng.normals(shape.iter().product(), 1.0);
        let t = self.given(name, shape, role, content);
        let g = self.given(&format!("{name}.grad"), shape, Role::Grad, vec![0.0; shape.iter().product()]);
        self.sinks.insert(t, g);
        t
    }

    /// The weight and input of a linear that makes an activation `shape`; its gradient is checked through the weight's.
    fn activation(&mut self, name: &str, shape: &[usize]) -> (TensorId, TensorId) {
        let w = self.leaf(&format!("{name}.weight"), &[shape[1], shape[1]], Role::Weight);
        let x = self.frozen(&format!("{name}.source"), shape);
        (w, x)
    }

    fn ints(&mut self, name: &str, content: Vec<i32>) -> TensorId {
        let t = self.program.tensor(name, &[content.len()], DType::I32, Role::Input);
        self.values.insert(t, Value::Int(content));
        t
    }

    /// Builds the forward with `build`, which returns the outputs, differentiates it and checks every leaf.
    fn check(mut self, build: impl FnOnce(&mut PhaseBuilder<'_>) -> Vec<TensorId>) {
        let mut phase = self.program.begin("phase");
        let outputs = build(&mut phase);
        let forward = phase.id();
        let mut seeds = Vec::new();
        for (i, &y) in outputs.iter().enumerate() {
            let shape = phase.shape(y);
            let up = phase.program.tensor(format!("upstream.{i}"), &shape, DType::F32, Role::Input);
            self.values.insert(up, Value::Float(self.rng.normals(shape.iter().product(), 1.0)));
            seeds.push((y, up));
        }
        differentiate(&mut phase, Differentiate { forward, seeds: &seeds, accumulators: &self.sinks, recompute: false });
        let loss = |values: &Values| -> f64 {
            let dot = |a: &Value, b: &Value| -> f64 { a.floats().iter().zip(b.floats()).map(|(a, b)| a * b).sum() };
            seeds.iter().map(|(y, up)| dot(&values[y], &values[up])).sum()
        };
        let mut pairs: Vec<(TensorId, TensorId)> = self.sinks.iter().map(|(&x, &g)| (x, g)).collect();
        pairs.sort_unstable();
        assert!(!pairs.is_empty(), "nothing to check");
        let check = GradientCheck {
            program: &self.program,
            phases: &[forward],
            values: &self.values,
            loss: &loss,
            pairs: &pairs,
            samples: 60,
        };
        check.run().unwrap();
    }
}

#[test]
fn linear_with_bias_row_range_and_fan_out() {
    let mut lone = Lone::new();
    let x = lone.frozen("x", &[5, 6]);
    let (w0, w1, w2) =
        (lone.leaf("w0", &[7, 6], Role::Weight), lone.leaf("w1", &[9, 7], Role::Weight), lone.leaf("w2", &[4, 7], Role::Weight));
    let (b0, b1) = (lone.leaf("b0", &[7], Role::Weight), lone.leaf("b1", &[9], Role::Weight));
    // h is consumed three times: its gradient is a sum.
    lone.check(|p| {
        let h = p.linear(x, w0, Some(b0));
        let act = p.program.act;
        vec![p.linear_rows(h, w1, Some(b1), 2..6, act), p.linear(h, w2, None), p.linear_rows(h, w1, None, 5..9, act)]
    });
}

#[test]
fn rms_norm_plain_and_with_residual() {
    let mut lone = Lone::new();
    let x = lone.frozen("x", &[4, 6]);
    let (w0, w1, w2) =
        (lone.leaf("w0", &[6, 6], Role::Weight), lone.leaf("w1", &[6, 6], Role::Weight), lone.leaf("w2", &[6, 6], Role::Weight));
    let (n0, n1, n2) =
        (lone.leaf("n0", &[6], Role::Weight), lone.leaf("n1", &[6], Role::Weight), lone.leaf("n2", &[6], Role::Weight));
    lone.check(|p| {
        let h = p.linear(x, w0, None);
        let y = p.rms_norm(h, n0, 1e-2);
        let delta = p.linear(y, w1, None);
        let y2 = p.rms_norm(delta, n1, 1e-2);
        let delta2 = p.linear(y2, w2, None);
        let (stream, y3) = p.add_rms_norm(x, delta2, n2, 1e-2);
        vec![stream, y3]
    });
}

#[test]
fn a_trained_stream_that_starts_with_a_plain_norm() {
    // The stream h is normed without a branch and goes on: the norm's backward takes in the gradient that came from later.
    let mut lone = Lone::new();
    let x = lone.frozen("x", &[4, 6]);
    let (w0, w1) = (lone.leaf("w0", &[6, 6], Role::Weight), lone.leaf("w1", &[6, 6], Role::Weight));
    let (n0, n1) = (lone.leaf("n0", &[6], Role::Weight), lone.leaf("n1", &[6], Role::Weight));
    lone.check(|p| {
        let h = p.linear(x, w0, None);
        let y = p.rms_norm(h, n0, 1e-2);
        let delta = p.linear(y, w1, None);
        let (stream, y) = p.add_rms_norm(h, delta, n1, 1e-2);
        vec![stream, y]
    });
}

#[test]
fn swiglu() {
    let mut lone = Lone::new();
    let (w, x) = lone.activation("gu", &[4, 10]);
    lone.check(|p| {
        let gu = p.linear(x, w, None);
        vec![p.swiglu(gu)]
    });
}

fn rotary(lone: &mut Lone, positions: Vec<i32>, width: usize) -> Rotary {
    let (cos, sin) = rotary_tables(32, width, 1e2);
    Rotary {
        positions: lone.ints("positions", positions),
        cos: lone.given("cos", &[32, width / 2], Role::Frozen, cos),
        sin: lone.given("sin", &[32, width / 2], Role::Frozen, sin),
    }
}

#[test]
fn qkv_heads_normed_partial_and_bare() {
    for (rotary_width, normed) in [(6, true), (4, true), (6, false)] {
        let mut lone = Lone::new();
        let heads = Heads { q: 4, kv: 2, dim: 6 };
        let (w, x) = lone.activation("qkv", &[5, 48]);
        let tables = rotary(&mut lone, vec![0, 1, 2, 0, 31], rotary_width);
        let norm = |lone: &mut Lone, name: &str| normed.then(|| lone.leaf(name, &[6], Role::Weight));
        let norms = HeadNorms { q: norm(&mut lone, "q_norm"), k: norm(&mut lone, "k_norm"), eps: 1e-2 };
        lone.check(|p| {
            let src = p.linear(x, w, None);
            let (q, k, v) = p.qkv_heads(src, heads, norms, tables);
            vec![q, k, v]
        });
    }
}

#[test]
fn block_attention_with_and_without_a_window() {
    for window in [None, Some(4), Some(1)] {
        let mut lone = Lone::new();
        let (heads, size) = (Heads { q: 4, kv: 2, dim: 3 }, 3);
        let samples = packed_samples(&[6, 1, 4], 3, 13);
        let arrays = draft_blocks(&mut lone.rng, &samples, 6, 5);
        let blocks = Blocks {
            ctx_start: lone.ints("ctx_start", arrays.ctx_start),
            anchor: lone.ints("anchor", arrays.anchor),
            n_blocks: lone.ints("n_blocks", arrays.n_blocks),
            size,
            mean_context: 3,
        };
        let (wq, xq) = (lone.leaf("wq", &[12, 12], Role::Weight), lone.frozen("xq", &[18, 12]));
        let (wk, wv, xk) =
            (lone.leaf("wk", &[6, 6], Role::Weight), lone.leaf("wv", &[6, 6], Role::Weight), lone.frozen("xk", &[18, 6]));
        let (k_ctx, v_ctx) = (lone.leaf("k_ctx", &[13, 6], Role::Step), lone.leaf("v_ctx", &[13, 6], Role::Step));
        lone.check(|p| {
            let q = p.linear(xq, wq, None);
            let kv = BlockKv { k_ctx, v_ctx, k_blk: p.linear(xk, wk, None), v_blk: p.linear(xk, wv, None) };
            vec![p.block_attention(q, kv, blocks, heads, window)]
        });
    }
}

#[test]
fn gather_rows() {
    let mut lone = Lone::new();
    let (w, x) = lone.activation("x", &[9, 4]);
    let arrays = compaction_arrays(&[0, 3, 4, 8], 9, 6);
    let compaction = Compaction {
        rows: lone.ints("rows", arrays.rows),
        inverse: lone.ints("inverse", arrays.inverse),
        count: lone.ints("count", arrays.count),
    };
    lone.check(|p| {
        let h = p.linear(x, w, None);
        vec![p.gather_rows(h, compaction)]
    });
}

fn drafter_gradients(window: Option<usize>, recompute: bool) {
    let mini = mini_drafter(MiniDrafterOptions { act: DType::F32, layers: 2, window, recompute, head_dim: None });
    let loss = |values: &Values| values[&mini.sums].floats()[0];
    let check = GradientCheck {
        program: &mini.case.program,
        phases: &mini.step,
        values: &mini.case.values,
        loss: &loss,
        pairs: &mini.weights,
        samples: 6,
    };
    check.run().unwrap();
}

#[test]
fn mini_drafter_gradients_are_derivatives() {
    drafter_gradients(None, false);
}

#[test]
fn mini_drafter_gradients_are_derivatives_with_window_and_recompute() {
    drafter_gradients(Some(5), true);
}

#[test]
fn recomputation_changes_no_bit() {
    let run = |recompute| {
        let mini = mini_drafter(MiniDrafterOptions { act: DType::BF16, layers: 3, window: None, recompute, head_dim: None });
        let mut values = mini.case.values.clone();
        for &phase in &mini.step {
            run_phase(&mini.case.program, phase, &mut values, Rounding::Declared);
        }
        let repeated = mini.case.program.phases().flat_map(|(_, p)| &p.nodes).filter(|n| n.recomputed).count();
        let bits = |t: TensorId| values[&t].floats().iter().map(|x| x.to_bits()).collect::<Vec<u64>>();
        (mini.weights.iter().map(|&(_, g)| bits(g)).chain([bits(mini.sums)]).collect::<Vec<_>>(), repeated)
    };
    let ((kept, none), (again, some)) = (run(false), run(true));
    assert_eq!(none, 0);
    assert!(some > 0, "nothing was recomputed");
    assert!(kept == again, "a gradient differs");
    assert!(kept.iter().flatten().any(|&bits| f64::from_bits(bits) != 0.0));
}

#[test]
fn a_wrong_gradient_is_found() {
    let mini = mini_drafter(MiniDrafterOptions { act: DType::F32, layers: 1, window: None, recompute: false, head_dim: None });
    let loss = |values: &Values| values[&mini.sums].floats()[0] * (1.0 + 1e-5);
    let check = GradientCheck {
        program: &mini.case.program,
        phases: &mini.step,
        values: &mini.case.values,
        loss: &loss,
        pairs: &mini.weights[..1],
        samples: 6,
    };
    assert!(check.run().is_err(), "a gradient that is one part in 1e5 off went unnoticed");
}
