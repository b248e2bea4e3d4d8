//! File patterns, such as `vae/*` or `**/*.png`: which files of a source or of an artifact are meant. Knows no files.

/// Whether `path` (with `/`) matches one of the globs, and none of those that begin with `!`, which take out; where all take
/// out, or there are none, the rest is everything.
///
/// `*` and `**` stand for any text, `/` included, `**/` for nothing as well, and `?` for one character. A pattern that takes
/// in too much makes a result stale once too often; one that takes in too little would make it wrong.
pub fn matches_any<G: AsRef<str>>(globs: &[G], path: &str) -> bool {
    let (mut asked, mut found) = (false, false);
    for glob in globs {
        match glob.as_ref().strip_prefix('!') {
            Some(out) if fits(out, path) => return false,
            Some(_) => {}
            None => {
                asked = true;
                found = found || fits(glob.as_ref(), path);
            }
        }
    }
    found || !asked
}

/// Whether the globs take out all that lies below `folder`, so that it need not be looked into.
pub fn takes_out<G: AsRef<str>>(globs: &[G], folder: &str) -> bool {
    let below = format!("{folder}/");
    // A `*` at the end stands for whatever follows.
    let out = |glob: &G| glob.as_ref().strip_prefix('!').is_some_and(|out| out.ends_with('*') && fits(out, &below));
    globs.iter().any(out)
}

/// What the globs ask for, for a message.
pub fn told<G: AsRef<str>>(globs: &[G]) -> String {
    let asked = globs.iter().map(AsRef::as_ref).filter(|glob| !glob.starts_with('!'));
    let asked: Vec<String> = asked.map(|glob| format!("`{glob}`")).collect();
    if asked.is_empty() { "anything".to_owned() } else { asked.join(", ") }
}

fn fits(glob: &str, text: &str) -> bool {
    matches(glob.as_bytes(), text.as_bytes())
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

    #[test]
    fn globs_that_take_out_win_and_whole_folders_are_known_by_their_end() {
        let hidden = ["!.*", "!*/.*"];
        for (path, counts) in [("a.png", true), (".a", false), ("x/.a", false), ("x/.a/b.png", false), ("x/a.b", true)]
        {
            assert_eq!(matches_any(&hidden, path), counts, "{path}");
        }
        let some = ["*.png", "!runs/*"];
        assert!(matches_any(&some, "a.png") && !matches_any(&some, "runs/a.png") && !matches_any(&some, "a.jpg"));
        assert!(takes_out(&hidden, ".git") && takes_out(&hidden, "x/.git") && !takes_out(&hidden, "x"));
        assert!(takes_out(&some, "runs") && takes_out(&some, "runs/x") && !takes_out(&some, "reruns"));
        assert!(!takes_out(&["!x/*.txt"], "x") && !takes_out(&["x/*"], "x"), "something may be left below");
        assert_eq!((told(&some), told(&hidden)), ("`*.png`".to_owned(), "anything".to_owned()));
    }
}
