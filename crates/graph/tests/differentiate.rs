//! Properties of differentiation over random layered programs. That the gradients are right is for the testkit, by central differences.

use drafthorse_graph::backward::{Differentiate, accumulators, differentiate};
use drafthorse_graph::plan::Region;
use drafthorse_graph::{Access, DType, Op, Plan, Program, Role, Storage, TensorId};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

const ROWS: usize = 6;
const WIDTH: usize = 8;

/// One layer: how many linears read its normed stream, and whether a gated unit follows.
type Shape = (usize, bool);

struct Built {
    program: Program,
    weights: Vec<TensorId>,
    frozen: Vec<TensorId>,
    sinks: HashMap<TensorId, TensorId>,
    /// Nodes of the forward.
    forward: usize,
}

/// A residual network whose layers fan out; `trained` says by turns which weights are.
fn build(layers: &[Shape], trained: &[bool], recompute: bool) -> Built {
    let mut program = Program::new(DType::BF16);
    let x = program.tensor("x", &[ROWS, WIDTH], DType::BF16, Role::Input);
    let (mut weights, mut frozen, mut count) = (Vec::new(), Vec::new(), 0);
    let mut weight = |program: &mut Program, shape: &[usize]| {
        let train = trained[count % trained.len()];
        let role = if train { Role::Weight } else { Role::Frozen };
        let w = program.tensor(format!("w.{count}"), shape, DType::BF16, role);
        if train {
            weights.push(w)
        } else {
            frozen.push(w)
        }
        count += 1;
        w
    };
    let mut phase = program.begin("step");
    let (mut stream, mut delta) = (x, x);
    let mut outputs = Vec::new();
    for (l, &(fan_out, gated)) in layers.iter().enumerate() {
        phase.set_layer(Some(l as u32));
        let norm = weight(phase.program, &[WIDTH]);
        let (sum, y) = phase.add_rms_norm(stream, delta, norm, 1e-6);
        stream = sum;
        for _ in 1..fan_out {
            let w = weight(phase.program, &[3, WIDTH]);
            outputs.push(phase.linear(y, w, None));
        }
        let w = weight(phase.program, &[2 * WIDTH, WIDTH]);
        let wide = phase.linear(y, w, None);
        let inner = if gated { phase.swiglu(wide) } else { wide };
        let cols = phase.shape(inner)[1];
        let w = weight(phase.program, &[WIDTH, cols]);
        delta = phase.linear(inner, w, None);
    }
    phase.set_layer(None);
    let norm = weight(phase.program, &[WIDTH]);
    outputs.push(phase.add_rms_norm(stream, delta, norm, 1e-6).1);
    let sinks = accumulators(phase.program, &weights, Role::Grad);
    let mut seeds = Vec::new();
    for (i, &y) in outputs.iter().enumerate() {
        let shape = phase.shape(y);
        seeds.push((y, phase.program.tensor(format!("upstream.{i}"), &shape, DType::BF16, Role::Input)));
    }
    let id = phase.id();
    let forward = phase.program.phase(id).nodes.len();
    differentiate(&mut phase, Differentiate { forward: id, seeds: &seeds, accumulators: &sinks, recompute });
    Built { program, weights, frozen, sinks, forward }
}

impl Built {
    fn nodes(&self) -> &[drafthorse_graph::program::Node] {
        &self.program.phases().next().expect("one phase").1.nodes
    }
}

fn layers() -> impl Strategy<Value = Vec<Shape>> {
    prop::collection::vec((1usize..4, any::<bool>()), 1..5)
}

fn trained() -> impl Strategy<Value = Vec<bool>> {
    prop::collection::vec(any::<bool>(), 1..7)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn frozen_is_never_written_and_every_trained_weight_gets_its_gradient(l in layers(), t in trained(), recompute: bool) {
        let built = build(&l, &t, recompute);
        let mut updates: HashMap<TensorId, usize> = HashMap::new();
        for node in built.nodes() {
            let mut bad = None;
            node.op.for_each(|access, t| {
                if access != Access::Read && built.frozen.contains(&t) {
                    bad = Some(t);
                }
                if access == Access::Update {
                    *updates.entry(t).or_default() += 1;
                }
            });
            prop_assert!(bad.is_none(), "{} writes a frozen tensor", node.op.describe(&built.program));
        }
        for w in &built.weights {
            prop_assert_eq!(updates.get(&built.sinks[w]), Some(&1), "gradient of `{}`", built.program.get(*w).name);
        }
    }

    #[test]
    fn nothing_is_read_before_it_is_written_and_no_gradient_is_formed_in_vain(l in layers(), t in trained(), recompute: bool) {
        let built = build(&l, &t, recompute);
        let is_temp = |t: TensorId| built.program.get(t).role == Role::Phase;
        let mut written: HashSet<TensorId> = HashSet::new();
        for node in built.nodes() {
            let mut early = None;
            node.op.for_each(|access, t| {
                if matches!(access, Access::Read | Access::Update) && is_temp(t) && !written.contains(&t) {
                    early = Some(t);
                }
            });
            prop_assert!(early.is_none(), "{} reads too early", node.op.describe(&built.program));
            node.op.for_each(|access, t| {
                if access == Access::Write {
                    written.insert(t);
                }
            });
        }
        let mut read_later: HashSet<TensorId> = HashSet::new();
        for node in built.nodes()[built.forward..].iter().rev() {
            let mut useful = false;
            node.op.for_each(|access, t| {
                let kept = access == Access::Update && !is_temp(t);
                useful |= kept || (matches!(access, Access::Write | Access::Update) && read_later.contains(&t));
            });
            prop_assert!(useful, "nobody needs {}", node.op.describe(&built.program));
            node.op.for_each(|access, t| {
                if matches!(access, Access::Read | Access::Update) {
                    read_later.insert(t);
                }
            });
        }
    }

    #[test]
    fn fan_out_is_summed_in_f32_by_one_write_and_then_additions(l in layers(), recompute: bool) {
        let built = build(&l, &[true], recompute);
        let mut sums: HashMap<TensorId, Vec<bool>> = HashMap::new();
        for node in built.nodes() {
            if let Op::LinearDx(dx) = &node.op {
                sums.entry(dx.dx).or_default().push(dx.accumulate);
            }
        }
        let mut found: Vec<usize> = sums.values().map(Vec::len).collect();
        for (t, adds) in &sums {
            prop_assert!(!adds[0] && adds[1..].iter().all(|&a| a), "{adds:?}");
            let dtype = if adds.len() > 1 { DType::F32 } else { DType::BF16 };
            prop_assert_eq!(built.program.get(*t).dtype, dtype);
        }
        // Per layer: the fan-out of its norm, and the one reader of what lies inside.
        let mut want: Vec<usize> = l.iter().flat_map(|&(fan_out, _)| [fan_out, 1]).collect();
        found.sort_unstable();
        want.sort_unstable();
        prop_assert_eq!(found, want);
    }

    #[test]
    fn recomputation_repeats_no_unread_node_nor_the_last_layer_and_is_not_useful_work(l in layers(), t in trained()) {
        let (kept, again) = (build(&l, &t, false), build(&l, &t, true));
        prop_assert!(kept.nodes().iter().all(|n| !n.recomputed));
        let last = l.len() as u32 - 1;
        for (i, node) in again.nodes().iter().enumerate().filter(|(_, n)| n.recomputed) {
            prop_assert!(node.layer.is_some_and(|layer| layer < last), "layer {:?} of 0..={last}", node.layer);
            let mut read = false;
            node.op.for_each(|access, t| {
                let reads = |n: &drafthorse_graph::program::Node| {
                    let mut reads = false;
                    n.op.for_each(|a, other| reads |= a == Access::Read && other == t);
                    reads
                };
                read |= access == Access::Write && again.nodes()[i + 1..].iter().any(reads);
            });
            prop_assert!(read, "nobody reads {}", node.op.describe(&again.program));
        }
        let cost = |b: &Built| Plan::new(&b.program, Storage::Declared).phases[0].useful.flops;
        prop_assert_eq!(cost(&kept), cost(&again));
        let strip = |b: &Built| b.nodes().iter().filter(|n| !n.recomputed).map(|n| n.op.name()).collect::<Vec<_>>();
        prop_assert_eq!(strip(&kept), strip(&again));
    }
}

#[test]
fn recomputation_saves_the_memory_of_all_layers_but_one() {
    let arena = |layers: usize, recompute| {
        let built = build(&vec![(2, true); layers], &[true], recompute);
        let plan = Plan::new(&built.program, Storage::Declared);
        assert_eq!(plan.phases[0].recomputed_flops > 0, recompute && layers > 1);
        plan.bytes(Region::Arena)
    };
    let (grows, stays) = (arena(12, false) - arena(6, false), arena(12, true) - arena(6, true));
    assert!(2 * stays < grows, "six more layers cost {stays} bytes with recomputation, {grows} without");
}

/// x feeds a linear and then, with that linear's result, an addition: the addition's one gradient serves both of its sides.
#[test]
#[should_panic(expected = "cannot be added to")]
fn a_shared_gradient_is_not_added_to() {
    let mut program = Program::new(DType::BF16);
    let x = program.tensor("x", &[ROWS, WIDTH], DType::BF16, Role::Step);
    let x_grad = program.tensor("x.grad", &[ROWS, WIDTH], DType::F32, Role::Step);
    let w = program.tensor("w", &[WIDTH, WIDTH], DType::BF16, Role::Frozen);
    let norm = program.tensor("norm", &[WIDTH], DType::BF16, Role::Frozen);
    let mut phase = program.begin("step");
    let delta = phase.linear(x, w, None);
    let (_, y) = phase.add_rms_norm(x, delta, norm, 1e-6);
    let up = phase.program.tensor("up", &[ROWS, WIDTH], DType::BF16, Role::Input);
    let forward = phase.id();
    let sinks = HashMap::from([(x, x_grad)]);
    differentiate(&mut phase, Differentiate { forward, seeds: &[(y, up)], accumulators: &sinks, recompute: false });
}
