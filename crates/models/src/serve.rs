//! The command lines that serve an exported drafter.
//!
//! Job: print what a user can paste. It writes only flags that the servers' own documentation and threads show for DFlash,
//! and no line at all where none is documented (SGLang with a speculators folder). Tuning flags are left to the user.
//! Invariant: paths and names are quoted for a POSIX shell.
//!
//! Sources: vLLM `--speculative-config` with method `dflash` as in the documentation of vLLM and z-lab/dflash; SGLang
//! `docs/advanced_features/speculative_decoding` (sgl-project/sglang pull request 23553: `--speculative-dflash-block-size`
//! is the DFlash alias of `--speculative-num-draft-tokens`).

use serde_json::json;

use crate::draft_config::DraftConfig;
use crate::draft_json::Format;

/// One server's command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeCommand {
    /// `vllm` or `sglang`.
    pub server: &'static str,
    /// One line for a POSIX shell.
    pub command: String,
}

/// Commands that serve `target` (hub name or path) with the drafter in `folder`.
pub fn serve_commands(target: &str, folder: &str, format: Format, config: &DraftConfig) -> Vec<ServeCommand> {
    let speculative = json!({"method": "dflash", "model": folder, "num_speculative_tokens": config.draft_tokens()});
    let vllm = format!("vllm serve {} --speculative-config {}", quoted(target), quoted(&speculative.to_string()));
    let mut commands = vec![ServeCommand { server: "vllm", command: vllm }];
    if format == Format::Plain {
        commands.push(ServeCommand {
            server: "sglang",
            command: format!(
                "python -m sglang.launch_server --model-path {} --speculative-algorithm DFLASH \
                 --speculative-draft-model-path {} --speculative-dflash-block-size {}",
                quoted(target),
                quoted(folder),
                config.block_size
            ),
        });
    }
    commands
}

/// A word for a POSIX shell: as it is if harmless, else in single quotes.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@,".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(quoted("Qwen/Qwen3-8B"), "Qwen/Qwen3-8B");
        assert_eq!(quoted("my run/it's"), r"'my run/it'\''s'");
        assert_eq!(quoted("$(x)"), "'$(x)'");
        assert_eq!(quoted(""), "''");
    }
}
