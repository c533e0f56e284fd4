//! A graph was replayed by a thread that had not captured it.
//!
//! Held to: an executor, which owns streams and graphs, cannot leave its thread. This file compiles only while that is so; it needs no device.

use drafthorse_cuda::CudaExecutor;

trait NotSend<Which> {
    fn holds() -> bool {
        true
    }
}

/// What every type has.
struct Always;
/// What types that may change threads have besides; for those, `NotSend<_>` below is ambiguous and does not compile.
struct WhenSend;

impl<T: ?Sized> NotSend<Always> for T {}
impl<T: ?Sized + Send> NotSend<WhenSend> for T {}

#[test]
fn an_executor_stays_on_the_thread_that_made_it() {
    assert!(<CudaExecutor as NotSend<_>>::holds());
}
