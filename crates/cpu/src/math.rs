//! `exp` that vectorises, and dispatch to the widest vector unit the machine has.
//!
//! Job: the transcendental at the heart of softmax and SiLU. Refuses approximations worse than 2 ulp. Invariant: NaN stays NaN
//! (the non-finite guard depends on it).

/// Runs `f` compiled for the widest vector unit of this machine. Mark `f`'s inner functions `#[inline(always)]`.
pub fn wide<R>(f: impl FnOnce() -> R) -> R {
    struct Call<F>(F);
    impl<R, F: FnOnce() -> R> pulp::NullaryFnOnce for Call<F> {
        type Output = R;
        #[inline(always)]
        fn call(self) -> R {
            (self.0)()
        }
    }
    pulp::Arch::new().dispatch(Call(f))
}

/// e^x: Cody-Waite reduction by ln 2 and the degree-5 minimax polynomial of Cephes `expf` (S. Moshier). 0 below -87.33, +inf above 88.72.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // 1.5 · 2^23: adding it rounds to an integer, which is then the difference of the bit patterns.
    const MAGIC: f32 = 12_582_912.0;
    let bounded = if x < -87.336_54 { -87.336_54 } else { x };
    let bounded = if bounded > 88.722_83 { 88.722_83 } else { bounded };
    let shifted = bounded * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = bounded - n * 0.693_359_4;
    let r = r + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5e-1;
    let y = p * (r * r) + r + 1.0;
    // 2^n as two factors, so that n = 128 does not overflow the exponent field before the product does.
    let n = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let half = n >> 1;
    let scale = |e: i32| f32::from_bits((e.wrapping_add(127) << 23) as u32);
    let y = y * scale(half) * scale(n.wrapping_sub(half));
    let y = if x < -87.336_54 { 0.0 } else { y };
    if x > 88.722_83 { f32::INFINITY } else { y }
}

/// The largest element, NaN if any element is NaN.
#[inline(always)]
pub fn max(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut poison = [0.0f32; 16];
    let (chunks, tail) = row.as_chunks::<16>();
    for chunk in chunks {
        for i in 0..16 {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            poison[i] += chunk[i] * 0.0;
        }
    }
    let mut best = f32::NEG_INFINITY;
    let mut bad = 0.0;
    for i in 0..16 {
        best = if lanes[i] > best { lanes[i] } else { best };
        bad += poison[i];
    }
    for &x in tail {
        best = if x > best { x } else { best };
        bad += x * 0.0;
    }
    // ±inf times 0 is NaN too: an infinite logit is as fatal as a NaN one.
    best + bad
}

/// Replaces each element by `exp(x - shift)` and returns their sum (16 fixed lanes, then in order).
#[inline(always)]
pub fn exp_sum(row: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (chunks, tail) = row.as_chunks_mut::<16>();
    for chunk in chunks {
        for i in 0..16 {
            chunk[i] = exp(chunk[i] - shift);
            lanes[i] += chunk[i];
        }
    }
    if !tail.is_empty() {
        // A last chunk filled up with what becomes 0: short rows would spend most of their time in a scalar rest.
        let mut last = [f32::NEG_INFINITY; 16];
        last[..tail.len()].copy_from_slice(tail);
        for i in 0..16 {
            last[i] = exp(last[i] - shift);
            lanes[i] += last[i];
        }
        tail.copy_from_slice(&last[..tail.len()]);
    }
    let mut sum = 0.0;
    for lane in lanes {
        sum += lane;
    }
    sum
}

/// Σ a·b in 16 fixed lanes.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (ca, ta) = a.as_chunks::<16>();
    let (cb, tb) = b.as_chunks::<16>();
    for (x, y) in ca.iter().zip(cb) {
        for i in 0..16 {
            lanes[i] += x[i] * y[i];
        }
    }
    let mut sum = 0.0;
    for lane in lanes {
        sum += lane;
    }
    for (x, y) in ta.iter().zip(tb) {
        sum += x * y;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp_and_keeps_nan() {
        let mut worst = 0.0f64;
        for i in -87_000..88_700 {
            let x = i as f32 * 1e-3 + 3.3e-4;
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - want).abs() / want);
        }
        assert!(worst < 2.4e-7, "relative error {worst:e}");
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn max_propagates_nan_wherever_it_stands() {
        for at in 0..37 {
            let mut row = vec![1.0f32; 37];
            row[36 - at] = 5.0;
            assert_eq!(max(&row), 5.0);
            row[at] = f32::NAN;
            assert!(max(&row).is_nan(), "NaN at {at}");
        }
    }
}
