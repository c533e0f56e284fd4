//! What every test of numbers in this workspace is held to.
//!
//! Job: the one comparator ([`compare`]), naive oracles of every op ([`oracle`]), generators of typical and hostile inputs
//! ([`inputs`]), the list of op cases that each executor must pass ([`op_suite`]), central differences
//! ([`finite_difference`]), the loader of PyTorch golden values ([`golden`]) and the device gate ([`device_gate`]).
//!
//! Refuses: speed, sharing code with an executor, tolerances without a model behind them. Invariant: a comparison that passes
//! has looked at every element, and each use of it has a must-fail twin.

pub mod compare;
pub mod device_gate;
pub mod finite_difference;
pub mod golden;
pub mod inputs;
pub mod op_suite;
pub mod oracle;
