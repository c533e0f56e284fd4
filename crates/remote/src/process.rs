//! A process that is known for certain: its id and the moment it started.
//!
//! Refuses to signal a process whose start is not the recorded one: ids are given again, and another's process is left alone. Invariant: the check and
//! the signal go through one handle of the kernel (pidfd), so that no other process can slip in between.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// A process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its id.
    pub pid: u32,
    /// Clock ticks from the boot to its start.
    pub start_ticks: u64,
    /// The boot.
    pub boot: String,
}

/// What to tell a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tell {
    /// Finish the step, save, end; a second time: end at once.
    Terminate,
    /// End now, by the kernel.
    Kill,
}

impl ProcessId {
    /// The process `pid` as it is now, if it runs.
    pub fn of(pid: u32) -> Option<ProcessId> {
        let (state, start_ticks) = stat(pid)?;
        // A zombie has ended; only its exit code waits to be read.
        (state != 'Z' && state != 'X').then(|| ProcessId { pid, start_ticks, boot: boot() })
    }

    /// This process.
    pub fn own() -> ProcessId {
        ProcessId::of(std::process::id()).expect("this process runs and /proc is there")
    }

    /// Whether it still runs.
    pub fn is_alive(&self) -> bool {
        ProcessId::of(self.pid).as_ref() == Some(self)
    }

    /// Tells it; false if it does not run any more.
    ///
    /// # Errors
    /// When the kernel refuses (it belongs to another user).
    pub fn tell(&self, what: Tell) -> std::io::Result<bool> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(false) };
        let handle = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(handle) => handle,
            Err(rustix::io::Errno::SRCH) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        // From here on the handle means one process, whoever has the id later.
        if !self.is_alive() {
            return Ok(false);
        }
        let signal = match what {
            Tell::Terminate => Signal::TERM,
            Tell::Kill => Signal::KILL,
        };
        match pidfd_send_signal(&handle, signal) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::SRCH) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// SHA-256 of the file that it was started from, also when that file has been replaced since.
    pub fn program_sha256(&self) -> Option<String> {
        let hash = crate::files::sha256_file(format!("/proc/{}/exe", self.pid).as_ref()).ok()?;
        self.is_alive().then_some(hash)
    }
}

/// State and start of a process.
fn stat(pid: u32) -> Option<(char, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in brackets and may hold anything, brackets too.
    let after = &text[text.rfind(')')? + 1..];
    let fields: Vec<&str> = after.split_whitespace().collect();
    Some((fields.first()?.chars().next()?, fields.get(19)?.parse().ok()?))
}

fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|b| b.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_told_only_if_it_is_the_same() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        // The same number, given to a process of another start: left alone.
        let reused = ProcessId { start_ticks: id.start_ticks + 1, ..id.clone() };
        let other_boot = ProcessId { boot: "another".into(), ..id.clone() };
        for wrong in [&reused, &other_boot] {
            assert!(!wrong.is_alive() && !wrong.tell(Tell::Kill).unwrap());
        }
        assert!(id.is_alive());
        assert!(id.tell(Tell::Terminate).unwrap());
        child.wait().unwrap();
        assert!(!id.is_alive() && !id.tell(Tell::Kill).unwrap());
    }

    #[test]
    fn a_zombie_has_ended() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        id.tell(Tell::Kill).unwrap();
        while stat(id.pid).is_some_and(|(state, _)| state != 'Z') {
            std::thread::yield_now();
        }
        assert!(!id.is_alive());
        child.wait().unwrap();
    }
}
