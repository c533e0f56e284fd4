//! Loader of the golden values that PyTorch made.
//!
//! Job: read `golden/data/<name>.safetensors` and the scalars beside it in `<name>.json`. Refuses to make or change them (`golden/*.py` do).
//! Invariant: a missing file or tensor is an error that says how to make it, never a skipped test.

use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

/// Errors of the loader.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// The file is not there or cannot be read.
    #[error(
        "golden file {path}: {source}\nrun `cargo xtask golden`, or the script in golden/ that writes it (pinned versions: golden/requirements.txt)"
    )]
    Missing {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is damaged.
    #[error("golden file {path}: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The file lacks a tensor or a scalar.
    #[error("golden file {path} has no `{name}`\nit has: {has}")]
    Absent {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        name: String,
        /// What begins like it, or everything.
        has: String,
    },
}

/// One golden file.
pub struct Golden {
    path: PathBuf,
    bytes: Vec<u8>,
    scalars: serde_json::Value,
}

/// One golden tensor, widened.
#[derive(Clone, Debug, PartialEq)]
pub struct GoldenTensor {
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// Elements; stored as float32 or int32.
    pub data: Vec<f64>,
}

impl GoldenTensor {
    /// The elements as integers.
    pub fn ints(&self) -> Vec<i32> {
        self.data.iter().map(|&x| x as i32).collect()
    }
}

/// The folder of golden values.
pub fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/data")
}

impl Golden {
    /// Loads `golden/data/<name>.safetensors`, with `<name>.json` where there is one.
    ///
    /// # Errors
    /// [`GoldenError`].
    pub fn load(name: &str) -> Result<Golden, GoldenError> {
        Golden::load_from(&golden_dir(), name)
    }

    /// [`Golden::load`] from another folder.
    ///
    /// # Errors
    /// [`GoldenError`].
    pub fn load_from(folder: &Path, name: &str) -> Result<Golden, GoldenError> {
        let path = folder.join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).map_err(|source| GoldenError::Missing { path: path.clone(), source })?;
        let damaged = |path: &Path, what: String| GoldenError::Damaged { path: path.to_owned(), what };
        SafeTensors::deserialize(&bytes).map_err(|e| damaged(&path, e.to_string()))?;
        let beside = path.with_extension("json");
        let scalars = match std::fs::read(&beside) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| damaged(&beside, e.to_string()))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => serde_json::Value::Null,
            Err(source) => return Err(GoldenError::Missing { path: beside, source }),
        };
        Ok(Golden { path, bytes, scalars })
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("read once already")
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tensors().names().into_iter().map(str::to_owned).collect();
        names.sort_unstable();
        names
    }

    /// A tensor by name.
    ///
    /// # Errors
    /// When it is absent or neither float32 nor int32.
    pub fn tensor(&self, name: &str) -> Result<GoldenTensor, GoldenError> {
        let tensors = self.tensors();
        let view = tensors.tensor(name).map_err(|_| self.absent(name))?;
        let words = view.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
        let data = match view.dtype() {
            Dtype::F32 => words.map(|b| f64::from(f32::from_le_bytes(b))).collect(),
            Dtype::I32 => words.map(|b| f64::from(i32::from_le_bytes(b))).collect(),
            other => {
                let what = format!("`{name}` is {other:?}; golden tensors are float32 or int32");
                return Err(GoldenError::Damaged { path: self.path.clone(), what });
            }
        };
        Ok(GoldenTensor { shape: view.shape().to_vec(), data })
    }

    /// A scalar by its path in the JSON, slash-separated (`/linear/eps`); JSON null is absent.
    ///
    /// # Errors
    /// When it is absent.
    pub fn scalar(&self, pointer: &str) -> Result<&serde_json::Value, GoldenError> {
        self.scalars.pointer(pointer).filter(|v| !v.is_null()).ok_or_else(|| self.absent(pointer))
    }

    /// A number by its path in the JSON.
    ///
    /// # Errors
    /// When it is absent or no number.
    pub fn number(&self, pointer: &str) -> Result<f64, GoldenError> {
        self.scalar(pointer)?.as_f64().ok_or_else(|| self.absent(pointer))
    }

    fn absent(&self, name: &str) -> GoldenError {
        let all = self.names();
        let stem = name.split(['.', '/']).find(|s| !s.is_empty()).unwrap_or_default();
        let mut like: Vec<String> = all.iter().filter(|n| n.starts_with(stem)).cloned().collect();
        if like.is_empty() {
            like = all;
        }
        GoldenError::Absent { path: self.path.clone(), name: name.to_owned(), has: like.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_says_how_to_make_it() {
        let error = Golden::load("no_such_file").err().expect("there is no such file").to_string();
        assert!(error.contains("no_such_file.safetensors") && error.contains("golden/"), "{error}");
    }

    #[test]
    fn an_absent_tensor_lists_its_neighbours() {
        let golden = Golden::load("ops").unwrap();
        let error = golden.tensor("swiglu.z").unwrap_err().to_string();
        assert!(error.contains("swiglu.x, swiglu.y") && !error.contains("adamw"), "{error}");
        assert!(golden.number("/rms_norm/epsilon").is_err());
        assert_eq!(golden.number("/rms_norm/eps").unwrap(), 1e-5);
    }
}
