//! The parts of a diffusers folder that training leaves alone: copied once, then linked from checkpoint to checkpoint.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use models::ModelFolder;
use stage::Failure;

/// Where unchanged files come from.
pub(crate) struct Unchanged<'a> {
    pub(crate) model: &'a ModelFolder,
    /// Whether the model's files never change in place (the Hub's cache), so that they may be linked, too.
    pub(crate) immutable: bool,
    /// An earlier checkpoint of this run.
    pub(crate) previous: Option<&'a Path>,
    /// Names of the denoisers that are trained.
    pub(crate) trained: &'a [&'static str],
    /// Border between two denoisers, if they were trained with another than that of the model's index.
    pub(crate) boundary: Option<f64>,
}

const INDEX: &str = "model_index.json";

impl Unchanged<'_> {
    /// Puts everything but the weights of trained denoisers into `folder`.
    pub(crate) fn place(&self, folder: &Path) -> Result<(), Failure> {
        for file in self.files()? {
            let target = folder.join(&file);
            if let Some(parent) = target.parent() {
                fs_err::create_dir_all(parent)?;
            }
            match self.boundary.filter(|_| file == Path::new(INDEX)) {
                Some(boundary) => self.write_index(boundary, &target)?,
                None => self.place_file(&file, &target)?,
            }
        }
        Ok(())
    }

    fn write_index(&self, boundary: f64, target: &Path) -> Result<(), Failure> {
        let mut index = self.model.index.clone();
        index["boundary_ratio"] = boundary.into();
        let text = serde_json::to_string_pretty(&index).map_err(Failure::from_error)?;
        Ok(fs_err::write(target, text + "\n")?)
    }

    fn place_file(&self, file: &Path, target: &Path) -> Result<(), Failure> {
        let source = self.model.path.join(file);
        let linkable = match self.previous.map(|previous| previous.join(file)).filter(|path| path.is_file()) {
            Some(previous) => Some(previous),
            None if self.immutable => Some(fs_err::canonicalize(&source)?),
            None => None,
        };
        // A link fails across file systems, or on one without links: then the bytes are copied.
        if linkable.is_none_or(|from| fs_err::hard_link(from, target).is_err()) {
            fs_err::copy(&source, target)?;
        }
        Ok(())
    }

    /// `model_index.json`, the trained denoisers' configurations, and all files of the other components, relative to the folder.
    fn files(&self) -> Result<BTreeSet<PathBuf>, Failure> {
        let configs = self.trained.iter().map(|name| Path::new(name).join("config.json"));
        let mut files: BTreeSet<PathBuf> = configs.chain([PathBuf::from(INDEX)]).collect();
        for (name, entry) in self.model.index.as_object().into_iter().flatten() {
            let is_component = entry.get(1).is_some_and(serde_json::Value::is_string);
            if is_component && !self.trained.contains(&name.as_str()) {
                self.walk(Path::new(name), &mut files)?;
            }
        }
        Ok(files)
    }

    fn walk(&self, folder: &Path, files: &mut BTreeSet<PathBuf>) -> Result<(), Failure> {
        for entry in fs_err::read_dir(self.model.path.join(folder))? {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            // Follows links: the Hub's cache is made of them.
            if entry.path().is_dir() {
                self.walk(&path, files)?;
            } else {
                files.insert(path);
            }
        }
        Ok(())
    }
}
