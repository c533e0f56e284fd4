//! The page in a real browser: what it shows equals the status, live and as a report. Needs Chromium; without it the test says
//! loudly that it was skipped.

use drafthorse_telemetry::*;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

fn chromium() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path)
        .flat_map(|dir| ["chromium", "chromium-browser", "google-chrome"].map(|n| dir.join(n)))
        .find(|p| p.is_file());
    if found.is_none() {
        eprintln!("SKIPPED: no chromium on PATH, so the page was NOT tested; install chromium to test it");
    }
    found
}

/// The document of `url` as the browser has it after its scripts ran.
fn dom(browser: &Path, url: &str) -> String {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args([
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--virtual-time-budget=3000",
            "--dump-dom",
        ])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(url)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("id=\"verdict\""), "no page: {text} {}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Attribute `data-value` and text of the element whose tag holds `mark`.
fn value_at(dom: &str, mark: &str) -> (String, String) {
    let at = dom.find(mark).unwrap_or_else(|| panic!("{mark} is not on the page"));
    let start = dom[..at].rfind('<').unwrap();
    let (tag, rest) = dom[start..].split_once('>').unwrap();
    let value = tag.split("data-value=\"").nth(1).and_then(|v| v.split('"').next()).unwrap_or_default();
    (value.to_owned(), rest.split('<').next().unwrap().to_owned())
}

fn stage(stage: StageKind, worker: &str, busy_ms: f64) -> StageSample {
    StageSample {
        stage,
        worker: worker.into(),
        device: "gpu 0".into(),
        busy_ms,
        wait_ms: 100.0 - busy_ms,
        blocked_ms: 0.0,
        at: "<at> & work".into(),
    }
}

fn events() -> Vec<Event> {
    let mut events = vec![
        Event::Run(Identity {
            build_id: "b-1".into(),
            config_hash: "c-1".into(),
            total_steps: Some(4_000),
            ..Default::default()
        }),
        Event::Gate(Gate::default()),
    ];
    events.extend((1..=1_234).map(|n| {
        let stages = vec![stage(StageKind::Target, "target 0", 81.25), stage(StageKind::Drafter, "drafter 0", 93.5)];
        Event::Step(Step {
            step: n,
            loss: 2.0 + 1.0 / n as f64,
            lr: 5.25e-4,
            expected_acceptance: 3.456_789,
            tokens_per_s: 4_321.5,
            step_ms: 87.5,
            mfu: Some(0.4375),
            accuracy: vec![0.75, 0.5],
            pipeline: Pipeline { interval_ms: 100.0, stages, ..Default::default() },
            ..Default::default()
        })
    }));
    events.push(Event::HeldOut(HeldOut {
        step: 1_200,
        loss: 2.25,
        tau: Some(3.125),
        accuracy: vec![0.7, 0.4],
        ..Default::default()
    }));
    events.push(Event::Warning(Warning { code: "odd".into(), text: "<b>not bold</b>".into() }));
    events
}

fn assert_shows(dom: &str, status: &Status) {
    let step = status.step.as_ref().unwrap();
    let held_out = status.held_out.as_ref().unwrap();
    let cases = [
        ("id=\"v-step\"", step.step as f64, "1,234"),
        ("id=\"v-loss\"", step.loss, "2.001"),
        ("id=\"v-expected_acceptance\"", step.expected_acceptance, "3.46"),
        ("id=\"v-tau\"", held_out.tau.unwrap(), "3.13"),
        ("id=\"v-tokens_per_s\"", status.rates.tokens_per_s, "4322"),
        ("id=\"v-mfu\"", step.mfu.unwrap(), "44 %"),
        ("id=\"v-step_ms\"", status.rates.step_ms, "88 ms"),
        ("id=\"v-lr\"", step.lr, "5.25e-4"),
        ("data-worker=\"target 0\"", status.stages[0].busy_share, "gpu 0 · 81 %"),
        ("data-worker=\"drafter 0\"", status.stages[1].busy_share, "gpu 0 · 94 %"),
    ];
    for (mark, value, text) in cases {
        let (shown, words) = value_at(dom, mark);
        assert_eq!(shown.parse::<f64>().unwrap(), value, "{mark}");
        assert_eq!(words, text, "{mark}");
    }
    assert_eq!(value_at(dom, "id=\"verdict-state\"").1, status.verdict.state.name());
    assert_eq!(value_at(dom, "id=\"verdict-headline\"").1, status.verdict.headline);
    let body = dom.split("id=\"dump\"").next().unwrap();
    assert!(body.contains("&lt;b&gt;not bold&lt;/b&gt;") && body.contains("&lt;at&gt; &amp; work"), "text is never markup");
    assert!(body.contains("b-1") && body.contains("c-1"));
}

/// Waits until one connection to the server has lasted for a while: the page's stream, whose history has then arrived.
fn wait_for_stream() {
    let connections = || -> BTreeSet<String> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| task.ok().map(|task| task.path()));
        // The kernel keeps 15 bytes of `telemetry-http-conn`.
        let serving =
            tasks.filter(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "telemetry-http-"));
        serving.map(|task| task.display().to_string()).collect()
    };
    loop {
        let before = connections();
        std::thread::sleep(Duration::from_millis(1_000));
        if connections().intersection(&before).next().is_some() {
            return;
        }
    }
}

#[test]
fn the_page_shows_the_status() {
    let Some(browser) = chromium() else { return };
    let dir = tempfile::tempdir().unwrap();
    let telemetry =
        Telemetry::start(Options { queue: 10_000, status_interval: Duration::from_millis(50), ..Options::new(dir.path(), "r1") })
            .unwrap();
    let server = HttpServer::start(&telemetry, 0).unwrap();
    let events = events();
    let n = events.len() as u64;
    events.into_iter().for_each(|event| telemetry.recorder().record(event));
    while telemetry.status().seq < n {
        std::thread::sleep(Duration::from_millis(5));
    }
    // The browser gives the document once nothing is under way any more, so the server ends when it has told everything.
    let url = server.info().url.clone();
    let live = std::thread::scope(|scope| {
        let live = scope.spawn(|| dom(&browser, &url));
        wait_for_stream();
        server.shutdown();
        live.join().unwrap()
    });
    assert_shows(&live, &telemetry.status());
    assert!(live.contains("aria-label=\"Loss by step: train 2.001, held-out 2.250."), "the stream brought the history");
    let status = telemetry.shutdown().unwrap();

    let mut folder = RunFolder::new(dir.path());
    let report = dir.path().join("report.html");
    std::fs::write(&report, page_dump(&status, &folder.poll().unwrap().events)).unwrap();
    let frozen = dom(&browser, &format!("file://{}", report.display()));
    assert_shows(&frozen, &status);
    assert!(frozen.contains("aria-label=\"Loss by step: train 2.001, held-out 2.250."));
}
