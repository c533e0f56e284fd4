//! Arguments survive every shell of a chain: real shells, nested, with whatever can be in an argument.

use drafthorse_remote::chain::{Chain, Hop};
use drafthorse_remote::quote::{join, quote};
use proptest::prelude::*;
use std::process::Command;

/// Shells that are on this machine; `sh` always is.
fn shells() -> Vec<&'static str> {
    ["sh", "bash", "dash", "zsh", "busybox", "fish"]
        .into_iter()
        .filter(|s| Command::new(s).arg("-c").arg(":").output().is_ok())
        .collect()
}

/// Any text without NUL, with the characters that shells care for made frequent.
fn argument() -> impl Strategy<Value = String> {
    let special = prop::sample::select(vec![
        "'", "\"", "\\", "$", "`", "!", "*", "?", "~", " ", "\t", "\n", "\r", "(", ")", "{", "}", "[", "]", "<", ">", "|", "&",
        ";", "#", "=", "%", "^", "-", "--", "$(id)", "${HOME}", "\\'", "ü", "😀", "\u{1}", "\u{7f}", "a", "b c",
    ])
    .prop_map(str::to_owned);
    let any = any::<String>().prop_map(|s| s.replace('\0', ""));
    prop::collection::vec(prop_oneof![4 => special, 1 => any], 0..8).prop_map(|parts| parts.concat())
}

/// What the end of the chain gets, asked of the end itself.
fn arrives(chain: &Chain, args: &[String]) -> Vec<String> {
    let script = r#"for a in "$@"; do printf '%s\0' "$a"; done"#;
    let inner = ["sh", "-c", script, "sh"].into_iter().map(str::to_owned).chain(args.iter().cloned()).collect();
    let output = chain.command(inner).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_terminator('\0').map(str::to_owned).collect()
}

/// A hop that does with its arguments what ssh does: joins them with spaces and gives them to a shell.
fn like_ssh(dir: &std::path::Path) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join("ssh");
    std::fs::write(&path, "#!/bin/sh\nshift\nexec sh -c \"$*\"\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_chain_of_shells_changes_nothing(args in prop::collection::vec(argument(), 0..4), depth in 0usize..4, seed in 0usize..64) {
        let dir = tempfile::tempdir().unwrap();
        let (ssh, shells) = (like_ssh(dir.path()), shells());
        let hops = (0..depth).map(|i| {
            let line = match (seed + i) % 4 {
                0 => format!("{} host", quote(&ssh)),
                1 => "env".to_owned(),
                2 => "env 'A B=c d'".to_owned(),
                _ => match shells[(seed / 4 + i) % shells.len()] {
                    "busybox" => "busybox sh -c".to_owned(),
                    shell => format!("{shell} -c"),
                },
            };
            Hop::parse(&line).unwrap()
        });
        let chain = Chain::new(hops.collect());
        prop_assert_eq!(arrives(&chain, &args), args, "{}", chain);
    }

    #[test]
    fn a_quoted_line_splits_into_its_words(words in prop::collection::vec(argument(), 1..5)) {
        let line = join(words.iter().map(String::as_str));
        for shell in shells().into_iter().filter(|s| *s != "busybox") {
            let script = format!("for a in {line}; do printf '%s\\0' \"$a\"; done");
            let script = if shell == "fish" { format!("for a in {line}; printf '%s\\0' \"$a\"; end") } else { script };
            let output = Command::new(shell).arg("-c").arg(&script).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let got: Vec<String> = text.split_terminator('\0').map(str::to_owned).collect();
            prop_assert_eq!(&got, &words, "{}", shell);
        }
    }
}
