//! The chores that call other programs.
//!
//! Job: the exact command lines, in one place, for people and CI. Refuses to go on after a failure. Invariant: every command is printed before it runs.

use crate::tree::root;
use std::path::PathBuf;
use std::process::Command;

type Done = Result<(), String>;

/// Runs a command in the root, shown first; its failure is an error that repeats it.
fn call(command: &mut Command) -> Done {
    let words: Vec<_> =
        std::iter::once(command.get_program()).chain(command.get_args()).map(|w| w.to_string_lossy().into_owned()).collect();
    let line = words.join(" ");
    eprintln!("$ {line}");
    let status = command.current_dir(root()).status().map_err(|e| format!("cannot run `{line}`: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("`{line}` failed ({status})")) }
}

fn cargo(words: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(words);
    command
}

/// fmt, clippy, tidy, doc.
pub fn check() -> Done {
    call(&mut cargo(&["fmt", "--all", "--check"]))?;
    crate::tidy::run(&root())?;
    call(&mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    call(&mut cargo(&["clippy", "--package", "drafthorse", "--features", "cuda", "--all-targets", "--", "-D", "warnings"]))?;
    call(cargo(&["doc", "--workspace", "--no-deps", "--document-private-items"]).env("RUSTDOCFLAGS", "-D warnings"))
}

/// Remakes the golden values and compares, or rewrites them.
pub fn golden(update: bool) -> Done {
    let venv = root().join(".venv");
    let python = venv.join("bin/python");
    if !python.exists() {
        call(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    call(Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r", "golden/requirements.txt"]))?;
    let mut make = Command::new(&python);
    make.arg("golden/make.py");
    if !update {
        make.arg("--check");
    }
    call(&mut make)
}

/// The pipeline under the model checker.
pub fn shuttle() -> Done {
    let mut test = cargo(&["test", "--package", "drafthorse-train", "--lib", "pipeline"]);
    // Its own target folder: other flags would rebuild everything in the usual one.
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from).join("shuttle");
    call(test.env("RUSTFLAGS", "--cfg shuttle").env("CARGO_TARGET_DIR", target))
}

/// Kills a run of the real binary `n` times and compares what resumed with one that was never killed.
pub fn kills(n: &str) -> Done {
    n.parse::<u32>().map_err(|_| format!("`{n}` is no number of kills"))?;
    call(
        cargo(&["test", "--release", "--package", "drafthorse", "--test", "kills", "--", "--nocapture"])
            .env("DRAFTHORSE_KILLS", n),
    )
}

/// The compiler's wheels: driver 580 runs what 13.0 makes.
const TOOLKIT: [&str; 7] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    // The disassembler, with which a test of crates/cuda looks for tensor-core instructions and spills.
    "nvidia-cuda-cuobjdump==13.2.51",
    "nvidia-cuda-nvdisasm==13.2.51",
];

/// Installs the compiler into `.cuda`, a virtual environment, where the build of crates/cuda looks for it.
pub fn cuda_toolkit() -> Done {
    let venv = root().join(".cuda");
    let python = venv.join("bin/python");
    if !python.exists() {
        call(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    call(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--no-deps"]).args(TOOLKIT))?;
    let found = std::fs::read_dir(venv.join("lib")).into_iter().flatten().flatten();
    let nvcc = found.map(|python| python.path().join("site-packages/nvidia/cu13/bin/nvcc")).find(|path| path.is_file());
    nvcc.map(|path| println!("{}", path.display())).ok_or_else(|| format!("the wheels brought no nvcc into {}", venv.display()))
}

/// Compiles every kernel for every architecture; the build says how.
pub fn cuda_kernels() -> Done {
    call(cargo(&["build", "--release", "--package", "drafthorse-cuda"]).env("DRAFTHORSE_KERNELS", "required"))
}

/// The tests that need a GPU, where a missing one is a failure.
pub fn test_gpu() -> Done {
    let tree = crate::tree::Tree::read(&root())?;
    if tree.stems("crates/cuda/tests", "rs").is_empty() {
        return Err("crates/cuda has no tests yet, so nothing was tested".into());
    }
    let mut test = cargo(&["test", "--release", "--package", "drafthorse-cuda", "--package", "drafthorse-seed"]);
    call(test.env("DRAFTHORSE_DEVICE_REQUIRED", "1").env("DRAFTHORSE_KERNELS", "required"))
}
