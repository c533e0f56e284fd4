//! The fast f32 executor: small models and every test run here, and the CUDA executor is compared with it.
//!
//! Job: run the phases of a [`drafthorse_graph::Program`] on a rayon pool, with GEMMs from `faer`.
//! Refuses `unsafe`, files and threads of its own. Invariants: results do not depend on the number of threads (every reduction has a fixed
//! partition); with `round` every stored BF16 tensor holds bf16 values after each op; the regions allocated are the plan's, to the byte,
//! and the scratch beside them is what [`CpuExecutor::scratch_bytes`] says.

mod attention;
mod block_attention;
mod elementwise;
mod executor;
mod gemm;
mod linear;
mod loss;
mod math;
mod memory;
mod norm;
mod optim;
mod scratch;

pub use executor::{CpuExecutor, FrozenSet, Options};
pub use gemm::measure_gflops;
