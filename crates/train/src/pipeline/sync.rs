//! Its job: the one place that names the blocking primitives, so that `--cfg shuttle` swaps them for a model checker's.
//! It refuses to hold any protocol of its own.
//! Invariant: every lock and condition variable whose order of events can change an outcome is taken from here. The [`board`](super::board)
//! is the exception on purpose: it only records, nobody waits on it, and its locks would only blow up the number of schedules to explore.

#[cfg(not(shuttle))]
use std::{sync, thread};

#[cfg(shuttle)]
use shuttle::{sync, thread};

pub(crate) use sync::atomic::{AtomicBool, Ordering};
pub(crate) use sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, Weak};
pub(crate) use thread::{Scope, scope};

use std::time::Duration;

/// Locks, and goes on with a poisoned lock: critical sections here run no foreign code and leave the state whole between statements, and a
/// worker's panic is reported through [`Cancel`](super::cancel::Cancel), not through a second panic in an innocent thread.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Waits for a notification; the caller tests its condition again afterwards.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Waits for a notification or until `limit` has passed. Under the model checker time does not pass: only a notification ends the wait.
pub(crate) fn wait_timeout<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
    condvar.wait_timeout(guard, limit).unwrap_or_else(|poisoned| poisoned.into_inner()).0
}

/// Starts a scoped thread that carries `name` in debuggers and profilers (the model checker's threads have none).
pub(crate) fn spawn_scoped<'scope, F>(scope: &'scope Scope<'scope, '_>, name: &str, body: F) -> std::io::Result<()>
where
    F: FnOnce() + Send + 'scope,
{
    #[cfg(not(shuttle))]
    thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, body)?;
    #[cfg(shuttle)]
    {
        let _ = (name, scope.spawn(body));
    }
    Ok(())
}
