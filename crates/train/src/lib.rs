//! Training: the pipeline that feeds drafters from targets, the optimizer steps, checkpoints, and evaluation by speculative decoding.
//!
//! Refuses to print, to read the environment and to exit: outcomes and errors go to the caller, events to telemetry.
//! Invariants: a run ends with all threads joined; two runs of one config on one machine give the same weights bit for bit.

#[cfg(not(shuttle))]
pub mod capture;
#[cfg(not(shuttle))]
pub mod checkpoint;
#[cfg(not(shuttle))]
pub mod checksums;
#[cfg(not(shuttle))]
pub mod config;
#[cfg(not(shuttle))]
pub mod config_checks;
#[cfg(not(shuttle))]
mod config_text;
#[cfg(all(feature = "cuda", not(shuttle)))]
pub mod cuda;
#[cfg(not(shuttle))]
pub mod decode;
#[cfg(not(shuttle))]
pub mod drafter;
#[cfg(not(shuttle))]
pub mod evaluate;
#[cfg(not(shuttle))]
pub mod frozen;
#[cfg(not(shuttle))]
pub mod loops;
#[cfg(not(shuttle))]
pub mod metrics;
pub mod pipeline;
#[cfg(not(shuttle))]
pub mod rounds;
#[cfg(not(shuttle))]
pub mod run;
#[cfg(not(shuttle))]
pub mod setup;
#[cfg(not(shuttle))]
pub mod stages;
#[cfg(not(shuttle))]
pub mod state;
