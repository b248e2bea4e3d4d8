//! What a recipe's `[ingest]` table may say, and where its data set lies.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use spec::Problem;
use stage::Colour;

/// What changes the result.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Parameters {
    /// A folder, a Parquet file or a folder of them, relative to the recipe; or `hf://datasets/OWNER/NAME`, with `@REVISION` if need be. Hidden files are no part of it.
    pub dataset: String,
    /// Revision of a data set on the Hub: a branch, tag or commit.
    #[serde(default)]
    pub revision: Option<String>,
    /// Part of a Hub data set that has several: the folder or prefix of its Parquet files.
    #[serde(default)]
    pub config: Option<String>,
    /// Split, by the names of the Parquet files: `train` when absent and there is one, `all` for every file.
    #[serde(default)]
    pub split: Option<String>,
    /// Column of the pictures; guessed from usual names when absent.
    #[serde(default)]
    pub image_column: Option<String>,
    /// Column of the captions; guessed from usual names when absent.
    #[serde(default)]
    pub caption_column: Option<String>,
    /// What to do with a picture that has no caption.
    #[serde(default)]
    pub missing_caption: MissingCaption,
    /// Source rows to take, from the first.
    #[serde(default)]
    pub limit: Option<u64>,
}

/// What does not change the result.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Folder for one PNG per sample, named by its `sample_id`: what the model will see, before it is resized.
    pub dump: Option<PathBuf>,
    /// Colour under the transparent parts of dumped pictures, as `#rrggbb`; `encode` takes it from here, too.
    pub background: Colour,
}

/// Policy for pictures without a caption.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MissingCaption {
    /// Refuse them, into `rejects`.
    #[default]
    Reject,
    /// Give them the empty caption.
    Empty,
    /// Give them the name of their file, without its extension and with spaces for `_`.
    Filename,
}

/// Where a data set lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// A file or folder.
    Local(PathBuf),
    /// `OWNER/NAME`, and the revision asked for.
    Hub(String, Option<String>),
}

impl Parameters {
    /// Where the data set lies.
    pub(crate) fn place(&self, base_dir: &Path) -> Result<Place, Problem> {
        let written = self.dataset.as_str();
        let Some(rest) = written.strip_prefix("hf://") else {
            if written.contains("://") {
                let message = format!("`{written}` is of a kind that is not read");
                return Err(Problem::new(message).help("name a folder, a Parquet file or `hf://datasets/OWNER/NAME`"));
            }
            if written.is_empty() {
                return Err(Problem::new("`dataset` is empty")
                    .help("name a folder, a Parquet file or `hf://datasets/OWNER/NAME`"));
            }
            for (name, value) in [("revision", &self.revision), ("config", &self.config)] {
                if value.is_some() {
                    let problem =
                        Problem::new(format!("`{name}` has a meaning on the Hub only, but the data set is local"));
                    return Err(problem.help(format!("remove `{name}`")).field(name));
                }
            }
            return Ok(Place::Local(base_dir.join(written)));
        };
        let id = rest.strip_prefix("datasets/").unwrap_or_default();
        let (id, at) = id.split_once('@').map_or((id, None), |(id, at)| (id, Some(at.to_owned())));
        if hub::Repo::dataset(id).is_err() || at.as_deref() == Some("") {
            return Err(Problem::new(format!("`{written}` does not name a data set of the Hub"))
                .help("write `hf://datasets/OWNER/NAME` or `hf://datasets/OWNER/NAME@REVISION`"));
        }
        match (at, self.revision.clone()) {
            (Some(at), Some(revision)) if at != revision => {
                let message = format!("`dataset` names revision `{at}` and `revision` names `{revision}`");
                Err(Problem::new(message).help("keep one of them").field("revision"))
            }
            (at, revision) => Ok(Place::Hub(id.to_owned(), at.or(revision))),
        }
    }

    /// The semantic parameters with defaults filled in and without the location.
    pub(crate) fn key(&self) -> Value {
        json!({
            "config": self.config,
            "split": self.split,
            "image_column": self.image_column,
            "caption_column": self.caption_column,
            "missing_caption": self.missing_caption,
            "limit": self.limit,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(value: Value) -> Parameters {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn places_are_told_apart() {
        let place = |value: Value| parameters(value).place(Path::new("/recipes"));
        assert_eq!(place(json!({"dataset": "deck"})), Ok(Place::Local("/recipes/deck".into())));
        assert_eq!(place(json!({"dataset": "/deck"})), Ok(Place::Local("/deck".into())));
        let hub = |revision: Option<&str>| Ok(Place::Hub("o/n".into(), revision.map(str::to_owned)));
        assert_eq!(place(json!({"dataset": "hf://datasets/o/n"})), hub(None));
        assert_eq!(place(json!({"dataset": "hf://datasets/o/n@v1"})), hub(Some("v1")));
        assert_eq!(place(json!({"dataset": "hf://datasets/o/n", "revision": "v1"})), hub(Some("v1")));
        for wrong in ["", "s3://x/y", "hf://o/n", "hf://datasets/o", "hf://datasets/../n/", "hf://datasets/o/n@"] {
            let problem = place(json!({"dataset": wrong}));
            assert!(problem.is_err() || wrong == "hf://datasets/o", "{wrong}");
        }
        assert!(place(json!({"dataset": "hf://datasets/o/n@v1", "revision": "v2"})).is_err());
        assert!(place(json!({"dataset": "deck", "revision": "v2"})).is_err());
    }

    #[test]
    fn every_semantic_field_moves_the_key_and_no_location_does() {
        let base = json!({"dataset": "a"});
        let key = |extra: Value| {
            let mut value = base.clone();
            value.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            parameters(value).key()
        };
        let changes = [
            json!({"split": "x"}),
            json!({"config": "x"}),
            json!({"image_column": "x"}),
            json!({"caption_column": "x"}),
            json!({"missing_caption": "empty"}),
            json!({"limit": 1}),
        ];
        for change in changes {
            assert_ne!(key(change.clone()), key(json!({})), "{change}");
        }
        assert_eq!(key(json!({"dataset": "elsewhere"})), key(json!({})));
        assert_eq!(key(json!({"revision": "v1"})), key(json!({})), "the commit is the source's identity");
    }
}
