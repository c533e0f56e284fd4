//! Which bytes of a rendered conversation the assistant generates, from the structure of the template alone.
//!
//! The conversation is rendered twice, plain and with probes (module `probes`), and for each assistant turn the prompt
//! before it is rendered with its generation prompt. What follows the last probe of that prompt (the *tail*) is what a server
//! feeds before the model speaks; the turn's span begins where the tail ends in the whole conversation, or at the turn's
//! first own text where the template shortens the tail in history, and ends with the turn's stop token.
//! `{% generation %}` blocks, where the template has them, are taken as they are.
//! It refuses to guess: a turn whose boundaries do not follow exactly from these renderings drops its row, with a reason.
//! Text that is in a message can neither open nor close a span, because only text between probes' pieces is looked at.

use std::ops::Range;

use minijinja::value::Value as JinjaValue;

use crate::chat::Conversation;
use crate::error::DataError;
use crate::probes::{Probed, Reading};
use crate::template::{ChatTemplate, RenderOptions, to_jinja};

/// Why a row yields nothing to train on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Drop {
    /// The conversation has no assistant message.
    NoAssistant,
    /// Every assistant message is empty or white space.
    EmptyAssistant,
    /// The conversation has no user message.
    NoUser,
    /// The template refused the conversation; its words.
    TemplateRefused(String),
    /// The template did not end; the error's first line.
    EndlessTemplate(String),
    /// The only assistant message comes first, and no prompt of this template leads to it.
    AssistantFirst(String),
    /// An assistant turn could not be located exactly in the rendered text; why.
    SpanNotLocated(String),
    /// Special-token text stands where it cannot be told from the template's own (tool definitions, argument names).
    SpecialTokenText(String),
    /// The answer was cut by a length limit, and such rows are to be dropped.
    TruncatedAnswer,
    /// No token i has tokens i and i+1 supervised within the maximum length.
    NoAnchor,
    /// A line was broken, and such lines are to be skipped; the error's first line.
    BadLine(String),
    /// A role is unknown, and such rows are to be skipped.
    UnknownRole(String),
}

impl Drop {
    /// The reason as it is counted: a few fixed phrases.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoAssistant => "no assistant message",
            Self::EmptyAssistant => "empty assistant message",
            Self::NoUser => "no user message",
            Self::TemplateRefused(_) => "refused by the chat template",
            Self::EndlessTemplate(_) => "chat template without end",
            Self::AssistantFirst(_) => "assistant first, which the chat template cannot prompt",
            Self::SpanNotLocated(_) => "assistant turn not located exactly",
            Self::SpecialTokenText(_) => "special-token text outside message content",
            Self::TruncatedAnswer => "answer cut by a length limit",
            Self::NoAnchor => "too short for an anchor",
            Self::BadLine(_) => "broken line",
            Self::UnknownRole(_) => "unknown role",
        }
    }

    /// What was particular about this row, if anything.
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::TemplateRefused(s)
            | Self::EndlessTemplate(s)
            | Self::AssistantFirst(s)
            | Self::SpanNotLocated(s)
            | Self::SpecialTokenText(s)
            | Self::BadLine(s)
            | Self::UnknownRole(s) => Some(s),
            _ => None,
        }
    }
}

/// A conversation rendered once, with what the assistant generates in it.
#[derive(Debug)]
pub struct Located {
    /// The whole rendered conversation.
    pub text: String,
    /// Byte ranges that the assistant generates, in order, disjoint.
    pub spans: Vec<Range<usize>>,
    /// Byte ranges of text that messages brought, in order, disjoint; all other bytes are the template's.
    pub content: Vec<Range<usize>>,
    /// Assistant turns after which the template writes no end-of-turn token.
    pub turns_without_end: u32,
    /// The conversation opens with an assistant message that no prompt of this template leads to; it is masked.
    pub opening_masked: bool,
}

/// What ends a turn.
#[derive(Debug, Clone, Default)]
pub struct StopTexts {
    /// Texts of the tokens at which generation stops.
    pub stops: Vec<String>,
    /// Texts of all special tokens, for templates whose end-of-turn token is not declared as a stop.
    pub specials: Vec<String>,
}

/// Switches that templates read to decide what the generation prompt supplies.
const SWITCHES: [(&str, bool); 4] =
    [("enable_thinking", false), ("enable_thinking", true), ("thinking", false), ("thinking", true)];

/// Why a rendering that failed drops its row.
fn refused(error: DataError) -> Drop {
    match error {
        DataError::Template(words) => Drop::TemplateRefused(words),
        DataError::EndlessTemplate { .. } => {
            Drop::EndlessTemplate(error.to_string().lines().next().unwrap_or_default().to_owned())
        }
        other => Drop::TemplateRefused(other.to_string()),
    }
}

/// Renders `conversation` and locates the assistant's spans.
///
/// # Errors
/// A [`Drop`] when the row cannot be used.
pub fn locate(template: &ChatTemplate, stops: &StopTexts, conversation: &Conversation) -> Result<Located, Drop> {
    check_roles(conversation)?;
    let probed = Probed::new(&conversation.messages)
        .ok_or_else(|| Drop::SpanNotLocated("the text uses both private-use planes".into()))?;
    if let Some(special) = special_in_bare_text(stops, conversation, &probed) {
        return Err(Drop::SpecialTokenText(special.to_owned()));
    }
    let tools = to_jinja(&conversation.tools);
    let plain: Vec<JinjaValue> = conversation.messages.iter().map(to_jinja).collect();
    let with_probes: Vec<JinjaValue> = probed.messages.iter().map(to_jinja).collect();
    let text = template.render(&plain, &tools, RenderOptions::default()).map_err(refused)?;
    let marks = template.has_generation_marks().then(|| probed.marks());
    let reading = template
        .render(&with_probes, &tools, RenderOptions { marks, ..RenderOptions::default() })
        .map(|r| probed.read(&r))
        .map_err(refused)?;
    let lost = |why: &str| Drop::SpanNotLocated(why.to_owned());
    if reading.text != text {
        return Err(lost("the template treats the probed text differently"));
    }
    let ranges = reading.ranges(probed.pieces.len()).ok_or_else(|| lost("the template repeats or cuts message text"))?;
    let content = ranges.iter().map(|(_, r)| r.clone()).collect();
    if template.has_generation_marks() {
        let spans = marked_spans(&reading).ok_or_else(|| lost("generation blocks are not paired"))?;
        if spans.is_empty() {
            return Err(Drop::EmptyAssistant);
        }
        return Ok(Located { text, spans, content, turns_without_end: 0, opening_masked: false });
    }
    let turns = Turns { template, stops, probed: &probed, messages: &with_probes, tools: &tools, text: &text, ranges: &ranges };
    let mut spans = Vec::new();
    let mut turns_without_end = 0;
    let mut opening = None;
    let last_message = conversation.messages.len() - 1;
    for i in (0..=last_message).filter(|&i| conversation.role(i) == "assistant") {
        let (mut span, content_end, ended) = match turns.span(i) {
            Ok(Some(found)) => found,
            Ok(None) => continue,
            // Nobody asks a server for a first message, so it may well be context only.
            Err(drop) if i == 0 => {
                opening = Some(drop);
                continue;
            }
            Err(drop) => return Err(drop),
        };
        if conversation.truncated && i == last_message {
            span.end = content_end;
        } else if !ended {
            turns_without_end += 1;
        }
        spans.push(span);
    }
    if spans.is_empty() {
        let words = opening.as_ref().map(|d| d.detail().unwrap_or_default().to_owned());
        return Err(words.map_or(Drop::EmptyAssistant, Drop::AssistantFirst));
    }
    if spans.windows(2).any(|w| w[0].end > w[1].start) {
        return Err(lost("two turns overlap"));
    }
    Ok(Located { text, spans, content, turns_without_end, opening_masked: opening.is_some() })
}

fn check_roles(conversation: &Conversation) -> Result<(), Drop> {
    let n = conversation.messages.len();
    let mut assistants = (0..n).filter(|&i| conversation.role(i) == "assistant").peekable();
    if assistants.peek().is_none() {
        return Err(Drop::NoAssistant);
    }
    let speaks = |i: usize| {
        let message = &conversation.messages[i];
        let has_text = |key: &str| message[key].as_str().is_some_and(|s| !s.trim().is_empty());
        has_text("content") || has_text("reasoning_content") || message.get("tool_calls").is_some()
    };
    if !assistants.any(speaks) {
        return Err(Drop::EmptyAssistant);
    }
    if !(0..n).any(|i| conversation.role(i) == "user") {
        return Err(Drop::NoUser);
    }
    Ok(())
}

fn special_in_bare_text<'a>(stops: &'a StopTexts, conversation: &Conversation, probed: &Probed) -> Option<&'a str> {
    let tools = if conversation.tools.is_null() { String::new() } else { conversation.tools.to_string() };
    let found = |s: &&String| tools.contains(s.as_str()) || probed.bare_texts.iter().any(|t| t.contains(s.as_str()));
    stops.specials.iter().find(found).map(String::as_str)
}

fn marked_spans(reading: &Reading) -> Option<Vec<Range<usize>>> {
    let mut spans = Vec::with_capacity(reading.marks.len() / 2);
    for pair in reading.marks.chunks(2) {
        match pair {
            [(false, open), (true, close)] if open < close => spans.push(*open..*close),
            [(false, open), (true, close)] if open == close => {}
            _ => return None,
        }
    }
    Some(spans)
}

/// One conversation's renderings, asked turn by turn.
struct Turns<'a> {
    template: &'a ChatTemplate,
    stops: &'a StopTexts,
    probed: &'a Probed,
    messages: &'a [JinjaValue],
    tools: &'a JinjaValue,
    text: &'a str,
    ranges: &'a [(usize, Range<usize>)],
}

impl Turns<'_> {
    fn message_of(&self, piece: usize) -> usize {
        self.probed.pieces[piece].message
    }

    /// (span, end of the turn's own text, whether an end-of-turn token was found); `None` for a turn that says nothing.
    fn span(&self, i: usize) -> Result<Option<(Range<usize>, usize, bool)>, Drop> {
        let lost = |why: &str| Drop::SpanNotLocated(format!("message {i}: {why}"));
        let own = |r: &&(usize, Range<usize>)| self.message_of(r.0) == i;
        let Some(first) = self.ranges.iter().find(own) else { return Ok(None) };
        let content_end = self.ranges.iter().rev().find(own).map_or(first.1.end, |r| r.1.end);
        let before = self.ranges.iter().rev().find(|r| self.message_of(r.0) < i);
        let after = self.ranges.iter().find(|r| self.message_of(r.0) > i).map_or(self.text.len(), |r| r.1.start);
        let low = before.map_or(0, |r| r.1.end);
        if low > first.1.start || content_end > after {
            return Err(lost("the template does not keep the order of messages"));
        }
        // Only template text stands between `low` and the turn's first own text.
        let between = &self.text[low..first.1.start];
        let start = low + self.supplied(i, between, before.map(|r| r.0))?;
        let closing = &self.text[content_end..after];
        let earliest = |texts: &[String]| {
            texts.iter().filter_map(|t| closing.find(t.as_str()).map(|at| (at, std::cmp::Reverse(t.len())))).min()
        };
        let stop = earliest(&self.stops.stops).or_else(|| earliest(&self.stops.specials));
        let end = stop.map_or(content_end, |(at, len)| content_end + at + len.0);
        Ok(Some((start..end, content_end, stop.is_some())))
    }

    /// How many bytes of `between` the server supplies before the model speaks in turn `i`.
    fn supplied(&self, i: usize, between: &str, last_piece: Option<usize>) -> Result<usize, Drop> {
        let base = self.tail(i, None, last_piece)?;
        if base == between {
            return Ok(between.len());
        }
        // Before a first message the template may write a preamble that it leaves out of an empty conversation.
        if last_piece.is_none()
            && !base.is_empty()
            && let Some((before, _)) = between.rsplit_once(base.as_str())
            && !before.contains(base.as_str())
        {
            return Ok(before.len() + base.len());
        }
        let mut tails = vec![base];
        for (name, value) in SWITCHES {
            if self.template.mentions(name)
                && let Ok(tail) = self.tail(i, Some((name, value)), last_piece)
            {
                tails.push(tail);
            }
        }
        // A template without a generation prompt leaves the header to the model; servers never ask for that.
        let headless = !self.template.mentions("add_generation_prompt");
        if let Some(len) = tails.iter().filter(|t| between.starts_with(t.as_str())).map(String::len).max() {
            let rest = &between[len..];
            let holds_special = self.stops.specials.iter().any(|s| rest.contains(s.as_str()));
            return Ok(if headless && holds_special { between.len() } else { len });
        }
        if tails.iter().any(|t| t.starts_with(between)) {
            return Ok(between.len());
        }
        Err(Drop::SpanNotLocated(format!("message {i}: the generation prompt differs from the turn's header")))
    }

    /// What the prompt before turn `i` ends with, after the last message text in it.
    fn tail(&self, i: usize, overrides: Option<(&str, bool)>, last_piece: Option<usize>) -> Result<String, Drop> {
        let options = RenderOptions { add_generation_prompt: true, overrides, marks: None };
        let rendered = self.template.render(&self.messages[..i], self.tools, options).map_err(refused)?;
        let reading = self.probed.read(&rendered);
        let last = reading.probes.last();
        if last.map(|p| p.piece) != last_piece || last.is_some_and(|p| !p.closes) {
            return Err(Drop::SpanNotLocated(format!("message {i}: the prompt before it ends differently in history")));
        }
        Ok(reading.text[last.map_or(0, |p| p.at)..].to_owned())
    }
}
