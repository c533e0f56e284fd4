//! What the executor promises beside right numbers: nothing allocated after the gate, one graph a phase, bounds checked, faults named.
//!
//! Skips loudly without a GPU; DRAFTHORSE_DEVICE_REQUIRED=1 makes that a failure.

mod common;

use common::{executor, options, store};
use drafthorse_cuda::Options;
use drafthorse_graph::op::Embed;
use drafthorse_graph::{DType, ExecError, Executor, HostMut, HostRef, Program, Role, SlotArg};
use drafthorse_testkit::op_suite::{Case, MiniDrafterOptions, mini_drafter, suite};
use drafthorse_testkit::oracle::Value;
use std::sync::Arc;

fn drafter() -> Case {
    let options = MiniDrafterOptions { act: DType::BF16, layers: 3, window: None, recompute: false, head_dim: Some(64) };
    mini_drafter(options).case
}

fn fill(exec: &mut impl Executor, case: &Case) {
    for (t, value) in &case.values {
        match (case.program.get(*t).role, value) {
            (Role::Frozen | Role::Slot | Role::Phase, _) => {}
            (_, Value::Float(v)) => {
                let v: Vec<f32> = v.iter().map(|&x| x as f32).collect();
                exec.write(*t, HostRef::F32(&v)).unwrap();
            }
            (_, Value::Int(v)) => exec.write(*t, HostRef::I32(v)).unwrap(),
        }
    }
}

#[test]
fn after_prepare_nothing_is_allocated_or_timed_and_every_phase_is_one_graph() {
    let Some(store) = store("launch counts") else { return };
    let case = drafter();
    let options = options();
    let mut exec = executor(&case, &store, &options).unwrap();
    exec.prepare().unwrap();
    assert!(exec.products_timed() > 0 && options.algorithms.len() == exec.products_timed());
    fill(&mut exec, &case);
    let device = Arc::clone(store.device());
    let (allocations, bytes) = (device.allocations(), device.allocated_bytes());
    let free = device.memory().unwrap().free;
    for &phase in &case.phases {
        let (commands, graphs, direct) = exec.launches(phase);
        assert!(commands > 0 && graphs == 1 && direct == 0, "{commands} commands, {graphs} graphs, {direct} direct");
    }
    for _ in 0..20 {
        for &phase in &case.phases {
            exec.run(phase, SlotArg::None).unwrap();
        }
    }
    let stats = case.program.find("stats").unwrap();
    let mut out = [0.0f32; 8];
    exec.read(stats, HostMut::F32(&mut out)).unwrap();
    assert_eq!((out[3], out[7]), (1.0, 20.0), "20 steps were taken: {out:?}");
    assert_eq!((device.allocations(), device.allocated_bytes()), (allocations, bytes));
    assert_eq!(device.memory().unwrap().free, free, "device memory is constant to the byte");
    assert_eq!(exec.held_bytes(), exec.plan().total_bytes() as u64 + exec.extra_bytes());

    let mut again = executor(&case, &store, &Options { algorithms: Arc::clone(&options.algorithms), ..options.clone() }).unwrap();
    again.prepare().unwrap();
    assert_eq!(again.products_timed(), 0, "the second executor finds every algorithm in the table");
}

#[test]
fn an_index_outside_its_table_is_refused_before_it_reaches_the_device() {
    let Some(store) = store("bounds") else { return };
    let case = suite(DType::BF16).into_iter().find(|c| c.name == "embed").unwrap();
    let mut exec = executor(&case, &store, &options()).unwrap();
    let ids = case.program.find("ids").unwrap();
    let error = exec.write(ids, HostRef::I32(&[0, 1, 13, 2, 3, 4, 5, 6, 7])).unwrap_err().to_string();
    assert!(error.contains("`ids`") && error.contains("13"), "{error}");
    let error = exec.write(ids, HostRef::I32(&[0, 1])).unwrap_err().to_string();
    assert!(error.contains("takes 9") && error.contains("2 i32"), "{error}");
}

#[test]
fn slots_are_checked() {
    let Some(store) = store("slots") else { return };
    let case = suite(DType::BF16).into_iter().find(|c| c.name == "capture_through_slot").unwrap();
    let mut exec = executor(&case, &store, &options()).unwrap();
    let slot = exec.new_slot().unwrap();
    exec.prepare().unwrap();
    let refused = |r: Result<(), ExecError>| matches!(r, Err(ExecError::Slot { .. }));
    assert!(refused(exec.run(case.phases[0], SlotArg::None)));
    assert!(refused(exec.run(case.phases[0], SlotArg::Read(&slot))));
}

#[test]
fn a_program_in_f32_is_refused_by_name() {
    let Some(store) = store("dtypes") else { return };
    let mut program = Program::new(DType::F32);
    let ids = program.tensor("ids", &[3], DType::I32, Role::Input);
    let table = program.tensor("table", &[5, 8], DType::F32, Role::Weight);
    let y = program.tensor("y", &[3, 8], DType::F32, Role::Output);
    program.begin("p").push(Embed { ids, table, y }.into());
    let error = drafthorse_cuda::CudaExecutor::new(Arc::new(program), &store, options()).err().unwrap().to_string();
    assert!(error.contains("Embed(") && error.contains("`table` is F32"), "{error}");
}
