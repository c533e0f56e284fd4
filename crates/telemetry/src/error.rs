//! What can go wrong in telemetry, said with the file and what to do.
//!
//! Refuses: errors for things that must not stop training; those are counted in the status instead.

use std::path::PathBuf;
use thiserror::Error;

/// An error of this crate.
#[derive(Debug, Error)]
pub enum TelemetryError {
    /// A file could not be opened, read or written.
    #[error("cannot {action} {}: {source}\ncheck that the run folder exists, is writable and has free space", path.display())]
    Io {
        /// What was tried, e.g. `open`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason that the system gave.
        source: std::io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start the {name} thread: {source}\nraise the limit on threads or processes (ulimit -u)")]
    Thread {
        /// Thread.
        name: &'static str,
        /// The reason that the system gave.
        source: std::io::Error,
    },
    /// The writer did not end in time; its file system hangs.
    #[error("the telemetry writer for {} did not finish within {waited_ms} ms\nits file system hangs; the last events may be missing", path.display())]
    WriterStuck {
        /// The run folder.
        path: PathBuf,
        /// How long it was waited for.
        waited_ms: u64,
    },
    /// A file of the run folder is not what it should be.
    #[error("{} is not a {what}: {reason}\nthe run may have been made by another version; watch it with that version", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What it should be.
        what: &'static str,
        /// Why it is not.
        reason: String,
    },
    /// The HTTP server could not be set up.
    #[error("cannot serve telemetry on 127.0.0.1:{port}: {source}\nchoose another port, or 0 for any free one")]
    Bind {
        /// The port asked for.
        port: u16,
        /// The reason that the system gave.
        source: std::io::Error,
    },
    /// A run elsewhere cannot be followed at the moment.
    #[error("{from} is away: {reason}\nit is tried again by itself")]
    Away {
        /// What is followed.
        from: String,
        /// Why it is away.
        reason: String,
    },
    /// The terminal could not be drawn on.
    #[error("cannot draw on the terminal: {source}\nuse --json, or a terminal with cursor control")]
    Terminal {
        /// The reason that the system gave.
        source: std::io::Error,
    },
}

impl TelemetryError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> TelemetryError {
        let path = path.into();
        move |source| TelemetryError::Io { action, path, source }
    }
}
