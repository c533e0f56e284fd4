//! Element types of tensors as the plan declares them. What an executor stores may be wider: see [`crate::plan::Storage`].

/// Declared element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// Two's complement 32-bit integer: token ids, positions, row indices, counts.
    I32,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::BF16 => 2,
        }
    }

    /// True for the floating types.
    pub const fn is_float(self) -> bool {
        !matches!(self, DType::I32)
    }
}

/// Rounds a binary32 to the nearest bfloat16 (ties to even) and widens it again; NaN stays NaN.
pub fn round_bf16(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let bits = x.to_bits();
    f32::from_bits(bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_nearest_even() {
        assert_eq!(round_bf16(1.0), 1.0);
        assert_eq!(round_bf16(f32::from_bits(0x3f80_8000)), 1.0, "a tie goes to the even neighbour below");
        assert_eq!(
            round_bf16(f32::from_bits(0x3f81_8000)),
            f32::from_bits(0x3f82_0000),
            "a tie goes to the even neighbour above"
        );
        assert_eq!(round_bf16(f32::from_bits(0x3f80_8001)), f32::from_bits(0x3f81_0000));
        assert_eq!(round_bf16(f32::MAX), f32::INFINITY);
        assert!(round_bf16(f32::NAN).is_nan());
    }
}
