//! A config's text: overrides, and errors that name the line, the key and the nearest known key.
//!
//! Job: set keys from `key=value`, and put what the TOML reader says into words. Refuses to know which keys there are: it asks the types.
//! Invariant: an error about a value names its key, whether it stood in the file or in an override.

use crate::config::{ConfigError, RunConfig};

/// Two keys that are less alike than this are no slip of the finger.
const ALIKE: f64 = 0.75;

/// Sets one dotted key from `key=value`; the value is TOML, or a bare string.
pub(crate) fn apply(table: &mut toml::Table, item: &str) -> Result<(), ConfigError> {
    let bad = |what: &str| ConfigError::Parse {
        origin: format!("override `{item}`"),
        what: what.into(),
        todo: "write section.key=value, e.g. drafter.layers=5".into(),
    };
    let (key, text) = item.split_once('=').ok_or_else(|| bad("there is no `=`"))?;
    let parsed = format!("v = {text}").parse::<toml::Table>().ok().and_then(|mut t| t.remove("v"));
    let new = parsed.unwrap_or_else(|| toml::Value::String(text.to_owned()));
    let mut at = table;
    let parts: Vec<&str> = key.trim().split('.').collect();
    let (last, sections) = parts.split_last().expect("split gives at least one part");
    for section in sections {
        let entry = at.entry((*section).to_owned()).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        at = entry.as_table_mut().ok_or_else(|| bad(&format!("`{section}` is a value, not a section")))?;
    }
    at.insert((*last).to_owned(), new);
    Ok(())
}

/// The text is no TOML.
pub(crate) fn syntax_error(origin: &str, text: &str, error: &toml::de::Error) -> ConfigError {
    let place = line(text, error).map_or_else(String::new, |n| format!("line {n}: "));
    ConfigError::Parse {
        origin: origin.into(),
        what: format!("{place}{}", error.message().replace('\n', ", ")),
        todo: "correct it; `drafthorse init` prints a commented config".into(),
    }
}

/// The table has a key that nobody knows, lacks one, or has a value of another type.
pub(crate) fn key_error(origin: &str, text: &str, overrides: &[String], error: &toml::de::Error) -> ConfigError {
    let message = error.message();
    let shown = error.to_string();
    let path = shown.lines().find_map(|l| l.strip_prefix("in `")?.strip_suffix('`')).unwrap_or_default();
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let (what, todo) = match quoted.split_first() {
        Some((unknown, known)) if message.starts_with("unknown field") => {
            let section = path.strip_suffix(unknown).unwrap_or(path).trim_end_matches('.');
            let within = if section.is_empty() { String::new() } else { format!(" in [{section}]") };
            (format!("there is no key `{unknown}`{within}"), nearest(unknown, known))
        }
        _ if path.starts_with("eval.held_out") => {
            let what = "key `eval.held_out`: neither \"none\" nor a number or a share of rows".to_owned();
            (what, "write \"none\", { rows = 64 } or { share = 0.01 }".to_owned())
        }
        _ if message.starts_with("missing field") => (
            format!("the key `{}` is missing", quoted.first().unwrap_or(&"")),
            "add it; `drafthorse init` prints a whole config".to_owned(),
        ),
        _ => {
            (format!("key `{path}`: {}", in_words(message)), "correct it; `drafthorse init` prints a commented config".to_owned())
        }
    };
    let unknown = quoted.first().filter(|_| message.starts_with("unknown field"));
    let names = |key: &str| key == path || unknown.is_some_and(|unknown| key.split('.').any(|part| part == *unknown));
    if let Some(item) = overrides.iter().find(|item| item.split_once('=').is_some_and(|(key, _)| names(key.trim()))) {
        return ConfigError::Parse { origin: format!("override `{item}`"), what, todo };
    }
    // Tables do not know where they stood; the text does, where its first fault is this one.
    let key = unknown.copied().unwrap_or_else(|| path.rsplit('.').next().unwrap_or_default());
    let first = toml::from_str::<RunConfig>(text).err().and_then(|e| line(text, &e));
    let here = first.filter(|n| !key.is_empty() && text.lines().nth(n - 1).is_some_and(|l| l.contains(key)));
    let place = here.map_or_else(String::new, |n| format!("line {n}: "));
    ConfigError::Parse { origin: origin.into(), what: format!("{place}{what}"), todo }
}

fn line(text: &str, error: &toml::de::Error) -> Option<usize> {
    let before = text.get(..error.span()?.start)?;
    Some(before.matches('\n').count() + 1)
}

fn nearest(unknown: &str, known: &[&str]) -> String {
    let alike = |a: &&&str| strsim::jaro_winkler(unknown, a);
    let list = known.join(", ");
    // A key of a section that was written outside of it, or in another one.
    let sections = ["drafter", "batch", "optimizer", "pipeline", "eval", "checkpoint"];
    let has = |section: &&&str| {
        let probe = toml::from_str::<RunConfig>(&format!("target = \"\"\ndata = \"\"\n[{section}]\n{unknown} = 0"));
        probe.err().is_none_or(|e| !e.message().starts_with("unknown field"))
    };
    let plain = unknown.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if let Some(section) = sections.iter().filter(|_| plain).find(has) {
        return format!("did you mean `{section}.{unknown}`? known here: {list}");
    }
    match known.iter().max_by(|a, b| alike(a).total_cmp(&alike(b))).filter(|near| alike(near) >= ALIKE) {
        Some(near) => format!("did you mean `{near}`? known here: {list}"),
        None => format!("remove it; known here: {list}"),
    }
}

/// The reader's words for Rust's types are not a user's.
fn in_words(message: &str) -> String {
    let mut text = message.replace('\n', ", ");
    for (type_name, words) in [
        ("usize", "a whole number from 0"),
        ("u64", "a whole number from 0"),
        ("u32", "a whole number from 0"),
        ("f64", "a number"),
        ("f32", "a number"),
    ] {
        text = text.replace(&format!("expected {type_name}"), &format!("expected {words}"));
    }
    text
}
