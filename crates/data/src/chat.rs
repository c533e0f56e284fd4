//! Chat records: one JSON line → one conversation in the form that chat templates expect, or one pre-tokenized row.
//!
//! It refuses unknown roles (by name and line, unless a map says what they are), invalid UTF-8 and broken JSON (by file,
//! line and byte), and content parts that are not text. Each line is read by itself, so a field may be an object in one row
//! and a string in the next. Invariants: role names after reading are `system`, `user`, `assistant`, `tool` or `developer`;
//! `content` is a string or null (null only beside tool calls); tool-call arguments that parse as a JSON object are objects.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::{DataError, Result};

/// A conversation ready to be rendered.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    /// Messages as the template sees them: objects with `role`, `content`, and optionally `reasoning_content`, `tool_calls`,
    /// `tool_call_id`, `name`.
    pub messages: Vec<Value>,
    /// Tool definitions, or null.
    pub tools: Value,
    /// The last answer was cut by a length limit (`finish_reason` = "length" on the row or on its last message).
    pub truncated: bool,
}

impl Conversation {
    /// A conversation of plain text messages, for prompts: pairs of (role, content).
    pub fn from_pairs(pairs: &[(&str, &str)]) -> Self {
        let messages = pairs.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
        Self { messages, tools: Value::Null, truncated: false }
    }

    /// The role of message `i`.
    pub fn role(&self, i: usize) -> &str {
        self.messages[i]["role"].as_str().unwrap_or_default()
    }
}

/// One input row.
#[derive(Debug, Clone, PartialEq)]
pub enum Record {
    /// A conversation to render and tokenize.
    Chat(Conversation),
    /// A row that is tokenized already; both lists have one length.
    Tokens {
        /// Token ids.
        input_ids: Vec<i32>,
        /// 1 where the token is supervised, else 0.
        loss_mask: Vec<i8>,
    },
}

/// Why a line could not become a [`Record`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LineFault {
    /// Broken text, JSON or layout; `at` is a byte offset inside the line.
    Broken {
        /// 0-based byte offset inside the line.
        at: usize,
        /// What is wrong.
        what: String,
    },
    /// A role that nobody mapped.
    UnknownRole(String),
}

impl LineFault {
    /// The error that names file, line and byte. `line` is 1-based; `line_start` is the line's byte offset in the file.
    pub fn into_error(self, path: &Path, line: u64, line_start: u64) -> DataError {
        match self {
            Self::Broken { at, what } => DataError::BadLine { path: path.to_owned(), line, byte: line_start + at as u64, what },
            Self::UnknownRole(role) => DataError::UnknownRole { path: path.to_owned(), line, byte: line_start, role },
        }
    }
}

/// Which extra role names are accepted, and as what.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoleMap(BTreeMap<String, String>);

const KNOWN_ROLES: [&str; 5] = ["system", "user", "assistant", "tool", "developer"];

impl RoleMap {
    /// Maps `from` to the template role `to`.
    ///
    /// # Errors
    /// When `to` is not one of system, user, assistant, tool, developer.
    pub fn insert(&mut self, from: &str, to: &str) -> Result<()> {
        if !KNOWN_ROLES.contains(&to) {
            return Err(DataError::Config {
                key: "roles",
                what: format!("`{from}` is mapped to `{to}`, which no chat template knows"),
                todo: format!("map it to one of {}", KNOWN_ROLES.join(", ")),
            });
        }
        self.0.insert(from.to_owned(), to.to_owned());
        Ok(())
    }

    /// The pairs (as written, as rendered), sorted.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(a, b)| (a.as_str(), b.as_str()))
    }

    fn resolve<'a>(&'a self, role: &'a str) -> Option<&'a str> {
        if let Some(mapped) = self.0.get(role) {
            return Some(mapped);
        }
        Some(match role {
            "human" | "user" | "User" | "Human" => "user",
            "gpt" | "assistant" | "model" | "bot" | "chatgpt" | "bing" | "bard" | "Assistant" => "assistant",
            "system" | "System" => "system",
            "developer" => "developer",
            "tool" | "function" | "function_response" | "observation" | "tool_response" => "tool",
            _ => return None,
        })
    }
}

fn broken(what: impl Into<String>) -> LineFault {
    LineFault::Broken { at: 0, what: what.into() }
}

/// Reads one line (without its newline).
///
/// # Errors
/// A [`LineFault`] that [`LineFault::into_error`] turns into an error with file, line and byte.
pub fn parse_line(line: &[u8], roles: &RoleMap) -> std::result::Result<Record, LineFault> {
    let text = std::str::from_utf8(line).map_err(|e| LineFault::Broken {
        at: e.valid_up_to(),
        what: format!("not UTF-8: the byte 0x{:02x} cannot stand here", line[e.valid_up_to()]),
    })?;
    let value: Value = serde_json::from_str(text).map_err(|e| LineFault::Broken {
        at: e.column().saturating_sub(1).min(text.len()),
        what: format!("not a JSON record: {}", without_position(&e.to_string())),
    })?;
    let Value::Object(mut row) = value else { return Err(broken("the line is not a JSON object")) };
    if row.contains_key("input_ids") {
        return parse_tokens(&row);
    }
    let (list, from_key, value_key) = if let Some(v) = row.remove("messages") {
        (v, "role", "content")
    } else if let Some(v) = row.remove("conversations").or_else(|| row.remove("conversation")) {
        (v, "from", "value")
    } else {
        return Err(broken("the record has none of `messages`, `conversations`, `input_ids`"));
    };
    let Value::Array(list) = list else { return Err(broken("the conversation is not a list")) };
    let mut truncated = is_length(row.get("finish_reason"));
    let mut messages = Vec::with_capacity(list.len());
    let n_messages = list.len();
    for (i, message) in list.into_iter().enumerate() {
        let Value::Object(mut message) = message else { return Err(broken(format!("message {i} is not an object"))) };
        truncated |= i + 1 == n_messages && is_length(message.get("finish_reason"));
        // Files exist that mix the two layouts inside one record, so each message is asked for both names.
        let role = message.remove(from_key).or_else(|| message.remove("role")).or_else(|| message.remove("from"));
        let Some(Value::String(role)) = role else { return Err(broken(format!("message {i} has no role"))) };
        let role = roles.resolve(&role).ok_or_else(|| LineFault::UnknownRole(role.clone()))?.to_owned();
        let content = message.remove(value_key).or_else(|| message.remove("content")).or_else(|| message.remove("value"));
        messages.push(normalised(i, role, content, message)?);
    }
    // ShareGPT keeps the system prompt beside the turns.
    if let Some(Value::String(system)) = row.get("system")
        && !system.is_empty()
        && messages.first().is_none_or(|m| m["role"] != "system")
    {
        messages.insert(0, json!({"role": "system", "content": system}));
    }
    let tools = match row.remove("tools") {
        None | Some(Value::Null) => Value::Null,
        Some(Value::String(s)) if s.trim().is_empty() => Value::Null,
        Some(Value::String(s)) => {
            serde_json::from_str(&s).map_err(|e| broken(format!("`tools` is a string that is not JSON: {e}")))?
        }
        Some(other) => other,
    };
    match &tools {
        Value::Null => {}
        Value::Array(list) if list.is_empty() => {}
        Value::Array(_) => return Ok(Record::Chat(Conversation { messages, tools, truncated })),
        _ => return Err(broken("`tools` is neither a list nor a JSON string of a list")),
    }
    Ok(Record::Chat(Conversation { messages, tools: Value::Null, truncated }))
}

/// serde_json ends its messages with "at line 1 column N"; the caller's error carries the true file position instead.
fn without_position(message: &str) -> &str {
    message.split(" at line ").next().unwrap_or(message)
}

fn is_length(finish_reason: Option<&Value>) -> bool {
    finish_reason.and_then(Value::as_str).is_some_and(|s| s == "length" || s == "max_tokens")
}

fn normalised(
    i: usize,
    role: String,
    content: Option<Value>,
    mut rest: Map<String, Value>,
) -> std::result::Result<Value, LineFault> {
    let mut out = Map::new();
    out.insert("role".into(), Value::String(role));
    let has_calls = matches!(rest.get("tool_calls"), Some(Value::Array(calls)) if !calls.is_empty())
        || matches!(rest.get("tool_calls"), Some(Value::String(_)));
    out.insert("content".into(), content_text(i, content, has_calls)?);
    if let Some(reasoning) = rest.remove("reasoning_content").or_else(|| rest.remove("reasoning")).filter(|v| !v.is_null()) {
        if !reasoning.is_string() {
            return Err(broken(format!("message {i}: `reasoning_content` is not a string")));
        }
        out.insert("reasoning_content".into(), reasoning);
    }
    if has_calls {
        let calls = match rest.remove("tool_calls") {
            Some(Value::String(s)) => serde_json::from_str(&s)
                .map_err(|e| broken(format!("message {i}: `tool_calls` is a string that is not JSON: {e}")))?,
            other => other.unwrap_or_default(),
        };
        let Value::Array(calls) = calls else { return Err(broken(format!("message {i}: `tool_calls` is not a list"))) };
        let calls = calls.into_iter().map(|call| tool_call(i, call)).collect::<std::result::Result<Vec<_>, _>>()?;
        out.insert("tool_calls".into(), Value::Array(calls));
    }
    for key in ["tool_call_id", "name"] {
        if let Some(v) = rest.remove(key).filter(|v| !v.is_null()) {
            out.insert(key.into(), v);
        }
    }
    Ok(Value::Object(out))
}

/// Parts are joined with a newline, as vLLM does for templates that take strings.
fn content_text(i: usize, content: Option<Value>, has_calls: bool) -> std::result::Result<Value, LineFault> {
    Ok(match content {
        None | Some(Value::Null) if has_calls => Value::Null,
        None | Some(Value::Null) => Value::String(String::new()),
        Some(Value::String(s)) => Value::String(s),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::with_capacity(parts.len());
            for part in parts {
                match part {
                    Value::String(s) => texts.push(s),
                    Value::Object(mut o) => match o.remove("text") {
                        Some(Value::String(s)) => texts.push(s),
                        _ => {
                            let kind = o.get("type").and_then(Value::as_str).unwrap_or("unnamed");
                            return Err(broken(format!("message {i}: a content part of type `{kind}` is not text")));
                        }
                    },
                    _ => return Err(broken(format!("message {i}: a content part is neither text nor an object"))),
                }
            }
            Value::String(texts.join("\n"))
        }
        // A tool may answer with bare JSON; templates want text.
        Some(other) => Value::String(other.to_string()),
    })
}

/// `arguments` given as a JSON string of an object becomes that object, as vLLM and SGLang do before they render.
fn tool_call(i: usize, call: Value) -> std::result::Result<Value, LineFault> {
    let Value::Object(mut call) = call else { return Err(broken(format!("message {i}: a tool call is not an object"))) };
    let fix = |function: &mut Map<String, Value>| {
        if let Some(Value::String(s)) = function.get("arguments") {
            if let Ok(parsed @ Value::Object(_)) = serde_json::from_str::<Value>(s) {
                function.insert("arguments".into(), parsed);
            } else if s.trim().is_empty() {
                function.insert("arguments".into(), json!({}));
            }
        }
    };
    match call.get_mut("function") {
        Some(Value::Object(function)) => fix(function),
        _ => fix(&mut call),
    }
    Ok(Value::Object(call))
}

fn parse_tokens(row: &Map<String, Value>) -> std::result::Result<Record, LineFault> {
    let list = |key: &str| match row.get(key) {
        Some(Value::Array(list)) => Ok(list),
        _ => Err(broken(format!("a pre-tokenized record needs `{key}` as a list"))),
    };
    let input_ids = list("input_ids")?
        .iter()
        .map(|v| v.as_i64().and_then(|id| i32::try_from(id).ok()).filter(|&id| id >= 0))
        .collect::<Option<Vec<i32>>>()
        .ok_or_else(|| broken("`input_ids` holds something that is not a token id"))?;
    let loss_mask = list("loss_mask")?
        .iter()
        .map(|v| v.as_bool().map(i8::from).or_else(|| v.as_i64().filter(|m| (0..=1).contains(m)).map(|m| m as i8)))
        .collect::<Option<Vec<i8>>>()
        .ok_or_else(|| broken("`loss_mask` holds something that is neither 0, 1, true nor false"))?;
    if input_ids.len() != loss_mask.len() {
        return Err(broken(format!("{} token ids but {} mask values", input_ids.len(), loss_mask.len())));
    }
    Ok(Record::Tokens { input_ids, loss_mask })
}
