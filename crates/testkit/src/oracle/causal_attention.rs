//! `CausalAttention`, naively: every row looks for its sample and attends all of its rows up to itself.

use super::Run;
use super::softmax_row::softmax_row;
use drafthorse_graph::op::CausalAttention;

pub(super) fn causal_attention(run: &mut Run<'_>, op: &CausalAttention) {
    let (q, k, v) = (run.floats(op.q), run.floats(op.k), run.floats(op.v));
    let (cu, samples) = (run.ints(op.packing.cu_seqlens), run.count(op.packing.n_seqs));
    let (d, group, rows) = (op.heads.dim, op.heads.group(), run.rows(op.q));
    let (q_cols, kv_cols) = (op.heads.q_cols(), op.heads.kv_cols());
    let scale = (d as f64).powf(-0.5);
    let (mut o, mut abs, mut rounded) = (vec![0.0; rows * q_cols], vec![0.0; rows * q_cols], vec![0.0; rows * q_cols]);
    for s in 0..samples {
        let (start, end) = (cu[s] as usize, cu[s + 1] as usize);
        for t in start..end {
            for h in 0..op.heads.q {
                let at = |j: usize| j * kv_cols + h / group * d;
                let keys: Vec<&[f64]> = (start..=t).map(|j| &k[at(j)..at(j) + d]).collect();
                let values: Vec<&[f64]> = (start..=t).map(|j| &v[at(j)..at(j) + d]).collect();
                let to = t * q_cols + h * d;
                let row = softmax_row(&q[to..to + d], &keys, &values, scale);
                o[to..to + d].copy_from_slice(&row.o);
                abs[to..to + d].copy_from_slice(&row.abs);
                rounded[to..to + d].copy_from_slice(&row.rounded);
            }
        }
    }
    run.put_rounded(op.o, o, rows + d, abs, rounded);
}
