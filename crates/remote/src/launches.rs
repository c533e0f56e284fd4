//! Launches on this machine: their folders, records, locks.
//!
//! Job: keep for every launch what was started (program by hash, config, arguments), its log, its lock and how each attempt ended; find one by run
//! name or id. Refuses to take a lock file for a lock: only the kernel's lock counts, and it ends with its holder.
//! Invariants: a record is replaced by rename; a program that was launched stays on disk under its hash, whatever is built later.

use crate::error::RemoteError;
use crate::files::sha256_file;
use crate::process::ProcessId;
use drafthorse_telemetry::{Status, read_gpus, read_status, unix_ms};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{File, TryLockError};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Folder of all launches in a folder of runs.
pub const LAUNCHES: &str = ".launches";
/// Name of the log in a launch folder.
pub const LOG: &str = "log";
const RECORD: &str = "launch.json";
const STATE: &str = "state.json";
const STOP: &str = "stop";
const LOCK: &str = "lock";

/// What a launch starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    /// Its id: run name, time, process.
    pub id: String,
    /// Name of the run; its folder in the folder of runs.
    pub name: String,
    /// The program, under its hash.
    pub program: PathBuf,
    /// SHA-256 of the program.
    pub program_sha256: String,
    /// What the program says it is.
    pub build_id: String,
    /// The config that is used: a copy in the launch folder.
    pub config: PathBuf,
    /// Arguments of the trainer after the config.
    pub args: Vec<String>,
    /// Whether the trainer goes on from the newest checkpoint from its first attempt on.
    pub resume: bool,
    /// Unix time in milliseconds.
    pub created_t: u64,
    /// Crashes in a row without a new checkpoint after which it is given up.
    pub restarts: u32,
    /// Wait before the first restart; doubles each time.
    pub backoff_ms: u64,
    /// The launch that this one took over from.
    pub previous: Option<String>,
    /// Whether the previous launch is put back if this one fails before its first step.
    pub fall_back: bool,
    /// Bytes in use per GPU before the launch, as `nvidia-smi` said.
    pub gpu_used_before: Vec<(String, u64)>,
}

/// One attempt to train.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// The trainer.
    pub trainer: ProcessId,
    /// When it began.
    pub started_t: u64,
    /// When it ended.
    pub ended_t: Option<u64>,
    /// Its exit code; none while it runs, or when a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Why it ended, in words.
    pub reason: Option<String>,
    /// Last step it did.
    pub step: Option<u64>,
}

/// How a launch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// All steps done.
    Done,
    /// Asked to stop.
    Stopped,
    /// It failed in a way that another attempt would not mend.
    Failed,
    /// It crashed too often.
    GivenUp,
}

/// How a launch stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Who looks after it.
    pub supervisor: ProcessId,
    /// All attempts, oldest first.
    pub attempts: Vec<Attempt>,
    /// When the next attempt begins, while one is waited for.
    pub next_t: Option<u64>,
    /// How it ended.
    pub ended: Option<Ended>,
    /// The launch that took its place because it failed before its first step.
    pub put_back: Option<String>,
}

/// A launch folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchDir(PathBuf);

impl LaunchDir {
    /// The launch in `path`.
    pub fn new(path: impl Into<PathBuf>) -> LaunchDir {
        LaunchDir(path.into())
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Its log.
    pub fn log(&self) -> PathBuf {
        self.0.join(LOG)
    }

    /// The folder of runs.
    pub fn runs(&self) -> PathBuf {
        self.0.ancestors().nth(2).map_or_else(|| ".".into(), Path::to_owned)
    }

    /// What it starts.
    ///
    /// # Errors
    /// When the record is absent or damaged.
    pub fn launch(&self) -> Result<Launch, RemoteError> {
        self.read(RECORD)?.ok_or_else(|| RemoteError::Unknown {
            what: format!("launch record in {}", self.0.display()),
            todo: "see `drafthorse ps` for the launches that there are".into(),
        })
    }

    /// How it stands; none before its supervisor has begun.
    ///
    /// # Errors
    /// When the file is damaged.
    pub fn state(&self) -> Result<Option<State>, RemoteError> {
        self.read(STATE)
    }

    pub(crate) fn write_state(&self, state: &State) -> Result<(), RemoteError> {
        self.write(STATE, state)
    }

    /// The run folder of this launch.
    ///
    /// # Errors
    /// As [`LaunchDir::launch`].
    pub fn run_dir(&self) -> Result<PathBuf, RemoteError> {
        Ok(self.runs().join(self.launch()?.name))
    }

    /// The status that the launch's own trainer wrote last; none if the run folder holds another's.
    ///
    /// # Errors
    /// When files are damaged.
    pub fn status(&self) -> Result<Option<Status>, RemoteError> {
        let Some(state) = self.state()? else { return Ok(None) };
        let status = read_status(&self.run_dir()?)?;
        let pids: Vec<u32> = state.attempts.iter().map(|a| a.trainer.pid).collect();
        let since = state.attempts.first().map_or(u64::MAX, |a| a.started_t);
        Ok(status.filter(|s| s.identity.as_ref().is_some_and(|i| pids.contains(&i.pid) && i.started_t >= since)))
    }

    /// Asks the supervisor not to start another attempt.
    pub(crate) fn ask_to_stop(&self) -> Result<(), RemoteError> {
        let path = self.0.join(STOP);
        std::fs::write(&path, unix_ms().to_string()).map_err(RemoteError::io("write", path))
    }

    pub(crate) fn is_asked_to_stop(&self) -> bool {
        self.0.join(STOP).exists()
    }

    /// Takes the launch's lock for this process; none if another holds it.
    pub(crate) fn lock(&self) -> Result<Option<File>, RemoteError> {
        let path = self.0.join(LOCK);
        let file =
            File::options().create(true).truncate(false).write(true).open(&path).map_err(RemoteError::io("open", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(RemoteError::io("lock", &path)(e)),
        }
    }

    /// Whether somebody looks after it: the kernel's lock, not the file, tells.
    ///
    /// # Errors
    /// When the lock file cannot be opened.
    pub fn is_supervised(&self) -> Result<bool, RemoteError> {
        Ok(self.lock()?.is_none())
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, RemoteError> {
        let path = self.0.join(name);
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| RemoteError::io("understand", &path)(e.into())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(RemoteError::io("read", &path)(e)),
        }
    }

    fn write(&self, name: &str, value: &impl Serialize) -> Result<(), RemoteError> {
        let path = self.0.join(name);
        let aside = self.0.join(format!(".{name}.new"));
        let text = serde_json::to_vec_pretty(value).expect("records are plain data");
        std::fs::write(&aside, text).and_then(|()| std::fs::rename(&aside, &path)).map_err(RemoteError::io("write", &path))
    }
}

/// What is to be launched.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Run name.
    pub name: String,
    /// The program; it is copied under its hash unless it lies there.
    pub program: PathBuf,
    /// What it says it is.
    pub build_id: String,
    /// Text of the config.
    pub config: String,
    /// Arguments of the trainer after the config.
    pub args: Vec<String>,
    /// Go on from the newest checkpoint.
    pub resume: bool,
    /// See [`Launch::restarts`].
    pub restarts: u32,
    /// See [`Launch::backoff_ms`].
    pub backoff_ms: u64,
    /// See [`Launch::previous`].
    pub previous: Option<String>,
    /// See [`Launch::fall_back`].
    pub fall_back: bool,
}

/// All launches of a folder of runs.
#[derive(Clone, Debug)]
pub struct Launches {
    runs: PathBuf,
}

impl Launches {
    /// Those of `runs`.
    pub fn new(runs: impl Into<PathBuf>) -> Launches {
        Launches { runs: runs.into() }
    }

    fn root(&self) -> PathBuf {
        self.runs.join(LAUNCHES)
    }

    /// All, oldest first.
    ///
    /// # Errors
    /// When a record is damaged.
    pub fn list(&self) -> Result<Vec<(LaunchDir, Launch)>, RemoteError> {
        let entries = std::fs::read_dir(self.root()).into_iter().flatten().flatten();
        let mut all = Vec::new();
        for path in entries.map(|e| e.path()).filter(|p| p.join(RECORD).is_file()) {
            let dir = LaunchDir(path);
            let launch = dir.launch()?;
            all.push((dir, launch));
        }
        all.sort_by(|a, b| (a.1.created_t, &a.1.id).cmp(&(b.1.created_t, &b.1.id)));
        Ok(all)
    }

    /// The newest launch of a run name or of a path to a run folder, or the launch with this id.
    ///
    /// # Errors
    /// When there is none.
    pub fn find(&self, wanted: &str) -> Result<(LaunchDir, Launch), RemoteError> {
        let all = self.list()?;
        let name = Path::new(wanted).file_name().map_or_else(|| wanted.to_owned(), |n| n.to_string_lossy().into_owned());
        let names: std::collections::BTreeSet<String> = all.iter().map(|(_, l)| l.name.clone()).collect();
        all.into_iter().rev().find(|(_, l)| l.id == wanted || l.name == name).ok_or_else(|| RemoteError::Unknown {
            what: format!("launch of `{wanted}` in {}", self.runs.display()),
            todo: match names.is_empty() {
                true => "nothing has been launched there: drafthorse launch CONFIG".into(),
                false => format!("launched there: {}", names.into_iter().collect::<Vec<_>>().join(", ")),
            },
        })
    }

    /// Writes the record of a new launch; nothing is started.
    ///
    /// # Errors
    /// When the run is going on, or the disk does not take the record.
    pub fn create(&self, wanted: Wanted) -> Result<LaunchDir, RemoteError> {
        self.refuse_if_busy(&wanted.name)?;
        self.write_down(wanted)
    }

    /// As [`Launches::create`], by the supervisor whose launch of the same name has failed and is about to end.
    pub(crate) fn write_down(&self, wanted: Wanted) -> Result<LaunchDir, RemoteError> {
        let bad = wanted.name.is_empty() || wanted.name.starts_with('.') || wanted.name.contains('/');
        if bad {
            let what = format!("run `{}`: that is no name for a folder", wanted.name);
            return Err(RemoteError::Unknown { what, todo: "use letters, digits and dashes".into() });
        }
        let (program, program_sha256) = self.keep_program(&wanted.program)?;
        let created_t = unix_ms();
        let mut number = 0;
        let dir = loop {
            let dir = self.root().join(format!("{}-{created_t}-{number}", wanted.name));
            match std::fs::create_dir(&dir) {
                Ok(()) => break LaunchDir(dir),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(RemoteError::io("make", dir)(e)),
            }
        };
        let config = dir.0.join("config.toml");
        std::fs::write(&config, &wanted.config).map_err(RemoteError::io("write", &config))?;
        let launch = Launch {
            id: dir.0.file_name().expect("it was joined").to_string_lossy().into_owned(),
            name: wanted.name,
            program,
            program_sha256,
            build_id: wanted.build_id,
            config,
            args: wanted.args,
            resume: wanted.resume,
            created_t,
            restarts: wanted.restarts,
            backoff_ms: wanted.backoff_ms,
            previous: wanted.previous,
            fall_back: wanted.fall_back,
            gpu_used_before: read_gpus().into_iter().map(|g| (g.device, g.memory_used_bytes)).collect(),
        };
        dir.write(RECORD, &launch)?;
        Ok(dir)
    }

    /// Refuses when a launch of this name goes on.
    ///
    /// # Errors
    /// [`RemoteError::Busy`], naming it.
    pub fn refuse_if_busy(&self, name: &str) -> Result<(), RemoteError> {
        for (dir, launch) in self.list()?.into_iter().filter(|(_, l)| l.name == name) {
            let state = dir.state()?;
            let trainer = state.as_ref().and_then(|s| s.attempts.last()).filter(|a| a.trainer.is_alive());
            if trainer.is_some() || (dir.is_supervised()? && state.as_ref().is_none_or(|s| s.ended.is_none())) {
                let pid = trainer.map_or_else(String::new, |a| format!(" (process {})", a.trainer.pid));
                return Err(RemoteError::Busy {
                    what: format!("run `{name}` goes on: launch {}{pid}", launch.id),
                    todo: format!("stop it (drafthorse stop {name}), restart it, or choose another name"),
                });
            }
        }
        Ok(())
    }

    /// The program under its hash: where it lies if it lies under it, else a copy.
    fn keep_program(&self, program: &Path) -> Result<(PathBuf, String), RemoteError> {
        let program = program.canonicalize().map_err(RemoteError::io("find", program))?;
        let hash = sha256_file(&program)?;
        let short = &hash[..16];
        let folder = program.parent().and_then(Path::file_name).map(|n| n.to_string_lossy().into_owned());
        std::fs::create_dir_all(self.root()).map_err(RemoteError::io("make", self.root()))?;
        if folder.as_deref() == Some(short) {
            return Ok((program, hash));
        }
        let kept = self.root().join("builds").join(short).join("drafthorse");
        if sha256_file(&kept).is_ok_and(|h| h == hash) {
            return Ok((kept.canonicalize().map_err(RemoteError::io("find", &kept))?, hash));
        }
        let parent = kept.parent().expect("it was joined");
        std::fs::create_dir_all(parent).map_err(RemoteError::io("make", parent))?;
        let aside = parent.join(format!(".new-{}", std::process::id()));
        std::fs::copy(&program, &aside)
            .and_then(|_| std::fs::set_permissions(&aside, std::fs::Permissions::from_mode(0o755)))
            .and_then(|()| std::fs::rename(&aside, &kept))
            .map_err(RemoteError::io("copy the program to", &kept))?;
        Ok((kept.canonicalize().map_err(RemoteError::io("find", &kept))?, hash))
    }
}
