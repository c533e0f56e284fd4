//! The CUDA room: kernels compiled ahead, and the executor that launches them.
//!
//! Job: [`CudaExecutor`], which runs the programs of `drafthorse-graph` on one NVIDIA GPU in bf16, replaying captured graphs. Refuses files, the
//! environment and printing. Invariants: only the driver and cuBLASLt are loaded, at run time; after [`drafthorse_graph::Executor::prepare`] no
//! device memory is allocated and nothing is captured; every call of the driver is checked; no wait is without a deadline.

mod blas;
mod command;
mod driver;
mod error;
mod executor;
mod frozen;
mod host;
mod kernels;
mod loader;
mod lower;
mod slot;
mod staging;
mod timing;

pub use blas::{AlgorithmTable, WORKSPACE_BYTES};
pub use driver::{Device, MemoryUse};
pub use error::CudaError;
pub use executor::{CudaExecutor, Options};
pub use frozen::FrozenStore;
pub use kernels::images;
pub use loader::{Found, Libraries, SearchPaths};
pub use slot::CudaSlot;
pub use timing::OpTime;
