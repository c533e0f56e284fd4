//! Rules about documents: links resolve, the map names the rooms there are, the changelog is open, the seed list is whole.
//!
//! Refuses to judge prose. Invariant: what a rule reads out of Markdown is a heading, a table row or a word in back ticks, nothing subtler.

use super::Finding;
use crate::tree::Tree;

/// The map.
pub const ARCHITECTURE: &str = "ARCHITECTURE.md";
const SEED: &str = "tests/seed/README.md";
/// The failures that this project exists to end; each has a row in the seed list.
const FAILURES: [&str; 11] = [
    "wrong_filesystem",
    "stale_entry",
    "same_log_twice",
    "warmup_hang",
    "cross_thread_replay",
    "concurrent_capture",
    "missing_kernel",
    "shape_churn",
    "metric_batch_capture",
    "epoch_tail",
    "memory_volatile",
];

/// All rules of this file.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = rooms(tree);
    findings.extend(changelog(tree));
    findings.extend(seeds(tree));
    findings.extend(readme(tree));
    for (path, text) in tree.with_ext("md") {
        findings.extend(links(tree, path, text));
        if !text.starts_with("# ") {
            findings.push(Finding::at(path, 0, "a page begins with its title"));
        }
    }
    findings
}

/// The lines under `## {title}`, up to the next heading of that level; empty if there is none.
pub fn section<'a>(page: &'a str, title: &str) -> &'a str {
    let heading = format!("## {title}\n");
    let start = match page.find(&format!("\n{heading}")) {
        Some(at) => at + 1 + heading.len(),
        None if page.starts_with(&heading) => heading.len(),
        None => return "",
    };
    // From the line break before, so that a section without a line ends at once.
    let rest = &page[start - 1..];
    rest.find("\n## ").map_or(rest, |end| &rest[..end])
}

/// Cells of every table row of a text, headings and rules left out.
pub fn table(text: &str) -> Vec<Vec<&str>> {
    let rows: Vec<&str> = text.lines().map(str::trim).filter(|l| l.starts_with('|') && l.ends_with('|') && l.len() > 1).collect();
    let is_rule = |row: &str| row.chars().all(|c| matches!(c, '|' | '-' | ':' | ' '));
    let is_heading = |i: usize| rows.get(i + 1).is_some_and(|next| is_rule(next));
    let body = rows.iter().enumerate().filter(|(i, row)| !is_rule(row) && !is_heading(*i));
    body.map(|(_, row)| row[1..row.len() - 1].split('|').map(str::trim).collect()).collect()
}

/// The words of a text that stand in back ticks.
pub fn ticked(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn rooms(tree: &Tree) -> Vec<Finding> {
    let map = section(tree.text(ARCHITECTURE), "Code map");
    let named: Vec<String> = map.lines().filter(|l| l.starts_with("### ")).flat_map(ticked).collect();
    let mut there: Vec<String> = tree.folders("crates").into_iter().map(|name| format!("crates/{name}")).collect();
    there.extend(tree.folders("").into_iter().filter(|name| name != "crates" && !name.starts_with('.')));
    let mut findings = Vec::new();
    for room in there.iter().filter(|room| !named.contains(room)) {
        findings.push(Finding::file(ARCHITECTURE, format!("`{room}` has no paragraph in the code map")));
    }
    for room in named.iter().filter(|room| !there.contains(room)) {
        findings.push(Finding::file(ARCHITECTURE, format!("the code map speaks of `{room}`, which is no folder")));
    }
    findings
}

fn changelog(tree: &Tree) -> Option<Finding> {
    let open = section(tree.text("CHANGELOG.md"), "Unreleased");
    (!open.lines().any(|l| l.starts_with("- ")))
        .then(|| Finding::file("CHANGELOG.md", "has `## Unreleased` with what has changed"))
}

/// The README speaks of commands that there are, and of exit codes as the program does.
fn readme(tree: &Tree) -> Vec<Finding> {
    const README: &str = "README.md";
    let page = tree.text(README);
    let mut findings = Vec::new();
    for (i, line) in page.lines().enumerate() {
        let command = line.strip_prefix("drafthorse ").and_then(|rest| rest.split_whitespace().next());
        if let Some(command) = command.filter(|c| !tree.has(&format!("crates/cli/src/commands/{c}.rs"))) {
            findings.push(Finding::at(README, i, format!("there is no command `{command}`")));
        }
    }
    let plain = page.replace('`', "");
    let meanings =
        tree.text("crates/cli/src/exit.rs").split("pub fn meaning").nth(1).and_then(|rest| rest.split("\n    }").next());
    let arms = meanings.unwrap_or_default().lines().filter_map(|l| l.trim().strip_prefix("Exit::")?.split('"').nth(1));
    for meaning in arms.filter(|meaning| !plain.contains(&format!("| {meaning} |"))) {
        findings.push(Finding::file(
            README,
            format!("its table of exit codes has no row `{meaning}`, as crates/cli/src/exit.rs says it"),
        ));
    }
    findings
}

fn seeds(tree: &Tree) -> Vec<Finding> {
    let rows = table(tree.text(SEED));
    let mut findings = Vec::new();
    let mut listed = Vec::new();
    for failure in FAILURES {
        match rows.iter().find(|row| ticked(row[0]) == [failure]) {
            None => findings.push(Finding::file(SEED, format!("`{failure}` has no row"))),
            Some(row) => {
                let state = row.get(1).copied().unwrap_or_default();
                let test = format!("tests/seed/tests/{failure}.rs");
                if state == "shown" && !tree.has(&test) {
                    findings.push(Finding::file(SEED, format!("`{failure}` is said to be shown, but {test} is not there")));
                } else if state != "shown" && !state.starts_with("waits for ") {
                    findings.push(Finding::file(SEED, format!("`{failure}` is either `shown` or `waits for …`, not `{state}`")));
                } else if state == "shown" {
                    listed.push(failure.to_owned());
                }
            }
        }
    }
    for stem in tree.stems("tests/seed/tests", "rs").into_iter().filter(|stem| !listed.contains(stem)) {
        findings.push(Finding::file(SEED, format!("tests/seed/tests/{stem}.rs has no row that says `shown`")));
    }
    findings
}

fn links(tree: &Tree, path: &str, text: &str) -> Vec<Finding> {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut findings = Vec::new();
    let mut in_code = false;
    for (i, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        for target in line.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target)) {
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") || file.starts_with("mailto:") {
                continue;
            }
            if !tree.has(&resolve(folder, file)) {
                findings.push(Finding::at(path, i, format!("the link to {target} leads nowhere")));
            }
        }
    }
    findings
}

/// `target` as seen from `folder`, from the root.
fn resolve(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|p| !p.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::super::{texts, tree_of};
    use super::*;

    #[test]
    fn the_map_names_the_rooms_there_are() {
        let page = |rooms: &str| format!("# A\n\n## Code map\n{rooms}\n## Next\n### `not/this`\n");
        let found = |rooms: &str| texts(&rooms_of(&page(rooms)));
        fn rooms_of(page: &str) -> Vec<Finding> {
            rooms(&tree_of(&[(ARCHITECTURE, page), ("crates/a/src/lib.rs", ""), ("golden/x.py", ""), (".ci/run", "")]))
        }
        assert_eq!(found("### `crates/a`\ntext\n### `golden`\n"), Vec::<String>::new());
        assert!(found("### `golden`\n")[0].contains("`crates/a` has no paragraph"));
        assert!(found("### `crates/a`\n### `golden`\n### `crates/b`\n")[0].contains("`crates/b`, which is no folder"));
    }

    #[test]
    fn links_that_lead_nowhere_are_found() {
        let tree = tree_of(&[("docs/a.md", ""), ("b.md", ""), ("docs/sub/c.svg", "")]);
        let found = |text: &str| texts(&links(&tree, "docs/a.md", text));
        let good = "[b](../b.md#part) [c](sub/c.svg) [folder](sub/) [top](#x) [web](https://a.b/c)\n```\n[x](none.md)\n```\n";
        assert_eq!(found(good), Vec::<String>::new());
        assert_eq!(found("# A\n[x](none.md)\n"), ["docs/a.md:2: the link to none.md leads nowhere"]);
        assert_eq!(found("[b](b.md)\n").len(), 1, "relative to the page, not to the root");
    }

    #[test]
    fn pages_have_titles_and_the_changelog_is_open() {
        let found = |log: &str| texts(&check(&tree_of(&[("CHANGELOG.md", log)])));
        assert!(found("# Changes\n## Unreleased\n- a\n## 0.1\n").iter().all(|t| !t.starts_with("CHANGELOG")));
        assert!(found("# Changes\n## Unreleased\n## 0.1\n- a\n").iter().any(|t| t.contains("`## Unreleased`")));
        assert!(found("Changes\n").iter().any(|t| t.contains("title")));
    }

    #[test]
    fn the_seed_list_is_whole_and_true() {
        let list = |change: &dyn Fn(&str) -> String| {
            let rows: String = FAILURES.iter().map(|f| change(f)).collect();
            format!("# S\n| failure | state | how |\n|---|---|---|\n{rows}")
        };
        let found = |page: &str, files: &[&str]| {
            let mut all: Vec<(&str, &str)> = files.iter().map(|f| (*f, "")).collect();
            all.push((SEED, page));
            texts(&seeds(&tree_of(&all)))
        };
        let waits = |f: &str| format!("| `{f}` | waits for a GPU | x |\n");
        let tail =
            |state: &'static str| move |f: &str| if f == "epoch_tail" { format!("| `{f}` | {state} | x |\n") } else { waits(f) };
        let file = "tests/seed/tests/epoch_tail.rs";
        assert_eq!(found(&list(&waits), &[]), Vec::<String>::new());
        assert_eq!(found(&list(&tail("shown")), &[file]), Vec::<String>::new());
        assert!(found(&list(&tail("shown")), &[])[0].contains("is not there"));
        assert!(found(&list(&tail("soon")), &[])[0].contains("not `soon`"));
        assert!(found(&list(&waits), &[file])[0].contains("no row that says"));
        let without = |f: &str| if f == "stale_entry" { String::new() } else { waits(f) };
        assert!(found(&list(&without), &[])[0].contains("`stale_entry` has no row"));
    }

    #[test]
    fn the_readme_speaks_of_what_there_is() {
        let exit = "pub fn meaning(self) -> &'static str {\n        match self {\n            Exit::Done => \"done\",\n            Exit::Bug => \"a fault\",\n    }\n";
        let found = |page: &str| {
            texts(&readme(&tree_of(&[
                ("README.md", page),
                ("crates/cli/src/exit.rs", exit),
                ("crates/cli/src/commands/plan.rs", ""),
            ])))
        };
        assert_eq!(found("# R\ndrafthorse plan run.toml\n| 0 | `done` |\n| 70 | a fault |\n"), Vec::<String>::new());
        assert!(found("# R\ndrafthorse watch\n| 0 | done |\n| 70 | a fault |\n")[0].contains("no command `watch`"));
        assert!(found("# R\n| 0 | done |\n")[0].contains("no row `a fault`"));
    }

    #[test]
    fn tables_are_read_without_their_heads() {
        assert_eq!(table("x\n| a | b |\n|---|:-:|\n| `c` | d `e` |\n"), [["`c`", "d `e`"]]);
        assert_eq!(ticked("d `e` f `g`"), ["e", "g"]);
    }
}
