//! The status as Prometheus text exposition, format 0.0.4.
//!
//! Refuses: history and judgement of its own; every sample is a field of the [`Status`].
//! Invariants: names begin with `drafthorse_` and end in their base unit; each name has one `HELP` and one `TYPE`; label
//! values are escaped as the format asks.

use crate::status::Status;
use std::fmt::Write;

struct Exposition(String);

impl Exposition {
    fn family(&mut self, name: &str, kind: &str, help: &str, samples: &[(Vec<(&str, &str)>, f64)]) {
        if samples.is_empty() {
            return;
        }
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP drafthorse_{name} {help}\n# TYPE drafthorse_{name} {kind}");
        for (labels, value) in samples {
            let _ = write!(self.0, "drafthorse_{name}");
            let shown: Vec<String> = labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
            if !shown.is_empty() {
                let _ = write!(self.0, "{{{}}}", shown.join(","));
            }
            let _ = writeln!(self.0, " {}", number(*value));
        }
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, "gauge", help, &[(vec![], value)]);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "counter", help, &[(vec![], value as f64)]);
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn number(value: f64) -> String {
    if value.is_nan() {
        "NaN".into()
    } else if value.is_infinite() {
        if value > 0.0 { "+Inf".into() } else { "-Inf".into() }
    } else {
        value.to_string()
    }
}

/// The status in the text format that Prometheus scrapes (`text/plain; version=0.0.4`).
pub fn exposition(status: &Status) -> String {
    let mut out = Exposition(String::with_capacity(8192));
    identity(&mut out, status);
    training(&mut out, status);
    pipeline(&mut out, status);
    devices(&mut out, status);
    out.0
}

fn identity(out: &mut Exposition, status: &Status) {
    if let Some(identity) = &status.identity {
        let labels = vec![
            ("run_id", status.run_id.as_str()),
            ("build_id", &identity.build_id),
            ("config_hash", &identity.config_hash),
            ("dataset_hash", &identity.dataset_hash),
            ("host", &identity.host),
            ("backend", &identity.backend),
        ];
        out.family("run_info", "gauge", "Identity of the run.", &[(labels, 1.0)]);
        out.gauge("run_start_time_seconds", "Unix time at which the process started.", identity.started_t as f64 / 1e3);
    }
    let verdict = vec![("verdict", status.verdict.state.name())];
    out.family("verdict_info", "gauge", "What the run is doing.", &[(verdict, 1.0)]);
    out.gauge("last_progress_time_seconds", "Unix time of the last progress.", status.last_progress_t as f64 / 1e3);
    out.counter("progress_total", "Everything that counts as progress.", status.progress);
    let phases: Vec<_> = status
        .phases
        .iter()
        .filter_map(|state| {
            let phase = &state.phase;
            let labels = vec![("phase", phase.name.as_str()), ("worker", &phase.worker), ("device", &phase.device)];
            let total = phase.total.filter(|&total| total > 0);
            let ratio = if phase.done { Some(1.0) } else { total.map(|total| phase.progress as f64 / total as f64) };
            ratio.map(|ratio| (labels, ratio))
        })
        .collect();
    out.family("phase_progress_ratio", "gauge", "Share of a phase that is done.", &phases);
    out.gauge("gate_open", "1 once training has begun.", f64::from(u8::from(status.gate_t.is_some())));
    let lost = &status.telemetry;
    out.counter("telemetry_dropped_events_total", "Events dropped because the queue was full.", lost.dropped_events);
    out.counter("telemetry_unwritten_events_total", "Events that could not be written.", lost.unwritten_events);
    let warnings: Vec<_> = status.warnings.iter().map(|w| (vec![("code", w.code.as_str())], w.count as f64)).collect();
    out.family("warnings_total", "counter", "Warnings by code.", &warnings);
}

fn training(out: &mut Exposition, status: &Status) {
    let totals = &status.totals;
    out.counter("tokens_total", "Tokens trained on by this launch.", totals.tokens);
    out.counter("blocks_total", "Draft blocks trained by this launch.", totals.blocks);
    out.counter("rows_total", "Samples trained on by this launch.", totals.rows);
    out.counter("non_finite_skipped_total", "Steps skipped as not finite.", totals.non_finite_skipped);
    if let Some(total) = status.total_steps {
        out.gauge("planned_steps", "Steps that the run is to make.", total as f64);
    }
    if let Some(step) = &status.step {
        out.gauge("step", "Last step.", step.step as f64);
        out.gauge("epoch", "Epoch of the last step.", step.epoch as f64);
        out.gauge("loss", "Loss of the last step in nats.", step.loss);
        out.gauge("learning_rate", "Learning rate of the last step.", step.lr);
        out.gauge("grad_norm", "Gradient norm of the last step before clipping.", step.grad_norm);
        out.gauge("expected_acceptance_tokens", "Expected acceptance of the last step.", step.expected_acceptance);
        out.gauge("tokens_per_second", "Tokens per second of the last step.", step.tokens_per_s);
        out.gauge("step_duration_seconds", "Wall time of the last step.", step.step_ms / 1e3);
        if let Some(mfu) = step.mfu {
            out.gauge("mfu_ratio", "Useful FLOPs per second over the GEMM ceiling.", mfu);
        }
        slots(out, "slot_accuracy_ratio", "Share of right argmaxes per slot, last step.", &step.accuracy);
        slots(out, "slot_label_probability_ratio", "Mean label probability per slot, last step.", &step.label_probability);
    }
    if let Some(held_out) = &status.held_out {
        out.gauge("held_out_loss", "Loss of the last evaluation in nats.", held_out.loss);
        out.gauge(
            "held_out_expected_acceptance_tokens",
            "Expected acceptance of the last evaluation.",
            held_out.expected_acceptance,
        );
        if let Some(tau) = held_out.tau {
            out.gauge("held_out_tau_tokens", "Acceptance length measured at the last evaluation.", tau);
        }
        slots(out, "held_out_slot_accuracy_ratio", "Share of right argmaxes per slot, last evaluation.", &held_out.accuracy);
    }
    let per_variant = |value: fn(&crate::VariantState) -> f64| -> Vec<_> {
        status.variants.iter().map(|v| (vec![("variant", v.variant.as_str())], value(v))).collect()
    };
    out.family("variant_loss", "gauge", "Loss of the last step per drafter config.", &per_variant(|v| v.loss));
    out.family(
        "variant_expected_acceptance_tokens",
        "gauge",
        "Expected acceptance of the last step per drafter config.",
        &per_variant(|v| v.expected_acceptance),
    );
}

fn slots(out: &mut Exposition, name: &str, help: &str, values: &[f32]) {
    let numbers: Vec<String> = (1..=values.len()).map(|k| k.to_string()).collect();
    let samples: Vec<_> = numbers.iter().zip(values).map(|(k, &v)| (vec![("slot", k.as_str())], f64::from(v))).collect();
    out.family(name, "gauge", help, &samples);
}

fn pipeline(out: &mut Exposition, status: &Status) {
    let mut shares = Vec::new();
    for stage in &status.stages {
        for (what, share) in [("busy", stage.busy_share), ("wait", stage.wait_share), ("blocked", stage.blocked_share)] {
            let labels = vec![
                ("stage", stage.stage.name()),
                ("worker", stage.worker.as_str()),
                ("device", stage.device.as_str()),
                ("what", what),
            ];
            shares.push((labels, share));
        }
    }
    out.family("stage_time_ratio", "gauge", "How a worker spends its time.", &shares);
    let channel = |value: fn(&crate::ChannelSample) -> u64| -> Vec<_> {
        status.channels.iter().map(|c| (vec![("channel", c.name.as_str())], value(c) as f64)).collect()
    };
    out.family("channel_depth", "gauge", "Items in a channel.", &channel(|c| c.depth));
    out.family("channel_capacity", "gauge", "Items that fit into a channel.", &channel(|c| c.capacity));
    let mut fills = Vec::new();
    for slot in &status.slots {
        for (state, n) in [("free", slot.free), ("filled", slot.filled), ("all", slot.total)] {
            fills.push((vec![("worker", slot.worker.as_str()), ("state", state)], n as f64));
        }
    }
    out.family("slots", "gauge", "Feature slots per drafter.", &fills);
}

fn devices(out: &mut Exposition, status: &Status) {
    let planned: Vec<_> = status
        .plan
        .iter()
        .flat_map(|plan| &plan.devices)
        .map(|device| (vec![("device", device.device.as_str())], device.planned_bytes as f64))
        .collect();
    out.family("memory_planned_bytes", "gauge", "Memory that the run planned to use.", &planned);
    let gpu = |value: fn(&crate::GpuSample) -> f64| -> Vec<_> {
        status.gpus.iter().map(|g| (vec![("device", g.device.as_str()), ("name", g.name.as_str())], value(g))).collect()
    };
    out.family("gpu_utilization_ratio", "gauge", "Share of time with a kernel running.", &gpu(|g| g.utilization_percent / 100.0));
    out.family("gpu_memory_used_bytes", "gauge", "Memory in use by everyone.", &gpu(|g| g.memory_used_bytes as f64));
    out.family("gpu_memory_total_bytes", "gauge", "Memory of the device.", &gpu(|g| g.memory_total_bytes as f64));
    out.family("gpu_power_watts", "gauge", "Power drawn.", &gpu(|g| g.power_w));
    out.family("gpu_temperature_celsius", "gauge", "Temperature.", &gpu(|g| g.temperature_c));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Envelope, Event, GpuSample, Identity, Step};
    use std::collections::HashSet;

    #[test]
    fn text_is_well_formed_and_carries_the_values() {
        let mut status = Status::default();
        let events = [
            Event::Run(Identity { build_id: "a\"b\\c\nd".into(), ..Default::default() }),
            Event::Step(Step { step: 7, loss: f64::NAN, lr: 5e-4, accuracy: vec![0.5, 0.25], ..Default::default() }),
            Event::Gpu(GpuSample { device: "gpu 0".into(), utilization_percent: 50.0, ..Default::default() }),
        ];
        for (i, event) in events.into_iter().enumerate() {
            status.apply(&Envelope { v: 1, t: 5, run_id: "r".into(), seq: i as u64 + 1, event });
        }
        let text = exposition(&status);
        for line in [
            "drafthorse_step 7",
            "drafthorse_loss NaN",
            "drafthorse_learning_rate 0.0005",
            "drafthorse_slot_accuracy_ratio{slot=\"2\"} 0.25",
            "drafthorse_gpu_utilization_ratio{device=\"gpu 0\",name=\"\"} 0.5",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
        assert!(text.contains(r#"build_id="a\"b\\c\nd""#), "{text}");
        let mut typed = HashSet::new();
        for line in text.lines() {
            match line.strip_prefix("# TYPE ") {
                Some(rest) => assert!(typed.insert(rest.split(' ').next().unwrap().to_owned()), "twice: {line}"),
                None if line.starts_with("# HELP ") => {}
                None => {
                    let name = line.split(['{', ' ']).next().unwrap();
                    assert!(typed.contains(name), "{line} has no TYPE before it");
                    let value = line.rsplit(' ').next().unwrap();
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                }
            }
        }
    }
}
