//! Stalled readers of the HTTP server, and the end of every thread. The only test of its process, so that threads can be counted.

use drafthorse_telemetry::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Threads of this process that telemetry has started. The kernel keeps 15 bytes of a name.
fn telemetry_threads() -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        // A thread may end between the listing and the reading.
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    });
    names.filter(|name| name.starts_with("telemetry")).count()
}

fn open(info: &HttpInfo, request: &str) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", info.port)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

#[test]
fn stalled_and_silent_readers_hold_nothing_up_and_no_thread_outlives_the_run() {
    assert_eq!(telemetry_threads(), 0);
    let dir = tempfile::tempdir().unwrap();
    let options = Options { status_interval: Duration::from_millis(20), queue: 100_000, ..Options::new(dir.path(), "r1") };
    let telemetry = Telemetry::start(options).unwrap();
    let server = HttpServer::start(&telemetry, 0).unwrap();
    let info = server.info().clone();
    // One reader asks for the stream and never reads it; another never finishes its request.
    let stalled = open(&info, &format!("GET /events?token={} HTTP/1.1\r\n\r\n", info.token));
    let silent = open(&info, "GET /sta");
    let text = "x".repeat(4_000);
    (0..5_000).for_each(|n| telemetry.recorder().warn(format!("w{}", n % 3), text.clone()));
    while telemetry.status().telemetry.written_events < 5_000 {
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(telemetry.recorder().dropped(), 0);
    let mut answer = String::new();
    open(&info, &format!("GET /status?token={} HTTP/1.1\r\n\r\n", info.token)).read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "others are served");
    assert!(telemetry_threads() >= 4, "writer, acceptor and both readers");

    server.shutdown();
    assert!(TcpStream::connect(("127.0.0.1", info.port)).is_err(), "the port is closed");
    assert!(!dir.path().join(HTTP_FILE).exists());
    telemetry.shutdown().unwrap();
    assert_eq!(telemetry_threads(), 0);
    drop((stalled, silent));
}
