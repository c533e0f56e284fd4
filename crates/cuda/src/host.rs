//! What the host does to data on its way to and from a device: conversion of floats, and the ranges that indices must keep.
//!
//! Refuses devices. Invariant: an index that a kernel would read out of bounds never leaves the host.

use drafthorse_graph::op::Op;
use drafthorse_graph::{Program, Role, TensorId};
use std::collections::HashMap;
use std::ops::Range;

/// Ranges that index arrays written by the host must keep, from the ops that read them.
pub fn bounds(program: &Program) -> HashMap<TensorId, Range<i64>> {
    let mut bounds: HashMap<TensorId, Range<i64>> = HashMap::new();
    for node in program.phases().flat_map(|(_, p)| &p.nodes) {
        let rows = |t| program.get(t).rows() as i64;
        let bound = match &node.op {
            Op::Embed(op) => Some((op.ids, 0..rows(op.table))),
            Op::QkNormRope(op) => Some((op.rotary.positions, 0..rows(op.rotary.cos))),
            Op::ScatterRows(op) => Some((op.inverse, -1..rows(op.dy))),
            Op::KvAppend(op) => Some((op.cache.len, 0..rows(op.cache.k) - rows(op.k) + 1)),
            Op::CachedAttention(op) => Some((op.cache.len, 0..rows(op.cache.k) - rows(op.q) + 1)),
            _ => None,
        };
        if let Some((t, range)) = bound {
            let known = bounds.entry(t).or_insert_with(|| range.clone());
            *known = known.start.max(range.start)..known.end.min(range.end);
        }
    }
    bounds.retain(|&t, _| program.get(t).role == Role::Input);
    bounds
}

/// binary32 → bfloat16 bits, nearest even; NaN stays NaN.
pub fn narrow(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16) as u16
}

/// bfloat16 bits → binary32.
pub fn widen(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}
