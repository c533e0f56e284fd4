//! Its job: one token per run that says "everybody out", with the first reason and who gave it.
//! It refuses to time anything, to print, and to stop a thread by force.
//! Invariants: the first real cause is kept for good; a *provisional* cause (a destructor that only knows that something was dropped) yields to
//! the first real one. Every structure registered with the token has its waiters woken after the flag is up, under that structure's own
//! lock, so no waiter can miss it. [`Cancel::cancel`] must not be called while holding such a lock.

use super::sync::{Arc, AtomicBool, Mutex, Ordering, Weak, lock};
use std::error::Error;
use std::fmt;

/// How a run ended before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A worker returned an error or panicked.
    Failed,
    /// Somebody asked for it (a second Ctrl-C, a scheduler's signal).
    Stopped,
    /// Nothing moved for longer than allowed.
    Stalled,
}

/// Why a run was cancelled, and where.
#[derive(Clone, Debug)]
pub struct Cause {
    /// Failed, stopped on request, or stalled.
    pub kind: Kind,
    /// Name of the worker it happened to.
    pub worker: String,
    /// Start-up phase or activity it was in; empty when unknown.
    pub phase: String,
    /// Device of that worker, as the user named it.
    pub device: Option<String>,
    /// The error and its sources, joined by `: `.
    pub error: String,
    /// Where every stage stood, when the watchdog wrote it down. Several lines.
    pub report: Option<String>,
    /// The worker's error itself, where there was one: callers choose an exit code by its type.
    pub source: Option<Arc<dyn Error + Send + Sync>>,
    provisional: bool,
}

/// Two causes are equal when they say the same; the error values behind them are not compared.
impl PartialEq for Cause {
    fn eq(&self, other: &Cause) -> bool {
        let told = |c: &Cause| (c.kind, c.worker.clone(), c.phase.clone(), c.device.clone(), c.error.clone(), c.report.clone());
        told(self) == told(other) && self.provisional == other.provisional
    }
}

impl Cause {
    /// A cause without phase, device or report; add them with the `with_` methods.
    pub fn new(kind: Kind, worker: impl Into<String>, error: impl Into<String>) -> Self {
        let (worker, error) = (worker.into(), error.into());
        Self { kind, worker, phase: String::new(), device: None, error, report: None, source: None, provisional: false }
    }

    /// A failure told by an error value: the text is its whole source chain.
    pub fn failed(worker: impl Into<String>, error: &(dyn Error + 'static)) -> Self {
        Self::new(Kind::Failed, worker, chain_text(error))
    }

    /// Keeps the error itself.
    #[must_use]
    pub fn with_source(mut self, error: Arc<dyn Error + Send + Sync>) -> Self {
        self.source = Some(error);
        self
    }

    /// Names the phase or activity.
    #[must_use]
    pub fn with_phase(mut self, phase: impl Into<String>) -> Self {
        self.phase = phase.into();
        self
    }

    /// Names the device.
    #[must_use]
    pub fn with_device(mut self, device: Option<String>) -> Self {
        self.device = device;
        self
    }

    /// Adds the account of where every stage stood.
    #[must_use]
    pub fn with_report(mut self, report: String) -> Self {
        self.report = Some(report);
        self
    }

    /// Marks a cause given by a destructor: the worker's own error, a moment later, replaces it.
    #[must_use]
    pub(crate) fn provisional(mut self) -> Self {
        self.provisional = true;
        self
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.kind {
            Kind::Failed => "failed",
            Kind::Stopped => "stopped on request",
            Kind::Stalled => "stalled",
        };
        write!(f, "{} {verb}", self.worker)?;
        if !self.phase.is_empty() {
            write!(f, " in {}", self.phase)?;
        }
        if let Some(device) = &self.device {
            write!(f, " on {device}")?;
        }
        write!(f, ": {}", self.error)
    }
}

impl Error for Cause {}

/// An error and its sources on one line, joined by `: `.
pub fn chain_text(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        source = inner.source();
    }
    text
}

/// What every wait returns once the run is cancelled. Its source is the [`Cause`], so that a worker that passes it on is recognised as an
/// echo and not as a second failure (see [`is_echo`]).
#[derive(Clone, Debug, thiserror::Error)]
#[error("the run was cancelled")]
pub struct Cancelled(#[source] Arc<Cause>);

impl Cancelled {
    /// The cause as it stood when the wait ended.
    pub fn cause(&self) -> &Cause {
        &self.0
    }
}

/// True when an error only passes on a cancellation that began elsewhere.
pub fn is_echo(error: &(dyn Error + 'static)) -> bool {
    let mut link = Some(error);
    while let Some(inner) = link {
        if inner.is::<Cause>() || inner.is::<Arc<Cause>>() {
            return true;
        }
        link = inner.source();
    }
    false
}

/// Something with waiters. `wake` takes the structure's lock and notifies every waiter.
pub(crate) trait Wake: Send + Sync {
    fn wake(&self);
}

#[derive(Default)]
struct Ledger {
    first: Option<Arc<Cause>>,
    others: Vec<Arc<Cause>>,
    stop: Option<String>,
    wakers: Vec<Weak<dyn Wake>>,
}

struct Inner {
    cancelled: AtomicBool,
    ledger: Mutex<Ledger>,
}

/// Failures after the first that are kept for the report; more are only symptoms.
const OTHERS_KEPT: usize = 16;

/// The run's cancellation token. Clones are one token.
#[derive(Clone)]
pub struct Cancel(Arc<Inner>);

impl Default for Cancel {
    fn default() -> Self {
        Self::new()
    }
}

impl Cancel {
    /// A token that nothing has cancelled.
    pub fn new() -> Self {
        Self(Arc::new(Inner { cancelled: AtomicBool::new(false), ledger: Mutex::new(Ledger::default()) }))
    }

    /// Cancels the run and wakes every waiter. Returns whether `cause` is now the run's cause: false when an earlier one stands, in which case
    /// this one is kept among [`others`](Self::others).
    pub fn cancel(&self, cause: Cause) -> bool {
        let (won, wakers) = {
            let mut ledger = lock(&self.0.ledger);
            let replaces = ledger.first.as_ref().is_none_or(|first| first.provisional && !cause.provisional);
            let cause = Arc::new(cause);
            if replaces {
                ledger.first = Some(cause);
            } else if !cause.provisional && ledger.others.len() < OTHERS_KEPT {
                ledger.others.push(cause);
            }
            self.0.cancelled.store(true, Ordering::SeqCst);
            (replaces, std::mem::take(&mut ledger.wakers))
        };
        // The ledger is free again: a waiter that wakes reads the cause from it while holding its own lock.
        for waker in wakers.iter().filter_map(Weak::upgrade) {
            waker.wake();
        }
        won
    }

    /// True once the run is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::SeqCst)
    }

    /// # Errors
    /// [`Cancelled`] once the run is cancelled. Device waits call this while they poll.
    pub fn check(&self) -> Result<(), Cancelled> {
        if !self.is_cancelled() {
            return Ok(());
        }
        match self.cause() {
            Some(cause) => Err(Cancelled(cause)),
            None => Ok(()),
        }
    }

    /// The cause of the cancellation, if there is one.
    pub fn cause(&self) -> Option<Arc<Cause>> {
        lock(&self.0.ledger).first.clone()
    }

    /// Failures that came after the first cause, oldest first, at most 16.
    pub fn others(&self) -> Vec<Arc<Cause>> {
        lock(&self.0.ledger).others.clone()
    }

    /// Asks the run to end well: finish the step, save, leave. It wakes nobody; drafters look at [`stop_requested`](Self::stop_requested) at
    /// step boundaries and decide together. Returns true for the first request; the caller may answer a second one by cancelling with
    /// [`Kind::Stopped`].
    pub fn request_stop(&self, why: impl Into<String>) -> bool {
        let mut ledger = lock(&self.0.ledger);
        let first = ledger.stop.is_none();
        if first {
            ledger.stop = Some(why.into());
        }
        first
    }

    /// Why a stop was asked for, if it was.
    pub fn stop_requested(&self) -> Option<String> {
        lock(&self.0.ledger).stop.clone()
    }

    /// Adds a structure whose waiters must wake on cancellation. A structure that registers too late finds the flag up before its first wait.
    pub(crate) fn register(&self, waker: Weak<dyn Wake>) {
        lock(&self.0.ledger).wakers.push(waker);
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cancel").field(&self.cause()).finish()
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn the_first_real_cause_stands_and_later_ones_are_kept_aside() {
        let cancel = Cancel::new();
        assert!(cancel.check().is_ok());
        assert!(cancel.cancel(Cause::new(Kind::Failed, "target 0", "dropped its slot").provisional()));
        assert!(cancel.cancel(Cause::new(Kind::Failed, "target 0", "out of memory").with_phase("forward")));
        assert!(!cancel.cancel(Cause::new(Kind::Stalled, "drafter 1", "no progress")));
        assert!(!cancel.cancel(Cause::new(Kind::Failed, "drafter 1", "dropped its lease").provisional()));
        assert_eq!(cancel.cause().unwrap().to_string(), "target 0 failed in forward: out of memory");
        assert_eq!(cancel.others().iter().map(|c| c.worker.as_str()).collect::<Vec<_>>(), ["drafter 1"]);
        assert_eq!(cancel.check().unwrap_err().cause().worker, "target 0");
    }

    #[test]
    fn a_stop_request_is_not_a_cancellation() {
        let cancel = Cancel::new();
        assert!(cancel.request_stop("SIGTERM"));
        assert!(!cancel.request_stop("SIGINT"));
        assert_eq!(cancel.stop_requested().as_deref(), Some("SIGTERM"));
        assert!(!cancel.is_cancelled());
    }

    #[derive(Debug, thiserror::Error)]
    enum Wrapped {
        #[error(transparent)]
        Clear(#[from] Cancelled),
        #[error("step 3")]
        Deep(#[source] Cancelled),
        #[error("disk full")]
        Own,
    }

    #[test]
    fn an_echo_is_recognised_through_wrappers() {
        let cancel = Cancel::new();
        cancel.cancel(Cause::new(Kind::Failed, "w", "e"));
        let cancelled = cancel.check().unwrap_err();
        assert!(is_echo(&cancelled));
        assert!(is_echo(&Wrapped::Clear(cancelled.clone())));
        assert!(is_echo(&Wrapped::Deep(cancelled)));
        assert!(!is_echo(&Wrapped::Own));
    }
}
