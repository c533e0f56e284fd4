//! The mask token: which id fills a drafter's mask slots.
//!
//! Job: choose by the order config, tokenizer's own mask token, unused embedding row. It refuses padding and end-of-text tokens
//! and ids outside the embedding table; where every row is in use it chooses nothing, and the caller proves an id that occurs
//! in no training row, or asks.
//! Invariant: whatever is chosen is a row of the embedding table and neither padding nor a stop token.

use std::path::Path;

use serde_json::Value;

use crate::config_fields::{ConfigError, Fields, read_object};
use crate::hf_config::TargetConfig;

/// Where a mask token came from. Callers print it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskToken {
    /// The user named it.
    Configured(u32),
    /// tokenizer_config.json names it.
    Tokenizer(u32),
    /// The first embedding row above the tokenizer's highest id.
    UnusedRow(u32),
    /// Every row belongs to a token: the caller must prove an id unused, or ask.
    Undecided,
}

/// Chooses the mask token for a target whose tokenizer files lie in `folder`.
///
/// # Errors
/// If a file cannot be read, or if the token named by user or tokenizer is padding, a stop token, or no row of the table.
pub fn choose(folder: &Path, target: &TargetConfig, configured: Option<u32>) -> Result<MaskToken, ConfigError> {
    let path = folder.join("tokenizer_config.json");
    let map = if path.exists() { read_object(&path)? } else { serde_json::Map::new() };
    let config = Fields::new(&path, &map);
    let ids = TokenIds::read(folder)?;
    // A token of tokenizer_config.json is its text, or an object with the text in `content`.
    let text =
        |key: &str| config.get(key).and_then(|value| value.as_str().or_else(|| value.get("content").and_then(Value::as_str)));
    let reserved: Vec<(u32, &str)> = [("pad_token", "the padding token"), ("eos_token", "the end-of-text token")]
        .into_iter()
        .filter_map(|(key, what)| text(key).and_then(|token| ids.id(token)).map(|id| (id, what)))
        .chain(target.pad_id.map(|id| (id, "the padding token")))
        .chain(target.eos_ids.iter().map(|id| (*id, "a stop token")))
        .collect();
    let checked = |id: u32, key: &str| {
        let why = if id as usize >= target.vocab {
            format!("the embedding table has {} rows", target.vocab)
        } else if let Some((_, what)) = reserved.iter().find(|(other, _)| *other == id) {
            format!("{id} is {what}, whose embedding has a meaning of its own")
        } else {
            return Ok(id);
        };
        Err(ConfigError::Value {
            path: path.clone(),
            key: key.to_owned(),
            got: id.to_string(),
            why,
            advice: "name another token with drafter.mask_token_id, one that no text uses".to_owned(),
        })
    };
    if let Some(id) = configured {
        return checked(id, "drafter.mask_token_id").map(MaskToken::Configured);
    }
    if let Some(token) = text("mask_token") {
        let id = ids
            .id(token)
            .ok_or_else(|| config.value("mask_token", "tokenizer.json has no such token", "repair the tokenizer"))?;
        return checked(id, "mask_token").map(MaskToken::Tokenizer);
    }
    match ids.highest.map(|id| id + 1) {
        Some(first) if (first as usize) < target.vocab && reserved.iter().all(|(id, _)| *id != first) => {
            Ok(MaskToken::UnusedRow(first))
        }
        _ => Ok(MaskToken::Undecided),
    }
}

/// Ids of tokenizer.json: the model's vocabulary and the added tokens.
struct TokenIds {
    added: Vec<(String, u32)>,
    vocabulary: serde_json::Map<String, Value>,
    /// None if there is no tokenizer.json to tell.
    highest: Option<u32>,
}

impl TokenIds {
    fn read(folder: &Path) -> Result<Self, ConfigError> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            return Ok(Self { added: Vec::new(), vocabulary: serde_json::Map::new(), highest: None });
        }
        let mut map = read_object(&path)?;
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let added: Vec<(String, u32)> = map
            .get("added_tokens")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|token| Some((token.get("content")?.as_str()?.to_owned(), id(token.get("id")?)?)))
            .collect();
        let vocabulary = match map.get_mut("model").and_then(|model| model.get_mut("vocab")).map(Value::take) {
            Some(Value::Object(vocabulary)) => vocabulary,
            // Unigram models list their pieces; the id is the place in the list.
            Some(Value::Array(pieces)) => pieces
                .iter()
                .enumerate()
                .filter_map(|(i, piece)| Some((piece.get(0)?.as_str()?.to_owned(), Value::from(i))))
                .collect(),
            _ => {
                let json = |detail: &str| ConfigError::Json { path: path.clone(), detail: detail.to_owned() };
                return Err(json("it has no vocabulary at `model.vocab`"));
            }
        };
        let highest = vocabulary.values().filter_map(id).chain(added.iter().map(|(_, id)| *id)).max();
        Ok(Self { added, vocabulary, highest })
    }

    fn id(&self, token: &str) -> Option<u32> {
        let added = self.added.iter().find(|(text, _)| text == token).map(|(_, id)| *id);
        added.or_else(|| self.vocabulary.get(token)?.as_u64().and_then(|id| u32::try_from(id).ok()))
    }
}
