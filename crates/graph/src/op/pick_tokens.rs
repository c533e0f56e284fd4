//! `PickTokens`: what decoding needs to know of a row of logits.
//!
//! logits `[R, V]` F32, finite, V at least 2; temperature `[1]` F32, uniform `[R]` F32 in [0, 1), probe `[R]` I32 (a drafted token, or -1).
//! Per row:
//!  - `argmax` I32 and `top2` F32 `[R, 2]`: the largest and second largest logit (lowest index wins a tie);
//!  - `prob` F32: p(probe) with `p = softmax(z / temperature)`; at temperature 0, 1 if the probe is the argmax else 0; 0 for probe -1;
//!  - `drawn` I32: a sample of p *without the probe* (of p itself for probe -1) by inverse CDF over ascending ids at `uniform`;
//!    at temperature 0 the argmax. Above 0 never the probe: the masses of the rest are `exp((z - m) / temperature)` with m the largest
//!    logit of the rest, and their sum is taken over the rest, so that the draw is exact even where p(probe) rounds to 1.
//!
//! With these, speculative sampling is lossless: accept the probe with probability p(probe), else emit `drawn`.
//! Source: Leviathan et al. 2023, arXiv 2211.17192, algorithm 1, for a draft distribution that is a point mass. Sums fp32.

use super::{Access, Contract};
use crate::dtype::DType;
use crate::program::{PhaseBuilder, Program, TensorId};

/// See the module.
#[derive(Clone, Debug)]
pub struct PickTokens {
    /// `[R, V]` F32.
    pub logits: TensorId,
    /// `[1]` F32.
    pub temperature: TensorId,
    /// `[R]` F32.
    pub uniform: TensorId,
    /// `[R]` I32.
    pub probe: TensorId,
    /// Results.
    pub picks: Picks,
}

/// Results of [`PickTokens`], one row each.
#[derive(Clone, Copy, Debug)]
pub struct Picks {
    /// `[R]` I32.
    pub argmax: TensorId,
    /// `[R, 2]` F32.
    pub top2: TensorId,
    /// `[R]` F32.
    pub prob: TensorId,
    /// `[R]` I32.
    pub drawn: TensorId,
}

impl Contract for PickTokens {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        for t in [&mut self.logits, &mut self.temperature, &mut self.uniform, &mut self.probe] {
            f(Access::Read, t);
        }
        let p = &mut self.picks;
        for t in [&mut p.argmax, &mut p.top2, &mut p.prob, &mut p.drawn] {
            f(Access::Write, t);
        }
    }

    fn flops(&self, program: &Program) -> u64 {
        5 * program.get(self.logits).len() as u64
    }
}

impl PhaseBuilder<'_> {
    /// Appends the picks of `logits` `[R, V]` into caller-declared tensors.
    pub fn pick_tokens(&mut self, logits: TensorId, temperature: TensorId, uniform: TensorId, probe: TensorId, picks: Picks) {
        let lt = self.program.get(logits);
        assert_eq!(lt.dtype, DType::F32, "logits of decoding are F32");
        let rows = lt.rows();
        for t in [uniform, probe, picks.argmax, picks.prob, picks.drawn] {
            assert_eq!(self.program.get(t).len(), rows, "`{}` has one entry per row", self.program.get(t).name);
        }
        assert_eq!(self.shape(picks.top2), [rows, 2], "top2");
        self.push(PickTokens { logits, temperature, uniform, probe, picks }.into());
    }
}
