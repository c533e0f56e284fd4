//! The one comparator: length, then finiteness, then every element against its own bound.
//!
//! Job: say whether two tensors agree, and when they do not, where and by how much. Refuses one number for a whole tensor
//! (a zeroed tile hides in it) and maxima folded over floats (`f64::max` drops NaN). Invariants: a NaN or infinity on either
//! side is a failure; a bound of 0 demands equality; a NaN bound is a failure.
//!
//! The error model of a sum of k products, `eps·|y| + sqrt(k)·2^-24·Σ|ab| + 2·eps'·(Σ(ab)²)^½`, has three parts: the result is
//! rounded once to its stored type (eps), partial sums are rounded in fp32, and factors that an op itself forms and rounds to the
//! activation type (eps') before it multiplies them (attention's P, the head's p - onehot) carry independent errors, hence the
//! root of squares.

/// Largest relative error of rounding to binary32.
pub const EPS_F32: f64 = 1.0 / (1u64 << 24) as f64;

/// Largest relative error of rounding to bfloat16.
pub const EPS_BF16: f64 = 1.0 / 256.0;

/// Far above what fp32 loses by underflow in any sum here, far below any value that matters: 2^-110.
const UNDERFLOW: f64 = 1.0 / (1u128 << 110) as f64;

/// What the error model needs to know of each element of a sum, beside its value.
#[derive(Clone, Debug, PartialEq)]
pub struct SumMass {
    /// Terms that are added, k.
    pub terms: usize,
    /// Σ|ab| of each element.
    pub abs: Vec<f64>,
    /// (Σ(ab)²)^½ over the terms in which a factor was rounded to the activation type inside the op; empty when there are none.
    pub rounded: Vec<f64>,
}

/// How far an element may lie from what is wanted.
#[derive(Clone, Copy, Debug)]
pub enum Bound<'a> {
    /// Equality.
    Exact,
    /// `abs + rel·|want|`.
    AbsRel {
        /// Absolute part.
        abs: f64,
        /// Relative part.
        rel: f64,
    },
    /// One bound per element.
    PerElement(&'a [f64]),
    /// `slack · (eps·|want| + sqrt(k)·2^-24·Σ|ab| + 2·eps'·(Σ(ab)²)^½)`.
    Sum {
        /// Factor on the whole model.
        slack: f64,
        /// Largest relative rounding error of the result's stored type: [`EPS_F32`] or [`EPS_BF16`].
        eps: f64,
        /// The same of the type that factors are rounded to inside the op, eps'.
        inner_eps: f64,
        /// Per-element mass.
        mass: &'a SumMass,
    },
}

impl Bound<'_> {
    /// The bound of element `i`, whose wanted value is `want`.
    fn at(&self, i: usize, want: f64) -> f64 {
        match self {
            Bound::Exact => 0.0,
            Bound::AbsRel { abs, rel } => abs + rel * want.abs(),
            Bound::PerElement(bounds) => bounds[i],
            Bound::Sum { slack, eps, inner_eps, mass } => {
                let rounded = mass.rounded.get(i).copied().unwrap_or(0.0);
                // Where there is arithmetic at all, its intermediate values may fall below the normal range of fp32.
                let underflow = if mass.abs[i] > 0.0 { UNDERFLOW } else { 0.0 };
                slack * (eps * want.abs() + (mass.terms as f64).sqrt() * EPS_F32 * mass.abs[i] + 2.0 * inner_eps * rounded)
                    + underflow
            }
        }
    }

    fn len(&self) -> Option<usize> {
        match self {
            Bound::Exact | Bound::AbsRel { .. } => None,
            Bound::PerElement(bounds) => Some(bounds.len()),
            Bound::Sum { mass, .. } => Some(mass.abs.len()),
        }
    }
}

/// Why a comparison failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Mismatch {
    /// Lengths differ.
    #[error("`{name}`: {what} has {got} elements, the shape {shape:?} has {want}")]
    Length {
        /// The tensor.
        name: String,
        /// Which operand.
        what: &'static str,
        /// Its elements.
        got: usize,
        /// Elements of the shape.
        want: usize,
        /// The shape.
        shape: Vec<usize>,
    },
    /// A NaN or an infinity.
    #[error("`{name}`: {count} of {total} {what} values are not finite, first at {index:?}: {value}")]
    NotFinite {
        /// The tensor.
        name: String,
        /// Which operand.
        what: &'static str,
        /// How many.
        count: usize,
        /// Out of how many.
        total: usize,
        /// Coordinates of the first.
        index: Vec<usize>,
        /// Its value.
        value: f64,
    },
    /// Elements outside their bounds.
    #[error(
        "`{name}`: {count} of {total} elements out of bounds, worst at {index:?}: got {got:e}, wanted {want:e} within {bound:e}"
    )]
    Values {
        /// The tensor.
        name: String,
        /// How many.
        count: usize,
        /// Out of how many.
        total: usize,
        /// Coordinates of the element with the largest error in units of its bound.
        index: Vec<usize>,
        /// What it is.
        got: f64,
        /// What it should be.
        want: f64,
        /// How far it may be off.
        bound: f64,
    },
}

/// Compares `got` with `want`, both row-major of shape `shape`.
///
/// # Errors
/// [`Mismatch`], which names the tensor and the worst element.
pub fn compare<G, W>(name: &str, shape: &[usize], got: &[G], want: &[W], bound: Bound<'_>) -> Result<(), Mismatch>
where
    G: Copy + Into<f64>,
    W: Copy + Into<f64>,
{
    let total: usize = shape.iter().product();
    let length = |what, got| Mismatch::Length { name: name.to_owned(), what, got, want: total, shape: shape.to_vec() };
    if got.len() != total {
        return Err(length("what was computed", got.len()));
    }
    if want.len() != total {
        return Err(length("what is wanted", want.len()));
    }
    if let Some(n) = bound.len().filter(|&n| n != total) {
        return Err(length("the bound", n));
    }
    finite(name, shape, "computed", got)?;
    finite(name, shape, "wanted", want)?;
    let (mut count, mut worst, mut worst_excess) = (0, 0, -1.0);
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let (g, w): (f64, f64) = (g.into(), w.into());
        let (error, limit) = ((g - w).abs(), bound.at(i, w));
        if error <= limit {
            continue;
        }
        count += 1;
        // A bound of 0 gives infinity, a NaN bound NaN: both are as bad as can be.
        let excess = if limit > 0.0 { error / limit } else { f64::INFINITY };
        if excess > worst_excess {
            (worst, worst_excess) = (i, excess);
        }
    }
    if count == 0 {
        return Ok(());
    }
    let (got, want) = (got[worst].into(), want[worst].into());
    Err(Mismatch::Values {
        name: name.to_owned(),
        count,
        total,
        index: coordinates(worst, shape),
        got,
        want,
        bound: bound.at(worst, want),
    })
}

/// Row-major coordinates of element `flat`.
pub fn coordinates(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &extent) in shape.iter().enumerate().rev() {
        index[i] = flat % extent;
        flat /= extent;
    }
    index
}

fn finite<T: Copy + Into<f64>>(name: &str, shape: &[usize], what: &'static str, values: &[T]) -> Result<(), Mismatch> {
    let bad = |&&v: &&T| !Into::<f64>::into(v).is_finite();
    let Some(first) = values.iter().position(|v| bad(&v)) else { return Ok(()) };
    Err(Mismatch::NotFinite {
        name: name.to_owned(),
        what,
        count: values.iter().filter(bad).count(),
        total: values.len(),
        index: coordinates(first, shape),
        value: values[first].into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::Rng;

    const SHAPE: [usize; 2] = [32, 48];
    const K: usize = 64;

    /// A GEMM in f64 with its mass, and the same in f32 (or rounded to bf16), with the last `skip` terms left out.
    fn gemm(skip: usize, store: fn(f32) -> f32) -> (Vec<f32>, Vec<f64>, SumMass) {
        let mut rng = Rng::new(7);
        let (a, b) = (rng.normals(SHAPE[0] * K, 1.0), rng.normals(SHAPE[1] * K, 1.0));
        let (mut got, mut want, mut abs) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..SHAPE[0] {
            for j in 0..SHAPE[1] {
                let terms = |k: usize| (a[i * K + k] as f32, b[j * K + k] as f32);
                got.push(store((0..K - skip).map(terms).map(|(x, y)| x * y).sum()));
                want.push((0..K).map(terms).map(|(x, y)| f64::from(x) * f64::from(y)).sum());
                abs.push((0..K).map(terms).map(|(x, y)| f64::from(x * y).abs()).sum());
            }
        }
        (got, want, SumMass { terms: K, abs, rounded: Vec::new() })
    }

    fn bf16(x: f32) -> f32 {
        drafthorse_graph::dtype::round_bf16(x)
    }

    fn check(got: &[f32], want: &[f64], mass: &SumMass, eps: f64) -> Result<(), Mismatch> {
        compare("y", &SHAPE, got, want, Bound::Sum { slack: 1.05, eps, inner_eps: eps, mass })
    }

    #[test]
    fn correct_sums_pass_in_both_types() {
        for (store, eps) in [((|x| x) as fn(f32) -> f32, EPS_F32), (bf16, EPS_BF16)] {
            let (got, want, mass) = gemm(0, store);
            check(&got, &want, &mass, eps).unwrap();
        }
    }

    #[test]
    fn every_planted_fault_is_found_in_both_types() {
        for (store, eps) in [((|x| x) as fn(f32) -> f32, EPS_F32), (bf16, EPS_BF16)] {
            let (good, want, mass) = gemm(0, store);
            let mut nan = good.clone();
            nan.fill(f32::NAN);
            assert!(matches!(check(&nan, &want, &mass, eps), Err(Mismatch::NotFinite { count, .. }) if count == good.len()));
            let mut tile = good.clone();
            for i in 8..16 {
                tile[i * SHAPE[1] + 16..i * SHAPE[1] + 24].fill(0.0);
            }
            assert!(matches!(check(&tile, &want, &mass, eps), Err(Mismatch::Values { count: 57..=64, .. })));
            let mut sign = good.clone();
            sign[5] = -sign[5];
            assert!(matches!(check(&sign, &want, &mass, eps), Err(Mismatch::Values { count: 1, .. })));
            let mut one = good.clone();
            let at = 7 * SHAPE[1] + 3;
            one[at] += 3.0 * (eps * want[at].abs() + 8.0 * EPS_F32 * mass.abs[at]) as f32;
            let found = check(&one, &want, &mass, eps).unwrap_err();
            assert!(matches!(found, Mismatch::Values { count: 1, ref index, .. } if index == &[7, 3]), "{found}");
            let (dropped, _, _) = gemm(1, store);
            assert!(matches!(check(&dropped, &want, &mass, eps), Err(Mismatch::Values { .. })));
        }
    }

    #[test]
    fn an_unusable_comparison_is_a_failure() {
        let nan_bound = [f64::NAN, 1.0];
        assert!(compare("y", &[2], &[1.0, 1.0], &[1.0, 1.0], Bound::PerElement(&nan_bound)).is_err(), "NaN bound");
        assert!(compare("y", &[2], &[1.0], &[1.0, 1.0], Bound::Exact).is_err(), "short");
        assert!(compare("y", &[2], &[1.0, 1.0], &[1.0], Bound::Exact).is_err(), "short");
        assert!(compare("y", &[2], &[1.0, 1.0], &[1.0, 1.0], Bound::PerElement(&[1.0])).is_err(), "short bound");
        assert!(
            compare("y", &[1], &[f64::INFINITY], &[f64::INFINITY], Bound::Exact).is_err(),
            "infinity equals itself, yet is no result"
        );
        assert!(compare("y", &[1], &[f64::MIN_POSITIVE], &[0.0], Bound::Exact).is_err(), "exact");
        assert!(compare("y", &[1], &[1.0 + 2e-3], &[1.0], Bound::AbsRel { abs: 0.0, rel: 1e-3 }).is_err());
        compare("y", &[1], &[1.0 + 5e-4], &[1.0], Bound::AbsRel { abs: 0.0, rel: 1e-3 }).unwrap();
        compare::<f64, f64>("y", &[0, 3], &[], &[], Bound::Exact).unwrap();
    }

    #[test]
    fn the_message_says_where_and_by_how_much() {
        let mut got = [0.0f32; 24];
        got[17] = 2.0;
        got[3] = 1.0;
        let found = compare("layers.0.qkv", &[2, 3, 4], &got, &[0.0f32; 24], Bound::AbsRel { abs: 0.5, rel: 0.0 }).unwrap_err();
        assert_eq!(
            found.to_string(),
            "`layers.0.qkv`: 2 of 24 elements out of bounds, worst at [1, 1, 1]: got 2e0, wanted 0e0 within 5e-1"
        );
    }
}
