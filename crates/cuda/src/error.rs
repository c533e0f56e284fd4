//! Errors of the CUDA room. Refuses to hide the driver's own words.

use drafthorse_graph::ExecError;

/// What can go wrong between opening a device and running a phase.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// A driver, library, device or the kernels themselves are not there.
    #[error("{what}\n  {todo}")]
    Missing {
        /// What is missing, and where it was looked for.
        what: String,
        /// How to get it.
        todo: String,
    },
    /// The kernels do not cover an op at these shapes.
    #[error("{op}: {why}")]
    Unsupported {
        /// The op with its shapes.
        op: String,
        /// The limit it exceeds.
        why: String,
    },
    /// A call of the driver or of cuBLASLt failed.
    #[error("{call}: {what}")]
    Call {
        /// The function, or the launch with its geometry.
        call: String,
        /// The library's words.
        what: String,
    },
    /// Device or pinned memory could not be had.
    #[error("cannot allocate {bytes} bytes for {what}: {free} of {total} bytes are free on the device")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// What for.
        what: String,
        /// Bytes free on the device.
        free: u64,
        /// Bytes of the device.
        total: u64,
    },
    /// The device did not finish in time.
    #[error("the device did not finish {what} within {seconds} s")]
    Deadline {
        /// What was waited for.
        what: String,
        /// The deadline.
        seconds: u64,
    },
    /// A frozen tensor has no content on the device.
    #[error("frozen tensor `{name}` wants {want} bytes on the device, which holds {got}")]
    Frozen {
        /// Its name.
        name: String,
        /// Bytes wanted.
        want: usize,
        /// Bytes there are; 0 when it was never loaded.
        got: usize,
    },
}

/// For errors before there is a phase.
impl From<CudaError> for ExecError {
    fn from(error: CudaError) -> ExecError {
        error.at("loading", "none")
    }
}

impl CudaError {
    /// As the executor trait reports it.
    pub(crate) fn at(self, phase: &str, op: &str) -> ExecError {
        match self {
            CudaError::Memory { bytes, what, free, total } => {
                ExecError::Memory { bytes, what: format!("{what} ({free} of {total} bytes are free on the device)") }
            }
            other => ExecError::Device { phase: phase.to_owned(), op: op.to_owned(), what: other.to_string() },
        }
    }
}
