//! What executors on one device share: its kernels, and one copy of every frozen tensor by name.
//!
//! Job: take a tensor's content from the host once, keep it on the device, hand out its buffer. Refuses to know where content comes from.
//! Invariant: one name, one buffer; a tensor that is asked for again with another length is another tensor's and an error.

use crate::driver::{Buffer, Device, DeviceHandle, Event, Stream};
use crate::error::CudaError;
use crate::host::narrow;
use crate::kernels::Kernels;
use crate::staging::Ring;
use drafthorse_graph::{DType, Program, TensorId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// See the module.
pub struct FrozenStore {
    device: DeviceHandle,
    kernels: Arc<Kernels>,
    tensors: Mutex<HashMap<String, Arc<Buffer>>>,
}

impl FrozenStore {
    /// An empty store on `device`.
    ///
    /// # Errors
    /// When this build has no kernels.
    pub fn new(device: Arc<Device>) -> Result<FrozenStore, CudaError> {
        let kernels = Arc::new(Kernels::new(Arc::clone(&device))?);
        Ok(FrozenStore { device, kernels, tensors: Mutex::default() })
    }

    /// An empty store on the same device, with the same loaded kernels.
    pub fn sibling(&self) -> FrozenStore {
        FrozenStore { device: Arc::clone(&self.device), kernels: Arc::clone(&self.kernels), tensors: Mutex::default() }
    }

    /// An empty store on the same device, filled with these tensors; bf16 where `program` declares them so. For programs that bring small content of
    /// their own.
    ///
    /// # Errors
    /// The device's.
    pub fn sibling_with<'c>(
        &self,
        program: &Program,
        content: impl IntoIterator<Item = (TensorId, &'c [f32])>,
    ) -> Result<FrozenStore, CudaError> {
        let own = self.sibling();
        for (t, data) in content {
            let tensor = program.get(t);
            if tensor.dtype == DType::BF16 {
                own.load_bf16(&tensor.name, data.len(), || Ok::<_, CudaError>(data.iter().map(|&x| narrow(x)).collect()))?;
            } else {
                own.load_f32(&tensor.name, data.len(), || Ok::<_, CudaError>(data.to_vec()))?;
            }
        }
        Ok(own)
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn kernels(&self) -> &Arc<Kernels> {
        &self.kernels
    }

    /// Loads a bf16 tensor from its bit patterns, unless it is there. `content` is called only when it is not, while others wait.
    ///
    /// # Errors
    /// `content`'s, the device's, or a length that differs from the loaded one's.
    pub fn load_bf16<E: From<CudaError>>(
        &self,
        name: &str,
        len: usize,
        content: impl FnOnce() -> Result<Vec<u16>, E>,
    ) -> Result<(), E> {
        self.load(name, 2 * len, content)
    }

    /// Loads an F32 tensor; as [`FrozenStore::load_bf16`].
    ///
    /// # Errors
    /// As there.
    pub fn load_f32<E: From<CudaError>>(
        &self,
        name: &str,
        len: usize,
        content: impl FnOnce() -> Result<Vec<f32>, E>,
    ) -> Result<(), E> {
        self.load(name, 4 * len, content)
    }

    fn load<T: bytemuck::Pod, E: From<CudaError>>(
        &self,
        name: &str,
        bytes: usize,
        content: impl FnOnce() -> Result<Vec<T>, E>,
    ) -> Result<(), E> {
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = tensors.get(name) {
            return if buffer.bytes() == bytes { Ok(()) } else { Err(mismatch(name, bytes, buffer.bytes()).into()) };
        }
        let content = content()?;
        let content: &[u8] = bytemuck::cast_slice(&content);
        if content.len() != bytes {
            return Err(mismatch(name, bytes, content.len()).into());
        }
        let buffer = self.upload(content, name)?;
        tensors.insert(name.to_owned(), Arc::new(buffer));
        Ok(())
    }

    fn upload(&self, content: &[u8], name: &str) -> Result<Buffer, CudaError> {
        const DEADLINE: Duration = Duration::from_secs(120);
        let buffer = Buffer::new(&self.device, content.len(), name)?;
        let (stream, event) = (Stream::new(&self.device)?, Event::new(&self.device, false)?);
        let mut ring = Ring::new(&self.device, DEADLINE)?;
        ring.upload(&stream, buffer.address(), content.len(), |at, room| room.copy_from_slice(&content[at..at + room.len()]))?;
        stream.finish(&event, DEADLINE, "the upload of a frozen tensor")?;
        Ok(buffer)
    }

    pub(crate) fn get(&self, name: &str, bytes: usize) -> Result<Arc<Buffer>, CudaError> {
        let tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        match tensors.get(name) {
            Some(buffer) if buffer.bytes() == bytes => Ok(Arc::clone(buffer)),
            found => Err(mismatch(name, bytes, found.map_or(0, |b| b.bytes()))),
        }
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner).values().map(|b| b.bytes() as u64).sum()
    }
}

fn mismatch(name: &str, want: usize, got: usize) -> CudaError {
    CudaError::Frozen { name: name.to_owned(), want, got }
}
