//! A completion as text in which accepted drafts stand out, coloured by the slot they were drafted in.
//!
//! Refuses to split a character: tokens that only together make text are shown together. Invariant: without colour and marks the text is the decoded
//! completion, to the byte.

use crate::exit::Failure;
use crate::screen::Screen;
use anstyle::{Ansi256Color, Color, Style};
use drafthorse_data::tokenize::ChatTokenizer;
use drafthorse_train::decode::{Completion, Origin};

/// From the first slots to the last: green over blue to magenta.
const RAMP: [u8; 8] = [46, 48, 51, 45, 39, 63, 99, 165];

/// Text pieces with their origin; a piece takes the origin of its last token.
pub fn pieces(
    completion: &Completion,
    decode: impl Fn(&[i32]) -> Result<String, Failure>,
) -> Result<Vec<(String, Origin)>, Failure> {
    let ids: Vec<i32> = completion.emitted.iter().map(|e| e.token as i32).collect();
    let whole = decode(&ids)?;
    let mut pieces = Vec::new();
    let mut shown = 0;
    for (i, emitted) in completion.emitted.iter().enumerate() {
        let text = decode(&ids[..=i])?;
        // Half a character decodes to a replacement mark that the whole text does not have there.
        if text.len() > shown && whole.starts_with(&text) {
            pieces.push((text[shown..].to_owned(), emitted.origin));
            shown = text.len();
        }
    }
    if shown < whole.len() {
        let origin = completion.emitted.last().map_or(Origin::Target, |e| e.origin);
        pieces.push((whole[shown..].to_owned(), origin));
    }
    Ok(pieces)
}

/// The completion, coloured; without colour, runs of accepted drafts stand between ⟦ and ⟧.
///
/// # Errors
/// When the tokenizer fails.
pub fn shown(completion: &Completion, tokenizer: &ChatTokenizer, screen: Screen) -> Result<String, Failure> {
    let pieces = pieces(completion, |ids| Ok(tokenizer.decode(ids)?))?;
    let slots = completion.accepted.len();
    if screen.color {
        return Ok(pieces
            .iter()
            .map(|(text, origin)| match origin {
                Origin::Draft(slot) => screen.paint(style(*slot, slots), text),
                Origin::Prefill | Origin::Target => text.clone(),
            })
            .collect());
    }
    let mut out = String::new();
    for run in pieces.chunk_by(|a, b| matches!(a.1, Origin::Draft(_)) == matches!(b.1, Origin::Draft(_))) {
        let text: String = run.iter().map(|(t, _)| t.as_str()).collect();
        out.push_str(&if matches!(run[0].1, Origin::Draft(_)) { format!("⟦{text}⟧") } else { text });
    }
    Ok(out)
}

/// The colours of the slots, for a line below the text; `None` without colour.
pub fn legend(slots: usize, screen: Screen) -> Option<String> {
    screen.color.then(|| {
        let list: Vec<String> = (1..=slots).map(|k| screen.paint(style(k, slots), &k.to_string())).collect();
        format!("accepted drafts by slot: {}", list.join(" "))
    })
}

fn style(slot: usize, slots: usize) -> Style {
    let at = (slot - 1) * RAMP.len() / slots.max(1);
    Style::new().fg_color(Some(Color::Ansi256(Ansi256Color(RAMP[at.min(RAMP.len() - 1)]))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use drafthorse_train::decode::Emitted;

    fn completion(origins: &[(u32, Origin)]) -> Completion {
        let emitted = origins.iter().map(|&(token, origin)| Emitted { token, origin, top2: [1.0, 0.0] }).collect();
        Completion { emitted, per_pass: vec![], accepted: vec![0; 3], stopped: false }
    }

    /// Tokens are bytes.
    fn bytes(ids: &[i32]) -> Result<String, Failure> {
        let bytes: Vec<u8> = ids.iter().map(|&i| i as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    #[test]
    fn a_character_of_two_tokens_stays_whole() {
        let [a, b] = *"é".as_bytes() else { panic!("two bytes") };
        let c = completion(&[
            (b'x'.into(), Origin::Prefill),
            (a.into(), Origin::Draft(1)),
            (b.into(), Origin::Draft(2)),
            (b'y'.into(), Origin::Target),
        ]);
        let pieces = pieces(&c, bytes).unwrap();
        assert_eq!(pieces, [("x".into(), Origin::Prefill), ("é".into(), Origin::Draft(2)), ("y".into(), Origin::Target)]);
    }

    #[test]
    fn an_unfinished_character_at_the_end_is_shown() {
        let c = completion(&[(b'x'.into(), Origin::Prefill), (0xc3, Origin::Draft(1))]);
        let text: String = pieces(&c, bytes).unwrap().into_iter().map(|(t, _)| t).collect();
        assert_eq!(text, "x\u{fffd}");
    }
}
