//! Its job: the start-up phases of a run, who is where in them, and one gate that opens when everybody is ready.
//! It refuses to open while a registered worker is missing, and to let a worker go back to an earlier phase.
//! Invariants: events are delivered one at a time in the order in which they happened; *targets ready* comes before *drafters ready*, which
//! comes before *gate opens*. Repeating a report without a new phase or a new fraction is not progress: the quiet limit goes on counting.

use super::board::{Board, Doing, Station, What, nanos};
use super::cancel::{Cancel, Cancelled, Cause, Kind, Wake};
use super::sync::{Arc, Condvar, Mutex, lock, wait};
use std::collections::VecDeque;
use std::time::Duration;

/// The start-up phases in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Config, files, shard sizes, disk, host memory.
    Checks,
    /// Opening the dataset and its index.
    Dataset,
    /// Building the plan.
    Plan,
    /// Loading modules and taking arenas.
    Arenas,
    /// Reading the target's weights.
    Weights,
    /// Opening peer access between devices.
    PeerAccess,
    /// Making communicators.
    Communicators,
    /// Warm-up and graph capture in the owning thread.
    WarmUp,
    /// Every target is ready.
    TargetsReady,
    /// Every drafter is ready.
    DraftersReady,
    /// The gate is open.
    Open,
}

impl Phase {
    /// All phases in order.
    pub const ALL: [Phase; 11] = [
        Phase::Checks,
        Phase::Dataset,
        Phase::Plan,
        Phase::Arenas,
        Phase::Weights,
        Phase::PeerAccess,
        Phase::Communicators,
        Phase::WarmUp,
        Phase::TargetsReady,
        Phase::DraftersReady,
        Phase::Open,
    ];

    /// The phase as it is printed.
    pub const fn label(self) -> &'static str {
        match self {
            Phase::Checks => "cheap checks",
            Phase::Dataset => "dataset",
            Phase::Plan => "plan",
            Phase::Arenas => "modules and arenas",
            Phase::Weights => "target weights",
            Phase::PeerAccess => "peer access",
            Phase::Communicators => "communicators",
            Phase::WarmUp => "warm-up and capture",
            Phase::TargetsReady => "targets ready",
            Phase::DraftersReady => "drafters ready",
            Phase::Open => "gate opens",
        }
    }
}

/// How long a worker may be in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// In all.
    pub total: Duration,
    /// Without its reported fraction growing.
    pub quiet: Duration,
}

/// The limits of every phase.
#[derive(Clone, Debug)]
pub struct Limits([Limit; Phase::ALL.len()]);

impl Default for Limits {
    /// Generous for the phases that read disks (a cold network filesystem, a foreign dataset's first index), tight for the others.
    fn default() -> Self {
        let limit = |total_s, quiet_s| Limit { total: Duration::from_secs(total_s), quiet: Duration::from_secs(quiet_s) };
        let mut limits = Self([limit(120, 120); Phase::ALL.len()]);
        limits.set(Phase::Dataset, limit(7_200, 300));
        limits.set(Phase::Arenas, limit(300, 300));
        limits.set(Phase::Weights, limit(7_200, 300));
        limits.set(Phase::WarmUp, limit(1_200, 300));
        limits
    }
}

impl Limits {
    /// Changes one phase's limit.
    pub fn set(&mut self, phase: Phase, limit: Limit) {
        self.0[phase as usize] = limit;
    }

    /// One phase's limit.
    pub fn get(&self, phase: Phase) -> Limit {
        self.0[phase as usize]
    }
}

/// What a worker is, for the two *ready* events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It runs a target (alone, or beside a drafter on the same device).
    Target,
    /// It runs a drafter only.
    Drafter,
    /// Coordinator, prefetcher, checkpoint writer.
    Other,
}

/// Something that happened during start-up.
#[derive(Clone, Debug, PartialEq)]
pub struct GateEvent {
    /// Board time.
    pub at_ns: u64,
    /// Who reported; `None` for the events of the run as a whole (targets ready, drafters ready, gate opens).
    pub worker: Option<String>,
    /// Its device.
    pub device: Option<String>,
    /// The phase.
    pub phase: Phase,
    /// Fraction of the phase that is done, 0 to 1.
    pub progress: f32,
    /// What the worker says about it.
    pub text: String,
    /// Nanoseconds this worker has been in the phase; for events of the whole run, since the gate was made.
    pub in_phase_ns: u64,
    /// How long it may be in the phase in all; `None` for events of the run as a whole.
    pub deadline: Option<Duration>,
}

/// What can go wrong at the gate.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// A worker reported a phase that lies before the one it had reached.
    #[error("{worker} went back from {from} to {to}; report start-up phases in their order")]
    Backwards {
        /// Who.
        worker: String,
        /// The phase it was in.
        from: &'static str,
        /// The phase it reported.
        to: &'static str,
    },
    /// A worker came after [`Gate::seal`].
    #[error("{worker} came after the gate was sealed; register every worker before the first thread starts")]
    Sealed {
        /// Who.
        worker: String,
    },
    /// The run was cancelled meanwhile.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
}

struct Member {
    station: Station,
    role: Role,
    phase: Option<Phase>,
    progress: f32,
    entered_ns: u64,
    moved_ns: u64,
    ready: bool,
}

struct State {
    members: Vec<Member>,
    sealed: bool,
    targets_ready: bool,
    drafters_ready: bool,
    open: bool,
    events: VecDeque<GateEvent>,
}

type Listener = Box<dyn FnMut(&GateEvent) + Send>;

struct Shared {
    state: Mutex<State>,
    opened: Condvar,
    listener: Mutex<Listener>,
    cancel: Cancel,
    board: Board,
    limits: Limits,
    made_ns: u64,
}

impl Wake for Shared {
    fn wake(&self) {
        let _state = lock(&self.state);
        self.opened.notify_all();
    }
}

/// The gate of a run. Clones are the same gate.
#[derive(Clone)]
pub struct Gate(Arc<Shared>);

impl Gate {
    /// A closed gate with nobody registered. `listener` receives every event, on the thread that caused it; it must not call the gate.
    pub fn new(cancel: &Cancel, board: &Board, limits: Limits, listener: impl FnMut(&GateEvent) + Send + 'static) -> Self {
        let state = State {
            members: Vec::new(),
            sealed: false,
            targets_ready: false,
            drafters_ready: false,
            open: false,
            events: VecDeque::new(),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            opened: Condvar::new(),
            listener: Mutex::new(Box::new(listener)),
            cancel: cancel.clone(),
            board: board.clone(),
            limits,
            made_ns: board.now_ns(),
        });
        let waker = Arc::downgrade(&shared);
        cancel.register(waker);
        Self(shared)
    }

    /// Registers a worker that must be ready before the gate opens; the entrant moves to its thread.
    ///
    /// # Errors
    /// [`GateError::Sealed`] after [`seal`](Self::seal).
    pub fn register(&self, station: &Station, role: Role) -> Result<Entrant, GateError> {
        let mut state = lock(&self.0.state);
        if state.sealed {
            return Err(GateError::Sealed { worker: station.name().to_owned() });
        }
        let now = self.0.board.now_ns();
        let index = state.members.len();
        state.members.push(Member {
            station: station.clone(),
            role,
            phase: None,
            progress: 0.0,
            entered_ns: now,
            moved_ns: now,
            ready: false,
        });
        Ok(Entrant { gate: self.clone(), index, station: station.clone(), passed: false })
    }

    /// Says that everybody has registered. The gate opens no earlier than this.
    pub fn seal(&self) {
        let mut state = lock(&self.0.state);
        state.sealed = true;
        self.settle(&mut state);
        drop(state);
        self.emit();
    }

    /// True once the gate is open.
    pub fn is_open(&self) -> bool {
        lock(&self.0.state).open
    }

    /// The worker that has outstayed a limit, if any, as a cause of kind [`Kind::Stalled`]. Workers that are ready are not
    /// counted, nor is time before `since_ns`.
    pub(crate) fn overdue(&self, now_ns: u64, since_ns: u64) -> Option<Cause> {
        let state = lock(&self.0.state);
        let late = |member: &Member| {
            // A worker that has reported nothing yet is held to the first phase's limit.
            let phase = member.phase.unwrap_or(Phase::Checks);
            let limit = self.0.limits.get(phase);
            let counted = |from_ns: u64| now_ns.saturating_sub(from_ns.max(since_ns));
            let (total, quiet) = (counted(member.entered_ns), counted(member.moved_ns));
            let error = if total > nanos(limit.total) {
                format!("still not through after {:.1} s", limit.total.as_secs_f64())
            } else if quiet > nanos(limit.quiet) {
                format!("no progress beyond {:.0} % for more than {:.1} s", member.progress * 100.0, limit.quiet.as_secs_f64())
            } else {
                return None;
            };
            let label = member.phase.map_or("starting its thread", Phase::label);
            let device = member.station.device().map(str::to_owned);
            Some((quiet, Cause::new(Kind::Stalled, member.station.name(), error).with_phase(label).with_device(device)))
        };
        // Whoever waits for another worker is not the culprit as long as somebody still works.
        let waits = |member: &&Member| member.station.current().0 == Doing::Waiting;
        let unready: Vec<&Member> = state.members.iter().filter(|member| !member.ready).collect();
        let all_wait = unready.iter().all(waits);
        let held = unready.into_iter().filter(|member| all_wait || !waits(member));
        held.filter_map(late).max_by_key(|(quiet, _)| *quiet).map(|(_, cause)| cause)
    }

    /// Moves the milestones as far as the members allow.
    fn settle(&self, state: &mut State) {
        let now = self.0.board.now_ns();
        let ready = |state: &State, role: Role| state.sealed && state.members.iter().all(|m| m.ready || m.role != role);
        let event = |phase: Phase| GateEvent {
            at_ns: now,
            worker: None,
            device: None,
            phase,
            progress: 1.0,
            text: String::new(),
            in_phase_ns: now.saturating_sub(self.0.made_ns),
            deadline: None,
        };
        if !state.targets_ready && ready(state, Role::Target) {
            state.targets_ready = true;
            state.events.push_back(event(Phase::TargetsReady));
        }
        if state.targets_ready && !state.drafters_ready && ready(state, Role::Drafter) {
            state.drafters_ready = true;
            state.events.push_back(event(Phase::DraftersReady));
        }
        if state.drafters_ready && !state.open && ready(state, Role::Other) && !self.0.cancel.is_cancelled() {
            state.open = true;
            state.events.push_back(event(Phase::Open));
            self.0.opened.notify_all();
        }
    }

    /// Delivers what has happened. The listener's lock is held throughout, so that two threads cannot overtake each other.
    fn emit(&self) {
        let mut listener = lock(&self.0.listener);
        loop {
            let Some(event) = lock(&self.0.state).events.pop_front() else { return };
            listener(&event);
        }
    }
}

/// One worker on its way to the gate. Dropping it before the gate has let it through cancels the run.
pub struct Entrant {
    gate: Gate,
    index: usize,
    station: Station,
    passed: bool,
}

impl Entrant {
    /// Reports how far the worker is: the phase, the fraction of it that is done, and a few words. A greater fraction or a later phase is
    /// progress; anything else is only text.
    ///
    /// # Errors
    /// [`GateError::Backwards`] for an earlier phase than before; [`GateError::Cancelled`] once the run is cancelled.
    pub fn report(&self, phase: Phase, progress: f32, text: impl Into<String>) -> Result<(), GateError> {
        let shared = &self.gate.0;
        self.stop_if_asked();
        shared.cancel.check()?;
        let mut state = lock(&shared.state);
        let now = shared.board.now_ns();
        let member = &mut state.members[self.index];
        let progress = progress.clamp(0.0, 1.0);
        if let Some(from) = member.phase.filter(|from| *from > phase) {
            let worker = self.station.name().to_owned();
            return Err(GateError::Backwards { worker, from: from.label(), to: phase.label() });
        }
        if member.phase != Some(phase) {
            (member.phase, member.progress, member.entered_ns, member.moved_ns) = (Some(phase), progress, now, now);
            self.station.busy(What::new(phase.label()));
            self.station.advance(1);
        } else if progress > member.progress {
            (member.progress, member.moved_ns) = (progress, now);
            self.station.advance(1);
        }
        let event = GateEvent {
            at_ns: now,
            worker: Some(self.station.name().to_owned()),
            device: self.station.device().map(str::to_owned),
            phase,
            progress,
            text: text.into(),
            in_phase_ns: now.saturating_sub(member.entered_ns),
            deadline: Some(shared.limits.get(phase).total),
        };
        state.events.push_back(event);
        drop(state);
        self.gate.emit();
        Ok(())
    }

    /// Before the gate there is nothing to save: a request to stop ends the run at once instead of after its first step.
    fn stop_if_asked(&self) {
        let cancel = &self.gate.0.cancel;
        if let (Some(why), false) = (cancel.stop_requested(), cancel.is_cancelled()) {
            let text = format!("{why} before the first step; nothing was trained");
            cancel.cancel(Cause::new(Kind::Stopped, self.station.name(), text));
        }
    }

    /// Says that the worker is ready and waits until everybody is. Going through is progress, and the worker is idle until it says otherwise.
    ///
    /// # Errors
    /// [`Cancelled`] if the run is cancelled before the gate opens.
    pub fn pass(mut self) -> Result<(), Cancelled> {
        self.passed = true;
        self.stop_if_asked();
        let shared = self.gate.0.clone();
        {
            let mut state = lock(&shared.state);
            state.members[self.index].ready = true;
            self.gate.settle(&mut state);
        }
        self.gate.emit();
        self.station.idle();
        {
            let _span = self.station.waiting("the gate");
            let mut state = lock(&shared.state);
            while !state.open {
                shared.cancel.check()?;
                state = wait(&shared.opened, state);
            }
        }
        self.station.advance(1);
        Ok(())
    }
}

impl Drop for Entrant {
    fn drop(&mut self) {
        if !self.passed && !self.gate.0.cancel.is_cancelled() {
            let cause = self.station.cause(Kind::Failed, "left before the gate opened");
            self.gate.0.cancel.cancel(cause.provisional());
        }
    }
}

#[cfg(all(test, not(shuttle)))]
#[path = "gate_tests.rs"]
mod tests;
