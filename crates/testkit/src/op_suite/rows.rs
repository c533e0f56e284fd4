//! Cases of the ops that move rows: `Embed`, `Capture`, `GatherRows`, `ScatterRows`, `KvAppend`, `Zero`.

use super::Case;
use super::build::Build;
use crate::inputs::compaction_arrays;
use drafthorse_graph::op::cached_attention::KvCache;
use drafthorse_graph::op::gather::Compaction;
use drafthorse_graph::op::{Capture, Embed, GatherRows, KvAppend, ScatterRows, Zero};
use drafthorse_graph::{DType, Role};

pub(super) fn cases(act: DType) -> Vec<Case> {
    let mut cases = vec![embed("embed", act, 13, 6, 9), embed("embed_one_row", act, 1, 130, 1)];
    cases.push(embed("embed_real_vocabulary", act, 151_936, 4, 7));
    cases.extend([capture_part(act), capture_through_slot(act)]);
    for (name, rows, chosen, room) in
        [("none", 9, 0, 4), ("some", 70, 33, 40), ("all", 17, 17, 17), ("one_of_one", 1, 1, 1), ("one_row_too_many", 5, 5, 6)]
    {
        cases.push(gather(&format!("gather_{name}"), act, rows, chosen, room));
        cases.push(scatter(&format!("scatter_{name}"), act, rows, chosen, room));
    }
    for (name, len, rows, capacity) in [("empty", 0, 3, 9), ("middle", 5, 1, 9), ("full", 4, 5, 9)] {
        cases.push(append(&format!("kv_append_{name}"), act, len, rows, capacity));
    }
    cases.push(zero(act));
    cases
}

fn embed(name: &str, act: DType, vocab: usize, h: usize, rows: usize) -> Case {
    let mut b = Build::new(name, act);
    let table = b.random("table", &[vocab, h], act, Role::Frozen, 1.0);
    let ids = b.rng.indices(rows, vocab);
    let ids = b.ints("ids", ids);
    let y = b.output("y", &[rows, h]);
    b.op(Embed { ids, table, y })
}

fn capture_part(act: DType) -> Case {
    let mut b = Build::new("capture_part", act);
    let src = b.input("src", &[7, 10], 1.0);
    let dst = b.random("dst", &[7, 13], act, Role::Step, 1.0);
    b.op(Capture { src, src_col: 3, dst, dst_col: 6, cols: 5 })
}

/// A slot's content cannot be read by the host, so one phase fills it and another copies it out, in other columns.
fn capture_through_slot(act: DType) -> Case {
    let mut b = Build::new("capture_through_slot", act);
    let (first, second) = (b.input("first", &[5, 6], 1.0), b.input("second", &[5, 6], 1.0));
    let slot = b.program.tensor("slot", &[5, 12], act, Role::Slot);
    let out = b.program.tensor("out", &[5, 12], act, Role::Step);
    let mut fill = b.program.begin("fill");
    fill.capture(first, 0, slot, 0, 6);
    fill.capture(second, 0, slot, 6, 6);
    let mut copy = b.program.begin("copy");
    copy.capture(slot, 6, out, 0, 6);
    copy.capture(slot, 0, out, 6, 6);
    b.finish()
}

fn compaction(b: &mut Build, rows: usize, chosen: usize, room: usize) -> Compaction {
    let chosen = b.rng.choose(rows, chosen);
    let arrays = compaction_arrays(&chosen, rows, room);
    Compaction {
        rows: b.ints("rows", arrays.rows),
        inverse: b.ints("inverse", arrays.inverse),
        count: b.ints("count", arrays.count),
    }
}

fn gather(name: &str, act: DType, rows: usize, chosen: usize, room: usize) -> Case {
    let mut b = Build::new(name, act);
    let x = b.input("x", &[rows, 5], 1.0);
    let compaction = compaction(&mut b, rows, chosen, room);
    let y = b.output("y", &[room, 5]);
    b.op(GatherRows { x, compaction, y })
}

fn scatter(name: &str, act: DType, rows: usize, chosen: usize, room: usize) -> Case {
    let mut b = Build::new(name, act);
    let dy = b.input("dy", &[room, 5], 1.0);
    let inverse = compaction(&mut b, rows, chosen, room).inverse;
    let dx = b.output("dx", &[rows, 5]);
    b.op(ScatterRows { dy, inverse, dx })
}

fn append(name: &str, act: DType, len: usize, rows: usize, capacity: usize) -> Case {
    let mut b = Build::new(name, act);
    let (k, v) = (b.input("k", &[rows, 6], 1.0), b.input("v", &[rows, 6], 1.0));
    let cache = KvCache {
        k: b.random("cache.k", &[capacity, 6], act, Role::Step, 1.0),
        v: b.random("cache.v", &[capacity, 6], act, Role::Step, 1.0),
        len: b.ints("cache.len", vec![len as i32]),
    };
    b.op(KvAppend { k, v, cache })
}

fn zero(act: DType) -> Case {
    let mut b = Build::new("zero", act);
    let tensors = vec![
        b.program.tensor("grad", &[33, 7], DType::F32, Role::Grad),
        b.program.tensor("step", &[5], act, Role::Step),
        b.program.tensor("t", &[3], DType::I32, Role::State),
    ];
    b.op(Zero { tensors })
}
