//! Which token id stands in the masked slots of a draft block.
//!
//! The order of DESIGN: the config's id, else the tokenizer's mask token, else an unused embedding row, else an id that
//! occurs in no row of the dataset. It refuses to choose padding or end-of-sequence by itself, because the model has been
//! taught what those mean; without any candidate it asks for a decision.

use serde::{Deserialize, Serialize};

use crate::error::{DataError, Result};
use crate::tokenize::ChatTokenizer;

/// Where the mask token comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskTokenSource {
    /// The run's config names it.
    Config,
    /// The tokenizer has a mask token.
    Tokenizer,
    /// The embedding table has a row that no token uses.
    UnusedRow,
    /// A token that occurs in no row of the dataset.
    UnusedToken,
}

impl std::fmt::Display for MaskTokenSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Config => "from the config",
            Self::Tokenizer => "the tokenizer's mask token",
            Self::UnusedRow => "an embedding row that no token uses",
            Self::UnusedToken => "a token that occurs in no training row",
        })
    }
}

/// The chosen mask token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaskToken {
    /// Its id.
    pub id: u32,
    /// Why it.
    pub source: MaskTokenSource,
}

/// Chooses the mask token. `vocab_size` is the number of embedding rows; `unused_ids` are ids that occur in no training row
/// (from the dataset's card or index), in ascending order.
///
/// # Errors
/// When the config's id has no embedding row or ends a text, or nothing can be chosen without harm.
pub fn choose_mask_token(
    configured: Option<u32>,
    vocab_size: u32,
    tokenizer: &ChatTokenizer,
    unused_ids: Option<&[u32]>,
) -> Result<MaskToken> {
    if let Some(id) = configured {
        if id >= vocab_size {
            return Err(DataError::Config {
                key: "drafter.mask_token_id",
                what: format!("{id} has no embedding row; the target has {vocab_size}"),
                todo: "choose a smaller id, or leave the key out".into(),
            });
        }
        if tokenizer.stop_ids().contains(&id) {
            return Err(DataError::Config {
                key: "drafter.mask_token_id",
                what: format!("{id} ends a text of this target (end-of-sequence), so the drafter would learn to draft ends"),
                todo: "choose an id that the target never generates, or leave the key out".into(),
            });
        }
        return Ok(MaskToken { id, source: MaskTokenSource::Config });
    }
    let text_id = |name: &str| tokenizer.template().special_token(name).and_then(|text| tokenizer.tokenizer().token_to_id(text));
    let mut reserved: Vec<u32> = tokenizer.stop_ids().iter().copied().collect();
    reserved.extend(["pad_token", "bos_token", "eos_token"].into_iter().filter_map(text_id));
    for key in ["pad_token_id", "bos_token_id"] {
        reserved.extend(tokenizer.model_config().get(key).and_then(serde_json::Value::as_u64).map(|id| id as u32));
    }
    let free = |id: &u32| *id < vocab_size && !reserved.contains(id);
    if let Some(id) = text_id("mask_token").filter(free) {
        return Ok(MaskToken { id, source: MaskTokenSource::Tokenizer });
    }
    // Rows beyond the tokenizer come first in id order only if ids are dense, so every id is asked.
    if let Some(id) = (0..vocab_size).filter(free).find(|&id| tokenizer.tokenizer().id_to_token(id).is_none()) {
        return Ok(MaskToken { id, source: MaskTokenSource::UnusedRow });
    }
    if let Some(id) = unused_ids.and_then(|ids| ids.iter().copied().find(free)) {
        return Ok(MaskToken { id, source: MaskTokenSource::UnusedToken });
    }
    Err(DataError::Config {
        key: "drafter.mask_token_id",
        what: match unused_ids {
            Some(_) => "every embedding row has a token, and the dataset leaves none of them unused".into(),
            None => "every embedding row has a token, and no dataset says which of them it leaves unused".into(),
        },
        todo: "name an id that the target never generates; padding and end-of-sequence make poor masks".into(),
    })
}
