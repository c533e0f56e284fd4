//! The embedded kernels and their functions on one device.
//!
//! Job: load a fatbin the first time one of its functions is asked for, and hand out functions by name. Refuses to launch. Invariant: a function that
//! wants more than 48 KiB of dynamic shared memory is told so before its first launch.

use crate::driver::{DeviceHandle, Function, Module};
use crate::error::CudaError;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Name and fatbin of every kernel file in this build; empty when it was built without nvcc.
pub fn images() -> &'static [(&'static str, &'static [u8])] {
    IMAGES
}

/// Modules of one device.
pub struct Kernels {
    device: DeviceHandle,
    modules: Mutex<HashMap<&'static str, Arc<Module>>>,
}

impl Kernels {
    /// No module is loaded yet.
    ///
    /// # Errors
    /// When this build embeds no kernels.
    pub fn new(device: DeviceHandle) -> Result<Kernels, CudaError> {
        if cfg!(no_kernels) || IMAGES.is_empty() {
            return Err(CudaError::Missing {
                what: "this program was built without CUDA kernels, because the build found no nvcc".into(),
                todo: "build again after `cargo xtask cuda-toolkit`, or with NVCC or CUDA_HOME set".into(),
            });
        }
        Ok(Kernels { device, modules: Mutex::default() })
    }

    /// The function `symbol` of kernel file `file`, allowed `shared` bytes of dynamic shared memory.
    ///
    /// # Errors
    /// When the module does not load on this device or lacks the symbol.
    pub fn function(&self, file: &'static str, symbol: &str, shared: u32) -> Result<Function, CudaError> {
        // Before the modules, as in everything that prepares: two locks taken in two orders would wait for each other.
        let _alone = self.device.alone();
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(file) {
            Some(module) => Arc::clone(module),
            None => {
                let (_, image) =
                    IMAGES.iter().find(|(name, _)| *name == file).unwrap_or_else(|| panic!("no kernel file `{file}`"));
                let module = Arc::new(Module::load(&self.device, file, image)?);
                modules.insert(file, Arc::clone(&module));
                module
            }
        };
        module.function(symbol, shared)
    }
}
