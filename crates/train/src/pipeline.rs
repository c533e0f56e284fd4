//! The concurrency core.
pub mod board;
pub mod cancel;
pub mod conveyor;
pub mod crew;
mod flow;
pub mod gate;
pub mod reduce;
mod sync;

#[cfg(all(test, shuttle))]
#[path = "pipeline/shuttle_tests.rs"]
mod shuttle_tests;
