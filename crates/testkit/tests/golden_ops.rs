//! The oracle against PyTorch: `golden/data/ops.safetensors`, values and gradients.
//!
//! Golden values are float64 computations from float32 inputs, stored as float32, so the oracle must agree to a rounding of that.
//! `gather` holds a row several times, which `GatherRows` excludes, so only its values are taken from it.

use drafthorse_graph::backward::{Differentiate, differentiate};
use drafthorse_graph::op::block_attention::{BlockKv, Blocks};
use drafthorse_graph::op::cached_attention::KvCache;
use drafthorse_graph::op::causal_attention::Packing;
use drafthorse_graph::op::gather::Compaction;
use drafthorse_graph::op::head_loss::{Labels, RowMetrics};
use drafthorse_graph::op::optim::{AdamConfig, AdamScalars, Stat};
use drafthorse_graph::op::qk_norm_rope::{HeadNorms, Rotary};
use drafthorse_graph::op::{AdamParam, Heads};
use drafthorse_graph::{DType, PhaseBuilder, Program, Role, TensorId};
use drafthorse_testkit::compare::{Bound, compare};
use drafthorse_testkit::golden::Golden;
use drafthorse_testkit::inputs::rotary_tables;
use drafthorse_testkit::oracle::{Rounding, Value, Values, run_phase};
use std::collections::HashMap;

/// One golden case: its tensors become a program's by name.
struct Bench {
    golden: Golden,
    case: &'static str,
    program: Program,
    values: Values,
    sinks: HashMap<TensorId, TensorId>,
}

impl Bench {
    fn new(case: &'static str) -> Self {
        let golden = Golden::load("ops").unwrap_or_else(|e| panic!("{e}"));
        Bench { golden, case, program: Program::new(DType::F32), values: Values::new(), sinks: HashMap::new() }
    }

    fn has(&self, name: &str) -> bool {
        self.golden.names().contains(&format!("{}.{name}", self.case))
    }

    fn content(&self, name: &str) -> drafthorse_testkit::golden::GoldenTensor {
        self.golden.tensor(&format!("{}.{name}", self.case)).unwrap_or_else(|e| panic!("{e}"))
    }

    fn number(&self, name: &str) -> f64 {
        self.golden.number(&format!("/{}/{name}", self.case)).unwrap_or_else(|e| panic!("{e}"))
    }

    fn size(&self, name: &str) -> usize {
        self.number(name) as usize
    }

    fn heads(&self) -> Heads {
        Heads { q: self.size("heads"), kv: self.size("kv_heads"), dim: self.size("head_dim") }
    }

    fn floats(&mut self, name: &str, role: Role) -> TensorId {
        let golden = self.content(name);
        self.given(name, &golden.shape, role, golden.data)
    }

    fn given(&mut self, name: &str, shape: &[usize], role: Role, content: Vec<f64>) -> TensorId {
        let t = self.program.tensor(name, shape, DType::F32, role);
        self.values.insert(t, Value::Float(content));
        t
    }

    /// A golden input whose gradient is golden too: it gets an accumulator of zeros.
    fn leaf(&mut self, name: &str) -> TensorId {
        let t = self.floats(name, Role::Weight);
        let shape = self.program.get(t).shape.clone();
        let zeros = vec![0.0; shape.iter().product()];
        let g = self.given(&format!("grad_{name}"), &shape, Role::Grad, zeros);
        self.sinks.insert(t, g);
        t
    }

    fn ints(&mut self, name: &str) -> TensorId {
        let content = self.content(name).ints();
        self.index(name, content)
    }

    fn index(&mut self, name: &str, content: Vec<i32>) -> TensorId {
        let t = self.program.tensor(name, &[content.len()], DType::I32, Role::Input);
        self.values.insert(t, Value::Int(content));
        t
    }

    fn output(&mut self, name: &str, shape: &[usize]) -> TensorId {
        self.program.tensor(name, shape, DType::F32, Role::Output)
    }

    /// Builds with `build`, which returns (golden name, output); differentiates with the golden upstreams `d_<name>`, checks all.
    ///
    /// Inputs become activations by `grad_of`: the gradient tensors that `differentiate` made, by the input's name.
    fn check(mut self, inputs: &[(&str, TensorId)], build: impl FnOnce(&mut PhaseBuilder<'_>) -> Vec<(&'static str, TensorId)>) {
        let mut phase = self.program.begin("phase");
        let outputs = build(&mut phase);
        let forward = phase.id();
        let mut seeds = Vec::new();
        for &(name, y) in &outputs {
            let golden = self.golden.tensor(&format!("{}.d_{name}", self.case)).unwrap_or_else(|e| panic!("{e}"));
            let up = phase.program.tensor(format!("d_{name}"), &golden.shape, DType::F32, Role::Input);
            self.values.insert(up, Value::Float(golden.data));
            seeds.push((y, up));
        }
        let grads =
            differentiate(&mut phase, Differentiate { forward, seeds: &seeds, accumulators: &self.sinks, recompute: false });
        self.run("phase");
        for (name, y) in outputs {
            self.agrees(name, y);
        }
        for &(name, x) in inputs {
            let g = grads.get(&x).or(self.sinks.get(&x)).unwrap_or_else(|| panic!("no gradient of `{name}`"));
            self.agrees(&format!("grad_{name}"), *g);
        }
    }

    fn run(&mut self, phase: &str) {
        let (id, _) = self.program.phases().find(|(_, p)| p.name == phase).expect("the phase");
        run_phase(&self.program, id, &mut self.values, Rounding::None);
    }

    fn agrees(&self, name: &str, t: TensorId) {
        let golden = self.content(name);
        let got = self.values[&t].wide();
        // Rounding to float32, and 1e-13 of the largest element where a gradient is a cancelled sum.
        let largest = golden.data.iter().map(|x| x.abs()).fold(0.0, f64::max);
        let bound = Bound::AbsRel { abs: 1e-12 * largest, rel: 1.0 / (1u64 << 23) as f64 };
        compare(&format!("{}.{name}", self.case), &golden.shape, &got, &golden.data, bound).unwrap_or_else(|e| panic!("{e}"));
    }
}

/// Gradients of activations exist only where something upstream is trained, so inputs of ops that are activations in a model are
/// declared as leaves: [`Bench::leaf`] gives them an accumulator, which marks them wanted.
fn activations(b: &mut Bench, names: &[&'static str]) -> Vec<(&'static str, TensorId)> {
    names.iter().map(|&n| (n, b.leaf(n))).collect()
}

#[test]
fn linear() {
    for case in ["linear", "linear_bias", "linear_one_row"] {
        let mut b = Bench::new(case);
        let names: &[&str] = if b.has("bias") { &["x", "weight", "bias"] } else { &["x", "weight"] };
        let inputs = activations(&mut b, names);
        let (x, w, bias) = (inputs[0].1, inputs[1].1, inputs.get(2).map(|i| i.1));
        b.check(&inputs, |p| vec![("y", p.linear(x, w, bias))]);
    }
}

#[test]
fn rms_norm() {
    let mut b = Bench::new("rms_norm");
    let inputs = activations(&mut b, &["x", "weight"]);
    let eps = b.number("eps") as f32;
    b.check(&inputs, |p| vec![("y", p.rms_norm(inputs[0].1, inputs[1].1, eps))]);

    let mut b = Bench::new("rms_norm_add");
    let inputs = activations(&mut b, &["x", "delta", "weight"]);
    let eps = b.number("eps") as f32;
    b.check(&inputs, |p| {
        let (sum, y) = p.add_rms_norm(inputs[0].1, inputs[1].1, inputs[2].1, eps);
        vec![("x_out", sum), ("y", y)]
    });
}

#[test]
fn qk_norm_rope() {
    for case in ["qk_norm_rope", "rope_only", "qk_norm_rope_partial"] {
        let mut b = Bench::new(case);
        let normed = b.has("q_norm");
        let names: &[&str] = if normed { &["qkv", "q_norm", "k_norm"] } else { &["qkv"] };
        let inputs = activations(&mut b, names);
        let heads = b.heads();
        let (cos, sin) = rotary_tables(4096, b.size("rotary_dim"), b.number("theta"));
        let half = b.size("rotary_dim") / 2;
        let rotary = Rotary {
            positions: b.ints("positions"),
            cos: b.given("cos", &[4096, half], Role::Frozen, cos),
            sin: b.given("sin", &[4096, half], Role::Frozen, sin),
        };
        let eps = if normed { b.number("eps") as f32 } else { 0.0 };
        let norms = HeadNorms { q: inputs.get(1).map(|i| i.1), k: inputs.get(2).map(|i| i.1), eps };
        b.check(&inputs, |p| {
            let (q, k, v) = p.qkv_heads(inputs[0].1, heads, norms, rotary);
            vec![("q", q), ("k", k), ("v", v)]
        });
    }
}

#[test]
fn swiglu() {
    let mut b = Bench::new("swiglu");
    let inputs = activations(&mut b, &["x"]);
    b.check(&inputs, |p| vec![("y", p.swiglu(inputs[0].1))]);
}

#[test]
fn causal_attention() {
    for case in ["causal", "causal_sharp"] {
        let mut b = Bench::new(case);
        let [q, k, v] = ["q", "k", "v"].map(|n| b.floats(n, Role::Input));
        let heads = b.heads();
        let cu = b.content("cu_seqlens").ints();
        let packing =
            Packing { n_seqs: b.index("n_seqs", vec![cu.len() as i32 - 1]), cu_seqlens: b.ints("cu_seqlens"), mean_len: 9 };
        let y = b.program.begin("phase").causal_attention(q, k, v, packing, heads);
        b.run("phase");
        b.agrees("y", y);
    }
}

#[test]
fn cached_attention() {
    let mut b = Bench::new("cached");
    let [q, k, v] = ["q", "k", "v"].map(|n| b.floats(n, Role::Step));
    let (heads, offset) = (b.heads(), b.size("offset") as i32);
    let cache = KvCache { k, v, len: b.index("len", vec![offset]) };
    let y = b.program.begin("phase").cached_attention(q, cache, heads);
    b.run("phase");
    b.agrees("y", y);
}

#[test]
fn block_attention() {
    for (case, window) in
        [("block_full", None), ("block_sliding", Some(12)), ("block_sliding_narrow", Some(3)), ("block_full_sharp", None)]
    {
        let mut b = Bench::new(case);
        assert_eq!(b.golden.number(&format!("/{case}/window")).ok().map(|w| w as usize), window);
        let inputs = activations(&mut b, &["q", "k_ctx", "v_ctx", "k_blk", "v_blk"]);
        let (heads, size) = (b.heads(), b.size("block"));
        let real = b.content("anchor").data.len() as i32;
        let blocks = Blocks {
            ctx_start: b.ints("ctx_start"),
            anchor: b.ints("anchor"),
            n_blocks: b.index("n_blocks", vec![real]),
            size,
            mean_context: 20,
        };
        let kv = BlockKv { k_ctx: inputs[1].1, v_ctx: inputs[2].1, k_blk: inputs[3].1, v_blk: inputs[4].1 };
        b.check(&inputs, |p| vec![("y", p.block_attention(inputs[0].1, kv, blocks, heads, window))]);
    }
}

#[test]
fn gather_and_embed() {
    let mut b = Bench::new("gather");
    let x = b.floats("x", Role::Input);
    let index = b.content("index").ints();
    let compaction = Compaction {
        count: b.index("count", vec![index.len() as i32]),
        rows: b.ints("index"),
        inverse: b.index("inverse", vec![-1; 9]),
    };
    let y = b.program.begin("phase").gather_rows(x, compaction);
    b.run("phase");
    b.agrees("y", y);

    let mut b = Bench::new("embedding");
    let (ids, table) = (b.ints("ids"), b.floats("table", Role::Frozen));
    let y = b.program.begin("phase").embed(ids, table);
    b.run("phase");
    b.agrees("y", y);
}

#[test]
fn head_loss() {
    let mut b = Bench::new("head_loss");
    let (x, head) = (b.floats("x", Role::Input), b.floats("head", Role::Frozen));
    let labels =
        Labels { labels: b.ints("labels"), weights: b.floats("weights", Role::Input), count: b.index("count", vec![23]) };
    let sums = b.given("sums", &[2], Role::Grad, vec![0.0, 0.0]);
    let hit = b.program.tensor("hit", &[23], DType::I32, Role::Output);
    let metrics = RowMetrics { ce: b.output("ce", &[23]), prob: b.output("prob", &[23]), hit };
    let dx = b.program.begin("phase").head_loss(x, head, labels, sums, metrics, 8, true).expect("a gradient");
    b.run("phase");
    b.agrees("ce", metrics.ce);
    b.agrees("label_probability", metrics.prob);
    b.agrees("hit", metrics.hit);
    b.agrees("grad_x", dx);
    let got = b.values[&sums].floats();
    let want = [b.number("loss_sum"), b.number("weight_sum")];
    compare("sums", &[2], got, &want, Bound::AbsRel { abs: 0.0, rel: 1e-12 }).unwrap();
}

#[test]
fn adamw_and_grad_norm() {
    for case in ["adamw", "adamw_decay"] {
        let mut b = Bench::new(case);
        let w = b.floats("w0", Role::Weight);
        let grad = b.program.tensor("grad", &[37], DType::F32, Role::Grad);
        let m = b.given("m", &[37], Role::State, vec![0.0; 37]);
        let v = b.given("v", &[37], Role::State, vec![0.0; 37]);
        let adam_t = b.index("adam_t", vec![0]);
        let scalars = AdamScalars {
            sums: b.given("sums", &[2], Role::Grad, vec![0.7, 1.0]),
            adam_t,
            stats: b.output("stats", &[8]),
            lr: b.given("lr", &[1], Role::Input, vec![0.0]),
        };
        // The golden betas and decay are decimals; the op's are the nearest float32.
        let config = AdamConfig {
            betas: [b.number("betas/0") as f32, b.number("betas/1") as f32],
            eps: b.number("eps") as f32,
            weight_decay: b.number("weight_decay") as f32,
            clip: b.number("clip") as f32,
        };
        b.program.begin("phase").adamw(vec![AdamParam { w, master: None, m, v, grad }], scalars, config);
        for s in 0..3 {
            let (g, lr) = (b.content(&format!("grad{s}")).data, b.number(&format!("lr/{s}")));
            b.values.insert(grad, Value::Float(g));
            b.values.insert(scalars.lr, Value::Float(vec![lr]));
            b.run("phase");
            let stats = b.values[&scalars.stats].floats();
            let norm = b.number(&format!("grad_norm/{s}"));
            compare("norm", &[1], &stats[Stat::Norm as usize..][..1], &[norm], Bound::AbsRel { abs: 0.0, rel: 1e-12 }).unwrap();
            for (name, t, rel) in [("w", w, 1e-6), ("m", m, 1e-6), ("v", v, 4e-5)] {
                let golden = b.content(&format!("{name}{}", s + 1));
                let bound = Bound::AbsRel { abs: 1e-9, rel };
                compare(&format!("{case}.{name}{}", s + 1), &[37], b.values[&t].floats(), &golden.data, bound).unwrap();
            }
        }
    }
}
