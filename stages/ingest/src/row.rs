//! A source row on its way to the samples, or to the rejects.

use spec::Problem;

/// Why a row is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// Reason code.
    pub(crate) reason: &'static str,
    /// Detail for a person.
    pub(crate) detail: String,
}

impl Refusal {
    pub(crate) fn new(reason: &'static str, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }
}

impl From<video::Error> for Refusal {
    fn from(error: video::Error) -> Self {
        Self::new(error.reason(), error.to_string())
    }
}

/// Where the bytes of a row's picture or clip are.
#[derive(Debug)]
pub(crate) enum Media {
    /// Here.
    Bytes(Vec<u8>),
    /// In a file of the data set (path inside it).
    File(String),
}

/// A row as the source states it.
#[derive(Debug)]
pub(crate) struct Row {
    /// Where it stands in the data set: `images/a.jpg`, `metadata.jsonl:12`, `data/train.parquet#7`.
    pub(crate) source: String,
    /// Name of the file, for captions made of it.
    pub(crate) name: Option<String>,
    /// The picture or clip.
    pub(crate) media: Result<Media, Refusal>,
    /// The caption as stated, not trimmed; `None` when there is none.
    pub(crate) caption: Result<Option<String>, Refusal>,
}

/// Rows in order. An error ends the run; a row that cannot be used is a row with a [`Refusal`].
pub(crate) type Rows<'a> = Box<dyn Iterator<Item = Result<Row, stage::Failure>> + 'a>;

/// A column that was chosen, and whether by guess.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Column {
    /// Its name.
    pub(crate) name: String,
    /// Whether nobody named it.
    pub(crate) guessed: bool,
}

/// Usual names of a column of pictures or clips.
pub(crate) const IMAGE_NAMES: &[&str] =
    &["image", "jpg", "jpeg", "png", "webp", "img", "picture", "video", "mp4", "clip"];
/// Usual names of a caption column.
pub(crate) const CAPTION_NAMES: &[&str] = &["caption", "text", "prompt", "description"];

/// The column that was asked for, else the first of the usual names that is there (whatever its case).
pub(crate) fn choose<'a>(
    parameter: &str,
    asked: Option<&str>,
    usual: &[&str],
    present: impl Iterator<Item = &'a str> + Clone,
) -> Result<Option<Column>, Problem> {
    let Some(asked) = asked else {
        let found = usual.iter().find_map(|name| present.clone().find(|column| column.eq_ignore_ascii_case(name)));
        return Ok(found.map(|name| Column { name: name.to_owned(), guessed: true }));
    };
    if present.clone().any(|column| column == asked) {
        return Ok(Some(Column { name: asked.to_owned(), guessed: false }));
    }
    let near = spec::suggest::nearest(asked, present.clone()).map(|near| format!("did you mean `{near}`? "));
    Err(Problem::new(format!("the data set has no column `{asked}`"))
        .help(format!("{}its columns are {}", near.unwrap_or_default(), listed(present)))
        .field(parameter))
}

/// Names in backticks, for a message.
pub(crate) fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_column_must_exist_and_guesses_follow_the_usual_order() {
        let columns = ["id", "Text", "caption"];
        let pick = |asked| choose("caption_column", asked, CAPTION_NAMES, columns.iter().copied());
        assert_eq!(pick(None).unwrap().unwrap(), Column { name: "caption".into(), guessed: true });
        assert_eq!(pick(Some("Text")).unwrap().unwrap(), Column { name: "Text".into(), guessed: false });
        let problem = pick(Some("captoin")).unwrap_err();
        assert_eq!(problem.help.as_deref(), Some("did you mean `caption`? its columns are `id`, `Text`, `caption`"));
        assert_eq!(choose("x", None, IMAGE_NAMES, ["a"].into_iter()).unwrap(), None);
    }
}
