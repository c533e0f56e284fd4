//! The curves of a run, kept small however long it is.
//!
//! Refuses: to keep everything; when a curve is full every second point goes.
//! Invariants: points are in order of step, one a step, the latest always among them; a launch that resumes takes back what lies after its checkpoint, and
//! one that does not starts the curves over.

use crate::event::{Envelope, Event};

/// Points kept per curve.
const LIMIT: usize = 4096;

/// One curve: `(step, value)`, finite values only. However thin it becomes, it ends with the latest point.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series {
    points: Vec<(f64, f64)>,
    /// One point in this many is kept; 0 stands for 1.
    stride: u64,
    seen: u64,
    /// The last point is there only until the next comes.
    provisional: bool,
}

impl Series {
    /// Adds a point; one that is not finite, or not after the last, is left out.
    pub fn push(&mut self, step: u64, value: f64) {
        let after_last = self.points.last().is_none_or(|&(last, _)| step as f64 > last);
        if !value.is_finite() || !after_last {
            return;
        }
        if self.provisional {
            self.points.pop();
        }
        self.points.push((step as f64, value));
        self.provisional = !self.seen.is_multiple_of(self.stride.max(1));
        self.seen += 1;
        if self.points.len() > LIMIT {
            let mut index = 0;
            self.points.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.stride = self.stride.max(1) * 2;
        }
    }

    /// The points.
    pub fn points(&self) -> &[(f64, f64)] {
        &self.points
    }

    fn cut_after(&mut self, step: u64) {
        let before = self.points.len();
        self.points.retain(|&(at, _)| at <= step as f64);
        self.provisional &= self.points.len() == before;
    }
}

/// The curves of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    /// Loss per step.
    pub loss: Series,
    /// Expected acceptance per step.
    pub expected_acceptance: Series,
    /// Tokens per second per step.
    pub tokens_per_s: Series,
    /// Held-out loss.
    pub held_out_loss: Series,
    /// Held-out expected acceptance.
    pub held_out_expected_acceptance: Series,
    /// Measured acceptance length.
    pub tau: Series,
}

impl History {
    /// Takes in the next event.
    pub fn apply(&mut self, envelope: &Envelope) {
        match &envelope.event {
            Event::Run(identity) => {
                let from = identity.resumed_from_step.unwrap_or(0);
                for series in [
                    &mut self.loss,
                    &mut self.expected_acceptance,
                    &mut self.tokens_per_s,
                    &mut self.held_out_loss,
                    &mut self.held_out_expected_acceptance,
                    &mut self.tau,
                ] {
                    series.cut_after(from);
                }
            }
            Event::Step(step) => {
                self.loss.push(step.step, step.loss);
                self.expected_acceptance.push(step.step, step.expected_acceptance);
                self.tokens_per_s.push(step.step, step.tokens_per_s);
            }
            Event::HeldOut(held_out) => {
                self.held_out_loss.push(held_out.step, held_out.loss);
                self.held_out_expected_acceptance.push(held_out.step, held_out.expected_acceptance);
                if let Some(tau) = held_out.tau {
                    self.tau.push(held_out.step, tau);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Identity, Step};

    #[test]
    fn a_long_curve_stays_small_even_and_whole() {
        let mut series = Series::default();
        (1..=100_000).for_each(|n| series.push(n, n as f64));
        let points = series.points();
        assert!(points.len() > LIMIT / 2 && points.len() <= LIMIT);
        let gap = points[1].0 - points[0].0;
        assert!(points[..points.len() - 1].windows(2).all(|w| w[1].0 - w[0].0 == gap), "evenly spaced");
        assert_eq!((points[0], points[points.len() - 1]), ((1.0, 1.0), (100_000.0, 100_000.0)));
    }

    #[test]
    fn resumption_takes_back_and_odd_points_are_left_out() {
        let mut history = History::default();
        let mut seq = 0;
        let mut apply = |event| {
            seq += 1;
            history.apply(&Envelope { v: 1, t: 1, run_id: "r".into(), seq, event });
        };
        let step = |n, loss| Event::Step(Step { step: n, loss, ..Default::default() });
        for (n, loss) in [(1, 5.0), (2, 4.0), (2, 9.0), (3, f64::NAN), (4, 3.0)] {
            apply(step(n, loss));
        }
        apply(Event::Run(Identity { resumed_from_step: Some(2), ..Default::default() }));
        apply(step(3, 3.5));
        assert_eq!(history.loss.points(), [(1.0, 5.0), (2.0, 4.0), (3.0, 3.5)]);
        history.apply(&Envelope { v: 1, t: 1, run_id: "r2".into(), seq: 99, event: Event::Run(Identity::default()) });
        assert!(history.loss.points().is_empty());
    }
}
