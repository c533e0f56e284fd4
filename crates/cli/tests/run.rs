//! init → plan → train → resume → eval → generate → export, on a tiny target, as a user runs them.

mod common;

use common::{Place, drafthorse, ok, ok_json, run, shown};
use serde_json::Value;

#[test]
fn init_prints_a_config_that_plans() {
    let place = Place::with_data();
    let text = ok(&["init", "--target", &place.at("target"), "--data", &place.at("data")]);
    for word in [
        "target_layer_ids = [1, 2]",
        "mask_token_id = 259",
        "[optimizer]",
        "held_out = { rows = 4 }",
        "init_std = 0.25",
        "recompute = false",
    ] {
        assert!(text.contains(word), "{word} is missing:\n{text}");
    }
    // What is not commented out is the config that the text was made from.
    let set: toml::Table = text.parse().unwrap();
    assert_eq!(
        serde_json::to_value(set).unwrap(),
        ok_json(&["init", "--target", &place.at("target"), "--data", &place.at("data")])
    );
    std::fs::write(place.path("init.toml"), &text).unwrap();
    let plan = ok_json(&["plan", &place.at("init.toml")]);
    let device = &plan["devices"][0];
    let parts: u64 = device["parts"].as_array().unwrap().iter().map(|p| p["size_bytes"].as_u64().unwrap()).sum();
    assert_eq!(device["total_bytes"].as_u64().unwrap(), parts);
    assert!(plan["step_useful_flops"].as_f64().unwrap() > 0.0 && plan["step_s"].as_f64().unwrap() > 0.0, "{plan}");
}

#[test]
fn init_names_every_key() {
    let place = Place::with_data();
    let text = ok(&["init", "--target", &place.at("target"), "--data", &place.at("data")]);
    std::fs::write(place.path("init.toml"), &text).unwrap();
    for section in ["", "drafter.", "batch.", "optimizer.", "pipeline.", "eval.", "checkpoint."] {
        // The refusal of an unknown key lists the known ones.
        let (code, _, err) = run(&["plan", &place.at("init.toml"), &format!("{section}zzz=1")]);
        assert_eq!(code, 3, "{err}");
        let known = err.rsplit("known here: ").next().unwrap().trim();
        let keys: Vec<&str> = known
            .split(", ")
            .filter(|k| !["drafter", "batch", "optimizer", "pipeline", "eval", "checkpoint", "sweep"].contains(k))
            .collect();
        assert!(keys.len() >= 2, "{err}");
        for key in keys {
            let set = text.lines().any(|l| l.trim_start_matches("# ").starts_with(&format!("{key} = ")));
            assert!(set, "`{section}{key}` is not in the document:\n{text}");
        }
    }
    assert!(text.contains("[[sweep]]"));
}

#[test]
fn a_plan_that_does_not_fit_names_the_key_that_makes_it_fit() {
    let place = Place::with_data();
    let config = place.config();
    let need = ok_json(&["plan", &config])["devices"][0]["total_bytes"].as_u64().unwrap();
    let (code, _, err) = run(&["plan", &config, "--memory", &need.to_string()]);
    assert_eq!(code, 0, "{err}");
    let (code, _, err) = run(&["plan", &config, "--memory", &(need - 1).to_string()]);
    assert_eq!(code, 4, "{err}");
    let knob = err.split("it fits with ").nth(1).unwrap().split(' ').next().unwrap();
    assert!(knob.starts_with("batch."), "{err}");
    let (code, _, err) = run(&["plan", &config, "--memory", &(need - 1).to_string(), knob]);
    assert_eq!(code, 0, "{knob}: {err}");
    let (code, _, err) = run(&["plan", &config, "--memory", "1KiB"]);
    assert!(code == 4 && err.contains("no batch setting"), "{err}");
}

#[test]
fn gpus_are_planned_without_a_gpu() {
    let place = Place::with_data();
    let config = place.config();
    let plan = ok_json(&["plan", &config, "--gpus", "4", "--memory", "1GiB", "--tflops", "100"]);
    assert_eq!(plan["devices"].as_array().unwrap().len(), 4);
    let roles = |key: &str| plan["placement"][key].as_array().unwrap().len();
    assert_eq!(roles("targets") + roles("drafters"), 4);
    let cpu = ok_json(&["plan", &config]);
    let slot = |p: &Value| p["slot_bytes"].as_u64().unwrap();
    assert_eq!(slot(&cpu), 2 * slot(&plan), "a slot is bf16 on GPUs and f32 on the CPU");
}

#[test]
fn config_faults_name_the_key() {
    let place = Place::with_data();
    let config = place.config();
    for (item, code, word) in [
        ("optimizer.lrr=1", 3, "did you mean `lr`"),
        ("batch.micro_blocks=0", 3, "batch.micro_blocks"),
        ("drafter.block_size=12", 3, "gamma"),
        ("drafter.target_layer_ids=[9]", 3, "target_layer_ids"),
        ("pipeline.device=cuda", 5, "cuda"),
        ("nonsense", 2, "override"),
    ] {
        let (got, _, err) = run(&["train", &config, item]);
        assert_eq!(got, code, "{item}: {err}");
        assert!(err.contains(word), "{item}: {err}");
    }
    assert!(!place.path("runs").exists(), "a refused run leaves no folder");
}

#[test]
fn a_run_from_start_to_servers() {
    let place = Place::with_data();
    let config = place.config();
    let table = ok(&["train", &config, "--dry-run"]);
    assert!(table.contains("batches ") && table.contains("fill ") && !place.path("runs/run").exists(), "{table}");
    let text = ok(&["train", &config]);
    assert!(text.contains("step 6/6") && text.contains("held out"), "{text}");
    let (code, _, err) = run(&["train", &config]);
    assert!(code == 3 && err.contains("--resume auto"), "{err}");

    let prompts = place.at("prompts.jsonl");
    std::fs::write(&prompts, "{\"question\": \"count 3\", \"answer\": \"no\"}\n{\"prompt\": \"count 4\"}\n").unwrap();
    let report = ok_json(&["eval", &place.at("runs/run"), "--prompts", &prompts, "--max-new-tokens", "24", "--prove"]);
    let report = &report["report"];
    assert!(report["tau"].as_f64().unwrap() >= 1.0, "{report}");
    assert_eq!(report["proof"]["equal"].as_u64().unwrap() + report["proof"]["ties"].as_u64().unwrap(), 2, "{report}");
    let (code, _, err) = run(&["eval", &place.at("runs/run"), "--prompts", &prompts, "--prove", "--temperature", "1"]);
    assert!(code == 2 && err.contains("--prove"), "{err}");

    let generated = ok_json(&["generate", &place.at("runs/run"), "count 5", "--max-new-tokens", "16"]);
    assert_eq!(generated["tokens"].as_array().unwrap().len(), generated["slots"].as_array().unwrap().len());
    let plain = ok(&["generate", &place.at("runs/run"), "count 5", "--max-new-tokens", "16"]);
    assert_eq!(plain.replace(['⟦', '⟧'], "").trim_end_matches('\n'), generated["text"].as_str().unwrap().trim_end_matches('\n'));

    for format in ["plain", "speculators"] {
        let out = place.at(&format!("out-{format}"));
        let report = ok_json(&["export", &place.at("runs/run"), "--to", format, "-o", &out]);
        assert!(report["compared_bytes"].as_u64().unwrap() > 0 && !report["serve"].as_array().unwrap().is_empty(), "{report}");
        // What was exported decodes as the run does.
        let again = ok_json(&["generate", &out, "count 5", "--target", &place.at("target"), "--max-new-tokens", "16"]);
        assert_eq!(again["text"], generated["text"]);
    }
}

#[cfg(unix)]
#[test]
fn sigterm_saves_and_the_run_goes_on_to_the_same_weights() {
    use std::process::Stdio;
    let place = Place::with_data();
    let config = place.config();
    ok(&["train", &config, "name=whole", "optimizer.steps=150", "checkpoint.every=0"]);
    let mut child = drafthorse()
        .args(["train", &config, "name=cut", "optimizer.steps=150", "checkpoint.every=0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The first step's line says that the run is past its start.
    let mut reader = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("step 1/150") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut reader, &mut line).unwrap() > 0, "the run ended before its first step");
    }
    std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    let rest = std::thread::spawn(move || std::io::Read::read_to_string(&mut reader, &mut String::new()).unwrap());
    let (code, _, err) = shown(child.wait_with_output().unwrap());
    rest.join().unwrap();
    assert_eq!(code, 8, "{err}");
    assert!(err.contains("SIGTERM") && err.contains("--resume"), "{err}");
    ok(&["train", &config, "name=cut", "optimizer.steps=150", "checkpoint.every=0", "--resume", "auto"]);
    let weights = |name: &str| std::fs::read(place.path(&format!("runs/{name}/export/model.safetensors"))).unwrap();
    assert_eq!(tensors(&weights("whole")), tensors(&weights("cut")));
}

/// Names and bytes of a safetensors file, without its header's provenance.
fn tensors(file: &[u8]) -> Vec<(String, Vec<u8>)> {
    let opened = safetensors::SafeTensors::deserialize(file).unwrap();
    let mut list: Vec<(String, Vec<u8>)> = opened.tensors().into_iter().map(|(n, t)| (n, t.data().to_vec())).collect();
    list.sort();
    assert!(!list.is_empty());
    list
}

#[test]
fn an_error_that_nobody_can_read_still_has_its_exit_code() {
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_drafthorse"))
        .args(["train", "there-is-no-such-config.toml"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    assert_eq!(child.wait().unwrap().code(), Some(3));
}
