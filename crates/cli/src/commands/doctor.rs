//! `drafthorse doctor`: what this machine has, and whether every op on it computes what its contract says.
//!
//! Job: the build, the CPU and each GPU with driver and libraries; every op of the op suite against the naive oracle on this very device; measured ceilings
//! of matrix products and copies. Refuses to repair. Invariants: a device that is asked for and is not there, or an op that disagrees, makes the exit code 5;
//! what cannot be checked is said, never passed over.

use crate::build_id::BUILD;
use crate::device::Device;
use crate::estimate::available_memory;
use crate::exit::{Exit, Failure};
use crate::format::{bytes, seconds};
use crate::screen::Screen;
use clap::Args;
use drafthorse_cpu::{CpuExecutor, FrozenSet, Options};
use drafthorse_graph::DType;
use drafthorse_testkit::op_suite::{self, FrozenData};
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

/// Check this machine: devices, libraries, and every op against its oracle
///
/// Runs the op suite on the CPU and on each GPU, measures what matrix products and copies reach there, and prints what is missing with how to get it.
/// Under a minute. Exit 5 when a device is missing or an op disagrees with its oracle.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse doctor
  drafthorse doctor --device cuda:1
  drafthorse doctor --json | jq '.checks[] | select(.ok | not)'")]
pub struct Doctor {
    /// Check this device alone: cpu, cuda or cuda:N [default: the CPU and all GPUs]
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    device: String,
    what: &'static str,
    ok: bool,
    found: String,
}

/// Everything that was looked at.
#[derive(Debug, Serialize)]
struct Report {
    build_id: &'static str,
    checks: Vec<Check>,
    elapsed_s: f64,
}

struct Clinic {
    screen: Screen,
    checks: Vec<Check>,
}

impl Clinic {
    fn note(&mut self, device: &str, what: &'static str, ok: bool, found: String) -> Result<(), Failure> {
        let mark = if ok { "ok  " } else { "FAIL" };
        self.screen.say(format!("{mark}  {device:<8} {what:<10} {found}"))?;
        self.checks.push(Check { device: device.to_owned(), what, ok, found });
        Ok(())
    }
}

/// Runs the command.
pub fn run(args: &Doctor, screen: Screen) -> Result<Exit, Failure> {
    let begun = Instant::now();
    let mut clinic = Clinic { screen, checks: Vec::new() };
    clinic.note("", "build", true, format!("{} {} ({})", BUILD.build_id, BUILD.target, BUILD.profile))?;
    if !matches!(args.device, Some(Device::Cuda(_))) {
        cpu(&mut clinic)?;
    }
    match args.device {
        Some(Device::Cpu) => {}
        Some(Device::Cuda(index)) => gpus(&mut clinic, Some(index))?,
        None => gpus(&mut clinic, None)?,
    }
    let elapsed_s = begun.elapsed().as_secs_f64();
    let wrong = clinic.checks.iter().filter(|c| !c.ok).count();
    screen.say(format!("{} checks, {wrong} failed, {}", clinic.checks.len(), seconds(elapsed_s)))?;
    screen.json(&Report { build_id: BUILD.build_id, checks: clinic.checks, elapsed_s })?;
    if wrong > 0 {
        return Err(Failure::new(Exit::Device, format!("{wrong} checks failed"), "see the lines marked FAIL"));
    }
    Ok(Exit::Done)
}

fn cpu(clinic: &mut Clinic) -> Result<(), Failure> {
    let pool = drafthorse_train::frozen::CpuBackend::new(None)?;
    let cores = pool.pool().current_num_threads();
    let memory = available_memory().map_or_else(|| "unknown memory".into(), |b| format!("{} of memory free", bytes(b)));
    clinic.note("cpu", "cores", true, format!("{cores}, {memory}"))?;
    let rate = pool.pool().install(|| drafthorse_cpu::measure_gflops(1024, 4096, 1024, 5));
    clinic.note("cpu", "products", true, format!("{rate:.0} GFLOP/s in f32 (1024 x 4096 x 1024)"))?;
    let threads = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(cores).build().map_err(|e| {
        Failure::new(Exit::Device, format!("cannot start compute threads: {e}"), "raise the limit on threads (ulimit -u)")
    })?);
    let (mut agreed, mut wrong) = (0, Vec::new());
    for case in op_suite::suite(DType::F32) {
        let result = op_suite::run_case(&case, |program, content| {
            let name = |t| program.get(t).name.clone();
            let frozen: FrozenSet = content.into_iter().map(|(t, FrozenData::F32(data))| (name(t), Arc::new(data))).collect();
            let options = Options { pool: Arc::clone(&threads), round: false };
            CpuExecutor::new(program, &frozen, options).expect("the suite's programs are within what the CPU executor takes")
        });
        match result {
            Ok(()) => agreed += 1,
            Err(e) => wrong.push(e.to_string()),
        }
    }
    verdict(clinic, "cpu", "ops", agreed, 0, &wrong)
}

fn verdict(
    clinic: &mut Clinic,
    device: &str,
    what: &'static str,
    agreed: usize,
    refused: usize,
    wrong: &[String],
) -> Result<(), Failure> {
    let refused = if refused > 0 { format!(", {refused} refused for their shape") } else { String::new() };
    clinic.note(
        device,
        what,
        wrong.is_empty(),
        format!("{agreed} cases agree with the oracle{refused}, {} do not", wrong.len()),
    )?;
    wrong.iter().try_for_each(|w| clinic.screen.say(format!("      {w}")))
}

#[cfg(not(feature = "cuda"))]
fn gpus(clinic: &mut Clinic, asked: Option<u32>) -> Result<(), Failure> {
    let found = "this build has the cpu backend only; build with `--features cuda` for GPUs".to_owned();
    clinic.note("cuda", "build", asked.is_none(), found)
}

#[cfg(feature = "cuda")]
fn gpus(clinic: &mut Clinic, asked: Option<u32>) -> Result<(), Failure> {
    gpu::check(clinic, asked)
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::{Clinic, Failure, bytes, verdict};
    use drafthorse_cuda::{CudaError, CudaExecutor, Device, FrozenStore, Libraries, Options, SearchPaths, images};
    use drafthorse_graph::{DType, Executor, HostRef, Program, Role};
    use drafthorse_testkit::op_suite::{self, Case, FrozenData};
    use std::sync::Arc;

    pub fn check(clinic: &mut Clinic, asked: Option<u32>) -> Result<(), Failure> {
        let libraries = match Libraries::load(&SearchPaths::usual(|name| std::env::var_os(name))) {
            Ok(libraries) => libraries,
            // A machine without GPUs is well, unless a GPU was asked for.
            Err(e) => return clinic.note("cuda", "driver", asked.is_none(), one_line(&e)),
        };
        for found in &libraries.found {
            let path = found.path.as_ref().map_or_else(|| "found by name".into(), |p| p.display().to_string());
            clinic.note("cuda", "library", true, format!("{} {path}", found.library))?;
        }
        clinic.note("cuda", "kernels", !images().is_empty(), format!("{} kernel files embedded", images().len()))?;
        let count = match Device::count(&libraries) {
            Ok(count) => count,
            Err(e) => return clinic.note("cuda", "driver", asked.is_none(), one_line(&e)),
        };
        let list: Vec<u32> = asked.map_or_else(|| (0..count).collect(), |i| vec![i]);
        if list.is_empty() {
            return clinic.note("cuda", "gpus", true, "the driver shows none".into());
        }
        for index in list {
            let name = format!("cuda:{index}");
            if let Err(e) = one(clinic, &name, &libraries, index) {
                match e {
                    Fault::Device(e) => clinic.note(&name, "device", false, one_line(&e))?,
                    Fault::Screen(f) => return Err(f),
                }
            }
        }
        Ok(())
    }

    enum Fault {
        Device(CudaError),
        Screen(Failure),
    }

    impl From<CudaError> for Fault {
        fn from(e: CudaError) -> Fault {
            Fault::Device(e)
        }
    }

    impl From<Failure> for Fault {
        fn from(f: Failure) -> Fault {
            Fault::Screen(f)
        }
    }

    fn one_line(e: &CudaError) -> String {
        e.to_string().replace('\n', ";")
    }

    fn one(clinic: &mut Clinic, name: &str, libraries: &Libraries, index: u32) -> Result<(), Fault> {
        let device = Device::open(libraries, index)?;
        let memory = device.memory()?;
        let (major, minor) = device.capability;
        clinic.note(
            name,
            "device",
            true,
            format!(
                "{}, compute capability {major}.{minor}, {} of {} free, driver for CUDA {}.{}",
                device.name,
                bytes(memory.free),
                bytes(memory.total),
                device.driver_version / 1000,
                device.driver_version % 1000 / 10
            ),
        )?;
        let store = FrozenStore::new(Arc::clone(&device))?;
        ceilings(clinic, name, &store)?;
        suite(clinic, name, "ops", &op_suite::suite(DType::BF16), &store, &Options::default())?;
        for (what, hopper) in [("attention", true), ("mma only", false)] {
            // Elsewhere than on Hopper both are the same kernels.
            if hopper || device.is_hopper() {
                let cases: Vec<Case> =
                    [64, 128, 256].into_iter().flat_map(|d| op_suite::suite_with_head_dim(DType::BF16, d)).collect();
                suite(clinic, name, what, &cases, &store, &Options { hopper, ..Options::default() })?;
            }
        }
        Ok(())
    }

    fn suite(
        clinic: &mut Clinic,
        name: &str,
        what: &'static str,
        cases: &[Case],
        store: &FrozenStore,
        options: &Options,
    ) -> Result<(), Fault> {
        let (mut agreed, mut refused, mut wrong) = (0, 0, Vec::new());
        for case in cases {
            let frozen = case.frozen();
            let content = frozen.iter().map(|(&t, FrozenData::F32(data))| (t, data.as_slice()));
            let own = Arc::new(store.sibling_with(&case.program, content)?);
            let exec = match CudaExecutor::new(Arc::clone(&case.program), &own, options.clone()) {
                Ok(exec) => exec,
                Err(CudaError::Unsupported { .. }) => {
                    refused += 1;
                    continue;
                }
                Err(e) => return Err(e.into()),
            };
            match op_suite::run_case(case, |_, _| exec) {
                Ok(()) => agreed += 1,
                Err(e) => wrong.push(e.to_string()),
            }
        }
        Ok(verdict(clinic, name, what, agreed, refused, &wrong)?)
    }

    /// A large product and a large copy, by device events.
    fn ceilings(clinic: &mut Clinic, name: &str, store: &FrozenStore) -> Result<(), Fault> {
        const SIDE: usize = 8192;
        let mut program = Program::new(DType::BF16);
        let [x, w, to] = [("x", Role::Input), ("w", Role::Input), ("to", Role::Output)]
            .map(|(name, role)| program.tensor(name, &[SIDE, SIDE], DType::BF16, role));
        let mut phase = program.begin("ceilings");
        phase.linear(x, w, None);
        phase.capture(x, 0, to, 0, SIDE);
        let phase = phase.id();
        let failed = |e: drafthorse_graph::ExecError| CudaError::Call { call: "ceilings".into(), what: e.to_string() };
        let mut exec = CudaExecutor::new(Arc::new(program), &Arc::new(store.sibling()), Options::default())?;
        exec.prepare().map_err(failed)?;
        // Zeros multiply faster than numbers do.
        let mut bits = 1u32;
        let mut random = || {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (bits >> 8) as f32 / (1u32 << 23) as f32 - 1.0
        };
        for t in [x, w] {
            let content: Vec<f32> = (0..SIDE * SIDE).map(|_| random()).collect();
            exec.write(t, HostRef::F32(&content)).map_err(failed)?;
        }
        let times = exec.time_ops(phase, None, 9).map_err(failed)?;
        let (product, copy) = (&times[0], &times[1]);
        clinic.note(
            name,
            "products",
            true,
            format!("{:.0} TFLOP/s in bf16 (8192 cubed)", product.flops as f64 / f64::from(product.ms) / 1e9),
        )?;
        clinic.note(
            name,
            "copies",
            true,
            format!("{:.2} TB/s, read and written", 4.0 * (SIDE * SIDE) as f64 / f64::from(copy.ms) / 1e9),
        )?;
        Ok(())
    }
}
