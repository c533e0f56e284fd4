//! The CUDA executor against the oracle: every case of the op suite in bf16 that the kernels cover, and exactly those refused that they do not.
//!
//! Job: outputs within the error model, captured graphs equal to single launches bit for bit, two runs equal bit for bit, both kernel families.
//! Refuses tolerances of its own. Skips loudly without a GPU; DRAFTHORSE_DEVICE_REQUIRED=1 makes that a failure.

mod common;

use common::{executor, options, store};
use drafthorse_cuda::{CudaError, FrozenStore, Options};
use drafthorse_graph::{DType, TensorId};
use drafthorse_testkit::op_suite::{self, Case, Outputs};
use drafthorse_testkit::oracle::Value;

/// Options under which a fault names its op.
fn careful() -> Options {
    Options { capture: false, check_each: true, ..options() }
}

/// The first tensor and element in which two results differ in a bit.
fn first_difference(case: &Case, a: &Outputs, b: &Outputs) -> Option<String> {
    let mut tensors: Vec<&TensorId> = a.keys().collect();
    tensors.sort_unstable();
    tensors.into_iter().find_map(|t| {
        let at = match (&a[t], &b[t]) {
            (Value::Float(x), Value::Float(y)) => x.iter().zip(y).position(|(x, y)| x.to_bits() != y.to_bits()),
            (Value::Int(x), Value::Int(y)) => x.iter().zip(y).position(|(x, y)| x != y),
            _ => Some(0),
        };
        at.map(|i| format!("case `{}`: `{}` differs at element {i}", case.name, case.program.get(*t).name))
    })
}

/// Runs each case, and says which were refused.
fn run(cases: &[Case], store: &FrozenStore, options: &Options) -> Vec<String> {
    let (mut refused, mut failures) = (Vec::new(), Vec::new());
    for case in cases {
        let exec = match executor(case, store, options) {
            Ok(exec) => exec,
            Err(CudaError::Unsupported { .. }) => {
                refused.push(case.name.clone());
                continue;
            }
            Err(e) => panic!("case `{}`: {e}", case.name),
        };
        match op_suite::execute(case, |_, _| exec) {
            Ok(outputs) => failures.extend(case.check(&case.expected(), &outputs).err().map(|e| e.to_string())),
            // After a device fault nothing that follows means anything.
            Err(e) => panic!("case `{}`: {e}\nfailures before it: {}", case.name, failures.join("\n")),
        }
    }
    assert!(failures.is_empty(), "{} of {} cases fail\n{}", failures.len(), cases.len(), failures.join("\n"));
    println!("{} cases passed, {} refused", cases.len() - refused.len(), refused.len());
    refused
}

/// Whether a case of the common suite has attention heads or cache rows that no kernel takes.
fn is_narrow(name: &str) -> bool {
    ["causal_attention_", "cached_attention_", "block_attention_", "mini_drafter", "kv_append_"]
        .iter()
        .any(|p| name.starts_with(p))
}

#[test]
fn every_case_of_the_common_suite_passes_or_is_refused_for_its_width() {
    let Some(store) = store("op suite") else { return };
    let cases = op_suite::suite(DType::BF16);
    let refused = run(&cases, &store, &careful());
    let expected: Vec<String> = cases.iter().map(|c| c.name.clone()).filter(|n| is_narrow(n)).collect();
    assert_eq!(refused, expected, "refused cases");
}

fn attention(dim: usize, options: &Options) {
    let Some(store) = store("attention suite") else { return };
    let cases = op_suite::suite_with_head_dim(DType::BF16, dim);
    let refused = run(&cases, &store, options);
    // There is no backward for heads of 256 elements.
    let expected: Vec<String> = cases
        .iter()
        .map(|c| c.name.clone())
        .filter(|n| dim == 256 && (n.starts_with("block_attention_bwd") || n.starts_with("mini_drafter")))
        .collect();
    assert_eq!(refused, expected, "refused cases");
}

#[test]
fn attention_with_heads_of_64() {
    attention(64, &careful());
}

#[test]
fn attention_with_heads_of_128() {
    attention(128, &careful());
}

#[test]
fn attention_with_heads_of_256() {
    attention(256, &careful());
}

#[test]
fn attention_without_wgmma() {
    for dim in [64, 128, 256] {
        attention(dim, &Options { hopper: false, ..careful() });
    }
}

#[test]
fn captured_graphs_equal_single_launches_and_runs_repeat_bit_for_bit() {
    let Some(store) = store("capture") else { return };
    let mut cases = op_suite::suite(DType::BF16);
    cases.retain(|c| !is_narrow(&c.name));
    cases.extend(op_suite::suite_with_head_dim(DType::BF16, 64));
    let algorithms = options().algorithms;
    let mut differences = Vec::new();
    for case in &cases {
        let outputs = |options: Options| {
            let options = Options { algorithms: algorithms.clone(), ..options };
            let exec = executor(case, &store, &options).unwrap_or_else(|e| panic!("case `{}`: {e}", case.name));
            op_suite::execute(case, |_, _| exec).unwrap_or_else(|e| panic!("case `{}`: {e}", case.name))
        };
        let single = outputs(careful());
        for what in ["captured", "captured again"] {
            differences.extend(first_difference(case, &single, &outputs(options())).map(|d| format!("{what}: {d}")));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
