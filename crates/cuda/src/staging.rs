//! Pinned memory between host and device: a ring for writes, buffers for reads.
//!
//! Job: host data → pinned ring → device in stream order, and device → pinned → host, without waiting for the device except when the ring is full.
//! Refuses dtype knowledge. Invariant: a block of the ring is written again only after the copies out of it have run.
#![allow(unsafe_code)]

use crate::driver::{DeviceHandle, Event, Pinned, Stream};
use crate::error::CudaError;
use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

/// Blocks of the ring.
const BLOCKS: usize = 4;
/// Bytes of a block: two micro-batches' index arrays and more.
const BLOCK_BYTES: usize = 8 << 20;

/// The ring for writes.
pub struct Ring {
    blocks: Vec<(Pinned, Event)>,
    current: usize,
    used: usize,
    deadline: Duration,
}

impl Ring {
    /// Allocates the ring.
    pub fn new(device: &DeviceHandle, deadline: Duration) -> Result<Ring, CudaError> {
        let blocks = (0..BLOCKS)
            .map(|_| Ok((Pinned::new(device, BLOCK_BYTES)?, Event::new(device, false)?)))
            .collect::<Result<_, CudaError>>()?;
        Ok(Ring { blocks, current: 0, used: 0, deadline })
    }

    /// Copies `bytes` bytes to `to`; `fill` writes piece after piece: (offset, room).
    pub fn upload(
        &mut self,
        stream: &Stream,
        to: u64,
        bytes: usize,
        mut fill: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError> {
        let mut done = 0;
        while done < bytes {
            if self.used == BLOCK_BYTES {
                self.turn(stream)?;
            }
            let piece = (bytes - done).min(BLOCK_BYTES - self.used);
            let room = &mut self.blocks[self.current].0.bytes_mut()[self.used..self.used + piece];
            fill(done, room);
            // SAFETY: pinned, and not written again before the block's event, which `turn` records behind this copy; the caller names a live tensor.
            unsafe { stream.upload(to + done as u64, room)? };
            // Pieces start on 16 bytes, so that no element is cut and copies stay fast.
            self.used = (self.used + piece).next_multiple_of(16).min(BLOCK_BYTES);
            done += piece;
        }
        Ok(())
    }

    fn turn(&mut self, stream: &Stream) -> Result<(), CudaError> {
        stream.record(&self.blocks[self.current].1)?;
        self.current = (self.current + 1) % BLOCKS;
        self.used = 0;
        self.blocks[self.current].1.wait(self.deadline, "copies of host data")
    }
}

/// Pinned buffers for copies to the host, by size class; freed ones are used again.
pub struct Returns {
    device: DeviceHandle,
    free: HashMap<usize, Vec<(Pinned, Event)>>,
    /// Buffers ever made.
    pub made: usize,
}

impl Returns {
    /// No buffer yet.
    pub fn new(device: &DeviceHandle) -> Returns {
        Returns { device: device.clone(), free: HashMap::new(), made: 0 }
    }

    /// A buffer of at least `bytes` with an event.
    pub fn take(&mut self, bytes: usize) -> Result<(Pinned, Event), CudaError> {
        let class = bytes.next_power_of_two().max(4096);
        if let Some(buffer) = self.free.get_mut(&class).and_then(Vec::pop) {
            return Ok(buffer);
        }
        self.made += 1;
        Ok((Pinned::new(&self.device, class)?, Event::new(&self.device, false)?))
    }

    /// Enqueues a copy of device memory into part of a buffer that [`Returns::take`] gave.
    pub fn enqueue(&self, stream: &Stream, buffer: &mut Pinned, part: Range<usize>, from: u64) -> Result<(), CudaError> {
        // SAFETY: pinned, and not read before its event, which the caller records behind this copy; the caller names a live tensor.
        unsafe { stream.download(&mut buffer.bytes_mut()[part], from) }
    }

    /// Shows device memory to `each` piece by piece: (offset, bytes). Waits for the device.
    pub fn show(
        &mut self,
        stream: &Stream,
        from: u64,
        bytes: usize,
        deadline: Duration,
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), CudaError> {
        const PIECE: usize = 8 << 20;
        let (mut buffer, event) = self.take(bytes.clamp(1, PIECE))?;
        let mut done = 0;
        while done < bytes {
            let piece = PIECE.min(bytes - done);
            self.enqueue(stream, &mut buffer, 0..piece, from + done as u64)?;
            stream.finish(&event, deadline, "a copy to the host")?;
            each(done, &buffer.bytes()[..piece]);
            done += piece;
        }
        self.give((buffer, event));
        Ok(())
    }

    /// Gives a buffer back.
    pub fn give(&mut self, buffer: (Pinned, Event)) {
        self.free.entry(buffer.0.len()).or_default().push(buffer);
    }
}
