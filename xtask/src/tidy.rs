//! Tidy: the rules of this repository that no compiler knows, each a function from files to findings.
//!
//! Job: run them all and print every finding as `path:line: what`, with what to do. Refuses to mend anything. Invariant: each rule has
//! a test that breaks it; a rule that can find nothing is no rule.

mod crates;
mod documents;
mod kernels;
mod rust_text;
mod source;

use crate::tree::Tree;
use std::path::Path;

/// Something that breaks a rule: where, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// File or folder.
    pub path: String,
    /// Line from 1; 0 for the file as a whole.
    pub line: usize,
    /// What is wrong and what to do.
    pub what: String,
}

impl Finding {
    /// A finding about a whole file.
    pub fn file(path: &str, what: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line: 0, what: what.into() }
    }

    /// A finding on a line, given from 0.
    pub fn at(path: &str, line: usize, what: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line: line + 1, what: what.into() }
    }
}

/// Runs every rule over the checkout at `root`.
///
/// # Errors
/// When a rule is broken; the findings are printed.
pub fn run(root: &Path) -> Result<(), String> {
    let tree = Tree::read(root)?;
    let metadata = crates::metadata(root)?;
    let mut findings = all(&tree, &metadata);
    findings.sort();
    for Finding { path, line, what } in &findings {
        match line {
            0 => eprintln!("{path}: {what}"),
            _ => eprintln!("{path}:{line}: {what}"),
        }
    }
    match findings.len() {
        0 => {
            println!("tidy: {} files hold to the rules", tree.files.len());
            Ok(())
        }
        n => Err(format!("tidy: {n} findings")),
    }
}

fn all(tree: &Tree, metadata: &crates::Members) -> Vec<Finding> {
    let mut findings = source::check(tree);
    findings.extend(documents::check(tree));
    findings.extend(kernels::check(tree));
    findings.extend(crates::check(tree, metadata));
    findings
}

/// A tree of a few files, for the tests of rules.
#[cfg(test)]
fn tree_of(files: &[(&str, &str)]) -> Tree {
    Tree { files: files.iter().map(|(p, t)| ((*p).to_owned(), (*t).to_owned())).collect() }
}

/// The findings' texts.
#[cfg(test)]
fn texts(findings: &[Finding]) -> Vec<String> {
    findings.iter().map(|f| format!("{}:{}: {}", f.path, f.line, f.what)).collect()
}
