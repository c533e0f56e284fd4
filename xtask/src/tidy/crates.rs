//! Rules about crates: arrows between them, their dependencies, and the lints they all take.
//!
//! Refuses to keep a list of its own: what is allowed is read from ARCHITECTURE.md, so that page and rule cannot part. Invariant: an
//! arrow that no row allows is a finding, and so is a row that no crate needs.

use super::Finding;
use super::documents::{ARCHITECTURE, section, table, ticked};
use crate::tree::Tree;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// A crate of the workspace and what it uses.
pub struct Member {
    /// Short name: `cli` for the program, otherwise without the common prefix.
    pub name: String,
    /// Package names it uses when it is built.
    pub uses: Vec<String>,
    /// Package names that its tests use.
    pub in_tests: Vec<String>,
}

/// All crates of the workspace.
pub type Members = Vec<Member>;

/// Asks cargo for the workspace's crates.
///
/// # Errors
/// When cargo fails or answers something unexpected.
pub fn metadata(root: &Path) -> Result<Members, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root)
        .output()
        .map_err(|e| format!("cargo metadata: {e}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata: {e}"))?;
    let packages = json["packages"].as_array().ok_or("cargo metadata: no packages")?;
    Ok(packages.iter().map(member).collect())
}

fn member(package: &serde_json::Value) -> Member {
    let text = |v: &serde_json::Value| v.as_str().unwrap_or_default().to_owned();
    let mut member = Member { name: short(&text(&package["name"])), uses: Vec::new(), in_tests: Vec::new() };
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        let list = if dependency["kind"] == "dev" { &mut member.in_tests } else { &mut member.uses };
        list.push(text(&dependency["name"]));
    }
    member
}

const PREFIX: &str = "drafthorse-";

fn short(package: &str) -> String {
    if package == "drafthorse" { "cli".into() } else { package.strip_prefix(PREFIX).unwrap_or(package).to_owned() }
}

/// All rules of this file.
pub fn check(tree: &Tree, members: &Members) -> Vec<Finding> {
    let mut findings = arrows(tree, members);
    findings.extend(dependencies(tree, members));
    for member in members {
        let manifest = manifest_of(&member.name);
        if !tree.text(&manifest).contains("[lints]\nworkspace = true") {
            findings.push(Finding::file(&manifest, "takes the workspace's lints: add `[lints]` with `workspace = true`"));
        }
    }
    findings
}

fn manifest_of(name: &str) -> String {
    match name {
        "xtask" => "xtask/Cargo.toml".into(),
        "seed" => "tests/seed/Cargo.toml".into(),
        _ => format!("crates/{name}/Cargo.toml"),
    }
}

fn arrows(tree: &Tree, members: &Members) -> Vec<Finding> {
    let page = tree.text(ARCHITECTURE);
    let mut allowed: BTreeMap<String, (Vec<String>, Vec<String>)> = BTreeMap::new();
    for row in table(section(page, "Arrows")) {
        let cell = |i: usize| row.get(i).map(|c| ticked(c)).unwrap_or_default();
        if let [name] = &cell(0)[..] {
            allowed.insert(name.clone(), (cell(1), cell(2)));
        }
    }
    let mut findings = Vec::new();
    for member in members {
        let Some((uses, in_tests)) = allowed.remove(&member.name) else {
            findings.push(Finding::file(ARCHITECTURE, format!("`{}` has no row under Arrows", member.name)));
            continue;
        };
        let manifest = manifest_of(&member.name);
        let inner = |list: &[String]| list.iter().filter(|d| d.starts_with("drafthorse")).map(|d| short(d)).collect::<Vec<_>>();
        for used in inner(&member.uses).into_iter().filter(|u| !uses.contains(u)) {
            findings
                .push(Finding::file(&manifest, format!("`{}` must not use `{used}` (Arrows in {ARCHITECTURE})", member.name)));
        }
        for used in inner(&member.in_tests).into_iter().filter(|u| !uses.contains(u) && !in_tests.contains(u)) {
            let what = format!("the tests of `{}` must not use `{used}` (Arrows in {ARCHITECTURE})", member.name);
            findings.push(Finding::file(&manifest, what));
        }
    }
    for name in allowed.keys() {
        findings.push(Finding::file(ARCHITECTURE, format!("`{name}` has a row under Arrows but is no crate: remove it")));
    }
    findings
}

fn dependencies(tree: &Tree, members: &Members) -> Vec<Finding> {
    let manifest = tree.text("Cargo.toml");
    let declared: Vec<String> = manifest
        .lines()
        .skip_while(|l| l.trim() != "[workspace.dependencies]")
        .skip(1)
        .take_while(|l| !l.starts_with('['))
        .filter_map(|l| l.split_once('=').map(|(name, _)| name.trim().to_owned()))
        .filter(|name| !name.is_empty() && !name.starts_with(['#', '"']) && !name.starts_with(PREFIX))
        .collect();
    let listed: Vec<String> = table(section(tree.text(ARCHITECTURE), "Dependencies"))
        .iter()
        .filter(|row| row.get(1).is_some_and(|why| !why.trim().is_empty()))
        .flat_map(|row| ticked(row[0]))
        .collect();
    let mut findings = Vec::new();
    for name in &declared {
        if !listed.contains(name) {
            findings.push(Finding::file(
                ARCHITECTURE,
                format!("`{name}` has no row under Dependencies: say in a line why it is worth having"),
            ));
        }
        if !members.iter().any(|m| m.uses.contains(name) || m.in_tests.contains(name)) {
            findings.push(Finding::file("Cargo.toml", format!("no crate uses `{name}`: remove it")));
        }
    }
    for name in listed.iter().filter(|name| !declared.contains(name)) {
        findings.push(Finding::file(ARCHITECTURE, format!("`{name}` has a row under Dependencies but is none: remove it")));
    }
    for member in members {
        let outer = member.uses.iter().chain(&member.in_tests).filter(|d| !d.starts_with("drafthorse") && !declared.contains(d));
        for name in outer {
            let what = format!("`{name}` is not under [workspace.dependencies]: one version for all crates");
            findings.push(Finding::file(&manifest_of(&member.name), what));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::{texts, tree_of};
    use super::*;

    const PAGE: &str = "# A\n## Arrows\n| crate | may use | in tests |\n|---|---|---|\n| `graph` | nothing | |\n| `cpu` | `graph` | `testkit` |\n\
        ## Dependencies\n| name | why |\n|---|---|\n| `rayon` | threads |\n";
    const MANIFEST: &str =
        "[workspace.dependencies]\ndrafthorse-graph = { path = \"x\" }\nrayon = \"1\"\n[profile.dev]\nopt-level = 1\n";
    const LINTS: &str = "[package]\n[lints]\nworkspace = true\n";

    fn member(name: &str, uses: &[&str], in_tests: &[&str]) -> Member {
        let own = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
        Member { name: name.into(), uses: own(uses), in_tests: own(in_tests) }
    }

    fn found(page: &str, manifest: &str, members: Members) -> Vec<String> {
        let tree = tree_of(&[
            (ARCHITECTURE, page),
            ("Cargo.toml", manifest),
            ("crates/graph/Cargo.toml", LINTS),
            ("crates/cpu/Cargo.toml", LINTS),
        ]);
        texts(&check(&tree, &members))
    }

    fn both(cpu: &[&str], in_tests: &[&str]) -> Members {
        vec![member("graph", &[], &[]), member("cpu", cpu, in_tests)]
    }

    #[test]
    fn what_the_page_allows_is_no_finding() {
        assert_eq!(found(PAGE, MANIFEST, both(&["drafthorse-graph", "rayon"], &["drafthorse-testkit"])), Vec::<String>::new());
    }

    #[test]
    fn arrows_up_and_stale_rows_are_found() {
        let members = vec![member("graph", &["drafthorse-cpu"], &[]), member("cpu", &["rayon"], &[])];
        assert!(found(PAGE, MANIFEST, members)[0].contains("`graph` must not use `cpu`"));
        assert!(found(PAGE, MANIFEST, both(&["rayon", "drafthorse-testkit"], &[]))[0].contains("must not use `testkit`"));
        assert!(found(PAGE, MANIFEST, both(&["rayon"], &["drafthorse"]))[0].contains("tests of `cpu` must not use `cli`"));
        assert!(
            found(PAGE, MANIFEST, vec![member("cpu", &["rayon"], &[])])[0]
                .contains("`graph` has a row under Arrows but is no crate")
        );
        let mut three = both(&["rayon"], &[]);
        three.push(member("new", &[], &[]));
        let texts = found(PAGE, MANIFEST, three);
        assert!(texts[0].contains("`new` has no row") && texts[1].contains("lints"), "{texts:?}");
    }

    #[test]
    fn dependencies_without_a_reason_a_user_or_a_place_are_found() {
        let used = || both(&["rayon"], &[]);
        assert!(found(&PAGE.replace("| threads", "| "), MANIFEST, used())[0].contains("`rayon` has no row under Dependencies"));
        assert!(found(PAGE, MANIFEST, both(&[], &[]))[0].contains("no crate uses `rayon`"));
        assert!(found(&format!("{PAGE}| `serde` | x |\n"), MANIFEST, used())[0].contains("`serde` has a row"));
        assert!(found(PAGE, MANIFEST, both(&["rayon", "libc"], &[]))[0].contains("`libc` is not under"));
    }
}
