//! Chat records → tokens and loss mask → Arrow → batches: everything between a chat file and a device's input arrays.
//!
//! It refuses to guess: a row that cannot be rendered, located or read exactly is dropped with a counted reason or refused
//! by name. Invariants: nothing here reads the environment, prints, or touches a device; the content of a batch is a function
//! of (dataset, config, seed, epoch, index) alone.

pub mod anchors;
mod arrow_out;
pub mod batch;
pub mod buckets;
pub mod card;
pub mod chat;
pub mod dataset;
pub mod error;
mod hash;
pub mod index;
pub mod mask_token;
pub mod prepare;
mod probes;
pub mod rng;
pub mod schedule;
pub mod spans;
pub mod table;
pub mod template;
pub mod tokenize;

pub use error::{DataError, Result};
pub use hash::{sha256_file, sha256_hex};
