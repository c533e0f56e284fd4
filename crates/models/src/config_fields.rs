//! Typed access to the keys of one JSON object of a `config.json`.
//!
//! Job: every reader of a config takes its values through here, so that an error always names file and key, and says what
//! to do. It refuses a value of the wrong type; it never coerces a string to a number or a float to a count.
//! Invariant: a key that is absent and a key that is `null` mean the same, as they do to the libraries that write these files.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

/// What can be wrong with a `config.json`. Each message has two lines: what and where, then what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}\nname a folder that holds a Hugging Face model", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// The file is not a JSON object.
    #[error("{path} is not a JSON object: {detail}\ndownload the file again", path = path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser found, with line and column.
        detail: String,
    },
    /// A key without which the model is not defined.
    #[error("{path} has no key `{key}`\nadd `{key}`, {wanted}", path = path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The key, dotted when it is nested.
        key: String,
        /// What kind of value belongs there.
        wanted: &'static str,
    },
    /// A value of another type than the key has.
    #[error("{path}: key `{key}` is {got}\nit must be {wanted}", path = path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// The key, dotted when it is nested.
        key: String,
        /// The JSON text of the value.
        got: String,
        /// What kind of value belongs there.
        wanted: &'static str,
    },
    /// A value that contradicts another or makes no model.
    #[error("{path}: key `{key}` = {got}: {why}\n{advice}", path = path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key, dotted when it is nested.
        key: String,
        /// The JSON text of the value.
        got: String,
        /// What is wrong with it.
        why: String,
        /// What to do.
        advice: String,
    },
    /// A key or value whose meaning this program does not implement; running on without it would compute another model.
    #[error("{path}: key `{key}` = {got} asks for {meaning}, which is not supported\n{advice}", path = path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key, dotted when it is nested.
        key: String,
        /// The JSON text of the value.
        got: String,
        /// What the key means to the model.
        meaning: String,
        /// What to do.
        advice: String,
    },
}

/// One JSON object, with the path and the dotted prefix that errors name.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    pub(crate) path: &'a Path,
    prefix: &'a str,
    pub(crate) map: &'a Map<String, Value>,
}

/// The most that a key may say. Far beyond every published model, and small enough that no product of two sizes in bytes overflows 64 bits: what is larger
/// is a damaged file.
const MOST: [(&str, usize); 9] = [
    ("block_size", 1 << 12),
    ("head_dim", 1 << 14),
    ("hidden_size", 1 << 20),
    ("intermediate_size", 1 << 22),
    ("max_position_embeddings", 1 << 30),
    ("num_attention_heads", 1 << 14),
    ("num_hidden_layers", 1 << 10),
    ("num_key_value_heads", 1 << 14),
    ("vocab_size", 1 << 24),
];
/// The most of any other count.
const MOST_OTHERWISE: usize = 1 << 31;

/// A count, as the wording of errors has it.
const COUNT: &str = "a whole number of 1 or more";
/// A token id, as the wording of errors has it.
const TOKEN_ID: &str = "a token id (a whole number from 0)";

impl<'a> Fields<'a> {
    pub(crate) fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, prefix: "", map }
    }

    /// Another object of the same file, whose keys errors show as `prefix.key`.
    pub(crate) fn nested(&self, prefix: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { path: self.path, prefix, map }
    }

    /// The value, if the key is present and not `null`.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn dotted(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_owned() } else { format!("{}.{key}", self.prefix) }
    }

    pub(crate) fn missing(&self, key: &str, wanted: &'static str) -> ConfigError {
        ConfigError::Missing { path: self.path.to_owned(), key: self.dotted(key), wanted }
    }

    pub(crate) fn wrong_type(&self, key: &str, wanted: &'static str) -> ConfigError {
        ConfigError::Type { path: self.path.to_owned(), key: self.dotted(key), got: self.shown(key), wanted }
    }

    pub(crate) fn value(&self, key: &str, why: impl Into<String>, advice: impl Into<String>) -> ConfigError {
        ConfigError::Value {
            path: self.path.to_owned(),
            key: self.dotted(key),
            got: self.shown(key),
            why: why.into(),
            advice: advice.into(),
        }
    }

    pub(crate) fn unsupported(&self, key: &str, meaning: impl Into<String>, advice: impl Into<String>) -> ConfigError {
        ConfigError::Unsupported {
            path: self.path.to_owned(),
            key: self.dotted(key),
            got: self.shown(key),
            meaning: meaning.into(),
            advice: advice.into(),
        }
    }

    /// The JSON text of a value, cut so that a list of a thousand numbers does not bury the message.
    fn shown(&self, key: &str) -> String {
        let mut text = self.map.get(key).map_or_else(|| "absent".to_owned(), Value::to_string);
        if text.chars().count() > 120 {
            text = text.chars().take(117).chain("...".chars()).collect();
        }
        text
    }

    fn required<T>(&self, key: &str, wanted: &'static str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or_else(|| self.missing(key, wanted))
    }

    /// A count of at least 1, and at most what its key may say.
    pub(crate) fn opt_count(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let most = MOST.iter().find(|(known, _)| *known == key).map_or(MOST_OTHERWISE, |(_, most)| *most);
        match value.as_u64().map(|n| usize::try_from(n).unwrap_or(usize::MAX)) {
            Some(n) if n > most => Err(self.value(
                key,
                format!("no model has more than {most}"),
                "the file is damaged, or not the one of this model; fetch it again",
            )),
            Some(n) if n > 0 => Ok(Some(n)),
            _ => Err(self.wrong_type(key, COUNT)),
        }
    }

    /// A whole number that may be 0.
    pub(crate) fn opt_index(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let index = value.as_u64().and_then(|n| usize::try_from(n).ok());
        index.map(Some).ok_or_else(|| self.wrong_type(key, "a whole number from 0"))
    }

    pub(crate) fn count(&self, key: &str) -> Result<usize, ConfigError> {
        let value = self.opt_count(key)?;
        self.required(key, COUNT, value)
    }

    pub(crate) fn opt_f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().filter(|x| x.is_finite()).map(Some).ok_or_else(|| self.wrong_type(key, "a number"))
    }

    pub(crate) fn f64(&self, key: &str) -> Result<f64, ConfigError> {
        let value = self.opt_f64(key)?;
        self.required(key, "a number", value)
    }

    pub(crate) fn opt_bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong_type(key, "true or false"))
    }

    pub(crate) fn opt_str(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong_type(key, "a string"))
    }

    pub(crate) fn opt_object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| self.wrong_type(key, "an object"))
    }

    pub(crate) fn opt_token(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        token(value).map(Some).ok_or_else(|| self.wrong_type(key, TOKEN_ID))
    }

    /// One token id or a list of them; absent gives an empty list.
    pub(crate) fn tokens(&self, key: &str) -> Result<Vec<u32>, ConfigError> {
        let ids = match self.get(key) {
            None => Some(Vec::new()),
            Some(Value::Array(items)) => items.iter().map(token).collect(),
            Some(value) => token(value).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.wrong_type(key, "a token id or a list of token ids"))
    }

    pub(crate) fn opt_strings(&self, key: &str) -> Result<Option<Vec<String>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().and_then(|items| items.iter().map(|item| item.as_str().map(str::to_owned)).collect());
        list.map(Some).ok_or_else(|| self.wrong_type(key, "a list of strings"))
    }

    /// A list of counts that may include 0, such as layer ids.
    pub(crate) fn opt_indices(&self, key: &str) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let index = |item: &Value| item.as_u64().and_then(|n| usize::try_from(n).ok());
        let list = value.as_array().and_then(|items| items.iter().map(index).collect());
        list.map(Some).ok_or_else(|| self.wrong_type(key, "a list of whole numbers from 0"))
    }
}

fn token(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Reads a file that must hold one JSON object.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>, ConfigError> {
    let text = std::fs::read(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let json = |detail: String| ConfigError::Json { path: path.to_owned(), detail };
    match serde_json::from_slice(&text).map_err(|error| json(error.to_string()))? {
        Value::Object(map) => Ok(map),
        _ => Err(json("the outermost value is of another type".to_owned())),
    }
}
