//! A byte-level tokenizer and a few chat templates, so that tests need no downloaded model.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use std::path::{Path, PathBuf};

use drafthorse_data::tokenize::ChatTokenizer;
use serde_json::{Map, Value, json};

/// ChatML as many instruct models write it.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// The shape of Qwen3's template: thinking of earlier turns is stripped, the last turn always gets a thinking block, tool
/// calls and results are rendered, and `enable_thinking=false` makes the prompt supply an empty block.
pub const QWEN3: &str = r##"
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"##;

/// Strict alternation, trimmed text, no generation prompt, end-of-sequence after answers (the Mistral family's shape).
pub const STRICT: &str = "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}";

/// The prompt opens the thinking block itself, and history loses thinking (the shape of reasoning-only models).
pub const THINK_PROMPT: &str = "{% for m in messages %}{% if m.role == 'assistant' %}{% set c = m.content.split('</think>')[-1].lstrip('\\n') %}{% if loop.last %}{{ '<|im_start|>assistant\\n<think>\\n' + m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') + '\\n</think>\\n\\n' + c + '<|im_end|>\\n' }}{% else %}{{ '<|im_start|>assistant\\n' + c + '<|im_end|>\\n' }}{% endif %}{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}";

/// ChatML with generation blocks.
pub const MARKED: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Special tokens and their ids: 0 `<|endoftext|>`, 1 `<|im_start|>`, 2 `<|im_end|>`.
pub const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Number of tokens of the test tokenizer.
pub const VOCAB: u32 = 264;

/// The characters that byte-level BPE writes for the 256 bytes (GPT-2's table).
fn byte_characters() -> Vec<String> {
    let printable = |b: u32| (0x21..=0x7e).contains(&b) || (0xa1..=0xac).contains(&b) || (0xae..=0xff).contains(&b);
    let mut next = 256;
    (0..256u32)
        .map(|b| {
            let c = if printable(b) {
                b
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(c).unwrap().to_string()
        })
        .collect()
}

/// Writes a target folder with a byte-level tokenizer and `template`.
pub fn target_dir(template: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut vocab = Map::new();
    for (id, text) in SPECIALS.iter().map(|s| s.to_string()).chain(byte_characters()).enumerate() {
        vocab.insert(text, json!(id));
    }
    // Two merged tokens that can lie across a border: two newlines, and a space with an `o`.
    vocab.insert("\u{10a}\u{10a}".into(), json!(259));
    vocab.insert("\u{120}o".into(), json!(260));
    let added = |id: usize, content: &str, special: bool| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special});
    let mut added_tokens: Vec<Value> = SPECIALS.iter().enumerate().map(|(i, s)| added(i, s, true)).collect();
    for (i, s) in ["<think>", "</think>", "<tool_call>"].iter().enumerate() {
        added_tokens.push(added(261 + i, s, false));
    }
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added_tokens, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": [["\u{10a}", "\u{10a}"], ["\u{120}", "o"]]},
    });
    let write = |name: &str, text: String| std::fs::write(dir.path().join(name), text).unwrap();
    write("tokenizer.json", tokenizer.to_string());
    write("chat_template.jinja", template.to_owned());
    write(
        "tokenizer_config.json",
        json!({"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|im_end|>", "mask_token": null})
            .to_string(),
    );
    write("config.json", json!({"vocab_size": VOCAB, "eos_token_id": 2, "pad_token_id": 2}).to_string());
    dir
}

/// The tokenizer of such a folder.
pub fn load(dir: &Path) -> ChatTokenizer {
    load_with(dir, Map::new())
}

/// The same with template variables.
pub fn load_with(dir: &Path, variables: Map<String, Value>) -> ChatTokenizer {
    let now = chrono::DateTime::from_timestamp(1_700_000_000, 0).unwrap().naive_utc();
    ChatTokenizer::load(dir, "test/target", &variables, now).unwrap()
}

/// A file of tests/fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The supervised runs of a row, decoded.
pub fn supervised_texts(tokenizer: &ChatTokenizer, ids: &[i32], mask: &[i8]) -> Vec<String> {
    let mut runs: Vec<Vec<i32>> = Vec::new();
    let mut before = 0;
    for (&id, &m) in ids.iter().zip(mask) {
        if m == 1 {
            if before == 0 {
                runs.push(Vec::new());
            }
            runs.last_mut().unwrap().push(id);
        }
        before = m;
    }
    runs.iter().map(|r| tokenizer.decode(r).unwrap()).collect()
}
