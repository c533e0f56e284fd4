//! Reading a run folder while it is written.
//!
//! Refuses: to wait, to write, and to fail over a bad line (bad lines are counted).
//! Invariants: a line is given once and only when it is whole; an events file that was replaced, or is shorter than what was
//! read, is read again from its start and the reader is told (`restarted`).

use crate::error::TelemetryError;
use crate::event::Envelope;
use crate::recorder::{EVENTS_FILE, STATUS_FILE};
use crate::status::Status;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes read at most in one go, so that a long history comes in pieces.
const CHUNK: usize = 1 << 20;

/// Whole lines of a file that grows.
#[derive(Debug)]
pub struct LineTail {
    path: PathBuf,
    open: Option<(File, u64)>,
    /// Byte after the last whole line given.
    offset: u64,
    buffer: Vec<u8>,
}

/// What [`LineTail::poll`] found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// Whole lines without their line break.
    pub lines: Vec<Vec<u8>>,
    /// The file was replaced or cut: these lines begin at its start again.
    pub restarted: bool,
    /// More can be read at once.
    pub more: bool,
}

impl LineTail {
    /// Follows `path` from its start; the file need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> LineTail {
        LineTail { path: path.into(), open: None, offset: 0, buffer: Vec::new() }
    }

    /// Byte after the last line given.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the file now; 0 if there is none.
    pub fn len(&self) -> u64 {
        std::fs::metadata(&self.path).map_or(0, |meta| meta.len())
    }

    /// Whether the file is absent or empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Gives the next lines, at most about a megabyte of them; none if there is nothing new.
    ///
    /// # Errors
    /// If the file exists and cannot be read.
    pub fn poll(&mut self) -> Result<Lines, TelemetryError> {
        let mut out = Lines::default();
        loop {
            if self.open.is_none() && !self.reopen()? {
                return Ok(out);
            }
            let Some((file, inode)) = &mut self.open else { return Ok(out) };
            let inode = *inode;
            let len = file.metadata().map_err(TelemetryError::io("read", &self.path))?.len();
            if len < self.offset {
                self.offset = 0;
                out.restarted = true;
            }
            self.buffer.clear();
            file.seek(SeekFrom::Start(self.offset))
                .and_then(|_| file.by_ref().take(CHUNK as u64).read_to_end(&mut self.buffer))
                .map_err(TelemetryError::io("read", &self.path))?;
            let mut whole = self.buffer.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
            if whole == 0 && self.buffer.len() == CHUNK {
                // A line longer than the buffer is no event; it is given in pieces and counted as bad by the caller.
                whole = CHUNK;
            }
            if whole > 0 {
                let text = self.buffer[..whole].strip_suffix(b"\n").unwrap_or(&self.buffer[..whole]);
                out.lines = text.split(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
                self.offset += whole as u64;
                out.more = self.buffer.len() == CHUNK;
                return Ok(out);
            }
            // All of this file is read; another may have taken its place.
            let replaced = std::fs::metadata(&self.path).is_ok_and(|meta| meta.ino() != inode);
            if !replaced {
                return Ok(out);
            }
            self.open = None;
            self.offset = 0;
            out.restarted = true;
        }
    }

    fn reopen(&mut self) -> Result<bool, TelemetryError> {
        match File::open(&self.path) {
            Ok(file) => {
                let inode = file.metadata().map_err(TelemetryError::io("read", &self.path))?.ino();
                self.open = Some((file, inode));
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(TelemetryError::io("open", &self.path)(error)),
        }
    }
}

/// What a source has that is new.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Update {
    /// New events, in order.
    pub events: Vec<Envelope>,
    /// The status, if it is another than before.
    pub status: Option<Status>,
    /// The events begin again: what was gathered from earlier ones no longer holds.
    pub restarted: bool,
    /// Lines that could not be understood.
    pub bad_lines: u64,
    /// More can be had at once.
    pub more: bool,
}

/// Where a watcher gets a run's events and status from: a folder here, or a stream from elsewhere.
pub trait Source {
    /// What is new since the last call, without waiting.
    ///
    /// # Errors
    /// If the source is there and cannot be read; the caller may call again.
    fn poll(&mut self) -> Result<Update, TelemetryError>;

    /// The source in a few words, e.g. its path.
    fn name(&self) -> String;
}

/// A run folder on this machine.
#[derive(Debug)]
pub struct RunFolder {
    dir: PathBuf,
    events: LineTail,
    last_status: Vec<u8>,
}

impl RunFolder {
    /// Follows the run in `dir`, from its first event; the files need not exist yet.
    pub fn new(dir: impl Into<PathBuf>) -> RunFolder {
        let dir = dir.into();
        RunFolder { events: LineTail::new(dir.join(EVENTS_FILE)), dir, last_status: Vec::new() }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// Reads the status file of a run folder; `None` if there is none yet.
///
/// # Errors
/// If the file is there and cannot be read, or is not a status.
pub fn read_status(dir: &Path) -> Result<Option<Status>, TelemetryError> {
    read_status_bytes(dir)?.map(|bytes| parse_status(dir, &bytes)).transpose()
}

fn read_status_bytes(dir: &Path) -> Result<Option<Vec<u8>>, TelemetryError> {
    let path = dir.join(STATUS_FILE);
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TelemetryError::io("read", &path)(error)),
    }
}

fn parse_status(dir: &Path, bytes: &[u8]) -> Result<Status, TelemetryError> {
    serde_json::from_slice(bytes).map_err(|error| TelemetryError::Format {
        path: dir.join(STATUS_FILE),
        what: "status",
        reason: error.to_string(),
    })
}

impl Source for RunFolder {
    fn poll(&mut self) -> Result<Update, TelemetryError> {
        let lines = self.events.poll()?;
        let mut update = Update { restarted: lines.restarted, more: lines.more, ..Update::default() };
        for line in lines.lines {
            match serde_json::from_slice(&line) {
                Ok(envelope) => update.events.push(envelope),
                Err(_) => update.bad_lines += 1,
            }
        }
        if let Some(bytes) = read_status_bytes(&self.dir)?
            && bytes != self.last_status
        {
            update.status = Some(parse_status(&self.dir, &bytes)?);
            self.last_status = bytes;
        }
        Ok(update)
    }

    fn name(&self) -> String {
        self.dir.display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{OpenOptions, rename, write};
    use std::io::Write;

    fn texts(lines: Lines) -> (Vec<String>, bool) {
        (lines.lines.into_iter().map(|line| String::from_utf8(line).unwrap()).collect(), lines.restarted)
    }

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|&s| s.to_owned()).collect()
    }

    #[test]
    fn half_a_line_waits_for_its_other_half() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut tail = LineTail::new(&path);
        assert_eq!(texts(tail.poll().unwrap()), (vec![], false));
        let mut file = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        file.write_all(b"one\ntw").unwrap();
        assert_eq!(texts(tail.poll().unwrap()), (strings(&["one"]), false));
        assert_eq!(texts(tail.poll().unwrap()), (vec![], false));
        file.write_all(b"o\n\nthree\n").unwrap();
        assert_eq!(texts(tail.poll().unwrap()), (strings(&["two", "", "three"]), false));
    }

    #[test]
    fn half_a_line_that_is_taken_back_leaves_no_trace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        write(&path, "one\nha").unwrap();
        let mut tail = LineTail::new(&path);
        assert_eq!(texts(tail.poll().unwrap()).0, ["one"]);
        write(&path, "one\nother\n").unwrap();
        assert_eq!(texts(tail.poll().unwrap()), (strings(&["other"]), false));
    }

    #[test]
    fn a_replaced_or_cut_file_begins_again_after_the_rest_of_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        write(&path, "one\n").unwrap();
        let mut tail = LineTail::new(&path);
        tail.poll().unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"last\n").unwrap();
        rename(&path, dir.path().join("log.1")).unwrap();
        write(&path, "new\n").unwrap();
        assert_eq!(texts(tail.poll().unwrap()), (strings(&["last"]), false));
        assert_eq!(texts(tail.poll().unwrap()), (strings(&["new"]), true));
        write(&path, "x\n").unwrap();
        assert_eq!(texts(tail.poll().unwrap()), (strings(&["x"]), true));
    }

    #[test]
    fn a_long_history_comes_in_pieces_and_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let text: String = (0..300_000).map(|n| format!("line {n}\n")).collect();
        write(&path, &text).unwrap();
        let mut tail = LineTail::new(&path);
        let (mut seen, mut polls) = (String::new(), 0);
        loop {
            let lines = tail.poll().unwrap();
            polls += 1;
            let more = lines.more;
            texts(lines).0.iter().for_each(|line| seen.push_str(&format!("{line}\n")));
            if !more {
                break;
            }
        }
        assert!(polls > 2 && seen == text);
    }

    #[test]
    fn a_run_folder_gives_events_once_counts_bad_lines_and_gives_a_status_when_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let good = r#"{"v":1,"t":5,"run_id":"r","seq":1,"kind":"gate","startup_ms":5}"#;
        write(dir.path().join(EVENTS_FILE), format!("{good}\nnot json\n{{\"kind\":\"from the future\"}}\n{good}")).unwrap();
        write(dir.path().join(STATUS_FILE), serde_json::to_vec(&Status::default()).unwrap()).unwrap();
        let mut folder = RunFolder::new(dir.path());
        let update = folder.poll().unwrap();
        assert_eq!((update.events.len(), update.bad_lines), (1, 2));
        assert_eq!(update.status, Some(Status::default()));
        assert_eq!(folder.poll().unwrap(), Update::default());
        write(dir.path().join(STATUS_FILE), b"{").unwrap();
        let error = folder.poll().unwrap_err().to_string();
        assert!(error.contains(STATUS_FILE), "{error}");
    }
}
