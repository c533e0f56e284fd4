//! Tests of the config: overrides, unknown keys, refusals, the learning rate, sweeps. Refuses to touch files.
//! Invariant: every refusal names its key.

use super::*;

const SMALL: &str = "target = \"t\"\ndata = \"d\"\n[drafter]\nlayers = 3\n";

#[test]
fn overrides_win_and_round_trip() {
    let overrides = ["drafter.layers=2", "optimizer.lr=1e-3", "name=night", "eval.held_out={ rows = 8 }"].map(str::to_owned);
    let config = RunConfig::parse(SMALL, "small.toml", &overrides).unwrap();
    assert_eq!((config.drafter.layers, config.optimizer.lr, config.name.as_deref()), (2, 1e-3, Some("night")));
    assert_eq!(config.eval.held_out, HeldOut::Rows(8));
    assert_eq!(RunConfig::parse(&config.to_toml(), "again", &[]).unwrap(), config);
}

#[test]
fn an_unknown_key_names_the_nearest() {
    let error = RunConfig::parse("target = \"t\"\ndata = \"d\"\n[drafter]\nlayer = 3\n", "x.toml", &[]).unwrap_err().to_string();
    assert!(error.contains("x.toml") && error.contains("line 4") && error.contains("did you mean `layers`"), "{error}");
    let error = RunConfig::parse(SMALL, "x.toml", &["optimizer.wramup=0.1".into()]).unwrap_err().to_string();
    assert!(error.contains("did you mean `warmup`"), "{error}");
}

#[test]
fn a_value_of_another_type_names_its_key_and_line() {
    let small = |more: &str| format!("target = \"t\"\ndata = \"d\"\n{more}\n");
    for (text, overrides, words) in [
        (small("[drafter]\nlayers = \"three\""), vec![], ["x.toml: line 4", "`drafter.layers`", "a whole number"]),
        (small("[optimizer]\nlr = \"x\""), vec![], ["x.toml: line 4", "`optimizer.lr`", "a number"]),
        (small("[batch]\nbuckets = -1"), vec![], ["x.toml: line 4", "`batch.buckets`", "-1"]),
        (small("seed = true"), vec![], ["x.toml: line 3", "`seed`", "boolean"]),
        (small("[eval]\nheld_out = 3"), vec![], ["x.toml: line 4", "`eval.held_out`", ""]),
        (small("[drafter"), vec![], ["x.toml: line 3", "", ""]),
        (small(""), vec!["batch.buckets=many"], ["override `batch.buckets=many`", "`batch.buckets`", "a whole number"]),
        (small(""), vec!["optimizer.betas=0.9"], ["override `optimizer.betas=0.9`", "`optimizer.betas`", ""]),
        (small("").replace("target", "traget"), vec![], ["x.toml: line 1", "`traget`", "did you mean `target`"]),
        (small("[drafer]\nlayers = 3"), vec![], ["x.toml: line 3", "`drafer`", "did you mean `drafter`"]),
        (small("[optimiser]\nlr = 1e-3"), vec![], ["x.toml: line 3", "`optimiser`", "did you mean `optimizer`"]),
        (small("lr = 1e-3"), vec![], ["x.toml: line 3", "`lr`", "did you mean `optimizer.lr`"]),
        (small("[optimizer]\nlayers = 3"), vec![], ["in [optimizer]", "`layers`", "did you mean `drafter.layers`"]),
        (small("zzz = 1"), vec![], ["`zzz`", "remove it", "checkpoint"]),
        (small(""), vec!["drafer.layers=3"], ["`drafer`", "did you mean `drafter`", ""]),
        (String::from("data = \"d\"\n"), vec![], ["x.toml", "`target` is missing", ""]),
    ] {
        let overrides: Vec<String> = overrides.into_iter().map(str::to_owned).collect();
        let error = RunConfig::parse(&text, "x.toml", &overrides).unwrap_err().to_string();
        assert!(words.iter().all(|w| error.contains(w)) && error.lines().count() == 2, "{text}{overrides:?}\n{error}");
    }
}

#[test]
fn refuses_what_cannot_work() {
    for (item, key) in [
        ("batch.micro_blocks=0", "batch.micro_blocks"),
        ("optimizer.lr=-1.0", "optimizer.lr"),
        ("pipeline.device=tpu", "pipeline.device"),
        ("pipeline.drafters=[]", "pipeline.targets"),
        ("optimizer.warmup=2.0", "optimizer.warmup"),
        ("optimizer.clip=0.0", "optimizer.clip"),
        ("optimizer.betas=[1.0, 0.9]", "optimizer.betas"),
        ("optimizer.lr=1e30", "optimizer.lr"),
        ("optimizer.lr=nan", "optimizer.lr"),
        ("optimizer.weight_decay=1e30", "optimizer.weight_decay"),
        ("drafter.init_std=1e30", "drafter.init_std"),
        ("drafter.gamma=0.0", "drafter.gamma"),
        ("drafter.rope_theta=inf", "drafter.rope_theta"),
        ("batch.buckets=0", "batch.buckets"),
        ("batch.buckets=4294967295", "batch.buckets"),
        ("batch.token_budget=4294967295", "batch.token_budget"),
        ("batch.micro_blocks=9223372036854775807", "batch.micro_blocks"),
        ("batch.max_rows=9223372036854775807", "batch.max_rows"),
        ("drafter.layers=4294967296", "drafter.layers"),
        ("drafter.intermediate=9223372036854775807", "drafter.intermediate"),
        ("drafter.head_dim=9223372036854775807", "drafter.head_dim"),
        ("drafter.sliding_window=0", "drafter.sliding_window"),
        ("drafter.sliding_layers=[]\ndrafter.sliding_window=64", "drafter.sliding_window"),
        ("optimizer.epochs=4294967295", "optimizer.epochs"),
        ("optimizer.global_batch=9223372036854775807", "optimizer.global_batch"),
        ("pipeline.threads=100000", "pipeline.threads"),
        ("pipeline.threads=0", "pipeline.threads"),
        ("pipeline.stall_s=9223372036854775807", "pipeline.stall_s"),
        ("checkpoint.keep_last=9223372036854775807", "checkpoint.keep_last"),
        ("optimizer.steps=0", "optimizer.steps"),
        ("name=..", "`name`"),
        ("name=a/b", "`name`"),
        ("name=\"\"", "`name`"),
        ("drafter.sliding_layers=[3]", "drafter.sliding_layers"),
    ] {
        let overrides: Vec<String> = item.lines().map(str::to_owned).collect();
        let error = RunConfig::parse(SMALL, "x.toml", &overrides).unwrap_err().to_string();
        assert!(error.contains(key) && error.lines().count() == 2, "{item}: {error}");
    }
    assert!(RunConfig::parse(SMALL, "x.toml", &["no-equals".into()]).is_err());
}

#[test]
fn the_rate_warms_up_and_decays_to_zero() {
    let o = OptimizerSection { warmup: 0.1, lr: 1.0, ..OptimizerSection::default() };
    assert_eq!(o.rate(0, 100), 0.1);
    assert_eq!(o.rate(9, 100), 1.0);
    assert_eq!(o.rate(10, 100), 1.0);
    assert!(o.rate(99, 100) < 1e-3 && o.rate(99, 100) > 0.0);
    let no_warmup = OptimizerSection { warmup: 0.0, lr: 1.0, ..OptimizerSection::default() };
    assert_eq!(no_warmup.rate(0, 10), 1.0);
}

#[test]
fn sweep_variants_merge_and_keep_the_batches_common() {
    let text = format!(
        "{SMALL}[pipeline]\ndrafters = [0, 1]\n[[sweep]]\nname = \"a\"\ndrafter = {{ layers = 1 }}\n[[sweep]]\nname = \"b\"\noptimizer = {{ lr = 0.1 }}\n"
    );
    let config = RunConfig::parse(&text, "s.toml", &[]).unwrap();
    let variants = config.variants().unwrap();
    assert_eq!((variants[0].1.drafter.layers, variants[1].1.drafter.layers), (1, 3));
    assert_eq!(variants[1].1.optimizer.lr, 0.1);
    for (name, other) in [("b", "b"), ("", "b"), ("../x", "b")] {
        let named = text.replacen("\"a\"", &format!("{name:?}"), 1).replacen("\"b\"", &format!("{other:?}"), 1);
        assert!(RunConfig::parse(&named, "s.toml", &[]).unwrap_err().to_string().contains("sweep.name"), "{name:?}");
    }
    let mut bad = config.clone();
    bad.sweep[1].drafter.insert("gamma".into(), 4.0.into());
    assert!(bad.variants().unwrap_err().to_string().contains("all variants share"));
    let mut bad = config.clone();
    bad.sweep[0].optimizer.insert("global_batch".into(), 9.into());
    assert!(bad.variants().unwrap_err().to_string().contains("all variants share"));
}
