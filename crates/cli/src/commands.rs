//! The commands, one file each.
//!
//! Refuses shared logic: what two commands need has its own file beside this one. Invariant: a command returns its exit code and never exits.

pub mod bench;
pub mod demo;
pub mod deploy;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod generate;
pub mod init;
pub mod inspect;
pub mod launch;
pub mod overfit;
pub mod plan;
pub mod prepare;
pub mod ps;
pub mod report;
pub mod restart;
pub mod rollback;
pub mod runs;
pub mod stop;
pub mod supervise;
pub mod train;
pub mod version;
pub mod watch;
