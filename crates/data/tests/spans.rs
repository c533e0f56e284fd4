//! What is supervised under templates of different families: thinking, tools, rewritten history, special-token text.

mod common;

use common::{CHATML, MARKED, QWEN3, STRICT, THINK_PROMPT, load, load_with, supervised_texts, target_dir};
use drafthorse_data::chat::{Conversation, Record, RoleMap, parse_line};
use drafthorse_data::spans::Drop;
use drafthorse_data::tokenize::{ChatTokenizer, Tokenized};
use serde_json::{Map, Value, json};

fn conversation(value: &Value) -> Conversation {
    match parse_line(value.to_string().as_bytes(), &RoleMap::default()).unwrap() {
        Record::Chat(c) => c,
        Record::Tokens { .. } => panic!("not a chat"),
    }
}

fn tokenize(tokenizer: &ChatTokenizer, value: &Value) -> Result<Tokenized, Drop> {
    tokenizer.tokenize(&conversation(value)).unwrap()
}

/// Supervised texts; the whole row must decode to the rendered conversation.
fn supervised(template: &str, value: &Value) -> Vec<String> {
    let dir = target_dir(template);
    let tokenizer = load(dir.path());
    let tokens = tokenize(&tokenizer, value).unwrap();
    assert_eq!(tokenizer.decode(&tokens.input_ids).unwrap(), tokenizer.render_conversation(&conversation(value)).unwrap());
    supervised_texts(&tokenizer, &tokens.input_ids, &tokens.loss_mask)
}

fn chat(turns: &[(&str, &str)]) -> Value {
    json!({"messages": turns.iter().map(|(r, c)| json!({"role": r, "content": c})).collect::<Vec<_>>()})
}

#[test]
fn every_answer_and_its_end_of_turn_are_supervised() {
    let value = chat(&[("system", "s"), ("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")]);
    for template in [CHATML, MARKED] {
        assert_eq!(supervised(template, &value), ["one<|im_end|>", "two<|im_end|>"]);
    }
    // An answer that repeats the question and the header's words is found by structure, not by its text.
    let value =
        chat(&[("user", "assistant"), ("assistant", "assistant\nassistant"), ("user", "assistant"), ("assistant", "assistant")]);
    assert_eq!(supervised(CHATML, &value), ["assistant\nassistant<|im_end|>", "assistant<|im_end|>"]);
}

#[test]
fn thinking_that_the_model_generates_is_supervised_and_what_the_template_supplies_is_not() {
    let thinking = "<think>\ntwo plus three\n</think>\n\nFive.";
    let value = chat(&[("user", "2+3?"), ("assistant", thinking)]);
    assert_eq!(supervised(QWEN3, &value), ["<think>\ntwo plus three\n</think>\n\nFive.<|im_end|>"]);
    assert_eq!(supervised(THINK_PROMPT, &value), ["two plus three\n</think>\n\nFive.<|im_end|>"]);
    let as_field = json!({"messages": [{"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "Five.", "reasoning_content": "two plus three"}]});
    assert_eq!(supervised(QWEN3, &as_field), ["<think>\ntwo plus three\n</think>\n\nFive.<|im_end|>"]);
    // The last turn without thinking gets an empty block from the template: supplied, so masked.
    assert_eq!(supervised(QWEN3, &chat(&[("user", "2+3?"), ("assistant", "Five.")])), ["Five.<|im_end|>"]);
}

#[test]
fn rewritten_history_is_followed() {
    let value = chat(&[
        ("user", "2+3?"),
        ("assistant", "<think>\nolder thoughts\n</think>\n\nFive."),
        ("user", "3+3?"),
        ("assistant", "<think>\nnewer\n</think>\n\nSix."),
    ]);
    assert_eq!(supervised(QWEN3, &value), ["Five.<|im_end|>", "<think>\nnewer\n</think>\n\nSix.<|im_end|>"]);
    assert_eq!(supervised(THINK_PROMPT, &value), ["Five.<|im_end|>", "newer\n</think>\n\nSix.<|im_end|>"]);
    // The template trims; what it trimmed away is not looked for.
    let value = chat(&[("user", " q \n"), ("assistant", "\n answer \n"), ("user", "r"), ("assistant", "b")]);
    assert_eq!(supervised(STRICT, &value), [" answer<|im_end|>", " b<|im_end|>"]);
}

#[test]
fn an_opening_assistant_message_is_supervised_only_where_a_prompt_leads_to_it() {
    let value = chat(&[("assistant", "Welcome."), ("user", "q"), ("assistant", "a")]);
    assert_eq!(supervised(CHATML, &value), ["Welcome.<|im_end|>", "a<|im_end|>"]);
    // A default system message is a preamble that an empty conversation does not get.
    let preamble = "{% if messages and messages[0].role != 'system' %}{{ '<|im_start|>system\\nS<|im_end|>\\n' }}{% endif %}";
    assert_eq!(supervised(&format!("{preamble}{CHATML}"), &value), ["Welcome.<|im_end|>", "a<|im_end|>"]);
    // This one cannot render an empty conversation: the opening is context, the answer is supervised.
    let dir = target_dir(QWEN3);
    let tokenizer = load(dir.path());
    let tokens = tokenize(&tokenizer, &value).unwrap();
    assert!(tokens.opening_masked);
    assert_eq!(supervised_texts(&tokenizer, &tokens.input_ids, &tokens.loss_mask), ["a<|im_end|>"]);
}

#[test]
fn a_thinking_switch_moves_the_border_into_the_prompt() {
    let dir = target_dir(QWEN3);
    let off: Map<String, Value> = [("enable_thinking".to_owned(), json!(false))].into_iter().collect();
    let tokenizer = load_with(dir.path(), off);
    let plain = tokenize(&tokenizer, &chat(&[("user", "q"), ("assistant", "Five.")])).unwrap();
    assert_eq!(supervised_texts(&tokenizer, &plain.input_ids, &plain.loss_mask), ["Five.<|im_end|>"]);
    let prompt = tokenizer.render_prompt(&Conversation::from_pairs(&[("user", "q")])).unwrap();
    assert!(prompt.ends_with("assistant\n<think>\n\n</think>\n\n"), "{prompt}");
    // Thinking in the data wins over the switch: it was generated.
    let thought = tokenize(&tokenizer, &chat(&[("user", "q"), ("assistant", "<think>\nx\n</think>\n\nFive.")])).unwrap();
    let texts = supervised_texts(&tokenizer, &thought.input_ids, &thought.loss_mask);
    assert_eq!(texts, ["<think>\nx\n</think>\n\nFive.<|im_end|>"]);
}

#[test]
fn tool_calls_are_generated_and_tool_results_are_not() {
    let call = |arguments: Value| {
        json!({"tools": "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]", "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
            {"role": "tool", "content": "41"},
            {"role": "assistant", "content": "done"}]})
    };
    let expected = ["<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"y\"}}\n</tool_call><|im_end|>", "done<|im_end|>"];
    assert_eq!(supervised(QWEN3, &call(json!({"x": "y"}))), expected);
    assert_eq!(supervised(QWEN3, &call(json!("{\"x\": \"y\"}"))), expected);
}

#[test]
fn special_token_text_in_a_message_is_ordinary_text() {
    let dir = target_dir(CHATML);
    let tokenizer = load(dir.path());
    let answer = "Here: <|im_end|> <|im_start|>user fake turn";
    let tokens = tokenize(&tokenizer, &chat(&[("user", "print <|im_end|> and <|endoftext|>"), ("assistant", answer)])).unwrap();
    assert!(tokens.special_text);
    let texts = supervised_texts(&tokenizer, &tokens.input_ids, &tokens.loss_mask);
    assert_eq!(texts, [format!("{answer}<|im_end|>")]);
    // Two turns: two starts and two ends, and no other special token.
    let count = |id| tokens.input_ids.iter().filter(|&&t| t == id).count();
    assert_eq!([count(0), count(1), count(2)], [0, 2, 2]);
    // Where the template's own text cannot be told from it, the row is dropped.
    let tools = json!({"tools": [{"name": "<|im_end|>"}], "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]});
    assert!(matches!(tokenize(&tokenizer, &tools), Err(Drop::SpecialTokenText(_))));
}

#[test]
fn encoding_between_special_tokens_equals_encoding_at_once() {
    // One conversation whose text has no special tokens, encoded both ways: the second is forced by a later message.
    let dir = target_dir(CHATML);
    let tokenizer = load(dir.path());
    let clean = tokenize(&tokenizer, &chat(&[("user", "héllo\n\nworld"), ("assistant", "an öther\n\n\none")])).unwrap();
    let forced = tokenize(
        &tokenizer,
        &chat(&[("user", "héllo\n\nworld"), ("assistant", "an öther\n\n\none"), ("user", "<|im_end|>"), ("assistant", "x")]),
    )
    .unwrap();
    assert!(!clean.special_text && forced.special_text);
    assert_eq!(clean.input_ids, forced.input_ids[..clean.input_ids.len()]);
    assert_eq!(clean.loss_mask, forced.loss_mask[..clean.loss_mask.len()]);
}

#[test]
fn a_token_across_the_border_is_masked_and_counted() {
    let dir = target_dir(CHATML);
    let tokenizer = load(dir.path());
    // The header ends with a newline; with the answer's own it becomes one token.
    let tokens = tokenize(&tokenizer, &chat(&[("user", "q"), ("assistant", "\n\nanswer")])).unwrap();
    assert_eq!(tokens.straddling, 1);
    assert_eq!(supervised_texts(&tokenizer, &tokens.input_ids, &tokens.loss_mask), ["\nanswer<|im_end|>"]);
}

#[test]
fn an_answer_cut_by_a_length_limit_keeps_no_end_of_turn() {
    let mut value = chat(&[("user", "q"), ("assistant", "cut sho")]);
    value["finish_reason"] = json!("length");
    assert_eq!(supervised(CHATML, &value), ["cut sho"]);
}

#[test]
fn rows_that_cannot_be_used_say_why() {
    let reason = |template: &str, value: &Value| {
        let dir = target_dir(template);
        tokenize(&load(dir.path()), value).unwrap_err().reason()
    };
    assert_eq!(reason(CHATML, &chat(&[("user", "q"), ("assistant", " \n")])), "empty assistant message");
    assert_eq!(reason(CHATML, &chat(&[("user", "q")])), "no assistant message");
    assert_eq!(reason(CHATML, &chat(&[("assistant", "a")])), "no user message");
    assert_eq!(reason(STRICT, &chat(&[("assistant", "a"), ("user", "q")])), "refused by the chat template");
    assert_eq!(
        reason(QWEN3, &chat(&[("assistant", "a"), ("user", "q")])),
        "assistant first, which the chat template cannot prompt"
    );
    // A template that prints an answer twice leaves open which of the two was generated.
    let twice = CHATML.replace("+ message['content'] +", "+ message['content'] + message['content'] +");
    assert_eq!(reason(&twice, &chat(&[("user", "q"), ("assistant", "a")])), "assistant turn not located exactly");
    // A template that looks at a text's length is disturbed by probes, which is noticed.
    let counts = format!("{CHATML}{{{{ messages[1].content | length }}}}");
    assert_eq!(reason(&counts, &chat(&[("user", "q"), ("assistant", "a")])), "assistant turn not located exactly");
}
