//! What a run needs, computed from its programs before anything is allocated.
//!
//! Job: bytes per device and part, FLOPs per batch, the split of GPUs over targets and drafters, and which single key makes a run fit. Refuses guesses
//! about speed: a rate is given by the caller, measured or assumed aloud. Invariant: the bytes come from the same memory plan that the executors allocate.

use crate::format::bytes;
use drafthorse_cpu::CpuExecutor;
use drafthorse_data::batch::default_max_blocks;
use drafthorse_data::table::StartTable;
use drafthorse_graph::plan::Region;
use drafthorse_graph::{DType, PhaseId, Plan, Program, Role, Storage};
use drafthorse_models::draft::dflash::TrainShape;
use drafthorse_train::capture::capture_program;
use drafthorse_train::config::BatchSection;
use drafthorse_train::drafter::{DrafterProgram, drafter_program};
use drafthorse_train::frozen::CpuBackend;
use drafthorse_train::pipeline::layout::{Assignment, Layout, Mode};
use drafthorse_train::run::{checkpoint_bytes, variant_bytes};
use drafthorse_train::setup::{Setup, adam_config};
use serde::Serialize;
use std::collections::BTreeMap;

/// A kind of device, as far as plans go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// f32, one memory and one pool for all workers.
    Cpu,
    /// bf16, one arena per GPU.
    Gpu,
}

impl Kind {
    fn act(self) -> DType {
        match self {
            Kind::Cpu => DType::F32,
            Kind::Gpu => DType::BF16,
        }
    }

    fn storage(self) -> Storage {
        match self {
            Kind::Cpu => Storage::Wide,
            Kind::Gpu => Storage::Declared,
        }
    }
}

/// What every executor on a GPU holds for the library of matrix products. Stated here, because plans for GPUs are made in builds without them, too.
const PRODUCT_WORKSPACE_BYTES: u64 = 32 << 20;

/// Which device does what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Placement {
    /// Device of each target loop.
    pub targets: Vec<u32>,
    /// Device of each drafter loop.
    pub drafters: Vec<u32>,
}

/// Memory of one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceMemory {
    /// `cpu` or `gpu N`.
    pub device: String,
    /// All bytes.
    pub total_bytes: u64,
    /// What they are for.
    pub parts: Vec<Part>,
}

/// A named share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// What.
    pub name: String,
    /// Bytes.
    pub size_bytes: u64,
}

/// FLOPs of one batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BatchFlops {
    /// Useful, of the target's forward.
    pub target: f64,
    /// Useful, of the drafter's forward and backward.
    pub drafter: f64,
    /// Executed by the target: padding included.
    pub target_executed: f64,
    /// Executed by the drafter: padding and recompute included.
    pub drafter_executed: f64,
    /// Micro-batches.
    pub micro_batches: u64,
}

/// The programs of a run, planned.
pub struct Programs {
    kind: Kind,
    capture: Planned,
    drafters: Vec<(String, Planned, DrafterProgram)>,
    slot_bytes: u64,
    checkpoint_bytes: u64,
    snapshot_bytes: u64,
}

struct Planned {
    plan: Plan,
    /// Working memory of an executor beside the plan's regions.
    scratch_bytes: u64,
    frozen: BTreeMap<(String, usize), u64>,
    capture_phase: Option<PhaseId>,
}

impl Planned {
    fn new(program: &Program, kind: Kind, threads: usize, capture_phase: Option<PhaseId>) -> Planned {
        let plan = Plan::new(program, kind.storage());
        let frozen = program
            .of_role(Role::Frozen)
            .into_iter()
            .map(|t| {
                let size = plan.place(t).map_or(0, |p| p.bytes) as u64;
                ((program.get(t).name.clone(), program.get(t).len()), size)
            })
            .collect();
        let scratch_bytes = match kind {
            Kind::Cpu => CpuExecutor::scratch_bytes(program, threads),
            Kind::Gpu => PRODUCT_WORKSPACE_BYTES,
        };
        Planned { plan, scratch_bytes, frozen, capture_phase }
    }

    fn useful(&self, phase: PhaseId) -> f64 {
        self.plan.phases[phase.index()].useful.flops as f64
    }

    fn executed(&self, phase: PhaseId) -> f64 {
        self.useful(phase) + self.plan.phases[phase.index()].recomputed_flops as f64
    }
}

impl Programs {
    /// Plans the programs of `setup` with the shapes of `batch`.
    pub fn new(setup: &Setup, batch: &BatchSection, kind: Kind) -> Programs {
        let target = &setup.target.config;
        let budget = batch.token_budget as usize;
        let capture = capture_program(kind.act(), target, budget, batch.max_rows, &setup.captured);
        let shape = TrainShape {
            budget,
            micro_blocks: batch.micro_blocks,
            loss_chunk: batch.loss_chunk,
            recompute: batch.recompute,
            ..setup.train_shape()
        };
        let threads = CpuBackend::threads(setup.config.pipeline.threads);
        let drafters: Vec<_> = setup
            .variants
            .iter()
            .map(|v| {
                let program = drafter_program(kind.act(), target, &v.draft, &setup.captured, shape, adam_config(&v.config));
                (v.name.clone().unwrap_or_else(|| "drafter".into()), Planned::new(&program.program, kind, threads, None), program)
            })
            .collect();
        let capture_phase = capture.pass.phase;
        let capture = Planned::new(&capture.program, kind, threads, Some(capture_phase));
        let slot_bytes = capture.plan.bytes(Region::Slot) as u64;
        let checkpoint_bytes = checkpoint_bytes(setup);
        // Every drafter that saves can hold one while the writer holds another, of any of them.
        let snapshot_bytes = checkpoint_bytes + setup.variants.iter().map(variant_bytes).max().unwrap_or(0);
        Programs { kind, capture, drafters, slot_bytes, checkpoint_bytes, snapshot_bytes }
    }

    /// Bytes of one slot.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Bytes of one checkpoint of every variant.
    pub fn checkpoint_bytes(&self) -> u64 {
        self.checkpoint_bytes
    }

    /// Memory of every device of a placement.
    pub fn memory(&self, placement: &Placement, sweep: bool) -> Vec<DeviceMemory> {
        let layout = layout(placement, sweep);
        let devices: Vec<u32> = match self.kind {
            Kind::Cpu => vec![0],
            Kind::Gpu => {
                let mut all: Vec<u32> = placement.targets.iter().chain(&placement.drafters).copied().collect();
                all.sort_unstable();
                all.dedup();
                all
            }
        };
        devices.into_iter().map(|device| self.device_memory(device, placement, sweep, &layout)).collect()
    }

    fn device_memory(&self, device: u32, placement: &Placement, sweep: bool, layout: &Layout) -> DeviceMemory {
        let here = |list: &[u32], i: usize| self.kind == Kind::Cpu || list[i] == device;
        let targets = (0..placement.targets.len()).filter(|&i| here(&placement.targets, i)).map(|_| &self.capture);
        // Replicas run one program on every device; a sweep has one per drafter.
        let mine: Vec<usize> = (0..placement.drafters.len()).filter(|&i| here(&placement.drafters, i)).collect();
        let drafters = mine.iter().map(|&i| &self.drafters[if sweep { i } else { 0 }].1);
        let mut parts: BTreeMap<&'static str, u64> = BTreeMap::new();
        let mut frozen: BTreeMap<&(String, usize), u64> = BTreeMap::new();
        let mut arenas = Vec::new();
        for planned in targets.chain(drafters) {
            *parts.entry("scratch of ops").or_default() += planned.scratch_bytes;
            frozen.extend(planned.frozen.iter().map(|(k, v)| (k, *v)));
            for region in Region::ALL {
                match region {
                    Region::Frozen | Region::Slot => {}
                    Region::Arena => arenas.push(planned.plan.bytes(region) as u64),
                    _ => *parts.entry(region.title()).or_default() += planned.plan.bytes(region) as u64,
                }
            }
        }
        parts.insert(Region::Frozen.title(), frozen.values().sum());
        // Workers of one device run at the same time, so that none may write another's scratch region.
        let arena: u64 = arenas.iter().sum();
        parts.insert(Region::Arena.title(), arena);
        // A drafter's device holds its slots; a sweep's only pool lies with the first drafter.
        let pools = if sweep { usize::from(mine.contains(&0)) } else { mine.len() };
        parts.insert("slots", (pools * layout.slots_per_pool()) as u64 * self.slot_bytes);
        if self.kind == Kind::Cpu {
            parts.insert("snapshots to save", self.snapshot_bytes);
        }
        let order = [
            Region::Frozen.title(),
            Region::Weight.title(),
            Region::State.title(),
            Region::Grad.title(),
            Region::Step.title(),
            Region::Arena.title(),
            "slots",
            Region::Input.title(),
            Region::Output.title(),
            "scratch of ops",
            "snapshots to save",
        ];
        let parts: Vec<Part> = order
            .iter()
            .filter_map(|&name| parts.get(name).filter(|b| **b > 0).map(|&size_bytes| Part { name: name.into(), size_bytes }))
            .collect();
        let device = match self.kind {
            Kind::Cpu => "cpu".to_owned(),
            Kind::Gpu => format!("gpu {device}"),
        };
        DeviceMemory { device, total_bytes: parts.iter().map(|p| p.size_bytes).sum(), parts }
    }

    /// FLOPs of an average batch of epoch 0; of all drafters in a sweep.
    pub fn flops(&self, table: &StartTable, micro_blocks: usize) -> BatchFlops {
        let blocks = table.blocks_mean / micro_blocks as f64;
        let micro_batches = blocks.ceil().max(1.0);
        let phase = self.capture.capture_phase.expect("the capture program has its phase");
        let mut flops = BatchFlops {
            target: table.fill * self.capture.useful(phase),
            drafter: 0.0,
            target_executed: self.capture.executed(phase),
            drafter_executed: 0.0,
            micro_batches: micro_batches as u64,
        };
        for (_, planned, program) in &self.drafters {
            let p = &program.passes;
            flops.drafter +=
                table.fill * (planned.useful(p.context) + planned.useful(p.context_backward)) + blocks * planned.useful(p.micro);
            flops.drafter_executed +=
                planned.executed(p.context) + planned.executed(p.context_backward) + micro_batches * planned.executed(p.micro);
        }
        flops
    }
}

/// The conveyor's shape for a placement.
pub fn layout(placement: &Placement, sweep: bool) -> Layout {
    Layout {
        targets: placement.targets.len(),
        drafters: placement.drafters.len(),
        mode: if sweep { Mode::Sweep } else { Mode::Replicas },
        assignment: Assignment::FirstFree,
        queue_depth: 1,
    }
}

/// The split of `gpus` over targets and drafters that takes the least time per batch; with one GPU both share it.
pub fn best_split(gpus: u32, flops: &BatchFlops) -> Placement {
    if gpus == 1 {
        return Placement { targets: vec![0], drafters: vec![0] };
    }
    let time = |t: u32| (flops.target_executed / f64::from(t)).max(flops.drafter_executed / f64::from(gpus - t));
    let targets = (1..gpus).min_by(|&a, &b| time(a).total_cmp(&time(b))).expect("there are at least two GPUs");
    Placement { targets: (0..targets).collect(), drafters: (targets..gpus).collect() }
}

/// FLOPs between two batches on the slowest device: what a rate is divided into.
pub fn bottleneck(placement: &Placement, flops: &BatchFlops, kind: Kind) -> f64 {
    let shared = kind == Kind::Cpu || placement.targets.iter().any(|t| placement.drafters.contains(t));
    if shared {
        return flops.target_executed + flops.drafter_executed;
    }
    (flops.target_executed / placement.targets.len() as f64).max(flops.drafter_executed / placement.drafters.len() as f64)
}

/// Keys that, changed alone, make every device of the placement fit into `limit`.
pub fn knobs(setup: &Setup, kind: Kind, placement: &Placement, limit: u64) -> Vec<String> {
    let sweep = setup.variants[0].name.is_some();
    let need = |batch: &BatchSection| {
        let memory = Programs::new(setup, batch, kind).memory(placement, sweep);
        memory.iter().map(|d| d.total_bytes).max().unwrap_or(0)
    };
    let base = &setup.config.batch;
    let mut found = Vec::new();
    let mut micro = BatchSection { ..base.clone() };
    while micro.micro_blocks > 1 {
        micro.micro_blocks /= 2;
        if need(&micro) <= limit {
            found.push(format!("batch.micro_blocks={} ({})", micro.micro_blocks, bytes(need(&micro))));
            break;
        }
    }
    if !base.recompute {
        let recompute = BatchSection { recompute: true, ..base.clone() };
        if need(&recompute) <= limit {
            found.push(format!("batch.recompute=true ({})", bytes(need(&recompute))));
        }
    }
    let longest = longest_sample(setup);
    let mut smaller = base.clone();
    while smaller.token_budget > longest {
        smaller.token_budget = (smaller.token_budget / 2).max(longest);
        smaller.micro_blocks = smaller.micro_blocks.min(default_max_blocks(smaller.token_budget));
        if need(&smaller) <= limit {
            found.push(format!("batch.token_budget={} ({})", smaller.token_budget, bytes(need(&smaller))));
            break;
        }
    }
    if found.is_empty() {
        let least = BatchSection { recompute: true, micro_blocks: 1, token_budget: longest, ..base.clone() };
        if need(&least) <= limit {
            found.push(format!(
                "batch.token_budget={longest} batch.micro_blocks=1 batch.recompute=true together ({})",
                bytes(need(&least))
            ));
        }
    }
    found
}

fn longest_sample(setup: &Setup) -> u32 {
    let schedule = setup.builder.schedule();
    schedule.train_rows().iter().chain(schedule.held_out_rows()).map(|&s| schedule.length(s)).max().unwrap_or(1)
}

/// Bytes that programs may still take on this machine, by the kernel's own account; `None` where there is none.
pub fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kb| kb * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flops(target: f64, drafter: f64) -> BatchFlops {
        BatchFlops { target, drafter, target_executed: target, drafter_executed: drafter, micro_batches: 1 }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn the_workspace_is_what_executors_take() {
        assert_eq!(PRODUCT_WORKSPACE_BYTES, drafthorse_cuda::WORKSPACE_BYTES as u64);
    }

    #[test]
    fn gpus_go_where_the_work_is() {
        let split = best_split(8, &flops(5.0, 3.0));
        assert_eq!((split.targets.len(), split.drafters.len()), (5, 3));
        assert_eq!(split.drafters, [5, 6, 7]);
        assert_eq!(best_split(2, &flops(1.0, 100.0)).targets, [0]);
        assert_eq!(best_split(1, &flops(1.0, 1.0)).drafters, [0]);
    }

    #[test]
    fn the_slowest_device_sets_the_pace() {
        let f = flops(10.0, 6.0);
        let apart = Placement { targets: vec![0, 1], drafters: vec![2] };
        assert_eq!(bottleneck(&apart, &f, Kind::Gpu), 6.0);
        assert_eq!(bottleneck(&apart, &f, Kind::Cpu), 16.0);
        assert_eq!(bottleneck(&Placement { targets: vec![0], drafters: vec![0] }, &f, Kind::Gpu), 16.0);
    }
}
