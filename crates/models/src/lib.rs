//! Models: what the program knows about targets and drafters on disk.
//!
//! Job: read a target's folder (config, weights), describe a drafter, write and read drafter checkpoints in the formats
//! that servers load. It refuses, by name, anything whose meaning it does not implement; it never guesses.
//! Invariants: nothing here touches a device or the network, prints, or reads the environment.

pub mod checkpoint;
pub mod config_fields;
mod config_keys;
pub mod draft;
pub mod draft_config;
pub mod draft_folder;
pub mod draft_json;
pub mod export;
pub mod hf_config;
pub mod hidden_states;
pub mod mmap;
pub mod rope;
mod safetensors_file;
pub mod serve;
pub mod target;
pub mod tensor_names;
pub mod weight_files;
