//! The device of these tests, and executors of the op suite's cases on it.

use drafthorse_cuda::{CudaError, CudaExecutor, Device, FrozenStore, Libraries, Options, SearchPaths};
use drafthorse_testkit::device_gate::require_device;
use drafthorse_testkit::op_suite::{Case, FrozenData};
use std::sync::Arc;

/// GPU 0 with its kernels, or `None` after a loud line.
pub fn store(test: &str) -> Option<Arc<FrozenStore>> {
    let open = || -> Result<Arc<FrozenStore>, CudaError> {
        let libraries = Libraries::load(&SearchPaths::usual(|name| std::env::var_os(name)))?;
        Ok(Arc::new(FrozenStore::new(Device::open(&libraries, 0)?)?))
    };
    require_device(test, open())
}

/// The defaults; DRAFTHORSE_MMA_ONLY=1 keeps wgmma kernels out.
pub fn options() -> Options {
    let hopper = std::env::var("DRAFTHORSE_MMA_ONLY").is_ok_and(|v| v == "1");
    Options { hopper: !hopper, ..Options::default() }
}

/// An executor of a case, with the case's frozen tensors.
pub fn executor(case: &Case, store: &FrozenStore, options: &Options) -> Result<CudaExecutor, CudaError> {
    let frozen = case.frozen();
    let content = frozen.iter().map(|(&t, FrozenData::F32(data))| (t, data.as_slice()));
    let own = Arc::new(store.sibling_with(&case.program, content)?);
    CudaExecutor::new(Arc::clone(&case.program), &own, options.clone())
}
