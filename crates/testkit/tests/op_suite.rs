//! Proof of the op suite itself: the oracle's executor passes every case, and every planted fault is caught.

use drafthorse_graph::{DType, Op};
use drafthorse_testkit::op_suite::{self, Corruption};
use drafthorse_testkit::oracle::OracleExecutor;
use std::collections::{BTreeMap, BTreeSet};

fn prove(act: DType) {
    let mut planted: BTreeMap<String, usize> = BTreeMap::new();
    for case in op_suite::suite(act) {
        let outputs = op_suite::execute(&case, OracleExecutor::new).unwrap();
        let expected = case.expected();
        if let Err(e) = case.check(&expected, &outputs) {
            panic!("{act:?}: {e}");
        }
        for how in Corruption::ALL {
            for t in case.outputs() {
                let mut faulty = outputs.clone();
                if op_suite::corrupt(&case, &expected, &mut faulty, t, how) {
                    *planted.entry(format!("{how:?}")).or_default() += 1;
                    let name = &case.program.get(t).name;
                    assert!(
                        case.check(&expected, &faulty).is_err(),
                        "{act:?}: {}: {how:?} in `{name}` went unnoticed",
                        case.name
                    );
                }
                if how == Corruption::DropLastTerm {
                    break;
                }
            }
        }
    }
    for how in Corruption::ALL {
        assert!(planted[&format!("{how:?}")] >= 10, "few faults planted: {planted:?}");
    }
}

#[test]
fn every_fault_is_caught_in_f32() {
    prove(DType::F32);
}

#[test]
fn every_fault_is_caught_in_bf16() {
    prove(DType::BF16);
}

#[test]
fn every_op_has_a_case_and_names_are_unique() {
    let (mut ops, mut names) = (BTreeSet::new(), BTreeSet::new());
    for case in op_suite::suite(DType::F32) {
        assert!(names.insert(case.name.clone()), "two cases `{}`", case.name);
        for (_, phase) in case.program.phases() {
            ops.extend(phase.nodes.iter().map(|n| n.op.name()));
        }
    }
    // The match names every op: a new one does not compile until it is added here, and then needs a case.
    let all = |op: &Op| match op {
        Op::Embed(_) | Op::Linear(_) | Op::LinearDx(_) | Op::LinearDw(_) | Op::RmsNorm(_) | Op::RmsNormBwd(_) => 6,
        Op::QkNormRope(_) | Op::QkNormRopeBwd(_) | Op::SwiGlu(_) | Op::SwiGluBwd(_) => 10,
        Op::CausalAttention(_) | Op::KvAppend(_) | Op::CachedAttention(_) => 13,
        Op::BlockAttention(_) | Op::BlockAttentionBwd(_) | Op::Capture(_) | Op::GatherRows(_) | Op::ScatterRows(_) => 18,
        Op::HeadLoss(_) | Op::PickTokens(_) | Op::Zero(_) | Op::GradNorm(_) | Op::AdamW(_) => 23,
    };
    let _: fn(&Op) -> usize = all;
    assert_eq!(ops.len(), 23, "ops with a case: {ops:?}");
}
