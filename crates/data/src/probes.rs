//! Probes: private-use characters put around the pieces of text that a conversation brings, so that a rendering tells
//! where each piece went, and what the template supplied itself.
//!
//! It never looks for message text inside rendered text. Invariant: removing the probes from the probed rendering must give
//! the plain rendering byte for byte; otherwise the template looked at the text in a way that the probes disturbed, and
//! nothing is reported.

use serde_json::Value;

/// A probed piece: text of message `message`, which the template may move, cut out or repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub message: usize,
}

/// A conversation with probes in it.
#[derive(Debug)]
pub(crate) struct Probed {
    pub messages: Vec<Value>,
    pub pieces: Vec<Piece>,
    /// Text that reaches the template without probes (argument names, call ids): it must not hold special-token text.
    pub bare_texts: Vec<String>,
    base: u32,
}

/// Tags at which templates cut a message's text apart. Each part between two of them gets probes of its own, because the
/// template may drop or move one part and keep another.
const CUT_TAGS: [&str; 12] = [
    "<think>",
    "</think>",
    "<thinking>",
    "</thinking>",
    "<reasoning>",
    "</reasoning>",
    "<seed:think>",
    "</seed:think>",
    "[THINK]",
    "[/THINK]",
    "<tool_response>",
    "</tool_response>",
];

/// First characters of the two private-use planes; a text that uses one leaves the other.
const PLANES: [u32; 2] = [0x10_0000, 0xF_0000];
const PLANE_SIZE: u32 = 0xFFF0;
/// The last characters of the chosen plane mark generation blocks.
const MARKS: u32 = 0xFFF0;

impl Probed {
    /// Puts probes into every text of `messages`. `None` when both private-use planes occur in the conversation already, or
    /// it has more pieces than a plane has characters.
    pub fn new(messages: &[Value]) -> Option<Self> {
        let text = serde_json::to_string(messages).ok()?;
        let in_plane = |base: u32| text.chars().any(|c| (base..base + 0x1_0000).contains(&(c as u32)));
        let base = PLANES.into_iter().find(|&b| !in_plane(b))?;
        let mut probed = Self { messages: messages.to_vec(), pieces: Vec::new(), bare_texts: Vec::new(), base };
        let mut list = std::mem::take(&mut probed.messages);
        for (i, message) in list.iter_mut().enumerate() {
            let Value::Object(map) = message else { continue };
            for (key, value) in map.iter_mut() {
                match key.as_str() {
                    "content" | "reasoning_content" => probed.wrap_leaves(i, value),
                    "tool_calls" => {
                        for call in value.as_array_mut().into_iter().flatten() {
                            probed.wrap_call(i, call);
                        }
                    }
                    "role" => {}
                    _ => probed.bare_texts.push(value.to_string()),
                }
            }
        }
        probed.messages = list;
        (2 * probed.pieces.len() < PLANE_SIZE as usize).then_some(probed)
    }

    /// The characters that mark where a generation block opens and closes.
    pub fn marks(&self) -> (char, char) {
        let mark = |i| char::from_u32(self.base + MARKS + i).unwrap_or(char::REPLACEMENT_CHARACTER);
        (mark(0), mark(1))
    }

    fn wrap_call(&mut self, i: usize, call: &mut Value) {
        let Value::Object(map) = call else { return };
        for (key, value) in map.iter_mut() {
            match key.as_str() {
                "function" => self.wrap_call(i, value),
                "name" | "arguments" => self.wrap_leaves(i, value),
                _ => self.bare_texts.push(value.to_string()),
            }
        }
    }

    fn wrap_leaves(&mut self, i: usize, value: &mut Value) {
        match value {
            Value::String(s) => *s = self.wrap(i, s),
            Value::Array(list) => list.iter_mut().for_each(|v| self.wrap_leaves(i, v)),
            Value::Object(map) => {
                for (key, v) in map.iter_mut() {
                    self.bare_texts.push(key.clone());
                    self.wrap_leaves(i, v);
                }
            }
            _ => {}
        }
    }

    /// Wraps each part between cut tags, inside its surrounding white space, so that a template that strips still does.
    fn wrap(&mut self, i: usize, text: &str) -> String {
        let mut out = String::with_capacity(text.len() + 8);
        let mut rest = text;
        loop {
            let cut = CUT_TAGS.iter().filter_map(|tag| rest.find(tag).map(|at| (at, tag.len()))).min();
            let (part, tag_len) = cut.map_or((rest, 0), |(at, len)| (&rest[..at], len));
            let core = part.trim_matches(is_space);
            if core.is_empty() {
                out.push_str(part);
            } else {
                let lead = part.len() - part.trim_start_matches(is_space).len();
                out.push_str(&part[..lead]);
                let id = 2 * self.pieces.len() as u32;
                out.extend(char::from_u32(self.base + id));
                out.push_str(core);
                out.extend(char::from_u32(self.base + id + 1));
                out.push_str(&part[lead + core.len()..]);
                self.pieces.push(Piece { message: i });
            }
            out.push_str(&rest[part.len()..part.len() + tag_len]);
            rest = &rest[part.len() + tag_len..];
            if tag_len == 0 {
                return out;
            }
        }
    }

    /// Takes the probes out of `rendered` again and reports where they stood.
    pub fn read(&self, rendered: &str) -> Reading {
        let mut reading = Reading { text: String::with_capacity(rendered.len()), probes: Vec::new(), marks: Vec::new() };
        for c in rendered.chars() {
            let id = (c as u32).wrapping_sub(self.base);
            if id < 2 * self.pieces.len() as u32 {
                reading.probes.push(Probe { piece: (id / 2) as usize, closes: id % 2 == 1, at: reading.text.len() });
            } else if id == MARKS || id == MARKS + 1 {
                reading.marks.push((id == MARKS + 1, reading.text.len()));
            } else {
                reading.text.push(c);
            }
        }
        reading
    }
}

/// What Python's `str.strip` strips.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// One probe found in a rendering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Probe {
    pub piece: usize,
    pub closes: bool,
    /// Byte offset in the text without probes.
    pub at: usize,
}

/// A rendering with its probes taken out.
#[derive(Debug)]
pub(crate) struct Reading {
    pub text: String,
    /// In the order of the text.
    pub probes: Vec<Probe>,
    /// Generation marks: (closes, byte offset in the text without probes).
    pub marks: Vec<(bool, usize)>,
}

impl Reading {
    /// Byte ranges of the pieces, in text order. `None` unless the probes come in pairs, each piece at most once.
    pub fn ranges(&self, n_pieces: usize) -> Option<Vec<(usize, std::ops::Range<usize>)>> {
        let mut seen = vec![false; n_pieces];
        let mut ranges = Vec::with_capacity(self.probes.len() / 2);
        for pair in self.probes.chunks(2) {
            let [open, close] = pair else { return None };
            if open.closes || !close.closes || open.piece != close.piece || std::mem::replace(&mut seen[open.piece], true) {
                return None;
            }
            ranges.push((open.piece, open.at..close.at));
        }
        Some(ranges)
    }
}
