//! Its job: a board on which every worker writes what it does or waits for, since when, and how far it has come; and a watchdog that reads it.
//! It refuses to block anyone: writing takes one private lock that only a reader of the board contends for.
//! Invariants: progress counters only grow, and only work done moves them; being alive, busy or talkative does not. Busy and waiting time of a
//! worker add up to the time since it registered, less the time it was idle.

use super::cancel::{Cancel, Cause, Kind};
use super::gate::Gate;
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Where the time comes from: nanoseconds since some fixed moment, never going back.
pub trait Clock: Send + Sync {
    /// Nanoseconds since the clock's own origin.
    fn now_ns(&self) -> u64;
}

/// The machine's monotonic clock.
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A clock that stands still until it is told to move, so that deadlines are tested without waiting.
#[derive(Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(nanos(by), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

pub(crate) fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// A label, with the number and the batch it is about: prints as `free slot of drafter 2 (batch 17)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct What {
    /// Time is accumulated per label, so it holds no numbers.
    pub label: &'static str,
    /// Number of the drafter, rank, slot … that the label speaks of.
    pub number: Option<usize>,
    /// Index of the batch.
    pub batch: Option<u64>,
}

impl What {
    /// A bare label.
    pub const fn new(label: &'static str) -> Self {
        Self { label, number: None, batch: None }
    }

    /// Adds the number the label speaks of.
    #[must_use]
    pub const fn number(mut self, number: usize) -> Self {
        self.number = Some(number);
        self
    }

    /// Adds the batch's index.
    #[must_use]
    pub const fn batch(mut self, batch: u64) -> Self {
        self.batch = Some(batch);
        self
    }
}

impl From<&'static str> for What {
    fn from(label: &'static str) -> Self {
        Self::new(label)
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label)?;
        if let Some(number) = self.number {
            write!(f, " {number}")?;
        }
        match self.batch {
            Some(batch) => write!(f, " (batch {batch})"),
            None => Ok(()),
        }
    }
}

/// Which kind of thing a worker is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// Nothing yet, or between two things.
    Idle,
    /// Computing or reading: the worker itself is what the others may be waiting for.
    Busy,
    /// Waiting for another worker.
    Waiting,
    /// It has left; the watchdog looks past it.
    Done,
}

#[derive(Clone, Copy)]
struct Activity {
    doing: Doing,
    what: What,
    since_ns: u64,
}

struct Ledger {
    now: Activity,
    /// When it last stopped waiting.
    unblocked_ns: u64,
    last_progress_ns: u64,
    busy_ns: BTreeMap<&'static str, u64>,
    wait_ns: BTreeMap<&'static str, u64>,
}

impl Ledger {
    fn switch(&mut self, to: Activity) -> Activity {
        let before = self.now;
        let spent = to.since_ns.saturating_sub(before.since_ns);
        match before.doing {
            Doing::Busy => *self.busy_ns.entry(before.what.label).or_default() += spent,
            Doing::Waiting => {
                *self.wait_ns.entry(before.what.label).or_default() += spent;
                self.unblocked_ns = to.since_ns;
            }
            Doing::Idle | Doing::Done => {}
        }
        self.now = to;
        before
    }
}

struct StationInner {
    name: String,
    device: Option<String>,
    clock: Arc<dyn Clock>,
    progress: AtomicU64,
    ledger: Mutex<Ledger>,
}

/// One worker's place on the board. Clones are the same place; one thread writes it.
#[derive(Clone)]
pub struct Station(Arc<StationInner>);

impl Station {
    /// The worker's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The worker's device, if it has one.
    pub fn device(&self) -> Option<&str> {
        self.0.device.as_deref()
    }

    /// Says what the worker is busy with from now on.
    pub fn busy(&self, what: impl Into<What>) {
        self.switch(Doing::Busy, what.into());
    }

    /// Says that the worker has nothing to do and that nobody waits for it; the watchdog then never finds it busy for too long.
    pub fn idle(&self) {
        self.switch(Doing::Idle, What::new("idle"));
    }

    /// Says that the worker waits, until the returned span is dropped; then its earlier activity goes on.
    pub fn waiting(&self, what: impl Into<What>) -> Span<'_> {
        Span { station: self, before: self.switch(Doing::Waiting, what.into()) }
    }

    /// Says that `amount` more units of work are done: batches, steps, bytes, whatever this worker counts.
    pub fn advance(&self, amount: u64) {
        self.0.progress.fetch_add(amount, Ordering::Relaxed);
        let now = self.0.clock.now_ns();
        self.ledger().last_progress_ns = now;
    }

    /// Says that the worker has left.
    pub fn done(&self) {
        self.switch(Doing::Done, What::new("done"));
    }

    /// What the worker is at now.
    pub fn current(&self) -> (Doing, What) {
        let now = self.ledger().now;
        (now.doing, now.what)
    }

    /// A cause that names this worker, its device and what it was at.
    pub(crate) fn cause(&self, kind: Kind, error: impl Into<String>) -> Cause {
        let (doing, what) = self.current();
        let cause = Cause::new(kind, self.name(), error).with_device(self.0.device.clone());
        if doing == Doing::Idle { cause } else { cause.with_phase(what.to_string()) }
    }

    fn switch(&self, doing: Doing, what: What) -> Activity {
        let since_ns = self.0.clock.now_ns();
        self.ledger().switch(Activity { doing, what, since_ns })
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.0.ledger.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A wait in progress; see [`Station::waiting`].
#[must_use = "the wait ends when the span is dropped"]
pub struct Span<'a> {
    station: &'a Station,
    before: Activity,
}

impl Span<'_> {
    /// What is being waited for, when that has changed.
    pub fn now_for(&self, what: What) {
        if self.station.current().1 != what {
            self.station.switch(Doing::Waiting, what);
        }
    }
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        self.station.switch(self.before.doing, self.before.what);
    }
}

/// One worker as the board shows it.
#[derive(Clone, Debug)]
pub struct StationView {
    /// Worker.
    pub name: String,
    /// Its device.
    pub device: Option<String>,
    /// Idle, busy, waiting or done.
    pub doing: Doing,
    /// With what, or for what.
    pub what: What,
    /// For how long, in nanoseconds.
    pub for_ns: u64,
    /// Units of work done so far.
    pub progress: u64,
    /// Nanoseconds since the last unit of work was done.
    pub since_progress_ns: u64,
    /// Nanoseconds busy so far, by label, the present activity included.
    pub busy_ns: BTreeMap<&'static str, u64>,
    /// Nanoseconds waited so far, by label, the present wait included.
    pub wait_ns: BTreeMap<&'static str, u64>,
    /// Nanoseconds since the worker last waited; what it has been busy for without a break.
    since_unblocked_ns: u64,
}

impl fmt::Display for StationView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |ns: u64| ns as f64 / 1e9;
        write!(f, "{}", self.name)?;
        if let Some(device) = &self.device {
            write!(f, " on {device}")?;
        }
        match self.doing {
            Doing::Idle => write!(f, ": idle")?,
            Doing::Busy => write!(f, ": busy with {}", self.what)?,
            Doing::Waiting => write!(f, ": waiting for {}", self.what)?,
            Doing::Done => return write!(f, ": done after {} units", self.progress),
        }
        let total = |map: &BTreeMap<&'static str, u64>| seconds(map.values().sum());
        write!(
            f,
            ", {:.1} s; {} units done, the last {:.1} s ago; busy {:.1} s, waited {:.1} s in all",
            seconds(self.for_ns),
            self.progress,
            seconds(self.since_progress_ns),
            total(&self.busy_ns),
            total(&self.wait_ns)
        )
    }
}

type Note = Box<dyn Fn() -> Option<String> + Send + Sync>;

struct BoardInner {
    clock: Arc<dyn Clock>,
    stations: Mutex<Vec<Station>>,
    notes: Mutex<Vec<Note>>,
}

/// The board of a run. Clones are the same board.
#[derive(Clone)]
pub struct Board(Arc<BoardInner>);

impl Default for Board {
    fn default() -> Self {
        Self::new(Arc::new(SystemClock::default()))
    }
}

impl Board {
    /// An empty board that reads `clock`.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(BoardInner { clock, stations: Mutex::default(), notes: Mutex::default() }))
    }

    /// Gives a worker its place.
    pub fn register(&self, name: impl Into<String>, device: Option<String>) -> Station {
        let now = self.0.clock.now_ns();
        let idle = Activity { doing: Doing::Idle, what: What::new("idle"), since_ns: now };
        let ledger =
            Ledger { now: idle, unblocked_ns: now, last_progress_ns: now, busy_ns: BTreeMap::new(), wait_ns: BTreeMap::new() };
        let station = Station(Arc::new(StationInner {
            name: name.into(),
            device,
            clock: self.0.clock.clone(),
            progress: AtomicU64::new(0),
            ledger: Mutex::new(ledger),
        }));
        self.stations().push(station.clone());
        station
    }

    /// Adds a line to every report, written when the report is made; `None` leaves it out. The closure may take a short lock.
    pub fn note(&self, line: impl Fn() -> Option<String> + Send + Sync + 'static) {
        self.0.notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(Box::new(line));
    }

    /// Every worker in the order of registration.
    pub fn snapshot(&self) -> Vec<StationView> {
        let stations = self.stations().clone();
        let now = self.0.clock.now_ns();
        stations
            .iter()
            .map(|station| {
                let progress = station.0.progress.load(Ordering::Relaxed);
                let ledger = station.ledger();
                let Activity { doing, what, since_ns } = ledger.now;
                let for_ns = now.saturating_sub(since_ns);
                let (mut busy_ns, mut wait_ns) = (ledger.busy_ns.clone(), ledger.wait_ns.clone());
                match doing {
                    Doing::Busy => *busy_ns.entry(what.label).or_default() += for_ns,
                    Doing::Waiting => *wait_ns.entry(what.label).or_default() += for_ns,
                    Doing::Idle | Doing::Done => {}
                }
                StationView {
                    name: station.0.name.clone(),
                    device: station.0.device.clone(),
                    doing,
                    what,
                    for_ns,
                    progress,
                    since_progress_ns: now.saturating_sub(ledger.last_progress_ns),
                    busy_ns,
                    wait_ns,
                    since_unblocked_ns: now.saturating_sub(ledger.unblocked_ns),
                }
            })
            .collect()
    }

    /// One line per worker and per note: where everything stands.
    pub fn report(&self) -> String {
        let mut text = String::new();
        for view in self.snapshot() {
            let _ = writeln!(text, "  {view}");
        }
        let notes = self.0.notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for line in notes.iter().filter_map(|note| note()) {
            let _ = writeln!(text, "  {line}");
        }
        text
    }

    /// The board's present time in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.0.clock.now_ns()
    }

    fn stations(&self) -> MutexGuard<'_, Vec<Station>> {
        self.0.stations.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Cancels a run that no longer moves: before the gate opens by the deadlines of the start-up phases, afterwards when no worker's
/// progress counter has moved for `limit`, or when one worker has been busy for `limit` without waiting and without progress.
pub struct Watchdog {
    board: Board,
    cancel: Cancel,
    gate: Option<Gate>,
    limit: Duration,
    seen: Option<(u64, u64)>,
    /// Nothing before this moment counts.
    since_ns: u64,
}

/// A look that comes later than this shows that the process itself stood still.
const LATE: Duration = Duration::from_secs(5);

impl Watchdog {
    /// A watchdog over `board` that cancels `cancel`.
    pub fn new(board: &Board, cancel: &Cancel, limit: Duration) -> Self {
        Self { board: board.clone(), cancel: cancel.clone(), gate: None, limit, seen: None, since_ns: 0 }
    }

    /// Watches the start-up phases of `gate` until it opens.
    #[must_use]
    pub fn with_gate(mut self, gate: &Gate) -> Self {
        self.gate = Some(gate.clone());
        self
    }

    /// How late a look may come before it shows that this process stood still: stopped by a signal, or with the whole machine. Workers cannot have moved then,
    /// so that what the clock says of them is not their fault.
    pub fn patience(&self) -> Duration {
        LATE.min(self.limit / 2)
    }

    /// Counts anew from now on.
    pub fn start_anew(&mut self) {
        self.since_ns = self.board.now_ns();
        self.seen = None;
    }

    /// Looks once. When the run stands still, cancels it and returns the cause with its report; the caller prints it.
    pub fn poll(&mut self) -> Option<Cause> {
        if self.cancel.is_cancelled() {
            return None;
        }
        let cause = match self.gate.as_ref().filter(|gate| !gate.is_open()) {
            Some(gate) => gate.overdue(self.board.now_ns(), self.since_ns),
            None => self.standstill(),
        }?;
        let cause = cause.with_report(self.board.report());
        self.cancel.cancel(cause.clone()).then_some(cause)
    }

    fn standstill(&mut self) -> Option<Cause> {
        let now = self.board.now_ns();
        let live: Vec<_> = self.board.snapshot().into_iter().filter(|view| view.doing != Doing::Done).collect();
        if live.is_empty() {
            return None;
        }
        let total = live.iter().map(|view| view.progress).sum();
        // A worker that leaves takes its count out of the sum, which is a change too: it came to its end.
        let since = match self.seen {
            Some((seen, since)) if seen == total => since,
            _ => now,
        };
        self.seen = Some((total, since));
        let limit = nanos(self.limit);
        let seconds = self.limit.as_secs_f64();
        let counted = now.saturating_sub(self.since_ns);
        let stuck_for = |view: &StationView| view.since_unblocked_ns.min(view.since_progress_ns).min(counted);
        let busy = live.iter().filter(|view| view.doing == Doing::Busy).max_by_key(|view| stuck_for(view));
        if let Some(view) = busy.filter(|view| stuck_for(view) > limit) {
            return Some(blame(view, format!("busy for more than {seconds:.1} s without progress")));
        }
        if now.saturating_sub(since) <= limit {
            return None;
        }
        // Whoever waits, waits for another, so one that is busy is the likelier culprit; without one they wait for each other.
        let culprit = busy.or_else(|| live.iter().max_by_key(|view| (view.doing == Doing::Waiting, view.for_ns)))?;
        Some(blame(culprit, format!("no worker made progress for more than {seconds:.1} s")))
    }
}

fn blame(view: &StationView, error: String) -> Cause {
    let phase = match view.doing {
        Doing::Waiting => format!("waiting for {}", view.what),
        _ => view.what.to_string(),
    };
    Cause::new(Kind::Stalled, &view.name, error).with_phase(phase).with_device(view.device.clone())
}

#[cfg(all(test, not(shuttle)))]
#[path = "board_tests.rs"]
mod tests;
