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
use drafthorse_remote::RemoteError;
use drafthorse_telemetry::TelemetryError;
use drafthorse_train::checkpoint::CheckpointError;
use drafthorse_train::config::ConfigError;
use drafthorse_train::frozen::FrozenError;
use drafthorse_train::pipeline::cancel::{Cause, Kind};
use drafthorse_train::run::{ResumeError, RunFailure};
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
    /// Ctrl-C, SIGTERM or SIGUSR1: `train` saved a checkpoint where it could, `prepare` removed what it had written, `eval` and `generate` showed what they had.
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

    /// The end that has this number.
    pub fn from_code(code: i32) -> Option<Exit> {
        Exit::ALL.into_iter().find(|e| i32::from(e.code()) == code)
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
            Exit::Stopped => "stopped on request; a checkpoint was saved where one could be, nothing half-made is left",
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
            _ => Failure::new(
                exit_of_io(error),
                format!("cannot write to standard output: {error}"),
                "check where it is redirected to",
            ),
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
pub const BUG_ADVICE: &str = "this is a bug: report it with the command line and the output of `drafthorse version --json`; RUST_BACKTRACE=1 adds where it came from";

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
            DataError::Stopped { .. } => Exit::Stopped,
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
            CheckpointError::Damaged { .. } | CheckpointError::Corrupt { .. } | CheckpointError::Mismatch { .. } => {
                Exit::BadInput
            }
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

#[cfg(feature = "cuda")]
impl Classified for drafthorse_cuda::CudaError {
    fn exit(&self) -> Exit {
        match self {
            drafthorse_cuda::CudaError::Memory { .. } => Exit::DoesNotFit,
            _ => Exit::Device,
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
            StateError::Other { .. } => Exit::BadInput,
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

impl Classified for ResumeError {
    fn exit(&self) -> Exit {
        match self {
            ResumeError::Checkpoint(e) => e.exit(),
            ResumeError::Init(e) => e.exit(),
        }
    }
}

impl Classified for RemoteError {
    fn exit(&self) -> Exit {
        match self {
            RemoteError::Io { source, .. } => exit_of_io(source),
            RemoteError::NoSpace { .. } | RemoteError::DiskFull { .. } => Exit::DoesNotFit,
            RemoteError::NotStarted { code, .. } => code.and_then(Exit::from_code).unwrap_or(Exit::Device),
            RemoteError::NotStopped { .. } => Exit::Stalled,
            RemoteError::Telemetry(e) => e.exit(),
            RemoteError::NoProgram { .. }
            | RemoteError::Unreachable { .. }
            | RemoteError::Lost { .. }
            | RemoteError::Garbled { .. }
            | RemoteError::NoTools { .. }
            | RemoteError::Failed { .. }
            | RemoteError::WrongArchitecture { .. }
            | RemoteError::OldGlibc { .. }
            | RemoteError::NoDriver { .. }
            | RemoteError::WrongHash { .. } => Exit::Device,
            RemoteError::Destinations { .. }
            | RemoteError::Changed { .. }
            | RemoteError::WrongFilesystem { .. }
            | RemoteError::StaleEntry { .. }
            | RemoteError::OtherConfig { .. }
            | RemoteError::NotYourCode { .. }
            | RemoteError::Unknown { .. }
            | RemoteError::Busy { .. } => Exit::BadInput,
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

/// The worker's own error decides where it is known.
pub fn exit_of_cause(cause: &Cause) -> Exit {
    match (cause.kind, &cause.source) {
        (Kind::Stopped, _) => Exit::Stopped,
        (Kind::Stalled, _) => Exit::Stalled,
        (Kind::Failed, _) if cause.error.starts_with("panicked") => Exit::Bug,
        (Kind::Failed, Some(source)) => exit_of_worker(&**source).unwrap_or(Exit::Device),
        (Kind::Failed, None) => Exit::Device,
    }
}

/// The code of an error that a worker can end with.
fn exit_of_worker(error: &(dyn Error + Send + Sync + 'static)) -> Option<Exit> {
    fn of<E: Classified + Error + 'static>(error: &(dyn Error + Send + Sync + 'static)) -> Option<Exit> {
        error.downcast_ref::<E>().map(Classified::exit)
    }
    of::<CheckpointError>(error)
        .or_else(|| of::<DataError>(error))
        .or_else(|| of::<StateError>(error))
        .or_else(|| of::<FrozenError>(error))
        .or_else(|| of::<ExportError>(error))
        .or_else(|| of::<ExecError>(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use drafthorse_train::pipeline::crew::RunError;
    use std::path::PathBuf;
    use std::sync::Arc;

    fn io_of(kind: io::ErrorKind) -> io::Error {
        kind.into()
    }

    fn run_failure(kind: Kind, error: &str) -> RunFailure {
        RunFailure::Run(RunError { cause: Arc::new(Cause::new(kind, "target 0", error)), others: Vec::new() })
    }

    fn writer_failure() -> RunFailure {
        let source = CheckpointError::NotFinite { tensor: "fc".into(), step: 3 };
        let cause = Cause::new(Kind::Failed, "checkpoint writer", source.to_string()).with_source(Arc::new(source));
        RunFailure::Run(RunError { cause: Arc::new(cause), others: Vec::new() })
    }

    /// Every mapping, one line each: what happened → code.
    fn table() -> String {
        let path = || PathBuf::from("f");
        let text = || String::from("w");
        let full = || io_of(io::ErrorKind::StorageFull);
        let gone = || io_of(io::ErrorKind::NotFound);
        let draft = || DraftError { field: "layers", got: text(), why: text(), advice: text() };
        let device = || ExecError::Device { phase: text(), op: text(), what: text() };
        let memory = || ExecError::Memory { bytes: 1, what: text() };
        let other_init = || StateError::Other { folder: text(), field: "layers", theirs: text(), ours: text(), todo: text() };
        let weights = || WeightsError::NoWeights { folder: path(), advice: text() };
        let rows: Vec<(&str, Failure)> = vec![
            ("input file absent", DataError::Io { action: "read", path: path(), source: gone() }.into()),
            ("disk full while preparing", DataError::Io { action: "write", path: path(), source: full() }.into()),
            ("broken input line", DataError::BadLine { path: path(), line: 1, byte: 0, what: text() }.into()),
            ("unknown role", DataError::UnknownRole { path: path(), line: 1, byte: 0, role: text() }.into()),
            ("tokenizer absent", DataError::Target { path: path(), what: text(), todo: text() }.into()),
            ("template refuses", DataError::Template(text()).into()),
            ("template without end", DataError::EndlessTemplate { steps: 1 }.into()),
            ("row out of range", DataError::NoRow { path: path(), row: 9, last: 3 }.into()),
            ("preparing stopped on request", DataError::Stopped { out: path() }.into()),
            ("tokenizer fails", DataError::Tokenizer(text()).into()),
            ("nothing to train on", DataError::Refused { what: text(), todo: text() }.into()),
            ("damaged dataset", DataError::Dataset { path: path(), what: text(), todo: text() }.into()),
            ("faulty row", DataError::Row { path: path(), row: 1, what: text() }.into()),
            ("impossible data setting", DataError::Config { key: "k", what: text(), todo: text() }.into()),
            ("target config lacks a key", ModelConfigError::Missing { path: path(), key: text(), wanted: "w" }.into()),
            ("impossible drafter", draft().into()),
            ("weights absent", weights().into()),
            ("weights unreadable", WeightsError::Io { path: path(), source: gone() }.into()),
            ("drafter folder without weights", DraftFolderError::Checkpoint(weights()).into()),
            ("drafter folder of another target", DraftFolderError::Draft { folder: path(), error: Box::new(draft()) }.into()),
            ("export of weights that are not finite", ExportError::NonFinite { tensor: text(), at: 0, value: f32::NAN }.into()),
            ("export without a tensor", ExportError::MissingTensor(text()).into()),
            ("export onto a full disk", ExportError::Io { what: "write", path: path(), source: full() }.into()),
            ("export over something else", ExportError::NotADrafter { folder: path() }.into()),
            ("export reads back otherwise", ExportError::Differs { detail: text() }.into()),
            ("config absent", ConfigError::Read { path: path(), source: gone() }.into()),
            ("config typo", ConfigError::Parse { origin: text(), what: text(), todo: text() }.into()),
            ("impossible config value", ConfigError::Value { key: "k", what: text(), todo: text() }.into()),
            ("disk full while saving", CheckpointError::Io { what: "write", path: path(), source: full(), todo: text() }.into()),
            ("damaged checkpoint", CheckpointError::Damaged { path: path(), what: text() }.into()),
            ("checkpoint file of another checksum", CheckpointError::Corrupt { path: path(), what: text(), todo: text() }.into()),
            ("checkpoint of another run", CheckpointError::Mismatch { path: path(), what: text(), todo: text() }.into()),
            ("weights not finite at a save", CheckpointError::NotFinite { tensor: text(), step: 1 }.into()),
            ("allocation fails", memory().into()),
            ("device fails", device().into()),
            ("host data of another shape", ExecError::HostShape { name: text(), want: 1, dtype: "float", got: text() }.into()),
            ("phase without its slot", ExecError::Slot { phase: text(), what: text() }.into()),
            ("backend missing", FrozenError::Missing { what: text(), todo: text() }.into()),
            ("target does not fit", FrozenError::Exec(memory()).into()),
            ("setup: target", SetupError::Target(FrozenError::Checkpoint(weights())).into()),
            ("setup: data", SetupError::Data(DataError::Refused { what: text(), todo: text() }).into()),
            ("setup: drafter", SetupError::Draft(draft()).into()),
            ("init_from of another shape", other_init().into()),
            ("init_from of another shape, at a launch", ResumeError::Init(other_init()).into()),
            ("state: device fails", StateError::Exec(device()).into()),
            ("run folder on a full disk", TelemetryError::Io { action: "open", path: path(), source: full() }.into()),
            ("telemetry writer stuck", TelemetryError::WriterStuck { path: path(), waited_ms: 1 }.into()),
            ("weights not finite, told by the writer's thread", writer_failure().into()),
            ("worker panics", run_failure(Kind::Failed, "panicked: index out of bounds").into()),
            ("worker fails", run_failure(Kind::Failed, "phase `micro`: lost").into()),
            ("run stalls", run_failure(Kind::Stalled, "no progress").into()),
            ("second Ctrl-C", run_failure(Kind::Stopped, "Ctrl-C, asked twice").into()),
            (
                "too many steps not finite",
                RunFailure::Diverged(RunError {
                    cause: Arc::new(Cause::new(Kind::Failed, "drafter 0", "w")),
                    others: Vec::new(),
                })
                .into(),
            ),
            (
                "resume from a damaged checkpoint",
                RunFailure::from(CheckpointError::Damaged { path: path(), what: text() }).into(),
            ),
            ("no such destination", RemoteError::Destinations { path: path(), what: text(), todo: text() }.into()),
            ("connection lost", RemoteError::Lost { place: text(), doing: text() }.into()),
            ("far disk full", RemoteError::DiskFull { place: text(), file: text(), at: 1 }.into()),
            ("another build runs", RemoteError::NotYourCode { what: text(), todo: text() }.into()),
            ("launch diverged at once", RemoteError::NotStarted { what: text(), code: Some(6), todo: text() }.into()),
            ("launch killed at once", RemoteError::NotStarted { what: text(), code: None, todo: text() }.into()),
            ("run that cannot be killed", RemoteError::NotStopped { what: text(), todo: text() }.into()),
            ("standard output on a full disk", Failure::output(&full())),
            ("reader of standard output gone", Failure::output(&io_of(io::ErrorKind::BrokenPipe))),
        ];
        rows.iter().map(|(what, failure)| format!("{:>2}  {what}\n", failure.exit().code())).collect()
    }

    #[test]
    fn every_error_has_its_code() {
        let wanted = include_str!("../tests/expected/exit-codes.txt");
        assert!(
            table() == wanted,
            "the table of codes has changed; if that is meant, tests/expected/exit-codes.txt becomes:\n{}",
            table()
        );
    }

    #[test]
    fn a_failure_is_two_lines() {
        let failures: [Failure; 3] = [
            ConfigError::Value { key: "optimizer.lr", what: "0 is no learning rate".into(), todo: "6e-4 is usual".into() }.into(),
            ExecError::Device { phase: "micro".into(), op: "linear".into(), what: "lost".into() }.into(),
            Failure::new(Exit::Usage, "a", "b"),
        ];
        let lines: Vec<String> = failures.iter().map(|f| f.lines().unwrap()).collect();
        assert_eq!(lines[0], "error: config key `optimizer.lr`: 0 is no learning rate\n  6e-4 is usual");
        assert!(lines.iter().all(|l| l.lines().count() == 2), "{lines:?}");
        assert!(Failure::ReaderGone.lines().is_none());
    }

    #[test]
    fn the_table_lists_every_code_once() {
        let table = exit_code_table();
        assert_eq!(table.lines().count(), 1 + Exit::ALL.len());
        let codes: Vec<u8> = Exit::ALL.iter().map(|e| e.code()).collect();
        assert_eq!(codes, [0, 2, 3, 4, 5, 6, 7, 8, 70]);
    }
}
