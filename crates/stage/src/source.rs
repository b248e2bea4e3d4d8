//! From what a user writes for a model to a [`Source`]: a folder, or an id on the Hub.

use std::path::Path;

use spec::Problem;

use crate::{Source, SourceKind};

impl Source {
    /// The source that `written` names: a folder that exists under `base_dir` wins, then `OWNER/NAME` (also as
    /// `hf://OWNER/NAME`, either with `@REVISION`) on the Hub.
    pub fn model(
        name: &str,
        written: &str,
        revision: Option<&str>,
        base_dir: &Path,
        parts: &[&str],
    ) -> Result<Self, Problem> {
        let source = |kind, location: String, revision: Option<&str>| Self {
            name: name.to_owned(),
            kind,
            location,
            revision: revision.map(str::to_owned),
            parts: parts.iter().map(|part| (*part).to_owned()).collect(),
        };
        let folder = base_dir.join(written);
        if !written.is_empty() && folder.is_dir() {
            return match revision {
                None => Ok(source(SourceKind::Path, folder.to_string_lossy().into_owned(), None)),
                Some(revision) => {
                    Err(Problem::new(format!("`{written}` is a local folder, which has no revision `{revision}`"))
                        .help("remove `revision`, or name the model by its Hub id")
                        .field(name))
                }
            };
        }
        let id = written.strip_prefix("hf://").unwrap_or(written);
        let (id, at) = id.split_once('@').map_or((id, None), |(id, at)| (id, Some(at)));
        if !is_hub_id(id) || at == Some("") {
            return Err(Problem::new(format!("`{written}` is neither an existing folder nor a Hub id"))
                .help(format!(
                    "write the path of a diffusers folder, relative to `{}`, or `OWNER/NAME`",
                    base_dir.display()
                ))
                .field(name));
        }
        match (at, revision) {
            (Some(at), Some(revision)) if at != revision => {
                Err(Problem::new(format!("`{written}` names revision `{at}` and `revision` names `{revision}`"))
                    .help("keep one of them")
                    .field("revision"))
            }
            (at, revision) => Ok(source(SourceKind::HubModel, id.to_owned(), at.or(revision))),
        }
    }
}

/// `OWNER/NAME` with the characters that the Hub allows.
fn is_hub_id(text: &str) -> bool {
    let word = |word: &str| {
        !word.is_empty()
            && !word.starts_with(['.', '-'])
            && word.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
    };
    text.split_once('/').is_some_and(|(owner, name)| word(owner) && word(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_folder_wins_over_a_hub_id() {
        let base = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(base.path().join("models/flux")).unwrap();
        let local = Source::model("model", "models/flux", None, base.path(), &["vae/**"]).unwrap();
        assert_eq!((local.kind, local.parts), (SourceKind::Path, vec!["vae/**".to_owned()]));
        assert!(Path::new(&local.location).is_absolute());
        let remote = Source::model("model", "models/flux2", None, base.path(), &[]).unwrap();
        assert_eq!((remote.kind, remote.location.as_str()), (SourceKind::HubModel, "models/flux2"));
    }

    #[test]
    fn a_revision_may_stand_in_either_place_but_not_differ() {
        let base = Path::new("/nowhere");
        for (written, revision, asked) in [
            ("hf://a/b@v1", None, Some("v1")),
            ("a/b", Some("v1"), Some("v1")),
            ("a/b@v1", Some("v1"), Some("v1")),
            ("a/b", None, None),
        ] {
            assert_eq!(Source::model("model", written, revision, base, &[]).unwrap().revision.as_deref(), asked);
        }
        assert!(Source::model("model", "a/b@v1", Some("v2"), base, &[]).is_err());
    }

    #[test]
    fn what_is_neither_is_a_problem_with_the_field() {
        for written in ["", "flux", "./gone/flux", "/gone", "a/b/c", "../x", "a/b@"] {
            let problem = Source::model("model", written, None, Path::new("/nowhere"), &[]).unwrap_err();
            assert_eq!(problem.field.as_deref(), Some("model"), "{written}");
        }
    }
}
