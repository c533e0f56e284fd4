//! Measures what recording costs the thread that records: a full step event, at the pace of a run and as fast as it goes.
//!
//! Refuses: to judge; it prints figures.

use drafthorse_telemetry::*;
use std::time::{Duration, Instant};

fn step(n: u64) -> Event {
    let stage = |i: usize| StageSample {
        stage: if i < 5 { StageKind::Target } else { StageKind::Drafter },
        worker: format!("worker {i}"),
        device: format!("gpu {i}"),
        busy_ms: 600.0,
        wait_ms: 80.0,
        blocked_ms: 20.0,
        at: "backward, micro-batch 3 of 16".into(),
    };
    Event::Step(Step {
        step: n,
        loss: 2.345678,
        accuracy: vec![0.5; 15],
        label_probability: vec![0.4; 15],
        pipeline: Pipeline { interval_ms: 700.0, stages: (0..8).map(stage).collect(), ..Default::default() },
        ..Default::default()
    })
}

fn report(name: &str, mut nanos: Vec<u64>, dropped: u64) {
    nanos.sort_unstable();
    let at = |share: f64| nanos[((nanos.len() - 1) as f64 * share) as usize] as f64 / 1e3;
    let mean = nanos.iter().sum::<u64>() as f64 / nanos.len() as f64 / 1e3;
    println!(
        "{name}: mean {mean:.2} us, p50 {:.2} us, p99 {:.2} us, max {:.1} us, {dropped} dropped",
        at(0.5),
        at(0.99),
        at(1.0)
    );
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::temp_dir().join(format!("drafthorse-overhead-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    for (name, n, pause) in
        [("one step every 2 ms", 2_000, Duration::from_millis(2)), ("as fast as it goes", 200_000, Duration::ZERO)]
    {
        let telemetry = Telemetry::start(Options::new(&dir, "overhead"))?;
        let recorder = telemetry.recorder();
        let (mut built, mut recorded) = (Vec::new(), Vec::new());
        for i in 0..n {
            let begun = Instant::now();
            let event = step(i);
            built.push(begun.elapsed().as_nanos() as u64);
            let begun = Instant::now();
            recorder.record(event);
            recorded.push(begun.elapsed().as_nanos() as u64);
            if !pause.is_zero() {
                std::thread::sleep(pause);
            }
        }
        let dropped = recorder.dropped();
        report(&format!("{name}: building the event"), built, 0);
        report(&format!("{name}: record()"), recorded, dropped);
        telemetry.shutdown()?;
    }
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}
