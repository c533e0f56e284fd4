//! The CUDA room: kernels, compiled ahead, and the executor that launches them.
