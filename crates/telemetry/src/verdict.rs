//! What a run is doing, judged from its status and a clock, with what to do about it.
//!
//! Refuses: files, clocks and memory of its own; [`judge`] is a pure function, and [`Watcher`] only keeps when it saw what.
//! Invariants: liveness is never taken for progress (a fresh timestamp changes nothing, only a grown counter does);
//! an end (failed, stopped, finished) outranks every other verdict but `not your code`.

use crate::event::{Identity, StageKind};
use crate::status::{Outcome, PhaseState, StageState, Status};
use serde::{Deserialize, Serialize};

/// A verdict: the state, a line that says it, and a line that says what to do (empty if nothing).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The state, with its particulars.
    #[serde(flatten)]
    pub state: State,
    /// What is so.
    pub headline: String,
    /// What to do; empty if nothing.
    pub advice: String,
}

/// The state of a run. `state` names the variant in the JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum State {
    /// Before the gate, and getting on.
    Starting {
        /// The phase that the run waits for.
        phase: String,
        /// Its worker.
        worker: String,
        /// Its device.
        device: String,
        /// Share done, 0..1, if the phase counts towards a total.
        share: Option<f64>,
    },
    /// Training, and getting on.
    Healthy,
    /// Training, but one stage waits for another too much of the time.
    Starved {
        /// The stage that waits.
        waiting: StageKind,
        /// The stage it waits for: the bottleneck.
        on: StageKind,
        /// Share of time that it waits, 0..1.
        wait_share: f64,
    },
    /// No progress for too long, or no sign of life.
    Stalled {
        /// By the run's clock, when it last got on.
        since_t: u64,
        /// How long ago that is.
        stalled_ms: u64,
        /// Whether the process still writes its status.
        alive: bool,
        /// Where each worker stands.
        stands: Vec<Stand>,
    },
    /// The loss rises or is not finite.
    Diverging {
        /// Steps in a row that were not finite; 0 if the loss rises.
        non_finite_in_a_row: u64,
    },
    /// The run is not what the watcher expects.
    NotYourCode {
        /// What differs, e.g. `build_id`.
        field: String,
        /// What was expected.
        expected: String,
        /// What runs.
        found: String,
    },
    /// All steps done.
    Finished {
        /// Steps done.
        steps: u64,
    },
    /// A worker failed.
    Failed {
        /// The worker.
        worker: String,
        /// The phase that it was in.
        phase: String,
        /// Its device.
        device: String,
        /// Why.
        cause: String,
    },
    /// Stopped on request.
    Stopped {
        /// Last step done.
        step: u64,
    },
    /// Nothing is known yet.
    #[default]
    Unknown,
}

impl State {
    /// One or two words: the name under which the state is known.
    pub fn name(&self) -> &'static str {
        match self {
            State::Starting { .. } => "starting",
            State::Healthy => "healthy",
            State::Starved { .. } => "starved",
            State::Stalled { .. } => "stalled",
            State::Diverging { .. } => "diverging",
            State::NotYourCode { .. } => "not your code",
            State::Finished { .. } => "finished",
            State::Failed { .. } => "failed",
            State::Stopped { .. } => "stopped",
            State::Unknown => "unknown",
        }
    }

    /// Whether nothing more will come.
    pub fn is_over(&self) -> bool {
        matches!(self, State::Finished { .. } | State::Failed { .. } | State::Stopped { .. })
    }
}

/// Where one worker stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stand {
    /// The worker.
    pub worker: String,
    /// Its device.
    pub device: String,
    /// Where it stands.
    pub at: String,
    /// For how long, by the run's clock.
    pub for_ms: u64,
}

/// What a watcher expects to run; fields left out are not compared.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// Build id of the executable that was meant.
    pub build_id: Option<String>,
    /// Hash of the config that was meant.
    pub config_hash: Option<String>,
    /// Hash of the dataset that was meant.
    pub dataset_hash: Option<String>,
    /// The run must have started at this time or later.
    pub not_before_t: Option<u64>,
}

/// When to call it what.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Longest time without progress in a start-up phase that names no deadline of its own.
    pub phase_ms: u64,
    /// Shortest time without progress that counts as a stall after the gate.
    pub step_floor_ms: u64,
    /// Steps' worth of time without progress that counts as a stall after the gate.
    pub step_factor: f64,
    /// Longest time without a sign of life.
    pub silence_ms: u64,
    /// Share of waiting from which a stage is starved.
    pub starved_share: f64,
    /// Steps before a stage can be called starved or the loss rising.
    pub warm_steps: u64,
    /// The loss rises when its average is above the lowest average by this share of it…
    pub rise_share: f64,
    /// … and by this many nats.
    pub rise_nats: f64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            phase_ms: 120_000,
            step_floor_ms: 60_000,
            step_factor: 20.0,
            silence_ms: 30_000,
            starved_share: 0.25,
            warm_steps: 8,
            rise_share: 0.15,
            rise_nats: 0.3,
        }
    }
}

/// Judges a run: `now_t` is Unix time in milliseconds by the run's clock.
pub fn judge(status: &Status, now_t: u64, expected: &Expected, limits: &Limits) -> Verdict {
    let Some(identity) = &status.identity else {
        return status.outcome.as_ref().map(ended).unwrap_or_else(|| Verdict {
            state: State::Unknown,
            headline: "the run has not said who it is".into(),
            advice: "if this lasts, look at the run's log: it may have ended before its first event".into(),
        });
    };
    if let Some(verdict) = not_your_code(identity, expected) {
        return verdict;
    }
    if let Some(outcome) = &status.outcome {
        return ended(outcome);
    }
    if let Some(verdict) = silent(status, now_t, limits) {
        return verdict;
    }
    match status.gate_t {
        None => starting(status, now_t, limits),
        Some(_) => training(status, now_t, limits),
    }
}

fn not_your_code(identity: &Identity, expected: &Expected) -> Option<Verdict> {
    let pairs = [
        ("build_id", &expected.build_id, &identity.build_id),
        ("config_hash", &expected.config_hash, &identity.config_hash),
        ("dataset_hash", &expected.dataset_hash, &identity.dataset_hash),
    ];
    let differs = pairs.into_iter().find_map(|(field, expected, found)| match expected {
        Some(expected) if expected != found => Some((field, expected.clone(), found.clone())),
        _ => None,
    });
    let older = expected
        .not_before_t
        .filter(|&t| identity.started_t < t)
        .map(|t| ("started_t", t.to_string(), identity.started_t.to_string()));
    let (field, expected, found) = differs.or(older)?;
    let headline = match field {
        "build_id" => format!("the run does not contain your change: it is build {found}, not {expected}"),
        "config_hash" => format!("the run has another config: {found}, not {expected}"),
        "dataset_hash" => format!("the run has another dataset: {found}, not {expected}"),
        _ => format!("the run started before yours: at {found} ms, not {expected} ms or later"),
    };
    Some(Verdict {
        state: State::NotYourCode { field: field.into(), expected, found },
        headline,
        advice: "deploy again, then restart the run so that it loads what was deployed".into(),
    })
}

fn ended(outcome: &Outcome) -> Verdict {
    match outcome {
        Outcome::Failure(failure) => Verdict {
            state: State::Failed {
                worker: failure.worker.clone(),
                phase: failure.phase.clone(),
                device: failure.device.clone(),
                cause: failure.cause.clone(),
            },
            headline: format!("{} failed in {} on {}: {}", failure.worker, failure.phase, failure.device, failure.cause),
            advice: "mend the cause, then go on from the last checkpoint with --resume".into(),
        },
        Outcome::Stopped(stopped) => Verdict {
            state: State::Stopped { step: stopped.step },
            headline: format!("stopped after step {} ({})", stopped.step, stopped.reason),
            advice: match &stopped.checkpoint {
                Some(path) => format!("go on with --resume; the checkpoint is {path}"),
                None => "no checkpoint was saved; a new start begins at the last one before, or at step 0".into(),
            },
        },
        Outcome::Done(done) => Verdict {
            state: State::Finished { steps: done.steps },
            headline: match done.tau {
                Some(tau) => format!("finished {} steps, τ {tau:.2}", done.steps),
                None => format!("finished {} steps", done.steps),
            },
            advice: String::new(),
        },
    }
}

fn silent(status: &Status, now_t: u64, limits: &Limits) -> Option<Verdict> {
    let silence_ms = now_t.saturating_sub(status.t);
    let limit_ms = limits.silence_ms.max(status.telemetry.status_interval_ms.saturating_mul(10));
    (silence_ms > limit_ms).then(|| Verdict {
        headline: format!("no sign of life for {}; last progress {}", span(silence_ms), progress_words(status)),
        advice: "the process is gone, its host cannot be reached, or its disk is full: look at its log and exit code".into(),
        state: State::Stalled {
            since_t: status.last_progress_t,
            stalled_ms: now_t.saturating_sub(status.last_progress_t),
            alive: false,
            stands: stands(status, now_t),
        },
    })
}

fn starting(status: &Status, now_t: u64, limits: &Limits) -> Verdict {
    let idle_ms = |state: &PhaseState| now_t.saturating_sub(state.last_progress_t);
    let open = || status.phases.iter().filter(|state| !state.phase.done);
    let late = open()
        .filter(|state| idle_ms(state) > state.phase.deadline_ms.unwrap_or(limits.phase_ms))
        .max_by_key(|state| idle_ms(state));
    if let Some(state) = late {
        let phase = &state.phase;
        return Verdict {
            headline: format!(
                "{} is stuck in start-up phase `{}` on {} at {}: no progress for {}",
                phase.worker,
                phase.name,
                phase.device,
                phase_words(state),
                span(idle_ms(state))
            ),
            advice: format!(
                "look at {} first (disk, driver, other processes on it); the run ends by itself at its deadline",
                phase.device
            ),
            state: State::Stalled {
                since_t: state.last_progress_t,
                stalled_ms: idle_ms(state),
                alive: true,
                stands: stands(status, now_t),
            },
        };
    }
    // Between two phases nothing is open, yet the run must get on.
    let quiet_ms = now_t.saturating_sub(status.last_progress_t);
    if open().next().is_none() && quiet_ms > limits.phase_ms {
        return Verdict {
            headline: format!("start-up stands still {}: no progress for {}", progress_words(status), span(quiet_ms)),
            advice: "look at the run's log for what it does between these phases".into(),
            state: State::Stalled {
                since_t: status.last_progress_t,
                stalled_ms: quiet_ms,
                alive: true,
                stands: stands(status, now_t),
            },
        };
    }
    // The run waits for the phase that is furthest from done; among equals for the one begun last.
    let slowest = open().min_by(|a, b| {
        let share = |state: &PhaseState| phase_share(state).unwrap_or(0.0);
        share(a).total_cmp(&share(b)).then(b.started_t.cmp(&a.started_t))
    });
    let Some(state) = slowest.or(status.phases.last()) else {
        return Verdict {
            state: State::Starting { phase: "start".into(), worker: "run".into(), device: String::new(), share: None },
            headline: "starting".into(),
            advice: String::new(),
        };
    };
    let phase = &state.phase;
    let others = open().count().saturating_sub(1);
    let more = if others == 0 { String::new() } else { format!(" (and {others} more)") };
    Verdict {
        headline: format!("starting: {} of {} on {}, {}{more}", phase.name, phase.worker, phase.device, phase_words(state)),
        advice: String::new(),
        state: State::Starting {
            phase: phase.name.clone(),
            worker: phase.worker.clone(),
            device: phase.device.clone(),
            share: phase_share(state),
        },
    }
}

fn training(status: &Status, now_t: u64, limits: &Limits) -> Verdict {
    let quiet_ms = now_t.saturating_sub(status.last_progress_t);
    let pause_ms = status.phases.iter().filter(|state| !state.phase.done).filter_map(|state| state.phase.deadline_ms).max();
    // The first steps set no rate yet; until one is known a start-up phase's patience applies.
    let by_rate_ms = match status.totals.steps {
        0 => limits.phase_ms,
        _ => (limits.step_factor * status.rates.step_ms) as u64,
    };
    let limit_ms = limits.step_floor_ms.max(by_rate_ms).max(pause_ms.unwrap_or(0));
    if quiet_ms > limit_ms {
        return Verdict {
            headline: format!("no progress for {}, {}", span(quiet_ms), progress_words(status)),
            advice: stall_advice(status),
            state: State::Stalled {
                since_t: status.last_progress_t,
                stalled_ms: quiet_ms,
                alive: true,
                stands: stands(status, now_t),
            },
        };
    }
    diverging(status, limits).or_else(|| starved(status, limits)).unwrap_or_else(|| healthy(status, limits))
}

fn diverging(status: &Status, limits: &Limits) -> Option<Verdict> {
    let trend = &status.loss_trend;
    if trend.non_finite_in_a_row > 0 {
        let n = trend.non_finite_in_a_row;
        let step = status.step.as_ref().map_or(0, |step| step.step);
        return Some(Verdict {
            headline: format!("step {step} was not finite ({n} in a row); its update was skipped"),
            advice: "one is survivable; if they go on lower the learning rate, or look at the batch named in the events".into(),
            state: State::Diverging { non_finite_in_a_row: n },
        });
    }
    let lowest = trend.lowest?;
    let rise = trend.average - lowest;
    if trend.samples < 30 + limits.warm_steps || rise <= limits.rise_nats || rise <= limits.rise_share * lowest.abs() {
        return None;
    }
    Some(Verdict {
        headline: format!("the loss rises: {:.3} on average, it was {lowest:.3}", trend.average),
        advice: "go back to the best checkpoint with a lower learning rate or a longer warm-up".into(),
        state: State::Diverging { non_finite_in_a_row: 0 },
    })
}

/// Shares of one kind of stage, averaged over its workers.
struct Shares {
    busy: f64,
    wait: f64,
    blocked: f64,
}

fn shares(status: &Status, kind: StageKind) -> Option<Shares> {
    let workers: Vec<&StageState> = status.stages.iter().filter(|s| s.stage == kind && s.window_ms > 0.0).collect();
    let n = workers.len() as f64;
    (!workers.is_empty()).then(|| Shares {
        busy: workers.iter().map(|s| s.busy_share).sum::<f64>() / n,
        // A worker that waits while its device works for another stage loses only what the device is idle.
        wait: workers.iter().map(|s| s.wait_share.min(device_idle(status, &s.device))).sum::<f64>() / n,
        blocked: workers.iter().map(|s| s.blocked_share.min(device_idle(status, &s.device))).sum::<f64>() / n,
    })
}

fn device_idle(status: &Status, device: &str) -> f64 {
    1.0 - status.stages.iter().filter(|s| s.device == device).map(|s| s.busy_share).sum::<f64>().min(1.0)
}

fn starved(status: &Status, limits: &Limits) -> Option<Verdict> {
    if status.totals.steps < limits.warm_steps {
        return None;
    }
    let drafter = shares(status, StageKind::Drafter);
    let target = shares(status, StageKind::Target);
    let prefetcher = shares(status, StageKind::Prefetcher);
    let over = |shares: &Option<Shares>| shares.as_ref().is_some_and(|s| s.wait > limits.starved_share);
    let wait = |shares: &Option<Shares>| shares.as_ref().map_or(0.0, |s| s.wait);
    let (waiting, on, wait_share, advice) = if over(&target) && prefetcher.is_some() {
        // Drafters then wait too, but the cause lies further up.
        let waiting = if over(&drafter) { StageKind::Drafter } else { StageKind::Target };
        (
            waiting,
            StageKind::Prefetcher,
            wait(if waiting == StageKind::Drafter { &drafter } else { &target }),
            "the batches come too slowly: put the dataset on a local disk, free CPU cores, or raise the prefetch depth",
        )
    } else if over(&drafter) && target.is_some() {
        let advice = if target.as_ref().is_some_and(|t| t.blocked > limits.starved_share) {
            "both wait for each other: raise the slots per drafter, and look for slow peer copies between their devices"
        } else {
            "the targets are the bottleneck: give a device more to `targets`, or train more on each batch (more anchors)"
        };
        (StageKind::Drafter, StageKind::Target, wait(&drafter), advice)
    } else {
        return None;
    };
    Some(Verdict {
        headline: format!("starved: the {}s wait for the {}s {:.0} % of the time", waiting.name(), on.name(), wait_share * 100.0),
        advice: advice.into(),
        state: State::Starved { waiting, on, wait_share },
    })
}

fn healthy(status: &Status, limits: &Limits) -> Verdict {
    let step = status.step.as_ref().map_or(0, |step| step.step);
    let of = status.total_steps.map_or_else(String::new, |total| format!(" of {}", grouped(total)));
    let idle_targets = shares(status, StageKind::Target).filter(|s| s.blocked > 2.0 * limits.starved_share);
    let busy_drafters = shares(status, StageKind::Drafter).is_some_and(|s| s.busy > 0.5);
    Verdict {
        state: State::Healthy,
        headline: if step == 0 {
            "the gate is open; the first step is on its way".into()
        } else {
            format!("step {}{of}, {} tokens/s", grouped(step), grouped(status.rates.tokens_per_s as u64))
        },
        advice: match idle_targets {
            Some(s) if busy_drafters && status.totals.steps >= limits.warm_steps => format!(
                "the targets are held up {:.0} % of the time: a device moved from `targets` to `drafters` would train faster",
                s.blocked * 100.0
            ),
            _ => String::new(),
        },
    }
}

fn stall_advice(status: &Status) -> String {
    let working = status.stages.iter().find(|s| !s.at.starts_with("waiting"));
    match working {
        Some(s) => format!("{} on {} stands at `{}` while the others wait: look there first", s.worker, s.device, s.at),
        None if status.stages.is_empty() => "no worker has said where it stands: look at the run's log".into(),
        None => "every worker waits: a slot or a batch was lost between them; stop the run and keep its events".into(),
    }
}

fn stands(status: &Status, now_t: u64) -> Vec<Stand> {
    let phases = status.phases.iter().filter(|state| !state.phase.done).map(|state| Stand {
        worker: state.phase.worker.clone(),
        device: state.phase.device.clone(),
        at: format!("{}, {}", state.phase.name, phase_words(state)),
        for_ms: now_t.saturating_sub(state.last_progress_t),
    });
    let stages = status.stages.iter().map(|state| Stand {
        worker: state.worker.clone(),
        device: state.device.clone(),
        at: state.at.clone(),
        for_ms: now_t.saturating_sub(state.at_since_t),
    });
    phases.chain(stages).collect()
}

fn progress_words(status: &Status) -> String {
    match (&status.step, status.phases.last()) {
        (Some(step), _) => format!("after step {}", step.step),
        (None, Some(state)) if status.gate_t.is_none() => format!("in start-up phase `{}`", state.phase.name),
        (None, Some(_)) => "after the gate".into(),
        (None, None) => "at the start".into(),
    }
}

fn phase_share(state: &PhaseState) -> Option<f64> {
    let total = state.phase.total.filter(|&total| total > 0)?;
    Some((state.phase.progress as f64 / total as f64).min(1.0))
}

fn phase_words(state: &PhaseState) -> String {
    let unit = &state.phase.unit;
    match (phase_share(state), state.phase.total) {
        (Some(share), Some(total)) if unit == "bytes" => {
            format!("{:.0} % of {:.2} GB", share * 100.0, total as f64 / 1e9)
        }
        (Some(_), Some(total)) => format!("{} of {total} {unit}", state.phase.progress),
        _ => format!("{} {unit}", state.phase.progress),
    }
}

/// A whole number with its thousands set apart.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let lead = digits.len() % 3;
    let mut out = digits[..lead].to_owned();
    for (i, digit) in digits[lead..].char_indices() {
        if i % 3 == 0 && !out.is_empty() {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A length of time in words.
pub fn span(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0 => format!("{ms} ms"),
        1..=119 => format!("{s} s"),
        120..=7199 => format!("{} min {} s", s / 60, s % 60),
        _ => format!("{} h {} min", s / 3600, s / 60 % 60),
    }
}

/// Judges a run from outside, reading after reading, with a clock of its own that need not agree with the run's.
///
/// A reading that equals the one before it shows no time of the run's own, so the run's clock is taken to have gone on as the
/// watcher's did: the same output twice turns into a stall, never into health.
#[derive(Debug, Clone, Default)]
pub struct Watcher {
    expected: Expected,
    limits: Limits,
    last_t: Option<u64>,
    /// How far the watcher's clock is ahead of the run's, as the smallest difference seen when a reading was fresh.
    ahead_ms: Option<i64>,
    live: bool,
}

impl Watcher {
    /// A watcher who expects this.
    pub fn new(expected: Expected, limits: Limits) -> Watcher {
        Watcher { expected, limits, ..Watcher::default() }
    }

    /// Judges a reading made at `local_t`, Unix time in milliseconds by the watcher's clock.
    pub fn observe(&mut self, status: &Status, local_t: u64) -> Verdict {
        let now_t = self.run_clock(status.t, local_t);
        judge(status, now_t, &self.expected, &self.limits)
    }

    /// The watcher's best guess of the run's clock, given the latest time that the run showed.
    pub fn run_clock(&mut self, shown_t: u64, local_t: u64) -> u64 {
        let difference = local_t as i64 - shown_t as i64;
        match self.last_t {
            // A first reading may be old, so that only a run from the future proves the clocks apart.
            None => self.ahead_ms = Some(difference.min(0)),
            Some(last_t) if shown_t > last_t => {
                self.ahead_ms = Some(if self.live { difference.min(self.ahead_ms.unwrap_or(difference)) } else { difference });
                self.live = true;
            }
            Some(_) => {}
        }
        self.last_t = Some(shown_t.max(self.last_t.unwrap_or(0)));
        (local_t as i64 - self.ahead_ms.unwrap_or(0)).max(0) as u64
    }
}
