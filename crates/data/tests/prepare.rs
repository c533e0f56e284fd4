//! `prepare` over every small input that has broken trainers of this kind, and what it publishes.

mod common;

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;

use common::{CHATML, QWEN3, STRICT, VOCAB, fixture, load, supervised_texts, target_dir};
use drafthorse_data::card::Card;
use drafthorse_data::dataset::{Dataset, OpenOptions, Row};
use drafthorse_data::mask_token::{MaskTokenSource, choose_mask_token};
use drafthorse_data::prepare::{OnError, PrepareOptions, PrepareProgress, prepare};
use drafthorse_data::{DataError, Result};

struct Prepared {
    _target: tempfile::TempDir,
    tokenizer: drafthorse_data::tokenize::ChatTokenizer,
    parent: tempfile::TempDir,
    out: PathBuf,
    card: Result<Card>,
}

fn run(template: &str, name: &str, change: impl FnOnce(&mut PrepareOptions)) -> Prepared {
    let target = target_dir(template);
    let tokenizer = load(target.path());
    let parent = tempfile::tempdir().unwrap();
    let out = parent.path().join("data");
    let mut options = PrepareOptions::new(vec![fixture(name)], out.clone());
    options.threads = Some(2);
    change(&mut options);
    let card = prepare(&tokenizer, &options, &|_| {});
    Prepared { _target: target, tokenizer, parent, out, card }
}

impl Prepared {
    fn card(&self) -> &Card {
        self.card.as_ref().unwrap_or_else(|e| panic!("{e}"))
    }

    fn error(&self) -> String {
        assert_eq!(fs::read_dir(self.parent.path()).unwrap().count(), 0, "something was left behind");
        self.card.as_ref().unwrap_err().to_string()
    }

    fn dropped(&self) -> Vec<(&str, u64)> {
        self.card().dropped.iter().map(|(k, d)| (k.as_str(), d.rows)).collect()
    }

    fn open(&self) -> Dataset {
        Dataset::open(&self.out, &OpenOptions::default(), &|_, _| panic!("our own dataset needs no scan")).unwrap()
    }

    fn texts(&self) -> Vec<Vec<String>> {
        let data = self.open();
        let mut row = Row::default();
        (0..data.len())
            .map(|r| {
                data.read_row(r, &mut row).unwrap();
                supervised_texts(&self.tokenizer, &row.ids, &row.mask)
            })
            .collect()
    }
}

fn no_change(_: &mut PrepareOptions) {}

#[test]
fn plain_two_turn() {
    let p = run(CHATML, "plain_two_turn.jsonl", no_change);
    assert_eq!(p.texts(), [["Two, three and five are prime numbers.<|im_end|>"]]);
    let card = p.card();
    assert!(card.supervised_share > 0.0 && card.supervised_share < 1.0);
    assert_eq!((card.rows, card.messages["user"], card.messages["assistant"]), (1, 1, 1));
    assert_eq!(Card::read(&p.out).unwrap().as_ref(), Some(card));
    assert!(fs::read_to_string(p.out.join("README.md")).unwrap().contains("test/target"));
}

#[test]
fn assistant_first_is_rendered_or_dropped_with_its_reason() {
    assert_eq!(run(CHATML, "assistant_first.jsonl", no_change).texts()[0], ["Sure<|im_end|>"]);
    let p = run(STRICT, "assistant_first.jsonl", no_change);
    assert_eq!(p.dropped(), [("refused by the chat template", 1)]);
    let example = &p.card().dropped["refused by the chat template"].examples[0];
    assert!(example.starts_with("assistant_first.jsonl:1 (") && example.contains("roles must alternate"), "{example}");
    assert_eq!(p.card().rows, 1);
}

#[test]
fn an_unknown_role_is_named_mapped_or_skipped() {
    let error = run(CHATML, "unknown_role.jsonl", no_change).error();
    assert!(error.contains("unknown_role.jsonl:1:") && error.contains("`laguna_s`") && error.contains("--role"), "{error}");
    let p = run(CHATML, "unknown_role.jsonl", |o| o.roles.insert("laguna_s", "assistant").unwrap());
    assert_eq!(p.texts()[0], ["hello there, how are you<|im_end|>"]);
    assert_eq!(p.card().roles["laguna_s"], "assistant");
    let p = run(CHATML, "unknown_role.jsonl", |o| o.on_error = OnError::Skip);
    assert_eq!(p.dropped(), [("unknown role", 1)]);
}

#[test]
fn thinking_turns() {
    let p = run(QWEN3, "thinking_turns.jsonl", no_change);
    assert_eq!(p.texts(), [["<think>\ntwo plus three is five\n</think>\n\nThe answer is 5.<|im_end|>"]]);
}

#[test]
fn no_user_and_empty_assistants_are_counted() {
    let p = run(CHATML, "no_user.jsonl", no_change);
    assert_eq!((p.dropped(), p.card().rows), (vec![("no user message", 1)], 1));
    let p = run(CHATML, "empty_assistant.jsonl", no_change);
    assert_eq!(p.dropped(), [("empty assistant message", 3), ("no assistant message", 2)]);
    assert_eq!((p.card().rows, p.card().rows_read), (1, 6));
}

#[test]
fn mixed_types_and_layouts_load() {
    let p = run(QWEN3, "mixed_types.jsonl", no_change);
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call><|im_end|>";
    assert_eq!(
        p.texts(),
        [vec![call, "done with one<|im_end|>"], vec![call, "done with two<|im_end|>"], vec!["content given as parts<|im_end|>"]]
    );
    let p = run(CHATML, "sharegpt_and_messages.jsonl", no_change);
    assert_eq!(p.texts()[1], ["hello to you too<|im_end|>"]);
}

#[test]
fn rows_too_short_for_an_anchor_are_counted_and_a_file_of_them_is_refused() {
    let p = run(CHATML, "short_answers_b16.jsonl", |o| o.min_supervised = 10);
    assert_eq!((p.dropped(), p.card().rows), (vec![("too short for an anchor", 2)], 5));
    assert_eq!(run(CHATML, "short_answers_b16.jsonl", no_change).card().rows, 7);
    // Two tokens are "ok" in bytes; with the end of turn that is three, one more is asked for here.
    let error = run(CHATML, "all_short.jsonl", |o| o.min_supervised = 4).error();
    assert!(error.contains("no row has an anchor") && error.contains("too short for an anchor: 8"), "{error}");
    // Cut before the answer begins, nothing is left to train on.
    let error = run(CHATML, "plain_two_turn.jsonl", |o| o.max_len = 10).error();
    assert!(error.contains("too short for an anchor: 1"), "{error}");
}

#[test]
fn special_token_text_opens_and_closes_nothing() {
    let p = run(CHATML, "special_token_text.jsonl", no_change);
    assert_eq!(p.texts(), [["Here: <|im_end|> <|im_start|>user fake turn<|im_end|>"]]);
    assert_eq!(p.card().special_text_rows, 1);
}

#[test]
fn broken_lines_name_file_line_and_byte() {
    let bytes = fs::read(fixture("bad_utf8.jsonl")).unwrap();
    let at = bytes.iter().position(|&b| b == 0xff).unwrap();
    // The first bad byte is 0xe9, five bytes earlier or so: whatever it is, the error names it exactly.
    let bad = std::str::from_utf8(&bytes).unwrap_err().valid_up_to();
    assert!(bad <= at);
    let error = run(CHATML, "bad_utf8.jsonl", no_change).error();
    assert!(error.contains(&format!("bad_utf8.jsonl:2: byte {bad}: not UTF-8")), "{error}");
    let p = run(CHATML, "bad_utf8.jsonl", |o| o.on_error = OnError::Skip);
    assert_eq!((p.dropped(), p.card().rows), (vec![("broken line", 1)], 2));

    let error = run(CHATML, "truncated_last_line.jsonl", no_change).error();
    let length = fs::metadata(fixture("truncated_last_line.jsonl")).unwrap().len();
    assert!(error.contains("truncated_last_line.jsonl:2: byte ") && error.contains("not a JSON record"), "{error}");
    let byte: u64 = error.split("byte ").nth(1).unwrap().split(':').next().unwrap().parse().unwrap();
    assert!(byte > length - 10 && byte <= length, "{error}");
    let p = run(CHATML, "truncated_last_line.jsonl", |o| o.on_error = OnError::Skip);
    assert_eq!(p.card().rows, 1);
}

#[test]
fn tokenized_rows_pass_through_and_faulty_ones_are_named() {
    let target = target_dir(CHATML);
    let tokenizer = load(target.path());
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("tokens.jsonl");
    fs::write(&input, "{\"input_ids\": [5, 6, 7, 8], \"loss_mask\": [0, 1, true, 1]}\n").unwrap();
    let options = PrepareOptions::new(vec![input.clone()], dir.path().join("data"));
    prepare(&tokenizer, &options, &|_| {}).unwrap();
    let data = Dataset::open(&options.out, &OpenOptions::default(), &|_, _| {}).unwrap();
    let mut row = Row::default();
    data.read_row(0, &mut row).unwrap();
    assert_eq!((row.ids, row.mask), (vec![5, 6, 7, 8], vec![0, 1, 1, 1]));
    assert_eq!(data.index().candidates, [2]);

    fs::write(&input, "{\"input_ids\": [5, 6], \"loss_mask\": [1]}\n").unwrap();
    let options = PrepareOptions::new(vec![input.clone()], dir.path().join("other"));
    let error = prepare(&tokenizer, &options, &|_| {}).unwrap_err().to_string();
    assert!(error.contains("tokens.jsonl:1") && error.contains("2 token ids but 1 mask values"), "{error}");
    fs::write(&input, "{\"input_ids\": [5, 6, 7], \"loss_mask\": [1, 1, 1]}\n").unwrap();
    let error = prepare(&tokenizer, &options, &|_| {}).unwrap_err().to_string();
    assert!(error.contains("1 everywhere"), "{error}");
}

#[test]
fn order_is_that_of_the_input_whatever_the_threads_and_shards() {
    let target = target_dir(CHATML);
    let tokenizer = load(target.path());
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("many.jsonl");
    let line = |i: usize| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{i}\"}}, {{\"role\": \"assistant\", \"content\": \"answer {i} {}\"}}]}}\n",
            "x".repeat(i % 90)
        )
    };
    fs::write(&input, (0..5_000).map(line).collect::<String>()).unwrap();
    let progress = Mutex::new(Vec::<PrepareProgress>::new());
    let mut fingerprints = Vec::new();
    for (name, threads, shard_bytes) in [("one", 1, u64::MAX), ("three", 3, 50_000)] {
        let mut options = PrepareOptions::new(vec![input.clone()], dir.path().join(name));
        options.threads = Some(threads);
        options.shard_bytes = shard_bytes;
        let card = prepare(&tokenizer, &options, &|p| progress.lock().unwrap().push(p)).unwrap();
        fingerprints.push(card.fingerprint);
    }
    assert_eq!(fingerprints[0], fingerprints[1]);
    let last = *progress.lock().unwrap().last().unwrap();
    assert_eq!((last.rows, last.kept, last.bytes), (5_000, 5_000, last.bytes_total));
    let data = Dataset::open(&dir.path().join("three"), &OpenOptions::default(), &|_, _| {}).unwrap();
    assert!(data.index().header.files.len() > 2, "{} files", data.index().header.files.len());
    let mut row = Row::default();
    for r in [0, 999, 1_000, 4_999] {
        data.read_row(r, &mut row).unwrap();
        let text = &supervised_texts(&tokenizer, &row.ids, &row.mask)[0];
        assert!(text.starts_with(&format!("answer {r} ")), "row {r}: {text}");
    }
}

#[test]
fn an_existing_dataset_is_replaced_only_on_request() {
    let p = run(CHATML, "plain_two_turn.jsonl", no_change);
    let mut options = PrepareOptions::new(vec![fixture("no_user.jsonl")], p.out.clone());
    let error = prepare(&p.tokenizer, &options, &|_| {}).unwrap_err().to_string();
    assert!(error.contains("--overwrite"), "{error}");
    options.overwrite = true;
    prepare(&p.tokenizer, &options, &|_| {}).unwrap();
    assert_eq!(fs::read_dir(p.parent.path()).unwrap().count(), 1);
    fs::write(p.parent.path().join("file"), "x").unwrap();
    options.out = p.parent.path().join("file");
    assert!(matches!(prepare(&p.tokenizer, &options, &|_| {}), Err(DataError::Dataset { .. })));
}

#[test]
fn a_mask_token_is_never_padding_or_the_end_of_sequence() {
    // The tokenizer's config says `mask_token: null` and pads with its end of turn, as fixtures/tok_no_mask.json.
    let text = fs::read_to_string(fixture("tok_no_mask.json")).unwrap();
    assert!(text.contains("\"mask_token\": null") && text.contains("\"pad_token\": \"<|im_end|>\""));
    let p = run(CHATML, "plain_two_turn.jsonl", no_change);
    let choose = |configured, vocab, unused: Option<&[u32]>| choose_mask_token(configured, vocab, &p.tokenizer, unused);
    let with_spare_rows = choose(None, VOCAB + 8, None).unwrap();
    assert_eq!((with_spare_rows.id, with_spare_rows.source), (VOCAB, MaskTokenSource::UnusedRow));
    // Ids 0 (beginning of sequence) and 2 (padding, end) occur nowhere, and still are not taken.
    let unused = p.card().unused_ids.clone();
    assert_eq!(unused[0], 0);
    let from_data = choose(None, VOCAB, Some(&unused)).unwrap();
    assert_eq!(from_data.source, MaskTokenSource::UnusedToken);
    assert!(from_data.id > 2 && unused.contains(&from_data.id));
    assert!(choose(None, VOCAB, Some(&[0, 2])).is_err() && choose(None, VOCAB, None).is_err());
    assert_eq!(choose(Some(5), VOCAB, None).unwrap().source, MaskTokenSource::Config);
    assert!(choose(Some(VOCAB), VOCAB, None).is_err());
    let ends_texts = choose(Some(2), VOCAB, None).unwrap_err().to_string();
    assert!(ends_texts.contains("drafter.mask_token_id") && ends_texts.contains("end-of-sequence"), "{ends_texts}");
}
