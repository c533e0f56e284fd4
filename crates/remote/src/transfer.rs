//! Files on their way to a far end.
//!
//! Job: say what is there, by hash; send what is not, going on where an earlier attempt was cut. Refuses to put a file in its place before the far
//! end has hashed it. Invariants: a file at its place is whole; a part is named by the hash of what it is to become, so a part can only be
//! gone on with, never mistaken; the far end needs sh, cat, sha256sum and the usual small tools.

use crate::error::RemoteError;
use crate::far::{Far, Input};
use crate::files::sha256;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

/// A file that is to be at the far end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// What it is, in the table's words.
    pub what: String,
    /// Here.
    pub local: PathBuf,
    /// Size here.
    pub size_bytes: u64,
    /// SHA-256 here.
    pub sha256: String,
    /// Where it belongs there.
    pub to: String,
    /// Whether it is a program.
    pub executable: bool,
}

/// What the far end has at a path: size and SHA-256.
pub type There = Option<(u64, String)>;

const INVENTORY: &str = r#"mkdir -p "$1/.hashes" 2>/dev/null
while IFS= read -r line; do
  key=${line%% *}; f=${line#* }
  if [ -f "$f" ]; then
    n=$(($(wc -c < "$f"))); s=; side="$1/.hashes/$key"
    if [ "$2" = remembered ] && [ -f "$side" ] && [ "$side" -nt "$f" ]; then
      read -r m s < "$side"; [ "$m" = "$n" ] || s=
    fi
    if [ -z "$s" ]; then
      s=$(sha256sum < "$f"); s=${s%% *}
      [ -n "$s" ] && [ -d "$1/.hashes" ] && printf '%s %s\n' "$n" "$s" > "$side"
    fi
    printf '%s %s\n' "$n" "${s:-unreadable}"
  else
    echo -
  fi
done"#;

/// What the far end has at `paths`, hashed there. With `remembered`, a hash is taken from an earlier time if the file has its size and is older than the
/// memory. Nothing is written there but that memory, and only where `folder` exists or can be made.
///
/// # Errors
/// When the chain breaks, or a path holds a line break.
pub fn inventory(far: &Far, folder: &str, paths: &[String], remembered: bool) -> Result<Vec<There>, RemoteError> {
    let mut list = String::new();
    for path in paths {
        if path.contains('\n') {
            let what = format!("way to ask for {path:?}: its name holds a line break");
            return Err(RemoteError::Unknown { what, todo: "rename the file".into() });
        }
        let key = sha256(path.as_bytes()).map_err(RemoteError::io("hash", path))?;
        list.push_str(&format!("{key:.32} {path}\n"));
    }
    let mode = if remembered { "remembered" } else { "fresh" };
    let answer = far.script("hashing files", INVENTORY, &[folder, mode], Input::Text(&list))?;
    let lines: Vec<There> = answer
        .out
        .lines()
        .map(|line| {
            let (size, hash) = line.split_once(' ')?;
            Some((size.parse().ok()?, hash.to_owned()))
        })
        .collect();
    if answer.code != 0 || lines.len() != paths.len() {
        return Err(RemoteError::Failed {
            place: far.place(),
            doing: "hashing files".into(),
            code: answer.code,
            said: answer.said(),
            todo: "check the folder's permissions there".into(),
        });
    }
    Ok(lines)
}

const BEGIN: &str = r#"mkdir -p "$1/.parts" "${2%/*}" || exit 4
if [ -f "$1/.parts/$3" ]; then echo $(($(wc -c < "$1/.parts/$3"))); else echo 0; fi"#;
const APPEND: &str = r#"cat >> "$1"; code=$?; echo $(($(wc -c < "$1"))); exit $code"#;
const FINISH: &str = r#"s=$(sha256sum < "$1"); s=${s%% *}; echo "$s"
[ "$s" = "$2" ] || { rm -f "$1"; exit 3; }
[ -z "$4" ] || chmod 755 "$1"
mv -f "$1" "$3""#;

/// Sends `item` through the chain and puts it in its place. `progress` gets the bytes that are there. Gives the bytes that did not have to be sent
/// because an earlier attempt had brought them.
///
/// # Errors
/// When the chain breaks, the disk fills, or what arrives has another hash; each in its own words.
pub fn put(far: &Far, folder: &str, item: &Item, progress: &(dyn Fn(u64) + Sync)) -> Result<u64, RemoteError> {
    let doing = format!("sending {}", item.what);
    let part = format!("{folder}/.parts/{}", item.sha256);
    let wrong = |theirs: String| RemoteError::WrongHash {
        place: far.place(),
        file: item.what.clone(),
        ours: item.sha256.clone(),
        theirs,
    };
    let mut theirs = String::new();
    // A part that was cut while two clients wrote to it is made anew, once.
    for _ in 0..2 {
        let out = far.must(&doing, BEGIN, &[folder, &item.to, &item.sha256], "check the folder's permissions there")?;
        let mut at: u64 = out.trim().parse().map_err(|_| RemoteError::Lost { place: far.place(), doing: doing.clone() })?;
        if at > item.size_bytes {
            far.must(&doing, r#"rm -f "$1""#, &[&part], "remove it by hand")?;
            at = 0;
        }
        let kept = at;
        if at < item.size_bytes || item.size_bytes == 0 {
            at = append(far, item, &part, at, &doing, progress)?;
        }
        if at < item.size_bytes {
            return Err(match File::open(&item.local).and_then(|f| f.metadata()) {
                Ok(meta) if meta.len() == item.size_bytes => RemoteError::Lost { place: far.place(), doing },
                _ => RemoteError::Changed { path: item.local.clone() },
            });
        }
        let executable = if item.executable { "x" } else { "" };
        let answer = far.script(&doing, FINISH, &[&part, &item.sha256, &item.to, executable], Input::Nothing)?;
        theirs = answer.out.trim().to_owned();
        match answer.code {
            0 => return Ok(kept),
            3 if crate::files::sha256_file(&item.local)? != item.sha256 => {
                return Err(RemoteError::Changed { path: item.local.clone() });
            }
            3 => {}
            code => {
                let todo = format!("check that {} can be written there", item.to);
                return Err(RemoteError::Failed { place: far.place(), doing, code, said: answer.said(), todo });
            }
        }
    }
    Err(wrong(theirs))
}

/// Appends what is missing from byte `from` on; gives the size that is there then.
fn append(
    far: &Far,
    item: &Item,
    part: &str,
    from: u64,
    doing: &str,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<u64, RemoteError> {
    let mut file = File::open(&item.local).map_err(RemoteError::io("open", &item.local))?;
    file.seek(SeekFrom::Start(from)).map_err(RemoteError::io("read", &item.local))?;
    let told = move |gone: u64| progress(from + gone);
    let input = Input::Stream(Box::new(file.take(item.size_bytes - from)), &told);
    let answer = far.script(doing, APPEND, &[part], input)?;
    let at = answer.out.trim().parse().unwrap_or(0);
    match answer.code {
        0 => Ok(at),
        _ if answer.err.to_lowercase().contains("no space left") || answer.err.contains("quota") => {
            Err(RemoteError::DiskFull { place: far.place(), file: item.what.clone(), at })
        }
        code => Err(RemoteError::Failed {
            place: far.place(),
            doing: doing.to_owned(),
            code,
            said: answer.said(),
            todo: "run the command again: what has arrived is kept".into(),
        }),
    }
}
