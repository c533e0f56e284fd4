//! `Embed`: `y[t] = table[ids[t]]`.
//!
//! ids `[T]` I32 in `0..V`, table `[V, H]`, y `[T, H]` in the activation dtype. The table is frozen: no gradient.
//! FLOPs 0; bytes: the ids, T rows of the table, y. An id outside the table is a bug of the batch builder; executors assert it.

use super::{Access, Contract};
use crate::backward::Backward;
use crate::program::{PhaseBuilder, Program, TensorId};

/// See the module.
#[derive(Clone, Debug)]
pub struct Embed {
    /// `[T]` I32.
    pub ids: TensorId,
    /// `[V, H]`.
    pub table: TensorId,
    /// `[T, H]`.
    pub y: TensorId,
}

impl Contract for Embed {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.ids);
        f(Access::Read, &mut self.table);
        f(Access::Write, &mut self.y);
    }

    fn flops(&self, _program: &Program) -> u64 {
        0
    }

    fn vjp(&self, backward: &mut Backward<'_, '_>) {
        assert!(!backward.wants(self.table), "the embedding table is frozen");
    }
}

impl PhaseBuilder<'_> {
    /// Appends an [`Embed`] and returns y `[T, H]`.
    pub fn embed(&mut self, ids: TensorId, table: TensorId) -> TensorId {
        let (rows, cols) = (self.program.get(ids).len(), self.program.get(table).cols());
        let y = self.act("embed", &[rows, cols]);
        self.push(Embed { ids, table, y }.into());
        y
    }
}
