//! A tiny target with random weights, and the real binary run on it.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Rows of the embedding table; ids from 259 on have no token.
pub const VOCAB: usize = 272;
/// Width.
pub const HIDDEN: usize = 16;
/// Layers.
pub const LAYERS: usize = 5;

/// The binary under test, with nothing of the caller's environment that changes its output.
pub fn drafthorse() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drafthorse"));
    for name in ["COLUMNS", "NO_COLOR", "CLICOLOR_FORCE", "RUST_BACKTRACE", "HF_HOME", "HF_HUB_CACHE"] {
        command.env_remove(name);
    }
    command
}

/// Runs it and returns (code, standard output, standard error).
pub fn run(args: &[&str]) -> (i32, String, String) {
    shown(drafthorse().args(args).output().unwrap())
}

/// Code and streams of a finished process.
pub fn shown(output: Output) -> (i32, String, String) {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

/// Runs it, expects success, and returns standard output.
pub fn ok(args: &[&str]) -> String {
    let (code, out, err) = run(args);
    assert_eq!(code, 0, "{args:?}\n{out}\n{err}");
    out
}

/// Runs it under `--json`, expects success, and returns what it printed.
pub fn ok_json(args: &[&str]) -> Value {
    let mut all = vec!["--json", "--quiet"];
    all.extend(args);
    serde_json::from_str(&ok(&all)).unwrap()
}

/// A file of tests/fixtures of the data crate.
pub fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures").join(name).display().to_string()
}

/// A folder with a target in `target/`, chats in `chats.jsonl` and a dataset in `data/`.
pub struct Place(pub tempfile::TempDir);

impl Place {
    /// The target only.
    pub fn with_target() -> Place {
        let dir = tempfile::tempdir().unwrap();
        write_target(&dir.path().join("target"));
        Place(dir)
    }

    /// The target, and 48 chats prepared for it.
    pub fn with_data() -> Place {
        let place = Place::with_target();
        let line = |i: usize| {
            let answer = format!("one {i} two {} three {}", i * 7 % 10, i * 3 % 10);
            json!({"messages": [{"role": "user", "content": format!("count {i}")}, {"role": "assistant", "content": answer}]})
                .to_string()
        };
        let text: Vec<String> = (0..48).map(line).collect();
        std::fs::write(place.path("chats.jsonl"), text.join("\n")).unwrap();
        ok(&["prepare", &place.at("chats.jsonl"), "--target", &place.at("target"), "-o", &place.at("data")]);
        place
    }

    /// A path inside.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A path inside, as an argument.
    pub fn at(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// A small config that trains in a second.
    pub fn config(&self) -> String {
        let text = format!(
            "target = {:?}\ndata = {:?}\nout = {:?}\nname = \"run\"\n[drafter]\nlayers = 1\nblock_size = 8\n[batch]\ntoken_budget = 256\n\
             micro_blocks = 16\n[optimizer]\nsteps = 6\n[eval]\nevery = 3\nheld_out = {{ rows = 4 }}\n[checkpoint]\nevery = 2\n",
            self.at("target"),
            self.at("data"),
            self.at("runs")
        );
        std::fs::write(self.path("run.toml"), text).unwrap();
        self.at("run.toml")
    }
}

/// The characters that byte-level BPE writes for the 256 bytes (GPT-2's table).
fn byte_characters() -> Vec<String> {
    let printable = |b: u32| (0x21..=0x7e).contains(&b) || (0xa1..=0xac).contains(&b) || (0xae..=0xff).contains(&b);
    let mut next = 255;
    let character = |b: u32| {
        let c = if printable(b) {
            b
        } else {
            next += 1;
            next
        };
        char::from_u32(c).unwrap().to_string()
    };
    (0..256u32).map(character).collect()
}

/// A Qwen3 of five layers with a byte-level tokenizer and ChatML.
pub fn write_target(dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    let write = |name: &str, text: String| std::fs::write(dir.join(name), text).unwrap();
    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    let mut vocab = Map::new();
    for (id, text) in specials.iter().map(|s| s.to_string()).chain(byte_characters()).enumerate() {
        vocab.insert(text, json!(id));
    }
    let added: Vec<Value> = specials
        .iter()
        .enumerate()
        .map(|(id, s)| json!({"id": id, "content": s, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}))
        .collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null, "pre_tokenizer": bytes,
        "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    write("tokenizer.json", tokenizer.to_string());
    write(
        "chat_template.jinja",
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}".into(),
    );
    write(
        "tokenizer_config.json",
        json!({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}).to_string(),
    );
    let (heads, kv_heads, head_dim, wide) = (2, 1, 8, 24);
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": wide,
        "num_hidden_layers": LAYERS, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": VOCAB,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true, "attention_bias": false,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "float32",
    });
    write("config.json", config.to_string());
    let mut shapes: Vec<(String, Vec<usize>)> =
        vec![("model.embed_tokens.weight".into(), vec![VOCAB, HIDDEN]), ("model.norm.weight".into(), vec![HIDDEN])];
    for l in 0..LAYERS {
        let mut add = |name: &str, shape: &[usize]| shapes.push((format!("model.layers.{l}.{name}.weight"), shape.to_vec()));
        add("input_layernorm", &[HIDDEN]);
        add("post_attention_layernorm", &[HIDDEN]);
        add("self_attn.q_proj", &[heads * head_dim, HIDDEN]);
        add("self_attn.k_proj", &[kv_heads * head_dim, HIDDEN]);
        add("self_attn.v_proj", &[kv_heads * head_dim, HIDDEN]);
        add("self_attn.o_proj", &[HIDDEN, heads * head_dim]);
        add("self_attn.q_norm", &[head_dim]);
        add("self_attn.k_norm", &[head_dim]);
        add("mlp.gate_proj", &[wide, HIDDEN]);
        add("mlp.up_proj", &[wide, HIDDEN]);
        add("mlp.down_proj", &[HIDDEN, wide]);
    }
    // A fixed sequence of numbers in (-0.2, 0.2); norms are 1.
    let mut state = 1u64;
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let values = (0..shape.iter().product::<usize>()).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                if name.contains("norm") { 1.0 } else { (state >> 40) as f32 / (1u64 << 24) as f32 * 0.4 - 0.2 }
            });
            let bytes = values.flat_map(f32::to_le_bytes).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(n, s, b)| (n.clone(), TensorView::new(Dtype::F32, s.clone(), b).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}
