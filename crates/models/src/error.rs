//! What can be wrong with a model folder, its weights, or the way a model is called.

use std::path::PathBuf;

use miette::Diagnostic;
use thiserror::Error;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong.
#[derive(Debug, Error, Diagnostic)]
pub enum Error {
    // The folder.
    /// The path is no directory.
    #[error("there is no model folder at `{}`", path.display())]
    #[diagnostic(code(models::no_folder), help("give a folder in diffusers' layout, one with a `model_index.json`"))]
    NoFolder {
        /// As given.
        path: PathBuf,
    },
    /// A file or a sub-folder is not there.
    #[error("model folder `{}` has no `{part}`", folder.display())]
    #[diagnostic(code(models::missing), help("{help}"))]
    Missing {
        /// The model folder.
        folder: PathBuf,
        /// Relative to the folder.
        part: String,
        /// What the part is for.
        help: String,
    },
    /// A configuration file cannot be read as what it should be.
    #[error("`{part}` of model folder `{}` is not understood: {reason}", folder.display())]
    #[diagnostic(code(models::config))]
    Config {
        /// The model folder.
        folder: PathBuf,
        /// Relative to the folder.
        part: String,
        /// Why, naming the field.
        reason: String,
    },
    /// No family serves this pipeline.
    #[error("pipeline class `{class}` of model folder `{}` is not supported; supported: {supported}", folder.display())]
    #[diagnostic(code(models::unknown_pipeline))]
    UnknownPipeline {
        /// The model folder.
        folder: PathBuf,
        /// `_class_name` of `model_index.json`.
        class: String,
        /// Names in backticks.
        supported: String,
    },
    /// A model of a kind that a family's architecture does not cover.
    #[error("model folder `{}` is {what}, which is not supported; {instead}", folder.display())]
    #[diagnostic(code(models::unsupported))]
    Unsupported {
        /// The model folder.
        folder: PathBuf,
        /// Such as `a Wan 2.2 with two denoisers`.
        what: &'static str,
        /// What is supported.
        instead: &'static str,
    },
    /// A component is of another class than the family's.
    #[error("component `{component}` of model folder `{}` is a `{class}`, expected `{expected}`", folder.display())]
    #[diagnostic(code(models::component_class))]
    ComponentClass {
        /// The model folder.
        folder: PathBuf,
        /// Such as `vae`.
        component: String,
        /// As `model_index.json` has it.
        class: String,
        /// What the family needs.
        expected: String,
    },
    /// A tokenizer's files do not work together.
    #[error("tokenizer `{component}` of model folder `{}`: {reason}", folder.display())]
    #[diagnostic(code(models::tokenizer))]
    Tokenizer {
        /// The model folder.
        folder: PathBuf,
        /// Such as `tokenizer_2`.
        component: String,
        /// What went wrong.
        reason: String,
    },

    // The call.
    /// What an encoder made of a text is absent.
    #[error("a sample has no `{encoder}` text, which `{family}` needs")]
    #[diagnostic(code(models::text), help("encode the data set with this model"))]
    MissingText {
        /// Encoder.
        encoder: &'static str,
        /// Family.
        family: &'static str,
    },
    /// A tensor has a shape the model cannot take.
    #[error("{what} has shape {shape:?}; {expected}")]
    #[diagnostic(code(models::shape))]
    Shape {
        /// What the tensor is.
        what: &'static str,
        /// As given.
        shape: Vec<i64>,
        /// The rule.
        expected: String,
    },
    /// The texts of a batch do not stack.
    #[error(
        "texts of one batch have {first} and {other} `{encoder}` tokens; all must be encoded with one `max_sequence_length`"
    )]
    #[diagnostic(
        code(models::uneven_text),
        help("encode the data set again, so that every caption has the same token count")
    )]
    UnevenText {
        /// Encoder.
        encoder: &'static str,
        /// Tokens of the first row.
        first: i64,
        /// Tokens of the row that differs.
        other: i64,
    },
    /// Too many tokens asked for.
    #[error("`max_sequence_length` is {asked}; `{encoder}` takes 1 to {limit}")]
    #[diagnostic(code(models::max_tokens))]
    MaxTokens {
        /// Encoder.
        encoder: &'static str,
        /// As asked.
        asked: usize,
        /// Largest.
        limit: usize,
    },

    /// Tiling asked of a VAE that has none.
    #[error("the VAE of `{family}` cannot work in tiles")]
    #[diagnostic(code(models::no_tiling), help("remove `vae_tiling`"))]
    NoTiling {
        /// Class of the VAE.
        family: &'static str,
    },

    // Wrapped.
    /// A layer, a weight file or an adapter.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Nn(#[from] nn::Error),
    /// libtorch refused an operation.
    #[error("libtorch: {0}")]
    #[diagnostic(code(models::torch))]
    Torch(#[from] tch::TchError),
    /// A file could not be read.
    #[error("{0}")]
    #[diagnostic(code(models::io))]
    Io(#[from] std::io::Error),
}
