//! The CUDA driver, as much of it as is needed: device, memory, streams, events, modules, launches, graphs.
//!
//! Job: checked calls with owners that free what they hold. Refuses the runtime API, managed memory and stream-ordered allocation (arenas are plain
//! allocations that peers can map). Invariants: every call's result is looked at; streams and graphs stay on the thread that made them, by type; waits
//! poll an event against a deadline; while one thread captures, no other thread allocates, frees, loads or makes library handles on that device.
#![allow(unsafe_code)]

mod module;

pub use module::{Function, Module, TensorMap};

use crate::error::CudaError;
use crate::loader::Libraries;
use cudarc::driver::sys::{self, CUresult};
use parking_lot::{ReentrantMutex, ReentrantMutexGuard};
use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Turns a driver result into an error that carries the driver's words.
fn check(call: &str, result: CUresult) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let word = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: both functions store a pointer to a static string, or null for an unknown code.
        unsafe {
            get(result, &mut text);
            if text.is_null() { format!("{result:?}") } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        }
    };
    Err(CudaError::Call {
        call: call.to_owned(),
        what: format!("{}: {}", word(sys::cuGetErrorName), word(sys::cuGetErrorString)),
    })
}

/// A GPU with its primary context.
pub struct Device {
    ordinal: u32,
    raw: sys::CUdevice,
    context: sys::CUcontext,
    /// What the driver calls it.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The driver's version, 1000·major + 10·minor of the CUDA release it supports.
    pub driver_version: i32,
    allocated: AtomicU64,
    allocations: AtomicU64,
    setup: ReentrantMutex<()>,
}

/// Shared ownership of a device.
pub type DeviceHandle = Arc<Device>;

// SAFETY: contexts may be used from any thread that makes them current, which every method here does first.
unsafe impl Send for Device {}
// SAFETY: as above; the driver serialises calls on a context itself.
unsafe impl Sync for Device {}

/// Device memory as the driver counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes free.
    pub free: u64,
    /// Bytes of the device.
    pub total: u64,
}

impl Device {
    /// Number of GPUs the driver shows.
    ///
    /// # Errors
    /// The driver's.
    pub fn count(_libraries: &Libraries) -> Result<u32, CudaError> {
        let mut count = 0;
        // SAFETY: `count` lives through the call; cuInit may be called any number of times.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
        }
        Ok(count as u32)
    }

    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// [`CudaError::Missing`] when there is no such GPU, or the driver's error.
    pub fn open(libraries: &Libraries, ordinal: u32) -> Result<DeviceHandle, CudaError> {
        let count = Device::count(libraries)?;
        if ordinal >= count {
            return Err(CudaError::Missing {
                what: format!("GPU {ordinal} does not exist: the driver shows {count}"),
                todo: "name a GPU that `nvidia-smi -L` lists, and look at CUDA_VISIBLE_DEVICES".into(),
            });
        }
        let (mut raw, mut context, mut driver_version) = (0, null_mut(), 0);
        let mut name = [0 as std::ffi::c_char; 256];
        // SAFETY: every pointer lives through its call, and `name`'s length is given.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&mut raw, ordinal as i32))?;
            check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, raw))?;
            check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut driver_version))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut context, raw))?;
        }
        use sys::CUdevice_attribute_enum as A;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: `value` lives through the call.
            check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, raw) }).map(|()| value)
        };
        // SAFETY: the driver ends the name with a zero inside the buffer.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let capability = (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability.0 < 8 {
            return Err(CudaError::Missing {
                what: format!(
                    "GPU {ordinal} ({name}) has compute capability {}.{}: its tensor cores know no bf16",
                    capability.0, capability.1
                ),
                todo: "use a GPU of compute capability 8.0 or newer".into(),
            });
        }
        let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let (allocated, allocations) = (AtomicU64::new(0), AtomicU64::new(0));
        let setup = ReentrantMutex::new(());
        Ok(Arc::new(Device {
            ordinal,
            raw,
            context,
            name,
            capability,
            multiprocessors,
            driver_version,
            allocated,
            allocations,
            setup,
        }))
    }

    /// The device for one thread, for what must not meet a capture: allocation, freeing, loading code, library handles, and captures themselves.
    ///
    /// Whatever waits for a whole context is invalid while one of its streams is captured, and breaks that capture, in every capture mode (CUDA
    /// programming guide, "Stream capture: prohibited and unhandled operations"). Freeing memory, loading code at first use and cuBLASLt's handles all may wait.
    /// Launches, copies and replays need no such care. The same thread may ask again.
    pub(crate) fn alone(&self) -> ReentrantMutexGuard<'_, ()> {
        self.setup.lock()
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// True where kernels for sm_90a run.
    pub fn is_hopper(&self) -> bool {
        self.capability == (9, 0)
    }

    /// Bytes that this process holds on the device through this crate.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Device allocations ever made through this crate: constant after the gate.
    pub fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    /// Makes the context current on the calling thread.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained until this value drops.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Memory as the driver counts it, all processes included.
    ///
    /// # Errors
    /// The driver's.
    pub fn memory(&self) -> Result<MemoryUse, CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both integers live through the call.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(MemoryUse { free: free as u64, total: total as u64 })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: matches the retain in `open`; a failure at this point has no one to be told to.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.raw) };
    }
}

/// Device memory.
pub struct Buffer {
    device: DeviceHandle,
    address: u64,
    bytes: usize,
}

impl Buffer {
    /// Allocates `bytes` (none for 0) for `what`.
    pub fn new(device: &DeviceHandle, bytes: usize, what: &str) -> Result<Buffer, CudaError> {
        device.bind()?;
        let mut address = 0;
        if bytes > 0 {
            let _alone = device.alone();
            // SAFETY: `address` lives through the call.
            let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
            if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                let MemoryUse { free, total } = device.memory()?;
                return Err(CudaError::Memory { bytes: bytes as u64, what: what.to_owned(), free, total });
            }
            check("cuMemAlloc", result)?;
            device.allocated.fetch_add(bytes as u64, Ordering::Relaxed);
            device.allocations.fetch_add(1, Ordering::Relaxed);
        }
        Ok(Buffer { device: Arc::clone(device), address, bytes })
    }

    /// First byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device it lies on.
    pub fn device(&self) -> &DeviceHandle {
        &self.device
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.bytes > 0 && self.device.bind().is_ok() {
            let _alone = self.device.alone();
            // SAFETY: allocated by `new` and freed once; cuMemFree waits for work that uses it.
            unsafe { sys::cuMemFree_v2(self.address) };
            self.device.allocated.fetch_sub(self.bytes as u64, Ordering::Relaxed);
        }
    }
}

/// Page-locked host memory.
pub struct Pinned {
    device: DeviceHandle,
    data: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates `bytes` > 0.
    pub fn new(device: &DeviceHandle, bytes: usize) -> Result<Pinned, CudaError> {
        device.bind()?;
        let mut data: *mut c_void = null_mut();
        let _alone = device.alone();
        // SAFETY: `data` lives through the call. Flag 1: pinned for all contexts.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut data, bytes, 1) })?;
        // SAFETY: the driver gave `bytes` writable bytes.
        unsafe { std::ptr::write_bytes(data.cast::<u8>(), 0, bytes) };
        Ok(Pinned { device: Arc::clone(device), data: data.cast(), bytes })
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Its content. The caller has waited for every copy from the device into it.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: initialised at allocation, owned by this value.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// Its content, to be written. The caller has waited for every copy out of it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            let _alone = self.device.alone();
            // SAFETY: allocated by `new` and freed once.
            unsafe { sys::cuMemFreeHost(self.data.cast()) };
        }
    }
}

/// A point in a stream.
pub struct Event {
    device: DeviceHandle,
    raw: sys::CUevent,
}

// SAFETY: events may be recorded, waited for and queried from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A fresh event, which counts as reached until it is recorded.
    pub fn new(device: &DeviceHandle, timing: bool) -> Result<Event, CudaError> {
        device.bind()?;
        let mut raw = null_mut();
        // SAFETY: `raw` lives through the call. Flag 2: no timing.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, if timing { 0 } else { 2 }) })?;
        Ok(Event { device: Arc::clone(device), raw })
    }

    /// Whether everything before its last record has finished.
    pub fn reached(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Polls until the event is reached: spinning at first, because decoding waits for microseconds, then sleeping.
    pub fn wait(&self, deadline: Duration, what: &str) -> Result<(), CudaError> {
        let start = Instant::now();
        while !self.reached()? {
            let waited = start.elapsed();
            if waited > deadline {
                return Err(CudaError::Deadline { what: what.to_owned(), seconds: deadline.as_secs() });
            }
            if waited > Duration::from_millis(2) {
                std::thread::sleep(Duration::from_micros(50));
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    /// Milliseconds from `start` to this event; both were recorded with timing and are reached.
    pub fn ms_since(&self, start: &Event) -> Result<f32, CudaError> {
        let mut ms = 0.0;
        // SAFETY: both events live.
        check("cuEventElapsedTime", unsafe { sys::cuEventElapsedTime_v2(&mut ms, start.raw, self.raw) })?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: created by `new` and destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

/// A stream of the thread that made it.
pub struct Stream {
    device: DeviceHandle,
    raw: sys::CUstream,
    _thread: PhantomData<*const ()>,
}

impl Stream {
    /// A stream that does not wait for the legacy default stream.
    pub fn new(device: &DeviceHandle) -> Result<Stream, CudaError> {
        device.bind()?;
        let mut raw = null_mut();
        let _alone = device.alone();
        // SAFETY: `raw` lives through the call. Flag 1: non-blocking.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, 1) })?;
        Ok(Stream { device: Arc::clone(device), raw, _thread: PhantomData })
    }

    /// The device.
    pub fn device(&self) -> &DeviceHandle {
        &self.device
    }

    /// The driver's handle, for cuBLASLt.
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Records `event` behind everything enqueued so far.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live and belong to one context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, self.raw) })
    }

    /// Work enqueued from now on waits for `event`.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// Enqueues a copy of `from` to device memory.
    ///
    /// # Safety
    /// `from` is pinned and stays unchanged until the copy has run; `to` is the first of that many bytes of live device memory.
    pub unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.raw) })
    }

    /// Enqueues a copy of device memory to `to`.
    ///
    /// # Safety
    /// `to` is pinned and not touched until the copy has run; `from` is the first of that many bytes of live device memory.
    pub unsafe fn download(&self, to: &mut [u8], from: u64) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.raw) })
    }

    /// Enqueues zeroing of device memory.
    ///
    /// # Safety
    /// `bytes` bytes from `at` are live device memory that nothing else uses meanwhile.
    pub unsafe fn zero(&self, at: u64, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.raw) })
    }

    /// Enqueues a kernel. `args` points at each argument's bytes.
    ///
    /// # Safety
    /// The arguments are what the kernel declares, and every address among them is live memory of the extent that the kernel touches.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        args: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        let result =
            unsafe { sys::cuLaunchKernel(function.raw, gx, gy, gz, bx, by, bz, shared, self.raw, args.as_mut_ptr(), null_mut()) };
        check("cuLaunchKernel", result)
    }

    /// Captures what `enqueue` puts on this stream. Nothing of it runs.
    pub fn capture(&self, enqueue: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let _alone = self.device.alone();
        // SAFETY: the stream lives and captures nothing yet.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(self.raw, sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        })?;
        let enqueued = enqueue();
        let mut graph = null_mut();
        // SAFETY: ends the capture that began above, also after an error inside it.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.raw, &mut graph) });
        enqueued?;
        ended?;
        let mut raw = null_mut();
        // SAFETY: `graph` is the captured graph; the executable copy does not need it any more afterwards.
        let made = unsafe {
            let made = check("cuGraphInstantiate", sys::cuGraphInstantiateWithFlags(&mut raw, graph, 0));
            sys::cuGraphDestroy(graph);
            made
        };
        made?;
        let graph = Graph { device: Arc::clone(&self.device), raw, _thread: PhantomData };
        // SAFETY: both live.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(graph.raw, self.raw) })?;
        Ok(graph)
    }

    /// Enqueues a captured graph.
    pub fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: both live; the graph's addresses belong to buffers that outlive it (the executor owns both).
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.raw, self.raw) })
    }

    /// Waits until everything enqueued has run.
    pub fn finish(&self, event: &Event, deadline: Duration, what: &str) -> Result<(), CudaError> {
        self.record(event)?;
        event.wait(deadline, what)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            let _alone = self.device.alone();
            // SAFETY: created by `new` and destroyed once; work on it still finishes.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// An executable graph of the thread that captured it.
pub struct Graph {
    device: DeviceHandle,
    raw: sys::CUgraphExec,
    _thread: PhantomData<*const ()>,
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            let _alone = self.device.alone();
            // SAFETY: instantiated by `capture` and destroyed once.
            unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}
