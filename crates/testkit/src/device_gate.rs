//! The gate of tests that need a GPU.
//!
//! Job: without a device, say so loudly and let the test end; where devices are promised, fail instead. Refuses to touch a
//! device itself: the caller hands in what it found. Invariant: a skipped test always leaves a line on standard error.

use std::fmt::Display;

/// Set to 1 where a device is promised: a missing one is then a failure.
pub const REQUIRED: &str = "DRAFTHORSE_DEVICE_REQUIRED";

/// Gives the device, or `None` after a loud line.
///
/// # Panics
/// When there is no device and [`REQUIRED`] is 1, or set to anything but 0 or 1.
pub fn require_device<D, E: Display>(test: &str, found: Result<D, E>) -> Option<D> {
    let required = std::env::var(REQUIRED).ok();
    match decide(test, found, required.as_deref()) {
        Ok(device) => Some(device),
        Err(Skip::Allowed(line)) => {
            eprintln!("{line}");
            None
        }
        Err(Skip::Forbidden(line)) => panic!("{line}"),
    }
}

enum Skip {
    Allowed(String),
    Forbidden(String),
}

fn decide<D, E: Display>(test: &str, found: Result<D, E>, required: Option<&str>) -> Result<D, Skip> {
    match (found, required) {
        (_, Some(other)) if !matches!(other, "0" | "1") => {
            Err(Skip::Forbidden(format!("{REQUIRED} is `{other}`; set it to 0 or 1")))
        }
        (Ok(device), _) => Ok(device),
        (Err(why), Some("1")) => Err(Skip::Forbidden(format!("{test}: no device ({why}), and {REQUIRED}=1 demands one"))),
        (Err(why), _) => Err(Skip::Allowed(format!("SKIPPED {test}: no device ({why}); {REQUIRED}=1 makes this a failure"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_a_skip_unless_promised() {
        let missing = || Err::<(), _>("no driver");
        assert!(
            matches!(decide("t", missing(), None), Err(Skip::Allowed(l)) if l.contains("SKIPPED t") && l.contains("no driver"))
        );
        assert!(matches!(decide("t", missing(), Some("0")), Err(Skip::Allowed(_))));
        assert!(matches!(decide("t", missing(), Some("1")), Err(Skip::Forbidden(l)) if l.contains("no driver")));
        assert!(matches!(decide("t", missing(), Some("yes")), Err(Skip::Forbidden(_))));
        assert!(matches!(decide("t", Ok::<_, &str>(3), Some("1")), Ok(3)));
    }
}
