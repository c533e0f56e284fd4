//! The commands, one file each.
//!
//! Refuses shared logic: what two commands need has its own file beside this one. Invariant: a command returns its exit code and never exits.

pub mod bench;
pub mod demo;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod generate;
pub mod init;
pub mod inspect;
pub mod overfit;
pub mod plan;
pub mod prepare;
pub mod train;
pub mod version;
