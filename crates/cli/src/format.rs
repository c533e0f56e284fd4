//! Numbers as people read them: bytes, counts, durations, shares.
//!
//! Refuses rounding that hides a difference that matters: bytes keep three digits, counts are exact. Invariant: pure functions.

use drafthorse_train::config_checks::MOST_THREADS;

/// Bytes in binary units, three significant digits: `1.46 GiB`.
pub fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{n} B"),
        _ if value < 10.0 => format!("{value:.2} {}", units[unit]),
        _ if value < 100.0 => format!("{value:.1} {}", units[unit]),
        _ => format!("{value:.0} {}", units[unit]),
    }
}

/// A count with thousands apart: `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A large rate or amount in decimal units, three significant digits: `4.21 T`.
pub fn si(value: f64) -> String {
    let units = ["", " k", " M", " G", " T", " P", " E"];
    let mut value = value;
    let mut unit = 0;
    while value.abs() >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = if value.abs() < 10.0 { 2 } else { usize::from(value.abs() < 100.0) };
    format!("{value:.digits$}{}", units[unit])
}

/// Seconds as `80 µs`, `850 ms`, `12.3 s`, `4 min 5 s`, `3 h 12 min` or `5 d 3 h`.
pub fn seconds(s: f64) -> String {
    if s < 1e-3 {
        return format!("{:.0} µs", s * 1e6);
    }
    if s < 1.0 {
        return format!("{:.0} ms", s * 1000.0);
    }
    if s < 60.0 {
        return format!("{s:.1} s");
    }
    let whole = s.round() as u64;
    match whole {
        0..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

/// `12GiB`, `24 GB`, `512MiB` or plain bytes → bytes.
///
/// # Errors
/// What is wrong with the text.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let at = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(at);
    let factor: f64 = match unit.trim() {
        "" | "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1024f64.powi(2),
        "GiB" => 1024f64.powi(3),
        "TiB" => 1024f64.powi(4),
        "KB" | "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        other => return Err(format!("`{other}` is no unit of memory; write e.g. 24GiB")),
    };
    let value: f64 = number.parse().map_err(|_| format!("`{text}` is no amount of memory; write e.g. 24GiB"))?;
    Ok((value * factor) as u64)
}

/// A count on the command line, from 1.
///
/// # Errors
/// What is wrong with it, for the command line's own error.
pub fn parse_count(text: &str) -> Result<usize, String> {
    within(text, 1 << 24)
}

/// A number of threads on the command line.
///
/// # Errors
/// As [`parse_count`].
pub fn parse_threads(text: &str) -> Result<usize, String> {
    within(text, MOST_THREADS)
}

fn within(text: &str, most: usize) -> Result<usize, String> {
    let n: Option<usize> = text.parse().ok().filter(|n| (1..=most).contains(n));
    n.ok_or_else(|| format!("a whole number from 1 to {most} is wanted"))
}

/// A rate on the command line: above 0 and finite.
///
/// # Errors
/// As [`parse_count`].
pub fn parse_rate(text: &str) -> Result<f64, String> {
    let rate: Option<f64> = text.parse().ok().filter(|r: &f64| r.is_finite() && *r > 0.0);
    rate.ok_or_else(|| "a number above 0 is wanted".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            [bytes(0), bytes(999), bytes(1536), bytes(1 << 30), bytes(150 << 20)],
            ["0 B", "999 B", "1.50 KiB", "1.00 GiB", "150 MiB"]
        );
        assert_eq!([count(0), count(999), count(1000), count(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([si(12.0), si(1234.0), si(4.211e12)], ["12.0", "1.23 k", "4.21 T"]);
        assert_eq!(seconds(8e-5), "80 µs");
        assert_eq!(
            [seconds(0.85), seconds(12.34), seconds(245.0), seconds(11_520.0), seconds(442_800.0)],
            ["850 ms", "12.3 s", "4 min 5 s", "3 h 12 min", "5 d 3 h"]
        );
    }

    #[test]
    fn memory_is_read_with_its_unit() {
        assert_eq!(parse_bytes("24GiB"), Ok(24 << 30));
        assert_eq!(parse_bytes("1.5 GB"), Ok(1_500_000_000));
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert!(parse_bytes("24 gigs").is_err() && parse_bytes("GiB").is_err());
    }
}
