//! Writing a bf16 safetensors file whose bytes depend on its content alone.
//!
//! Job: stream tensors to a file, rounding to bf16 on the way. The safetensors crate reads our files; it does not write them,
//! because it serialises metadata from a hash map, so two exports of one checkpoint would differ, and because it wants a whole
//! tensor in memory where the converted copy of one chunk is enough.
//! Invariants: tensors lie in the order given without gaps, the header is padded to 8 bytes, the file is synced before success.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

/// Values of one tensor, row-major.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// fp32 masters; rounded to bf16 (nearest, ties to even) when written.
    F32(&'a [f32]),
    /// bf16 bits, written as they are.
    Bf16(&'a [u16]),
}

impl<'a> Weights<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(bits) => bits.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Part of the elements.
    pub(crate) fn slice(&self, range: std::ops::Range<usize>) -> Weights<'a> {
        match self {
            Self::F32(values) => Weights::F32(&values[range]),
            Self::Bf16(bits) => Weights::Bf16(&bits[range]),
        }
    }

    /// The bits that a file holds for element `i`.
    pub(crate) fn bits(&self, i: usize) -> u16 {
        match self {
            Self::F32(values) => half::bf16::from_f32(values[i]).to_bits(),
            Self::Bf16(bits) => bits[i],
        }
    }
}

/// Elements converted before each write.
const CHUNK: usize = 1 << 15;

/// Writes `tensors` (name, shape, values) and returns the file's length in bytes.
pub(crate) fn write_bf16(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &[(&str, &[usize], Weights<'_>)],
) -> io::Result<u64> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!(metadata));
    let mut end = 0u64;
    for (name, shape, values) in tensors {
        let start = end;
        end += 2 * values.len() as u64;
        header.insert((*name).to_owned(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}));
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(1 << 20, File::create_new(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut chunk = Vec::with_capacity(2 * CHUNK);
    for (_, _, values) in tensors {
        for start in (0..values.len()).step_by(CHUNK) {
            chunk.clear();
            for i in start..values.len().min(start + CHUNK) {
                chunk.extend_from_slice(&values.bits(i).to_le_bytes());
            }
            file.write_all(&chunk)?;
        }
    }
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    Ok(8 + header.len() as u64 + end)
}
