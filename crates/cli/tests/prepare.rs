//! `prepare` and `inspect`, as a user runs them, on inputs that have broken trainers before.

mod common;

use common::{Place, fixture, ok, ok_json, run};

#[test]
fn a_dataset_is_written_and_looked_at() {
    let place = Place::with_target();
    let (target, data) = (place.at("target"), place.at("data"));
    let card = ok_json(&["prepare", &fixture("plain_two_turn.jsonl"), "--target", &target, "-o", &data]);
    let share = card["supervised_share"].as_f64().unwrap();
    assert!(share > 0.0 && share < 1.0, "{card}");
    assert_eq!(ok_json(&["inspect", &data]), card, "inspect shows the card that prepare wrote");
    let text = ok(&["inspect", &data]);
    assert!(text.contains("supervised") && text.contains("fingerprint"), "{text}");

    let row = ok_json(&["inspect", &data, "--row", "0"]);
    let pieces = row["pieces"].as_array().unwrap();
    let marked: String = pieces.iter().filter(|p| p["supervised"] == true).map(|p| p["text"].as_str().unwrap()).collect();
    assert!(marked.ends_with("<|im_end|>") && !marked.contains("<|im_start|>"), "{marked}");
    let shown = ok(&["inspect", &data, "--row", "0"]);
    let all: String = pieces.iter().map(|p| p["text"].as_str().unwrap()).collect();
    assert_eq!(shown.replace(['⟦', '⟧'], ""), all + "\n", "marks are all that is added");
    assert!(shown.contains('⟦') && !shown.contains('\u{1b}'), "{shown}");
    let coloured = ok(&["inspect", &data, "--row", "0", "--color", "always"]);
    assert!(coloured.contains('\u{1b}') && !coloured.contains('⟦'), "{coloured}");
}

#[test]
fn dropped_rows_are_counted_with_reasons() {
    let place = Place::with_target();
    let text = ok(&["prepare", &fixture("empty_assistant.jsonl"), "--target", &place.at("target"), "-o", &place.at("data")]);
    assert!(text.contains("1 of 6 read"), "{text}");
    assert!(text.contains("dropped     3 empty assistant message: empty_assistant.jsonl:1"), "{text}");
    assert!(text.contains("dropped     2 no assistant message: empty_assistant.jsonl:3"), "{text}");
}

#[test]
fn bad_lines_are_named_and_roles_can_be_mapped() {
    let place = Place::with_target();
    let (target, data) = (place.at("target"), place.at("data"));
    for name in ["bad_utf8.jsonl", "truncated_last_line.jsonl", "unknown_role.jsonl"] {
        let (code, _, err) = run(&["prepare", &fixture(name), "--target", &target, "-o", &data]);
        assert_eq!(code, 3, "{err}");
        assert!(err.contains(&format!("{name}:")) && err.contains("byte ") && err.starts_with("error: "), "{err}");
        assert_eq!(err.lines().count(), 2, "{err}");
        assert!(!place.path("data").exists(), "nothing is left after a failure");
    }
    let card = ok_json(&["prepare", &fixture("bad_utf8.jsonl"), "--target", &target, "-o", &data, "--on-error", "skip"]);
    assert!(card["rows"].as_u64().unwrap() > 0 && card["dropped"]["broken line"]["rows"].as_u64().unwrap() > 0, "{card}");
    // What the error says is what works.
    let (_, _, err) = run(&["prepare", &fixture("unknown_role.jsonl"), "--target", &target, "-o", &place.at("mapped")]);
    let advice = err.split("--role ").nth(1).unwrap().split(' ').next().unwrap();
    ok(&["prepare", &fixture("unknown_role.jsonl"), "--target", &target, "-o", &place.at("mapped"), "--role", advice]);
}

#[test]
fn what_cannot_be_prepared_is_bad_input() {
    let place = Place::with_target();
    let (target, data) = (place.at("target"), place.at("data"));
    // One byte and the end of the turn: nothing that an anchor could be followed by.
    let short = place.at("short.jsonl");
    let chat = "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"a\"}]}\n";
    std::fs::write(&short, chat.repeat(3)).unwrap();
    let cases: [(&[&str], i32, &str); 5] = [
        (&["prepare", &short, "--target", &target, "-o", &data], 3, "no row has an anchor"),
        (&["prepare", "absent.jsonl", "--target", &target, "-o", &data], 3, "absent.jsonl"),
        (&["prepare", "absent.jsonl", "--target", "no/such/target", "-o", &data], 3, "no/such/target"),
        (&["prepare", "absent.jsonl", "--target", &target, "-o", &data, "--role", "bot"], 2, "--role"),
        (&["inspect", &target], 3, "state.json"),
    ];
    for (args, code, word) in cases {
        let (got, _, err) = run(args);
        assert_eq!(got, code, "{args:?}: {err}");
        assert!(err.contains(word) && err.lines().count() == 2, "{args:?}: {err}");
    }
}

#[test]
fn an_existing_dataset_is_replaced_only_when_asked() {
    let place = Place::with_data();
    let args = ["prepare", &place.at("chats.jsonl"), "--target", &place.at("target"), "-o", &place.at("data")];
    let (code, _, err) = run(&args);
    assert!(code == 3 && err.contains("--overwrite"), "{err}");
    ok(&[&args[..], &["--overwrite"]].concat());
}
