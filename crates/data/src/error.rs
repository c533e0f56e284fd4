//! The errors of this crate. Each names the file, line, row or key, and its text ends with what to do.
//!
//! It refuses to carry a bare `io::Error`: an error without a path cannot be acted on.

use std::path::{Path, PathBuf};

/// What this crate's functions return.
pub type Result<T> = std::result::Result<T, DataError>;

/// Everything that can go wrong between a chat file and a batch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused a file operation.
    #[error("cannot {action} {}: {source}\ncheck that the path exists and that you may {action} it", path.display())]
    Io {
        /// What was attempted: "read", "write", "map" …
        action: &'static str,
        /// The path it was attempted on.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// An input line is not a usable record.
    #[error("{}:{line}: byte {byte}: {what}\nfix the line, or pass --on-error skip to drop and count such lines", path.display())]
    BadLine {
        /// The input file.
        path: PathBuf,
        /// 1-based line number.
        line: u64,
        /// 0-based byte offset in the file of the fault (of the line's start when the fault has no narrower place).
        byte: u64,
        /// What is wrong.
        what: String,
    },
    /// A message has a role that is neither known nor mapped.
    #[error(
        "{}:{line}: byte {byte}: unknown role `{role}`\nmap it with --role {role}=assistant (or user, system, tool), or drop such rows with --on-error skip",
        path.display()
    )]
    UnknownRole {
        /// The input file.
        path: PathBuf,
        /// 1-based line number.
        line: u64,
        /// 0-based byte offset of the line's start.
        byte: u64,
        /// The role as written.
        role: String,
    },
    /// The target folder lacks something that text preparation needs, or holds something unreadable.
    #[error("{}: {what}\n{todo}", path.display())]
    Target {
        /// The file or folder at fault.
        path: PathBuf,
        /// What is wrong.
        what: String,
        /// What to do.
        todo: String,
    },
    /// The chat template refused or failed on a conversation.
    #[error("the chat template refused the conversation: {0}\nchange the conversation, or the template of the target")]
    Template(String),
    /// The chat template ran on and on.
    #[error(
        "the chat template did not end within {steps} steps: it loops without end, or the conversation is far too long\nlook at its loops, or use another template"
    )]
    EndlessTemplate {
        /// Steps that it was given.
        steps: u64,
    },
    /// The target's config.json or generation_config.json.
    #[error(transparent)]
    ModelConfig(Box<drafthorse_models::config_fields::ConfigError>),
    /// A row that the dataset does not have.
    #[error("dataset {} has no row {row}: its rows go from 0 to {last}\nname one of these", path.display())]
    NoRow {
        /// The dataset folder.
        path: PathBuf,
        /// The row asked for.
        row: usize,
        /// Its last row.
        last: usize,
    },
    /// The caller asked to stop.
    #[error("stopped on request: nothing was written to {}\nrun the command again", out.display())]
    Stopped {
        /// The dataset folder that was to be written.
        out: PathBuf,
    },
    /// The tokenizer failed.
    #[error("the tokenizer failed: {0}\ncheck that tokenizer.json belongs to this target")]
    Tokenizer(String),
    /// The prepared dataset could not be used for training.
    #[error("{what}\n{todo}")]
    Refused {
        /// Why the dataset is refused.
        what: String,
        /// What to do.
        todo: String,
    },
    /// A dataset folder or file is not what it should be.
    #[error("dataset {}: {what}\n{todo}", path.display())]
    Dataset {
        /// The file or folder at fault.
        path: PathBuf,
        /// What is wrong.
        what: String,
        /// What to do.
        todo: String,
    },
    /// One row of a dataset is faulty.
    #[error("dataset {}: row {row}: {what}\nprepare the dataset again, or remove the row", path.display())]
    Row {
        /// The dataset folder.
        path: PathBuf,
        /// 0-based row.
        row: u64,
        /// What is wrong with it.
        what: String,
    },
    /// A setting cannot work.
    #[error("{key}: {what}\n{todo}")]
    Config {
        /// The config key.
        key: &'static str,
        /// Why its value cannot work.
        what: String,
        /// What to do.
        todo: String,
    },
}

impl From<drafthorse_models::config_fields::ConfigError> for DataError {
    fn from(error: drafthorse_models::config_fields::ConfigError) -> Self {
        Self::ModelConfig(Box::new(error))
    }
}

impl DataError {
    /// Wraps an operating-system error with the action and path; for `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    /// A dataset folder that is not what it should be.
    pub(crate) fn dataset(path: &Path, what: impl Into<String>, todo: impl Into<String>) -> Self {
        Self::Dataset { path: path.to_owned(), what: what.into(), todo: todo.into() }
    }

    /// A faulty or incomplete target folder.
    pub(crate) fn target(path: &Path, what: impl Into<String>, todo: impl Into<String>) -> Self {
        Self::Target { path: path.to_owned(), what: what.into(), todo: todo.into() }
    }
}
