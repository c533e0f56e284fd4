//! What ops become: launches, matrix products and zeroing, with addresses resolved.
//!
//! Job: hold a command and enqueue it. Refuses to know ops. Invariant: a command that touches a slot gets its address at each run; all others are fixed
//! when the executor is made.
#![allow(unsafe_code)]

use crate::blas::{Blas, Operands, Product};
use crate::driver::{Function, Stream, TensorMap};
use crate::error::CudaError;
use std::ffi::c_void;

/// An address: fixed, or an offset into the slot that a run binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointer {
    /// In the executor's own or in frozen memory.
    At(u64),
    /// Bytes from the slot's start.
    Slot(u64),
}

impl Pointer {
    /// Moved by `bytes`.
    pub fn plus(self, bytes: usize) -> Pointer {
        match self {
            Pointer::At(a) => Pointer::At(a + bytes as u64),
            Pointer::Slot(a) => Pointer::Slot(a + bytes as u64),
        }
    }

    fn resolve(self, slot: u64) -> u64 {
        match self {
            Pointer::At(a) => a,
            Pointer::Slot(offset) => slot + offset,
        }
    }
}

/// One kernel argument.
#[derive(Clone, Copy)]
pub enum Arg {
    /// An address.
    Pointer(Pointer),
    /// `int`.
    Int(i32),
    /// `float`.
    Float(f32),
    /// A tensor map by value.
    Map(TensorMap),
}

/// A kernel launch.
pub struct Launch {
    /// The function.
    pub function: Function,
    /// Its name, for errors.
    pub symbol: String,
    /// Grid.
    pub grid: [u32; 3],
    /// Block.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// Arguments in order.
    pub args: Vec<Arg>,
}

/// A matrix product.
pub struct Gemm {
    /// Its shape.
    pub product: Product,
    /// A.
    pub a: Pointer,
    /// B.
    pub b: Pointer,
    /// D.
    pub d: Pointer,
    /// Bias.
    pub bias: Option<Pointer>,
}

impl Gemm {
    /// Addresses with the slot at `slot`.
    pub fn operands(&self, slot: u64) -> Operands {
        Operands {
            a: self.a.resolve(slot),
            b: self.b.resolve(slot),
            d: self.d.resolve(slot),
            bias: self.bias.map_or(0, |b| b.resolve(slot)),
        }
    }
}

/// What is enqueued.
pub enum Work {
    /// A kernel.
    Launch(Launch),
    /// A matrix product.
    Gemm(Gemm),
    /// Zeroing of bytes.
    Zero {
        /// First byte.
        at: u64,
        /// How many.
        bytes: usize,
    },
}

/// One command and the node of its phase that it belongs to.
pub struct Command {
    /// Index of the node.
    pub node: usize,
    /// What to do.
    pub work: Work,
}

impl Command {
    /// True when it needs a slot's address.
    pub fn touches_slot(&self) -> bool {
        let slot = |p: Pointer| matches!(p, Pointer::Slot(_));
        match &self.work {
            Work::Launch(l) => l.args.iter().any(|a| matches!(a, Arg::Pointer(p) if slot(*p))),
            Work::Gemm(g) => slot(g.a) || slot(g.b) || slot(g.d) || g.bias.is_some_and(slot),
            Work::Zero { .. } => false,
        }
    }

    /// Enqueues it, with the slot at `slot`.
    ///
    /// # Errors
    /// The driver's or cuBLASLt's, with the launch's geometry.
    pub fn enqueue(&self, stream: &Stream, blas: &Blas, slot: u64) -> Result<(), CudaError> {
        match &self.work {
            Work::Launch(launch) => launch.enqueue(stream, slot),
            Work::Gemm(gemm) => blas.enqueue(&gemm.product, gemm.operands(slot), stream),
            // SAFETY: the range is a tensor of the plan, and ops on one stream run in order.
            Work::Zero { at, bytes } => unsafe { stream.zero(*at, *bytes) },
        }
    }
}

impl Launch {
    /// `symbol<<<grid, block, shared>>>`.
    pub fn describe(&self) -> String {
        format!("{}<<<{:?}, {:?}, {} B>>>", self.symbol, self.grid, self.block, self.shared)
    }

    fn enqueue(&self, stream: &Stream, slot: u64) -> Result<(), CudaError> {
        #[repr(C, align(128))]
        #[derive(Clone, Copy)]
        union Bytes {
            address: u64,
            int: i32,
            float: f32,
            map: TensorMap,
        }
        let mut values: Vec<Bytes> = self
            .args
            .iter()
            .map(|arg| match *arg {
                Arg::Pointer(p) => Bytes { address: p.resolve(slot) },
                Arg::Int(int) => Bytes { int },
                Arg::Float(float) => Bytes { float },
                Arg::Map(map) => Bytes { map },
            })
            .collect();
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|v| std::ptr::from_mut(v).cast()).collect();
        // SAFETY: lowering gives each kernel the arguments that its file's header lists, with addresses of tensors of the extents it computed the grid from.
        unsafe { stream.launch(self.function, self.grid, self.block, self.shared, &mut pointers) }.map_err(|e| match e {
            CudaError::Call { what, .. } => CudaError::Call { call: self.describe(), what },
            other => other,
        })
    }
}
