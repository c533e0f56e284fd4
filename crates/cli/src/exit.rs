//! Exit codes, and the one place that gives each library error its code.
//!
//! Job: turn any error into two lines (what and where; what to do) and a code. Refuses errors without a place here: an error type that is not listed
//! does not convert. Invariants: 0 is never given after a failure; a reader that closed its end of a pipe is no failure and no message.

use drafthorse_data::DataError;
use drafthorse_graph::ExecError;
use drafthorse_models::checkpoint::CheckpointError as WeightsError;
use drafthorse_models::config_fields::ConfigError as ModelConfigError;
use drafthorse_models::draft_config::DraftError;
use drafthorse_models::draft_folder::DraftFolderError;
use drafthorse_models::export::ExportError;
use drafthorse_telemetry::TelemetryError;
use drafthorse_train::checkpoint::CheckpointError;
use drafthorse_train::config::ConfigError;
use drafthorse_train::frozen::FrozenError;
use drafthorse_train::pipeline::cancel::{Cause, Kind};
use drafthorse_train::run::RunFailure;
use drafthorse_train::setup::SetupError;
use drafthorse_train::state::StateError;
use std::error::Error;
use std::io;

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Everything was done.
    Done = 0,
    /// The command line is wrong.
    Usage = 2,
    /// A file, dataset, target or config is wrong.
    BadInput = 3,
    /// Memory or disk is too small.
    DoesNotFit = 4,
    /// A device or library is missing or failed.
    Device = 5,
    /// Training diverged, or `overfit` did not get there.
    Diverged = 6,
    /// Nothing moved for longer than allowed.
    Stalled = 7,
    /// Ctrl-C, SIGTERM or SIGUSR1; a checkpoint was saved where one could be.
    Stopped = 8,
    /// A fault of the program.
    Bug = 70,
}

impl Exit {
    /// All codes, ascending.
    pub const ALL: [Exit; 9] = [
        Exit::Done,
        Exit::Usage,
        Exit::BadInput,
        Exit::DoesNotFit,
        Exit::Device,
        Exit::Diverged,
        Exit::Stalled,
        Exit::Stopped,
        Exit::Bug,
    ];

    /// The number that the shell sees.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// What it means, in a few words.
    pub fn meaning(self) -> &'static str {
        match self {
            Exit::Done => "done",
            Exit::Usage => "usage: the command line is wrong",
            Exit::BadInput => "bad input: a file, dataset, target or config is wrong",
            Exit::DoesNotFit => "does not fit: memory or disk is too small",
            Exit::Device => "a device or library is missing or failed",
            Exit::Diverged => "diverged: training went wrong, or overfit did not get there",
            Exit::Stalled => "stalled: nothing moved for longer than allowed",
            Exit::Stopped => "stopped on request; a checkpoint was saved where one could be",
            Exit::Bug => "a fault of the program",
        }
    }
}

/// The table of exit codes, for `--help`.
pub fn exit_code_table() -> String {
    let lines: Vec<String> = Exit::ALL.iter().map(|e| format!("  {:>2}  {}", e.code(), e.meaning())).collect();
    format!("Exit codes:\n{}", lines.join("\n"))
}

/// Why a command did not end well.
#[derive(Debug)]
pub enum Failure {
    /// Whoever read the output has gone away; nobody is left to tell.
    ReaderGone,
    /// To be told, with a code.
    Told {
        /// The code.
        exit: Exit,
        /// What, and where.
        what: String,
        /// What to do.
        todo: String,
    },
}

impl Failure {
    /// A failure in own words.
    pub fn new(exit: Exit, what: impl Into<String>, todo: impl Into<String>) -> Failure {
        Failure::Told { exit, what: what.into(), todo: todo.into() }
    }

    /// A write to standard output failed.
    pub fn output(error: &io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::ReaderGone,
            _ => Failure::new(exit_of_io(error), format!("cannot write to standard output: {error}"), "check where it is redirected to"),
        }
    }

    /// A file operation failed.
    pub fn file(action: &str, path: &std::path::Path, error: &io::Error) -> Failure {
        let todo = match error.kind() {
            io::ErrorKind::NotFound => "check the path",
            io::ErrorKind::PermissionDenied => "check its permissions",
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free space on that filesystem",
            _ => "check the path and the disk",
        };
        Failure::new(exit_of_io(error), format!("cannot {action} {}: {error}", path.display()), todo)
    }

    /// The code.
    pub fn exit(&self) -> Exit {
        match self {
            Failure::ReaderGone => Exit::Done,
            Failure::Told { exit, .. } => *exit,
        }
    }

    /// Both lines, as they are shown; `None` when there is nothing to say.
    pub fn lines(&self) -> Option<String> {
        match self {
            Failure::ReaderGone => None,
            Failure::Told { what, todo, .. } => Some(format!("error: {what}\n  {todo}")),
        }
    }
}

/// An error of a library, with its place in the table.
pub trait Classified: Error {
    /// The code.
    fn exit(&self) -> Exit;
}

impl<E: Classified> From<E> for Failure {
    fn from(error: E) -> Failure {
        let exit = error.exit();
        let text = error.to_string();
        // A library's message ends with the line that says what to do; device errors and bugs have only the first.
        let (what, todo) = match text.trim_end().rsplit_once('\n') {
            Some((what, todo)) => (what.trim_end().to_owned(), todo.trim().to_owned()),
            None => (text, default_advice(exit).to_owned()),
        };
        Failure::Told { exit, what, todo }
    }
}

fn default_advice(exit: Exit) -> &'static str {
    match exit {
        Exit::DoesNotFit => "run `drafthorse plan` to see what is needed and which key makes it fit",
        Exit::Device => "check the device; `drafthorse train … --resume auto` goes on from the last checkpoint",
        Exit::Stalled => "the report above says where every stage stood; `--resume auto` goes on from the last checkpoint",
        Exit::Stopped => "`--resume auto` goes on from the last checkpoint",
        Exit::Diverged => "resume from an earlier checkpoint with a lower optimizer.lr",
        Exit::Bug => BUG_ADVICE,
        Exit::Done | Exit::Usage | Exit::BadInput => "see `drafthorse help`",
    }
}

/// What to do about a fault of the program.
pub const BUG_ADVICE: &str =
    "this is a bug: report it with the command line and the output of `drafthorse version --json`; RUST_BACKTRACE=1 adds where it came from";

fn exit_of_io(error: &io::Error) -> Exit {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::OutOfMemory => Exit::DoesNotFit,
        _ => Exit::BadInput,
    }
}

impl Classified for DataError {
    fn exit(&self) -> Exit {
        match self {
            DataError::Io { source, .. } => exit_of_io(source),
            _ => Exit::BadInput,
        }
    }
}

impl Classified for ModelConfigError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

impl Classified for DraftError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

impl Classified for WeightsError {
    fn exit(&self) -> Exit {
        match self {
            WeightsError::Io { source, .. } => exit_of_io(source),
            _ => Exit::BadInput,
        }
    }
}

impl Classified for DraftFolderError {
    fn exit(&self) -> Exit {
        match self {
            DraftFolderError::Checkpoint(e) => e.exit(),
            _ => Exit::BadInput,
        }
    }
}

impl Classified for ExportError {
    fn exit(&self) -> Exit {
        match self {
            ExportError::Io { source, .. } => exit_of_io(source),
            ExportError::NonFinite { .. } => Exit::Diverged,
            ExportError::MissingTensor(_) => Exit::Bug,
            ExportError::Readback(_) | ExportError::Differs { .. } => Exit::Device,
            _ => Exit::BadInput,
        }
    }
}

impl Classified for ConfigError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

impl Classified for CheckpointError {
    fn exit(&self) -> Exit {
        match self {
            CheckpointError::Io { source, .. } => exit_of_io(source),
            CheckpointError::NotFinite { .. } => Exit::Diverged,
            CheckpointError::Damaged { .. } | CheckpointError::Mismatch { .. } => Exit::BadInput,
        }
    }
}

impl Classified for ExecError {
    fn exit(&self) -> Exit {
        match self {
            ExecError::Memory { .. } => Exit::DoesNotFit,
            ExecError::Device { .. } => Exit::Device,
            ExecError::HostShape { .. } | ExecError::Slot { .. } => Exit::Bug,
        }
    }
}

impl Classified for FrozenError {
    fn exit(&self) -> Exit {
        match self {
            FrozenError::Config(e) => e.exit(),
            FrozenError::Checkpoint(e) => e.exit(),
            FrozenError::Exec(e) => e.exit(),
            FrozenError::Missing { .. } => Exit::Device,
        }
    }
}

impl Classified for SetupError {
    fn exit(&self) -> Exit {
        match self {
            SetupError::Config(e) => e.exit(),
            SetupError::Target(e) => e.exit(),
            SetupError::Data(e) => e.exit(),
            SetupError::Draft(e) => e.exit(),
        }
    }
}

impl Classified for StateError {
    fn exit(&self) -> Exit {
        match self {
            StateError::Exec(e) => e.exit(),
            StateError::Checkpoint(e) => e.exit(),
            StateError::Folder(e) => e.exit(),
            StateError::File(e) => e.exit(),
            StateError::Export(e) => e.exit(),
            StateError::OtherShape { .. } => Exit::BadInput,
        }
    }
}

impl Classified for TelemetryError {
    fn exit(&self) -> Exit {
        match self {
            TelemetryError::Io { source, .. } => exit_of_io(source),
            TelemetryError::Thread { .. } => Exit::Device,
            TelemetryError::WriterStuck { .. } => Exit::Stalled,
            TelemetryError::Bind { .. } => Exit::BadInput,
            _ => Exit::BadInput,
        }
    }
}

impl Classified for RunFailure {
    fn exit(&self) -> Exit {
        match self {
            RunFailure::Diverged(_) => Exit::Diverged,
            RunFailure::Resume(e) => e.exit(),
            RunFailure::Run(e) => exit_of_cause(&e.cause),
        }
    }
}

/// A cause carries its worker's error as text only.
fn exit_of_cause(cause: &Cause) -> Exit {
    match cause.kind {
        Kind::Stopped => Exit::Stopped,
        Kind::Stalled => Exit::Stalled,
        Kind::Failed if cause.error.starts_with("panicked") => Exit::Bug,
        Kind::Failed => Exit::Device,
    }
}
