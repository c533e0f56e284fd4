//! Properties of the memory plan over random programs of several phases.

use drafthorse_graph::plan::{ALIGN, Region};
use drafthorse_graph::{DType, PhaseId, Plan, Program, Role, Storage, TensorId};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// One op of a random phase: which op, which earlier tensor it reads, and an output width.
type Choice = (u8, usize, usize);

const ROWS: usize = 5;

/// Phases of random ops; an op may read what an earlier phase wrote, which promotes it.
fn build(phases: &[Vec<Choice>]) -> Program {
    let mut program = Program::new(DType::BF16);
    let mut made = vec![program.tensor("x", &[ROWS, 40], DType::BF16, Role::Input)];
    for (p, choices) in phases.iter().enumerate() {
        let mut phase = program.begin(format!("phase.{p}"));
        for (i, &(kind, from, width)) in choices.iter().enumerate() {
            let x = made[from % made.len()];
            let cols = phase.shape(x)[1];
            let weight = |phase: &mut drafthorse_graph::PhaseBuilder<'_>, shape: &[usize]| {
                phase.program.tensor(format!("w.{p}.{i}"), shape, DType::BF16, Role::Weight)
            };
            let y = match kind % 4 {
                0 | 1 => {
                    let w = weight(&mut phase, &[width, cols]);
                    phase.linear(x, w, None)
                }
                2 => {
                    let w = weight(&mut phase, &[cols]);
                    phase.add_rms_norm(x, x, w, 1e-6).0
                }
                _ if cols.is_multiple_of(2) => phase.swiglu(x),
                _ => continue,
            };
            made.push(y);
        }
    }
    program
}

fn programs() -> impl Strategy<Value = Program> {
    let choice = (any::<u8>(), 0usize..1000, 1usize..600);
    prop::collection::vec(prop::collection::vec(choice, 1..14), 1..4).prop_map(|phases| build(&phases))
}

/// First and last op of every arena tensor of a phase, worked out here and not by the plan.
fn lives(program: &Program, phase: PhaseId) -> BTreeMap<TensorId, (usize, usize)> {
    let mut lives = BTreeMap::new();
    for (i, node) in program.phase(phase).nodes.iter().enumerate() {
        node.op.for_each(|_, t| {
            if program.get(t).role == Role::Phase {
                lives.entry(t).or_insert((i, i)).1 = i;
            }
        });
    }
    lives
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn alive_tensors_never_overlap_and_the_arena_is_the_largest_phase(program in programs()) {
        for storage in [Storage::Wide, Storage::Declared] {
            let plan = Plan::new(&program, storage);
            let mut largest = 0;
            for (id, _) in program.phases() {
                let lives = lives(&program, id);
                let mut end_of_phase = 0;
                for (&a, &(a_first, a_last)) in &lives {
                    let pa = plan.place(a).expect("a touched tensor has a place");
                    prop_assert_eq!(pa.region, Region::Arena);
                    prop_assert_eq!(pa.bytes, program.get(a).len() * storage.bytes(program.get(a).dtype));
                    end_of_phase = end_of_phase.max(padded(pa.offset + pa.bytes));
                    for (&b, &(b_first, b_last)) in lives.range(..a) {
                        let pb = plan.place(b).expect("a touched tensor has a place");
                        let together = a_first <= b_last && b_first <= a_last;
                        let apart = pa.offset + pa.bytes <= pb.offset || pb.offset + pb.bytes <= pa.offset;
                        prop_assert!(!together || apart, "`{}` over `{}`", program.get(a).name, program.get(b).name);
                    }
                }
                prop_assert_eq!(plan.phases[id.index()].arena_bytes, end_of_phase);
                largest = largest.max(end_of_phase);
                let sizes = |t: &TensorId| padded(plan.place(*t).expect("placed").bytes);
                let peak = (0..program.phase(id).nodes.len())
                    .map(|i| lives.iter().filter(|&(_, &(f, l))| f <= i && i <= l).map(|(t, _)| sizes(t)).sum::<usize>())
                    .max();
                prop_assert!(peak.unwrap_or(0) <= end_of_phase && end_of_phase <= lives.keys().map(sizes).sum());
            }
            prop_assert_eq!(plan.bytes(Region::Arena), largest);
        }
    }

    #[test]
    fn offsets_are_aligned_and_other_regions_are_packed_without_overlap(program in programs()) {
        let plan = Plan::new(&program, Storage::Declared);
        let mut ends: BTreeMap<Region, usize> = BTreeMap::new();
        for (id, tensor) in program.tensors() {
            let Some(place) = plan.place(id) else {
                prop_assert_eq!(tensor.role, Role::Phase);
                continue;
            };
            prop_assert_eq!(place.offset % ALIGN, 0);
            prop_assert!(place.offset + place.bytes <= plan.bytes(place.region));
            if tensor.role != Role::Phase {
                let end = ends.entry(place.region).or_insert(0);
                prop_assert_eq!(place.region, Region::of(tensor.role));
                prop_assert!(place.offset >= *end, "`{}` overlaps its predecessor", tensor.name);
                *end = place.offset + place.bytes;
            }
        }
        prop_assert_eq!(plan.total_bytes(), Region::ALL.iter().map(|&r| plan.bytes(r)).sum::<usize>() - plan.bytes(Region::Slot));
    }

    #[test]
    fn one_program_has_one_plan(phases in prop::collection::vec(prop::collection::vec((any::<u8>(), 0usize..1000, 1usize..600), 1..14), 1..4)) {
        let (a, b) = (build(&phases), build(&phases));
        let (pa, pb) = (Plan::new(&a, Storage::Declared), Plan::new(&b, Storage::Declared));
        for (id, _) in a.tensors() {
            prop_assert_eq!(pa.place(id), pb.place(id));
        }
    }

    #[test]
    fn what_a_later_phase_touches_is_promoted(program in programs()) {
        let mut touched: BTreeMap<TensorId, PhaseId> = BTreeMap::new();
        for (id, phase) in program.phases() {
            for node in &phase.nodes {
                let mut foreign = Vec::new();
                node.op.for_each(|_, t| {
                    if *touched.entry(t).or_insert(id) != id {
                        foreign.push(t);
                    }
                });
                for t in foreign {
                    prop_assert_ne!(program.get(t).role, Role::Phase, "`{}` would be recycled", program.get(t).name);
                }
            }
        }
    }
}

#[test]
fn a_chain_needs_two_tensors_whatever_its_length() {
    let arena = |length: usize| {
        let mut program = Program::new(DType::BF16);
        let x = program.tensor("x", &[64, 64], DType::BF16, Role::Input);
        let w = program.tensor("w", &[64, 64], DType::BF16, Role::Weight);
        let mut phase = program.begin("chain");
        (0..length).fold(x, |x, _| phase.linear(x, w, None));
        Plan::new(&program, Storage::Declared).bytes(Region::Arena)
    };
    assert_eq!(arena(2), 2 * 64 * 64 * 2);
    assert_eq!(arena(30), arena(2));
}
