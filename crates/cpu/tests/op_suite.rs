//! The CPU executor against the oracle: every case of the op suite, at both dtypes, on one thread and on three.
//!
//! Job: run each case, compare every output within the error model, prove that each planted fault in the executor's own results is caught,
//! and that neither the number of threads nor a second run changes a bit. Refuses tolerances of its own. Invariant: BF16 cases run with
//! rounding on, F32 cases without.

use drafthorse_cpu::{CpuExecutor, FrozenSet, Options};
use drafthorse_graph::{DType, Program, TensorId};
use drafthorse_testkit::op_suite::{self, Case, Corruption, FrozenData, Outputs};
use drafthorse_testkit::oracle::Value;
use std::collections::HashMap;
use std::sync::Arc;

fn executor(threads: usize, act: DType) -> impl Fn(Arc<Program>, HashMap<TensorId, FrozenData>) -> CpuExecutor {
    let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    move |program, content| {
        let name = |t: TensorId| program.get(t).name.clone();
        let frozen: FrozenSet = content.into_iter().map(|(t, FrozenData::F32(data))| (name(t), Arc::new(data))).collect();
        CpuExecutor::new(program, &frozen, Options { pool: Arc::clone(&pool), round: act == DType::BF16 }).unwrap()
    }
}

/// Bit patterns, so that -0 and 0 differ and NaN equals itself.
fn bits(outputs: &Outputs) -> Vec<(TensorId, Vec<u64>)> {
    let mut all: Vec<_> = outputs
        .iter()
        .map(|(&t, v)| match v {
            Value::Float(v) => (t, v.iter().map(|x| x.to_bits()).collect()),
            Value::Int(v) => (t, v.iter().map(|&x| x as u64).collect()),
        })
        .collect();
    all.sort_unstable_by_key(|(t, _): &(TensorId, Vec<u64>)| *t);
    all
}

fn passes(act: DType) {
    let make = executor(3, act);
    let failures: Vec<String> =
        op_suite::suite(act).iter().filter_map(|case| op_suite::run_case(case, &make).err()).map(|e| e.to_string()).collect();
    assert!(failures.is_empty(), "{act:?}: {} cases fail\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_case_passes_in_f32() {
    passes(DType::F32);
}

#[test]
fn every_case_passes_with_rounding_to_bf16() {
    passes(DType::BF16);
}

fn faults_are_caught(act: DType) {
    let make = executor(2, act);
    let mut planted: HashMap<String, usize> = HashMap::new();
    for case in op_suite::suite(act) {
        let good = op_suite::execute(&case, &make).unwrap();
        let expected = case.expected();
        for how in Corruption::ALL {
            for t in case.outputs() {
                let mut faulty = good.clone();
                if op_suite::corrupt(&case, &expected, &mut faulty, t, how) {
                    *planted.entry(format!("{how:?}")).or_default() += 1;
                    let name = &case.program.get(t).name;
                    assert!(case.check(&expected, &faulty).is_err(), "{act:?} {}: {how:?} in `{name}` unseen", case.name);
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
fn every_planted_fault_is_caught_in_f32() {
    faults_are_caught(DType::F32);
}

#[test]
fn every_planted_fault_is_caught_with_rounding_to_bf16() {
    faults_are_caught(DType::BF16);
}

fn same_bits(case: &Case, a: &Outputs, b: &Outputs, what: &str) {
    for ((t, x), (_, y)) in bits(a).into_iter().zip(bits(b)) {
        let at = x.iter().zip(&y).position(|(x, y)| x != y);
        assert_eq!(at, None, "case `{}`, `{}`: {what} differ", case.name, case.program.get(t).name);
    }
}

#[test]
fn threads_and_repetition_change_no_bit() {
    for act in [DType::F32, DType::BF16] {
        let (one, three) = (executor(1, act), executor(3, act));
        for case in op_suite::suite(act) {
            let first = op_suite::execute(&case, &one).unwrap();
            same_bits(&case, &first, &op_suite::execute(&case, &three).unwrap(), "one thread and three");
            same_bits(&case, &first, &op_suite::execute(&case, &one).unwrap(), "two runs");
        }
    }
}
