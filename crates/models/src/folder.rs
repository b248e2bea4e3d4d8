//! A model in diffusers' layout: `model_index.json` and one sub-folder for each component.
//!
//! Knows files and configuration, not weights; a folder may hold only the components someone fetched.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Error, Result};

const INDEX: &str = "model_index.json";

/// A model folder whose index has been read.
#[derive(Debug, Clone)]
pub struct ModelFolder {
    /// Where it is.
    pub path: PathBuf,
    /// `model_index.json`: component → `[library, class]`.
    pub index: Value,
}

impl ModelFolder {
    /// Reads the index; the components are looked at when they are asked for.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        if !path.is_dir() {
            return Err(Error::NoFolder { path });
        }
        let mut folder = Self { path, index: Value::Null };
        folder.index = folder.json(
            INDEX,
            "it names the pipeline and its components; give the folder that holds it, not one of its components",
        )?;
        if folder.index["_class_name"].as_str().is_none() {
            return Err(folder.config_error(INDEX, "field `_class_name` is missing"));
        }
        Ok(folder)
    }

    /// Pipeline class, such as `FluxPipeline`.
    pub fn class(&self) -> &str {
        self.index["_class_name"].as_str().unwrap_or_default()
    }

    /// Folder of a component, which must be there and of class `expected`.
    pub fn component(&self, name: &str, expected: &[&str]) -> Result<PathBuf> {
        if let Some(class) = self.index[name][1].as_str()
            && !expected.contains(&class)
        {
            let expected = expected.join("` or `");
            return Err(Error::ComponentClass {
                folder: self.path.clone(),
                component: name.into(),
                class: class.into(),
                expected,
            });
        }
        let path = self.path.join(name);
        if path.is_dir() {
            Ok(path)
        } else {
            Err(self.missing(&format!("{name}/"), "the pipeline needs this component"))
        }
    }

    /// `NAME/config.json` of a component.
    pub fn config<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let part = format!("{name}/config.json");
        let value = self.json(&part, "it gives the sizes of the component")?;
        serde_json::from_value(value).map_err(|e| self.config_error(&part, &e.to_string()))
    }

    /// A JSON file of the folder; `purpose` helps whoever misses it.
    pub fn json(&self, part: &str, purpose: &str) -> Result<Value> {
        let file = self.path.join(part);
        if !file.is_file() {
            return Err(self.missing(part, purpose));
        }
        serde_json::from_slice(&fs_err::read(&file)?).map_err(|e| self.config_error(part, &e.to_string()))
    }

    /// The path of `part`, if it is a file.
    pub fn file(&self, part: impl AsRef<Path>) -> Option<PathBuf> {
        Some(self.path.join(part)).filter(|path| path.is_file())
    }

    /// The error of a part that is not there.
    pub(crate) fn missing(&self, part: &str, help: &str) -> Error {
        Error::Missing { folder: self.path.clone(), part: part.into(), help: help.into() }
    }

    /// The error of a part that makes no sense.
    pub(crate) fn config_error(&self, part: &str, reason: &str) -> Error {
        Error::Config { folder: self.path.clone(), part: part.into(), reason: reason.into() }
    }
}
