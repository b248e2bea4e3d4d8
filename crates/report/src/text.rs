//! Numbers, times and foreign text, as people read them.

/// A number with three to four significant digits: `1.738`, `0.0012`, `3e-5`, `48 211`.
pub(crate) fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if !value.is_finite() {
        value.to_string()
    } else if !(1e-3..1e6).contains(&size) {
        format!("{value:.2e}").replace(".00e", "e").replace("0e", "e")
    } else if size >= 1000.0 {
        grouped(value.round() as i64)
    } else {
        let digits = 3 - size.log10().floor().clamp(-3.0, 3.0) as i32;
        let text = format!("{value:.*}", digits.max(0) as usize);
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    }
}

/// A label of an axis whose labels are `step` apart.
pub(crate) fn tick(value: f64, step: f64) -> String {
    if value.abs() < step * 1e-9 {
        return "0".to_owned();
    }
    if step < 1e-3 || value.abs() >= 1e6 {
        return format!("{value:.1e}").replace(".0e", "e");
    }
    let digits = (-step.log10().floor()).max(0.0) as usize;
    // A quarter step such as 0.25 needs one digit more than its size tells.
    let exact = |digits: usize| (value * 10f64.powi(digits as i32)).fract().abs() < 1e-6;
    format!("{value:.*}", if exact(digits) { digits } else { digits + 1 })
}

/// A count with thin gaps: `48 211`.
pub(crate) fn grouped(value: i64) -> String {
    let digits = value.unsigned_abs().to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    if value < 0 { format!("−{out}") } else { out }
}

/// [`grouped`], of a count.
pub(crate) fn count(value: u64) -> String {
    grouped(i64::try_from(value).unwrap_or(i64::MAX))
}

/// `1 picture`, `2 pictures`.
pub(crate) fn many(n: u64, one: &str) -> String {
    format!("{} {one}{}", count(n), if n == 1 { "" } else { "s" })
}

/// A duration: `0.03 s`, `12.4 s`, `3 min 20 s`, `2 h 05 min`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    if seconds < 1.0 {
        format!("{seconds:.2} s")
    } else if seconds < 100.0 {
        format!("{seconds:.1} s")
    } else if whole < 3_600 {
        format!("{} min {:02} s", whole / 60, whole % 60)
    } else {
        format!("{} h {:02} min", whole / 3_600, whole / 60 % 60)
    }
}

/// A size: `512 B`, `3.4 MB`.
pub fn bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["kB", "MB", "GB", "TB"] {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// Text from a data set: no control characters and no bidirectional overrides, which could make it look like ours, and at
/// most `most` characters. Markup is escaped where it is written.
pub(crate) fn foreign(text: &str, most: usize) -> String {
    let tame = |c: char| {
        let overrides = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}');
        if c.is_control() || overrides { ' ' } else { c }
    };
    let mut out: String = text.chars().take(most).map(tame).collect();
    if text.chars().nth(most).is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            [1.73781, 0.00123, 3e-5, 1e-4, 48211.4, 12.0, 0.5, -2.25, 0.0, 1.5e7].map(number),
            ["1.738", "0.00123", "3e-5", "1e-4", "48\u{202f}211", "12", "0.5", "-2.25", "0", "1.5e7"]
        );
        assert_eq!(
            [tick(0.25, 0.25), tick(0.5, 0.5), tick(1e-4, 5e-5), tick(40.0, 20.0)],
            ["0.25", "0.5", "1e-4", "40"]
        );
        assert_eq!(many(1, "picture"), "1 picture");
        assert_eq!(grouped(-1_234_567), "−1\u{202f}234\u{202f}567");
    }

    #[test]
    fn foreign_text_cannot_dress_up() {
        assert_eq!(foreign("a\u{202e}b\nc\0d", 99), "a b c d");
        assert_eq!(foreign("äöü…", 3), "äöü…");
        assert_eq!(foreign("abc", 3), "abc");
    }
}
