//! The terminal view, drawn on a test backend.

use drafthorse_telemetry::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

fn view(events: Vec<Event>, now_t: u64) -> View {
    let envelopes: Vec<Envelope> = (1..)
        .zip(events)
        .map(|(seq, event)| Envelope { v: SCHEMA_VERSION, t: 1_000 * seq, run_id: "r1".into(), seq, event })
        .collect();
    let mut status = Status::default();
    envelopes.iter().for_each(|envelope| status.apply(envelope));
    let mut view = View { source: "runs/r1".into(), ..View::default() };
    view.apply(Update { events: envelopes, status: Some(status), ..Update::default() });
    view.judge(&mut Watcher::default(), now_t);
    view
}

fn screen(view: &View, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| render(frame, view)).unwrap();
    terminal.backend().to_string()
}

fn run() -> Event {
    Event::Run(Identity { build_id: "b1".into(), host: "h".into(), total_steps: Some(40), ..Default::default() })
}

fn training() -> Vec<Event> {
    let stage = StageSample {
        stage: StageKind::Drafter,
        worker: "drafter 0".into(),
        device: "gpu 1".into(),
        busy_ms: 750.0,
        wait_ms: 250.0,
        blocked_ms: 0.0,
        at: "backward".into(),
    };
    let mut events = vec![run(), Event::Gate(Gate::default())];
    events.extend((1..=10).map(|n| {
        Event::Step(Step {
            step: n,
            loss: 5.0 - n as f64 * 0.25,
            step_ms: 1_000.0,
            tokens_per_s: 12_345.0,
            accuracy: vec![0.75, 0.25],
            expected_acceptance: 2.125,
            pipeline: Pipeline { interval_ms: 1_000.0, stages: vec![stage.clone()], ..Default::default() },
            ..Default::default()
        })
    }));
    events.push(Event::HeldOut(HeldOut { step: 10, loss: 2.75, tau: Some(3.5), ..Default::default() }));
    events.push(Event::Warning(Warning { code: "slow_disk".into(), text: "the disk is slow\nmove the data".into() }));
    events
}

#[test]
fn a_run_in_training_shows_its_figures_curves_and_stages() {
    let text = screen(&view(training(), 14_100), 130, 40);
    for words in [
        "HEALTHY",
        "step 10 of 40, 30 s left",
        "2.5000",
        "12345",
        "τ held-out       3.500",
        "train 2.500",
        "held-out 2.750",
        "drafter 0",
        "75 % backward",
        "slow_disk: the disk is slow",
        "build b1",
        "last progress    1 s ago",
        "q leaves",
    ] {
        assert!(text.contains(words), "{words} in\n{text}");
    }
    let line = text.lines().find(|line| line.contains("75 % backward")).unwrap();
    let count = |c: char| line.chars().filter(|&x| x == c).count();
    assert_eq!(count('█'), 3 * count('▒'), "{line}");
}

#[test]
fn a_stall_in_start_up_shows_the_phase_and_who_stands_where() {
    let phase = Phase {
        name: "capture".into(),
        worker: "target 0".into(),
        device: "gpu 0".into(),
        progress: 3,
        total: Some(9),
        unit: "graphs".into(),
        ..Default::default()
    };
    let mut view = view(vec![run(), Event::Phase(phase)], 2_000);
    let status = view.status.as_mut().unwrap();
    status.t = 400_000;
    view.judge(&mut Watcher::default(), 400_000);
    let text = screen(&view, 110, 30);
    for words in [
        "STALLED",
        "target 0 is stuck in start-up phase `capture` on gpu 0 at 3 of 9 graphs",
        "capture · target 0 on gpu 0: 3 of 9 graphs, last progress 6 min 38 s ago",
    ] {
        assert!(text.contains(words), "{words} in\n{text}");
    }
}

#[test]
fn every_size_of_terminal_is_drawn_on() {
    let view = view(training(), 14_100);
    let empty = View { trouble: Some("cannot open it".into()), ..View::default() };
    for (width, height) in [(1, 1), (3, 2), (20, 5), (40, 12), (80, 24), (300, 90)] {
        screen(&view, width, height);
        screen(&empty, width, height);
    }
    assert!(screen(&empty, 40, 5).contains("cannot open it"));
}
