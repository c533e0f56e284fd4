//! Recorded hidden states: the fixtures, and each way in which a producer is known to fail.
//!
//! Job: prove that a good file loads and that each bad one is refused with its own countable reason.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use drafthorse_models::hidden_states::{Expected, HiddenStates, Reason};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn reason(path: &Path, expected: Expected<'_>) -> Reason {
    let error = HiddenStates::open(path, expected).unwrap_err();
    let message = error.to_string();
    assert!(message.starts_with(&path.display().to_string()) && message.lines().count() == 2, "{message}");
    error.reason
}

#[test]
fn the_good_fixture_loads_with_its_tokens_and_rows() {
    let states = HiddenStates::open(&fixture("hs_good.safetensors"), Expected::default()).unwrap();
    assert_eq!((states.tokens(), states.layers(), states.hidden()), (12, 3, 8));
    assert_eq!(states.token_ids().len(), 12);
    let mut values = vec![0.0f32; states.states().elements()];
    states.states().to_f32(&mut values);
    assert!(values.iter().all(|x| x.is_finite()) && values.iter().any(|x| *x != 0.0));
}

#[test]
fn bad_fixtures_can_be_counted_by_reason() {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for name in ["hs_nan", "hs_zero_layer", "hs_short", "hs_nan"] {
        let reason = reason(&fixture(&format!("{name}.safetensors")), Expected::default());
        *counts.entry(reason.as_str()).or_default() += 1;
    }
    assert_eq!(counts, BTreeMap::from([("non_finite", 2), ("rows_differ", 1), ("zero_layer", 1)]));
}

#[test]
fn what_the_caller_knows_is_compared() {
    let path = fixture("hs_good.safetensors");
    let tokens = HiddenStates::open(&path, Expected::default()).unwrap().token_ids().to_vec();
    let all = Expected { layers: Some(3), hidden: Some(8), token_ids: Some(&tokens) };
    assert!(HiddenStates::open(&path, all).is_ok());
    assert_eq!(reason(&path, Expected { layers: Some(2), ..all }), Reason::WrongShape);
    assert_eq!(reason(&path, Expected { hidden: Some(16), ..all }), Reason::WrongShape);
    let mut other = tokens.clone();
    other[5] += 1;
    let error = HiddenStates::open(&path, Expected { token_ids: Some(&other), ..all }).unwrap_err();
    assert_eq!(error.reason, Reason::OtherTokens);
    assert!(error.detail.contains("position 5"), "{error}");
    assert_eq!(reason(&path, Expected { token_ids: Some(&tokens[..11]), ..all }), Reason::OtherTokens);
}

#[test]
fn cut_locked_infinite_and_foreign_files_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("request.safetensors");
    let good = std::fs::read(fixture("hs_good.safetensors")).unwrap();
    for keep in [0, 7, 100, good.len() - 1] {
        std::fs::write(&path, &good[..keep]).unwrap();
        assert_eq!(reason(&path, Expected::default()), Reason::WrongLength, "{keep} bytes");
    }
    // The states follow the header; +Inf in bf16 is 0x7f80.
    let mut infinite = good.clone();
    infinite[168..170].copy_from_slice(&0x7f80u16.to_le_bytes());
    std::fs::write(&path, &infinite).unwrap();
    assert_eq!(reason(&path, Expected::default()), Reason::NonFinite);
    let renamed = std::str::from_utf8(&good[8..168]).unwrap().replace("token_ids", "token_idz");
    std::fs::write(&path, [&good[..8], renamed.as_bytes(), &good[168..]].concat()).unwrap();
    assert_eq!(reason(&path, Expected::default()), Reason::WrongLayout);
    assert_eq!(reason(&dir.path().join("absent"), Expected::default()), Reason::Unreadable);

    std::fs::write(&path, &good).unwrap();
    let lock = std::fs::File::create(dir.path().join("request.safetensors.lock")).unwrap();
    lock.lock().unwrap();
    assert_eq!(reason(&path, Expected::default()), Reason::BeingWritten);
    lock.unlock().unwrap();
    assert!(HiddenStates::open(&path, Expected::default()).is_ok(), "a released lock file may stay behind");
}
