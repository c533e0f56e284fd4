//! Which build this is, for run folders, checkpoints and bug reports.
//!
//! Refuses to guess: every part was embedded when the program was built. Invariant: two programs with one build id were built from equal sources.

use serde::Serialize;

/// Commit and source hash on one line, e.g. `8538ff3-dirty+1f0a9c2b44de`.
pub const BUILD_ID: &str = concat!(env!("DRAFTHORSE_COMMIT"), "+", env!("DRAFTHORSE_SOURCES"));

/// Everything that is known of the build.
#[derive(Debug, Serialize)]
pub struct Build {
    /// Package version.
    pub version: &'static str,
    /// Commit, `-dirty` when the tree had changes; `v` and the version where it was built without git.
    pub commit: &'static str,
    /// First 12 digits of the SHA-256 over all sources.
    pub sources: &'static str,
    /// Commit and sources.
    pub build_id: &'static str,
    /// Platform it was built for.
    pub target: &'static str,
    /// `debug` or `release`.
    pub profile: &'static str,
    /// Backends it has.
    pub backends: &'static [&'static str],
}

/// This build.
pub const BUILD: Build = Build {
    version: env!("CARGO_PKG_VERSION"),
    commit: env!("DRAFTHORSE_COMMIT"),
    sources: env!("DRAFTHORSE_SOURCES"),
    build_id: BUILD_ID,
    target: env!("DRAFTHORSE_TARGET"),
    profile: env!("DRAFTHORSE_PROFILE"),
    backends: if cfg!(feature = "cuda") { &["cpu", "cuda"] } else { &["cpu"] },
};
