//! One word for one shell.
//!
//! Refuses NUL, which no argument can hold. Invariant: what [`quote`] gives, read by a POSIX shell or by fish, is exactly one word with the
//! bytes that went in. Backslashes stand outside the quotes, because fish reads them inside.

/// `word` as a shell reads it back.
///
/// # Panics
/// When `word` holds NUL; arguments of processes cannot.
pub fn quote(word: &str) -> String {
    assert!(!word.contains('\0'), "an argument cannot hold NUL");
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,+@%".contains(c);
    // A leading `-` or `%` means nothing to the shell itself; `=` at the start does to zsh, so that `=` is quoted.
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    let mut out = String::from("'");
    for c in word.chars() {
        match c {
            '\'' => out.push_str("'\\''"),
            '\\' => out.push_str("'\\\\'"),
            _ => out.push(c),
        }
    }
    out.push('\'');
    out
}

/// `words` as one line that a shell splits into the same words.
pub fn join<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    words.into_iter().map(quote).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_words_stay_and_others_are_quoted() {
        assert_eq!(quote("runs/a-b_c.toml"), "runs/a-b_c.toml");
        assert_eq!(
            [quote(""), quote("my container"), quote("a'b"), quote("a\\b"), quote("$HOME")],
            ["''", "'my container'", "'a'\\''b'", "'a'\\\\'b'", "'$HOME'"]
        );
        assert_eq!(join(["a", "b c"]), "a 'b c'");
    }
}
