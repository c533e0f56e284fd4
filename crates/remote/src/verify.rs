//! What really runs at the far end.
//!
//! Job: compare the running process with what is meant: its own program's hash, its reported build and config, its start. Refuses to conclude anything
//! from files that merely lie there. Invariant: each kind of difference has its own words; "equal" means that the far end said so itself.

use crate::error::RemoteError;
use crate::far::{Far, Input};
use drafthorse_telemetry::{Outcome, STATUS_FILE, Status};
use serde::Serialize;

/// What is meant to run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Meant {
    /// Build id of the program here.
    pub build_id: String,
    /// SHA-256 of the program here.
    pub program_sha256: String,
    /// Hash of the config as the far end reads it.
    pub config_hash: Option<String>,
    /// When it was deployed, Unix time in milliseconds by the far end's clock.
    pub deployed_t: Option<u64>,
}

/// One line of the comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Compared {
    /// What.
    pub what: &'static str,
    /// Here.
    pub ours: String,
    /// There.
    pub theirs: String,
    /// Whether they agree.
    pub equal: bool,
}

/// What runs, compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verified {
    /// The run's process, by its own count.
    pub pid: u32,
    /// Its host, by its own account.
    pub host: String,
    /// Last step.
    pub step: Option<u64>,
    /// The lines.
    pub lines: Vec<Compared>,
}

impl Verified {
    /// What differs, as an error; nothing if all agrees.
    ///
    /// # Errors
    /// [`RemoteError::NotYourCode`] with the first difference.
    pub fn check(&self, run: &str) -> Result<(), RemoteError> {
        match self.lines.iter().find(|l| !l.equal) {
            None => Ok(()),
            Some(line) => Err(RemoteError::NotYourCode {
                what: format!("its {} is {}, yours is {}", line.what, line.theirs, line.ours),
                todo: format!(
                    "deploy, then `drafthorse restart {run} --resume --to …`; a running process keeps what it started with"
                ),
            }),
        }
    }
}

/// Hash of the program of process `$1`, and the age of the file `$2` in its own words.
const PROCESS: &str = r#"if [ -r "/proc/$1/exe" ]; then s=$(sha256sum < "/proc/$1/exe") && echo "exe=${s%% *}"; fi
[ -d "/proc/$1" ] && echo alive=yes
exit 0"#;

/// Looks at the run in `run_dir` there.
///
/// # Errors
/// When the chain breaks or nothing runs there.
pub fn verify(far: &Far, run_dir: &str, meant: &Meant) -> Result<Verified, RemoteError> {
    let nothing = |what: &str| RemoteError::Unknown {
        what: format!("run going on in {run_dir} on {}: {what}", far.place()),
        todo: "launch it (drafthorse launch --to …), or name the run".into(),
    };
    let file = format!("{run_dir}/{STATUS_FILE}");
    let answer = far.script("reading the run's status", r#"cat "$1""#, &[&file], Input::Nothing)?;
    if answer.code != 0 {
        return Err(nothing("it has no status"));
    }
    let status: Status = serde_json::from_str(&answer.out).map_err(|e| nothing(&format!("its status cannot be read ({e})")))?;
    let identity = status.identity.ok_or_else(|| nothing("it has not said who it is"))?;
    let pid = identity.pid.to_string();
    let seen = far.must("looking at the run's process", PROCESS, &[&pid], "look at it by hand")?;
    let exe = seen.lines().find_map(|l| l.strip_prefix("exe=")).map(str::to_owned);
    if !seen.contains("alive=yes") {
        return Err(nothing(match &status.outcome {
            Some(Outcome::Done(_)) => "it has ended, with all its steps done",
            Some(Outcome::Stopped(_)) => "it was stopped",
            Some(Outcome::Failure(_)) => "it has failed",
            None => "its process is gone",
        }));
    }
    let line =
        |what, ours: &str, theirs: &str| Compared { what, ours: ours.into(), theirs: theirs.into(), equal: ours == theirs };
    let mut lines = vec![line("build", &meant.build_id, &identity.build_id)];
    if let Some(exe) = &exe {
        lines.push(line("program (SHA-256)", &meant.program_sha256, exe));
    }
    if let Some(hash) = &meant.config_hash {
        lines.push(line("config", hash, &identity.config_hash));
    }
    if let Some(deployed_t) = meant.deployed_t {
        // What is equal bit for bit may have started earlier; only an unknown program must have started later.
        let equal = identity.started_t >= deployed_t || (exe.is_some() && lines.iter().all(|l| l.equal));
        lines.push(Compared {
            what: "start",
            ours: format!("not before {deployed_t}"),
            theirs: identity.started_t.to_string(),
            equal,
        });
    }
    Ok(Verified { pid: identity.pid, host: identity.host, step: status.step.map(|s| s.step), lines })
}

const HASH: &str = r#"[ -f "$1" ] || exit 1
s=$(sha256sum < "$1") && echo "${s%% *}""#;

/// Whether `file` with the hash `sha256` lies on the way to the far end instead of there: on the filesystem of an outer hop.
///
/// # Errors
/// [`RemoteError::WrongFilesystem`], naming the hop; or when the chain breaks.
pub fn look_on_the_way(far: &Far, file: &str, sha256: &str) -> Result<(), RemoteError> {
    let there = |far: &Far| -> Result<bool, RemoteError> {
        Ok(far.script("hashing a file", HASH, &[file], Input::Nothing)?.out.trim() == sha256)
    };
    let hops = far.chain().hops().len();
    if hops == 0 || there(far)? {
        return Ok(());
    }
    for n in 1..hops {
        let outer = Far::new(far.chain().first(n), Default::default());
        if there(&outer)? {
            return Err(RemoteError::WrongFilesystem { file: file.into(), outer: outer.place(), place: far.place() });
        }
    }
    Ok(())
}

/// Asks `program` there who it is. It must be `build_id`, unless that is empty because the program cannot run here.
///
/// # Errors
/// [`RemoteError::StaleEntry`] if it says that it is another, or [`RemoteError::Failed`] with the loader's words if it does not run.
pub fn entry(far: &Far, program: &str, build_id: &str) -> Result<String, RemoteError> {
    let answer = far.script("asking the program who it is", r#"exec "$1" version --json"#, &[program], Input::Nothing)?;
    if answer.code != 0 {
        let said = answer.said();
        let todo = if said.contains("GLIBC") || said.contains("shared librar") {
            "a library is missing or too old there: build on a machine like it and pass the program with --binary"
        } else {
            "run it there by hand"
        };
        let doing = format!("`{program} version`");
        return Err(RemoteError::Failed { place: far.place(), doing, code: answer.code, said, todo: todo.into() });
    }
    let said: serde_json::Value = serde_json::from_str(&answer.out).unwrap_or_default();
    let found = said["build_id"].as_str().unwrap_or("unknown").to_owned();
    if found == build_id || build_id.is_empty() {
        return Ok(found);
    }
    Err(RemoteError::StaleEntry { place: far.place(), program: program.into(), found, expected: build_id.into() })
}
