//! File patterns, such as `vae/*` or `**/*.png`: which files of a source or of an artifact are meant. Knows no files.

/// Whether `path` (with `/`) matches one of the globs; no globs match everything.
///
/// `*` and `**` stand for any text, `/` included, `**/` for nothing as well, and `?` for one character. A pattern that takes
/// in too much makes a result stale once too often; one that takes in too little would make it wrong.
pub fn matches_any<G: AsRef<str>>(globs: &[G], path: &str) -> bool {
    globs.is_empty() || globs.iter().any(|glob| matches(glob.as_ref().as_bytes(), path.as_bytes()))
}

fn matches(glob: &[u8], text: &[u8]) -> bool {
    if let Some(rest) = glob.strip_prefix(b"**/") {
        return matches(rest, text) || (0..text.len()).any(|at| text[at] == b'/' && matches(rest, &text[at + 1..]));
    }
    match (glob.first(), text.first()) {
        (None, None) => true,
        (Some(b'*'), _) => {
            let rest = &glob[glob.iter().take_while(|byte| **byte == b'*').count()..];
            (0..=text.len()).any(|at| matches(rest, &text[at..]))
        }
        (Some(b'?'), Some(_)) => matches(&glob[1..], &text[1..]),
        (Some(g), Some(t)) if g == t => matches(&glob[1..], &text[1..]),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_take_in_sub_folders() {
        let fits = |glob: &str, path: &str| matches_any(&[glob], path);
        assert!(fits("vae/*", "vae/config.json") && fits("vae/*", "vae/a/b") && !fits("vae/*", "unvae/x"));
        assert!(fits("**/*.png", "a.png") && fits("**/*.png", "x/y/a.png") && !fits("**/*.png", "a.jpg"));
        assert!(fits("*.png", "x/a.png") && fits("model_index.json", "model_index.json"));
        assert!(!fits("model_index.json", "x/model_index.json") && fits("a?c", "abc") && !fits("a?c", "ac"));
        assert!(matches_any::<&str>(&[], "anything"));
    }
}
