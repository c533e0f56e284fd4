//! The read-only HTTP server of a run: `/` (the page), `/status`, `/events` (server-sent), `/metrics`, on loopback with a token.
//!
//! Refuses: every method but GET, every address but 127.0.0.1, every request without the token, and to touch the training
//! threads: it reads the status and `events.jsonl`, so a reader who stalls holds only its own connection.
//! Invariants: at most [`MAX_CONNECTIONS`] threads, each ended by [`HttpServer::shutdown`]; `http.json` is readable by its
//! owner alone and is removed at the end.

use crate::error::TelemetryError;
use crate::event::SCHEMA_VERSION;
use crate::follow::{LineTail, read_status};
use crate::page::page_html;
use crate::prometheus::exposition;
use crate::recorder::{EVENTS_FILE, StatusReader, Telemetry};
use crate::status::Status;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Name of the file with port and token in a run folder.
pub const HTTP_FILE: &str = "http.json";
/// Connections served at once; more are turned away.
pub const MAX_CONNECTIONS: usize = 32;
/// Longest time for a request to arrive, and for a reader to take what is sent.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest head of a request.
const MAX_HEAD_BYTES: usize = 8192;
/// How often a stream looks for news.
const STREAM_INTERVAL: Duration = Duration::from_millis(200);
/// How often a silent stream says that it is there.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// Where a run's server is, as in `http.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpInfo {
    /// Format version.
    pub v: u32,
    /// Port on 127.0.0.1.
    pub port: u16,
    /// The secret: `?token=…` or `Authorization: Bearer …`.
    pub token: String,
    /// The page, token included.
    pub url: String,
    /// The process that serves.
    pub pid: u32,
}

/// Reads where the server of the run in `dir` is; `None` if it has none.
///
/// # Errors
/// If the file is there and cannot be read or is not what it should be.
pub fn read_http_info(dir: &Path) -> Result<Option<HttpInfo>, TelemetryError> {
    let path = dir.join(HTTP_FILE);
    match std::fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| TelemetryError::Format {
            path,
            what: "server description",
            reason: error.to_string(),
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TelemetryError::io("read", &path)(error)),
    }
}

#[derive(Default)]
struct Stop {
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn set(&self) {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits, and says whether it is time to stop.
    fn wait(&self, timeout: Duration) -> bool {
        let stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(stopped, timeout, |stopped| !*stopped);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The server of one run.
pub struct HttpServer {
    info: HttpInfo,
    info_path: PathBuf,
    stop: Arc<Stop>,
    acceptor: Option<JoinHandle<()>>,
}

impl HttpServer {
    /// Serves the run of `telemetry` on 127.0.0.1; port 0 takes any free one. Writes `http.json` into the run folder.
    ///
    /// # Errors
    /// If the port is taken, the file cannot be written, or a thread cannot be started.
    pub fn start(telemetry: &Telemetry, port: u16) -> Result<HttpServer, TelemetryError> {
        HttpServer::serve(Told::Live(telemetry.status_reader()), telemetry.run_dir(), telemetry.run_dir(), port)
    }

    /// Serves what the files of the run folder `run_dir` say, for a run that another process or machine writes; `http.json` goes to `info_dir`.
    ///
    /// # Errors
    /// As [`HttpServer::start`].
    pub fn start_for_folder(run_dir: &Path, info_dir: &Path, port: u16) -> Result<HttpServer, TelemetryError> {
        HttpServer::serve(Told::Folder(run_dir.to_owned()), run_dir, info_dir, port)
    }

    fn serve(status: Told, run_dir: &Path, info_dir: &Path, port: u16) -> Result<HttpServer, TelemetryError> {
        let bind = |source| TelemetryError::Bind { port, source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(bind)?;
        let port = listener.local_addr().map_err(bind)?.port();
        let token = new_token()?;
        let url = format!("http://127.0.0.1:{port}/?token={token}");
        let info = HttpInfo { v: SCHEMA_VERSION, port, token: token.clone(), url, pid: std::process::id() };
        let info_path = info_dir.join(HTTP_FILE);
        write_private(&info_path, &info)?;
        let stop = Arc::new(Stop::default());
        let service = Arc::new(Service { status, events: run_dir.join(EVENTS_FILE), token, stop: stop.clone() });
        let acceptor = std::thread::Builder::new()
            .name("telemetry-http".into())
            .spawn(move || accept(&listener, &service))
            .map_err(|source| TelemetryError::Thread { name: "telemetry-http", source })?;
        Ok(HttpServer { info, info_path, stop, acceptor: Some(acceptor) })
    }

    /// Where it is.
    pub fn info(&self) -> &HttpInfo {
        &self.info
    }

    /// Ends every connection and thread, and removes `http.json`. Dropping the server does the same.
    pub fn shutdown(self) {}
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.stop.set();
        // A connection of our own wakes the acceptor from its wait.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.info.port));
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        // Another launch may have put its own file there.
        if let Some(dir) = self.info_path.parent()
            && read_http_info(dir).is_ok_and(|info| info.as_ref() == Some(&self.info))
        {
            let _ = std::fs::remove_file(&self.info_path);
        }
    }
}

fn new_token() -> Result<String, TelemetryError> {
    let mut bytes = [0; 24];
    let source = "/dev/urandom";
    File::open(source).and_then(|mut file| file.read_exact(&mut bytes)).map_err(TelemetryError::io("read", source))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn write_private(path: &Path, info: &HttpInfo) -> Result<(), TelemetryError> {
    // An old file might be open to others; a new one never is, not even for a moment.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(TelemetryError::io("replace", path)(error)),
        _ => {}
    }
    let text = serde_json::to_string_pretty(info).unwrap_or_default();
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(TelemetryError::io("write", path))
}

fn accept(listener: &TcpListener, service: &Arc<Service>) {
    let mut connections: Vec<(TcpStream, JoinHandle<()>)> = Vec::new();
    for stream in listener.incoming() {
        if service.stop.wait(Duration::ZERO) {
            break;
        }
        connections.retain(|(_, thread)| !thread.is_finished());
        let Ok(mut stream) = stream else {
            // Out of file descriptors, say: waiting lets others close some.
            service.stop.wait(Duration::from_millis(100));
            continue;
        };
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let _ = stream.set_nodelay(true);
        if connections.len() >= MAX_CONNECTIONS {
            let _ = respond(&mut stream, "503 Service Unavailable", "text/plain", b"too many connections; close a page\n");
            close(&mut stream);
            continue;
        }
        let Ok(handle) = stream.try_clone() else { continue };
        let service = service.clone();
        let thread = std::thread::Builder::new().name("telemetry-http-conn".into()).spawn(move || {
            // An error here means that the reader went away.
            let _ = service.serve(&mut stream);
            close(&mut stream);
        });
        if let Ok(thread) = thread {
            connections.push((handle, thread));
        }
    }
    for (stream, _) in &connections {
        let _ = stream.shutdown(Shutdown::Both);
    }
    for (_, thread) in connections {
        let _ = thread.join();
    }
}

/// Ends a connection so that the last answer arrives: closing over unread bytes would reset it.
fn close(stream: &mut TcpStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
    let mut rest = [0; 4096];
    for _ in 0..16 {
        if !matches!(stream.read(&mut rest), Ok(n) if n > 0) {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
}

/// Where the status comes from.
enum Told {
    Live(StatusReader),
    Folder(PathBuf),
}

impl Told {
    /// The latest status; an empty one while a folder has none that can be read.
    fn get(&self) -> Arc<Status> {
        match self {
            Told::Live(reader) => reader.get(),
            Told::Folder(dir) => Arc::new(read_status(dir).ok().flatten().unwrap_or_default()),
        }
    }
}

struct Service {
    status: Told,
    events: PathBuf,
    token: String,
    stop: Arc<Stop>,
}

struct Request {
    method: String,
    path: String,
    query: Vec<(String, String)>,
    bearer: Option<String>,
    last_event_id: Option<u64>,
}

impl Request {
    fn query(&self, key: &str) -> Option<&str> {
        self.query.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.query(key).and_then(|value| value.parse().ok())
    }
}

impl Service {
    fn serve(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let Some(request) = read_request(stream)? else {
            return respond(stream, "400 Bad Request", "text/plain", b"this is not a request that telemetry understands\n");
        };
        if request.method != "GET" {
            return respond(stream, "405 Method Not Allowed", "text/plain", b"telemetry is read-only: use GET\n");
        }
        let given = request.bearer.as_deref().or(request.query("token")).unwrap_or("");
        if !same(given.as_bytes(), self.token.as_bytes()) {
            let text = b"a token is needed: ?token=... or Authorization: Bearer ...\nit is in http.json in the run folder\n";
            return respond(stream, "401 Unauthorized", "text/plain", text);
        }
        match request.path.as_str() {
            "/" => respond(stream, "200 OK", "text/html; charset=utf-8", page_html(&self.status.get()).as_bytes()),
            "/status" => {
                let body = serde_json::to_vec(&*self.status.get())?;
                respond(stream, "200 OK", "application/json", &body)
            }
            "/metrics" => {
                let body = exposition(&self.status.get());
                respond(stream, "200 OK", "text/plain; version=0.0.4; charset=utf-8", body.as_bytes())
            }
            "/events" => self.stream_events(stream, &request),
            _ => respond(stream, "404 Not Found", "text/plain", b"there are /, /status, /events and /metrics\n"),
        }
    }

    /// Sends the events from the start (or after `after` / `Last-Event-ID`), then those that come, and the status whenever it
    /// changes. `points` thins steps and GPU readings of the history to about that many each.
    fn stream_events(&self, stream: &mut TcpStream, request: &Request) -> std::io::Result<()> {
        stream.write_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n\
              x-content-type-options: nosniff\r\nconnection: close\r\n\r\nretry: 1000\n\n",
        )?;
        let mut tail = LineTail::new(&self.events);
        let mut after = request.last_event_id.or(request.number("after")).unwrap_or(0);
        let mut thin = request.number("points").filter(|&n| n > 0).map(|points| Thin::new(tail.len() / points));
        let mut last_status_t = None;
        let mut last_sent = Instant::now();
        let mut out = Vec::new();
        loop {
            let lines = tail.poll().map_err(std::io::Error::other)?;
            if lines.restarted {
                after = 0;
                out.extend(b"event: restarted\ndata: {}\n\n");
            }
            for line in &lines.lines {
                let Ok(head) = serde_json::from_slice::<Head>(line) else { continue };
                let thinned = thin.as_mut().is_some_and(|thin| thin.leaves_out(&head, line.len() as u64));
                if head.seq > after && !thinned {
                    out.extend(format!("id: {}\ndata: ", head.seq).as_bytes());
                    out.extend(line);
                    out.extend(b"\n\n");
                }
            }
            if !lines.more && thin.take().is_some() {
                out.extend(b"event: live\ndata: {}\n\n");
            }
            let status = self.status.get();
            if !lines.more && last_status_t != Some(status.t) {
                last_status_t = Some(status.t);
                out.extend(b"event: status\ndata: ");
                serde_json::to_writer(&mut out, &*status)?;
                out.extend(b"\n\n");
            }
            if out.is_empty() && last_sent.elapsed() > PING_INTERVAL {
                out.extend(b": still here\n\n");
            }
            if !out.is_empty() {
                stream.write_all(&out)?;
                out.clear();
                last_sent = Instant::now();
            }
            if self.stop.wait(if lines.more { Duration::ZERO } else { STREAM_INTERVAL }) {
                return Ok(());
            }
        }
    }
}

#[derive(Deserialize)]
struct Head {
    seq: u64,
    kind: String,
    /// Readings of several GPUs are thinned each on its own.
    device: Option<String>,
    variant: Option<String>,
}

/// Leaves out frequent events so that one stays for every so many bytes of the file.
struct Thin {
    stride_bytes: u64,
    seen_bytes: u64,
    /// Where in the file the next event of a curve may come.
    next: HashMap<String, u64>,
}

impl Thin {
    fn new(stride_bytes: u64) -> Thin {
        Thin { stride_bytes, seen_bytes: 0, next: HashMap::new() }
    }

    fn leaves_out(&mut self, head: &Head, len: u64) -> bool {
        self.seen_bytes += len + 1;
        if !matches!(head.kind.as_str(), "step" | "gpu" | "pipeline") {
            return false;
        }
        let curve = head.device.as_ref().or(head.variant.as_ref()).unwrap_or(&head.kind);
        match self.next.get_mut(curve) {
            Some(next) if self.seen_bytes < *next => true,
            Some(next) => {
                *next = self.seen_bytes + self.stride_bytes;
                false
            }
            None => {
                self.next.insert(curve.clone(), self.seen_bytes + self.stride_bytes);
                false
            }
        }
    }
}

/// Compares without giving away by its duration how much is right.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (x, y)| differ | (x ^ y)) == 0
}

fn read_request(stream: &mut TcpStream) -> std::io::Result<Option<Request>> {
    let begun = Instant::now();
    let mut head = Vec::new();
    let mut buffer = [0; 2048];
    while head.len() < MAX_HEAD_BYTES && begun.elapsed() < PATIENCE {
        let n = stream.read(&mut buffer)?;
        if n == 0 {
            return Ok(None);
        }
        head.extend(&buffer[..n]);
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut parsed = httparse::Request::new(&mut headers);
        match parsed.parse(&head) {
            Ok(httparse::Status::Complete(_)) => return Ok(request_of(&parsed)),
            Ok(httparse::Status::Partial) => {}
            Err(_) => return Ok(None),
        }
    }
    Ok(None)
}

fn request_of(parsed: &httparse::Request<'_, '_>) -> Option<Request> {
    let header = |name: &str| {
        let found = parsed.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(found.value).ok()
    };
    let (path, query) = parsed.path?.split_once('?').unwrap_or((parsed.path?, ""));
    // Tokens and numbers need no percent-decoding.
    let pairs = query.split('&').filter_map(|pair| pair.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned()));
    Some(Request {
        method: parsed.method?.to_owned(),
        path: path.to_owned(),
        query: pairs.collect(),
        bearer: header("authorization").and_then(|value| value.strip_prefix("Bearer ")).map(|token| token.trim().to_owned()),
        last_event_id: header("last-event-id").and_then(|value| value.trim().parse().ok()),
    })
}

fn respond(stream: &mut TcpStream, status: &str, content_type: &str, body: &[u8]) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\ncache-control: no-store\r\n\
         referrer-policy: no-referrer\r\nx-content-type-options: nosniff\r\nx-frame-options: DENY\r\n\
         content-security-policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
         connect-src 'self'; img-src data:\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)
}
