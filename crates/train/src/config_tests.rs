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
fn refuses_what_cannot_work() {
    for (item, key) in [
        ("batch.micro_blocks=0", "batch.micro_blocks"),
        ("optimizer.lr=-1.0", "optimizer.lr"),
        ("pipeline.device=tpu", "pipeline.device"),
        ("pipeline.drafters=[]", "pipeline.targets"),
        ("optimizer.warmup=2.0", "optimizer.warmup"),
        ("optimizer.clip=0.0", "optimizer"),
        ("optimizer.betas=[1.0, 0.9]", "optimizer"),
        ("optimizer.steps=0", "optimizer.steps"),
        ("name=..", "`name`"),
        ("name=a/b", "`name`"),
        ("name=\"\"", "`name`"),
        ("drafter.sliding_layers=[3]", "drafter.sliding_layers"),
    ] {
        let error = RunConfig::parse(SMALL, "x.toml", &[item.into()]).unwrap_err().to_string();
        assert!(error.contains(key), "{item}: {error}");
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
