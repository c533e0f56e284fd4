//! Whole runs on the demo's target and chats: determinism, replicas against one drafter, resume, sweep, stop, divergence.
//!
//! Each run is a few steps of a one-layer drafter, so that the file takes seconds.
#![cfg(not(shuttle))]

use drafthorse_data::prepare::{PrepareOptions, prepare};
use drafthorse_data::tokenize::ChatTokenizer;
use drafthorse_telemetry::{Event, Recorder};
use drafthorse_train::checkpoint::{self, CheckpointError, Loaded};
use drafthorse_train::config::RunConfig;
use drafthorse_train::frozen::CpuBackend;
use drafthorse_train::pipeline::cancel::Cancel;
use drafthorse_train::rounds::Rounds;
use drafthorse_train::run::{Options, Outcome, Resume, RunFailure, train};
use drafthorse_train::setup::{Setup, today};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo")
}

/// The demo's chats as a dataset, prepared once for this file.
fn data() -> &'static Path {
    static DATA: OnceLock<TempDir> = OnceLock::new();
    DATA.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let target = demo().join("target");
        let tokenizer = ChatTokenizer::load(&target, "demo", &serde_json::Map::new(), today()).expect("the demo's tokenizer");
        let chats = dir.path().join("chats.jsonl");
        let all = std::fs::read_to_string(demo().join("completions.jsonl")).expect("the demo's completions");
        let some: String = all.lines().take(160).map(|l| format!("{l}\n")).collect();
        std::fs::write(&chats, some).unwrap();
        prepare(&tokenizer, &PrepareOptions::new(vec![chats], dir.path().join("data")), &|_| {}).expect("the chats prepare");
        dir
    })
    .path()
}

fn config(overrides: &[&str]) -> RunConfig {
    let text = format!(
        "target = {:?}\ndata = {:?}\nseed = 11\n[drafter]\nlayers = 1\n[batch]\ntoken_budget = 512\nmicro_blocks = 24\nanchors = 8\n\
         [optimizer]\nlr = 2e-3\nsteps = 6\nglobal_batch = 2\n[eval]\nevery = 3\nheld_out = {{ rows = 6 }}\n[checkpoint]\nevery = 2\nkeep_last = 99\n",
        demo().join("target"),
        data().join("data")
    );
    let overrides: Vec<String> = overrides.iter().map(|s| (*s).to_owned()).collect();
    RunConfig::parse(&text, "test", &overrides).expect("the test's config")
}

struct Ran {
    dir: TempDir,
    outcome: Result<Outcome, RunFailure>,
    events: Vec<Event>,
}

fn run(config: RunConfig, resume: Vec<PathBuf>, before: impl FnOnce(&Cancel, &Path)) -> Ran {
    run_changed(config, resume, |_| {}, before)
}

fn run_changed(
    config: RunConfig,
    resume: Vec<PathBuf>,
    change: impl FnOnce(&mut Setup),
    before: impl FnOnce(&Cancel, &Path),
) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let mut setup = Setup::open(config, &|_, _| {}).expect("setup");
    change(&mut setup);
    let backend = CpuBackend::new(Some(2)).unwrap();
    let (recorder, events) = Recorder::channel(100_000);
    let cancel = Cancel::new();
    before(&cancel, dir.path());
    let options = Options {
        run_dir: dir.path().into(),
        resume,
        build_id: "test".into(),
        command_line: vec!["test".into()],
        grace: Duration::from_secs(5),
        on_stuck: |names, cause| panic!("{names:?} did not come back after: {cause}"),
    };
    let resume = Resume::open(&setup, &options).map_err(RunFailure::from);
    let outcome = resume.and_then(|resume| train(&setup, &backend, &options, resume, &recorder, &cancel));
    drop(recorder);
    Ran { dir, outcome, events: events.try_iter().map(|s| s.event).collect() }
}

impl Ran {
    fn ok(&self) -> &Outcome {
        self.outcome.as_ref().unwrap_or_else(|e| panic!("the run failed: {e}"))
    }

    fn losses(&self) -> Vec<f64> {
        self.events.iter().filter_map(|e| if let Event::Step(s) = e { Some(s.loss) } else { None }).collect()
    }

    fn final_state(&self) -> Loaded {
        Loaded::open(&checkpoint::newest(self.dir.path()).expect("a checkpoint")).unwrap()
    }
}

fn tensors(of: &Loaded) -> Vec<(String, Vec<u8>)> {
    let bytes = std::fs::read(of.path.join("state.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<(String, Vec<u8>)> = file.tensors().into_iter().map(|(n, t)| (n, t.data().to_vec())).collect();
    all.sort();
    all
}

fn largest_difference(a: &Loaded, b: &Loaded) -> f32 {
    let floats = |b: &[u8]| b.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect::<Vec<_>>();
    tensors(a)
        .iter()
        .zip(&tensors(b))
        .filter(|((name, _), _)| !name.ends_with(".m") && !name.ends_with(".v"))
        .flat_map(|((_, x), (_, y))| floats(x).into_iter().zip(floats(y)).map(|(x, y)| (x - y).abs()))
        .fold(0.0, f32::max)
}

#[test]
fn two_runs_of_one_seed_are_equal_bit_for_bit_and_the_loss_falls() {
    let (a, b) =
        (run(config(&[]), vec![], |_, _| {}), run(config(&["pipeline.targets=[0, 1]", "pipeline.threads=1"]), vec![], |_, _| {}));
    assert_eq!(a.ok().steps, 6);
    assert_eq!(tensors(&a.final_state()), tensors(&b.final_state()), "a second target and another thread count change no bit");
    let losses = a.losses();
    assert_eq!(losses.len(), 6);
    assert!(losses[5] < losses[0] - 0.05, "{losses:?}");
    let held_out: Vec<u64> =
        a.events.iter().filter_map(|e| if let Event::HeldOut(h) = e { Some(h.step) } else { None }).collect();
    assert_eq!(held_out, [0, 3, 6]);
    assert!(a.ok().exports[0].join("model.safetensors").is_file());
}

#[test]
fn one_and_two_drafters_give_the_same_weights_to_rounding() {
    let one = run(config(&[]), vec![], |_, _| {});
    let two = run(config(&["pipeline.drafters=[0, 1]"]), vec![], |_, _| {});
    two.ok();
    let difference = largest_difference(&one.final_state(), &two.final_state());
    // Adam turns a gradient below rounding noise into a step of up to lr; six steps of at most 2e-3 bound what rounding may do to such an entry.
    assert!(difference < 2e-3, "{difference}");
    for (a, b) in one.losses().iter().zip(two.losses()) {
        assert!((a - b).abs() < 2e-5 * a.abs(), "{a} {b}");
    }
    // Same initial weights, other gradients: the bound above tells these apart, so it is no bound that everything meets.
    let other_gradients = run(config(&["batch.anchors=3"]), vec![], |_, _| {});
    let difference = largest_difference(&one.final_state(), &other_gradients.final_state());
    assert!(difference > 2e-3, "{difference}");
}

#[test]
fn a_resumed_run_ends_with_the_same_bits_whatever_the_number_of_targets() {
    let whole = run(config(&[]), vec![], |_, _| {});
    for step in [2u64, 4] {
        let from = whole.dir.path().join("checkpoints").join(checkpoint::folder_name(step));
        let rest = run(config(&["pipeline.targets=[0, 1]"]), vec![from], |_, _| {});
        assert_eq!(rest.ok().steps, 6);
        assert_eq!(rest.losses().len() as u64, 6 - step);
        assert_eq!(tensors(&whole.final_state()), tensors(&rest.final_state()), "resumed after step {step}");
    }
    let other = run(config(&["seed=12"]), vec![whole.dir.path().join("checkpoints").join(checkpoint::folder_name(2))], |_, _| {});
    assert!(other.outcome.unwrap_err().to_string().contains("seed 11"), "another seed is another run");
}

#[test]
fn epochs_that_end_in_a_short_step_are_crossed_and_resumed() {
    // Two drafters and a G that divides no epoch: the short step at an epoch's end leaves a drafter with fewer batches, or with none.
    let overrides = ["optimizer.global_batch=4", "pipeline.drafters=[0, 1]", "eval.every=0", "checkpoint.every=1"];
    let setup = Setup::open(config(&overrides), &|_, _| {}).unwrap();
    let schedule = setup.builder.schedule();
    let mut rounds = Rounds::new(|e| schedule.epoch_batches(e), 4);
    let (first, steps) = (rounds.total_steps(1), rounds.total_steps(2) + 2);
    let last = rounds.locate(first - 1);
    assert!(last.count < 4 && rounds.locate(steps - 1).epoch == 2, "sizes of this test: {last:?}, {steps} steps");
    let steps_key = format!("optimizer.steps={steps}");
    let all = [&overrides[..], &[steps_key.as_str()]].concat();
    let whole = run(config(&all), vec![], |_, _| {});
    assert_eq!(whole.ok().steps, steps);
    for step in [first - 1, first, first + 1] {
        let from = whole.dir.path().join("checkpoints").join(checkpoint::folder_name(step));
        let rest = run(config(&all), vec![from], |_, _| {});
        assert_eq!(
            tensors(&whole.final_state()),
            tensors(&rest.final_state()),
            "resumed after step {step}, epoch 1 begins at {first}"
        );
    }
    let one = run(config(&[&all[..], &["pipeline.drafters=[0]"]].concat()), vec![], |_, _| {});
    for (a, b) in one.losses().iter().zip(whole.losses()) {
        assert!((a - b).abs() < 2e-3 * a.abs(), "{a} {b}");
    }
}

#[test]
fn a_stop_request_saves_and_the_rest_resumes_to_the_same_bits() {
    let long = ["optimizer.steps=40", "eval.every=7"];
    let whole = run(config(&long), vec![], |_, _| {});
    let stopped = run(config(&[long[0], long[1], "checkpoint.every=1"]), vec![], |cancel, dir| {
        let (cancel, saves) = (cancel.clone(), dir.join("checkpoints"));
        std::thread::spawn(move || {
            // After the first save, so that there is something to go on from whatever the stop itself does.
            while checkpoint::list(&saves).is_empty() {
                std::thread::sleep(Duration::from_millis(2));
            }
            cancel.request_stop("SIGTERM");
        });
    });
    assert_eq!(stopped.ok().stopped.as_deref(), Some("SIGTERM"));
    assert!((1..40).contains(&stopped.ok().steps), "{}", stopped.ok().steps);
    assert!(stopped.ok().exports.is_empty());
    let from = stopped.ok().checkpoint.clone().expect("a stop saves");
    assert!(from.ends_with(checkpoint::folder_name(stopped.ok().steps)));
    let rest = run(config(&long), vec![from], |_, _| {});
    assert_eq!(tensors(&whole.final_state()), tensors(&rest.final_state()));
}

#[test]
fn a_stop_before_the_gate_ends_the_run_at_once() {
    let ran = run(config(&[]), vec![], |cancel, _| {
        cancel.request_stop("SIGTERM");
    });
    let error = ran.outcome.as_ref().unwrap_err();
    assert_eq!(error.kind(), drafthorse_train::pipeline::cancel::Kind::Stopped, "{error}");
    assert!(error.to_string().contains("before the first step"), "{error}");
    assert!(ran.losses().is_empty());
}

#[test]
fn a_launch_from_an_earlier_step_leaves_the_later_checkpoints_aside() {
    let dir = tempfile::tempdir().unwrap();
    let go = |overrides: &[&str], resume: Vec<PathBuf>| {
        let setup = Setup::open(config(overrides), &|_, _| {}).expect("setup");
        let (recorder, events) = Recorder::channel(100_000);
        let options = Options {
            run_dir: dir.path().into(),
            resume,
            build_id: "test".into(),
            command_line: vec![],
            grace: Duration::from_secs(5),
            on_stuck: |_, _| {},
        };
        let resume = Resume::open(&setup, &options).unwrap();
        let outcome = train(&setup, &CpuBackend::new(Some(2)).unwrap(), &options, resume, &recorder, &Cancel::new());
        drop(recorder);
        (outcome, events.try_iter().map(|s| s.event).collect::<Vec<_>>())
    };
    go(&[], vec![]).0.unwrap();
    let root = dir.path().join("checkpoints");
    let first = tensors(&Loaded::open(&checkpoint::newest(&root).unwrap()).unwrap());
    let (outcome, events) = go(&["optimizer.lr=1e-4"], vec![root.join(checkpoint::folder_name(2))]);
    assert_eq!(outcome.unwrap().checkpoint.unwrap(), root.join(checkpoint::folder_name(6)));
    assert!(events.iter().any(|e| matches!(e, Event::Warning(w) if w.code == "superseded")));
    let second = tensors(&Loaded::open(&root.join(checkpoint::folder_name(6))).unwrap());
    assert!(first != second, "the newest checkpoint is the new launch's");
    let aside = std::fs::read_dir(&root)
        .unwrap()
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with("superseded-"))
        .count();
    assert!(aside >= 2, "{aside}");
}

#[test]
fn a_config_that_changes_the_batches_is_not_the_same_run() {
    let whole = run(config(&[]), vec![], |_, _| {});
    let from = whole.dir.path().join("checkpoints").join(checkpoint::folder_name(2));
    for (key, what) in [
        ("batch.token_budget=640", "batch.token_budget"),
        ("batch.anchors=4", "batch.anchors"),
        ("eval.held_out={ rows = 3 }", "eval.held_out"),
    ] {
        let error = run(config(&[key]), vec![from.clone()], |_, _| {}).outcome.unwrap_err().to_string();
        assert!(error.contains(what), "{key}: {error}");
    }
}

#[test]
fn the_best_is_on_disk_although_no_regular_save_was_due() {
    let ran =
        run(config(&["optimizer.steps=9", "checkpoint.every=0", "eval.every=1", "checkpoint.keep_last=1"]), vec![], |_, _| {});
    let measured: Vec<(f64, u64)> = ran
        .events
        .iter()
        .filter_map(|e| if let Event::HeldOut(h) = e { (h.step > 0).then_some((h.loss, h.step)) } else { None })
        .collect();
    let best = measured.iter().copied().min_by(|a, b| a.0.total_cmp(&b.0)).expect("nine measurements");
    let meta = ran.final_state().meta;
    assert_eq!(meta.best, Some(best));
    let root = ran.dir.path().join("checkpoints");
    assert_eq!(Loaded::open(&root.join(checkpoint::folder_name(best.1))).unwrap().meta.held_out_loss, Some(best.0));
}

#[test]
fn a_sweep_trains_each_variant_as_if_it_were_alone() {
    let text = config(&["pipeline.drafters=[0, 1]"]).to_toml()
        + "\n[[sweep]]\nname = \"deep\"\ndrafter = { layers = 2, target_layer_ids = [1, 3] }\n[[sweep]]\nname = \"plain\"\n";
    let both = run(RunConfig::parse(&text, "sweep", &[]).unwrap(), vec![], |_, _| {});
    both.ok();
    let deep = run(config(&["drafter.layers=2", "drafter.target_layer_ids=[1, 3]"]), vec![], |_, _| {});
    let plain = run(config(&[]), vec![], |_, _| {});
    for (name, alone) in [("deep", &deep), ("plain", &plain)] {
        let swept = Loaded::open(&checkpoint::newest(&both.dir.path().join(name)).unwrap()).unwrap();
        assert_eq!(tensors(&swept), tensors(&alone.final_state()), "variant {name}");
    }
}

#[test]
fn a_variant_without_regular_saves_is_exported() {
    let text = config(&["checkpoint.every=0", "eval.every=0", "optimizer.steps=1"]).to_toml() + "\n[[sweep]]\nname = \"only\"\n";
    for _ in 0..5 {
        let ran = run(RunConfig::parse(&text, "sweep", &[]).unwrap(), vec![], |_, _| {});
        assert!(ran.ok().exports[0].join("model.safetensors").is_file());
    }
}

#[test]
fn steps_that_are_not_finite_are_skipped_counted_and_end_the_run() {
    let mut config = config(&["optimizer.clip=1e30", "optimizer.steps=40", "optimizer.max_skipped=3", "optimizer.warmup=0.0"]);
    // No config may ask for this; what a run does when its weights explode is the same whatever made them.
    config.optimizer.lr = 1e30;
    let ran = run(config, vec![], |_, _| {});
    assert!(matches!(ran.outcome, Err(RunFailure::Diverged(_))), "{:?}", ran.outcome);
    let skipped = ran.events.iter().filter(|e| matches!(e, Event::Step(s) if s.skipped)).count();
    assert_eq!(skipped, 3, "every skipped step is recorded, the last one too");
    for (_, path) in checkpoint::list(&ran.dir.path().join("checkpoints")) {
        let loaded = Loaded::open(&path).unwrap();
        for (name, bytes) in tensors(&loaded) {
            assert!(
                bytes.chunks_exact(4).all(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]).is_finite()),
                "{name} of {path:?}"
            );
        }
    }
}

#[test]
fn a_variant_of_a_sweep_that_diverges_is_ended_alone() {
    let text = config(&["pipeline.drafters=[0, 1]", "optimizer.max_skipped=2"]).to_toml()
        + "\n[[sweep]]\nname = \"wild\"\n[[sweep]]\nname = \"plain\"\n";
    let sweep = RunConfig::parse(&text, "sweep", &[]).unwrap();
    // Weights overflow at the first save in one, and steps are not finite in the other; no config may ask for either.
    type Change = fn(&mut Setup);
    let wild: [Change; 2] =
        [|setup| setup.variants[0].config.optimizer.lr = 1e39, |setup| setup.variants[0].config.drafter.init_std = 1e30];
    let plain = run(config(&[]), vec![], |_, _| {});
    for change in wild {
        let both = run_changed(sweep.clone(), vec![], change, |_, _| {});
        let outcome = both.ok();
        assert_eq!((outcome.steps, outcome.exports.len()), (6, 1), "{outcome:?}");
        assert_eq!(outcome.diverged[0].0, "wild");
        assert!(!both.dir.path().join("wild/export").exists());
        let told = |e: &Event| matches!(e, Event::Warning(w) if w.code == "diverged" && w.text.contains("`wild`"));
        assert!(both.events.iter().any(told), "{:?}", both.events.last());
        assert!(both.events.iter().any(|e| matches!(e, Event::Failure(f) if f.worker.contains("wild"))));
        let swept = Loaded::open(&checkpoint::newest(&both.dir.path().join("plain")).unwrap()).unwrap();
        assert_eq!(tensors(&swept), tensors(&plain.final_state()), "the other variant is trained as if it were alone");
    }
    let all = |setup: &mut Setup| setup.variants.iter_mut().for_each(|v| v.config.drafter.init_std = 1e30);
    let none = run_changed(sweep, vec![], all, |_, _| {});
    assert!(matches!(none.outcome, Err(RunFailure::Diverged(_))), "{:?}", none.outcome);
}

#[test]
fn weights_that_are_not_finite_are_not_saved_and_the_checkpoint_before_them_stays() {
    let whole = run(config(&[]), vec![], |_, _| {});
    let from = whole.dir.path().join("checkpoints").join(checkpoint::folder_name(2));
    let mut explodes = config(&[]);
    explodes.optimizer.lr = 1e39;
    let ran = run(explodes, vec![from.clone()], |_, _| {});
    let Err(RunFailure::Run(error)) = &ran.outcome else { panic!("{:?}", ran.outcome) };
    // The error itself is kept, because the exit code follows its type.
    let source = error.cause.source.as_ref().and_then(|e| e.downcast_ref::<CheckpointError>());
    assert!(matches!(source, Some(CheckpointError::NotFinite { .. })), "{error}");
    assert!(checkpoint::list(&ran.dir.path().join("checkpoints")).is_empty());
    assert!(Loaded::open(&from).unwrap().proven);
}

#[test]
fn a_damaged_checkpoint_is_refused_before_anything_of_the_run_is_touched() {
    let whole = run(config(&[]), vec![], |_, _| {});
    let root = whole.dir.path().join("checkpoints");
    let from = root.join(checkpoint::folder_name(4));
    let state = from.join("state.safetensors");
    let mut bytes = std::fs::read(&state).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&state, bytes).unwrap();
    let before = checkpoint::list(&root);
    let ran = run(config(&[]), vec![from], |_, _| {});
    let text = ran.outcome.as_ref().unwrap_err().to_string();
    let older = before.iter().rfind(|(step, _)| *step < 4).unwrap().1.display().to_string();
    assert!(text.contains("state.safetensors is damaged") && text.contains(&older), "{text}");
    assert!(ran.events.is_empty());
    assert_eq!(checkpoint::list(&root), before);
}

#[test]
fn a_run_begins_only_with_a_drafter_that_is_what_the_config_says() {
    let whole = run(config(&[]), vec![], |_, _| {});
    let export = whole.ok().exports[0].display().to_string();
    let from = format!("drafter.init_from={export}");
    run(config(&[&from]), vec![], |_, _| {}).ok();
    for (change, field) in [
        ("drafter.layers=2", "layers"),
        ("drafter.block_size=8", "block_size"),
        ("drafter.target_layer_ids=[1, 3]", "target_layer_ids"),
        ("drafter.mask_token_id=7", "mask_token_id"),
        ("drafter.rope_theta=123456.0", "rope theta"),
        ("drafter.kv_heads=1", "kv_heads"),
    ] {
        let ran = run(config(&[&from, change]), vec![], |_, _| {});
        let text = ran.outcome.as_ref().unwrap_err().to_string();
        assert!(text.contains(&format!("its {field} is")) && text.lines().count() == 2, "{change}: {text}");
        assert!(ran.events.is_empty(), "{change}: refused before anything began");
    }
    let absent = run(config(&["drafter.init_from=/no/such/drafter"]), vec![], |_, _| {});
    assert!(absent.outcome.as_ref().unwrap_err().to_string().contains("/no/such/drafter") && absent.events.is_empty());
}

#[test]
fn a_run_that_never_took_a_step_did_not_end_well() {
    let mut config = config(&["optimizer.steps=2", "eval.every=0"]);
    config.drafter.init_std = 1e30;
    let ran = run(config, vec![], |_, _| {});
    assert!(matches!(ran.outcome, Err(RunFailure::Diverged(_))), "{:?}", ran.outcome);
    assert!(!ran.dir.path().join("export").exists());
}
