//! What to draw: prompts from the recipe or from a UTF-8 file, one line each or one JSON object each.
//! Knows no model.

use std::path::Path;

use serde::{Deserialize, Serialize};
use spec::Problem;

/// One prompt; absent values are those of the recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Prompt {
    /// The text.
    pub(crate) prompt: String,
    /// Seed of its first picture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) seed: Option<u64>,
    /// What to steer away from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) negative_prompt: Option<String>,
}

impl Prompt {
    /// Everything a person wrote.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        [Some(self.prompt.as_str()), self.negative_prompt.as_deref()].into_iter().flatten()
    }
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self { prompt: text.to_owned(), seed: None, negative_prompt: None }
    }
}

/// The prompts of a file. `.jsonl` holds one object a line; any other file one prompt a line. Blank lines are skipped.
pub(crate) fn read(path: &Path) -> Result<Vec<Prompt>, Vec<Problem>> {
    let bytes = fs_err::read(path)
        .map_err(|error| vec![Problem::new(format!("cannot read the prompt file: {error}")).field("prompts_file")])?;
    let text = decode(&bytes).map_err(|problem| vec![at(problem, path)])?;
    let json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"));
    let mut prompts = Vec::new();
    let mut problems = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        if !json {
            prompts.push(Prompt::from(line));
            continue;
        }
        match serde_json::from_str(line) {
            Ok(prompt) => prompts.push(prompt),
            Err(error) => problems.push(
                Problem::new(format!("not a prompt: {error}"))
                    .help("each line is an object such as `{\"prompt\": \"a red house\", \"seed\": 7}`")
                    .field("prompts_file")
                    .at(path, Some(number + 1)),
            ),
        }
    }
    if prompts.is_empty() && problems.is_empty() {
        problems.push(at(Problem::new("the prompt file has no prompt").help("write one prompt a line"), path));
    }
    if problems.is_empty() { Ok(prompts) } else { Err(problems) }
}

/// UTF-8 text without its byte order mark; the problem names the first byte that is not UTF-8.
fn decode(bytes: &[u8]) -> Result<&str, Problem> {
    if bytes.starts_with(&[0xFF, 0xFE]) || bytes.starts_with(&[0xFE, 0xFF]) {
        return Err(Problem { line: Some(1), ..Problem::new("the prompt file is UTF-16, not UTF-8 (byte offset 0)") });
    }
    // U+FEFF is a character like any other to `from_utf8`, so offsets count it.
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let offset = error.valid_up_to();
        let line = bytes[..offset].split(|byte| *byte == b'\n').count();
        Problem {
            line: Some(line),
            ..Problem::new(format!(
                "the prompt file is not UTF-8: byte 0x{:02x} at offset {offset}, line {line}",
                bytes[offset]
            ))
        }
    })?;
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

fn at(problem: Problem, path: &Path) -> Problem {
    let line = problem.line;
    let help = problem.help.clone().unwrap_or_else(|| "save the file as UTF-8".to_owned());
    problem.help(help).field("prompts_file").at(path, line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_bytes(name: &str, bytes: &[u8]) -> Result<Vec<Prompt>, Vec<Problem>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs_err::write(&path, bytes).unwrap();
        read(&path)
    }

    #[test]
    fn lines_are_prompts_whatever_the_line_ends_and_mark() {
        let prompts =
            read_bytes("p.txt", "\u{feff}a trtcrd of \u{65e5}\u{672c}\r\n\n# not a comment\n  \nlast".as_bytes())
                .unwrap();
        let texts: Vec<_> = prompts.iter().map(|prompt| prompt.prompt.as_str()).collect();
        assert_eq!(texts, ["a trtcrd of \u{65e5}\u{672c}", "# not a comment", "last"]);
    }

    #[test]
    fn json_lines_carry_seed_and_negative_prompt() {
        let prompts = read_bytes("p.jsonl", br#"{"prompt": "x", "seed": 7, "negative_prompt": "blur"}"#).unwrap();
        assert_eq!(prompts, [Prompt { prompt: "x".into(), seed: Some(7), negative_prompt: Some("blur".into()) }]);
    }

    #[test]
    fn wrong_encodings_name_file_line_and_offset() {
        // "caf\xe9" is Latin-1.
        let problem = &read_bytes("p.txt", b"ok\ncaf\xe9\n").unwrap_err()[0];
        assert_eq!((problem.line, problem.field.as_deref()), (Some(2), Some("prompts_file")));
        assert!(problem.message.contains("0xe9 at offset 6"), "{}", problem.message);
        assert!(problem.file.as_ref().unwrap().ends_with("p.txt"));
        let problem = &read_bytes("p.txt", b"\xff\xfea\x00").unwrap_err()[0];
        assert!(problem.message.contains("UTF-16") && problem.help.as_ref().unwrap().contains("UTF-8"));
    }

    #[test]
    fn every_bad_json_line_is_reported() {
        let problems = read_bytes("p.jsonl", b"{\"prompt\": \"x\"}\n{\"promt\": \"y\"}\nz\n").unwrap_err();
        assert_eq!(problems.iter().map(|problem| problem.line).collect::<Vec<_>>(), [Some(2), Some(3)]);
        assert!(problems[0].message.contains("promt"));
    }

    #[test]
    fn an_empty_or_missing_file_is_a_problem() {
        assert!(read_bytes("p.txt", b"\n\n").unwrap_err()[0].message.contains("no prompt"));
        assert!(read(Path::new("gone.txt")).unwrap_err()[0].message.contains("gone.txt"));
    }
}
