//! What must be refused, with its exit code and the words that name the fault: broken targets, impossible settings, damaged checkpoints, drafters of others.
//!
//! Each table row is one fault in an otherwise good place.

mod common;

use common::{HIDDEN, LAYERS, Place, ok, ok_json, run};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::path::Path;

/// Runs it, expects `code` and two lines on standard error that hold `words`.
fn refused(args: &[&str], code: i32, words: &[&str]) {
    let (got, _, err) = run(args);
    println!("{got}  {}", err.trim_end());
    let told = err.find("error: ").map(|at| &err[at..]).unwrap_or_default();
    assert_eq!(got, code, "{args:?}: {err}");
    assert!(words.iter().all(|w| told.contains(w)), "{args:?}: {words:?} in\n{err}");
    assert!(code == 2 || told.lines().count() == 2, "{args:?}: {err}");
}

fn set(file: &Path, key: &str, value: Value) {
    let mut map: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    map[key] = value;
    std::fs::write(file, map.to_string()).unwrap();
}

/// Writes the target's weights again, after `change` on names and F32 bytes.
fn rewrite(file: &Path, change: impl FnOnce(&mut Vec<(String, Vec<usize>, Vec<u8>)>)) {
    let bytes = std::fs::read(file).unwrap();
    let opened = SafeTensors::deserialize(&bytes).unwrap();
    let mut list: Vec<_> = opened.tensors().into_iter().map(|(n, t)| (n, t.shape().to_vec(), t.data().to_vec())).collect();
    change(&mut list);
    let views = list.iter().map(|(n, s, b)| (n.clone(), TensorView::new(Dtype::F32, s.clone(), b).unwrap()));
    std::fs::write(file, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn a_target_that_is_not_what_its_config_says_is_refused_by_name() {
    let place = Place::with_data();
    let (config, json_file, weights) = (place.config(), place.path("target/config.json"), place.path("target/model.safetensors"));
    let (good_json, good_weights) = (std::fs::read(&json_file).unwrap(), std::fs::read(&weights).unwrap());
    for (key, value) in [
        ("num_hidden_layers", json!(4_294_967_296u64)),
        ("intermediate_size", json!(9_223_372_036_854_775_808u64)),
        ("vocab_size", json!(1u64 << 40)),
        ("head_dim", json!(1u64 << 62)),
        ("max_position_embeddings", json!(u64::MAX)),
    ] {
        set(&json_file, key, value);
        refused(&["plan", &config], 3, &["config.json", key, "no model has more"]);
        std::fs::write(&json_file, &good_json).unwrap();
    }
    for name in ["model.layers.3.self_attn.q_proj.bias".to_owned(), format!("model.layers.{LAYERS}.input_layernorm.weight")] {
        rewrite(&weights, |list| list.push((name.clone(), vec![HIDDEN], vec![0; 4 * HIDDEN])));
        refused(&["plan", &config], 3, &[&name, "a qwen3 of its config.json does not have"]);
        std::fs::write(&weights, &good_weights).unwrap();
    }
    rewrite(&weights, |list| list.push(("model.rotary_emb.inv_freq".into(), vec![4], vec![0; 16])));
    let (code, _, err) = run(&["plan", &config]);
    assert!(code == 0 && err.contains("`model.rotary_emb.inv_freq` of the target are not used"), "{err}");
    let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4976698672\n", "0".repeat(64));
    std::fs::write(&weights, &pointer).unwrap();
    refused(&["plan", &config], 3, &["model.safetensors is a Git LFS pointer", "git lfs pull"]);
    std::fs::write(&weights, &good_weights).unwrap();
    std::fs::write(place.path("target/tokenizer.json"), &pointer).unwrap();
    refused(&["plan", &config], 3, &["tokenizer.json: a Git LFS pointer", "git lfs pull"]);
}

#[test]
fn impossible_settings_name_their_key_or_flag() {
    let place = Place::with_data();
    let config = place.config();
    for (item, word) in [
        ("batch.buckets=4294967295", "batch.buckets"),
        ("batch.buckets=0", "batch.buckets"),
        ("pipeline.threads=100000", "pipeline.threads"),
        ("drafter.intermediate=9223372036854775807", "drafter.intermediate"),
        ("optimizer.lr=1e30", "optimizer.lr"),
        ("optimizer.weight_decay=1e30", "optimizer.weight_decay"),
        ("drafter.sliding_window=0", "drafter.sliding_window"),
        ("drafter.sliding_window=64", "no layer slides"),
        ("drafter.mask_token_id=2", "end-of-sequence"),
        ("drafter.mask_token_id=272", "no embedding row"),
        ("drafter.layers=\"two\"", "`drafter.layers`"),
        ("drafer.layers=2", "did you mean `drafter`"),
        ("batch.token_budget=4194304", "needs"),
    ] {
        // The last one is allowed, and planned: it does not fit.
        let code = if word == "needs" { 4 } else { 3 };
        refused(&["plan", &config, "--memory", "64MiB", item], code, &[word]);
    }
    let drafter = place.at("absent");
    for args in [
        &["plan", &config, "--gpus", "2", "--tflops", "nan"][..],
        &["plan", &config, "--gpus", "2", "--tflops", "0"],
        &["eval", &drafter, "--prompts", "p", "--max-new-tokens", "0"],
        &["eval", &drafter, "--prompts", "p", "--limit", "0"],
        &["generate", &drafter, "hello", "--max-new-tokens", "0"],
        &["generate", &drafter, "hello", "--max-new-tokens", "18446744073709551615"],
        &["generate", &drafter, "hello", "--threads", "100000"],
    ] {
        refused(args, 2, &[args[args.len() - 2]]);
    }
    refused(&["inspect", &place.at("data"), "--row", "48"], 3, &["no row 48", "from 0 to 47"]);
}

#[test]
fn rows_that_the_target_cannot_take_are_refused_or_counted() {
    let place = Place::with_target();
    let (target, data) = (place.at("target"), place.at("data"));
    let tokens = place.at("tokens.jsonl");
    let line = |ids: Vec<u32>| {
        let mask: Vec<u8> = (0..ids.len()).map(|i| u8::from(i > 0)).collect();
        json!({"input_ids": ids, "loss_mask": mask}).to_string() + "\n"
    };
    std::fs::write(&tokens, line(vec![5, 6, 7, 8]) + &line(vec![5, 6, 272, 8])).unwrap();
    refused(
        &["prepare", &tokens, "--target", &target, "-o", &data],
        3,
        &["tokens.jsonl:2", "272 at index 2", "vocab_size is 272"],
    );
    assert!(!place.path("data").exists());
    let card = ok_json(&["prepare", &tokens, "--target", &target, "-o", &data, "--on-error", "skip"]);
    assert_eq!((&card["rows"], &card["dropped"]["broken line"]["rows"]), (&json!(1), &json!(1)), "{card}");

    std::fs::write(&tokens, line(vec![5; 40]) + &line(vec![6; 600]) + &line(vec![7; 512])).unwrap();
    let text = ok(&["prepare", &tokens, "--target", &target, "-o", &data, "--overwrite"]);
    assert!(text.contains("1 rows have more tokens than the target has positions (512)"), "{text}");
    let config = place.config();
    let over = ["batch.token_budget=1024", "eval.held_out=\"none\""];
    let long = ["row 1 has 600 tokens", "512 positions", "batch.max_length = 512"];
    refused(&[&["train", &config, "--dry-run"][..], &over].concat(), 3, &long);
    ok(&[&["train", &config, "--dry-run", "batch.max_length=512"][..], &over].concat());

    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ messages[0]['content'] }}{% endfor %}{% endfor %}";
    std::fs::write(place.path("target/chat_template.jinja"), endless).unwrap();
    let chats = place.at("chats.jsonl");
    let chat = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b c"}]}).to_string();
    std::fs::write(&chats, chat + "\n").unwrap();
    refused(&["prepare", &chats, "--target", &target, "-o", &place.at("other")], 3, &["chats.jsonl:1", "did not end within"]);
}

#[test]
fn a_damaged_checkpoint_and_a_contradiction_are_refused_and_nothing_changes() {
    let place = Place::with_data();
    let config = place.config();
    ok(&["train", &config]);
    let newest = place.path("runs/run/checkpoints/step-00000006");
    let (state, record) = (newest.join("state.safetensors"), place.path("runs/run/config.toml"));
    let before = std::fs::read(&record).unwrap();
    let good = std::fs::read(&state).unwrap();
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    std::fs::write(&state, bad).unwrap();
    let words = ["state.safetensors is damaged", "move that folder away", "step-00000004"];
    refused(&["train", &config, "checkpoint.every=1", "--resume", "auto"], 3, &words);
    refused(&["train", &config, "--resume", "auto", "--dry-run"], 3, &words);
    refused(&["generate", &place.at("runs/run"), "count 5"], 3, &words);
    assert_eq!(std::fs::read(&record).unwrap(), before, "a refused resume leaves the run's record");
    // What the advice says is what works.
    std::fs::rename(&newest, place.path("runs/run/damaged")).unwrap();
    let (code, out, err) = run(&["train", &config, "--resume", "auto"]);
    assert!(code == 0 && out.contains("resumed after step 4"), "{out}{err}");

    std::fs::remove_file(newest.join("SHA256SUMS")).unwrap();
    let (code, _, err) = run(&["generate", &place.at("runs/run"), "count 5", "--max-new-tokens", "4"]);
    assert!(code == 0 && err.contains("has no SHA256SUMS"), "{err}");

    let path = place.at("runs/run");
    refused(&["train", &config, "name=other", "--resume", &path], 2, &["runs/run", "name = \"other\"", "runs/other"]);
    assert!(!place.path("runs/other").exists());
}

#[test]
fn a_drafter_of_other_weights_is_told_and_one_of_another_config_is_no_beginning() {
    let place = Place::with_data();
    let config = place.config();
    ok(&["train", &config]);
    let (target, weights) = (place.at("target"), place.path("target/model.safetensors"));
    let exported = place.at("runs/run/export");
    let args = ["generate", &exported, "count 5", "--target", &target, "--max-new-tokens", "4"];
    assert_eq!(ok_json(&args)["other_target"], Value::Null);
    let from = format!("drafter.init_from={exported}");
    ok(&["train", &config, "name=next", &from, "--dry-run"]);
    for (change, word) in
        [("drafter.mask_token_id=268", "mask_token_id"), ("drafter.rope_theta=5e5", "rope theta"), ("drafter.layers=2", "layers")]
    {
        refused(&["train", &config, "name=next", &from, change, "--dry-run"], 3, &["init_from", word, "or leave init_from out"]);
        refused(&["train", &config, "name=next", &from, change], 3, &["init_from", word]);
        assert!(!place.path("runs/next/config.toml").exists(), "it is refused before the run begins");
    }
    // A fine-tuned target: same shapes, same config, same file size.
    rewrite(&weights, |list| list.iter_mut().find(|(n, ..)| n.contains("layers.2.mlp.up_proj")).unwrap().2[1] ^= 0x40);
    for drafter in [&exported, &place.at("runs/run")] {
        let (code, _, err) = run(&["generate", drafter, "count 5", "--target", &target, "--max-new-tokens", "4"]);
        println!("{err}");
        assert!(code == 0 && err.contains("warning: the drafter was trained for other weights"), "{err}");
    }
    assert!(ok_json(&args)["other_target"].as_str().unwrap().contains("other weights"));
    let (code, _, err) = run(&["train", &config, "--resume", "auto", "optimizer.steps=6"]);
    assert!(code == 3 && err.contains("another target"), "{err}");
    let out = place.at("again");
    let (_, _, err) = run(&["export", &exported, "--target", &target, "-o", &out]);
    assert!(err.contains("other weights"), "{err}");
    let (_, _, err) = run(&["generate", &out, "count 5", "--target", &target, "--max-new-tokens", "4"]);
    assert!(err.contains("other weights"), "an export again still says what it was trained for: {err}");
}

#[test]
fn quiet_prints_results_only_and_a_dry_run_tells_programs() {
    let place = Place::with_data();
    let config = place.config();
    let told = ok_json(&["train", &config, "--dry-run"]);
    assert_eq!((&told["total_steps"], &told["drafters"][0][1]["layers"]), (&json!(6), &json!(1)), "{told}");
    assert!(told["batches"]["batches"].as_u64().unwrap() > 0 && told["config"]["name"] == "run", "{told}");
    let (code, out, err) = run(&["train", &config, "-q"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let kinds: Vec<&str> = out.lines().map(|l| l.split("  ").next().unwrap()).collect();
    assert_eq!(kinds, ["held out ", "done", "export"].map(str::trim), "{out}");
    let chats = place.at("chats.jsonl");
    let (_, out, err) = run(&["-q", "prepare", &chats, "--target", &place.at("target"), "-o", &place.at("data"), "--overwrite"]);
    assert!(err.is_empty() && out.contains("supervised") && !out.contains("next:"), "{out}{err}");
}
