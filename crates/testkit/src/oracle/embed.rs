//! `Embed`, naively. Refuses ids outside the table.

use super::{Run, row};
use drafthorse_graph::op::Embed;

pub(super) fn embed(run: &mut Run<'_>, op: &Embed) {
    let (ids, table) = (run.ints(op.ids), run.floats(op.table));
    let (vocab, h) = (run.rows(op.table), run.cols(op.table));
    let mut y = Vec::with_capacity(ids.len() * h);
    for id in ids {
        let at = row(id, vocab, "token id") * h;
        y.extend_from_slice(&table[at..at + h]);
    }
    run.put_copy(op.y, y);
}
