//! Conversation → token ids and loss mask: rendered once, tokenized once, supervised by byte offsets.
//!
//! Special-token text inside a message is encoded as ordinary text: it is what the model reads when a user writes it down,
//! and what it generates when it spells one out, and it can never open or close a turn. Rows without such text are encoded in
//! one call; rows with it are encoded in the pieces between the template's own special tokens, which is where the
//! tokenizer itself cuts first. A token that lies across a span's border is masked and counted.
//! It refuses to add special tokens of its own: the template writes them, as in transformers' `apply_chat_template`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use drafthorse_models::hf_config::declared_stop_ids;
use drafthorse_models::weight_files::is_lfs_pointer;
use minijinja::value::Value as JinjaValue;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use crate::chat::Conversation;
use crate::error::{DataError, Result};
use crate::hash::sha256_file;
use crate::spans::{Drop, Located, StopTexts, locate};
use crate::template::{ChatTemplate, RenderOptions, read_json_if_there, to_jinja};

/// The target's tokenizer and chat template, ready to prepare data and prompts. Shared by threads.
pub struct ChatTokenizer {
    dir: PathBuf,
    name: String,
    tokenizer: Tokenizer,
    /// The same tokenizer, which reads special-token text as ordinary text.
    literal: Tokenizer,
    template: ChatTemplate,
    stops: StopTexts,
    special_ids: BTreeMap<u32, String>,
    stop_ids: BTreeSet<u32>,
    /// Why pieces between special tokens cannot be encoded apart, if so.
    inseparable: Option<String>,
    tokenizer_hash: String,
    model_config: Map<String, Value>,
    tokenizer_config: Map<String, Value>,
}

/// One tokenized conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokenized {
    /// Token ids, `[T]`.
    pub input_ids: Vec<i32>,
    /// 1 where the assistant generates the token, `[T]`.
    pub loss_mask: Vec<i8>,
    /// Tokens that lie across a border of a span, and were masked.
    pub straddling: u32,
    /// Assistant turns after which the template writes no end-of-turn token.
    pub turns_without_end: u32,
    /// The conversation opens with an assistant message that no prompt leads to, which was masked.
    pub opening_masked: bool,
    /// The messages hold special-token text, which was encoded as ordinary text.
    pub special_text: bool,
}

impl ChatTokenizer {
    /// Loads tokenizer and template from the target folder `dir`. `name` is what cards call the target; `variables` are
    /// extra template variables; `now` is the date that the template's `strftime_now` shows.
    ///
    /// # Errors
    /// When tokenizer.json or the chat template is absent or unreadable.
    pub fn load(dir: &Path, name: &str, variables: &Map<String, Value>, now: chrono::NaiveDateTime) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Err(DataError::target(
                &path,
                "absent",
                "convert the slow tokenizer once with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            ));
        }
        let tokenizer = Tokenizer::from_file(&path).map_err(|e| {
            // The tokenizers of large vocabularies lie in LFS, as weights do.
            match std::fs::read(&path).is_ok_and(|bytes| is_lfs_pointer(&bytes)) {
                true => DataError::target(
                    &path,
                    "a Git LFS pointer, not the file itself",
                    "fetch it: run `git lfs pull` in that folder",
                ),
                false => DataError::target(&path, format!("not a tokenizer: {e}"), "fetch the file again"),
            }
        })?;
        let hash = sha256_file(&path)?;
        let template = ChatTemplate::load(dir, variables, now)?;
        Self::assemble(dir, name, tokenizer, hash, template)
    }

    fn assemble(dir: &Path, name: &str, mut tokenizer: Tokenizer, hash: String, template: ChatTemplate) -> Result<Self> {
        // A tokenizer.json saved after fine-tuning may cut or pad by itself; lengths are this crate's business.
        tokenizer.with_truncation(None).map_err(|e| DataError::Tokenizer(e.to_string()))?;
        tokenizer.with_padding(None);
        let tokenizer_config = read_json_if_there(&dir.join("tokenizer_config.json"))?;
        let model_config = read_json_if_there(&dir.join("config.json"))?;
        let added = tokenizer.get_added_tokens_decoder();
        let special_ids: BTreeMap<u32, String> =
            added.iter().filter(|(_, t)| t.special).map(|(&id, t)| (id, t.content.clone())).collect();
        let mut stop_ids = declared_stop_ids(dir)?;
        stop_ids.extend(template.special_token("eos_token").and_then(|t| tokenizer.token_to_id(t)));
        let stops = StopTexts {
            stops: stop_ids.iter().filter_map(|&id| tokenizer.id_to_token(id)).filter(|t| !t.is_empty()).collect(),
            specials: special_ids.values().filter(|t| !t.is_empty()).cloned().collect(),
        };
        let strips = added.values().find(|t| t.special && (t.lstrip || t.rstrip));
        let pre_tokenizer = serde_json::to_string(&tokenizer.get_pre_tokenizer()).unwrap_or_default();
        let inseparable = match strips {
            Some(t) => Some(format!("the special token {} swallows white space", t.content)),
            None if pre_tokenizer.contains("\"prepend_scheme\":\"first\"") => {
                Some("the tokenizer treats the first word of a text differently".to_owned())
            }
            None => None,
        };
        let mut literal = tokenizer.clone();
        literal.set_encode_special_tokens(true);
        Ok(Self {
            dir: dir.to_owned(),
            name: name.to_owned(),
            tokenizer,
            literal,
            template,
            stops,
            special_ids,
            stop_ids,
            inseparable,
            tokenizer_hash: hash,
            model_config,
            tokenizer_config,
        })
    }

    /// The target folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What cards call the target.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The chat template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// The tokenizer, as loaded.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// SHA-256 of tokenizer.json.
    pub fn tokenizer_hash(&self) -> &str {
        &self.tokenizer_hash
    }

    /// The target's config.json (empty when absent).
    pub fn model_config(&self) -> &Map<String, Value> {
        &self.model_config
    }

    /// A size that the target's config.json gives, for a multimodal model that of its text model.
    pub(crate) fn model_size(&self, key: &str) -> Option<u64> {
        let text = self.model_config.get("text_config").and_then(|c| c.get(key));
        self.model_config.get(key).or(text).and_then(Value::as_u64)
    }

    /// The target's tokenizer_config.json (empty when absent).
    pub fn tokenizer_config(&self) -> &Map<String, Value> {
        &self.tokenizer_config
    }

    /// Ids at which generation stops, the one definition of them: those of generation_config.json and config.json, and the tokenizer's own end token.
    pub fn stop_ids(&self) -> &BTreeSet<u32> {
        &self.stop_ids
    }

    /// The prompt that a server feeds for `conversation`: rendered with the header of the next assistant turn.
    ///
    /// # Errors
    /// When the template refuses.
    pub fn render_prompt(&self, conversation: &Conversation) -> Result<String> {
        self.render(conversation, true)
    }

    /// The whole conversation as the template writes it, without a generation prompt.
    ///
    /// # Errors
    /// When the template refuses.
    pub fn render_conversation(&self, conversation: &Conversation) -> Result<String> {
        self.render(conversation, false)
    }

    fn render(&self, conversation: &Conversation, add_generation_prompt: bool) -> Result<String> {
        let messages: Vec<JinjaValue> = conversation.messages.iter().map(to_jinja).collect();
        let tools = to_jinja(&conversation.tools);
        self.template.render(&messages, &tools, RenderOptions { add_generation_prompt, ..RenderOptions::default() })
    }

    /// [`ChatTokenizer::render_prompt`], tokenized as servers do (special-token text becomes special tokens).
    ///
    /// # Errors
    /// When the template or the tokenizer refuses.
    pub fn encode_prompt(&self, conversation: &Conversation) -> Result<Vec<i32>> {
        self.encode(&self.render_prompt(conversation)?)
    }

    /// Token ids of `text`, without added special tokens.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|e| DataError::Tokenizer(e.to_string()))?;
        Ok(encoding.get_ids().iter().map(|&id| id as i32).collect())
    }

    /// The text of `ids`, special tokens included.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode(&self, ids: &[i32]) -> Result<String> {
        let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
        self.tokenizer.decode(&ids, false).map_err(|e| DataError::Tokenizer(e.to_string()))
    }

    /// Renders, tokenizes and masks one conversation.
    ///
    /// # Errors
    /// The outer error is a failing tokenizer; the inner one the reason why this row is dropped.
    pub fn tokenize(&self, conversation: &Conversation) -> Result<std::result::Result<Tokenized, Drop>> {
        let located = match locate(&self.template, &self.stops, conversation) {
            Ok(located) => located,
            Err(drop) => return Ok(Err(drop)),
        };
        let mut tokens = Vec::new();
        self.encode_into(&self.tokenizer, &located.text, 0, &mut tokens)?;
        let special_text = self.special_inside(&tokens, &located.content).is_some();
        if special_text {
            if let Some(why) = &self.inseparable {
                return Ok(Err(Drop::SpecialTokenText(why.clone())));
            }
            tokens.clear();
            self.encode_apart(&located, &mut tokens)?;
            if let Some(text) = self.special_inside(&tokens, &located.content) {
                return Ok(Err(Drop::SpecialTokenText(text.to_owned())));
            }
        }
        let mut out = Tokenized {
            input_ids: tokens.iter().map(|t| t.0 as i32).collect(),
            loss_mask: vec![0; tokens.len()],
            straddling: 0,
            turns_without_end: located.turns_without_end,
            opening_masked: located.opening_masked,
            special_text,
        };
        let mut spans = located.spans.iter().peekable();
        for ((_, at), mask) in tokens.iter().zip(&mut out.loss_mask) {
            while spans.next_if(|s| s.end <= at.start).is_some() {}
            let Some(span) = spans.peek() else { break };
            if at.start >= span.start && at.end <= span.end {
                *mask = i8::from(!at.is_empty());
            } else if at.end > span.start && at.start < span.end {
                out.straddling += 1;
            }
        }
        Ok(Ok(out))
    }

    fn encode_into(&self, tokenizer: &Tokenizer, text: &str, shift: usize, out: &mut Vec<(u32, Range<usize>)>) -> Result<()> {
        let encoding = tokenizer.encode(text, false).map_err(|e| DataError::Tokenizer(e.to_string()))?;
        out.extend(encoding.get_ids().iter().zip(encoding.get_offsets()).map(|(&id, &(a, b))| (id, shift + a..shift + b)));
        Ok(())
    }

    /// The text of a special token that overlaps what messages brought.
    fn special_inside(&self, tokens: &[(u32, Range<usize>)], content: &[Range<usize>]) -> Option<&str> {
        tokens.iter().find_map(|(id, at)| {
            let text = self.special_ids.get(id)?;
            let next = content.partition_point(|r| r.end <= at.start);
            (content.get(next)?.start < at.end).then_some(text.as_str())
        })
    }

    /// Encodes the text between the template's own special tokens with special-token text read literally.
    fn encode_apart(&self, located: &Located, out: &mut Vec<(u32, Range<usize>)>) -> Result<()> {
        let mut from = 0;
        let gaps = located.content.iter().map(|r| r.start).chain([located.text.len()]);
        let mut gap_start = 0;
        let ends = located.content.iter().map(|r| r.end).chain([located.text.len()]);
        for (gap_end, next_start) in gaps.zip(ends) {
            let mut at = gap_start;
            // The template's special tokens: leftmost first, the longest of those that start together.
            while let Some((start, len, id)) = self
                .special_ids
                .iter()
                .filter(|(_, text)| !text.is_empty())
                .filter_map(|(&id, text)| {
                    let found = located.text[at..gap_end].find(text.as_str())?;
                    Some((at + found, std::cmp::Reverse(text.len()), id))
                })
                .min()
            {
                if start > from {
                    self.encode_into(&self.literal, &located.text[from..start], from, out)?;
                }
                at = start + len.0;
                out.push((id, start..at));
                from = at;
            }
            gap_start = next_start;
        }
        if from < located.text.len() {
            self.encode_into(&self.literal, &located.text[from..], from, out)?;
        }
        Ok(())
    }
}
