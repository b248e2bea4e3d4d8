//! Names on the Hub: repositories and commits.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// A repository.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Repo {
    /// A model.
    Model {
        /// User or organisation; empty for the few old models that have none.
        owner: String,
        /// Name.
        name: String,
    },
    /// A data set.
    Dataset {
        /// User or organisation; empty for the few old data sets that have none.
        owner: String,
        /// Name.
        name: String,
    },
}

impl Repo {
    /// The model `OWNER/NAME`.
    pub fn model(id: &str) -> Result<Self, Error> {
        let (owner, name) = split(id)?;
        Ok(Self::Model { owner, name })
    }

    /// The data set `OWNER/NAME`.
    pub fn dataset(id: &str) -> Result<Self, Error> {
        let (owner, name) = split(id)?;
        Ok(Self::Dataset { owner, name })
    }

    /// `OWNER/NAME`.
    pub fn id(&self) -> String {
        let (Self::Model { owner, name } | Self::Dataset { owner, name }) = self;
        if owner.is_empty() { name.clone() } else { format!("{owner}/{name}") }
    }

    /// `model` or `data set`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Model { .. } => "model",
            Self::Dataset { .. } => "data set",
        }
    }

    /// Folder in the cache, as `huggingface_hub` names it: `models--OWNER--NAME`.
    pub(crate) fn folder(&self) -> String {
        let kind = match self {
            Self::Model { .. } => "models",
            Self::Dataset { .. } => "datasets",
        };
        format!("{kind}--{}", self.id().replace('/', "--"))
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}`", self.kind(), self.id())
    }
}

fn split(id: &str) -> Result<(String, String), Error> {
    let (owner, name) = hf_hub::split_id(id);
    let good = |part: &str| {
        part.len() <= 96
            && !part.starts_with(['-', '.'])
            && !part.contains("..")
            && !part.contains("--")
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    if name.is_empty() || !good(name) || !good(owner) || (owner.is_empty() && id.contains('/')) {
        return Err(Error::Id { id: id.to_owned() });
    }
    Ok((owner.to_owned(), name.to_owned()))
}

/// A commit: 40 lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Commit(String);

impl Commit {
    /// The digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Commit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text.len() == 40 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            Ok(Self(text.to_owned()))
        } else {
            Err(Error::Commit { text: text.to_owned() })
        }
    }
}

impl fmt::Display for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_could_leave_the_cache_are_refused() {
        for id in ["", "/", "a/", "/b", "a/../b", "../b", "a/b/c", "a b/c", "a/.b", "a--b/c", "https://x/y"] {
            assert!(Repo::model(id).is_err(), "{id:?}");
        }
        assert_eq!(Repo::model("gpt2").unwrap().folder(), "models--gpt2");
        assert_eq!(Repo::dataset("a-b/c.d_e").unwrap().folder(), "datasets--a-b--c.d_e");
    }
}
