//! The way from training to disk: a handle that never blocks, a bounded queue, and one thread that writes.
//!
//! Refuses: to hold training up. A full queue drops events (the frequent ones first) and a full disk loses lines; both are
//! counted, said in the status and sent to subscribers, and neither ends the run.
//! Invariants: sequence numbers are given by the writer, so the file is in order, and a gap means unwritten lines; a line is whole
//! or absent; `status.json` is replaced by rename, so a reader never sees half of it; after [`Telemetry::shutdown`] no
//! thread of this module is left.

use crate::error::TelemetryError;
use crate::event::{Envelope, Event, SCHEMA_VERSION, Warning};
use crate::status::Status;
use crate::tensorboard::TensorBoardWriter;
use crate::verdict::{Expected, Limits, judge};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Name of the events file in a run folder.
pub const EVENTS_FILE: &str = "events.jsonl";
/// Name of the status file in a run folder.
pub const STATUS_FILE: &str = "status.json";
/// Places of the queue that only rare events may use.
const RESERVE: usize = 64;
/// How often the writer looks at the queue.
const TICK: Duration = Duration::from_millis(20);
/// How long a shutdown waits for the writer.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

/// Unix time in milliseconds.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// How to record a run.
#[derive(Debug, Clone)]
pub struct Options {
    /// The run folder; it must exist.
    pub run_dir: PathBuf,
    /// Id of this launch.
    pub run_id: String,
    /// Events that may wait for the writer.
    pub queue: usize,
    /// How often `status.json` is rewritten at most; also the heartbeat when nothing happens.
    pub status_interval: Duration,
    /// Whether TensorBoard files are written into `tensorboard/`.
    pub tensorboard: bool,
    /// When to call it what, for the verdict in the status.
    pub limits: Limits,
}

impl Options {
    /// The usual way: 4,096 events of queue, a status twice a second, TensorBoard files.
    pub fn new(run_dir: impl Into<PathBuf>, run_id: impl Into<String>) -> Options {
        Options {
            run_dir: run_dir.into(),
            run_id: run_id.into(),
            queue: 4096,
            status_interval: Duration::from_millis(500),
            tensorboard: true,
            limits: Limits::default(),
        }
    }
}

/// An event with the time at which it was recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct Stamped {
    /// Unix time in milliseconds.
    pub t: u64,
    /// The event.
    pub event: Event,
}

/// What travels to the writer: an event, or nothing as the sign to end.
type Message = Option<Stamped>;

#[derive(Debug, Default)]
struct Gauge {
    queued: AtomicUsize,
    dropped: AtomicU64,
}

/// The handle that workers record with. Cheap to clone; every thread may have one.
#[derive(Clone)]
pub struct Recorder {
    sink: Sink,
    gauge: Arc<Gauge>,
    capacity: usize,
}

#[derive(Clone)]
enum Sink {
    Nothing,
    Writer(SyncSender<Message>),
    Channel(SyncSender<Stamped>),
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("queued", &self.queued()).field("dropped", &self.dropped()).finish_non_exhaustive()
    }
}

impl Recorder {
    /// A recorder that forgets everything, for work that no one watches.
    pub fn discard() -> Recorder {
        Recorder { sink: Sink::Nothing, gauge: Arc::default(), capacity: 0 }
    }

    /// A recorder whose events arrive in a channel of `capacity`, for tests and for callers that write no run folder.
    pub fn channel(capacity: usize) -> (Recorder, Receiver<Stamped>) {
        let (sender, receiver) = sync_channel(capacity);
        (Recorder { sink: Sink::Channel(sender), gauge: Arc::default(), capacity }, receiver)
    }

    /// Records an event. Never blocks: when the queue is full the event is dropped and counted.
    pub fn record(&self, event: Event) {
        let stamped = |event| Stamped { t: unix_ms(), event };
        let sent = match &self.sink {
            Sink::Nothing => true,
            Sink::Channel(sender) => sender.try_send(stamped(event)).is_ok(),
            Sink::Writer(sender) => {
                let room = if event.is_bulk() { self.capacity } else { self.capacity + RESERVE };
                // The count is raised first, so that the writer never lowers it below zero.
                let sent =
                    self.gauge.queued.fetch_add(1, Ordering::Relaxed) < room && sender.try_send(Some(stamped(event))).is_ok();
                if !sent {
                    self.gauge.queued.fetch_sub(1, Ordering::Relaxed);
                }
                sent
            }
        };
        if !sent {
            self.gauge.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records a warning.
    pub fn warn(&self, code: impl Into<String>, text: impl Into<String>) {
        self.record(Event::Warning(Warning { code: code.into(), text: text.into() }));
    }

    /// Events that wait for the writer now.
    pub fn queued(&self) -> usize {
        self.gauge.queued.load(Ordering::Relaxed)
    }

    /// Events dropped so far because the queue was full (or the writer had ended).
    pub fn dropped(&self) -> u64 {
        self.gauge.dropped.load(Ordering::Relaxed)
    }
}

/// What is shared between the writer and those who look.
#[derive(Default)]
struct Shared {
    status: Mutex<Arc<Status>>,
    subscribers: Mutex<Vec<Subscriber>>,
}

struct Subscriber {
    sender: SyncSender<Arc<Envelope>>,
    missed: Arc<AtomicU64>,
}

// A panic elsewhere leaves nothing half-done behind these locks: each guards one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Events as they are written, for a progress bar or a test. A slow reader misses events; it holds nothing up.
#[derive(Debug)]
pub struct Subscription {
    events: Receiver<Arc<Envelope>>,
    missed: Arc<AtomicU64>,
}

impl Subscription {
    /// The next event; `None` after `timeout` or once the recorder has ended and all is read.
    pub fn next(&self, timeout: Duration) -> Option<Arc<Envelope>> {
        self.events.recv_timeout(timeout).ok()
    }

    /// Events missed so far because this reader was slow.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

/// Read access to the latest status, for a server or a progress bar.
#[derive(Clone)]
pub struct StatusReader(Arc<Shared>);

impl StatusReader {
    /// The latest status.
    pub fn get(&self) -> Arc<Status> {
        lock(&self.0.status).clone()
    }
}

/// The owner of a run's telemetry: starts the writer, hands out recorders, ends it all.
pub struct Telemetry {
    recorder: Recorder,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    run_dir: PathBuf,
}

impl Telemetry {
    /// Opens the run folder's files and starts the writer. The folder may hold events of earlier launches; they are kept.
    ///
    /// # Errors
    /// If the folder's files cannot be opened, or the thread cannot be started.
    pub fn start(options: Options) -> Result<Telemetry, TelemetryError> {
        let (sender, receiver) = sync_channel(options.queue + RESERVE);
        let gauge = Arc::new(Gauge::default());
        let shared = Arc::new(Shared::default());
        let run_dir = options.run_dir.clone();
        let recorder = Recorder { sink: Sink::Writer(sender), gauge: gauge.clone(), capacity: options.queue };
        let writer = Writer::open(options, gauge, shared.clone())?;
        let thread = std::thread::Builder::new()
            .name("telemetry".into())
            .spawn(move || writer.run(&receiver))
            .map_err(|source| TelemetryError::Thread { name: "telemetry", source })?;
        Ok(Telemetry { recorder, shared, thread: Some(thread), run_dir })
    }

    /// A handle to record with.
    pub fn recorder(&self) -> Recorder {
        self.recorder.clone()
    }

    /// The latest status.
    pub fn status(&self) -> Arc<Status> {
        lock(&self.shared.status).clone()
    }

    /// A handle that reads the latest status.
    pub fn status_reader(&self) -> StatusReader {
        StatusReader(self.shared.clone())
    }

    /// The run folder.
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Events from now on; at most `capacity` wait for this reader.
    pub fn subscribe(&self, capacity: usize) -> Subscription {
        let (sender, events) = sync_channel(capacity);
        let missed = Arc::new(AtomicU64::new(0));
        lock(&self.shared.subscribers).push(Subscriber { sender, missed: missed.clone() });
        Subscription { events, missed }
    }

    /// Writes what is queued, ends the thread and gives the last status.
    ///
    /// # Errors
    /// If the writer does not end within ten seconds (a file system that hangs).
    pub fn shutdown(mut self) -> Result<Arc<Status>, TelemetryError> {
        self.end()?;
        Ok(self.status())
    }

    fn end(&mut self) -> Result<(), TelemetryError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let begun = Instant::now();
        let mut told = false;
        while !thread.is_finished() {
            if !told && let Sink::Writer(sender) = &self.recorder.sink {
                told = !matches!(sender.try_send(None), Err(TrySendError::Full(_)));
                thread.thread().unpark();
            }
            if begun.elapsed() > SHUTDOWN_LIMIT {
                let waited_ms = SHUTDOWN_LIMIT.as_millis() as u64;
                return Err(TelemetryError::WriterStuck { path: self.run_dir.clone(), waited_ms });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // A writer that panicked has said so on standard error; training's own result stands.
        let _ = thread.join();
        Ok(())
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        // Whoever wants the error calls `shutdown`.
        let _ = self.end();
    }
}

struct Writer {
    options: Options,
    gauge: Arc<Gauge>,
    shared: Arc<Shared>,
    status: Status,
    events: File,
    /// Bytes of whole lines in the file.
    good_len: u64,
    seq: u64,
    tensorboard: Option<TensorBoardWriter>,
    reported_drops: u64,
    disk_fails: bool,
}

impl Writer {
    fn open(options: Options, gauge: Arc<Gauge>, shared: Arc<Shared>) -> Result<Writer, TelemetryError> {
        let path = options.run_dir.join(EVENTS_FILE);
        let mut events = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .mode(0o644)
            .open(&path)
            .map_err(TelemetryError::io("open", &path))?;
        let (good_len, seq) = last_line(&mut events).map_err(TelemetryError::io("read", &path))?;
        let tensorboard =
            options.tensorboard.then(|| TensorBoardWriter::create(&options.run_dir.join("tensorboard"))).transpose()?;
        let mut status = Status { v: SCHEMA_VERSION, run_id: options.run_id.clone(), t: unix_ms(), ..Status::default() };
        status.telemetry.status_interval_ms = options.status_interval.as_millis() as u64;
        *lock(&shared.status) = Arc::new(status.clone());
        Ok(Writer { options, gauge, shared, status, events, good_len, seq, tensorboard, reported_drops: 0, disk_fails: false })
    }

    fn run(mut self, receiver: &Receiver<Message>) {
        let mut lines = Vec::new();
        let mut next_status = Instant::now();
        let mut open = true;
        while open {
            // What has gathered goes to disk in one write.
            while open && lines.len() < 1 << 20 {
                match receiver.try_recv() {
                    Ok(message) => open = self.take(message, &mut lines),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => open = false,
                }
            }
            let idle = lines.is_empty();
            if !open {
                // Events recorded before the shutdown was sent are all ahead of it; later ones raced it and are still taken.
                while let Ok(message) = receiver.try_recv() {
                    self.take(message, &mut lines);
                }
            }
            self.report_drops(&mut lines);
            self.write_events(&mut lines);
            if !open || Instant::now() >= next_status {
                self.publish();
                next_status = Instant::now() + self.options.status_interval;
            }
            if open && idle {
                // The writer looks at the queue instead of being woken: waking a thread would cost whoever records a system call.
                std::thread::park_timeout(TICK.min(next_status.saturating_duration_since(Instant::now())));
            }
        }
        // Closing the senders tells the subscribers that nothing more will come.
        lock(&self.shared.subscribers).clear();
        if let Err(error) = self.events.sync_data() {
            self.status.telemetry.last_error = Some(error.to_string());
        }
    }

    fn take(&mut self, message: Message, lines: &mut Vec<u8>) -> bool {
        match message {
            None => false,
            Some(stamped) => {
                self.gauge.queued.fetch_sub(1, Ordering::Relaxed);
                self.add(stamped, lines);
                true
            }
        }
    }

    fn add(&mut self, stamped: Stamped, lines: &mut Vec<u8>) {
        self.seq += 1;
        let Stamped { t, event } = stamped;
        let envelope = Envelope { v: SCHEMA_VERSION, t, run_id: self.options.run_id.clone(), seq: self.seq, event };
        let start = lines.len();
        match serde_json::to_writer(&mut *lines, &envelope) {
            Ok(()) => lines.push(b'\n'),
            Err(error) => {
                lines.truncate(start);
                self.status.telemetry.unwritten_events += 1;
                self.status.telemetry.last_error = Some(error.to_string());
            }
        }
        self.status.apply(&envelope);
        if let Some(tensorboard) = &mut self.tensorboard {
            tensorboard.add(&envelope);
        }
        self.broadcast(envelope);
    }

    fn broadcast(&self, envelope: Envelope) {
        let mut subscribers = lock(&self.shared.subscribers);
        if subscribers.is_empty() {
            return;
        }
        let envelope = Arc::new(envelope);
        subscribers.retain(|subscriber| match subscriber.sender.try_send(envelope.clone()) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                subscriber.missed.fetch_add(1, Ordering::Relaxed);
                true
            }
            Err(TrySendError::Disconnected(_)) => false,
        });
    }

    fn report_drops(&mut self, lines: &mut Vec<u8>) {
        let dropped = self.gauge.dropped.load(Ordering::Relaxed);
        if dropped == self.reported_drops {
            return;
        }
        self.status.telemetry.dropped_events = dropped;
        // Said when the first is lost and whenever the count has doubled, so that the telling does not itself flood the file.
        if self.reported_drops == 0 || dropped >= 2 * self.reported_drops {
            self.reported_drops = dropped;
            let text = format!(
                "{dropped} events were dropped because telemetry could not keep up; no step was lost\nraise the queue or look at the run folder's disk"
            );
            self.add(Stamped { t: unix_ms(), event: warning("telemetry_dropped", text) }, lines);
        }
    }

    fn write_events(&mut self, lines: &mut Vec<u8>) {
        if lines.is_empty() {
            return;
        }
        let count = lines.iter().filter(|&&byte| byte == b'\n').count() as u64;
        let written = self.events.write_all(lines);
        let len = lines.len() as u64;
        lines.clear();
        match written {
            Ok(()) => {
                self.good_len += len;
                self.status.telemetry.written_events += count;
                if std::mem::take(&mut self.disk_fails) {
                    let lost = self.status.telemetry.unwritten_events;
                    let text = format!("{lost} events are missing from {EVENTS_FILE}: it could not be written for a while");
                    self.add(Stamped { t: unix_ms(), event: warning("telemetry_gap", text) }, lines);
                    self.write_events(lines);
                }
            }
            Err(error) => {
                self.status.telemetry.unwritten_events += count;
                self.status.telemetry.last_error = Some(format!("{EVENTS_FILE}: {error}"));
                // A line cut in the middle goes away again; where that fails too, the reader skips it.
                let _ = self.events.set_len(self.good_len);
                if !std::mem::replace(&mut self.disk_fails, true) {
                    let text = format!(
                        "events cannot be written to {}: {error}\ntraining goes on; free some space",
                        self.options.run_dir.display()
                    );
                    self.seq += 1;
                    let envelope = Envelope {
                        v: SCHEMA_VERSION,
                        t: unix_ms(),
                        run_id: self.options.run_id.clone(),
                        seq: self.seq,
                        event: warning("telemetry_unwritten", text),
                    };
                    self.status.apply(&envelope);
                    self.broadcast(envelope);
                }
            }
        }
    }

    fn publish(&mut self) {
        if let Some(tensorboard) = &mut self.tensorboard
            && let Err(error) = tensorboard.flush()
        {
            self.status.telemetry.failed_writes += 1;
            self.status.telemetry.last_error = Some(error.to_string());
        }
        self.status.t = self.status.t.max(unix_ms());
        self.status.verdict = judge(&self.status, self.status.t, &Expected::default(), &self.options.limits);
        if let Err(error) = self.write_status() {
            self.status.telemetry.failed_writes += 1;
            self.status.telemetry.last_error = Some(format!("{STATUS_FILE}: {error}"));
        }
        *lock(&self.shared.status) = Arc::new(self.status.clone());
    }

    fn write_status(&self) -> std::io::Result<()> {
        let path = self.options.run_dir.join(STATUS_FILE);
        let aside = self.options.run_dir.join(format!(".{STATUS_FILE}.new"));
        std::fs::write(&aside, serde_json::to_vec_pretty(&self.status)?)?;
        std::fs::rename(&aside, &path)
    }
}

fn warning(code: &str, text: String) -> Event {
    Event::Warning(Warning { code: code.into(), text })
}

/// Length of the whole lines of an events file, which is cut to it, and the sequence number of the last of them.
fn last_line(file: &mut File) -> std::io::Result<(u64, u64)> {
    const WINDOW: u64 = 1 << 16;
    let len = file.metadata()?.len();
    let mut from = len;
    let mut tail = Vec::new();
    // Goes back until the window holds the line break before the last whole line.
    while from > 0 && tail.iter().filter(|&&byte| byte == b'\n').count() < 2 {
        let start = from.saturating_sub(WINDOW);
        let mut head = vec![0; (from - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut head)?;
        head.extend_from_slice(&tail);
        tail = head;
        from = start;
    }
    let whole = tail.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let good_len = from + whole as u64;
    if good_len < len {
        // A killed writer left half a line.
        file.set_len(good_len)?;
    }
    #[derive(serde::Deserialize)]
    struct Seq {
        seq: u64,
    }
    let last = tail[..whole].split(|&byte| byte == b'\n').rfind(|line| !line.is_empty()).unwrap_or_default();
    let seq = match serde_json::from_slice::<Seq>(last) {
        Ok(line) => line.seq,
        // A damaged last line still counts as one; numbers only have to grow.
        Err(_) => tail[..whole].iter().filter(|&&byte| byte == b'\n').count() as u64 + from,
    };
    Ok((good_len, seq))
}
