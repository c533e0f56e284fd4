//! The page of a run that another process or machine runs, on this machine's loopback.
//!
//! Job: the run's own page if it serves one; else one made from its files, or from what comes through the chain. Refuses any other address than 127.0.0.1.
//! Invariant: nothing is written into the run's folder.

use crate::exit::{Exit, Failure};
use crate::screen::Screen;
use crate::signals::Signals;
use drafthorse_telemetry::{EVENTS_FILE, HttpServer, STATUS_FILE, Source, Update, read_http_info};
use drafthorse_train::pipeline::cancel::Cancel;
use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

/// Serves until Ctrl-C. `folder` is the run's, if it is on this machine.
pub fn serve(source: &mut dyn Source, folder: Option<&Path>, port: u16, screen: Screen) -> Result<Exit, Failure> {
    if let Some(info) = folder.map(read_http_info).transpose()?.flatten()
        && TcpStream::connect(("127.0.0.1", info.port)).is_ok()
    {
        screen.say(format!("live page  {}", info.url))?;
        screen.json(&info)?;
        return Ok(Exit::Done);
    }
    let own = tempfile::tempdir().map_err(|e| Failure::file("make a folder in", &std::env::temp_dir(), &e))?;
    let server = HttpServer::start_for_folder(folder.unwrap_or(own.path()), own.path(), port)?;
    let cancel = Cancel::new();
    let signals = Signals::listen(&cancel, screen, "ending the page")?;
    screen.say(format!("live page  {} (this machine only; Ctrl-C ends it, the run goes on)", server.info().url))?;
    if screen.json {
        screen.json_line(server.info())?;
    }
    let mut mirror = Mirror { dir: own.path(), trouble: None };
    while cancel.stop_requested().is_none() {
        let mut more = false;
        if folder.is_none() {
            match source.poll() {
                Ok(update) => {
                    more = update.more;
                    mirror.trouble = None;
                    mirror.write(&update).map_err(|e| Failure::file("write to", own.path(), &e))?;
                }
                Err(error) if mirror.trouble.as_ref() != Some(&error.to_string()) => {
                    screen.note(error.to_string().lines().next().unwrap_or_default());
                    mirror.trouble = Some(error.to_string());
                }
                Err(_) => {}
            }
        }
        if !more {
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    signals.end();
    server.shutdown();
    Ok(Exit::Done)
}

/// A run folder's files, written again from what comes.
struct Mirror<'a> {
    dir: &'a Path,
    trouble: Option<String>,
}

impl Mirror<'_> {
    fn write(&mut self, update: &Update) -> std::io::Result<()> {
        let events = self.dir.join(EVENTS_FILE);
        if update.restarted && events.exists() {
            std::fs::remove_file(&events)?;
        }
        if !update.events.is_empty() {
            let mut lines = Vec::new();
            for envelope in &update.events {
                serde_json::to_writer(&mut lines, envelope)?;
                lines.push(b'\n');
            }
            File::options().create(true).append(true).open(&events)?.write_all(&lines)?;
        }
        if let Some(status) = &update.status {
            let aside = self.dir.join(".status.new");
            std::fs::write(&aside, serde_json::to_vec(status)?)?;
            std::fs::rename(aside, self.dir.join(STATUS_FILE))?;
        }
        Ok(())
    }
}
