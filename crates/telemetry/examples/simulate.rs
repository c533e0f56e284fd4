//! Plays a made-up run through the real recorder, server and page, to look at them without training anything.
//!
//! `simulate SCENARIO page FILE` writes the page as a report would; `simulate SCENARIO serve DIR SECONDS` plays it live at
//! fifty steps a second (port and token in `DIR/http.json`); `simulate SCENARIO term` prints one terminal screen.
//! Scenarios: healthy, starved, stalled, nan, startup, cpu.
//! Refuses: to be taken for a measurement; every number here is drawn from formulas.

use drafthorse_telemetry::*;
use std::time::{Duration, Instant};

const TARGETS: usize = 5;
const DRAFTERS: usize = 3;
const SLOTS: usize = 15;
const TOTAL: u64 = 19_943;
const START_T: u64 = 1_790_000_000_000;

/// A number in 0..1 that depends on its arguments alone (splitmix64).
fn noise(a: u64, b: u64) -> f64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_mul(0xd1b5_4a32_d192_ed03);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ z >> 31) as f64 / u64::MAX as f64
}

fn accuracy(step: u64, shift: f64) -> Vec<f32> {
    let skill = 1.0 - (-(step as f64) / 2600.0).exp();
    (1..=SLOTS)
        .map(|k| ((0.08 + 0.82 * skill * (-(k as f64 - 1.0) / 13.0).exp()) - shift + 0.01 * noise(step, k as u64)) as f32)
        .collect()
}

fn expected(accuracy: &[f32]) -> f64 {
    1.0 + accuracy
        .iter()
        .scan(1.0, |all, &p| {
            *all *= f64::from(p) * 0.985;
            Some(*all)
        })
        .sum::<f64>()
}

fn loss(step: u64) -> f64 {
    1.35 + 8.2 * (-(step as f64) / 350.0).exp() + 1.9 * (-(step as f64) / 4200.0).exp() + 0.16 * (noise(step, 99) - 0.5)
}

fn identity(backend: &str) -> Identity {
    Identity {
        build_id: "0.1.0+3f9c2ab17d04".into(),
        config_hash: "sha256:8d21c7e0b5a94412".into(),
        dataset_hash: "sha256:e1f4470c92aa03d7".into(),
        command_line: ["drafthorse", "train", "q8.toml", "drafter.layers=5"].map(String::from).to_vec(),
        host: "train-3".into(),
        pid: 48_213,
        started_t: START_T,
        backend: backend.into(),
        total_steps: Some(TOTAL),
        resumed_from_step: None,
    }
}

fn pipeline(scenario: &str, step: u64, step_ms: f64) -> Pipeline {
    let starved = scenario == "starved";
    let stage = |stage, worker: String, device: String, busy: f64, wait: f64, blocked: f64, at: &str| {
        let scale = step_ms / (busy + wait + blocked);
        StageSample {
            stage,
            worker,
            device,
            busy_ms: busy * scale,
            wait_ms: wait * scale,
            blocked_ms: blocked * scale,
            at: at.into(),
        }
    };
    let mut stages =
        vec![stage(StageKind::Prefetcher, "prefetcher".into(), "cpu".into(), 0.23, 0.0, 0.77, "waiting for room in `batches`")];
    for i in 0..TARGETS {
        let jitter = 0.05 * noise(step, i as u64);
        let (busy, blocked) = if starved { (0.97, 0.01) } else { (0.81, 0.13) };
        let at = ["layer 21 of 36", "layer 7 of 36", "waiting for an empty slot", "copying to gpu 6", "layer 33 of 36"][i];
        stages.push(stage(
            StageKind::Target,
            format!("target {i}"),
            format!("gpu {i}"),
            busy - jitter,
            0.02,
            blocked + jitter,
            at,
        ));
    }
    for i in 0..DRAFTERS {
        let jitter = 0.03 * noise(step, 40 + i as u64);
        let (busy, wait) = if starved { (0.52, 0.48) } else { (0.955, 0.045) };
        let at = if starved {
            "waiting for a filled slot"
        } else {
            ["backward, micro-batch 5 of 16", "forward, micro-batch 11 of 16", "all-reduce"][i]
        };
        stages.push(stage(
            StageKind::Drafter,
            format!("drafter {i}"),
            format!("gpu {}", TARGETS + i),
            busy - jitter,
            wait + jitter,
            0.0,
            at,
        ));
    }
    let filled = |i: usize| if starved { 0 } else { 1 + (noise(step, 70 + i as u64) * 2.0) as u64 };
    Pipeline {
        interval_ms: step_ms,
        stages,
        channels: vec![ChannelSample { name: "batches".into(), depth: if starved { 8 } else { 6 }, capacity: 8 }],
        slots: (0..DRAFTERS)
            .map(|i| SlotSample { worker: format!("drafter {i}"), free: 1, filled: filled(i), total: 4 })
            .collect(),
        progress: 16 * step,
    }
}

fn step_event(scenario: &str, n: u64) -> Step {
    let step_ms = if scenario == "starved" { 1310.0 } else { 742.0 } + 60.0 * noise(n, 3);
    let accuracy = accuracy(n, 0.0);
    let bad = scenario == "nan" && (n % 1500 == 700 || n >= 4_198);
    Step {
        step: n,
        epoch: n / 3_324,
        batch: n % 3_324 * 3,
        loss: if bad { f64::NAN } else { loss(n) },
        lr: 6e-4 * (n as f64 / 800.0).min(1.0) * (0.5 + 0.5 * (std::f64::consts::PI * n as f64 / TOTAL as f64).cos()),
        grad_norm: if bad { f64::NAN } else { 0.4 + 3.0 * (-(n as f64) / 500.0).exp() + 0.1 * noise(n, 5) },
        label_probability: accuracy.iter().map(|p| p * 0.86).collect(),
        expected_acceptance: expected(&accuracy),
        accuracy,
        tokens: 147_456,
        tokens_per_s: 147_456e3 / step_ms,
        step_ms,
        rows: 121,
        blocks: 24_100 + n % 400,
        mfu: Some(if scenario == "starved" { 0.33 } else { 0.585 + 0.01 * noise(n, 6) }),
        skipped: bad,
        non_finite_skipped: if scenario == "nan" { n / 1500 + n.saturating_sub(4_197) } else { 0 },
        pipeline: pipeline(scenario, n, step_ms),
        variant: None,
    }
}

fn gpu(i: usize, scenario: &str, n: u64) -> GpuSample {
    let low = scenario == "starved" && i >= TARGETS;
    GpuSample {
        device: format!("gpu {i}"),
        name: "NVIDIA H200".into(),
        utilization_percent: (if low { 50.0 } else { 92.0 }) + 7.0 * noise(n, i as u64),
        memory_used_bytes: if i < TARGETS { 41_300_000_000 } else { 117_800_000_000 } + (i as u64) * 10_000_000,
        memory_total_bytes: 150_754_820_096,
        power_w: 560.0 + 110.0 * noise(n, 50 + i as u64),
        temperature_c: 58.0 + i as f64,
    }
}

/// The events of a scenario, each with the milliseconds since the start.
fn play(scenario: &str) -> Vec<(u64, Event)> {
    let cpu = scenario == "cpu";
    let mut t = 0;
    let mut events = vec![(0, Event::Run(identity(if cpu { "cpu" } else { "cuda" })))];
    let mut phase = |t: u64, name: &str, worker: String, device: String, progress: u64, total: u64, unit: &str| {
        let done = progress == total;
        let phase = Phase {
            name: name.into(),
            worker,
            device,
            progress,
            total: Some(total),
            unit: unit.into(),
            done,
            deadline_ms: Some(120_000),
        };
        events.push((t, Event::Phase(phase)));
    };
    phase(120, "checks", "run".into(), "cpu".into(), 14, 14, "checks");
    phase(900, "dataset", "run".into(), "cpu".into(), 1_203_118, 1_203_118, "rows");
    phase(1_400, "plan", "run".into(), "cpu".into(), 9, 9, "graphs");
    let shards = 16_381_470_720;
    for part in 1..=4 {
        for i in 0..TARGETS {
            let part = if scenario == "startup" && i == 2 { part.min(2) } else { part };
            t = 2_000 + 2_300 * part + 150 * i as u64;
            phase(t, "target weights", format!("target {i}"), format!("gpu {i}"), shards / 4 * part, shards / 4 * 4, "bytes");
        }
    }
    if scenario == "startup" {
        events.sort_by_key(|event| event.0);
        return events;
    }
    for i in 0..DRAFTERS {
        t = 13_000 + 500 * i as u64;
        phase(t, "warm-up and capture", format!("drafter {i}"), format!("gpu {}", TARGETS + i), 12, 12, "graphs");
    }
    let devices = (0..TARGETS + DRAFTERS).map(|i| {
        let planned_bytes = if i < TARGETS { 41_190_000_000 } else { 117_640_000_000 };
        DevicePlan { device: format!("gpu {i}"), planned_bytes, capacity_bytes: Some(150_754_820_096), parts: vec![] }
    });
    events.push((
        1_500,
        Event::Plan(Plan { devices: devices.collect(), total_steps: Some(TOTAL), predicted_tokens_per_s: Some(195_000.0) }),
    ));
    t += 900;
    events.push((t, Event::Gate(Gate { startup_ms: t })));
    for n in 1..=4_200u64 {
        let step = step_event(scenario, n);
        t += step.step_ms as u64;
        events.push((t, Event::Step(step)));
        if n % 4 == 0 && !cpu {
            events.extend((0..TARGETS + DRAFTERS).map(|i| (t + 5, Event::Gpu(gpu(i, scenario, n)))));
        }
        if n % 400 == 0 {
            let accuracy = accuracy(n, 0.025);
            let expected_acceptance = expected(&accuracy) - 0.05;
            let tau = (n % 800 == 0).then_some(expected_acceptance * 0.93 + 0.1);
            let loss = loss(n) + 0.07;
            events.push((
                t + 200,
                Event::HeldOut(HeldOut { step: n, loss, accuracy, expected_acceptance, tau, elapsed_s: 6.2, variant: None }),
            ));
            let path = format!("runs/q8/checkpoints/step-{n:06}");
            events.push((
                t + 300,
                Event::Checkpoint(Checkpoint {
                    step: n,
                    path,
                    role: "latest".into(),
                    size_bytes: 12_612_000_000,
                    elapsed_s: 14.1,
                }),
            ));
        }
    }
    let text = "37 samples have no supervised token and are skipped\nsee the dataset card for their rows".to_owned();
    events.push((2_500, Event::Warning(Warning { code: "unsupervised_rows".into(), text })));
    if scenario == "nan" {
        let text =
            "step 4200: loss is not finite in batch 12597; the update was skipped\nlower lr, or look at the batch with `inspect`"
                .to_owned();
        events.push((t + 1, Event::Warning(Warning { code: "non_finite".into(), text })));
    }
    if scenario == "stalled" {
        let mut pipeline = pipeline("starved", 4_201, 1.0);
        pipeline.interval_ms = 0.0;
        pipeline.stages.iter_mut().skip(1).take(TARGETS).for_each(|target| target.at = "waiting for an empty slot".into());
        pipeline.stages[3].at = "copying to gpu 6".into();
        events.push((t + 20_000, Event::Pipeline(pipeline)));
    }
    events.sort_by_key(|event| event.0);
    events
}

fn digest(scenario: &str) -> (Status, Vec<Envelope>) {
    let run_id = format!("q8-{scenario}");
    let envelopes: Vec<Envelope> = (1..)
        .zip(play(scenario))
        .map(|(seq, (t, event))| Envelope { v: SCHEMA_VERSION, t: START_T + t, run_id: run_id.clone(), seq, event })
        .collect();
    let mut status = Status::default();
    envelopes.iter().for_each(|envelope| status.apply(envelope));
    status.telemetry.status_interval_ms = 500;
    status.t += if matches!(scenario, "stalled" | "startup") { 190_000 } else { 400 };
    status.verdict = judge(&status, status.t, &Expected::default(), &Limits::default());
    (status, envelopes)
}

fn serve(scenario: &str, dir: &str, seconds: u64) -> Result<(), TelemetryError> {
    let telemetry = Telemetry::start(Options::new(dir, format!("q8-{scenario}")))?;
    let server = HttpServer::start(&telemetry, 0)?;
    println!("{}", server.info().url);
    let begun = Instant::now();
    let mut steps = 0;
    for (_, event) in play(scenario) {
        if let Event::Step(_) = event {
            steps += 1;
            std::thread::sleep(Duration::from_millis(if steps > 300 { 20 } else { 1 }));
        }
        telemetry.recorder().record(event);
        if begun.elapsed().as_secs() >= seconds {
            break;
        }
    }
    std::thread::sleep(Duration::from_secs(seconds).saturating_sub(begun.elapsed()));
    server.shutdown();
    telemetry.shutdown().map(|_| ())
}

fn screen(scenario: &str) -> String {
    let (status, events) = digest(scenario);
    let now_t = status.t;
    let mut view = View { source: "runs/q8".into(), verdict: status.verdict.clone(), now_t, ..View::default() };
    view.apply(Update { events, status: Some(status), ..Update::default() });
    let mut terminal = ratatui::Terminal::new(ratatui::backend::TestBackend::new(140, 44)).expect("a test backend never fails");
    terminal.draw(|frame| render(frame, &view)).expect("a test backend never fails");
    terminal.backend().to_string()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [scenario, "page", file] => {
            let (status, events) = digest(scenario);
            std::fs::write(file, page_dump(&status, &events))?;
        }
        [scenario, "serve", dir, seconds] => {
            std::fs::create_dir_all(dir)?;
            serve(scenario, dir, seconds.parse()?)?;
        }
        [scenario, "term"] => println!("{}", screen(scenario)),
        _ => return Err("simulate SCENARIO (page FILE | serve DIR SECONDS | term)".into()),
    }
    Ok(())
}
