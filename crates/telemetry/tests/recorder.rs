//! The recorder against real files: order, resumption of a folder, full queue, full disk, shutdown.

use drafthorse_telemetry::*;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

fn options(dir: &Path) -> Options {
    Options { status_interval: Duration::from_millis(20), ..Options::new(dir, "r1") }
}

fn step(n: u64) -> Event {
    Event::Step(Step { step: n, loss: 1.0 / n as f64, ..Default::default() })
}

fn lines(dir: &Path) -> Vec<Envelope> {
    let text = fs::read_to_string(dir.join(EVENTS_FILE)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn status(dir: &Path) -> Status {
    serde_json::from_slice(&fs::read(dir.join(STATUS_FILE)).unwrap()).unwrap()
}

#[test]
fn what_many_threads_record_is_on_disk_after_shutdown() {
    let dir = tempfile::tempdir().unwrap();
    let telemetry = Telemetry::start(Options { queue: 100_000, ..options(dir.path()) }).unwrap();
    telemetry.recorder().record(Event::Run(Identity { build_id: "b".into(), ..Default::default() }));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let recorder = telemetry.recorder();
            scope.spawn(move || (0..500).for_each(|n| recorder.warn(format!("c{thread}"), n.to_string())));
        }
    });
    telemetry.recorder().record(Event::Done(Done { steps: 1, ..Default::default() }));
    let last = telemetry.shutdown().unwrap();
    let lines = lines(dir.path());
    assert_eq!(lines.len(), 2002);
    assert!(lines.iter().enumerate().all(|(i, line)| line.seq == i as u64 + 1 && line.run_id == "r1"));
    for thread in 0..4 {
        let code = format!("c{thread}");
        let texts = lines.iter().filter_map(|line| match &line.event {
            Event::Warning(w) if w.code == code => Some(w.text.parse::<u64>().unwrap()),
            _ => None,
        });
        assert!(texts.eq(0..500), "the order of one thread is kept");
    }
    assert_eq!(status(dir.path()), *last);
    assert_eq!(last.verdict.state, State::Finished { steps: 1 });
    assert_eq!((last.telemetry.written_events, last.telemetry.dropped_events), (2002, 0));
    let mode = fs::metadata(dir.path().join(EVENTS_FILE)).unwrap().permissions().mode();
    assert_eq!(mode & 0o600, 0o600);
}

#[test]
fn a_folder_used_again_goes_on_counting_and_sheds_half_a_line() {
    let dir = tempfile::tempdir().unwrap();
    for (launch, events) in [("r1", 3), ("r2", 2)] {
        let telemetry = Telemetry::start(Options { run_id: launch.into(), ..options(dir.path()) }).unwrap();
        (1..=events).for_each(|n| telemetry.recorder().record(step(n)));
        telemetry.shutdown().unwrap();
        let path = dir.path().join(EVENTS_FILE);
        let mut text = fs::read(&path).unwrap();
        text.extend(br#"{"v":1,"t":5,"run_id":"r"#);
        fs::write(&path, text).unwrap();
    }
    let telemetry = Telemetry::start(options(dir.path())).unwrap();
    telemetry.shutdown().unwrap();
    let seqs: Vec<u64> = lines(dir.path()).iter().map(|line| line.seq).collect();
    assert_eq!(seqs, [1, 2, 3, 4, 5]);
}

#[test]
fn a_full_queue_drops_frequent_events_first_and_says_so() {
    // No writer reads this channel, as if it were stuck; the recorder must come back all the same.
    let (recorder, receiver) = Recorder::channel(8);
    (1..=20).for_each(|n| recorder.record(step(n)));
    assert_eq!(recorder.dropped(), 12);
    assert_eq!(receiver.iter().take(8).count(), 8);

    let dir = tempfile::tempdir().unwrap();
    let telemetry = Telemetry::start(Options { queue: 4, ..options(dir.path()) }).unwrap();
    let recorder = telemetry.recorder();
    let mut n = 0;
    while recorder.dropped() == 0 {
        n += 1;
        recorder.record(step(n));
    }
    recorder.record(Event::Failure(Failure { worker: "target 0".into(), ..Default::default() }));
    telemetry.shutdown().unwrap();
    let status = status(dir.path());
    assert_eq!(status.telemetry.dropped_events, recorder.dropped());
    assert_eq!(status.telemetry.written_events, lines(dir.path()).len() as u64);
    assert!(status.warnings.iter().any(|warning| warning.code == "telemetry_dropped"));
    assert!(matches!(status.verdict.state, State::Failed { .. }), "the failure used the reserve");
}

#[test]
fn a_full_disk_costs_lines_and_is_said() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/dev/full", dir.path().join(EVENTS_FILE)).unwrap();
    let telemetry = Telemetry::start(options(dir.path())).unwrap();
    let subscription = telemetry.subscribe(100);
    telemetry.recorder().record(Event::Run(Identity::default()));
    telemetry.recorder().record(step(1));
    let mut codes = BTreeSet::new();
    while !codes.contains("telemetry_unwritten") {
        let envelope = subscription.next(Duration::from_secs(20)).expect("the warning comes");
        if let Event::Warning(warning) = &envelope.event {
            codes.insert(warning.code.clone());
        }
    }
    let status = telemetry.shutdown().unwrap();
    assert_eq!((status.telemetry.unwritten_events, status.telemetry.written_events), (2, 0));
    assert!(status.telemetry.last_error.as_ref().unwrap().contains(EVENTS_FILE));
    assert_eq!(status.step.as_ref().unwrap().step, 1, "the status lives on");
    assert!(status.warnings.iter().any(|warning| warning.code == "telemetry_unwritten"));
}

#[test]
fn a_slow_subscriber_misses_events_and_holds_nothing_up() {
    let dir = tempfile::tempdir().unwrap();
    let telemetry = Telemetry::start(options(dir.path())).unwrap();
    let slow = telemetry.subscribe(2);
    let quick = telemetry.subscribe(1000);
    (1..=10).for_each(|n| telemetry.recorder().record(step(n)));
    telemetry.shutdown().unwrap();
    assert_eq!(slow.missed(), 8);
    assert_eq!(std::iter::from_fn(|| slow.next(Duration::ZERO)).count(), 2);
    assert_eq!(
        std::iter::from_fn(|| quick.next(Duration::ZERO)).map(|e| e.seq).collect::<Vec<_>>(),
        (1..=10).collect::<Vec<_>>()
    );
}

#[test]
fn the_status_beats_without_events_and_recording_after_the_end_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let telemetry = Telemetry::start(options(dir.path())).unwrap();
    telemetry.recorder().record(Event::Run(Identity::default()));
    let recorder = telemetry.recorder();
    let first = loop {
        let status = telemetry.status();
        if status.identity.is_some() {
            break status;
        }
        std::thread::yield_now();
    };
    while telemetry.status().t == first.t {
        std::thread::yield_now();
    }
    let later = telemetry.status();
    assert_eq!((later.progress, later.last_progress_t), (first.progress, first.last_progress_t));
    telemetry.shutdown().unwrap();
    recorder.record(step(1));
    assert_eq!(recorder.dropped(), 1);
}
