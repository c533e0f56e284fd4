//! Rules about ops: one stem in every room. An op's contract, its oracle and its kernels are found under one name.
//!
//! Refuses to look into kernels beyond their header. Invariant: an op that has no oracle, and a kernel of no op, are findings.

use super::Finding;
use crate::tree::Tree;

const CONTRACTS: &str = "crates/graph/src/op";
const ORACLES: &str = "crates/testkit/src/oracle";
const KERNELS: &str = "crates/cuda/kernels";
/// What a kernel's header says, in this order.
const FIELDS: [&str; 4] = ["Arguments", "Launch", "Numerics:", "Bound:"];
/// Kernels that belong to no op.
const TOOLS: [(&str, &str); 1] = [("fill", "random values, so that GEMMs are timed on data")];

/// All rules of this file.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let oracles = tree.stems(ORACLES, "rs");
    for stem in tree.stems(CONTRACTS, "rs") {
        if !oracles.contains(&stem) {
            findings.push(Finding::file(&format!("{CONTRACTS}/{stem}.rs"), format!("has no oracle {ORACLES}/{stem}.rs")));
        }
    }
    let ops = variants(tree.text(&format!("{CONTRACTS}.rs")));
    for stem in tree.stems(KERNELS, "cu").into_iter().filter(|stem| !TOOLS.iter().any(|(tool, _)| tool == stem)) {
        let path = format!("{KERNELS}/{stem}.cu");
        findings.extend(header(tree, &path, &ops));
    }
    findings
}

/// Names of the ops that the table in `op.rs` lists.
fn variants(text: &str) -> Vec<String> {
    let body = text.split("\nops! {").nth(1).and_then(|rest| rest.split("\n}").next()).unwrap_or_default();
    let names = body.lines().map(|l| l.trim().trim_end_matches(','));
    names.filter(|n| !n.is_empty() && n.chars().all(char::is_alphanumeric)).map(str::to_owned).collect()
}

fn header(tree: &Tree, path: &str, ops: &[String]) -> Vec<Finding> {
    let lines: Vec<&str> = tree.text(path).lines().take_while(|l| l.starts_with("//")).collect();
    let mut findings = Vec::new();
    let title = lines.first().map_or("", |l| l.trim_start_matches('/').trim());
    let op: String = title.chars().take_while(|c| c.is_alphanumeric()).collect();
    let contract = lines
        .iter()
        .find_map(|l| l.split_once("Mathematics: "))
        .map_or("", |(_, rest)| rest.split_inclusive(".rs").next().unwrap_or(""));
    let has_contract = contract.starts_with(CONTRACTS) && tree.has(contract);
    if !has_contract && !ops.contains(&op) {
        let what = format!(
            "names no op: begin with its name, or say `Mathematics: {CONTRACTS}/….rs` (`{op}` is no op, `{contract}` no file)"
        );
        findings.push(Finding::at(path, 0, what));
    }
    let header = lines.join("\n");
    let mut from = 0;
    for field in FIELDS {
        match header[from..].find(field) {
            Some(at) => from += at,
            None => {
                let what = format!("the header lacks `{field}`, or has it out of order ({})", FIELDS.join(" "));
                findings.push(Finding::at(path, 0, what));
                break;
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::{texts, tree_of};
    use super::*;

    const ENUM: &str = "//! Ops.\nops! {\n    /// See.\n    RmsNorm,\n    KvAppend,\n}\n";
    const HEADER: &str = "// KvAppend: copies.\n//\n// Arguments: k.\n// Launch: one.\n// Numerics: a copy. Bound: bytes.\n";

    fn found(kernel: &str) -> Vec<String> {
        let files = [
            ("crates/graph/src/op.rs", ENUM),
            ("crates/graph/src/op/rms_norm.rs", ""),
            ("crates/testkit/src/oracle/rms_norm.rs", ""),
            ("crates/cuda/kernels/kv_append.cu", kernel),
        ];
        texts(&check(&tree_of(&files)))
    }

    #[test]
    fn a_kernel_says_what_it_is() {
        assert_eq!(found(HEADER), Vec::<String>::new());
        let sort = HEADER.replace("KvAppend", "Sort");
        assert!(found(&sort)[0].contains("`Sort` is no op"));
        let with = |contract: &str| {
            sort.replace("// Arguments", &format!("// Mathematics: crates/graph/src/op/{contract}.rs. Arguments"))
        };
        assert_eq!(found(&with("rms_norm")), Vec::<String>::new());
        assert!(found(&with("none"))[0].contains("none.rs` no file"));
        assert!(found(&HEADER.replace("Numerics:", ""))[0].contains("lacks `Numerics:`"));
        assert!(found("__global__ void f() {}\n").len() == 2);
    }

    #[test]
    fn every_contract_has_its_oracle() {
        let lone = tree_of(&[("crates/graph/src/op/swiglu.rs", "")]);
        assert!(texts(&check(&lone))[0].contains("has no oracle crates/testkit/src/oracle/swiglu.rs"));
    }
}
