//! The language in which every pass of a target or a drafter is written, and its memory plan.
//!
//! Job: shapes, dtypes, the coarse ops and their contracts ([`op`]), differentiation op by op ([`backward`]),
//! phases that share one tensor table ([`program`]), and the plan that gives every tensor an address and every
//! phase its useful FLOPs and bytes ([`plan`]). Executors in other crates implement [`exec::Executor`].
//!
//! Refuses: devices, files, clocks, threads, random numbers, graph rewriting. An op does here what it says and no more.
//!
//! Invariants: shapes are fixed when a program is built; every op states each tensor it reads, writes or updates
//! exactly once through [`op::Contract::visit`], and the plan, the differentiation and the executors trust only that.

pub mod backward;
pub mod dtype;
pub mod exec;
pub mod op;
pub mod plan;
pub mod program;

pub use dtype::DType;
pub use exec::{ExecError, Executor, Fetch, HostMut, HostRef, SlotArg};
pub use op::{Access, Op};
pub use plan::{Plan, Storage};
pub use program::{PhaseBuilder, PhaseId, Program, Role, Tensor, TensorId};
