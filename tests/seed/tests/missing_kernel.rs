//! A kernel was missing and a slow path took over.
//!
//! Held to: a program with a shape that no kernel takes is refused before anything runs, naming op and limit; and a build without kernels gives no
//! executor at all.

use drafthorse_cuda::{CudaError, Options, images};
use drafthorse_graph::DType;
use drafthorse_seed::gpu::{executor, store};
use drafthorse_testkit::op_suite::{MiniDrafterOptions, mini_drafter};

#[test]
fn a_shape_without_a_kernel_is_refused_by_name() {
    let Some(store) = store("missing_kernel") else { return };
    assert!(!images().is_empty(), "a build without kernels opened a store");
    let narrow =
        mini_drafter(MiniDrafterOptions { act: DType::BF16, layers: 2, window: None, recompute: false, head_dim: None }).case;
    match executor(&narrow, &store, &Options::default()) {
        Err(CudaError::Unsupported { op, why }) => {
            assert!(op.contains("Attention") && why.contains("64, 128 and 256"), "{op}: {why}")
        }
        other => panic!("heads of 4 elements were not refused: {:?}", other.err()),
    }
}
