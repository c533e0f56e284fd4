//! Signals, as schedulers and people send them: what ends, what is left, and what the exit code says.
#![cfg(unix)]

mod common;

use common::{Place, drafthorse, ok, shown};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

fn start(args: &[&str]) -> Child {
    drafthorse().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn send(child: &Child, signals: &[&str]) {
    for signal in signals {
        assert!(Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap().success());
    }
}

/// Waits until the program catches SIGTERM, by the kernel's account.
fn until_it_listens(child: &mut Child) {
    until(child, |child| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let mask = status.lines().find_map(|l| l.strip_prefix("SigCgt:")).unwrap_or_default().trim().to_owned();
        u64::from_str_radix(&mask, 16).is_ok_and(|mask| mask & 1 << 14 != 0)
    });
}

fn until(child: &mut Child, done: impl Fn(&Child) -> bool) {
    while !done(child) {
        if let Some(status) = child.try_wait().unwrap() {
            let mut err = String::new();
            std::io::Read::read_to_string(child.stderr.as_mut().unwrap(), &mut err).unwrap();
            panic!("it ended early with {status}: {err}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Lines of the run's record, as far as they are written.
fn events(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("events.jsonl")).unwrap_or_default();
    text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

fn has(run: &Path, word: &str) -> bool {
    events(run).iter().any(|e| e.to_string().contains(word))
}

#[test]
fn prepare_removes_what_it_has_written() {
    let place = Place::with_target();
    let line = |i: usize| {
        let text = format!("a rather long answer about {i} ").repeat(40);
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}).to_string() + "\n"
    };
    let chats: String = (0..40_000).map(line).collect();
    std::fs::write(place.path("chats.jsonl"), chats).unwrap();
    let partial = || {
        let names = std::fs::read_dir(place.path("")).unwrap().flatten().map(|e| e.file_name().into_string().unwrap());
        names.filter(|n| n.contains("partial")).collect::<Vec<_>>()
    };
    for signal in ["INT", "TERM"] {
        let mut child = start(&["prepare", &place.at("chats.jsonl"), "--target", &place.at("target"), "-o", &place.at("data")]);
        until(&mut child, |_| !partial().is_empty());
        send(&child, &[signal]);
        let (code, out, err) = shown(child.wait_with_output().unwrap());
        println!("{code}  {err}");
        assert_eq!((code, out.as_str()), (8, ""), "{err}");
        assert!(err.contains("error: stopped on request: nothing was written"), "{err}");
        assert!(partial().is_empty() && !place.path("data").exists(), "{:?}", partial());
    }
}

#[test]
fn generate_shows_what_it_has_and_says_that_it_was_cut() {
    let place = Place::with_data();
    let config = place.config();
    ok(&["train", &config]);
    // Room for a completion that nobody waits for, and no token that would end it.
    let file = place.path("target/config.json");
    let mut target: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    target["max_position_embeddings"] = json!(200_000);
    target["eos_token_id"] = json!(271);
    std::fs::write(&file, target.to_string()).unwrap();
    std::fs::write(place.path("target/tokenizer_config.json"), "{}").unwrap();
    let export = place.at("runs/run/export");
    let args = ["generate", &export, "count 5", "--target", &place.at("target"), "--max-new-tokens", "100000"];
    let mut child = start(&args);
    until_it_listens(&mut child);
    send(&child, &["INT"]);
    let (code, _, err) = shown(child.wait_with_output().unwrap());
    println!("{code}  {err}");
    assert_eq!(code, 8, "{err}");
    assert!(err.contains("Ctrl-C: ending after this pass") && err.contains("(cut by Ctrl-C)"), "{err}");
}

#[test]
fn a_second_request_aborts_a_run_and_its_record_says_stopped() {
    let place = Place::with_data();
    let config = place.config();
    let run = place.path("runs/run");
    let mut child = start(&["train", &config, "optimizer.steps=1000000", "checkpoint.every=0", "eval.every=0", "--quiet"]);
    until(&mut child, |_| has(&run, "\"step\":3"));
    // Both lie there when it wakes, so that no step can end between them.
    send(&child, &["STOP", "TERM", "INT", "CONT"]);
    let (code, _, err) = shown(child.wait_with_output().unwrap());
    println!("{code}  {err}");
    assert_eq!(code, 8, "{err}");
    assert!(err.contains("error: aborted: ") && err.contains("was the second request to stop"), "{err}");
    assert!(err.contains("there is no checkpoint yet, so the next start begins anew"), "{err}");
    let status: Value = serde_json::from_slice(&std::fs::read(run.join("status.json")).unwrap()).unwrap();
    println!("{}", status["outcome"]);
    assert!(
        status["outcome"].to_string().contains("second request") && has(&run, "stopped") && !has(&run, "\"failure\""),
        "{status}"
    );
}

#[test]
fn a_run_that_was_stopped_for_longer_than_its_limit_goes_on() {
    let place = Place::with_data();
    let config = place.config();
    let run = place.path("runs/run");
    let long = ["optimizer.steps=1000000", "checkpoint.every=0", "eval.every=0", "pipeline.stall_s=1", "--quiet"];
    let mut child = start(&[&["train", &config][..], &long].concat());
    until(&mut child, |_| has(&run, "\"step\":3"));
    send(&child, &["STOP"]);
    std::thread::sleep(Duration::from_millis(2_500));
    send(&child, &["CONT"]);
    until(&mut child, |_| has(&run, "overslept"));
    let steps = events(&run).iter().filter(|e| e.to_string().contains("\"loss\"")).count();
    until(&mut child, |_| events(&run).iter().filter(|e| e.to_string().contains("\"loss\"")).count() > steps);
    send(&child, &["TERM"]);
    let (code, _, err) = shown(child.wait_with_output().unwrap());
    assert_eq!(code, 8, "{err}");
    println!("{}", events(&run).iter().find(|e| e.to_string().contains("overslept")).unwrap());
    assert!(run.join("checkpoints").read_dir().unwrap().count() > 0, "it went on, and saved at the end");
}
