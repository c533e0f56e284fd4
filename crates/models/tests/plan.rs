//! The memory plan of real drafters, and that an executor holds what the plan says.
//!
//! Job: `held_bytes` of a CPU executor equals its plan and its scratch to the byte; published shapes fit the GPUs they are meant for, in bf16, without
//! recomputation. Refuses to run a program of that size: only the plan is made.

use drafthorse_cpu::{CpuExecutor, FrozenSet, Options};
use drafthorse_graph::op::optim::AdamConfig;
use drafthorse_graph::plan::Region;
use drafthorse_graph::{DType, Executor, Plan, Program, Role, Storage};
use drafthorse_models::draft::dflash::{Dflash, Shared, TrainShape};
use drafthorse_models::draft_config::{DraftConfig, LayerKind, default_layer_ids};
use drafthorse_models::rope::RopeSpec;
use drafthorse_models::tensor_names::draft_sources;
use std::sync::Arc;

const GIB: f64 = (1u64 << 30) as f64;
const ADAM: AdamConfig = AdamConfig { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, clip: 1.0 };

struct Size {
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    target_layers: usize,
    layers: usize,
}

const QWEN3_8B: Size = Size {
    hidden: 4096,
    intermediate: 12_288,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    vocab: 151_936,
    target_layers: 36,
    layers: 5,
};
const QWEN3_6_27B: Size = Size { hidden: 5120, intermediate: 17_408, vocab: 248_320, target_layers: 64, ..QWEN3_8B };
const TINY: Size =
    Size { hidden: 24, intermediate: 40, heads: 4, kv_heads: 2, head_dim: 8, vocab: 61, target_layers: 8, layers: 2 };

fn config(size: &Size) -> DraftConfig {
    let config = DraftConfig {
        hidden: size.hidden,
        intermediate: size.intermediate,
        layers: size.layers,
        heads: size.heads,
        kv_heads: size.kv_heads,
        head_dim: size.head_dim,
        target_hidden: size.hidden,
        target_layers: size.target_layers,
        target_layer_ids: default_layer_ids(size.target_layers, 5).unwrap(),
        block_size: 16,
        mask_token_id: 0,
        rms_eps: 1e-6,
        rope: RopeSpec::full(1e6, size.head_dim),
        layer_types: vec![LayerKind::Full; size.layers],
        sliding_window: None,
        max_positions: 4096,
        vocab: size.vocab,
    };
    config.validate().unwrap();
    config
}

fn program(size: &Size, act: DType, shape: TrainShape) -> Program {
    let config = config(size);
    let mut program = Program::new(act);
    let tables = [size.vocab, size.hidden];
    let embed = program.tensor("target.embed", &tables, act, Role::Frozen);
    let head = program.tensor("target.head", &tables, act, Role::Frozen);
    let slot = program.tensor("slot", &[shape.budget, config.fc_columns()], act, Role::Slot);
    let drafter = Dflash::declare(&mut program, &config, Shared { embed, head }, 4096);
    drafter.train_passes(&mut program, slot, shape, ADAM);
    program
}

fn real(recompute: bool) -> TrainShape {
    TrainShape { budget: 12_288, micro_blocks: 256, loss_chunk: 1024, recompute, mean_context: 1024 }
}

#[test]
fn an_executor_holds_what_its_plan_says() {
    for recompute in [false, true] {
        let shape = TrainShape { budget: 50, micro_blocks: 3, loss_chunk: 16, recompute, mean_context: 20 };
        let program = Arc::new(program(&TINY, DType::F32, shape));
        let frozen: FrozenSet = program
            .of_role(Role::Frozen)
            .into_iter()
            .map(|t| (program.get(t).name.clone(), Arc::new(vec![0.0; program.get(t).len()])))
            .collect();
        let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap());
        let exec = CpuExecutor::new(Arc::clone(&program), &frozen, Options { pool, round: false }).unwrap();
        let plan = Plan::new(&program, Storage::Wide);
        let planned = plan.total_bytes() as u64 + CpuExecutor::scratch_bytes(&program, 1);
        assert_eq!(exec.held_bytes(), planned, "recompute = {recompute}");
        assert_eq!(exec.new_slot().unwrap().len() * 4, 50 * 5 * 24 * 4);
        assert_eq!((50usize * 5 * 24 * 4).next_multiple_of(drafthorse_graph::plan::ALIGN), plan.bytes(Region::Slot));
    }
}

/// Bytes per region as one line each, for the message of a failed bound and for `--nocapture`.
fn table(what: &str, plan: &Plan) -> String {
    let mut text = format!("{what}: {:.2} GiB without slots\n", plan.total_bytes() as f64 / GIB);
    for region in Region::ALL {
        text +=
            &format!("  {:16} {:>15} bytes  {:7.3} GiB\n", region.title(), plan.bytes(region), plan.bytes(region) as f64 / GIB);
    }
    for phase in &plan.phases {
        text += &format!("  phase {:24} arena {:7.3} GiB\n", phase.name, phase.arena_bytes as f64 / GIB);
    }
    text
}

fn fits(what: &str, size: &Size, limit_gib: f64) {
    let plan = Plan::new(&program(size, DType::BF16, real(false)), Storage::Declared);
    let text = table(what, &plan);
    println!("{text}");
    assert!(plan.total_bytes() as f64 <= limit_gib * GIB, "{text}");

    // What the regions must be, from the config alone.
    let trained: usize = draft_sources(&config(size)).iter().map(|f| f.elements()).sum();
    let near = |region: Region, bytes: usize| {
        let (got, slack) = (plan.bytes(region), 256 * 8 * size.layers * 4 + (1 << 20));
        assert!(got >= bytes && got <= bytes + slack, "{what}: {} is {got}, wanted {bytes}", region.title());
    };
    near(Region::Weight, 2 * trained);
    near(Region::State, 12 * trained);
    near(Region::Grad, 4 * trained);
    near(Region::Slot, 12_288 * 5 * size.hidden * 2);
    let (t, kv) = (12_288, size.kv_heads * size.head_dim);
    // The context's saved tensors are step tensors too: fused rows and their norm, and each layer's packed K and V.
    near(Region::Step, t * (2 * size.hidden * 2 + 4 + size.layers * (2 * kv * 2 + 2 * kv * 2 + 2 * kv * 4)));

    let again = Plan::new(&program(size, DType::BF16, real(true)), Storage::Declared);
    println!("{}", table(&format!("{what}, recomputed"), &again));
    assert!(again.bytes(Region::Arena) < plan.bytes(Region::Arena), "recomputation saves activations");
    assert!(again.total_bytes() < plan.total_bytes());
}

#[test]
fn a_drafter_for_an_8b_target_fits() {
    fits("Qwen3-8B drafter", &QWEN3_8B, 26.0);
}

#[test]
fn a_drafter_for_a_27b_target_fits() {
    fits("27B drafter", &QWEN3_6_27B, 42.0);
}
