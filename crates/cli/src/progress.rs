//! How far a piece of work is: a moving bar on a terminal, a plain line now and then elsewhere, nothing under `--quiet`.
//!
//! Job: one [`Progress`] per piece of work. Refuses results (those go through `screen`). Invariants: written to standard error only; a bar is gone
//! from the screen when its work has ended; plain lines come at most every [`LINE_EVERY`].

use crate::format;
use crate::screen::Screen;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two plain lines.
pub const LINE_EVERY: Duration = Duration::from_secs(5);

/// Progress of one piece of work.
pub struct Progress {
    what: String,
    bar: Option<ProgressBar>,
    screen: Screen,
    begun: Instant,
    last_line: Mutex<Instant>,
}

impl Progress {
    /// Work called `what`.
    pub fn new(screen: Screen, what: &str) -> Progress {
        let bar = (screen.live && !screen.quiet).then(|| {
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
            let style = ProgressStyle::with_template("{prefix} {bar:28} {percent:>3} %  {msg}  eta {eta}")
                .expect("the template is fixed");
            bar.set_style(style.progress_chars("━╸─"));
            bar.set_prefix(what.to_owned());
            bar
        });
        let begun = Instant::now();
        Progress { what: what.to_owned(), bar, screen, begun, last_line: Mutex::new(begun) }
    }

    /// Seconds since the work began.
    pub fn elapsed_s(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// `done` of `total` is done; `message` says it in the work's own units.
    pub fn update(&self, done: u64, total: u64, message: impl FnOnce() -> String) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            bar.set_message(message());
            return;
        }
        let mut last = self.last_line.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() < LINE_EVERY {
            return;
        }
        *last = Instant::now();
        let percent = if total == 0 { 0.0 } else { 100.0 * done as f64 / total as f64 };
        self.screen.note(format!("{}: {percent:.0} %, {}, {}", self.what, message(), format::seconds(self.elapsed_s())));
    }

    /// A line above the bar.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => self.screen.note(text),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
