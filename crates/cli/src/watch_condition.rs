//! What a script waits for, and for how long.
//!
//! Refuses conditions that a run cannot tell of. Invariant: a condition is met by a counter of the run, never by its being alive.

use drafthorse_telemetry::Status;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// This step is done.
    Step(u64),
    /// The gate is open.
    Gate,
    /// A held-out measurement was made.
    HeldOut,
    /// A checkpoint is on disk.
    Checkpoint,
    /// The run has ended.
    End,
}

/// Whether it has come to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Met {
    /// It has.
    Yes,
    /// Not yet.
    NotYet,
}

impl Condition {
    /// Whether `status` shows it.
    pub fn met(self, status: &Status) -> Met {
        let met = match self {
            Condition::Step(n) => status.step.as_ref().is_some_and(|s| s.step >= n),
            Condition::Gate => status.gate_t.is_some(),
            Condition::HeldOut => status.held_out.is_some(),
            Condition::Checkpoint => status.checkpoint.is_some(),
            Condition::End => status.outcome.is_some(),
        };
        if met { Met::Yes } else { Met::NotYet }
    }
}

impl FromStr for Condition {
    type Err = String;

    fn from_str(text: &str) -> Result<Condition, String> {
        match text {
            "gate" => Ok(Condition::Gate),
            "held_out" => Ok(Condition::HeldOut),
            "checkpoint" => Ok(Condition::Checkpoint),
            "end" => Ok(Condition::End),
            _ => match text.strip_prefix("step=").map(str::parse) {
                Some(Ok(step)) => Ok(Condition::Step(step)),
                _ => Err("write step=N, gate, held_out, checkpoint or end".into()),
            },
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Condition::Step(n) => write!(f, "step {n}"),
            Condition::Gate => f.write_str("the gate opened"),
            Condition::HeldOut => f.write_str("a held-out measurement"),
            Condition::Checkpoint => f.write_str("a checkpoint"),
            Condition::End => f.write_str("its end"),
        }
    }
}

/// `90s`, `10m`, `2h`, or seconds.
///
/// # Errors
/// What is wrong with the text.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is no time; write e.g. 90s, 10m or 2h");
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let factor = match unit {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err(wrong()),
    };
    number.parse::<u64>().ok().and_then(|n| n.checked_mul(factor)).map(Duration::from_secs).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use drafthorse_telemetry::Step;

    #[test]
    fn conditions_and_times_are_read() {
        assert_eq!("step=100".parse(), Ok(Condition::Step(100)));
        assert!("step=".parse::<Condition>().is_err() && "loss".parse::<Condition>().is_err());
        let times = ["90s", "10m", "2h", "7"].map(|t| parse_duration(t).unwrap().as_secs());
        assert_eq!(times, [90, 600, 7200, 7]);
        assert!(parse_duration("m").is_err() && parse_duration("1d").is_err());
        let at = |step| Status { step: Some(Step { step, ..Step::default() }), ..Status::default() };
        assert_eq!([9, 10, 11].map(|s| Condition::Step(10).met(&at(s))), [Met::NotYet, Met::Yes, Met::Yes]);
        assert_eq!(Condition::Gate.met(&Status::default()), Met::NotYet);
    }
}
