//! The three matrix products of a linear layer, on row-major slices.
//!
//! Job: one place that talks to the GEMM library. Refuses shapes that do not fit their slices (the library checks too).
//! Invariant: the order of the sum over the inner extent does not depend on the number of threads. The library's own threading breaks
//! that (its blocking follows the thread count), so outputs are cut into tiles here, by shape alone, and each tile is one task.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

/// Rows of one task's output.
const TILE_ROWS: usize = 256;
/// Columns of one task's output.
const TILE_COLS: usize = 512;

/// A row-major matrix that may be a column range of a wider one.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// First element of the first row.
    pub data: &'a [f32],
    /// Rows.
    pub rows: usize,
    /// Columns used.
    pub cols: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

impl<'a> Rows<'a> {
    /// A contiguous matrix.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Rows { data, rows, cols, stride: cols }
    }

    fn mat(self) -> MatRef<'a, f32> {
        if self.stride == self.cols {
            return MatRef::from_row_major_slice(&self.data[..self.rows * self.cols], self.rows, self.cols);
        }
        let used = if self.rows == 0 { 0 } else { (self.rows - 1) * self.stride + self.cols };
        MatRef::from_row_major_slice_with_stride(&self.data[..used], self.rows, self.cols, self.stride)
    }
}

/// What happens to the old content of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Into {
    /// Overwritten.
    Write,
    /// Added to.
    Add,
}

/// Who computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The whole pool.
    All,
    /// The calling thread: inside a task that is one of many, or that holds thread-local scratch.
    One,
}

fn accum(into: Into) -> Accum {
    match into {
        Into::Write => Accum::Replace,
        Into::Add => Accum::Add,
    }
}

/// `y = x wᵀ`: x `[M, K]`, w `[N, K]`, y `[M, N]` contiguous.
pub fn x_wt(y: &mut [f32], x: Rows<'_>, w: Rows<'_>, into: Into, threads: Threads) {
    product(y, x.mat(), w.mat().transpose(), into, threads);
}

/// `y = x w`: x `[M, N]`, w `[N, K]`, y `[M, K]` contiguous.
pub fn x_w(y: &mut [f32], x: Rows<'_>, w: Rows<'_>, into: Into, threads: Threads) {
    product(y, x.mat(), w.mat(), into, threads);
}

/// `y = xᵀ w`: x `[T, N]`, w `[T, K]`, y `[N, K]` contiguous.
pub fn xt_w(y: &mut [f32], x: Rows<'_>, w: Rows<'_>, into: Into, threads: Threads) {
    product(y, x.mat().transpose(), w.mat(), into, threads);
}

fn product(y: &mut [f32], a: MatRef<'_, f32>, b: MatRef<'_, f32>, into: Into, threads: Threads) {
    let (m, n) = (a.nrows(), b.ncols());
    let y = MatMut::from_row_major_slice_mut(&mut y[..m * n], m, n);
    // Below about a million multiply-adds waking the other threads costs more than it saves.
    if threads == Threads::One || m * n * a.ncols() < 1 << 20 {
        matmul(y, accum(into), a, b, 1.0, Par::Seq);
        return;
    }
    y.par_row_chunks_mut(TILE_ROWS).enumerate().for_each(|(i, band)| {
        band.par_col_chunks_mut(TILE_COLS).enumerate().for_each(|(j, tile)| {
            let (a, b) = (a.subrows(i * TILE_ROWS, tile.nrows()), b.subcols(j * TILE_COLS, tile.ncols()));
            matmul(tile, accum(into), a, b, 1.0, Par::Seq);
        });
    });
}

/// Measured rate in GFLOP/s of `y = x wᵀ` at one shape: the median of `repeats` runs on the current rayon pool, on random-looking data.
pub fn measure_gflops(m: usize, n: usize, k: usize, repeats: usize) -> f64 {
    let fill = |len: usize, step: usize| (0..len).map(|i| ((i * step) % 2003) as f32 / 1001.0 - 1.0).collect::<Vec<f32>>();
    let (x, w, mut y) = (fill(m * k, 7919), fill(n * k, 104_729), vec![0.0f32; m * n]);
    let mut seconds: Vec<f64> = (0..repeats.max(1))
        .map(|_| {
            let start = std::time::Instant::now();
            x_wt(&mut y, Rows::new(&x, m, k), Rows::new(&w, n, k), Into::Write, Threads::All);
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    2.0 * (m * n * k) as f64 / seconds[seconds.len() / 2] / 1e9
}
