//! Matrix products by cuBLASLt, with algorithms chosen once.
//!
//! Job: row-major products as cuBLASLt's column-major ones, cached descriptors, and a table of the fastest algorithm for each product on each kind of
//! machine. Refuses to choose an algorithm while training: products that the table lacks are timed in [`Blas::choose`], before the gate. Invariants: fp32
//! accumulation; no reduction in bf16; one product, one algorithm, so that a result does not depend on which thread or device computed it.
#![allow(unsafe_code)]

use crate::driver::{Buffer, DeviceHandle, Event, Stream};
use crate::error::CudaError;
use cudarc::cublaslt::sys::{self, cublasStatus_t};
use drafthorse_graph::DType;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::fmt::Write as _;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Scratch that algorithms may use: what cuBLAS itself takes on Hopper.
pub const WORKSPACE_BYTES: usize = 32 << 20;
/// Candidates that are timed for one product.
const CANDIDATES: usize = 16;

fn check(call: &str, status: cublasStatus_t) -> Result<(), CudaError> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Call { call: call.to_owned(), what: format!("{status:?}") })
}

/// A product as cuBLASLt sees it: `D[m, n] = op(A) op(B) (+ D)`, column-major; A and B are bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of D.
    pub m: u64,
    /// Columns of D.
    pub n: u64,
    /// Inner extent.
    pub k: u64,
    /// A is stored transposed (`[k, m]`).
    pub transposed_a: bool,
    /// B is stored transposed (`[n, k]`).
    pub transposed_b: bool,
    /// Type of D.
    pub out: DType,
    /// D is added to.
    pub accumulate: bool,
    /// A bf16 bias of m elements is added to each column.
    pub bias: bool,
    /// Alignment in bytes, at most 256, of A, B and D.
    pub align: [u32; 3],
}

impl Product {
    /// `y[t, n] = x[t, k] w[n, k]ᵀ` row-major, as (product, A = w, B = x).
    pub fn x_wt(t: usize, n: usize, k: usize, out: DType) -> Product {
        Product::of(n, t, k, true, false, out)
    }

    /// `dx[t, k] = dy[t, n] w[n, k]` row-major, as (product, A = w, B = dy).
    pub fn dy_w(t: usize, n: usize, k: usize, out: DType) -> Product {
        Product::of(k, t, n, false, false, out)
    }

    /// `dw[n, k] += dy[t, n]ᵀ x[t, k]` row-major, as (product, A = x, B = dy).
    pub fn dyt_x(t: usize, n: usize, k: usize) -> Product {
        Product { accumulate: true, ..Product::of(k, n, t, false, true, DType::F32) }
    }

    fn of(m: usize, n: usize, k: usize, transposed_a: bool, transposed_b: bool, out: DType) -> Product {
        let (m, n, k) = (m as u64, n as u64, k as u64);
        Product { m, n, k, transposed_a, transposed_b, out, accumulate: false, bias: false, align: [256; 3] }
    }

    /// The product with the alignment of its operands' addresses.
    pub fn aligned(self, addresses: [u64; 3]) -> Product {
        Product { align: addresses.map(|a| if a == 0 { 256 } else { 1 << a.trailing_zeros().min(8) }), ..self }
    }

    fn key(&self) -> String {
        let letter = |t: bool| if t { 't' } else { 'n' };
        let mut key = format!("{}{} {}x{}x{}", letter(self.transposed_a), letter(self.transposed_b), self.m, self.n, self.k);
        let out = if self.out == DType::F32 { "f32" } else { "bf16" };
        write!(key, " {out}{}{}", if self.accumulate { " +=" } else { "" }, if self.bias { " bias" } else { "" })
            .expect("a String takes every write");
        if self.align != [256; 3] {
            write!(key, " align {:?}", self.align).expect("a String takes every write");
        }
        key
    }
}

/// An algorithm and what it took.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    algorithm: [u64; 8],
    workspace: u64,
    us: f32,
}

/// Is told the line of a product that was timed.
type Tell = dyn Fn(&str) + Send + Sync;

/// The fastest algorithm of each product, by machine: GPU, driver and library. Shared by all executors of a process, and kept by whoever wants two runs
/// to agree to the bit: what is timed twice may be chosen differently.
#[derive(Default)]
pub struct AlgorithmTable {
    // Held while a product is timed, so that one thread times at a time and nobody times what another has.
    choices: Mutex<BTreeMap<String, Choice>>,
    tell: Option<Box<Tell>>,
}

impl AlgorithmTable {
    /// One line per product: key, algorithm, workspace bytes, microseconds when it was chosen.
    pub fn to_text(&self) -> String {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|(key, c)| choice_line(key, c)).collect()
    }

    /// Takes what [`AlgorithmTable::to_text`] wrote, line by line or whole; an entry that comes later replaces an earlier one of its key. Entries of other
    /// machines are kept and never used here.
    ///
    /// # Errors
    /// The first line that is not of that form; nothing is taken then.
    pub fn adopt(&self, text: &str) -> Result<(), String> {
        let mut parsed = Vec::new();
        for (i, line) in text.lines().enumerate() {
            parsed.push(parse_choice(line).ok_or_else(|| format!("line {}: `{line}` is no algorithm entry", i + 1))?);
        }
        self.choices.lock().unwrap_or_else(PoisonError::into_inner).extend(parsed);
        Ok(())
    }

    /// The table, with `tell` called with the line of each product that is timed from now on.
    pub fn telling(self, tell: impl Fn(&str) + Send + Sync + 'static) -> AlgorithmTable {
        AlgorithmTable { tell: Some(Box::new(tell)), ..self }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// True when nothing was chosen yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn choice_line(key: &str, c: &Choice) -> String {
    let words: String = c.algorithm.iter().map(|w| format!("{w:016x}")).collect();
    format!("{key}\t{words}\t{}\t{}\n", c.workspace, c.us)
}

fn parse_choice(line: &str) -> Option<(String, Choice)> {
    let mut fields = line.split('\t');
    let (key, words) = (fields.next()?, fields.next()?);
    let (workspace, us) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    if words.len() != 128 || !words.is_ascii() || fields.next().is_some() {
        return None;
    }
    let mut algorithm = [0; 8];
    for (i, word) in algorithm.iter_mut().enumerate() {
        *word = u64::from_str_radix(&words[16 * i..16 * (i + 1)], 16).ok()?;
    }
    Some((key.to_owned(), Choice { algorithm, workspace, us }))
}

/// Addresses of one product: A, B, D and the bias (0 without).
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// A.
    pub a: u64,
    /// B.
    pub b: u64,
    /// D, which is also C.
    pub d: u64,
    /// Bias.
    pub bias: u64,
}

/// A product's descriptors with its algorithm.
struct Ready {
    descriptors: Descriptors,
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

/// cuBLASLt on one stream.
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    machine: String,
    workspace: Buffer,
    ready: HashMap<Product, Ready>,
    /// Products that were timed by this executor.
    pub timed: usize,
}

impl Blas {
    /// A handle with its workspace.
    pub fn new(device: &DeviceHandle) -> Result<Blas, CudaError> {
        device.bind()?;
        let mut handle = null_mut();
        let _alone = device.alone();
        // SAFETY: `handle` lives through the call; the context is current.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&mut handle) })?;
        // SAFETY: takes nothing.
        let version = unsafe { sys::cublasLtGetVersion() };
        let machine = format!("{} | driver {} | cublasLt {version}", device.name, device.driver_version);
        let workspace = Buffer::new(device, WORKSPACE_BYTES, "the matrix products' workspace")?;
        Ok(Blas { handle, machine, workspace, ready: HashMap::new(), timed: 0 })
    }

    /// Finds the algorithm of `product` in the table, or times the candidates on `at` and puts the fastest there. D's content is destroyed when timed.
    pub fn choose(
        &mut self,
        product: Product,
        at: Operands,
        stream: &Stream,
        table: &AlgorithmTable,
        deadline: Duration,
    ) -> Result<(), CudaError> {
        if self.ready.contains_key(&product) {
            return Ok(());
        }
        let descriptors = Descriptors::new(&product)?;
        let key = format!("{} | {}", self.machine, product.key());
        let mut choices = table.choices.lock().unwrap_or_else(PoisonError::into_inner);
        let choice = match choices.get(&key) {
            Some(choice) => *choice,
            None => {
                let choice = self.time(&product, &descriptors, at, stream, deadline)?;
                if let Some(tell) = &table.tell {
                    tell(&choice_line(&key, &choice));
                }
                choices.insert(key, choice);
                self.timed += 1;
                choice
            }
        };
        drop(choices);
        let algorithm = sys::cublasLtMatmulAlgo_t { data: choice.algorithm };
        self.ready.insert(product, Ready { descriptors, algorithm, workspace: choice.workspace as usize });
        Ok(())
    }

    fn time(
        &self,
        product: &Product,
        descriptors: &Descriptors,
        at: Operands,
        stream: &Stream,
        deadline: Duration,
    ) -> Result<Choice, CudaError> {
        let candidates = descriptors.candidates(self.handle, product)?;
        let (start, end) = (Event::new(stream.device(), true)?, Event::new(stream.device(), true)?);
        let mut best: Option<Choice> = None;
        for candidate in candidates {
            let run = || self.run(product, descriptors, &candidate.algo, candidate.workspaceSize, at, stream);
            // The heuristic may offer what this device then refuses; such a candidate is no choice.
            if run().is_err() {
                continue;
            }
            const REPEATS: usize = 3;
            stream.record(&start)?;
            for _ in 0..REPEATS {
                run()?;
            }
            stream.finish(&end, deadline, "a matrix product that is timed")?;
            let us = end.ms_since(&start)? * 1e3 / REPEATS as f32;
            if best.is_none_or(|b| us < b.us) {
                best = Some(Choice { algorithm: candidate.algo.data, workspace: candidate.workspaceSize as u64, us });
            }
        }
        best.ok_or_else(|| CudaError::Unsupported {
            op: format!("matrix product {}", product.key()),
            why: "cuBLASLt offers no algorithm that runs here".into(),
        })
    }

    /// Enqueues a product that was chosen before.
    ///
    /// # Errors
    /// [`CudaError::Call`] when it was not, or the library's error.
    pub fn enqueue(&self, product: &Product, at: Operands, stream: &Stream) -> Result<(), CudaError> {
        let Some(ready) = self.ready.get(product) else {
            let call = format!("matrix product {}", product.key());
            return Err(CudaError::Call { call, what: "no algorithm was chosen for it: the executor was not prepared".into() });
        };
        self.run(product, &ready.descriptors, &ready.algorithm, ready.workspace, at, stream)
    }

    fn run(
        &self,
        product: &Product,
        d: &Descriptors,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        workspace: usize,
        at: Operands,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        if product.bias {
            d.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at.bias)?;
        }
        let (alpha, beta) = (1.0f32, if product.accumulate { 1.0f32 } else { 0.0 });
        let pointer = |address: u64| address as *mut c_void;
        // SAFETY: descriptors live; the operands' extents were checked when the op was lowered; alpha and beta are read before the call returns (host
        // pointer mode); the workspace is at least as large as the algorithm was offered.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                d.product,
                (&raw const alpha).cast(),
                pointer(at.a),
                d.a,
                pointer(at.b),
                d.b,
                (&raw const beta).cast(),
                pointer(at.d),
                d.d,
                pointer(at.d),
                d.d,
                algorithm,
                pointer(self.workspace.address()),
                workspace,
                stream.raw().cast(),
            )
        };
        check("cublasLtMatmul", status).map_err(|e| match e {
            CudaError::Call { call, what } => CudaError::Call { call: format!("{call}({})", product.key()), what },
            other => other,
        })
    }

    /// Bytes of the workspace.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.bytes()
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.ready.clear();
        let _alone = self.workspace.device().alone();
        // SAFETY: created by `new` and destroyed once, after its descriptors.
        unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

/// cuBLASLt's description of one product.
struct Descriptors {
    product: sys::cublasLtMatmulDesc_t,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    d: sys::cublasLtMatrixLayout_t,
}

impl Descriptors {
    fn new(p: &Product) -> Result<Descriptors, CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as A;
        use sys::cudaDataType_t as T;
        let mut made = Descriptors { product: null_mut(), a: null_mut(), b: null_mut(), d: null_mut() };
        let out = if p.out == DType::F32 { T::CUDA_R_32F } else { T::CUDA_R_16BF };
        let stored = |rows, cols, transposed| if transposed { (cols, rows) } else { (rows, cols) };
        let (a, b) = (stored(p.m, p.k, p.transposed_a), stored(p.k, p.n, p.transposed_b));
        // SAFETY: every pointer is a field of `made`, whose drop destroys what was created.
        unsafe {
            check(
                "cublasLtMatmulDescCreate",
                sys::cublasLtMatmulDescCreate(&mut made.product, sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, T::CUDA_R_32F),
            )?;
            for (layout, dtype, (rows, cols)) in
                [(&mut made.a, T::CUDA_R_16BF, a), (&mut made.b, T::CUDA_R_16BF, b), (&mut made.d, out, (p.m, p.n))]
            {
                check("cublasLtMatrixLayoutCreate", sys::cublasLtMatrixLayoutCreate(layout, dtype, rows, cols, rows as i64))?;
            }
        }
        let operation = |t| i32::from(t);
        made.set(A::CUBLASLT_MATMUL_DESC_TRANSA, &operation(p.transposed_a))?;
        made.set(A::CUBLASLT_MATMUL_DESC_TRANSB, &operation(p.transposed_b))?;
        if p.bias {
            made.set(A::CUBLASLT_MATMUL_DESC_EPILOGUE, &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
            made.set(A::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &T::CUDA_R_16BF)?;
        }
        Ok(made)
    }

    fn set<T>(&self, which: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CudaError> {
        // SAFETY: the descriptor lives; the library copies the value, whose size is given.
        let status =
            unsafe { sys::cublasLtMatmulDescSetAttribute(self.product, which, std::ptr::from_ref(value).cast(), size_of::<T>()) };
        check("cublasLtMatmulDescSetAttribute", status)
    }

    fn candidates(
        &self,
        handle: sys::cublasLtHandle_t,
        p: &Product,
    ) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>, CudaError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        let mut preference = null_mut();
        // SAFETY: `preference` lives through the call.
        check("cublasLtMatmulPreferenceCreate", unsafe { sys::cublasLtMatmulPreferenceCreate(&mut preference) })?;
        let set = |which, value: *const c_void, bytes| {
            // SAFETY: the preference lives; `value` points at `bytes` bytes.
            check("cublasLtMatmulPreferenceSetAttribute", unsafe {
                sys::cublasLtMatmulPreferenceSetAttribute(preference, which, value, bytes)
            })
        };
        // Partial sums in fp32 or none: sums in the output's bf16 would round between parts.
        let reduction = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let [a, b, d] = p.align;
        let mut found = vec![
            sys::cublasLtMatmulHeuristicResult_t {
                algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
                workspaceSize: 0,
                state: cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
                wavesCount: 0.0,
                reserved: [0; 4],
            };
            CANDIDATES
        ];
        let mut count = 0;
        let result = (|| {
            set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const WORKSPACE).cast(), size_of::<usize>())?;
            set(P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const reduction).cast(), 4)?;
            set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (&raw const a).cast(), 4)?;
            set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (&raw const b).cast(), 4)?;
            set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (&raw const d).cast(), 4)?;
            set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (&raw const d).cast(), 4)?;
            // SAFETY: descriptors and preference live; `found` has room for the number asked for.
            let status = unsafe {
                let room = found.as_mut_ptr();
                sys::cublasLtMatmulAlgoGetHeuristic(
                    handle,
                    self.product,
                    self.a,
                    self.b,
                    self.d,
                    self.d,
                    preference,
                    CANDIDATES as i32,
                    room,
                    &mut count,
                )
            };
            check(&format!("cublasLtMatmulAlgoGetHeuristic({})", p.key()), status)
        })();
        // SAFETY: created above and destroyed once.
        unsafe { sys::cublasLtMatmulPreferenceDestroy(preference) };
        result?;
        found.truncate(count as usize);
        found.retain(|f| f.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS && f.workspaceSize <= WORKSPACE_BYTES);
        Ok(found)
    }
}

static WORKSPACE: usize = WORKSPACE_BYTES;

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: each was created once, or is null, which is skipped.
        unsafe {
            for layout in [self.a, self.b, self.d] {
                if !layout.is_null() {
                    sys::cublasLtMatrixLayoutDestroy(layout);
                }
            }
            if !self.product.is_null() {
                sys::cublasLtMatmulDescDestroy(self.product);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_survives_its_text() {
        let table = AlgorithmTable::default();
        let product = Product { bias: true, align: [16, 256, 2], ..Product::x_wt(5, 7, 13, DType::BF16) };
        let choice = Choice { algorithm: [1, u64::MAX, 3, 4, 5, 6, 7, 1 << 63], workspace: 77, us: 12.5 };
        table.choices.lock().unwrap().insert(format!("GPU | driver 13000 | cublasLt 130002 | {}", product.key()), choice);
        let text = table.to_text();
        let back = AlgorithmTable::default();
        back.adopt(&text).unwrap();
        assert_eq!(*back.choices.lock().unwrap(), *table.choices.lock().unwrap());
        assert!(back.adopt(&text.replace("77", "many")).unwrap_err().contains("line 1"));
        assert!(back.adopt(&text[..60]).is_err());
    }

    #[test]
    fn keys_tell_products_apart() {
        let base = Product::x_wt(64, 32, 16, DType::BF16);
        let others = [
            Product::dy_w(64, 32, 16, DType::BF16),
            Product::dyt_x(64, 32, 16),
            Product { out: DType::F32, ..base },
            Product { bias: true, ..base },
            Product { accumulate: true, ..base },
            base.aligned([256, 256, 14]),
            Product::x_wt(64, 16, 32, DType::BF16),
        ];
        let mut keys: Vec<String> = others.iter().chain([&base]).map(Product::key).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), others.len() + 1);
        assert_eq!(base.aligned([256, 512, 0]), base, "more than 256 bytes, or no operand, is no difference");
    }
}
