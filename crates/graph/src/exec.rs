//! What an executor of programs offers: the one seam between plans and devices.
//!
//! Job: the trait that `cpu` and `cuda` implement and that training and decoding are written against.
//! Refuses scheduling, threads and files. Invariants: a phase runs to its end or returns an error that names the op;
//! host data has exactly the tensor's length; nothing is allocated by `run`.

use crate::program::{PhaseId, TensorId};

/// Host data on its way into a tensor.
#[derive(Clone, Copy, Debug)]
pub enum HostRef<'a> {
    /// For F32 and BF16 tensors (rounded on the way in where the executor stores bf16).
    F32(&'a [f32]),
    /// For I32 tensors.
    I32(&'a [i32]),
}

/// Host memory that receives a tensor.
#[derive(Debug)]
pub enum HostMut<'a> {
    /// For F32 and BF16 tensors.
    F32(&'a mut [f32]),
    /// For I32 tensors.
    I32(&'a mut [i32]),
}

/// The slot buffer a phase runs with.
pub enum SlotArg<'a, S> {
    /// The phase touches no slot.
    None,
    /// The phase reads context features.
    Read(&'a S),
    /// The phase captures context features.
    Write(&'a mut S),
}

/// A copy of tensors to the host that is under way.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Fetch(pub u64);

/// Errors of an executor. They are the device's or a bug's, never the user's data.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// Host data and tensor do not fit each other.
    #[error("tensor `{name}` takes {want} elements of {dtype}, got {got}")]
    HostShape {
        /// The tensor.
        name: String,
        /// Its element count.
        want: usize,
        /// Its dtype.
        dtype: &'static str,
        /// What the host offered.
        got: String,
    },
    /// A phase needs a slot and got none, or the other way round, or a slot of another size.
    #[error("phase `{phase}`: {what}")]
    Slot {
        /// The phase.
        phase: String,
        /// What is wrong.
        what: String,
    },
    /// The device failed.
    #[error("phase `{phase}`, op {op}: {what}")]
    Device {
        /// The phase.
        phase: String,
        /// The op, with its shapes.
        op: String,
        /// The device's words.
        what: String,
    },
    /// Memory could not be had.
    #[error("cannot allocate {bytes} bytes for {what}")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// The region.
        what: String,
    },
}

/// Runs the phases of one program on one device.
pub trait Executor {
    /// One batch's context features. Ownership of a slot is what travels between workers, which may happen while reads of it are still queued: a
    /// backend that queues must order the next writer behind them.
    type Slot: Send + 'static;

    /// Copies host data into a tensor of any role but `Frozen` and `Slot`; ordered before the next [`Executor::run`].
    fn write(&mut self, t: TensorId, data: HostRef<'_>) -> Result<(), ExecError>;

    /// Copies a tensor to the host once everything enqueued before has finished.
    fn read(&mut self, t: TensorId, out: HostMut<'_>) -> Result<(), ExecError>;

    /// Starts copying `tensors` to the host, ordered after everything enqueued before, and returns at once.
    fn fetch(&mut self, tensors: &[TensorId]) -> Result<Fetch, ExecError>;

    /// Waits for a fetch and shows each tensor's content, in the order they were asked for.
    fn collect(&mut self, fetch: Fetch, each: &mut dyn FnMut(usize, HostRef<'_>)) -> Result<(), ExecError>;

    /// Runs one phase.
    fn run(&mut self, phase: PhaseId, slot: SlotArg<'_, Self::Slot>) -> Result<(), ExecError>;

    /// Warms up and captures every phase; nothing is allocated or captured after it. Called once, in the owning thread, before the gate.
    fn prepare(&mut self) -> Result<(), ExecError>;

    /// A new slot buffer of the size that the program's slot tensor has.
    fn new_slot(&self) -> Result<Self::Slot, ExecError>;

    /// The whole gradient region (role `Grad`) as one f32 vector, in place, for the all-reduce between in-process replicas.
    fn with_grads(&mut self, f: &mut dyn FnMut(&mut [f32])) -> Result<(), ExecError>;

    /// Bytes this executor holds, by what it allocated (not by what the plan says): the two are compared.
    fn held_bytes(&self) -> u64;
}
