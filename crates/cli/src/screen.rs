//! What goes to standard output and what to standard error, and whether it is coloured.
//!
//! Job: results on standard output (text, or JSON under `--json`), notices on standard error. Refuses to print progress (see `progress`).
//! Invariants: under `--json` standard output holds JSON only; a reader that has gone away is [`Failure::ReaderGone`], never a panic.

use crate::exit::Failure;
use anstyle::Style;
use serde::Serialize;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};

/// When to colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The way out.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    /// Machine-readable output is wanted.
    pub json: bool,
    /// Notices and progress are not wanted.
    pub quiet: bool,
    /// Standard output takes colour.
    pub color: bool,
    /// Standard error takes colour.
    pub error_color: bool,
    /// Standard error is a terminal, so that a bar can move there.
    pub live: bool,
}

impl Screen {
    /// Looks at the streams and the environment.
    pub fn new(json: bool, quiet: bool, choice: ColorChoice) -> Screen {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        let wanted = |terminal: bool| match choice {
            ColorChoice::Auto => terminal && !no_color,
            ColorChoice::Always => true,
            ColorChoice::Never => false,
        };
        let live = io::stderr().is_terminal();
        Screen { json, quiet, color: wanted(io::stdout().is_terminal()), error_color: wanted(live), live }
    }

    /// A line of the result, for people; nothing under `--json`.
    ///
    /// # Errors
    /// [`Failure::ReaderGone`], or what the stream answered.
    pub fn say(&self, text: impl Display) -> Result<(), Failure> {
        if self.json { Ok(()) } else { write_line(&text) }
    }

    /// Text as it is, without a line end, flushed at once; nothing under `--json`.
    ///
    /// # Errors
    /// As [`Screen::say`].
    pub fn say_part(&self, text: &str) -> Result<(), Failure> {
        if self.json {
            return Ok(());
        }
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| Failure::output(&e))
    }

    /// The result as JSON, indented; nothing without `--json`.
    ///
    /// # Errors
    /// As [`Screen::say`].
    pub fn json(&self, value: &impl Serialize) -> Result<(), Failure> {
        if !self.json {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(value).expect("results are plain data");
        write_line(&text)
    }

    /// One JSON value on one line, whatever `--json` says.
    ///
    /// # Errors
    /// As [`Screen::say`].
    pub fn json_line(&self, value: &impl Serialize) -> Result<(), Failure> {
        write_line(&serde_json::to_string(value).expect("events are plain data"))
    }

    /// Something a person should know, on standard error; nothing under `--quiet`.
    pub fn note(&self, text: impl Display) {
        if !self.quiet {
            // A closed standard error cannot be told to anyone, and must not end a run.
            let _ = writeln!(io::stderr(), "{text}");
        }
    }

    /// Something that a person must not miss, on standard error; nothing under `--quiet`.
    pub fn warn(&self, text: impl Display) {
        let yellow = anstyle::AnsiColor::Yellow.on_default().bold();
        let title = if self.error_color { format!("{yellow}warning:{yellow:#}") } else { "warning:".to_owned() };
        self.note(format!("{title} {text}"));
    }

    /// A line for people that is no result: what runs, and what to do next; nothing under `--quiet` or `--json`.
    ///
    /// # Errors
    /// As [`Screen::say`].
    pub fn tell(&self, text: impl Display) -> Result<(), Failure> {
        if self.quiet { Ok(()) } else { self.say(text) }
    }

    /// `text` in `style` where standard output takes colour.
    pub fn paint(&self, style: Style, text: &str) -> String {
        if self.color { format!("{style}{text}{style:#}") } else { text.to_owned() }
    }
}

fn write_line(text: &impl Display) -> Result<(), Failure> {
    writeln!(io::stdout().lock(), "{text}").map_err(|e| Failure::output(&e))
}

/// Writes to standard error whatever the flags say: errors, and what is known before there are flags. Where nobody reads, `eprintln!` would panic.
pub fn tell(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}
