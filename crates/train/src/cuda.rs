//! The CUDA backend: GPUs, what their executors share, and target weights on the way to them.
//!
//! Job: [`Backend`] over `drafthorse-cuda`. Refuses to read the environment (library folders come from the caller). Invariants: each GPU holds one copy of
//! every frozen tensor, whoever asks first loads it; all executors of a process share one table of algorithms.

use crate::frozen::{Backend, FrozenError, FrozenSource};
use drafthorse_cuda::{CudaError, CudaExecutor, Device, FrozenStore, Libraries, Options};
use drafthorse_graph::{DType, Program, Role};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use drafthorse_cuda::{AlgorithmTable, SearchPaths};

/// All GPUs of this machine.
pub struct CudaBackend {
    libraries: Libraries,
    stores: Mutex<HashMap<u32, Arc<FrozenStore>>>,
    options: Options,
}

impl From<CudaError> for FrozenError {
    fn from(error: CudaError) -> FrozenError {
        match error {
            CudaError::Missing { what, todo } => FrozenError::Missing { what, todo },
            CudaError::Unsupported { op, why } => FrozenError::Missing {
                what: format!("no CUDA kernel for {op}: {why}"),
                todo: "set pipeline.device=cpu, or change the shape".into(),
            },
            other => FrozenError::Exec(other.into()),
        }
    }
}

impl CudaBackend {
    /// Loads the driver and cuBLASLt. `algorithms` is the table of an earlier run, or empty; `deadline` bounds each wait for a device.
    ///
    /// # Errors
    /// [`FrozenError::Missing`], naming what is missing and how to get it.
    pub fn new(paths: &SearchPaths, algorithms: AlgorithmTable, deadline: Duration) -> Result<CudaBackend, FrozenError> {
        let libraries = Libraries::load(paths)?;
        let options = Options { algorithms: Arc::new(algorithms), deadline, ..Options::default() };
        Ok(CudaBackend { libraries, stores: Mutex::default(), options })
    }

    /// What executors of GPU `index` share; opens it at the first call.
    ///
    /// # Errors
    /// When there is no such GPU, or this build has no kernels.
    pub fn store(&self, index: u32) -> Result<Arc<FrozenStore>, FrozenError> {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = stores.get(&index) {
            return Ok(Arc::clone(store));
        }
        let store = Arc::new(FrozenStore::new(Device::open(&self.libraries, index)?)?);
        stores.insert(index, Arc::clone(&store));
        Ok(store)
    }

    /// An executor of a program whose frozen tensors GPU `index` already holds.
    ///
    /// # Errors
    /// When one of them is missing, or the program does not fit.
    pub fn loaded(&self, index: u32, program: Arc<Program>) -> Result<CudaExecutor, FrozenError> {
        Ok(CudaExecutor::new(program, &self.store(index)?, self.options.clone())?)
    }
}

impl Backend for CudaBackend {
    type Exec = CudaExecutor;

    fn act(&self) -> DType {
        DType::BF16
    }

    fn device_name(&self, index: u32) -> String {
        format!("cuda:{index}")
    }

    fn choices(&self) -> Option<String> {
        Some(self.options.algorithms.to_text())
    }

    fn adopt_choices(&self, text: &str) -> Result<(), String> {
        self.options.algorithms.adopt(text)
    }

    fn executor(
        &self,
        index: u32,
        program: Arc<Program>,
        source: &FrozenSource<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CudaExecutor, FrozenError> {
        let store = self.store(index)?;
        let frozen = program.of_role(Role::Frozen);
        let bytes = |t| (program.get(t).len() * program.get(t).dtype.bytes()) as u64;
        let total: u64 = frozen.iter().map(|&t| bytes(t)).sum();
        let mut done = 0;
        for t in frozen {
            let tensor = program.get(t);
            let len = tensor.len();
            if tensor.dtype == DType::BF16 {
                let content = || Ok(source.bf16(&tensor.name, len)?.expect("tables are declared as F32"));
                store.load_bf16::<FrozenError>(&tensor.name, len, content)?;
            } else {
                store.load_f32::<FrozenError>(&tensor.name, len, || source.f32(&tensor.name, len))?;
            }
            done += bytes(t);
            progress(done, total);
        }
        self.loaded(index, program)
    }
}
