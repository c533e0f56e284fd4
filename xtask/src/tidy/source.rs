//! Rules about source text: headers, lengths, leftovers, `unsafe`, words.
//!
//! Refuses to judge style that rustfmt and clippy judge. Invariant: words that are forbidden are spelled here in halves, so that this file holds none.

use super::Finding;
use super::rust_text::{code_only, has_word};
use crate::tree::{Tree, extension};

/// Longest source file, in lines.
const MAX_LINES: usize = 600;
/// Which files have a length.
const CODE: [&str; 7] = ["rs", "cu", "cuh", "py", "js", "css", "html"];
/// Where `unsafe` may be.
const UNSAFE_ROOMS: [&str; 2] = ["crates/cuda/", "crates/models/src/mmap.rs"];

/// All rules of this file.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = lengths(tree);
    for (path, text) in tree.with_ext("rs") {
        findings.extend(header(path, text));
        findings.extend(leftovers(path, text));
        findings.extend(unsafety(path, text));
    }
    for (path, text) in &tree.files {
        findings.extend(words(path, text));
    }
    findings
}

fn header(path: &str, text: &str) -> Option<Finding> {
    let what = "a file begins with `//!`: its job, what it refuses to do, its invariants";
    (!text.starts_with("//!")).then(|| Finding::at(path, 0, what))
}

fn leftovers(path: &str, text: &str) -> Vec<Finding> {
    let code = code_only(text);
    let mut findings = Vec::new();
    let banned = [concat!("to", "do!"), concat!("unimple", "mented!"), concat!("d", "bg!")];
    let ignored = concat!("#[ig", "nore");
    for (i, line) in code.lines().enumerate() {
        for word in banned.iter().filter(|w| has_word(line, w.trim_end_matches('!')) && line.contains(**w)) {
            findings.push(Finding::at(path, i, format!("{word} is left over: finish it or take it out")));
        }
        if line.contains(ignored) {
            findings.push(Finding::at(path, i, "an ignored test tests nothing: make it fast, gate it on a device, or remove it"));
        }
    }
    findings
}

fn unsafety(path: &str, text: &str) -> Vec<Finding> {
    let code = code_only(text);
    let lines: Vec<&str> = text.lines().collect();
    let mut findings = Vec::new();
    for (i, line) in code.lines().enumerate().filter(|(_, line)| has_word(line, "unsafe")) {
        if !UNSAFE_ROOMS.iter().any(|room| path.starts_with(room)) {
            findings.push(Finding::at(path, i, format!("`unsafe` is for {} alone", UNSAFE_ROOMS.join(" and "))));
            continue;
        }
        // The type of a pointer to an unsafe function claims nothing.
        match line.split_once("unsafe fn") {
            Some((_, rest)) if rest.starts_with('(') => {}
            Some(_) if !documented(&lines, i) => {
                findings.push(Finding::at(path, i, "an unsafe function says in `# Safety` what its caller must hold to"));
            }
            None if !explained(&lines, i) => {
                findings.push(Finding::at(path, i, "say in `// SAFETY:` right above why this is sound"))
            }
            _ => {}
        }
    }
    findings
}

/// Whether a `SAFETY:` comment ends right above line `at`, or above the statement that line `at` goes on.
fn explained(lines: &[&str], at: usize) -> bool {
    let mut in_comment = false;
    for i in (0..at).rev() {
        let line = lines[i].trim();
        if line.starts_with("//") {
            in_comment = true;
            if line.contains("SAFETY:") {
                return true;
            }
        } else if in_comment || at - i > 3 || line.is_empty() || line.ends_with([';', '}']) {
            return false;
        }
    }
    false
}

fn documented(lines: &[&str], at: usize) -> bool {
    lines[..at]
        .iter()
        .rev()
        .map(|l| l.trim())
        .take_while(|l| l.starts_with("///") || l.starts_with("#["))
        .any(|l| l.contains("# Safety"))
}

fn lengths(tree: &Tree) -> Vec<Finding> {
    let code = tree.files.iter().filter(|(path, _)| CODE.contains(&extension(path)));
    let longer = code.map(|(path, text)| (path, text.lines().count())).filter(|(_, lines)| *lines > MAX_LINES);
    longer
        .map(|(path, lines)| Finding::file(path, format!("{lines} lines, more than {MAX_LINES}: split it where it has two jobs")))
        .collect()
}

/// Words that have no place anywhere, and why.
const WORDS: [(&str, &str); 10] = [
    (concat!("TO", "DO"), "finish it or take it out"),
    (concat!("FIX", "ME"), "mend it or take it out"),
    (concat!("XX", "X"), "say what is meant"),
    (concat!("/wo", "rk/"), "a path of one machine: use a path inside the repository"),
    (concat!("/home", "/"), "a path of one machine: use a path inside the repository"),
    (concat!("crates", ".io"), "name the package, not its registry"),
    (concat!("pypi", ".org"), "name the package, not its registry"),
    (concat!("files.python", "hosted"), "name the package, not its registry"),
    (concat!("registry.npm", "js"), "name the package, not its registry"),
    (concat!("deb.deb", "ian.org"), "name the package, not its registry"),
];

/// Words that in prose only ever speak of how this repository came about.
const PROSE: [&str; 4] =
    [concat!("hel", "per session"), concat!("this se", "ssion"), concat!("lent mac", "hine"), concat!("device mac", "hine")];

fn words(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    if path == "Cargo.lock" {
        return findings;
    }
    for (i, line) in text.lines().enumerate() {
        for (word, why) in WORDS {
            // A word of letters must be whole, so that a hash or an identifier does not count.
            let letters = word.chars().all(char::is_alphabetic);
            if line.contains(word) && (!letters || has_word(line, word)) {
                findings.push(Finding::at(path, i, format!("`{word}`: {why}")));
            }
        }
        let lower = line.to_lowercase();
        for word in PROSE.iter().filter(|w| lower.contains(**w)) {
            findings.push(Finding::at(path, i, format!("`{word}`: say what the program does, not how it was written")));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::{texts, tree_of};
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        texts(&check(&tree_of(&[(path, text)])))
    }

    #[test]
    fn a_clean_file_has_no_findings() {
        let text = "//! Job.\nfn f() { let unsafe_code = \"unsafe { }\"; } // unsafe in prose\n";
        assert_eq!(found("crates/a/src/lib.rs", text), Vec::<String>::new());
    }

    #[test]
    fn headers_leftovers_and_ignored_tests_are_found() {
        assert!(found("a.rs", "fn f() {}\n")[0].starts_with("a.rs:1: a file begins"));
        for left in [concat!("to", "do!()"), concat!("unimple", "mented!()"), concat!("d", "bg!(1)"), concat!("#[ig", "nore]")] {
            assert_eq!(found("a.rs", &format!("//! J.\n{left}\n")).len(), 1, "{left}");
            assert_eq!(found("a.rs", &format!("//! J.\nlet s = \"{left}\";\n")).len(), 0, "{left} in a string");
        }
    }

    #[test]
    fn unsafe_needs_its_room_and_its_reason() {
        let block = "//! J.\nlet x = unsafe { f() };\n";
        assert!(found("crates/cpu/src/a.rs", block)[0].contains("alone"));
        assert!(found("crates/cuda/src/a.rs", block)[0].contains("SAFETY"));
        let explained = "//! J.\n// SAFETY: f holds for every x.\nlet x =\n    unsafe { f() };\n";
        assert_eq!(found("crates/cuda/src/a.rs", explained), Vec::<String>::new());
        let stale = "//! J.\n// SAFETY: f holds.\nlet y = 1;\nlet x = unsafe { f() };\n";
        assert_eq!(found("crates/cuda/src/a.rs", stale).len(), 1);
        assert!(found("crates/cuda/src/a.rs", "//! J.\npub unsafe fn f() {\n}\n")[0].contains("# Safety"));
        for fine in ["/// # Safety\n/// x\npub unsafe fn f() {\n}\n", "fn f(get: unsafe fn(u32) -> u32) {}\n"] {
            assert_eq!(found("crates/cuda/src/a.rs", &format!("//! J.\n{fine}")), Vec::<String>::new());
        }
    }

    #[test]
    fn no_file_is_too_long() {
        let with = |n: usize| texts(&lengths(&tree_of(&[("a.rs", &format!("//! J.\n{}", "\n".repeat(n - 1)))])));
        assert_eq!(with(600), Vec::<String>::new());
        assert!(with(601)[0].contains("601 lines, more than 600"));
    }

    #[test]
    fn words_are_found_in_any_text() {
        for word in [concat!("TO", "DO"), concat!("/wo", "rk/x"), concat!("crates", ".io"), concat!("Hel", "per session")] {
            assert_eq!(found("docs/a.md", &format!("# A\n{word} here\n")).len(), 1, "{word}");
        }
        assert_eq!(found("docs/a.md", concat!("# A\nthe TO", "DOS of old, AX", "XXB\n")), Vec::<String>::new());
        assert_eq!(found("Cargo.lock", concat!("crates", ".io")), Vec::<String>::new());
    }
}
