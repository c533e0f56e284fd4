//! Training: the concurrency core that feeds drafters from targets.
//!
//! Refuses to know about devices or kernels: those belong to the executors below it.

pub mod pipeline;
