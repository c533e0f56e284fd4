//! `Capture`, naively. Columns of the destination that are not named keep what they held.

use super::Run;
use drafthorse_graph::op::Capture;

pub(super) fn capture(run: &mut Run<'_>, op: &Capture) {
    let (src, mut dst) = (run.floats(op.src), run.floats(op.dst));
    let (w_src, w_dst) = (run.cols(op.src), run.cols(op.dst));
    for t in 0..run.rows(op.dst) {
        for c in 0..op.cols {
            dst[t * w_dst + op.dst_col + c] = src[t * w_src + op.src_col + c];
        }
    }
    run.put_copy(op.dst, dst);
}
