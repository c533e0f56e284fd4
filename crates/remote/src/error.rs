//! What can go wrong on the way to a far end and there, each kind with its own words.
//!
//! Refuses errors that name neither hop, file nor run. Invariant: the last line says what to do.

use std::path::PathBuf;
use thiserror::Error;

/// An error of this crate.
#[derive(Debug, Error)]
pub enum RemoteError {
    /// A file of this machine.
    #[error("cannot {action} {}: {source}\ncheck the path, its permissions and the disk", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The destinations file.
    #[error("{}: {what}\n{todo}", path.display())]
    Destinations {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
        /// What to do.
        todo: String,
    },
    /// A hop's program is not on this machine.
    #[error("cannot run `{program}`, the first hop's program: {source}\ninstall it, or correct the destination's hops")]
    NoProgram {
        /// The program.
        program: String,
        /// Why.
        source: std::io::Error,
    },
    /// A hop does not lead on.
    #[error("hop {number} of {of}, `{hop}`, does not lead on: {said}\n{todo}")]
    Unreachable {
        /// Hop, from 1.
        number: usize,
        /// Hops in all.
        of: usize,
        /// The hop.
        hop: String,
        /// What it said.
        said: String,
        /// What to do.
        todo: String,
    },
    /// The connection broke while something was under way.
    #[error("the connection to {place} was lost while {doing}\nrun the command again: what has arrived is kept")]
    Lost {
        /// The chain.
        place: String,
        /// What was under way.
        doing: String,
    },
    /// Arguments do not arrive as they were sent.
    #[error(
        "{place} does not pass arguments on unharmed: `{sent}` arrived as `{got}`\nuse a POSIX shell as the login shell there, or `sh -c` where a hop needs a shell"
    )]
    Garbled {
        /// The chain.
        place: String,
        /// What was sent.
        sent: String,
        /// What came.
        got: String,
    },
    /// The far end lacks tools.
    #[error("{place} lacks {tools}\ninstall coreutils (or busybox) there; sh, cat and sha256sum are what everything rests on")]
    NoTools {
        /// The chain.
        place: String,
        /// Their names.
        tools: String,
    },
    /// A command at the far end failed.
    #[error("{place}: {doing} failed with code {code}: {said}\n{todo}")]
    Failed {
        /// The chain.
        place: String,
        /// What was done.
        doing: String,
        /// Exit code.
        code: i32,
        /// What it said.
        said: String,
        /// What to do.
        todo: String,
    },
    /// The binary is for another machine.
    #[error(
        "the program is built for {ours}, {place} is {theirs}\nbuild it for that machine (cargo build --target …) and pass it with --binary"
    )]
    WrongArchitecture {
        /// The chain.
        place: String,
        /// Architecture of the binary.
        ours: String,
        /// Architecture there.
        theirs: String,
    },
    /// The far C library is older than the binary needs.
    #[error(
        "the program needs glibc {needs}, {place} has {has}\nbuild it on a machine with glibc {has} or older and pass it with --binary"
    )]
    OldGlibc {
        /// The chain.
        place: String,
        /// Version needed.
        needs: String,
        /// Version there.
        has: String,
    },
    /// A GPU run, and no driver.
    #[error(
        "the config wants GPUs and {place} shows no NVIDIA driver\nif the host has one, pass the devices into the container; else set pipeline.device=cpu"
    )]
    NoDriver {
        /// The chain.
        place: String,
    },
    /// Not enough disk, known beforehand.
    #[error(
        "{folder} on {place} has {free_bytes} bytes free, {need_bytes} are to be sent\nfree space there, or choose another folder"
    )]
    NoSpace {
        /// The chain.
        place: String,
        /// The folder.
        folder: String,
        /// Free.
        free_bytes: u64,
        /// Needed.
        need_bytes: u64,
    },
    /// The disk filled up while something arrived.
    #[error(
        "the disk of {place} is full: {file} arrived up to byte {at}\nfree space there and run the command again: what has arrived is kept"
    )]
    DiskFull {
        /// The chain.
        place: String,
        /// The file.
        file: String,
        /// Bytes that arrived.
        at: u64,
    },
    /// What arrived is not what was sent.
    #[error(
        "{file} arrived at {place} with other content: sent {ours:.12}…, there {theirs:.12}…\nsomething writes to that file, or the disk or the link corrupts data; run the command again"
    )]
    WrongHash {
        /// The chain.
        place: String,
        /// The file.
        file: String,
        /// SHA-256 here.
        ours: String,
        /// SHA-256 there.
        theirs: String,
    },
    /// A file changed here while it was read.
    #[error("{} changed while it was sent\nlet whatever writes it finish, then run the command again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The file lies on the way, not where the program runs.
    #[error(
        "{file} with your content lies on {outer}, not where the program runs ({place})\nit was copied to the wrong filesystem: use `drafthorse deploy`, which sends through the whole chain"
    )]
    WrongFilesystem {
        /// The file.
        file: String,
        /// Where it lies.
        outer: String,
        /// The whole chain.
        place: String,
    },
    /// The launcher starts something else.
    #[error(
        "`{program}` on {place} starts build {found}, {expected} was deployed\nit is an older copy or a script that starts one: point the destination's `program` at the deployed file, or remove it"
    )]
    StaleEntry {
        /// The chain.
        place: String,
        /// What was asked.
        program: String,
        /// What it says it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// The config reads differently there.
    #[error(
        "{place} reads the config as {found:.12}…, here it is {expected:.12}…\nthe builds differ in what they know of the config: deploy again with the program that you use here"
    )]
    OtherConfig {
        /// The chain.
        place: String,
        /// Hash there.
        found: String,
        /// Hash here.
        expected: String,
    },
    /// The running job is not what was meant.
    #[error("the run does not contain your change: {what}\n{todo}")]
    NotYourCode {
        /// What differs.
        what: String,
        /// What to do.
        todo: String,
    },
    /// There is no such launch or run.
    #[error("there is no {what}\n{todo}")]
    Unknown {
        /// What was looked for, and where.
        what: String,
        /// What to do.
        todo: String,
    },
    /// Something of this name is going on.
    #[error("{what}\n{todo}")]
    Busy {
        /// What is going on.
        what: String,
        /// What to do.
        todo: String,
    },
    /// A launch that did not get to where it should.
    #[error("{what}\n{todo}")]
    NotStarted {
        /// What happened.
        what: String,
        /// Its exit code, if it has one.
        code: Option<i32>,
        /// What to do.
        todo: String,
    },
    /// A run that does not end.
    #[error("{what}\n{todo}")]
    NotStopped {
        /// What happened.
        what: String,
        /// What to do.
        todo: String,
    },
    /// Telemetry files.
    #[error(transparent)]
    Telemetry(#[from] drafthorse_telemetry::TelemetryError),
}

impl RemoteError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> RemoteError {
        let path = path.into();
        move |source| RemoteError::Io { action, path, source }
    }
}
