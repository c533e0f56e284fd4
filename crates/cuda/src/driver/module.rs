//! Kernel files on a device, their functions, and the tensor maps that some take.
//!
//! Job: load a fatbin, find its functions, describe a tensor to the bulk copy engine. Refuses to launch. Invariant: a function lives no longer than its
//! module's owner keeps the module.
#![allow(unsafe_code)]

use super::{DeviceHandle, check};
use crate::error::CudaError;
use cudarc::driver::sys;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// A loaded kernel file.
pub struct Module {
    device: DeviceHandle,
    raw: sys::CUmodule,
    file: &'static str,
}

// SAFETY: modules belong to the context, which any thread may use.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a fatbin.
    pub fn load(device: &DeviceHandle, file: &'static str, image: &[u8]) -> Result<Module, CudaError> {
        device.bind()?;
        let mut raw = null_mut();
        let _alone = device.alone();
        // SAFETY: the image is a whole fatbin, whose header says its own length.
        let result = unsafe { sys::cuModuleLoadData(&mut raw, image.as_ptr().cast()) };
        check(&format!("cuModuleLoadData({file}, {} bytes)", image.len()), result)?;
        Ok(Module { device: Arc::clone(device), raw, file })
    }

    /// A function by name, allowed `shared` bytes of dynamic shared memory.
    pub fn function(&self, symbol: &str, shared: u32) -> Result<Function, CudaError> {
        self.device.bind()?;
        let _alone = self.device.alone();
        let mut raw = null_mut();
        let name = CString::new(symbol).expect("kernel names hold no zero byte");
        let call = format!("cuModuleGetFunction({}: {symbol})", self.file);
        // SAFETY: the module lives; `name` ends with a zero.
        check(&call, unsafe { sys::cuModuleGetFunction(&mut raw, self.raw, name.as_ptr()) })?;
        if shared > 48 << 10 {
            let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found.
            check(&format!("cuFuncSetAttribute({symbol}, {shared} bytes of shared memory)"), unsafe {
                sys::cuFuncSetAttribute(raw, which, shared as i32)
            })?;
        }
        Ok(Function { raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            let _alone = self.device.alone();
            // SAFETY: loaded by `load` and unloaded once.
            unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

/// A kernel; valid while its module is.
#[derive(Clone, Copy)]
pub struct Function {
    pub(super) raw: sys::CUfunction,
}

/// A tensor map as kernels take it by value.
#[derive(Clone, Copy)]
pub struct TensorMap(#[expect(dead_code, reason = "the driver reads it through the launch argument's address")] sys::CUtensorMap);

impl TensorMap {
    /// Rows of bf16 `[rows, heads·dim]` as {dim, heads, rows}, read in boxes {64, box_heads, box_rows} with 128-byte swizzle, zero outside.
    pub fn new(address: u64, [dim, heads, rows]: [usize; 3], [box_heads, box_rows]: [usize; 2]) -> Result<TensorMap, CudaError> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let extents = [dim as u64, heads as u64, rows as u64];
        let strides = [2 * dim as u64, 2 * (heads * dim) as u64];
        let (boxes, steps) = ([64u32, box_heads as u32, box_rows as u32], [1u32; 3]);
        // SAFETY: rank 3 matches the arrays; the address is stored, not followed.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                3,
                address as *mut c_void,
                extents.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(&format!("cuTensorMapEncodeTiled({extents:?}, box {boxes:?})"), result)?;
        Ok(TensorMap(map))
    }
}
