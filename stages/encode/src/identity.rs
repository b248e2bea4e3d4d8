//! Identity of a model's components: equal files, equal identity, whatever the folder is called. A file is hashed once per
//! state of it, as far as the memo tells.

use std::collections::BTreeMap;

use models::{Family, ModelFolder};
use stage::Failure;
use store::{Digest, Memo};

/// Of the VAE.
pub(crate) fn vae(family: &dyn Family, folder: &ModelFolder, memo: &Memo) -> Result<Digest, Failure> {
    component(folder, family.vae_parts(), memo)
}

/// Of each text encoder with its tokenizer, by the name its rows are stored under.
pub(crate) fn text_encoders(
    family: &dyn Family,
    folder: &ModelFolder,
    memo: &Memo,
) -> Result<BTreeMap<String, Digest>, Failure> {
    let one = |(name, parts): &(&str, &[&str])| Ok(((*name).to_owned(), component(folder, parts, memo)?));
    family.text_encoder_parts().iter().map(one).collect()
}

/// Of the files that match `parts`, but not the pipeline's index, which says nothing about one component.
fn component(folder: &ModelFolder, parts: &[&str], memo: &Memo) -> Result<Digest, Failure> {
    let globs: Vec<String> = parts.iter().filter(|part| part.contains('/')).map(|part| (*part).to_owned()).collect();
    Ok(memo.identify(&folder.path, &globs).map_err(Failure::from_diagnostic)?.digest)
}
