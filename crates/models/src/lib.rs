//! Architectures and their registry. To add a model: one file for its transformer, one line in [`FAMILIES`].

pub mod autoencoder_kl;
pub mod autoencoder_kl_wan;
pub mod clip;
pub mod error;
pub mod family;
pub mod flux;
pub mod flux_pipeline;
pub mod folder;
mod prompt_clean;
mod sentencepiece;
pub mod t5;
pub mod testing;
mod tiling;
pub mod tokenizer;
pub mod wan;
pub mod wan_pipeline;

pub use error::{Error, Result};
pub use family::{
    Clips, Denoiser, DynTextEncoders, DynTransformer, DynVae, Encoded, Family, Length, Normalisation, Posterior,
    Sampling, Text, TextEncoders, TextInput, Vae,
};
pub use folder::ModelFolder;

/// Every family there is.
pub const FAMILIES: &[&dyn Family] = &[&flux_pipeline::FluxPipeline, &wan_pipeline::WanPipeline];

/// The family of a folder, by the pipeline class in its index.
pub fn family_of(folder: &ModelFolder) -> Result<&'static dyn Family> {
    FAMILIES.iter().copied().find(|family| family.pipeline_class() == folder.class()).ok_or_else(|| {
        let supported: Vec<String> = FAMILIES.iter().map(|family| format!("`{}`", family.pipeline_class())).collect();
        Error::UnknownPipeline {
            folder: folder.path.clone(),
            class: folder.class().into(),
            supported: supported.join(", "),
        }
    })
}
