//! Identity of a model's components: equal files, equal identity, whatever the folder is called.

use std::collections::BTreeMap;

use models::{Family, ModelFolder};
use rayon::prelude::*;
use stage::Failure;
use store::{Digest, Entry, Identity};

/// Of the VAE.
pub(crate) fn vae(family: &dyn Family, folder: &ModelFolder) -> Result<Digest, Failure> {
    component(folder, family.vae_parts())
}

/// Of each text encoder with its tokenizer, by the name its rows are stored under.
pub(crate) fn text_encoders(family: &dyn Family, folder: &ModelFolder) -> Result<BTreeMap<String, Digest>, Failure> {
    let one = |(name, parts): &(&str, &[&str])| Ok(((*name).to_owned(), component(folder, parts)?));
    family.text_encoder_parts().iter().map(one).collect()
}

/// Of the files that match `parts`, but not the pipeline's index, which says nothing about one component.
fn component(folder: &ModelFolder, parts: &[&str]) -> Result<Digest, Failure> {
    let globs: Vec<String> = parts.iter().filter(|part| part.contains('/')).map(|part| (*part).to_owned()).collect();
    let files = store::files_matching(&folder.path, &globs).map_err(Failure::from_error)?;
    let entry = |path: String| -> store::Result<Entry> {
        let digest = Digest::of_file(&folder.path.join(&path))?.to_string();
        Ok(Entry { path, digest })
    };
    let entries = files.into_par_iter().map(entry).collect::<store::Result<Vec<_>>>().map_err(Failure::from_error)?;
    Ok(Identity::of_entries(entries).digest)
}
