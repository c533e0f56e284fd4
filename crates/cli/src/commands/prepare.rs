//! `drafthorse prepare`: chat files → a dataset folder, with counts and reasons.
//!
//! Refuses nothing of its own beyond the command line; see the data crate for what it drops and why. Invariant: every dropped row is in the
//! summary with its reason.

use crate::exit::{Exit, Failure};
use crate::format::{bytes, count, parse_threads, seconds, si};
use crate::progress::Progress;
use crate::screen::Screen;
use crate::signals::Signals;
use crate::target_folder::resolve;
use chrono::{NaiveDate, NaiveTime};
use clap::{Args, ValueEnum};
use drafthorse_data::card::Card;
use drafthorse_data::prepare::{OnError, PrepareOptions, prepare};
use drafthorse_data::tokenize::ChatTokenizer;
use drafthorse_train::pipeline::cancel::Cancel;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Tokenize chats for a target and mark what it generates
///
/// Reads chat files (one JSON object a line: `messages`, ShareGPT `conversations`, or `input_ids` with `loss_mask`), renders each
/// conversation with the target's own chat template, tokenizes it, marks the tokens that the assistant generates, and writes a
/// dataset folder in the layout of `datasets.save_to_disk`, with a card that counts everything kept, cut and dropped.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse prepare chats.jsonl --target Qwen/Qwen3-8B -o data/
  drafthorse prepare a.jsonl b.jsonl --target ./smollm2 -o data/ --max-length 3072 --on-error skip
  drafthorse prepare chats.jsonl --target ./qwen3 -o data/ --role bot=assistant --template-var enable_thinking=false")]
pub struct Prepare {
    /// Chat files, JSON lines, read in this order
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Folder of the target (or its hub name, if it is in the local cache)
    #[arg(long, value_name = "DIR")]
    target: PathBuf,
    /// Dataset folder to write
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
    /// Replace a dataset that is there already
    #[arg(long)]
    overwrite: bool,
    /// Cut rows to this many tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(2..))]
    max_length: u32,
    /// Drop rows with fewer supervised tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 3)]
    min_supervised: usize,
    /// What to do with lines that cannot be read
    #[arg(long, value_enum, default_value_t = OnLineError::Stop)]
    on_error: OnLineError,
    /// Read role A as role B, e.g. bot=assistant (may be repeated)
    #[arg(long = "role", alias = "role-map", value_name = "A=B")]
    roles: Vec<String>,
    /// Drop rows whose answer a length limit cut, instead of masking their end
    #[arg(long)]
    drop_truncated: bool,
    /// Threads that tokenize [default: all cores]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    threads: Option<usize>,
    /// Variable for the chat template, e.g. enable_thinking=false (may be repeated)
    #[arg(long = "template-var", value_name = "K=V")]
    template_vars: Vec<String>,
    /// Date that the chat template shows, if it shows one [default: today]
    #[arg(long, value_name = "YYYY-MM-DD")]
    date: Option<NaiveDate>,
}

/// What to do with lines that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnLineError {
    /// Stop and name file, line and byte
    Stop,
    /// Drop and count them
    Skip,
}

/// Runs the command.
pub fn run(args: &Prepare, screen: Screen) -> Result<Exit, Failure> {
    let target = resolve(&args.target)?;
    let now = args.date.map_or_else(drafthorse_train::setup::today, |d| d.and_time(NaiveTime::MIN));
    let variables = args.template_vars.iter().map(|v| variable(v)).collect::<Result<Map<_, _>, _>>()?;
    let tokenizer = ChatTokenizer::load(&target, &args.target.display().to_string(), &variables, now)?;
    let mut options = PrepareOptions::new(args.files.clone(), args.out.clone());
    options.overwrite = args.overwrite;
    options.max_len = args.max_length as usize;
    options.min_supervised = args.min_supervised;
    options.on_error = match args.on_error {
        OnLineError::Stop => OnError::Stop,
        OnLineError::Skip => OnError::Skip,
    };
    for pair in &args.roles {
        let (from, to) = split("--role", pair)?;
        options.roles.insert(from, to)?;
    }
    options.drop_truncated = args.drop_truncated;
    options.threads = args.threads;
    options.template_date = Some(now.format("%Y-%m-%d").to_string());
    let stop = Arc::clone(&options.stop);
    let first = move || stop.store(true, Ordering::Relaxed);
    let signals = Signals::listen_and(&Cancel::new(), screen, "removing what was written", first)?;
    let progress = Progress::new(screen, "prepare");
    let card = prepare(&tokenizer, &options, &|p| {
        let per_second = |n: u64| si(n as f64 / progress.elapsed_s().max(1e-3));
        progress.update(p.bytes, p.bytes_total, || {
            let dropped = p.rows - p.kept;
            format!("{} rows, {dropped} dropped, {} rows/s, {} tokens/s", count(p.rows), per_second(p.rows), per_second(p.tokens))
        });
    })?;
    let elapsed_s = progress.elapsed_s();
    drop(progress);
    signals.end();
    screen.say(summary(&card, screen))?;
    let read: u64 = card.sources.iter().map(|s| s.bytes).sum();
    screen.say(format!(
        "\nwrote {} in {}: {} of chats, {} tokens/s",
        args.out.display(),
        seconds(elapsed_s),
        bytes(read),
        si(card.tokens as f64 / elapsed_s.max(1e-3))
    ))?;
    screen.tell(format!("next: drafthorse init --target {} --data {} > run.toml", args.target.display(), args.out.display()))?;
    screen.json(&card)?;
    Ok(Exit::Done)
}

/// The card in a few lines.
pub fn summary(card: &Card, screen: Screen) -> String {
    let bold = anstyle::Style::new().bold();
    let warn = anstyle::AnsiColor::Yellow.on_default();
    let mut lines = vec![
        format!("{}  {}", screen.paint(bold, "target    "), card.target),
        format!("{}  {} of {} read", screen.paint(bold, "rows      "), count(card.rows), count(card.rows_read)),
        format!("{}  {}", screen.paint(bold, "tokens    "), count(card.tokens)),
        format!("{}  {} ({:.1} %)", screen.paint(bold, "supervised"), count(card.supervised), 100.0 * card.supervised_share),
        format!("{}  {}", screen.paint(bold, "anchors   "), count(card.candidates)),
    ];
    let roles: Vec<String> = card.messages.iter().map(|(role, n)| format!("{} {role}", count(*n))).collect();
    if !roles.is_empty() {
        lines.push(format!("{}  {}", screen.paint(bold, "messages  "), roles.join(", ")));
    }
    let special = [
        (card.rows_cut, format!("rows cut to {} tokens", card.max_len)),
        (card.truncated_answers, "answers cut by a length limit, kept with their end masked".to_owned()),
        (card.special_text_rows, "rows with special-token text, encoded as ordinary text".to_owned()),
        (card.straddling_tokens, "tokens across a span's border, masked".to_owned()),
        (card.turns_without_end, "assistant turns without an end-of-turn token".to_owned()),
    ];
    for (n, what) in special.into_iter().filter(|(n, _)| *n > 0) {
        lines.push(format!("{}  {} {what}", screen.paint(bold, "note      "), count(n)));
    }
    let most = card.lengths.iter().map(|b| b.rows).max().unwrap_or(0).max(1);
    for (i, bar) in card.lengths.iter().enumerate() {
        let title = if i == 0 { "lengths   " } else { "          " };
        let width = (30 * bar.rows).div_ceil(most) as usize;
        let range = format!("{}-{}", bar.from, bar.to - 1);
        lines.push(format!("{}  {range:>11}  {:>9}  {}", screen.paint(bold, title), count(bar.rows), "▇".repeat(width)));
    }
    if let Some(most) = card.max_positions.filter(|_| card.rows_beyond_positions > 0) {
        let rows = count(card.rows_beyond_positions);
        let text = format!(
            "long        {rows} rows have more tokens than the target has positions ({most}): prepare with --max-length {most}, or train with batch.max_length = {most}"
        );
        lines.push(screen.paint(warn, &text));
    }
    for (reason, dropped) in &card.dropped {
        let text = format!("dropped     {} {reason}: {}", count(dropped.rows), dropped.examples.join("; "));
        lines.push(screen.paint(warn, &text));
    }
    lines.join("\n")
}

fn split<'a>(flag: &str, pair: &'a str) -> Result<(&'a str, &'a str), Failure> {
    pair.split_once('=').filter(|(a, b)| !a.is_empty() && !b.is_empty()).ok_or_else(|| {
        Failure::new(Exit::Usage, format!("{flag} {pair}: there is no `=` between two words"), format!("write {flag} a=b"))
    })
}

/// `k=v` with v as JSON, or as a string when it is none.
fn variable(pair: &str) -> Result<(String, Value), Failure> {
    let (key, text) = split("--template-var", pair)?;
    Ok((key.to_owned(), serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))))
}
