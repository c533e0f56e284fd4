//! Held-out batches between training batches: a measurement that disturbs what it measures.
//!
//! What happened: the first held-out batch after the gate made a forward-only graph be captured while others replayed, and training died. Here a run that
//! measures after every step must end with the bits of a run that never measures.

use drafthorse_telemetry::Event;
use drafthorse_train::checkpoint;
use std::path::Path;

/// Weights, moments and all, as they lie on disk.
fn final_tensors(run: &Path) -> Vec<(String, Vec<u8>)> {
    let path = checkpoint::newest(run).expect("a run ends with a checkpoint");
    let bytes = std::fs::read(path.join("state.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<_> = file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect();
    tensors.sort();
    assert!(tensors.len() > 8);
    tensors
}

#[test]
fn measuring_changes_no_bit_of_what_is_trained() {
    let dataset = drafthorse_seed::dataset();
    let (silent, silent_events) = drafthorse_seed::run(drafthorse_seed::config(&dataset, &["eval.every=0"]));
    let (measured, events) = drafthorse_seed::run(drafthorse_seed::config(&dataset, &["eval.every=1"]));
    let held_out = |events: &[Event]| events.iter().filter(|e| matches!(e, Event::HeldOut(_))).count();
    assert_eq!((held_out(&silent_events), held_out(&events)), (0, 5), "before the first step and after each of four");
    let losses = |events: &[Event]| {
        events.iter().filter_map(|e| if let Event::Step(s) = e { Some(s.loss.to_bits()) } else { None }).collect::<Vec<_>>()
    };
    assert_eq!(losses(&silent_events).len(), 4);
    assert_eq!(losses(&silent_events), losses(&events));
    assert!(final_tensors(silent.path()) == final_tensors(measured.path()), "a held-out batch changed a weight or a moment");
    let (other, _) = drafthorse_seed::run(drafthorse_seed::config(&dataset, &["seed=6"]));
    assert!(final_tensors(silent.path()) != final_tensors(other.path()), "the comparison can fail");
}

#[test]
fn measuring_with_two_drafters_hangs_nobody() {
    let dataset = drafthorse_seed::dataset();
    let overrides = ["eval.every=1", "pipeline.drafters=[0, 1]", "pipeline.targets=[0, 1]", "optimizer.global_batch=1"];
    let (_run, events) = drafthorse_seed::run(drafthorse_seed::config(&dataset, &overrides));
    let steps = events.iter().filter(|e| matches!(e, Event::Step(_))).count();
    assert_eq!(steps, 4, "with one batch per step a drafter joins every step with nothing");
}
