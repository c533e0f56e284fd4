//! The board and the conveyor, told as telemetry.
//!
//! Job: differences of busy and waiting times between two looks, as a [`Pipeline`] sample. Refuses to decide anything.
//! Invariant: what a worker waits for is counted as *wait* when the stage before it is slow and as *blocked* when the one after it is.

use crate::pipeline::board::{Board, Doing};
use crate::pipeline::conveyor::Counters;
use drafthorse_telemetry::{ChannelSample, Pipeline, SlotSample, StageKind, StageSample};
use std::collections::HashMap;

/// Remembers the last look.
#[derive(Default)]
pub struct Stages {
    last_ns: u64,
    seen: HashMap<String, (u64, u64, u64)>,
}

/// Labels of waits for the stage after: room in the queue, free slots.
const BLOCKED: [&str; 2] = ["room in the batch queue", "a free slot"];

impl Stages {
    /// What happened since the last look.
    pub fn sample(&mut self, board: &Board, counters: &Counters, queue_depth: usize, slots_per_pool: usize) -> Pipeline {
        let now = board.now_ns();
        let interval_ms = ms(now.saturating_sub(std::mem::replace(&mut self.last_ns, now)));
        let mut stages = Vec::new();
        for view in board.snapshot() {
            let Some(stage) = kind(&view.name) else { continue };
            let busy: u64 = view.busy_ns.values().sum();
            let (mut wait, mut blocked) = (0, 0);
            for (label, ns) in &view.wait_ns {
                if BLOCKED.iter().any(|b| label.starts_with(b)) { blocked += ns } else { wait += ns }
            }
            let (b, w, k) = self.seen.insert(view.name.clone(), (busy, wait, blocked)).unwrap_or_default();
            let at = match view.doing {
                Doing::Waiting => format!("waiting for {}", view.what),
                Doing::Busy => view.what.to_string(),
                Doing::Idle => "idle".into(),
                Doing::Done => "done".into(),
            };
            stages.push(StageSample {
                stage,
                worker: view.name,
                device: view.device.unwrap_or_else(|| "cpu".into()),
                busy_ms: ms(busy.saturating_sub(b)),
                wait_ms: ms(wait.saturating_sub(w)),
                blocked_ms: ms(blocked.saturating_sub(k)),
                at,
            });
        }
        let channels =
            vec![ChannelSample { name: "batches".into(), depth: counters.queue_depth as u64, capacity: queue_depth as u64 }];
        let slots = counters
            .free_slots
            .iter()
            .enumerate()
            .map(|(i, &free)| SlotSample {
                worker: format!("drafter {i}"),
                free: free as u64,
                filled: counters.filled_slots.get(i).copied().unwrap_or(0) as u64,
                total: slots_per_pool as u64,
            })
            .collect();
        Pipeline { interval_ms, stages, channels, slots }
    }
}

fn kind(worker: &str) -> Option<StageKind> {
    [("prefetcher", StageKind::Prefetcher), ("target", StageKind::Target), ("drafter", StageKind::Drafter)]
        .into_iter()
        .find_map(|(name, kind)| worker.starts_with(name).then_some(kind))
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}
