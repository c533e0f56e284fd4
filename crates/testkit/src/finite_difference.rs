//! Central differences of a program, by the oracle in f64.
//!
//! Job: hold the gradients that [`drafthorse_graph::backward::differentiate`] forms to the only definition of a gradient that needs no derivation.
//! Refuses executors: fp32 differences say nothing at these step sizes. Invariant: every element is perturbed unless the
//! caller's `samples` says how many.

use crate::compare::{Bound, Mismatch, compare};
use crate::inputs::Rng;
use crate::oracle::{Rounding, Value, Values, run_phase};
use drafthorse_graph::{PhaseId, Program, TensorId};

/// What is checked.
pub struct GradientCheck<'a> {
    /// The program.
    pub program: &'a Program,
    /// Phases that compute the loss and the gradients, in order.
    pub phases: &'a [PhaseId],
    /// Content of every tensor that is read first.
    pub values: &'a Values,
    /// The scalar that is differentiated, read from the values after the phases.
    pub loss: &'a dyn Fn(&Values) -> f64,
    /// Pairs of a tensor and its gradient.
    pub pairs: &'a [(TensorId, TensorId)],
    /// Perturbed elements of each tensor; all of them where it has no more.
    pub samples: usize,
}

impl GradientCheck<'_> {
    /// Compares every gradient with `(loss(x + h) - loss(x - h)) / 2h`, h = 1e-5·(1 + |x|).
    ///
    /// The bound is 1e-6 of the gradient's magnitude plus 1e-8·(1 + |loss|): truncation error is of the order of h², and the
    /// difference of two losses loses 1e-16·|loss|/h.
    ///
    /// # Errors
    /// The first tensor whose gradient is wrong.
    pub fn run(&self) -> Result<(), Mismatch> {
        let mut rng = Rng::new(5);
        let base = self.after(self.values.clone());
        let loss = (self.loss)(&base);
        for &(x, gradient) in self.pairs {
            let len = self.program.get(x).len();
            let chosen = rng.choose(len, self.samples.min(len));
            let (mut got, mut want) = (Vec::new(), Vec::new());
            for i in chosen {
                got.push(base[&gradient].floats()[i]);
                want.push(self.difference(x, i));
            }
            let name = format!("gradient of {}", self.program.get(x).name);
            let bound = Bound::AbsRel { abs: 1e-8 * (1.0 + loss.abs()), rel: 1e-6 };
            compare(&name, &[got.len()], &got, &want, bound)?;
        }
        Ok(())
    }

    fn after(&self, mut values: Values) -> Values {
        for &phase in self.phases {
            run_phase(self.program, phase, &mut values, Rounding::None);
        }
        values
    }

    fn difference(&self, x: TensorId, i: usize) -> f64 {
        let moved = |by: f64| {
            let mut values = self.values.clone();
            let Some(Value::Float(v)) = values.get_mut(&x) else { panic!("`{}` has no floats", self.program.get(x).name) };
            v[i] += by;
            (self.loss)(&self.after(values))
        };
        let h = 1e-5 * (1.0 + self.values[&x].floats()[i].abs());
        (moved(h) - moved(-h)) / (2.0 * h)
    }
}
