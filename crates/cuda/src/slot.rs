//! Slots: device buffers for one batch's context features, whose ownership travels between workers.
//!
//! Job: order the streams that touch one slot. Refuses copies: a slot that lies on another GPU is an error of the caller. Invariant: every access waits for
//! the one before it, through one event that each access records behind itself while it holds the lock.

use crate::driver::{Buffer, DeviceHandle, Event, Stream};
use crate::error::CudaError;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// See the module.
pub struct CudaSlot {
    buffer: Buffer,
    last: Mutex<Event>,
}

impl CudaSlot {
    pub(crate) fn new(device: &DeviceHandle, bytes: usize) -> Result<CudaSlot, CudaError> {
        Ok(CudaSlot { buffer: Buffer::new(device, bytes, "a slot")?, last: Mutex::new(Event::new(device, false)?) })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    pub(crate) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    pub(crate) fn address(&self) -> u64 {
        self.buffer.address()
    }

    pub(crate) fn ordinal(&self) -> u32 {
        self.buffer.device().ordinal()
    }

    /// Work enqueued on `stream` from now on follows the last access; [`Turn::end`] lets the next access follow it.
    pub(crate) fn turn(&self, stream: &Stream) -> Result<Turn<'_>, CudaError> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        stream.wait_for(&last)?;
        Ok(Turn { last })
    }
}

/// An access to a slot that is being enqueued.
pub(crate) struct Turn<'a> {
    last: MutexGuard<'a, Event>,
}

impl Turn<'_> {
    pub(crate) fn end(self, stream: &Stream) -> Result<(), CudaError> {
        stream.record(&self.last)
    }
}
