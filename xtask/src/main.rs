//! `cargo xtask`: the chores of this repository, the same by hand and in CI.
//!
//! Job: one word, one chore. Refuses to change a source file (`golden --update` rewrites golden values, and says which).
//! Invariant: the exit code is 0 only when everything that was asked for was done and held.

mod chores;
mod tidy;
mod tree;

use std::process::ExitCode;

const HELP: &str = "\
usage: cargo xtask <chore>

  check              fmt, clippy, tidy and doc: what must hold before a commit
  tidy               the rules of this repository that no compiler knows
  golden [--update]  remake the golden values aside and compare (or rewrite them)
  shuttle            the pipeline under a model checker that chooses the schedules
  cuda-toolkit       put nvcc into .cuda (no driver or GPU is needed)
  cuda-kernels       compile every CUDA kernel for every architecture (needs no GPU)
  kills [N]          kill a run N times (20) at random moments; what resumes must end with the same bits
  test-gpu           the tests of crates/cuda, on a machine that must have a GPU";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["check"] => chores::check(),
        ["tidy"] => tidy::run(&tree::root()),
        ["golden"] => chores::golden(false),
        ["golden", "--update"] => chores::golden(true),
        ["shuttle"] => chores::shuttle(),
        ["cuda-toolkit"] => chores::cuda_toolkit(),
        ["cuda-kernels"] => chores::cuda_kernels(),
        ["kills"] => chores::kills("20"),
        ["kills", n] => chores::kills(n),
        ["test-gpu"] => chores::test_gpu(),
        ["help" | "--help" | "-h"] => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("xtask: {why}");
            ExitCode::FAILURE
        }
    }
}
