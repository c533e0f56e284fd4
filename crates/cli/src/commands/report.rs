//! `drafthorse report`: all that is known of a run, in one file to send.
//!
//! Refuses secrets: the page's token stays out. Invariant: the file opens in any browser, without a network.

use super::watch::run_folder;
use crate::build_id::BUILD;
use crate::exit::{Exit, Failure};
use crate::place::{Place, run_there, runs_there};
use crate::screen::Screen;
use clap::Args;
use drafthorse_remote::chain::Chain;
use drafthorse_remote::far::Far;
use drafthorse_remote::launches::Launches;
use drafthorse_remote::probe::probe;
use drafthorse_telemetry::{RunFolder, Source, page_dump, read_status};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Pack status, curves, events, config, log and machine of a run into one HTML file
///
/// The file is the live page, frozen, with the config, the launch's record and log, the last events, and what the machine is. It holds paths and the command
/// line, and no token.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse report first -o first.html
  drafthorse report first --to lab -o - > first.html")]
pub struct Report {
    /// Run name or run folder
    run: String,
    /// File to write; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Folder of runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    #[command(flatten)]
    place: Place,
}

/// Bytes of a log's end that are packed.
const LOG_BYTES: usize = 256 << 10;
/// Steps and readings that are packed at most; rare events are all packed.
const MAX_FREQUENT: usize = 5_000;
/// Last events that are shown as text.
const LAST_EVENTS: usize = 200;

/// Runs the command.
pub fn run(args: &Report, screen: Screen) -> Result<Exit, Failure> {
    if let Some(to) = args.place.destination()? {
        if args.out != Path::new("-") {
            let what = "at a destination the report comes to standard output";
            return Err(Failure::new(Exit::Usage, what, "write -o - > FILE"));
        }
        return run_there(&to, &["report", &args.run, "-o", "-", "--runs", &runs_there(&to)].map(str::to_owned), screen);
    }
    let folder = run_folder(&args.run, &args.runs)?;
    let text = pack(&folder, &args.run, &args.runs)?;
    if args.out == Path::new("-") {
        std::io::stdout().lock().write_all(text.as_bytes()).map_err(|e| Failure::output(&e))?;
        return Ok(Exit::Done);
    }
    std::fs::write(&args.out, &text).map_err(|e| Failure::file("write", &args.out, &e))?;
    screen.say(format!("report     {} ({})", args.out.display(), crate::format::bytes(text.len() as u64)))?;
    screen.json(&serde_json::json!({ "report": args.out, "size_bytes": text.len() }))?;
    Ok(Exit::Done)
}

fn pack(folder: &Path, run: &str, runs: &Path) -> Result<String, Failure> {
    let status = read_status(folder)?.unwrap_or_default();
    let mut source = RunFolder::new(folder);
    let mut events = Vec::new();
    loop {
        let update = source.poll()?;
        if update.restarted {
            events.clear();
        }
        events.extend(update.events);
        if !update.more {
            break;
        }
    }
    let frequent = events.iter().filter(|e| e.event.is_bulk()).count();
    let stride = frequent.div_ceil(MAX_FREQUENT).max(1);
    let mut seen = 0;
    let last: Vec<String> = events[events.len().saturating_sub(LAST_EVENTS)..]
        .iter()
        .map(|e| serde_json::to_string(e).expect("events are plain data"))
        .collect();
    events.retain(|e| {
        seen += usize::from(e.event.is_bulk());
        !e.event.is_bulk() || seen % stride == 0
    });
    let mut parts = vec![("config.toml".to_owned(), read_end(&folder.join(crate::launch::CONFIG_FILE)))];
    if let Ok((dir, _)) = Launches::new(runs).find(run) {
        for name in ["launch.json", "state.json", drafthorse_remote::launches::LOG] {
            parts.push((format!("launch: {name}"), read_end(&dir.path().join(name))));
        }
    }
    parts.push((format!("last {} events", last.len()), last.join("\n")));
    let here = Far::new(Chain::default(), Default::default());
    let machine = probe(&here, &folder.display().to_string()).map(|p| serde_json::to_string_pretty(&p).expect("plain data"));
    parts.push(("machine".into(), machine.unwrap_or_else(|e| e.to_string())));
    parts.push(("this program".into(), serde_json::to_string_pretty(&BUILD).expect("plain data")));
    let sections: String = parts
        .iter()
        .map(|(name, text)| format!("<details><summary>{}</summary><pre>{}</pre></details>\n", escape(name), escape(text)))
        .collect();
    Ok(page_dump(&status, &events).replace("</body>", &format!("<section class=\"report\">\n{sections}</section>\n</body>")))
}

/// The end of a file, or why it is not there.
fn read_end(path: &Path) -> String {
    match std::fs::read(path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(LOG_BYTES)..]).into_owned(),
        Err(error) => format!("cannot read {}: {error}", path.display()),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
