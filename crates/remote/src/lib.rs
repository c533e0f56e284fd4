//! Runs on other machines and in containers: reach them, put files there, prove what runs, start, follow, stop.
//!
//! Refuses: to contact anything that is not named, to print, to speak a protocol of its own (the system's `ssh` and the like carry everything), and to
//! touch processes that it did not start.
//! Invariants: files go through the same chain that runs the program and are hashed at its end; a run never depends on a connection; what is
//! done to a run at the far end is done by the program there, with the same code as here.

pub mod chain;
pub mod checkpoints;
pub mod destination;
pub mod error;
pub mod far;
pub mod files;
pub mod launches;
pub mod probe;
pub mod process;
pub mod quote;
pub mod restart;
pub mod stop;
pub mod stream;
pub mod supervise;
pub mod transfer;
pub mod verify;

pub use error::RemoteError;
