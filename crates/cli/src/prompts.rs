//! Prompt files → token prompts, as a server would build them.
//!
//! Job: JSON lines with `messages`, ShareGPT `conversations`, `prompt`, `question` (GSM8K), `instruction` (+ `input`), `turns`, or `input_ids`;
//! or plain text, one prompt a line. Refuses lines it cannot read, by file and line. Invariants: an answer in the file is never part of the prompt; a
//! prompt that is left out is counted with its reason.

use crate::exit::{Exit, Failure};
use drafthorse_data::chat::{Conversation, Record, RoleMap, parse_line};
use drafthorse_data::tokenize::ChatTokenizer;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A prompt ready to decode.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// `file:line`.
    pub source: String,
    /// Token ids.
    pub tokens: Vec<u32>,
}

/// All prompts of some files.
#[derive(Debug, Default)]
pub struct Prompts {
    /// In file order.
    pub list: Vec<Prompt>,
    /// Left out: reason → count.
    pub dropped: BTreeMap<String, u64>,
}

/// Reads up to `limit` prompts; `room` is the longest prompt that can be decoded, in tokens.
///
/// # Errors
/// When a file or line cannot be read, or nothing is left.
pub fn read(files: &[PathBuf], limit: Option<usize>, room: usize, tokenizer: &ChatTokenizer) -> Result<Prompts, Failure> {
    let mut prompts = Prompts::default();
    for file in files {
        let bytes = std::fs::read(file).map_err(|e| Failure::file("read", file, &e))?;
        let mut start = 0;
        for (number, line) in bytes.split(|b| *b == b'\n').enumerate() {
            let at = start;
            start += line.len() as u64 + 1;
            if limit.is_some_and(|n| prompts.list.len() >= n) {
                break;
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            match tokens(file, number as u64 + 1, at, line, tokenizer)? {
                Some(tokens) if tokens.is_empty() => *prompts.dropped.entry("empty prompt".into()).or_default() += 1,
                Some(tokens) if tokens.len() > room => {
                    *prompts.dropped.entry(format!("longer than {room} tokens")).or_default() += 1;
                }
                Some(tokens) => prompts.list.push(Prompt { source: format!("{}:{}", file.display(), number + 1), tokens }),
                None => *prompts.dropped.entry("no user message".into()).or_default() += 1,
            }
        }
    }
    if prompts.list.is_empty() {
        let reasons: Vec<String> = prompts.dropped.iter().map(|(r, n)| format!("{n} {r}")).collect();
        let why = if reasons.is_empty() { "they are empty".into() } else { reasons.join(", ") };
        return Err(Failure::new(
            Exit::BadInput,
            format!("no prompt in the files named: {why}"),
            "name files with prompts, one a line",
        ));
    }
    Ok(prompts)
}

/// One line's prompt; `None` when there is nobody to answer.
fn tokens(file: &Path, number: u64, start: u64, line: &[u8], tokenizer: &ChatTokenizer) -> Result<Option<Vec<u32>>, Failure> {
    let is_json = file.extension().is_some_and(|e| e == "jsonl" || e == "json");
    let text = std::str::from_utf8(line).map_err(|e| {
        let what = format!("{}:{number}: byte {}: not UTF-8", file.display(), start + e.valid_up_to() as u64);
        Failure::new(Exit::BadInput, what, "convert the file to UTF-8")
    })?;
    let conversation = if !is_json {
        Conversation::from_pairs(&[("user", text.trim())])
    } else {
        match simple(text) {
            Some(conversation) => conversation,
            None => match parse_line(line, &RoleMap::default()) {
                Ok(Record::Chat(conversation)) => conversation,
                Ok(Record::Tokens { input_ids, loss_mask }) => {
                    let end = loss_mask.iter().position(|&m| m == 1).unwrap_or(input_ids.len());
                    return Ok(Some(input_ids[..end].iter().map(|&t| t as u32).collect()));
                }
                Err(fault) => return Err(fault.into_error(file, number, start).into()),
            },
        }
    };
    prompt_of(conversation, tokenizer)
}

/// The prompt up to and with the last user (or tool) message.
///
/// # Errors
/// When the template refuses it.
pub fn prompt_of(mut conversation: Conversation, tokenizer: &ChatTokenizer) -> Result<Option<Vec<u32>>, Failure> {
    let asks = |i: usize| ["user", "tool"].contains(&conversation.role(i));
    let Some(last) = (0..conversation.messages.len()).rev().find(|&i| asks(i)) else { return Ok(None) };
    conversation.messages.truncate(last + 1);
    let ids = tokenizer.encode_prompt(&conversation)?;
    Ok(Some(ids.into_iter().map(|t| t as u32).collect()))
}

/// Layouts of benchmark files that hold a question as a string.
fn simple(text: &str) -> Option<Conversation> {
    let value: Value = serde_json::from_str(text).ok()?;
    if value.get("messages").is_some() || value.get("conversations").is_some() {
        return None;
    }
    let string = |key: &str| value.get(key).and_then(Value::as_str);
    let question = match (string("prompt").or_else(|| string("question")), string("instruction")) {
        (Some(text), _) => text.to_owned(),
        (None, Some(text)) => match string("input").filter(|i| !i.is_empty()) {
            Some(input) => format!("{text}\n\n{input}"),
            None => text.to_owned(),
        },
        (None, None) => value.get("turns")?.get(0)?.as_str()?.to_owned(),
    };
    Some(Conversation::from_pairs(&[("user", &question)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmark_layouts_are_read_and_answers_left_out() {
        let of = |text: &str| simple(text).map(|c| c.messages[0]["content"].as_str().unwrap().to_owned());
        assert_eq!(of(r#"{"question": "2+2?", "answer": "4"}"#).as_deref(), Some("2+2?"));
        assert_eq!(of(r#"{"prompt": "hi"}"#).as_deref(), Some("hi"));
        assert_eq!(of(r#"{"instruction": "Sum up.", "input": "A text."}"#).as_deref(), Some("Sum up.\n\nA text."));
        assert_eq!(of(r#"{"turns": ["first", "second"]}"#).as_deref(), Some("first"));
        assert_eq!(of(r#"{"messages": []}"#), None);
        assert_eq!(of(r#"{"unknown": 1}"#), None);
    }
}
