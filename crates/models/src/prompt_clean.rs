//! How Wan's pipeline cleans a prompt: `ftfy.fix_text`, `html.unescape` twice, runs of white space to one space.
//!
//! diffusers uses ftfy only where it is installed. Wan's own program always does, and so it is here, whatever is installed: the
//! reference is diffusers 0.42 with ftfy 6.3. Without ftfy diffusers gives the same for a prompt that
//! has none of what ftfy mends: curly quotes, ligatures, full-width forms, control characters, characters not composed (NFC),
//! references in capitals (`&EACUTE;`). All of ftfy's fixes are here but one: text that was decoded in the wrong encoding
//! ("mojibake", `cafÃ©`) is left as it is, as diffusers leaves it without ftfy; `encode` and `generate` warn of it.

use htmlize::ENTITIES;
use icu_normalizer::ComposingNormalizerBorrowed;

/// The prompt as the tokenizer gets it.
pub fn prompt_clean(text: &str) -> String {
    let text = unescape(&unescape(&fix_text(text)));
    text.split(char::is_whitespace).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Line by line; entities stay from the first line on that holds a `<`, which makes it HTML.
fn fix_text(text: &str) -> String {
    let mut html = false;
    let mut fixed = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        html |= line.contains('<');
        fixed.push_str(&fix_line(line, html));
    }
    fixed
}

/// All fixes in turn, until they change nothing more.
fn fix_line(line: &str, html: bool) -> String {
    let mut text = line.to_owned();
    loop {
        let mut next = if html { text.clone() } else { strict_entities(&text) };
        next = next.chars().map(windows_1252).collect();
        next = map(&next, ligature);
        next = map(&next, width);
        next = next.chars().map(straight).collect();
        next = next.replace("\r\n", "\n").replace(['\r', '\u{2028}', '\u{2029}', '\u{85}'], "\n");
        next = without_terminal_escapes(&next);
        next.retain(|c| !unwanted(c));
        next = ComposingNormalizerBorrowed::new_nfc().normalize(&next).into_owned();
        if next == text {
            return text;
        }
        text = next;
    }
}

fn map(text: &str, f: impl Fn(char) -> Option<String>) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match f(c) {
            Some(with) => out.push_str(&with),
            None => out.push(c),
        }
        out
    })
}

/// What the C1 control characters are in Windows-1252; five stand for nothing there.
fn windows_1252(c: char) -> char {
    const TABLE: [char; 32] = [
        '€', '\u{81}', '‚', 'ƒ', '„', '…', '†', '‡', 'ˆ', '‰', 'Š', '‹', 'Œ', '\u{8d}', 'Ž', '\u{8f}', '\u{90}', '‘',
        '’', '“', '”', '•', '–', '—', '˜', '™', 'š', '›', 'œ', '\u{9d}', 'ž', 'Ÿ',
    ];
    match c {
        '\u{80}'..='\u{9f}' => TABLE[c as usize - 0x80],
        _ => c,
    }
}

fn ligature(c: char) -> Option<String> {
    let letters = match c {
        'Ĳ' => "IJ",
        'ĳ' => "ij",
        'ŉ' => "ʼn",
        'Ǳ' => "DZ",
        'ǲ' => "Dz",
        'ǳ' => "dz",
        'Ǆ' => "DŽ",
        'ǅ' => "Dž",
        'ǆ' => "dž",
        'Ǉ' => "LJ",
        'ǈ' => "Lj",
        'ǉ' => "lj",
        'Ǌ' => "NJ",
        'ǋ' => "Nj",
        'ǌ' => "nj",
        'ﬀ' => "ff",
        'ﬁ' => "fi",
        'ﬂ' => "fl",
        'ﬃ' => "ffi",
        'ﬄ' => "ffl",
        'ﬅ' => "ſt",
        'ﬆ' => "st",
        _ => return None,
    };
    Some(letters.to_owned())
}

/// Half and full width forms, and the ideographic space.
fn width(c: char) -> Option<String> {
    match c {
        '\u{3000}' => Some(" ".to_owned()),
        '\u{ff01}'..='\u{ffef}' => {
            let normal = ComposingNormalizerBorrowed::new_nfkc().normalize(c.encode_utf8(&mut [0; 4])).into_owned();
            Some(normal).filter(|normal| !normal.chars().eq([c]))
        }
        _ => None,
    }
}

fn straight(c: char) -> char {
    match c {
        '\u{02bc}' | '\u{2018}'..='\u{201b}' => '\'',
        '\u{201c}'..='\u{201f}' => '"',
        _ => c,
    }
}

/// Without `ESC [ digits and semicolons letter`.
fn without_terminal_escapes(text: &str) -> String {
    let mut parts = text.split("\u{1b}[");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
        if let Some(rest) = rest.strip_prefix(|c: char| c.is_ascii_alphabetic()) {
            out.push_str(rest);
        } else {
            out.push_str("\u{1b}[");
            out.push_str(part);
        }
    }
    out
}

fn unwanted(c: char) -> bool {
    matches!(c, '\0'..='\u{8}' | '\u{b}' | '\u{e}'..='\u{1f}' | '\u{7f}' | '\u{206a}'..='\u{206f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffc}')
}

/// ftfy's reading: references that end in a semicolon, and names that were put in capitals as a whole.
fn strict_entities(text: &str) -> String {
    replaced(text, |rest| {
        let body = rest.strip_prefix("&#").or_else(|| rest.strip_prefix('&'))?;
        let length = body.bytes().take_while(u8::is_ascii_alphanumeric).count();
        let end = rest.len() - body.len() + length;
        if !(1..=24).contains(&length) || rest.as_bytes().get(end) != Some(&b';') {
            return None;
        }
        let reference = &rest[..=end];
        let value = if reference.starts_with("&#") {
            Some(unescape(reference)).filter(|value| !value.contains(';'))
        } else {
            named(reference).map(str::to_owned).or_else(|| {
                let lower = reference.to_lowercase();
                let capitals = reference.to_uppercase() == reference && unescape(reference) == reference;
                named(&lower).filter(|_| capitals).map(str::to_uppercase)
            })
        };
        value.map(|value| (value, reference.len()))
    })
}

/// `html.unescape` of Python: also references without a semicolon, and names that only begin with a known one.
fn unescape(text: &str) -> String {
    replaced(text, |rest| {
        let body = &rest[1..];
        let numeric = |prefix: &str, radix: u32| {
            let digits = body.get(..prefix.len()).filter(|start| start.eq_ignore_ascii_case(prefix))?;
            let tail = &body[digits.len()..];
            let count = tail.chars().take_while(|c| c.is_digit(radix)).count();
            let length = 1 + prefix.len() + count + usize::from(tail[count..].starts_with(';'));
            (count > 0).then(|| (codepoint(u32::from_str_radix(&tail[..count], radix).ok()), length))
        };
        if body.starts_with('#') {
            return numeric("#x", 16).or_else(|| numeric("#", 10));
        }
        let name = body.split(['\t', '\n', '\u{c}', ' ', '<', '&', '#', ';']).next().unwrap_or_default();
        let name = name.char_indices().nth(32).map_or(name, |(end, _)| &name[..end]);
        if name.is_empty() {
            return None;
        }
        let closed = &rest[..1 + name.len() + usize::from(body[name.len()..].starts_with(';'))];
        // The whole reference, else the longest beginning of at least two letters.
        let ends = closed.char_indices().map(|(at, _)| at).filter(|at| *at > 2).rev();
        let found = std::iter::once(closed.len()).chain(ends).find_map(|end| Some((named(&closed[..end])?, end)));
        found.map(|(value, end)| (value.to_owned(), end))
    })
}

/// `text` with every `&…` that `f` knows (value, bytes) replaced.
fn replaced(text: &str, f: impl Fn(&str) -> Option<(String, usize)>) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let (value, length) = f(rest).unwrap_or_else(|| ("&".to_owned(), 1));
        out.push_str(&value);
        rest = &rest[length..];
    }
    out + rest
}

/// `&name;` or `&name` to its characters.
fn named(reference: &str) -> Option<&'static str> {
    ENTITIES.get(reference.as_bytes()).and_then(|value| std::str::from_utf8(value).ok())
}

fn codepoint(number: Option<u32>) -> String {
    let Some(c) = number.filter(|n| *n != 0).and_then(char::from_u32) else { return "\u{fffd}".to_owned() };
    match c {
        '\u{80}'..='\u{9f}' => windows_1252(c).to_string(),
        '\u{1}'..='\u{8}' | '\u{b}' | '\u{e}'..='\u{1f}' | '\u{7f}' | '\u{fdd0}'..='\u{fdef}' => String::new(),
        _ if c as u32 & 0xfffe == 0xfffe => String::new(),
        _ => c.to_string(),
    }
}
