//! The words of `--help` and of the exit-code table are files: a change is seen in review.

mod common;

use common::{run, shown};
use std::path::Path;

/// Compares `text` with a file of tests/expected; with DRAFTHORSE_EXPECT=write it writes the file instead.
fn expect(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/expected").join(name);
    if std::env::var("DRAFTHORSE_EXPECT").is_ok_and(|v| v == "write") {
        std::fs::write(&path, text).unwrap();
        return;
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(wanted == text, "{} differs; DRAFTHORSE_EXPECT=write cargo test writes it anew\n--- now ---\n{text}", path.display());
}

#[test]
fn help_of_every_command() {
    let commands = [
        "demo", "prepare", "inspect", "init", "plan", "train", "eval", "generate", "overfit", "export", "bench", "doctor",
        "deploy", "launch", "ps", "watch", "stop", "restart", "rollback", "report", "runs", "version",
    ];
    let (code, top, err) = run(&["--help"]);
    assert_eq!((code, err.as_str()), (0, ""));
    for command in commands {
        assert!(top.contains(&format!("\n  {command} ")), "{command} is not listed:\n{top}");
        let (code, text, _) = run(&[command, "--help"]);
        assert_eq!(code, 0);
        assert!(text.contains("Examples:\n  drafthorse"), "{command} has no example");
        expect(&format!("help-{command}.txt"), &text);
    }
    let listed = top
        .lines()
        .skip_while(|l| *l != "Commands:")
        .skip(1)
        .take_while(|l| !l.is_empty())
        .filter(|l| !l.starts_with("   "))
        .count();
    assert_eq!(listed, commands.len() + 1, "a command has no help text here (one more is `help`):\n{top}");
    expect("help.txt", &top);
}

#[test]
fn a_wrong_command_line_is_usage() {
    for args in [
        &["trian"][..],
        &["train"],
        &["prepare", "x.jsonl"],
        &["plan", "x.toml", "--memory", "24 gigs"],
        &["--color", "blue", "version"],
    ] {
        let (code, out, err) = run(args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}");
        assert!(err.contains("error:"), "{err}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    use std::process::{Command, Stdio};
    let mut child = common::drafthorse().arg("--help").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let (code, _, err) = shown(child.wait_with_output().unwrap());
    assert_eq!((code, err.as_str()), (0, ""));
    let mut head = Command::new("sh");
    head.arg("-c").arg(format!("{} version | true", env!("CARGO_BIN_EXE_drafthorse")));
    let (_, _, err) = shown(head.output().unwrap());
    assert_eq!(err, "");
}
