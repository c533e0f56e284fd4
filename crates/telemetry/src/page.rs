//! The page: one HTML file with its style and script inside, live from the server or frozen in a report.
//!
//! Refuses: anything fetched from elsewhere.
//! Invariants: a dump cannot break out of its script element, whatever the events say.

use crate::event::Envelope;
use crate::status::Status;
use serde::Serialize;

const HTML: &str = include_str!("../page/page.html");
const CSS: &str = include_str!("../page/page.css");
const CHART_JS: &str = include_str!("../page/chart.js");
const PAGE_JS: &str = include_str!("../page/page.js");
const DUMP_MARK: &str = "<!--dump-->";

fn assembled() -> String {
    HTML.replace("/*css*/", CSS).replace("/*js*/", &format!("{CHART_JS}\n{PAGE_JS}"))
}

/// The live page, as served at `/`: it shows `status` at once and follows `/events` beside it.
pub fn page_html(status: &Status) -> String {
    with_dump(&Dump { status, events: None })
}

#[derive(Serialize)]
struct Dump<'a> {
    status: &'a Status,
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<&'a [Envelope]>,
}

/// The page with a run's status and events inside, for a report: it shows the same and needs no server.
pub fn page_dump(status: &Status, events: &[Envelope]) -> String {
    with_dump(&Dump { status, events: Some(events) })
}

fn with_dump(dump: &Dump<'_>) -> String {
    let json = serde_json::to_string(dump).unwrap_or_default();
    // In a script element only `<` can end the element or begin a comment; JSON allows it to be written so.
    let json = json.replace('<', "\\u003c");
    assembled().replace(DUMP_MARK, &format!("<script type=\"application/json\" id=\"dump\">{json}</script>"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Event, Warning};

    #[test]
    fn the_page_is_whole_and_asks_no_one_else() {
        let page = page_html(&Status::default());
        for mark in ["/*css*/", "/*js*/", DUMP_MARK, "src=\"http", "@import", "url(http"] {
            assert!(!page.contains(mark), "{mark}");
        }
        assert!(page.contains("new EventSource"));
    }

    #[test]
    fn a_dump_cannot_break_out() {
        let event = Event::Warning(Warning { code: "x".into(), text: "</script><script>alert(1)</script><!--dump-->".into() });
        let envelope = Envelope { v: 1, t: 1, run_id: "r".into(), seq: 1, event };
        let page = page_dump(&Status::default(), std::slice::from_ref(&envelope));
        assert!(!page.contains("</script><script>alert"));
        let json = page.split("id=\"dump\">").nth(1).unwrap().split("</script>").next().unwrap();
        let dump: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(dump["events"][0], serde_json::to_value(&envelope).unwrap());
    }
}
