//! Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP as requests to end well.
//!
//! Job: the first request asks the work to end where it can (a run finishes its step and saves); the second one aborts. Refuses to leave a process that does not come back: some
//! seconds after an abort it exits. Invariants: a SIGHUP that the caller had ignored (nohup) stays ignored; after [`Signals::end`] signals are
//! no longer listened to.

use crate::exit::{Exit, Failure};
use crate::screen::Screen;
use drafthorse_train::pipeline::cancel::{Cancel, Cause, Kind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Handle;
use std::thread::JoinHandle;
use std::time::Duration;

/// Between an abort and the end of the process.
const ABORT_GRACE: Duration = Duration::from_secs(5);

/// Listens until it is ended.
pub struct Signals {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Signals {
    /// Starts to listen on behalf of `cancel`. `what` says what a first request leads to.
    ///
    /// # Errors
    /// Exit 5 when no thread can be started.
    pub fn listen(cancel: &Cancel, screen: Screen, what: &'static str) -> Result<Signals, Failure> {
        Signals::listen_and(cancel, screen, what, || {})
    }

    /// As [`Signals::listen`]; `first` runs on the first request.
    ///
    /// # Errors
    /// As [`Signals::listen`].
    pub fn listen_and(
        cancel: &Cancel,
        screen: Screen,
        what: &'static str,
        first: impl Fn() + Send + 'static,
    ) -> Result<Signals, Failure> {
        Signals::start(cancel, screen, what, first).map_err(|e| {
            Failure::new(Exit::Device, format!("cannot listen for signals: {e}"), "raise the limit on threads (ulimit -u)")
        })
    }

    fn start(cancel: &Cancel, screen: Screen, what: &'static str, first: impl Fn() + Send + 'static) -> std::io::Result<Signals> {
        let mut wanted = vec![SIGINT, SIGTERM, SIGUSR1];
        if !hangup_is_ignored() {
            wanted.push(SIGHUP);
        }
        let mut signals = signal_hook::iterator::Signals::new(wanted)?;
        let handle = signals.handle();
        let cancel = cancel.clone();
        let thread = std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let name = name(signal);
                if cancel.request_stop(name) {
                    first();
                    screen.note(format!("{name}: {what}; once more to abort"));
                } else if cancel.is_cancelled() {
                    std::process::exit(i32::from(Exit::Stopped.code()));
                } else {
                    screen.note(format!("{name} again: aborting without waiting; what was under way is lost"));
                    cancel.cancel(Cause::new(Kind::Stopped, "signals", format!("{name} was the second request to stop")));
                    std::thread::spawn(move || {
                        std::thread::sleep(ABORT_GRACE);
                        screen.note(format!("something did not come back within {} s; ending without it", ABORT_GRACE.as_secs()));
                        std::process::exit(i32::from(Exit::Stopped.code()));
                    });
                }
            }
        })?;
        Ok(Signals { handle, thread: Some(thread) })
    }

    /// Stops listening.
    pub fn end(mut self) {
        self.close();
    }

    fn close(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            // The thread only prints and sets flags; a panic there has been told by the hook.
            let _ = thread.join();
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.close();
    }
}

fn name(signal: i32) -> &'static str {
    match signal {
        SIGINT => "Ctrl-C",
        SIGTERM => "SIGTERM",
        SIGUSR1 => "SIGUSR1",
        _ => "SIGHUP",
    }
}

/// Whether SIGHUP was ignored when the program started, by the kernel's own account.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_mask(&status) & 1 << (SIGHUP - 1) != 0
}

fn ignored_mask(status: &str) -> u64 {
    let line = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_mask_is_read() {
        assert_eq!(ignored_mask("Name:\tx\nSigIgn:\t0000000000001001\n"), 0x1001);
        assert_eq!(ignored_mask("Name:\tx\n"), 0);
    }
}
