//! Rust source with comments and literals blanked, so that a rule about code does not trip over prose.
//!
//! Refuses to parse: it knows comments, strings, raw strings, characters and lifetimes, nothing else. Invariant: every line keeps its length and number.

/// `text` with the insides of comments, strings and characters replaced by blanks.
pub fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut i = 0;
    while i < chars.len() {
        let end = match (chars[i], chars.get(i + 1)) {
            ('/', Some('/')) => line_end(&chars, i),
            ('/', Some('*')) => block_end(&chars, i),
            ('"', _) => string_end(&chars, i),
            ('r' | 'b', _) if !after_word(&chars, i) => raw_end(&chars, i).unwrap_or(i),
            ('\'', _) => char_end(&chars, i).unwrap_or(i),
            _ => i,
        };
        if end == i {
            out.push(chars[i]);
            i += 1;
        } else {
            out.extend(chars[i..end].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }));
            i = end;
        }
    }
    out
}

/// Whether `line` holds `word` with no identifier character on either side.
pub fn has_word(line: &str, word: &str) -> bool {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word)
        .any(|(at, _)| !is_part(line[..at].chars().next_back()) && !is_part(line[at + word.len()..].chars().next()))
}

fn after_word(chars: &[char], i: usize) -> bool {
    i > 0 && (chars[i - 1].is_alphanumeric() || chars[i - 1] == '_')
}

fn line_end(chars: &[char], from: usize) -> usize {
    (from..chars.len()).find(|&j| chars[j] == '\n').unwrap_or(chars.len())
}

fn block_end(chars: &[char], from: usize) -> usize {
    let (mut depth, mut j) = (0usize, from);
    while j < chars.len() {
        match (chars[j], chars.get(j + 1)) {
            ('/', Some('*')) => (depth, j) = (depth + 1, j + 2),
            ('*', Some('/')) => {
                (depth, j) = (depth - 1, j + 2);
                if depth == 0 {
                    return j;
                }
            }
            _ => j += 1,
        }
    }
    chars.len()
}

fn string_end(chars: &[char], from: usize) -> usize {
    let mut j = from + 1;
    while j < chars.len() {
        match chars[j] {
            '\\' => j += 2,
            '"' => return j + 1,
            _ => j += 1,
        }
    }
    chars.len()
}

/// The end of `r"…"`, `r#"…"#`, `b"…"`, `br"…"` or `b'…'` at `from`, if there is one.
fn raw_end(chars: &[char], from: usize) -> Option<usize> {
    let mut j = from;
    if chars[j] == 'b' {
        j += 1;
        match chars.get(j)? {
            '"' => return Some(string_end(chars, j)),
            '\'' => return char_end(chars, j),
            'r' => {}
            _ => return None,
        }
    }
    let hashes = chars[j + 1..].iter().take_while(|c| **c == '#').count();
    j += 1 + hashes;
    if chars.get(j) != Some(&'"') {
        return None;
    }
    let closes = |k: usize| chars[k] == '"' && chars[k + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
    Some((j + 1..chars.len()).find(|&k| closes(k)).map_or(chars.len(), |k| k + 1 + hashes))
}

/// The end of a character literal at `from`; a lifetime is none.
fn char_end(chars: &[char], from: usize) -> Option<usize> {
    match chars.get(from + 1)? {
        '\\' => (from + 3..chars.len()).find(|&j| chars[j] == '\'').map(|j| j + 1),
        _ => (chars.get(from + 2) == Some(&'\'')).then_some(from + 3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_blanked_and_code_stays() {
        let text =
            "let a = \"x // y\"; // z\n/* p /* q */ r */ let b: &'static str = r#\"s \" t\"#;\nlet c = '\"'; let d = b'\\''; e";
        let code = code_only(text);
        assert_eq!(code.lines().count(), 3);
        for word in ["x", "y", "z", "p", "q", "s", "t"] {
            assert!(!has_word(&code, word), "{word} in {code}");
        }
        for word in ["a", "b", "c", "d", "e", "let", "str"] {
            assert!(has_word(&code, word), "{word} not in {code}");
        }
        assert!(code.contains("&'static"));
    }

    #[test]
    fn a_word_is_whole() {
        assert!(has_word("unsafe {", "unsafe") && !has_word("unsafe_code", "unsafe") && !has_word("an_unsafe", "unsafe"));
    }
}
