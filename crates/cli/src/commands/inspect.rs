//! `drafthorse inspect`: what is in a dataset, and what of a row is supervised.
//!
//! Refuses to decode with a tokenizer other than the dataset's. Invariant: supervised text stands between ⟦ and ⟧ where there is no colour, so that
//! the difference never depends on a terminal.

use super::prepare::summary;
use crate::exit::{Exit, Failure};
use crate::format::count;
use crate::progress::Progress;
use crate::screen::Screen;
use crate::target_folder::resolve;
use anstyle::AnsiColor;
use clap::Args;
use drafthorse_data::dataset::{Dataset, OpenOptions, Row};
use drafthorse_data::tokenize::ChatTokenizer;
use serde_json::{Map, json};
use std::path::PathBuf;

/// Show a dataset's card, or one row with its supervised tokens marked
///
/// Without --row: counts, lengths and dropped rows. With --row: the row's text; what the drafter learns to predict is coloured
/// (between ⟦ and ⟧ where there is no colour).
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse inspect data/
  drafthorse inspect data/ --row 17
  drafthorse inspect data/ --row 17 --target ./qwen3 --json | jq '.pieces[] | select(.supervised)'")]
pub struct Inspect {
    /// Dataset folder
    data: PathBuf,
    /// Row to show, from 0
    #[arg(long, value_name = "N")]
    row: Option<usize>,
    /// Folder of the target, for its tokenizer [default: the one the card names]
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Inspect, screen: Screen) -> Result<Exit, Failure> {
    let progress = Progress::new(screen, "index");
    let dataset = Dataset::open(&args.data, &OpenOptions::default(), &|done, total| {
        progress.update(done, total, || format!("{} bytes", count(done)));
    })?;
    drop(progress);
    dataset.notices().iter().for_each(|n| screen.note(n));
    match args.row {
        Some(row) => show_row(args, &dataset, row, screen),
        None => show_summary(&dataset, screen),
    }
}

fn show_summary(dataset: &Dataset, screen: Screen) -> Result<Exit, Failure> {
    let header = &dataset.index().header;
    match dataset.card() {
        Some(card) => {
            screen.say(summary(card, screen))?;
            screen.json(card)?;
        }
        None => {
            let share = 100.0 * header.supervised as f64 / header.tokens.max(1) as f64;
            screen.say(format!("rows        {} (made elsewhere: there is no card)", count(header.rows)))?;
            screen.say(format!("tokens      {}", count(header.tokens)))?;
            screen.say(format!("supervised  {} ({share:.1} %)", count(header.supervised)))?;
            screen.say(format!("anchors     {}", count(header.candidates)))?;
            screen.say(format!("largest id  {} (row {})", header.max_token_id, header.max_token_row))?;
            screen.json(header)?;
        }
    }
    screen.say(format!("fingerprint {}", dataset.fingerprint()))?;
    Ok(Exit::Done)
}

fn show_row(args: &Inspect, dataset: &Dataset, number: usize, screen: Screen) -> Result<Exit, Failure> {
    let named = args.target.clone().or_else(|| dataset.card().map(|c| PathBuf::from(&c.target))).ok_or_else(|| {
        let what = format!("dataset {} has no card that names its target", args.data.display());
        Failure::new(Exit::Usage, what, "pass --target DIR, the target whose tokenizer made it")
    })?;
    let folder = resolve(&named)?;
    let tokenizer = ChatTokenizer::load(&folder, &named.display().to_string(), &Map::new(), drafthorse_train::setup::today())?;
    if !dataset.check_tokenizer(tokenizer.tokenizer_hash())? {
        screen.note("note: the dataset has no card: that it was made with this tokenizer is not proven");
    }
    let mut row = Row::default();
    dataset.read_row(number, &mut row)?;
    let runs = row.mask.chunk_by(|a, b| a == b);
    let mut pieces = Vec::new();
    let mut at = 0;
    for run in runs {
        pieces.push((tokenizer.decode(&row.ids[at..at + run.len()])?, run[0] == 1, run.len()));
        at += run.len();
    }
    let supervised = row.mask.iter().filter(|&&m| m == 1).count();
    screen.note(format!(
        "row {number}: {} tokens, {supervised} supervised ({:.1} %), {} anchor candidates",
        row.ids.len(),
        100.0 * supervised as f64 / row.ids.len().max(1) as f64,
        dataset.index().candidates[number]
    ));
    let text: String = pieces
        .iter()
        .map(|(text, marked, _)| match (marked, screen.color) {
            (false, _) => text.clone(),
            (true, true) => screen.paint(AnsiColor::Green.on_default(), text),
            (true, false) => format!("⟦{text}⟧"),
        })
        .collect();
    screen.say(text)?;
    let listed: Vec<_> =
        pieces.iter().map(|(text, marked, n)| json!({"text": text, "supervised": marked, "tokens": n})).collect();
    screen.json(&json!({"row": number, "input_ids": row.ids, "loss_mask": row.mask, "pieces": listed}))?;
    Ok(Exit::Done)
}
