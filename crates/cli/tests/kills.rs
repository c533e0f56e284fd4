//! Kill -9 at random moments, every second one inside a save: the run that resumes each time ends with the bits of the run that was never killed.
//!
//! The number of kills is 6, or `DRAFTHORSE_KILLS`. The seed of the moments is printed; `DRAFTHORSE_KILL_SEED` repeats it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drafthorse"));
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn prepared(dir: &Path) -> PathBuf {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
    let chats: String =
        std::fs::read_to_string(demo.join("completions.jsonl")).unwrap().lines().take(120).map(|l| format!("{l}\n")).collect();
    std::fs::write(dir.join("chats.jsonl"), chats).unwrap();
    let target = demo.join("target");
    let status = binary()
        .arg("prepare")
        .arg(dir.join("chats.jsonl"))
        .arg("--target")
        .arg(&target)
        .arg("-o")
        .arg(dir.join("data"))
        .status();
    assert!(status.unwrap().success());
    let config = dir.join("run.toml");
    let text = format!(
        "target = {target:?}\ndata = {:?}\nout = {dir:?}\n[drafter]\nlayers = 1\n[batch]\ntoken_budget = 512\nmicro_blocks = 24\nanchors = 8\n\
         [optimizer]\nlr = 1e-3\nsteps = 40\nglobal_batch = 2\n[eval]\nevery = 10\nheld_out = {{ rows = 4 }}\n[checkpoint]\nevery = 1\n",
        dir.join("data")
    );
    std::fs::write(&config, text).unwrap();
    config
}

fn train(config: &Path, name: &str) -> Child {
    binary().arg("train").arg(config).arg(format!("name={name}")).args(["--resume", "auto"]).spawn().unwrap()
}

fn finish(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Folders of saves that have not ended, with their times: a killed writer leaves one, which the next launch removes.
fn unfinished_saves(run: &Path) -> Vec<(std::ffi::OsString, Option<SystemTime>)> {
    std::fs::read_dir(run.join("checkpoints"))
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with(".writing-"))
        .map(|e| (e.file_name(), e.metadata().and_then(|m| m.created().or_else(|_| m.modified())).ok()))
        .collect()
}

fn files(run: &Path) -> BTreeMap<String, Vec<u8>> {
    let newest = std::fs::read_dir(run.join("checkpoints"))
        .unwrap()
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.join("meta.json").exists())
        .max()
        .unwrap();
    assert!(newest.ends_with("step-00000040"), "{newest:?}");
    let file = std::fs::read(newest.join("state.safetensors")).unwrap();
    let export = std::fs::read(run.join("export/model.safetensors")).unwrap();
    BTreeMap::from([("state".to_owned(), file), ("export".to_owned(), export)])
}

#[test]
fn a_run_killed_at_random_moments_ends_with_the_bits_of_one_that_was_not() {
    let dir = tempfile::tempdir().unwrap();
    let config = prepared(dir.path());
    let begun = SystemTime::now();
    finish(train(&config, "whole"));
    let whole_ms = begun.elapsed().unwrap().as_millis() as u64;
    let kills: u64 = std::env::var("DRAFTHORSE_KILLS").ok().map_or(6, |n| n.parse().unwrap());
    let seed = std::env::var("DRAFTHORSE_KILL_SEED")
        .ok()
        .map_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64, |s| s.parse().unwrap());
    println!("DRAFTHORSE_KILL_SEED={seed}, {kills} kills, the whole run takes {whole_ms} ms");
    let (mut state, mut killed, mut round) = (seed | 1, 0, 0);
    let mut saving = 0;
    while killed < kills {
        // A run that ends before its kill is done; the next one starts from nothing.
        let name = format!("killed-{round}");
        let left = unfinished_saves(&dir.path().join(&name));
        let is_saving = || unfinished_saves(&dir.path().join(&name)).iter().any(|save| !left.contains(save));
        let mut child = train(&config, &name);
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_millis((state >> 33) % (whole_ms * 2 / 3).max(1)));
        while killed % 2 == 1 && !is_saving() && child.try_wait().unwrap().is_none() {}
        if child.try_wait().unwrap().is_some() {
            round += 1;
            continue;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        killed += 1;
        saving += u64::from(is_saving());
    }
    println!("{killed} kills, {saving} of them inside a save");
    assert!(saving > 0, "no kill fell inside a save");
    let want = files(&dir.path().join("whole"));
    for r in 0..=round {
        finish(train(&config, &format!("killed-{r}")));
        assert!(files(&dir.path().join(format!("killed-{r}"))) == want, "run {r} differs");
    }
}
