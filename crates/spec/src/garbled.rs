//! Text that was decoded in the wrong encoding ("mojibake"): UTF-8 bytes read as Windows-1252, so that `café` became `cafÃ©`.

/// Whether `text` looks so: it holds characters which, written in Windows-1252, are the bytes of one longer character in
/// UTF-8. Two bytes may stand beside each other by chance (`É»`), so they count only behind `Â` or `Ã`, or twice in a row.
pub fn looks_garbled(text: &str) -> bool {
    let bytes: Vec<Option<u8>> = text.chars().map(windows_1252).collect();
    let mut at = 0;
    let mut pairs = 0;
    while at < bytes.len() {
        let length = sequence(&bytes[at..]);
        match length {
            0 => pairs = 0,
            2 if matches!(bytes[at], Some(0xc2 | 0xc3)) || pairs > 0 => return true,
            2 => pairs += 1,
            _ => return true,
        }
        at += length.max(1);
    }
    false
}

/// Bytes of the UTF-8 sequence of two or more at the start, or 0.
fn sequence(bytes: &[Option<u8>]) -> usize {
    let length = match bytes.first().copied().flatten() {
        Some(0xc2..=0xdf) => 2,
        Some(0xe0..=0xef) => 3,
        Some(0xf0..=0xf4) => 4,
        _ => return 0,
    };
    let read: Option<Vec<u8>> = bytes.iter().take(length).copied().collect();
    if read.is_some_and(|read| read.len() == length && std::str::from_utf8(&read).is_ok()) { length } else { 0 }
}

/// The byte of a character in Windows-1252, whose five gaps are read as control characters.
fn windows_1252(c: char) -> Option<u8> {
    const UPPER: [char; 32] = [
        '€', '\u{81}', '‚', 'ƒ', '„', '…', '†', '‡', 'ˆ', '‰', 'Š', '‹', 'Œ', '\u{8d}', 'Ž', '\u{8f}', '\u{90}', '‘',
        '’', '“', '”', '•', '–', '—', '˜', '™', 'š', '›', 'œ', '\u{9d}', 'ž', 'Ÿ',
    ];
    let upper = || UPPER.iter().position(|known| *known == c).map(|at| 0x80 + at as u8);
    u8::try_from(u32::from(c)).ok().or_else(upper)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `text` as someone sees it who takes its bytes for Windows-1252.
    fn garble(text: &str) -> String {
        let seen = |byte: u8| (0..=0xffff).filter_map(char::from_u32).find(|c| windows_1252(*c) == Some(byte)).unwrap();
        text.bytes().map(seen).collect()
    }

    #[test]
    fn text_is_told_from_what_a_wrong_encoding_makes_of_it() {
        for text in ["un café crème", "Übergröße", "кошка", "“quoted”", "猫 on a mat", "a 🐈", "ёлка", "naïve — so"]
        {
            assert!(!looks_garbled(text), "{text}");
            let garbled = garble(text);
            assert!(looks_garbled(&garbled), "{garbled}");
        }
        for text in
            ["", "plain words", "«CAFÉ»", "L’ÉTÉ…", "VOILÀ – ÇA", "Ångström®", "5 µm × 3 ½", "“À la carte”", "ÀÉÎÕÜ"]
        {
            assert!(!looks_garbled(text), "{text}");
        }
    }
}
