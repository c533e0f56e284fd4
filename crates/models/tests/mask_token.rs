//! The choice of a mask token, on the fixture of a tokenizer without one.
//!
//! Job: prove the order of choice, and that padding and stop tokens are never chosen.

use std::path::{Path, PathBuf};

use drafthorse_models::hf_config::TargetConfig;
use drafthorse_models::mask_token::{MaskToken, choose};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A target of 64 rows, eos 2, whose tokenizer has `tokens` ids, `<|im_end|>` being the last.
fn folder(tokens: usize, tokenizer_config: &str) -> (tempfile::TempDir, TargetConfig) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), tokenizer_config).unwrap();
    let vocabulary: serde_json::Map<String, serde_json::Value> = (0..tokens - 1).map(|i| (format!("t{i}"), i.into())).collect();
    let tokenizer = serde_json::json!({
        "model": {"vocab": vocabulary},
        "added_tokens": [{"id": tokens - 1, "content": "<|im_end|>"}],
    });
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    (dir, TargetConfig::from_file(&fixture("config_odd_head_dim.json")).unwrap())
}

fn no_mask() -> String {
    std::fs::read_to_string(fixture("tok_no_mask.json")).unwrap()
}

#[test]
fn without_a_mask_token_the_first_unused_row_is_chosen() {
    let (dir, target) = folder(60, &no_mask());
    assert_eq!(choose(dir.path(), &target, None).unwrap(), MaskToken::UnusedRow(60));
    let (dir, target) = folder(64, &no_mask());
    assert_eq!(choose(dir.path(), &target, None).unwrap(), MaskToken::Undecided, "no row is free: ask, never pad or eos");
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    assert_eq!(choose(dir.path(), &target, None).unwrap(), MaskToken::Undecided);
}

#[test]
fn the_configured_and_the_tokenizers_token_come_first() {
    let (dir, target) = folder(60, r#"{"mask_token": {"content": "t7"}, "eos_token": "<|im_end|>"}"#);
    assert_eq!(choose(dir.path(), &target, None).unwrap(), MaskToken::Tokenizer(7));
    assert_eq!(choose(dir.path(), &target, Some(61)).unwrap(), MaskToken::Configured(61));
}

#[test]
fn padding_stop_tokens_and_missing_rows_are_refused() {
    let (dir, target) = folder(60, &no_mask());
    for (id, named) in [(59, "padding"), (2, "stop token"), (64, "64 rows")] {
        let error = choose(dir.path(), &target, Some(id)).unwrap_err().to_string();
        assert!(error.contains(named) && error.contains("`drafter.mask_token_id`"), "{error}");
    }
    let (dir, target) = folder(60, r#"{"mask_token": "<|im_end|>", "eos_token": "<|im_end|>"}"#);
    assert!(choose(dir.path(), &target, None).unwrap_err().to_string().contains("end-of-text"));
    let (dir, target) = folder(60, r#"{"mask_token": "absent"}"#);
    assert!(choose(dir.path(), &target, None).unwrap_err().to_string().contains("`mask_token`"));
}
