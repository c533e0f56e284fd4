//! Its job: the threads of a run. It starts them by name, turns their errors and panics into the run's cause, watches them, and joins them all.
//! It refuses to return while a thread still runs, and to call a run good that was cancelled.
//! Invariants: the first error or panic of any worker, or of the body itself, cancels the token with that worker's name, activity and device;
//! errors that only pass a cancellation on are not failures of their own. A thread that does not come back after a cancellation is reported
//! once, by name: only the program's main room may then end the process.

use super::board::{Board, Station, Watchdog};
use super::cancel::{Cancel, Cause, Kind, chain_text, is_echo};
use super::sync::{Arc, Condvar, Mutex, Scope, lock, scope, spawn_scoped, wait, wait_timeout};
use std::any::Any;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Any error of a worker; `?` makes it from every error type.
pub type BoxError = Box<dyn Error + Send + Sync + 'static>;

/// How a run failed.
#[derive(Debug)]
pub struct RunError {
    /// The first cause.
    pub cause: Arc<Cause>,
    /// Failures after it, oldest first.
    pub others: Vec<Arc<Cause>>,
}

impl RunError {
    /// Failed, stopped or stalled: what the exit code follows.
    pub fn kind(&self) -> Kind {
        self.cause.kind
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.cause)?;
        match self.others.len() {
            0 => Ok(()),
            n => write!(f, " (and {n} more after it, the first: {})", self.others[0]),
        }
    }
}

impl Error for RunError {}

/// What the crew tells while it watches.
pub enum Alarm<'a> {
    /// All is well: one look at the board has passed. Whoever keeps a record can say where everything stands.
    Look,
    /// The watchdog has fired and cancelled the run; the cause holds the report of where every stage stands.
    Stalled(&'a Cause),
    /// The watch itself came this late, so the process stood still (a stop signal, a sleeping machine): standstill is counted anew from now on.
    Overslept(Duration),
    /// The run was cancelled, and these threads have not come back within the grace period (stuck in a driver, a disk, a loop). If the listener
    /// returns, the crew goes on waiting for them.
    NotComingBack(&'a [String]),
}

/// How the crew watches.
pub struct Watch<'a> {
    /// The watchdog to poll.
    pub watchdog: Watchdog,
    /// How often.
    pub every: Duration,
    /// How long threads may take to come back after a cancellation.
    pub grace: Duration,
    /// Who is told.
    pub on_alarm: Box<dyn FnMut(Alarm<'_>) + Send + 'a>,
}

#[derive(Default)]
struct Roll {
    /// Workers that have not come back, by number.
    out: Vec<(usize, String)>,
    started: usize,
    body_done: bool,
}

struct Shared {
    roll: Mutex<Roll>,
    changed: Condvar,
    cancel: Cancel,
    board: Board,
}

impl Shared {
    fn back(&self, number: usize) {
        let mut roll = lock(&self.roll);
        roll.out.retain(|(other, _)| *other != number);
        self.changed.notify_all();
    }
}

/// The crew of a running scope; its body spawns workers with it.
pub struct Crew<'scope, 'env: 'scope> {
    scope: &'scope Scope<'scope, 'env>,
    shared: Arc<Shared>,
}

/// Runs `body` on this thread as the worker of `coordinator`, with a crew to spawn workers in; returns when the body and all workers have ended.
///
/// # Errors
/// [`RunError`] with the first cause if anything failed, stalled or was cancelled on request, whatever the body returned.
pub fn run<'env, R>(
    cancel: &Cancel,
    board: &Board,
    coordinator: &Station,
    watch: Option<Watch<'env>>,
    body: impl for<'scope> FnOnce(&Crew<'scope, 'env>) -> Result<R, BoxError>,
) -> Result<R, RunError> {
    let shared = Arc::new(Shared {
        roll: Mutex::new(Roll::default()),
        changed: Condvar::new(),
        cancel: cancel.clone(),
        board: board.clone(),
    });
    let value = scope(|scope| {
        let crew = Crew { scope, shared: shared.clone() };
        if let Some(watch) = watch {
            let shared = shared.clone();
            let guard = move || {
                if catch_unwind(AssertUnwindSafe(|| keep_watch(&shared, watch))).is_err() {
                    shared.cancel.cancel(Cause::new(Kind::Failed, "watchdog", "its listener panicked"));
                }
            };
            if let Err(error) = spawn_scoped(scope, "watchdog", guard) {
                cancel.cancel(Cause::failed("watchdog", &error).with_phase("starting its thread"));
            }
        }
        let value = guarded(cancel, coordinator, || body(&crew));
        coordinator.done();
        let mut roll = lock(&shared.roll);
        roll.body_done = true;
        shared.changed.notify_all();
        while !roll.out.is_empty() {
            roll = wait(&shared.changed, roll);
        }
        value
    });
    match (cancel.cause(), value) {
        (None, Some(value)) => Ok(value),
        (Some(cause), _) => Err(RunError { cause, others: cancel.others() }),
        (None, None) => {
            let error = "passed on a cancellation that never happened in this run";
            Err(RunError { cause: Arc::new(coordinator.cause(Kind::Failed, error)), others: Vec::new() })
        }
    }
}

impl<'scope> Crew<'scope, '_> {
    /// Starts a worker on its own thread. Its station is marked done when it ends; its error or panic cancels the run.
    pub fn spawn(&self, station: Station, work: impl FnOnce(&Station) -> Result<(), BoxError> + Send + 'scope) {
        let shared = self.shared.clone();
        let number = {
            let mut roll = lock(&shared.roll);
            let number = roll.started;
            roll.started += 1;
            roll.out.push((number, station.name().to_owned()));
            number
        };
        let name = station.name().to_owned();
        let body = move || {
            guarded(&shared.cancel, &station, || work(&station));
            station.done();
            shared.back(number);
        };
        if let Err(error) = spawn_scoped(self.scope, &name, body) {
            self.shared.cancel.cancel(Cause::failed(name, &error).with_phase("starting its thread"));
            self.shared.back(number);
        }
    }

    /// Starts a worker that needs no place at the gate; registers its station.
    pub fn spawn_named(
        &self,
        name: impl Into<String>,
        device: Option<String>,
        work: impl FnOnce(&Station) -> Result<(), BoxError> + Send + 'scope,
    ) {
        self.spawn(self.shared.board.register(name, device), work);
    }
}

/// Runs a worker's body; its error or panic becomes the run's cause unless it is an echo.
fn guarded<R>(cancel: &Cancel, station: &Station, body: impl FnOnce() -> Result<R, BoxError>) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Some(value),
        Ok(Err(error)) => {
            if !(cancel.is_cancelled() && is_echo(&*error)) {
                let text = chain_text(&*error);
                cancel.cancel(station.cause(Kind::Failed, text).with_source(error.into()));
            }
            None
        }
        Err(payload) => {
            cancel.cancel(station.cause(Kind::Failed, format!("panicked: {}", panic_text(&*payload))));
            None
        }
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("with a payload that is not text")
}

fn keep_watch(shared: &Shared, mut watch: Watch<'_>) {
    let mut cancelled_at: Option<Instant> = None;
    let mut told = false;
    let mut looked = Instant::now();
    let mut roll = lock(&shared.roll);
    while !(roll.body_done && roll.out.is_empty()) {
        roll = wait_timeout(&shared.changed, roll, watch.every);
        let out: Vec<String> = roll.out.iter().map(|(_, name)| name.clone()).collect();
        drop(roll);
        let late = std::mem::replace(&mut looked, Instant::now()).elapsed().saturating_sub(watch.every);
        if late > watch.watchdog.patience() {
            watch.watchdog.start_anew();
            cancelled_at = None;
            (watch.on_alarm)(Alarm::Overslept(late));
        }
        if let Some(cause) = watch.watchdog.poll() {
            (watch.on_alarm)(Alarm::Stalled(&cause));
        } else if !shared.cancel.is_cancelled() {
            (watch.on_alarm)(Alarm::Look);
        }
        if shared.cancel.is_cancelled() {
            let since = *cancelled_at.get_or_insert_with(Instant::now);
            if !told && since.elapsed() > watch.grace && !out.is_empty() {
                told = true;
                (watch.on_alarm)(Alarm::NotComingBack(&out));
            }
        }
        roll = lock(&shared.roll);
    }
}

#[cfg(all(test, not(shuttle)))]
#[path = "crew_tests.rs"]
mod tests;
