//! The target's chat template: Jinja source in, rendered text out, as `transformers.apply_chat_template` renders it.
//!
//! It refuses to invent a template: a target without one is an error. Invariants: rendering is a pure function of its
//! arguments (the date that `strftime_now` shows is fixed when the template is loaded); whitespace follows
//! `trim_blocks` and `lstrip_blocks`, as in transformers (`utils/chat_template_utils.py`, `_compile_jinja_template`).

use std::path::Path;

use chrono::NaiveDateTime;
use minijinja::value::{Kwargs, Value as JinjaValue, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind, syntax::SyntaxConfig};
use serde_json::{Map, Value};

use crate::error::{DataError, Result};
use crate::hash::sha256_hex;

/// Names of the variables that stand where `{% generation %}` and `{% endgeneration %}` stood.
const OPEN: &str = "drafthorse_generation_open";
const CLOSE: &str = "drafthorse_generation_close";

/// Steps of the template engine (instructions, and a step per 64 bytes made) that one rendering may take. Templates in use need some hundred per message.
pub const RENDER_STEPS: u64 = 20_000_000;

/// A loaded chat template with the variables that transformers gives it.
pub struct ChatTemplate {
    env: Environment<'static>,
    has_tool_template: bool,
    has_generation_marks: bool,
    source: String,
    hash: String,
    /// Special token texts such as `bos_token`, and the caller's own variables such as `enable_thinking`.
    globals: Map<String, Value>,
}

/// What one rendering is given beside the messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct RenderOptions<'a> {
    /// End with the header of an assistant turn.
    pub add_generation_prompt: bool,
    /// Variables that override the template's own for this rendering.
    pub overrides: Option<(&'a str, bool)>,
    /// Characters written where `{% generation %}` blocks open and close.
    pub marks: Option<(char, char)>,
}

impl ChatTemplate {
    /// Loads the template of the target folder `dir`: `chat_template.jinja`, else `chat_template.json`, else
    /// `tokenizer_config.json` (a string, or a list of named templates of which `default` and `tool_use` are used).
    ///
    /// `variables` are extra template variables (e.g. `enable_thinking`); `now` is what `strftime_now` shows.
    ///
    /// # Errors
    /// When no template is found, or it does not parse.
    pub fn load(dir: &Path, variables: &Map<String, Value>, now: NaiveDateTime) -> Result<Self> {
        let config_path = dir.join("tokenizer_config.json");
        let config = read_json_if_there(&config_path)?;
        let jinja_path = dir.join("chat_template.jinja");
        let json_path = dir.join("chat_template.json");
        let (path, default, tool_use) = if jinja_path.exists() {
            let source = std::fs::read_to_string(&jinja_path).map_err(DataError::io("read", &jinja_path))?;
            (jinja_path, Some(source), None)
        } else if let Some(Value::String(source)) = read_json_if_there(&json_path)?.remove("chat_template") {
            (json_path, Some(source), None)
        } else {
            match config.get("chat_template") {
                Some(Value::String(source)) => (config_path, Some(source.clone()), None),
                Some(Value::Array(list)) => {
                    let named = |name: &str| {
                        let found = list.iter().find(|t| t["name"] == name)?;
                        found["template"].as_str().map(str::to_owned)
                    };
                    (config_path, named("default"), named("tool_use"))
                }
                _ => (config_path, None, None),
            }
        };
        let Some(default) = default else {
            return Err(DataError::target(
                dir,
                "no chat template in chat_template.jinja, chat_template.json or tokenizer_config.json",
                "use the instruct variant of the model, or put its template into chat_template.jinja",
            ));
        };
        let mut globals = special_token_texts(&config);
        globals.extend(variables.clone());
        Self::from_source(&path, default, tool_use, globals, now)
    }

    /// Builds a template from its source; `path` only serves error messages. See [`ChatTemplate::load`].
    ///
    /// # Errors
    /// When the source does not parse.
    pub fn from_source(
        path: &Path,
        default: String,
        tool_use: Option<String>,
        globals: Map<String, Value>,
        now: NaiveDateTime,
    ) -> Result<Self> {
        let mut env = Environment::new();
        env.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(|e| DataError::Template(e.to_string()))?,
        );
        env.set_fuel(Some(RENDER_STEPS));
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_function("raise_exception", |message: String| -> std::result::Result<JinjaValue, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, message))
        });
        env.add_function("strftime_now", move |format: String| now.format(&format).to_string());
        env.add_filter("tojson", tojson);
        let has_tool_template = tool_use.is_some();
        let mut source = default.clone();
        let (default, has_generation_marks) = replace_generation_tags(&default);
        let mut add = |name: &'static str, text: String| {
            env.add_template_owned(name, text).map_err(|e| {
                DataError::target(path, format!("the chat template does not parse: {e:#}"), "fix the template's syntax")
            })
        };
        add("default", default)?;
        if let Some(tool_use) = tool_use {
            source.push('\0');
            source.push_str(&tool_use);
            add("tool_use", replace_generation_tags(&tool_use).0)?;
        }
        let hash = sha256_hex(source.as_bytes());
        Ok(Self { env, has_tool_template, has_generation_marks, source, hash, globals })
    }

    /// SHA-256 of the template's source, in hexadecimal.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// The template has `{% generation %}` blocks.
    pub fn has_generation_marks(&self) -> bool {
        self.has_generation_marks
    }

    /// The template's source mentions `name`.
    pub fn mentions(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    /// The text of a special token variable such as `eos_token`, if the tokenizer's config names one.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.globals.get(name).and_then(Value::as_str)
    }

    /// The variables given to every rendering.
    pub fn variables(&self) -> &Map<String, Value> {
        &self.globals
    }

    /// Renders `messages` with `tools` (null for none).
    ///
    /// # Errors
    /// [`DataError::Template`] with the template's own words; [`DataError::EndlessTemplate`] after [`RENDER_STEPS`].
    pub fn render(&self, messages: &[JinjaValue], tools: &JinjaValue, options: RenderOptions<'_>) -> Result<String> {
        let name = if self.has_tool_template && !tools.is_none() { "tool_use" } else { "default" };
        let fail = |e: JinjaError| match e.kind() {
            ErrorKind::OutOfFuel => DataError::EndlessTemplate { steps: RENDER_STEPS },
            _ => DataError::Template(first_cause(&e)),
        };
        let template = self.env.get_template(name).map_err(fail)?;
        let mut context: Vec<(String, JinjaValue)> = self.globals.iter().map(|(k, v)| (k.clone(), to_jinja(v))).collect();
        context.push(("messages".into(), JinjaValue::from(messages.to_vec())));
        context.push(("tools".into(), tools.clone()));
        context.push(("documents".into(), JinjaValue::from(())));
        context.push(("add_generation_prompt".into(), options.add_generation_prompt.into()));
        let mark = |c: Option<char>| JinjaValue::from(c.map(String::from).unwrap_or_default());
        context.push((OPEN.into(), mark(options.marks.map(|m| m.0))));
        context.push((CLOSE.into(), mark(options.marks.map(|m| m.1))));
        if let Some((key, value)) = options.overrides {
            context.retain(|(k, _)| k != key);
            context.push((key.into(), value.into()));
        }
        template.render(JinjaValue::from_pairs(context)).map_err(fail)
    }
}

/// A JSON value as the template sees it; null is Python's None.
pub(crate) fn to_jinja(value: &Value) -> JinjaValue {
    match value {
        Value::Null => JinjaValue::from(()),
        Value::Bool(b) => (*b).into(),
        Value::Number(n) => n
            .as_i64()
            .map(JinjaValue::from)
            .or_else(|| n.as_u64().map(JinjaValue::from))
            .unwrap_or_else(|| n.as_f64().unwrap_or(f64::NAN).into()),
        Value::String(s) => s.as_str().into(),
        Value::Array(list) => list.iter().map(to_jinja).collect::<Vec<_>>().into(),
        Value::Object(map) => JinjaValue::from_pairs(map.iter().map(|(k, v)| (k.clone(), to_jinja(v)))),
    }
}

/// The innermost message: templates nest includes and macros, and users need what `raise_exception` said.
fn first_cause(error: &JinjaError) -> String {
    let line = error.line().map(|l| format!(" (template line {l})")).unwrap_or_default();
    format!("{}{line}", error.detail().map_or_else(|| error.kind().to_string(), |d| format!("{}: {d}", error.kind())))
}

/// Reads a JSON object; an absent file is an empty object.
pub(crate) fn read_json_if_there(path: &Path) -> Result<Map<String, Value>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Map::new()),
        Err(e) => return Err(DataError::io("read", path)(e)),
    };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(DataError::target(path, "not a JSON object", "fetch the file again")),
        Err(e) => Err(DataError::target(path, format!("not JSON: {e}"), "fetch the file again")),
    }
}

/// `bos_token` and its like: a string, or an object with `content`.
fn special_token_texts(config: &Map<String, Value>) -> Map<String, Value> {
    config
        .iter()
        .filter(|(k, _)| k.ends_with("_token") && !k.starts_with("add_"))
        .filter_map(|(k, v)| {
            let text = v.as_str().or_else(|| v.get("content").and_then(Value::as_str))?;
            Some((k.clone(), Value::String(text.to_owned())))
        })
        .collect()
}

/// Replaces `{% generation %}` and `{% endgeneration %}` by blocks that print a variable. The surrounding `if` keeps the
/// tag a block tag, so that `trim_blocks`, `lstrip_blocks` and `-` act as they did on the original.
fn replace_generation_tags(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut found = false;
    while let Some(at) = rest.find("{%").into_iter().chain(rest.find("{#")).min() {
        let (before, tail) = rest.split_at(at);
        out.push_str(before);
        if tail.starts_with("{#") {
            let end = tail.find("#}").map_or(tail.len(), |e| e + 2);
            out.push_str(&tail[..end]);
            rest = &tail[end..];
            continue;
        }
        let Some(end) = tail.find("%}") else { break };
        let inner = &tail[2..end];
        let left = inner.chars().next().filter(|c| "+-".contains(*c));
        let right = inner.chars().next_back().filter(|c| "+-".contains(*c));
        let variable = match inner.trim_matches(['+', '-']).trim() {
            "generation" => Some(OPEN),
            "endgeneration" => Some(CLOSE),
            _ => None,
        };
        if let Some(variable) = variable {
            found = true;
            let sign = |c: Option<char>| c.map(String::from).unwrap_or_default();
            out.push_str(&format!("{{%{} if true %}}{{{{ {variable} }}}}{{% endif {}%}}", sign(left), sign(right)));
        } else {
            out.push_str(&tail[..end + 2]);
        }
        rest = &tail[end + 2..];
    }
    out.push_str(rest);
    (out, found)
}

/// `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`: what transformers binds to `tojson`.
fn tojson(value: &JinjaValue, indent: Option<JinjaValue>, args: Kwargs) -> std::result::Result<JinjaValue, JinjaError> {
    let indent = indent.or(args.get::<Option<JinjaValue>>("indent")?);
    let indent =
        match indent {
            None => None,
            Some(v) if v.is_none() => None,
            Some(v) if v.kind() == ValueKind::String => Some(v.to_string()),
            Some(v) => Some(" ".repeat(usize::try_from(v).map_err(|_| {
                JinjaError::new(ErrorKind::InvalidOperation, "tojson: `indent` is neither a count nor a string")
            })?)),
        };
    let ensure_ascii = args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = args.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = args.get::<Option<Vec<String>>>("separators")?;
    args.assert_all_used()?;
    let (item, colon) = match separators.as_deref() {
        Some([item, colon]) => (item.clone(), colon.clone()),
        Some(_) => return Err(JinjaError::new(ErrorKind::InvalidOperation, "tojson: `separators` needs two strings")),
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let json = serde_json::to_value(value).map_err(|e| JinjaError::new(ErrorKind::BadSerialization, format!("tojson: {e}")))?;
    let mut out = String::new();
    PythonJson { indent, item, colon, sort_keys, ensure_ascii }.write(&json, 0, &mut out);
    Ok(JinjaValue::from_safe_string(out))
}

struct PythonJson {
    indent: Option<String>,
    item: String,
    colon: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl PythonJson {
    fn write(&self, value: &Value, depth: usize, out: &mut String) {
        match value {
            Value::Array(list) if list.is_empty() => out.push_str("[]"),
            Value::Object(map) if map.is_empty() => out.push_str("{}"),
            Value::Array(list) => {
                out.push('[');
                for (i, v) in list.iter().enumerate() {
                    self.separate(i, depth + 1, out);
                    self.write(v, depth + 1, out);
                }
                self.newline(depth, out);
                out.push(']');
            }
            Value::Object(map) => {
                out.push('{');
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(k, _)| k.as_str());
                }
                for (i, (k, v)) in entries.into_iter().enumerate() {
                    self.separate(i, depth + 1, out);
                    self.string(k, out);
                    out.push_str(&self.colon);
                    self.write(v, depth + 1, out);
                }
                self.newline(depth, out);
                out.push('}');
            }
            Value::String(s) => self.string(s, out),
            Value::Number(n) if n.is_f64() => out.push_str(&python_float(n.as_f64().unwrap_or(f64::NAN))),
            other => out.push_str(&other.to_string()),
        }
    }

    fn separate(&self, i: usize, depth: usize, out: &mut String) {
        if i > 0 {
            out.push_str(&self.item);
        }
        self.newline(depth, out);
    }

    fn newline(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn string(&self, s: &str, out: &mut String) {
        let quoted = Value::String(s.to_owned()).to_string();
        if !self.ensure_ascii {
            out.push_str(&quoted);
            return;
        }
        for c in quoted.chars() {
            if c.is_ascii() {
                out.push(c);
            } else {
                let mut units = [0u16; 2];
                for unit in c.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
}

/// Python's `repr` of a float: shortest digits; an exponent of at least two digits outside 1e-4 … 1e16.
fn python_float(x: f64) -> String {
    let magnitude = x.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{x:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{x:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        let now = chrono::DateTime::from_timestamp(1_700_000_000, 0).unwrap().naive_utc();
        ChatTemplate::from_source(Path::new("t"), source.into(), None, Map::new(), now).unwrap()
    }

    fn render(source: &str, value: Value) -> Result<String> {
        let messages = [to_jinja(&value)];
        template(source).render(&messages, &JinjaValue::from(()), RenderOptions::default())
    }

    #[test]
    fn tojson_writes_what_python_writes() {
        let value = serde_json::json!({"b": [1, 2.5, 1e20, 1e-7, null, true], "a": "é\n\"<>&'", "e": {}, "f": 3.0});
        assert_eq!(
            render("{{ messages[0] | tojson }}", value.clone()).unwrap(),
            r#"{"b": [1, 2.5, 1e+20, 1e-07, null, true], "a": "é\n\"<>&'", "e": {}, "f": 3.0}"#
        );
        assert_eq!(
            render("{{ messages[0] | tojson(indent=2, sort_keys=true) }}", serde_json::json!({"b": [1], "a": []})).unwrap(),
            "{\n  \"a\": [],\n  \"b\": [\n    1\n  ]\n}"
        );
        assert_eq!(
            render("{{ messages[0] | tojson(ensure_ascii=true) }}", serde_json::json!("é𝄞")).unwrap(),
            r#""\u00e9\ud834\udd1e""#
        );
    }

    #[test]
    fn functions_methods_and_exceptions_work() {
        let value = serde_json::json!({"role": "user", "content": " x "});
        assert_eq!(
            render("{{ strftime_now('%d %b %Y') }}{{ messages[0].content.strip() }}", value.clone()).unwrap(),
            "14 Nov 2023x"
        );
        let error = render("{{ raise_exception('roles must alternate') }}", value.clone()).unwrap_err();
        assert!(error.to_string().contains("roles must alternate"), "{error}");
        assert_eq!(render("{{ none }}{{ true }}{{ messages[0].absent }}", value).unwrap(), "NoneTrue");
    }

    #[test]
    fn a_template_without_end_is_ended_and_a_long_conversation_is_not() {
        let nested =
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
        let grows = "{% set ns = namespace(s='x') %}{% for a in range(9999) %}{% set ns.s = ns.s + ns.s %}{% endfor %}";
        for source in [nested, grows] {
            let error = render(source, Value::Null).unwrap_err();
            assert!(matches!(error, DataError::EndlessTemplate { .. }), "{error}");
        }
        let message = to_jinja(&serde_json::json!({"role": "user", "content": "x".repeat(2_000)}));
        let source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim }}{% endfor %}";
        let options = RenderOptions::default();
        let text = template(source).render(&vec![message; 2_000], &JinjaValue::from(()), options).unwrap();
        assert_eq!(text.len(), 2_000 * 2_006);
    }

    #[test]
    fn generation_tags_keep_the_whitespace_rules_of_block_tags() {
        let source = "a\n  {% generation %}\nb\n  {%- endgeneration -%}\n c{# {% generation %} #}";
        let t = template(source);
        assert!(t.has_generation_marks());
        let with = |marks| t.render(&[], &JinjaValue::from(()), RenderOptions { marks, ..RenderOptions::default() }).unwrap();
        assert_eq!(with(None), "a\nbc");
        assert_eq!(with(Some(('<', '>'))), "a\n<b>c");
        assert!(!template("{% if true %}x{% endif %}").has_generation_marks());
    }
}
