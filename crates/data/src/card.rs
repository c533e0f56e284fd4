//! The dataset card: what a prepared dataset holds, where it came from and what was left out; as card.json and README.md.
//!
//! Invariant: the card is a function of inputs and settings (no clock, no host name), so equal runs write equal cards.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{DataError, Result};

/// File name of the machine-readable card.
pub const CARD_FILE: &str = "card.json";

/// One input file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Path as given.
    pub path: String,
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256 of the whole file.
    pub sha256: String,
    /// Rows (non-empty lines) in it.
    pub rows: u64,
}

/// Rows dropped for one reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dropped {
    /// How many.
    pub rows: u64,
    /// The first few: `file:line`, and what was particular.
    pub examples: Vec<String>,
}

/// A bar of the length histogram: rows with `from ≤ length < to`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LengthBar {
    /// Smallest length, tokens.
    pub from: u32,
    /// First length beyond, tokens.
    pub to: u32,
    /// Rows.
    pub rows: u64,
}

/// What is known about a prepared dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Card {
    /// Version of this layout.
    pub version: u32,
    /// The target's name.
    pub target: String,
    /// SHA-256 of the target's tokenizer.json.
    pub tokenizer_sha256: String,
    /// SHA-256 of the chat template's source.
    pub template_sha256: String,
    /// Extra template variables.
    pub template_variables: serde_json::Map<String, serde_json::Value>,
    /// The date that the template saw, `YYYY-MM-DD`; absent when it shows none.
    pub template_date: Option<String>,
    /// Extra roles and what they were rendered as.
    pub roles: BTreeMap<String, String>,
    /// Input files.
    pub sources: Vec<Source>,
    /// Maximum length of a row, tokens.
    pub max_len: u32,
    /// Rows read.
    pub rows_read: u64,
    /// Rows kept.
    pub rows: u64,
    /// Rows dropped, per reason.
    pub dropped: BTreeMap<String, Dropped>,
    /// Rows cut to `max_len`.
    pub rows_cut: u64,
    /// Kept rows whose answer a length limit had cut (its end-of-turn token is masked).
    pub truncated_answers: u64,
    /// Kept rows whose messages hold special-token text, which was encoded as ordinary text.
    pub special_text_rows: u64,
    /// Tokens across a border of a supervised span, masked.
    pub straddling_tokens: u64,
    /// Assistant turns after which the template writes no end-of-turn token.
    pub turns_without_end: u64,
    /// Opening assistant messages that no prompt leads to, masked.
    pub openings_masked: u64,
    /// Messages per role in kept rows.
    pub messages: BTreeMap<String, u64>,
    /// Tokens.
    pub tokens: u64,
    /// Supervised tokens.
    pub supervised: u64,
    /// Supervised tokens over tokens.
    pub supervised_share: f64,
    /// Anchor candidates.
    pub candidates: u64,
    /// Positions that the target was made for; absent when its config.json does not say.
    #[serde(default)]
    pub max_positions: Option<u64>,
    /// Kept rows with more tokens than that. They cannot be trained on as they are.
    #[serde(default)]
    pub rows_beyond_positions: u64,
    /// Lengths of kept rows.
    pub lengths: Vec<LengthBar>,
    /// Largest token id.
    pub max_token_id: u32,
    /// The smallest ids that occur in no row; a mask token may be taken from them.
    pub unused_ids: Vec<u32>,
    /// SHA-256 over the content of all rows.
    pub fingerprint: String,
}

impl Card {
    /// Reads `card.json` of the dataset folder `dir`; `None` when there is none (a foreign dataset).
    ///
    /// # Errors
    /// When the card is there but unreadable.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(CARD_FILE);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(DataError::io("read", &path)(e)),
        };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|e| DataError::dataset(&path, format!("not a dataset card: {e}"), "prepare the dataset again"))
    }

    /// The card as Markdown.
    pub fn markdown(&self) -> String {
        let mut out = String::new();
        let share = |n: u64, of: u64| 100.0 * n as f64 / of.max(1) as f64;
        // Writing into a String cannot fail.
        let mut line = |text: String| {
            let _ = writeln!(out, "{text}");
        };
        line(format!("# Tokenized chats for {}\n", self.target));
        line("| | |\n|---|---|".into());
        line(format!("| rows | {} of {} read |", self.rows, self.rows_read));
        line(format!("| tokens | {} |", self.tokens));
        line(format!("| supervised | {} ({:.1} %) |", self.supervised, 100.0 * self.supervised_share));
        line(format!("| anchor candidates | {} |", self.candidates));
        line(format!("| rows cut to {} tokens | {} |", self.max_len, self.rows_cut));
        if let Some(most) = self.max_positions {
            line(format!("| rows longer than the target's {most} positions | {} |", self.rows_beyond_positions));
        }
        line(format!("| answers cut by a length limit, kept | {} |", self.truncated_answers));
        line(format!("| rows with special-token text (encoded as ordinary text) | {} |", self.special_text_rows));
        line(format!("| tokens across a span's border, masked | {} |", self.straddling_tokens));
        line(format!("| turns without an end-of-turn token | {} |", self.turns_without_end));
        line(format!("| opening assistant messages that no prompt leads to, masked | {} |", self.openings_masked));
        line(format!("| largest token id | {} |", self.max_token_id));
        line("\n## Dropped rows\n".into());
        if self.dropped.is_empty() {
            line("None.".into());
        } else {
            line("| reason | rows | share | examples |\n|---|---|---|---|".into());
            for (reason, d) in &self.dropped {
                let examples = d.examples.join("; ").replace('|', "\\|");
                line(format!("| {reason} | {} | {:.2} % | {examples} |", d.rows, share(d.rows, self.rows_read)));
            }
        }
        line("\n## Messages per role\n\n| role | messages |\n|---|---|".into());
        self.messages.iter().for_each(|(role, n)| line(format!("| {role} | {n} |")));
        line("\n## Lengths\n\n| tokens | rows | share |\n|---|---|---|".into());
        for bar in &self.lengths {
            line(format!("| {}-{} | {} | {:.1} % |", bar.from, bar.to - 1, bar.rows, share(bar.rows, self.rows)));
        }
        line("\n## Provenance\n".into());
        for s in &self.sources {
            line(format!("- `{}`: {} rows, {} bytes, sha256 `{}`", s.path, s.rows, s.bytes, s.sha256));
        }
        line(format!("- tokenizer.json sha256 `{}`", self.tokenizer_sha256));
        line(format!("- chat template sha256 `{}`", self.template_sha256));
        line(format!("- content fingerprint `{}`", self.fingerprint));
        out
    }
}

/// Bars at powers of two, from 32 tokens up, without empty bars at either end.
pub(crate) fn length_histogram(lengths: &[u32]) -> Vec<LengthBar> {
    let mut bars: Vec<LengthBar> = Vec::new();
    let (mut from, mut to) = (0, 32);
    while lengths.iter().any(|&l| l >= from) {
        let rows = lengths.iter().filter(|&&l| (from..to).contains(&l)).count() as u64;
        if rows > 0 || !bars.is_empty() {
            bars.push(LengthBar { from, to, rows });
        }
        (from, to) = (to, to.saturating_mul(2));
        if from == to {
            break;
        }
    }
    bars
}
