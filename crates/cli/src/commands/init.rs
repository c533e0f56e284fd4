//! `drafthorse init`: a commented config that already fits target and data.
//!
//! Refuses to write files: it prints. Invariants: every key that a config knows is in the text, with its default or the value derived for this target and
//! data; parsing the text gives exactly the config it was made from.

use crate::exit::{Exit, Failure};
use crate::screen::Screen;
use crate::target_folder::resolve;
use clap::Args;
use drafthorse_data::batch::default_max_blocks;
use drafthorse_data::dataset::{Dataset, OpenOptions};
use drafthorse_data::schedule::HeldOut;
use drafthorse_models::hf_config::TargetConfig;
use drafthorse_train::config::RunConfig;
use drafthorse_train::setup::Setup;
use std::path::PathBuf;
use toml::Value;

/// Print a commented config for a target and a dataset
///
/// Every key is there with its meaning. Values that depend on target and data (token budget, micro-batch, held-out rows) are set to fit
/// them; keys that are derived anyway (layer ids, bucket edges, mask token …) stand commented out with the value they have.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse init --target Qwen/Qwen3-8B --data data/ > q8.toml
  drafthorse init --target ./smollm2 --data data/ --device cpu > small.toml")]
pub struct Init {
    /// Folder of the target (or its hub name, if it is in the local cache)
    #[arg(long, value_name = "DIR")]
    target: PathBuf,
    /// Prepared dataset
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: String,
}

/// Largest budget that is proposed for a CPU; more tokens per step only mean fewer steps per hour there.
const CPU_BUDGET: u32 = 4096;
/// Batches per epoch that a proposed budget aims for at least.
const BATCHES_WANTED: u64 = 64;

/// Widths below this want larger initial weights than the default.
const WIDE: usize = 500;

/// Runs the command.
pub fn run(args: &Init, screen: Screen) -> Result<Exit, Failure> {
    let dataset = Dataset::open(&args.data, &OpenOptions::default(), &|_, _| {})?;
    let hidden = TargetConfig::open(&resolve(&args.target)?)?.hidden;
    let config = propose(args, &dataset, hidden)?;
    let mut checked = config.clone();
    checked.target = resolve(&config.target)?;
    let setup = Setup::open(checked, &|_, _| {})?;
    setup.notices.iter().for_each(|n| screen.note(format!("note: {n}")));
    screen.say_part(&document(&config, &setup))?;
    screen.json(&config)?;
    Ok(Exit::Done)
}

/// Defaults, fitted to the data.
fn propose(args: &Init, dataset: &Dataset, hidden: usize) -> Result<RunConfig, Failure> {
    let required = toml::Table::from_iter([
        ("target".to_owned(), Value::String(args.target.display().to_string())),
        ("data".to_owned(), Value::String(args.data.display().to_string())),
    ]);
    let overrides = [format!("pipeline.device={}", args.device)];
    let mut config = RunConfig::parse(&required.to_string(), "init", &overrides)?;
    if hidden < WIDE {
        config.drafter.init_std = (100.0 / (hidden as f32).sqrt()).round() / 100.0;
    }
    let index = dataset.index();
    let round = |n: u64| n.next_multiple_of(256);
    let longest = round(u64::from(index.lengths.iter().copied().max().unwrap_or(1)));
    let most = if config.pipeline.device == "cpu" { CPU_BUDGET } else { config.batch.token_budget };
    let wanted = round(index.header.tokens / BATCHES_WANTED);
    config.batch.token_budget = wanted.clamp(longest, u64::from(most).max(longest)) as u32;
    config.batch.micro_blocks = config.batch.micro_blocks.min(default_max_blocks(config.batch.token_budget));
    let HeldOut::Rows(rows) = config.eval.held_out else { return Ok(config) };
    config.eval.held_out = match rows.min(dataset.len() / 10) {
        0 => HeldOut::None,
        n => HeldOut::Rows(n),
    };
    Ok(config)
}

/// A key of the document.
struct Key {
    section: &'static str,
    name: &'static str,
    about: &'static str,
    /// For a key that is derived when absent: the value it has now.
    derived: Option<String>,
}

fn key(section: &'static str, name: &'static str, about: &'static str) -> Key {
    Key { section, name, about, derived: None }
}

fn derived(section: &'static str, name: &'static str, about: &'static str, value: impl Into<Value>) -> Key {
    Key { section, name, about, derived: Some(value.into().to_string()) }
}

fn integers<T: Copy + TryInto<i64>>(list: &[T]) -> Value {
    Value::Array(list.iter().map(|&n| Value::Integer(n.try_into().unwrap_or(i64::MAX))).collect())
}

/// The text.
fn document(config: &RunConfig, setup: &Setup) -> String {
    // By way of the text, which writes 32-bit floats as they were meant (0.9, not 0.8999999761581421).
    let table: toml::Table = config.to_toml().parse().expect("a config's own text is TOML");
    let mut out = format!(
        "# Run config for {} on {}: {} steps as it stands.\n# Keys that are commented out have the value shown unless they are set.\n# Any key can be \
         overridden on the command line: drafthorse train run.toml drafter.layers=3\n",
        config.target.display(),
        config.data.display(),
        setup.total_steps
    );
    let mut section = "";
    for key in keys(config, setup) {
        if key.section != section {
            section = key.section;
            out.push_str(&format!("\n[{section}]\n"));
        }
        let at = if section.is_empty() { Some(&table) } else { table.get(section).and_then(Value::as_table) };
        out.push_str(&wrapped(key.about));
        match (at.and_then(|t| t.get(key.name)), &key.derived) {
            (Some(value), _) => out.push_str(&format!("{} = {value}\n", key.name)),
            (None, Some(value)) => out.push_str(&format!("# {} = {value}\n", key.name)),
            (None, None) => unreachable!("`{}` has neither a default nor a derived value", key.name),
        }
    }
    out.push_str(
        "\n# Several drafters on the same features, one per entry of pipeline.drafters; keys of [drafter] and [optimizer] may differ.\n# [[sweep]]\n# name = \
         \"three-layers\"\n# drafter = { layers = 3 }\n# optimizer = { lr = 1e-3 }\n",
    );
    out
}

/// Comment lines of at most about 100 characters.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::from("#")];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is a line");
        if last.len() + word.len() > 100 {
            lines.push(format!("# {word}"));
        } else {
            last.push(' ');
            last.push_str(word);
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

fn keys(config: &RunConfig, setup: &Setup) -> Vec<Key> {
    let draft = &setup.variants[0].draft;
    let schedule = setup.builder.schedule();
    let mask_about: &'static str = "Token id that fills the masked slots of a block. The default is the tokenizer's mask token, else an embedding row that no token uses, else a token that occurs in no training row.";
    let int = |n: usize| Value::Integer(n as i64);
    let layers = integers(&draft.target_layer_ids);
    let gamma = drafthorse_data::anchors::decay_gamma(config.drafter.block_size, config.drafter.gamma).unwrap_or(7.0);
    let name = crate::run_folder::default_name(&config.target, "YYYYMMDD-HHMMSS");
    vec![
        key("", "target", "Folder of the target, or its hub name if it is in the local cache."),
        key("", "data", "Prepared dataset."),
        key("", "out", "Where run folders are made."),
        derived("", "name", "Name of the run folder.", name),
        key("", "seed", "Seeds initial weights, order of samples and anchors."),
        key("drafter", "layers", "Decoder layers of the drafter."),
        key("drafter", "block_size", "B: tokens per block, the anchor included; one pass drafts B-1 tokens."),
        derived(
            "drafter",
            "target_layer_ids",
            "Target layers whose output the drafter listens to (0-based), strictly increasing.",
            layers,
        ),
        derived(
            "drafter",
            "features",
            "How many target layers to listen to, when target_layer_ids is absent.",
            int(draft.target_layer_ids.len()),
        ),
        derived("drafter", "heads", "Query heads. As the target's.", int(draft.heads)),
        derived("drafter", "kv_heads", "Key and value heads. As the target's.", int(draft.kv_heads)),
        derived("drafter", "head_dim", "Elements of a head. As the target's.", int(draft.head_dim)),
        derived("drafter", "intermediate", "Width of the MLP. As the target's.", int(draft.intermediate)),
        derived("drafter", "rope_theta", "RoPE base. As the target's.", draft.rope.theta),
        derived(
            "drafter",
            "sliding_window",
            "Window of the sliding layers, in tokens; no layer slides when it is absent.",
            int(2048),
        ),
        derived(
            "drafter",
            "sliding_layers",
            "Layers that slide (0-based), when there is a window: all but the last.",
            integers(&(0..draft.layers - 1).collect::<Vec<_>>()),
        ),
        derived("drafter", "mask_token_id", mask_about, int(setup.mask_token.id as usize)),
        derived(
            "drafter",
            "gamma",
            "Slot k weighs exp(-(k-1)/gamma) in the loss. Known for blocks of 16, 10 and 8; must be set for others.",
            gamma,
        ),
        key(
            "drafter",
            "init_std",
            "Standard deviation of the initial linear weights; norms start at 1. Narrow targets want about 1/sqrt(hidden).",
        ),
        derived("drafter", "init_from", "Exported drafter to start from, instead of random weights.", "runs/earlier/export"),
        key(
            "batch",
            "token_budget",
            "Context tokens of a batch. Samples are packed until it is full; no sample may be longer (see cut_long).",
        ),
        key(
            "batch",
            "batching",
            "packed: samples lie behind one another. padded: rows x longest keeps the budget, at most 64 rows (kept for comparison).",
        ),
        key("batch", "max_rows", "Samples of a batch at most."),
        derived(
            "batch",
            "bucket_edges",
            "Edges of the length buckets. Quantiles of the data's lengths when absent.",
            integers(schedule.buckets().edges()),
        ),
        key("batch", "buckets", "Length buckets, when bucket_edges is absent."),
        derived("batch", "max_length", "Cut samples to this many tokens.", int(config.batch.token_budget as usize)),
        key("batch", "cut_long", "Cut samples that are longer than the budget, instead of refusing them."),
        key("batch", "anchors", "Anchors (block starts) drawn per sample and epoch, at most."),
        derived(
            "batch",
            "max_blocks",
            "Blocks of a batch at most. A sixth of the token budget when absent.",
            int(default_max_blocks(config.batch.token_budget)),
        ),
        key("batch", "micro_blocks", "Blocks of a micro-batch: activations grow with it."),
        key("batch", "loss_chunk", "Rows of logits that exist at once."),
        key("batch", "recompute", "Repeat each layer's forward in its backward: less memory, more time."),
        key("optimizer", "lr", "Peak learning rate."),
        key("optimizer", "schedule", "After warm-up: cosine (down to 0 at the last step) or constant."),
        key("optimizer", "warmup", "Share of all steps over which the rate rises."),
        key("optimizer", "betas", "Adam's beta 1 and 2."),
        key("optimizer", "eps", "Adam's epsilon."),
        key("optimizer", "weight_decay", "Decoupled weight decay."),
        key("optimizer", "clip", "Clip the global gradient norm to this."),
        key("optimizer", "epochs", "Passes over the data."),
        derived("optimizer", "steps", "Optimizer steps of the whole run; overrides epochs.", int(setup.total_steps as usize)),
        key("optimizer", "global_batch", "Batches per optimizer step, over all drafters."),
        key("optimizer", "max_skipped", "So many steps in a row with a loss or gradient that is not finite stop the run."),
        key(
            "pipeline",
            "device",
            "cpu, or cuda where the build has it; cuda:3 is short for cuda with target and drafter on GPU 3.",
        ),
        key("pipeline", "targets", "One target loop per entry; an entry is a GPU."),
        key("pipeline", "drafters", "One drafter loop per entry. Replicas, unless there is a sweep."),
        key("pipeline", "queue_depth", "Batches that may wait for a target."),
        derived(
            "pipeline",
            "threads",
            "CPU threads for compute. All cores when absent.",
            int(std::thread::available_parallelism().map_or(1, usize::from)),
        ),
        key("pipeline", "stall_s", "Seconds without progress after which the run is stopped as stalled."),
        key("eval", "every", "Steps between held-out measurements; 0 turns them off."),
        key("eval", "held_out", "Held-out rows: \"none\", { rows = 64 } or { share = 0.01 }."),
        key(
            "checkpoint",
            "every",
            "Steps between checkpoints; the last step and every stop are saved anyway. 0 saves only those.",
        ),
        key("checkpoint", "keep_last", "Checkpoints kept, besides the best by held-out loss."),
    ]
}
