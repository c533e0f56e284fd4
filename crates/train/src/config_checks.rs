//! What a config's values may be: ranges, and keys that must agree with one another.
//!
//! Job: refuse by key what cannot work, before anything is opened. Refuses nothing that only a target or a dataset can tell. Invariants: upper limits lie
//! beyond every use and below where sizes in bytes would overflow 64 bits, or a loop over them would not end in a lifetime; each refusal names its key.

use crate::config::{ConfigError, RunConfig};

/// (key, value, least, most) of every whole number.
fn counts(config: &RunConfig) -> Vec<(&'static str, u64, u64, u64)> {
    let (d, b, o, p) = (&config.drafter, &config.batch, &config.optimizer, &config.pipeline);
    let mut list = vec![
        ("drafter.layers", d.layers as u64, 1, 256),
        ("drafter.block_size", d.block_size as u64, 2, 1 << 12),
        ("batch.token_budget", u64::from(b.token_budget), 1, 1 << 22),
        ("batch.max_rows", b.max_rows as u64, 1, 1 << 20),
        ("batch.buckets", b.buckets as u64, 1, 1 << 10),
        ("batch.anchors", u64::from(b.anchors), 1, 1 << 20),
        ("batch.micro_blocks", b.micro_blocks as u64, 1, 1 << 16),
        ("batch.loss_chunk", b.loss_chunk as u64, 1, 1 << 22),
        ("optimizer.epochs", u64::from(o.epochs), 1, 10_000),
        ("optimizer.global_batch", o.global_batch, 1, 1 << 20),
        ("optimizer.max_skipped", u64::from(o.max_skipped), 1, u64::from(u32::MAX)),
        ("pipeline.queue_depth", p.queue_depth as u64, 1, 1 << 10),
        ("pipeline.stall_s", p.stall_s, 1, 1 << 28),
        ("checkpoint.keep_last", config.checkpoint.keep_last as u64, 1, 10_000),
    ];
    let given = [
        ("drafter.features", d.features.map(|n| n as u64), 1, 1 << 10),
        ("drafter.heads", d.heads.map(|n| n as u64), 1, 1 << 14),
        ("drafter.kv_heads", d.kv_heads.map(|n| n as u64), 1, 1 << 14),
        ("drafter.head_dim", d.head_dim.map(|n| n as u64), 2, 1 << 14),
        ("drafter.intermediate", d.intermediate.map(|n| n as u64), 1, 1 << 22),
        ("drafter.sliding_window", d.sliding_window.map(|n| n as u64), 1, 1 << 30),
        ("batch.max_length", b.max_length.map(u64::from), 2, 1 << 30),
        ("batch.max_blocks", b.max_blocks.map(|n| n as u64), 1, 1 << 20),
        ("optimizer.steps", o.steps, 1, 1 << 30),
        ("pipeline.threads", p.threads.map(|n| n as u64), 1, MOST_THREADS as u64),
    ];
    list.extend(given.into_iter().filter_map(|(key, got, least, most)| Some((key, got?, least, most))));
    list
}

/// Most compute threads that may be asked for.
pub const MOST_THREADS: usize = 1024;

/// A number that is no count, and where it may lie.
struct Number {
    key: &'static str,
    value: f64,
    low: f64,
    /// Whether `low` itself is allowed.
    from_low: bool,
    high: f64,
    /// What to write instead.
    usual: &'static str,
}

impl Number {
    fn above(key: &'static str, value: f64, low: f64, high: f64, usual: &'static str) -> Number {
        Number { key, value, low, from_low: false, high, usual }
    }

    fn from_0(key: &'static str, value: f64, high: f64, usual: &'static str) -> Number {
        Number { key, value, low: 0.0, from_low: true, high, usual }
    }

    /// Written so that NaN does not fit.
    fn fits(&self) -> bool {
        (self.value > self.low || (self.from_low && self.value == self.low)) && self.value <= self.high
    }
}

fn numbers(config: &RunConfig) -> Vec<Number> {
    let (d, o) = (&config.drafter, &config.optimizer);
    let mut list = vec![
        // Adam moves a weight by up to the rate in every step, and decay multiplies it by 1 - rate * weight_decay.
        Number::above("optimizer.lr", o.lr, 0.0, 1.0, "6e-4 is usual"),
        Number::from_0("optimizer.warmup", o.warmup, 1.0, "it is a share of the run; 0.04 is usual"),
        Number::from_0("optimizer.weight_decay", f64::from(o.weight_decay), 1.0, "0 to 0.1 is usual"),
        Number::above("optimizer.eps", f64::from(o.eps), 0.0, 1.0, "1e-8 is usual"),
        Number::above("optimizer.clip", f64::from(o.clip), 0.0, f64::from(f32::MAX), "1 is usual"),
        Number::above("drafter.init_std", f64::from(d.init_std), 0.0, 10.0, "0.02 is usual, about 1/√hidden for narrow targets"),
    ];
    list.extend(d.gamma.map(|gamma| Number::above("drafter.gamma", gamma, 0.0, 1e6, "7 goes with block size 16")));
    list.extend(d.rope_theta.map(|theta| Number::above("drafter.rope_theta", theta, 1.0, 1e12, "1e6 and 1e7 are in use")));
    list
}

fn check_ranges(config: &RunConfig) -> Result<(), ConfigError> {
    if let Some((key, got, least, most)) = counts(config).into_iter().find(|(_, got, least, most)| got < least || got > most) {
        let todo = format!("set it between {least} and {most}, or leave it out for the default");
        return Err(value(key, format!("{got} cannot work"), &todo));
    }
    match numbers(config).into_iter().find(|number| !number.fits()) {
        Some(Number { key, value: x, low, from_low, high, usual }) => {
            let from = if from_low { "from" } else { "above" };
            Err(value(key, format!("{x:?} cannot work: it lies {from} {low} and at most at {high}"), usual))
        }
        None => Ok(()),
    }
}

/// Refuses values that cannot work, and writes out what is short for something else.
///
/// # Errors
/// [`ConfigError::Value`], naming the key.
pub(crate) fn checked(mut config: RunConfig) -> Result<RunConfig, ConfigError> {
    if let Some(index) = config.pipeline.device.strip_prefix("cuda:") {
        let gpu: u32 =
            index.parse().map_err(|_| value("pipeline.device", format!("`cuda:{index}` names no GPU"), "write cuda:0"))?;
        (config.pipeline.targets, config.pipeline.drafters) = (vec![gpu], vec![gpu]);
        config.pipeline.device = "cuda".into();
    }
    if !["cpu", "cuda"].contains(&config.pipeline.device.as_str()) {
        return Err(value("pipeline.device", format!("`{}` is no device", config.pipeline.device), "use cpu, cuda or cuda:N"));
    }
    let (o, p) = (&config.optimizer, &config.pipeline);
    check_ranges(&config)?;
    let d = &config.drafter;
    if let Some(layer) = d.sliding_layers.iter().flatten().find(|l| **l >= d.layers) {
        return Err(value("drafter.sliding_layers", format!("there is no layer {layer} of {}", d.layers), "layers count from 0"));
    }
    if d.sliding_window.is_some() && d.sliding_layers.as_ref().map_or(d.layers == 1, Vec::is_empty) {
        let todo = "name the layers in drafter.sliding_layers, or leave the window out";
        return Err(value("drafter.sliding_window", "no layer slides".into(), todo));
    }
    if d.features.is_some() && d.target_layer_ids.is_some() {
        return Err(value("drafter.features", "target_layer_ids says it already".into(), "keep one of the two"));
    }
    let betas = o.betas.iter().all(|b| (0.0..1.0).contains(b));
    if !betas {
        return Err(value("optimizer.betas", format!("{:?}", o.betas), "both lie in [0, 1): [0.9, 0.999] is usual"));
    }
    if p.targets.is_empty() || p.drafters.is_empty() {
        return Err(value("pipeline.targets", "a run needs a target and a drafter".into(), "e.g. targets = [0], drafters = [0]"));
    }
    let names: std::collections::BTreeSet<&str> = config.sweep.iter().map(|v| v.name.as_str()).collect();
    let plain = |n: &str| {
        n.starts_with(|c: char| c.is_ascii_alphanumeric()) && n.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    if names.len() != config.sweep.len() || !names.iter().all(|n| plain(n)) {
        let todo = "each variant has its own folder: give every one a name of its own, of letters, digits, `-`, `_` and `.`";
        return Err(value("sweep.name", format!("{:?}", config.sweep.iter().map(|v| &v.name).collect::<Vec<_>>()), todo));
    }
    if config.name.as_deref().is_some_and(|n| !plain(n)) {
        let what = format!("{:?} is no folder name", config.name.as_deref().unwrap_or_default());
        return Err(value("name", what, "the run's folder lies in `out`: use letters, digits, `-`, `_` and `.`"));
    }
    if !config.sweep.is_empty() && config.sweep.len() != p.drafters.len() {
        let what = format!("{} variants for {} drafter loops", config.sweep.len(), p.drafters.len());
        return Err(value("pipeline.drafters", what, "a sweep trains one variant per drafter loop"));
    }
    Ok(config)
}

/// A value that cannot work.
pub(crate) fn value(key: &'static str, what: String, todo: &str) -> ConfigError {
    ConfigError::Value { key, what, todo: todo.into() }
}
