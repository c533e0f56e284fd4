//! `GatherRows` compacts rows (`y[m] = x[rows[m]]`); `ScatterRows` is its backward.
//!
//! x `[R, H]`, rows `[M]` I32 of which `count` `[1]` I32 are valid, y `[M, H]`; rows of y past the count are zero. Backward:
//! `dx[r] = dy[inverse[r]]` where `inverse[r] ≥ 0`, else 0, with inverse `[R]` I32; both index arrays come from the host and are inverse to
//! each other (each row is gathered at most once), so no atomics are needed.

use super::{Access, Contract};
use crate::backward::Backward;
use crate::program::{PhaseBuilder, Program, TensorId};

/// The index arrays of a compaction.
#[derive(Clone, Copy, Debug)]
pub struct Compaction {
    /// `[M]` I32.
    pub rows: TensorId,
    /// `[R]` I32, -1 where a row is not gathered.
    pub inverse: TensorId,
    /// `[1]` I32.
    pub count: TensorId,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct GatherRows {
    /// `[R, H]`.
    pub x: TensorId,
    /// Index arrays; `inverse` is read by the backward only.
    pub compaction: Compaction,
    /// `[M, H]`.
    pub y: TensorId,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct ScatterRows {
    /// `[M, H]`.
    pub dy: TensorId,
    /// `[R]` I32.
    pub inverse: TensorId,
    /// `[R, H]`.
    pub dx: TensorId,
}

impl Contract for GatherRows {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.x);
        f(Access::Read, &mut self.compaction.rows);
        f(Access::Read, &mut self.compaction.count);
        f(Access::Write, &mut self.y);
    }

    fn flops(&self, _program: &Program) -> u64 {
        0
    }

    fn vjp(&self, backward: &mut Backward<'_, '_>) {
        let Some(dy) = backward.grad(self.y) else { return };
        let shape = backward.shape(self.x);
        let dx = backward.act("d_rows", &shape);
        backward.push(ScatterRows { dy, inverse: self.compaction.inverse, dx });
        backward.replace_grad(self.x, dx);
    }
}

impl Contract for ScatterRows {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.dy);
        f(Access::Read, &mut self.inverse);
        f(Access::Write, &mut self.dx);
    }

    fn flops(&self, _program: &Program) -> u64 {
        0
    }
}

impl PhaseBuilder<'_> {
    /// Appends a compaction of x's rows and returns y `[M, H]`.
    pub fn gather_rows(&mut self, x: TensorId, compaction: Compaction) -> TensorId {
        let shape = self.shape(x);
        assert_eq!(self.program.get(compaction.inverse).len(), shape[0], "inverse has one entry per row");
        let y = self.act("rows", &[self.program.get(compaction.rows).len(), shape[1]]);
        self.push(GatherRows { x, compaction, y }.into());
        y
    }
}
