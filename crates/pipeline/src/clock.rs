//! The time, for records and people only; it reaches no key and no artifact's digest.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How a duration and a size are told to people, on the terminal as on the page of a run.
pub(crate) use report::{bytes as size, duration as told};

/// Now, as `2026-11-30T11:06:05Z`.
pub(crate) fn now() -> String {
    let seconds = system().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    utc(seconds)
}

/// Now, for the ages of files.
#[expect(clippy::disallowed_methods, reason = "records say when something ran; no key and no result does")]
pub(crate) fn system() -> SystemTime {
    SystemTime::now()
}

/// Reads `30d`, `12h`, `45min`, `90s`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let seconds = match unit {
        "d" => 86_400,
        "h" => 3_600,
        "min" => 60,
        "s" => 1,
        _ => return Err("write an age such as `30d`, `12h`, `45min` or `90s`".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| format!("`{number}` is not a whole number"))?;
    Ok(Duration::from_secs(number.saturating_mul(seconds)))
}

/// Reads `500MB`, `1.5 GB`, `2TB` or a number of bytes.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let factor = match unit {
        "" | "B" => 1e0,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        _ => return Err("write a size such as `500MB`, `20GB` or `2TB`".to_owned()),
    };
    match number.parse::<f64>() {
        Ok(number) if number >= 0.0 => Ok((number * factor) as u64),
        Ok(_) | Err(_) => Err(format!("`{number}` is not a number")),
    }
}

fn split(text: &str) -> (&str, &str) {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    (&text[..at], text[at..].trim())
}

/// Seconds since 1970 as UTC. The date is Howard Hinnant's `civil_from_days`.
fn utc(seconds: u64) -> String {
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_on_leap_days_and_borders() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_735_689_599), "2024-12-31T23:59:59Z");
    }

    #[test]
    fn ages_and_sizes_are_read_as_people_write_them() {
        assert_eq!(duration("30d"), Ok(Duration::from_hours(30 * 24)));
        assert_eq!(duration("45 min"), Ok(Duration::from_mins(45)));
        assert!(duration("3 weeks").is_err() && duration("1.5h").is_err() && duration("").is_err());
        assert_eq!((bytes("1.5 GB"), bytes("12"), bytes("20MB")), (Ok(1_500_000_000), Ok(12), Ok(20_000_000)));
        assert!(bytes("GB").is_err() && bytes("1 GiB").is_err());
    }

    #[test]
    fn durations_and_sizes_read_well() {
        assert_eq!(
            [told(0.034), told(12.44), told(200.0), told(7_500.0)],
            ["0.03 s", "12.4 s", "3 min 20 s", "2 h 05 min"]
        );
        assert_eq!([size(512), size(3_400_000), size(24_000_000_000)], ["512 B", "3.4 MB", "24.0 GB"]);
    }
}
