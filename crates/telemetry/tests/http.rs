//! The HTTP server over real sockets: who gets in, what they get, resumption.

use drafthorse_telemetry::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

struct Run {
    dir: tempfile::TempDir,
    telemetry: Telemetry,
    server: HttpServer,
}

fn start() -> Run {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { status_interval: Duration::from_millis(20), queue: 100_000, ..Options::new(dir.path(), "r1") };
    let telemetry = Telemetry::start(options).unwrap();
    telemetry.recorder().record(Event::Run(Identity { build_id: "b1".into(), ..Default::default() }));
    let server = HttpServer::start(&telemetry, 0).unwrap();
    Run { dir, telemetry, server }
}

fn step(n: u64) -> Event {
    Event::Step(Step { step: n, loss: 2.5, ..Default::default() })
}

fn open(info: &HttpInfo, request: &str) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", info.port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

fn get(info: &HttpInfo, path: &str, headers: &str) -> (u16, String) {
    let mut text = String::new();
    open(info, &format!("GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n")).read_to_string(&mut text).unwrap();
    let code = text.split(' ').nth(1).unwrap().parse().unwrap();
    (code, text.split_once("\r\n\r\n").unwrap().1.to_owned())
}

/// Reads a stream of server-sent events up to one that `enough` accepts: `(event, id, data)`.
fn read_events(stream: TcpStream, enough: impl Fn(&(String, String, String)) -> bool) -> Vec<(String, String, String)> {
    let (mut out, mut current) = (Vec::new(), (String::new(), String::new(), String::new()));
    for line in BufReader::new(stream).lines() {
        let line = line.unwrap();
        match line.split_once(": ") {
            Some(("event", value)) => current.0 = value.into(),
            Some(("id", value)) => current.1 = value.into(),
            Some(("data", value)) => current.2 = value.into(),
            _ if line.is_empty() && !current.2.is_empty() => {
                let done = enough(&current);
                out.push(std::mem::take(&mut current));
                if done {
                    return out;
                }
            }
            _ => {}
        }
    }
    panic!("the stream ended too soon, after {out:?}");
}

fn ids(events: &[(String, String, String)]) -> Vec<u64> {
    events.iter().filter_map(|event| event.1.parse().ok()).collect()
}

fn wait_for_lines(dir: &Path, n: usize) {
    while std::fs::read_to_string(dir.join(EVENTS_FILE)).unwrap().lines().count() < n {
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn only_the_token_opens_and_only_get_is_served() {
    let run = start();
    let info = run.server.info();
    let path = run.dir.path().join(HTTP_FILE);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(read_http_info(run.dir.path()).unwrap().as_ref(), Some(info));
    let token = &info.token;
    assert_eq!(token.len(), 48);
    for (path, headers) in
        [("/status", ""), ("/?token=", ""), ("/metrics?token=x", ""), ("/events", "Authorization: Bearer no\r\n")]
    {
        let (code, body) = get(info, path, headers);
        assert_eq!(code, 401, "{path}");
        assert!(body.contains("http.json") && !body.contains(token.as_str()));
    }
    let (code, body) = get(info, "/status", &format!("Authorization: Bearer {token}\r\n"));
    assert_eq!(code, 200);
    serde_json::from_str::<Status>(&body).unwrap();
    assert_eq!(get(info, &format!("/nothing?token={token}"), "").0, 404);
    let mut text = String::new();
    open(info, &format!("POST /status?token={token} HTTP/1.1\r\n\r\n")).read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 405"), "{text}");
    let mut text = String::new();
    open(info, "\x16\x03\x01nonsense\r\n\r\n").read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 400"), "{text}");
}

#[test]
fn page_status_and_metrics_agree() {
    let run = start();
    run.telemetry.recorder().record(step(41));
    while run.telemetry.status().step.is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let info = run.server.info();
    let token = &info.token;
    let (_, status) = get(info, &format!("/status?token={token}"), "");
    let status: Status = serde_json::from_str(&status).unwrap();
    assert_eq!(status.step.as_ref().unwrap().step, 41);
    let (_, metrics) = get(info, &format!("/metrics?token={token}"), "");
    assert!(metrics.contains("\ndrafthorse_step 41\n") && metrics.contains("\ndrafthorse_loss 2.5\n"));
    let (code, page) = get(info, &format!("/?token={token}"), "");
    assert!(code == 200 && page.contains("\"step\":41") && !page.contains(token.as_str()));
}

#[test]
fn a_stream_gives_history_then_news_and_resumes_after_the_last_id() {
    let run = start();
    (1..=3).for_each(|n| run.telemetry.recorder().record(step(n)));
    wait_for_lines(run.dir.path(), 4);
    let info = run.server.info();
    let path = format!("/events?token={}", info.token);
    let stream = open(info, &format!("GET {path} HTTP/1.1\r\n\r\n"));
    run.telemetry.recorder().record(step(4));
    let events = read_events(stream, |event| event.1 == "5");
    assert_eq!(ids(&events), [1, 2, 3, 4, 5]);
    let last: Envelope = serde_json::from_str(&events.last().unwrap().2).unwrap();
    assert_eq!(last.event, step(4));
    for resume in [(format!("{path}&after=3"), ""), (path.clone(), "Last-Event-ID: 3\r\n")] {
        let stream = open(info, &format!("GET {} HTTP/1.1\r\n{}\r\n", resume.0, resume.1));
        let events = read_events(stream, |event| event.0 == "status" && event.2.contains("\"seq\":5"));
        assert_eq!(ids(&events), [4, 5]);
    }
}

#[test]
fn a_long_history_is_thinned_but_rare_events_stay() {
    let run = start();
    (1..=5_000).for_each(|n| run.telemetry.recorder().record(step(n)));
    let gpu = |i: u64| Event::Gpu(GpuSample { device: format!("gpu {}", i % 2), ..Default::default() });
    (0..2_000).for_each(|i| run.telemetry.recorder().record(gpu(i)));
    run.telemetry.recorder().warn("rare", "text");
    wait_for_lines(run.dir.path(), 7_002);
    let info = run.server.info();
    let stream = open(info, &format!("GET /events?points=100&token={} HTTP/1.1\r\n\r\n", info.token));
    let events = read_events(stream, |event| event.0 == "live");
    let steps = events.iter().filter(|event| event.2.contains("\"kind\":\"step\"")).count();
    assert!((50..=100).contains(&steps), "{steps}");
    for device in ["gpu 0", "gpu 1"] {
        let readings = events.iter().filter(|event| event.2.contains(device)).count();
        assert!((10..=50).contains(&readings), "{device}: {readings}");
    }
    assert!(events.iter().any(|event| event.2.contains("\"code\":\"rare\"")));
}

#[test]
fn connections_beyond_the_limit_are_turned_away() {
    let run = start();
    let info = run.server.info();
    let request = format!("GET /events?token={} HTTP/1.1\r\n\r\n", info.token);
    let held: Vec<TcpStream> = (0..MAX_CONNECTIONS).map(|_| open(info, &request)).collect();
    assert_eq!(get(info, &format!("/status?token={}", info.token), "").0, 503);
    drop(held);
}

#[test]
fn a_folder_that_another_process_writes_is_served_the_same() {
    let run = start();
    run.telemetry.recorder().record(step(7));
    while run.telemetry.status().step.is_none() || read_status(run.dir.path()).unwrap().is_none_or(|s| s.step.is_none()) {
        std::thread::sleep(Duration::from_millis(2));
    }
    let own = tempfile::tempdir().unwrap();
    let server = HttpServer::start_for_folder(run.dir.path(), own.path(), 0).unwrap();
    let info = server.info();
    let (code, status) = get(info, &format!("/status?token={}", info.token), "");
    assert_eq!(code, 200);
    assert_eq!(serde_json::from_str::<Status>(&status).unwrap().step.unwrap().step, 7);
    let stream = open(info, &format!("GET /events?token={} HTTP/1.1\r\n\r\n", info.token));
    assert_eq!(ids(&read_events(stream, |event| event.1 == "2")), [1, 2]);
    // The run's own server keeps its file.
    assert_eq!(read_http_info(run.dir.path()).unwrap().as_ref(), Some(run.server.info()));
    assert_eq!(read_http_info(own.path()).unwrap().as_ref(), Some(info));
}
