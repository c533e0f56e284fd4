//! A run at the far end, followed through the chain's standard streams.
//!
//! Job: a [`Source`] whose lines come from `drafthorse watch --json` there; no port is needed. Refuses to invent news: while the connection is away it says
//! so, and it goes on after the last event it has. Invariants: the connection is made again by itself, with growing pauses; nothing is given twice;
//! the far process ends with the source.

use crate::far::Far;
use drafthorse_telemetry::{Envelope, Source, Status, TelemetryError, Update};
use serde::{Deserialize, Serialize};
use std::io::BufRead;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One line of `watch --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Frame {
    /// An event.
    Event(Box<Envelope>),
    /// The status, when it has changed.
    Status(Box<Status>),
    /// The events begin again.
    Restarted,
    /// Nothing new; a reader that has gone away is noticed by this.
    Here,
}

/// Longest pause between two attempts to connect.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Frames taken in one go.
const AT_ONCE: usize = 4096;

struct Shared {
    far: Far,
    folder: String,
    argv: Vec<String>,
    /// Last event that was given.
    seq: AtomicU64,
    ended: AtomicBool,
    trouble: Mutex<Option<String>>,
    bad_lines: AtomicU64,
    connections: AtomicU64,
    /// The run has ended, so that little is missed while nobody is connected.
    over: AtomicBool,
    /// The local process of the connection.
    pid: AtomicU64,
}

/// A run at the far end.
pub struct FarRun {
    shared: Arc<Shared>,
    frames: Receiver<Frame>,
    name: String,
}

impl FarRun {
    /// Follows the run that `argv` (the far program and `watch RUN --json`) tells of, in `folder` there; connects in the background.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn new(far: Far, folder: &str, argv: Vec<String>, name: String) -> Result<FarRun, TelemetryError> {
        let (sender, frames) = sync_channel(AT_ONCE);
        let shared = Arc::new(Shared {
            far,
            folder: folder.to_owned(),
            argv,
            seq: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            trouble: Mutex::new(None),
            bad_lines: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            over: AtomicBool::new(false),
            pid: AtomicU64::new(0),
        });
        let own = shared.clone();
        std::thread::Builder::new()
            .name("far-run".into())
            .spawn(move || own.keep_connected(&sender))
            .map_err(|source| TelemetryError::Thread { name: "far-run", source })?;
        Ok(FarRun { shared, frames, name })
    }

    /// Connections made so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// The local process that holds the present connection.
    pub fn connection_pid(&self) -> Option<u32> {
        u32::try_from(self.shared.pid.load(Ordering::Relaxed)).ok().filter(|p| *p != 0)
    }
}

impl Drop for FarRun {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        // The thread may sit in a read: ending the connection's process wakes it.
        if let Some(id) = self.connection_pid().and_then(crate::process::ProcessId::of) {
            let _ = id.tell(crate::process::Tell::Terminate);
        }
    }
}

impl Shared {
    fn say(&self, trouble: Option<String>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    fn keep_connected(&self, frames: &SyncSender<Frame>) {
        let mut pause = Duration::from_millis(500);
        while !self.ended.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let why = match self.connect(frames) {
                Ok(()) => "the connection ended".to_owned(),
                Err(why) => why,
            };
            self.pid.store(0, Ordering::Relaxed);
            if begun.elapsed() > MAX_PAUSE {
                pause = Duration::from_millis(500);
            }
            let over = self.over.load(Ordering::Relaxed);
            if over {
                pause = MAX_PAUSE;
            }
            self.say((!over).then_some(why));
            let until = Instant::now() + pause;
            while Instant::now() < until && !self.ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(50));
            }
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    fn connect(&self, frames: &SyncSender<Frame>) -> Result<(), String> {
        let mut argv = self.argv.clone();
        argv.extend(["--after".to_owned(), self.seq.load(Ordering::Relaxed).to_string()]);
        let mut process = self.far.start(&self.folder, &argv, true).map_err(|e| e.to_string())?;
        self.pid.store(u64::from(process.pid()), Ordering::Relaxed);
        self.connections.fetch_add(1, Ordering::Relaxed);
        let mut line = String::new();
        loop {
            line.clear();
            match process.out().read_line(&mut line) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => return Err(error.to_string()),
            }
            match serde_json::from_str::<Frame>(&line) {
                Ok(frame) => {
                    self.say(None);
                    match &frame {
                        Frame::Event(envelope) => self.seq.store(envelope.seq, Ordering::Relaxed),
                        Frame::Restarted => self.seq.store(0, Ordering::Relaxed),
                        Frame::Status(status) => self.over.store(status.is_over(), Ordering::Relaxed),
                        Frame::Here => continue,
                    }
                    if frames.send(frame).is_err() {
                        return Ok(());
                    }
                }
                Err(_) => {
                    self.bad_lines.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        match process.end() {
            Some(0) => Ok(()),
            Some(code) => Err(format!("watch ended there with code {code}")),
            None => Err("the connection was cut".into()),
        }
    }
}

impl Source for FarRun {
    fn poll(&mut self) -> Result<Update, TelemetryError> {
        let mut update = Update { bad_lines: self.shared.bad_lines.swap(0, Ordering::Relaxed), ..Update::default() };
        let mut taken = 0;
        loop {
            match self.frames.try_recv() {
                Ok(Frame::Event(envelope)) => update.events.push(*envelope),
                Ok(Frame::Status(status)) => update.status = Some(*status),
                Ok(Frame::Restarted) => {
                    update.events.clear();
                    update.restarted = true;
                }
                Ok(Frame::Here) => {}
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
            }
            taken += 1;
            if taken == AT_ONCE {
                update.more = true;
                break;
            }
        }
        let trouble = self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match trouble {
            Some(reason) if taken == 0 => Err(TelemetryError::Away { from: self.name.clone(), reason }),
            _ => Ok(update),
        }
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}
