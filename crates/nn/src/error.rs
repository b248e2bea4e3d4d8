//! What can go wrong between a weight file and a gradient.

use std::path::PathBuf;

/// A failed layer, file or parameter set.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum Error {
    /// libtorch or the device.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Torch(#[from] torch::Error),
    /// Reading or writing failed; the text names the path.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A file that is not what its name says.
    #[error("`{}`: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor that the model needs and the weights lack.
    #[error("`{origin}` has no tensor `{name}` (expected shape {shape:?})")]
    Missing {
        /// File or folder of the weights.
        origin: String,
        /// The key sought.
        name: String,
        /// Shape the model needs.
        shape: Vec<i64>,
        /// Nearest keys.
        #[help]
        help: Option<String>,
    },
    /// A tensor of another shape than the model needs.
    #[error("tensor `{name}` of `{origin}` has shape {found:?}, expected {expected:?}")]
    Shape {
        /// File or folder of the weights.
        origin: String,
        /// The key.
        name: String,
        /// Shape in the file.
        found: Vec<i64>,
        /// Shape the model needs.
        expected: Vec<i64>,
    },
    /// Tensors in the file that the model has no place for.
    #[error("`{origin}` holds {count} tensor(s) that this model has no place for: {names}")]
    #[diagnostic(help("the weights and the model's `config.json` do not belong together"))]
    Unexpected {
        /// File or folder of the weights.
        origin: String,
        /// How many.
        count: usize,
        /// The first of them, comma-separated.
        names: String,
    },
    /// A LoRA pattern, or a module of an adapter file, that fits no linear layer.
    #[error("LoRA {what} `{pattern}` matches no linear layer of the model")]
    UnmatchedAdapter {
        /// `target`, `exclusion`, `rank pattern` or `alpha pattern`.
        what: &'static str,
        /// As the user or the file has it.
        pattern: String,
        /// Nearest names.
        #[help]
        help: Option<String>,
    },
    /// LoRA settings that make no sense.
    #[error("LoRA {0}")]
    Adapter(String),
    /// A layer that cannot be divided as asked.
    #[error("{count} {what} do not divide into {shares} shares")]
    Indivisible {
        /// `attention heads`, `features`.
        what: String,
        /// How many there are.
        count: i64,
        /// Into how many shares they were to go.
        shares: usize,
    },
    /// A layer called with something it cannot take.
    #[error("{0}")]
    Invalid(String),
    /// The gradient is not finite.
    #[error("the gradient norm is {norm}; not finite: {names}")]
    #[diagnostic(help("lower the learning rate, or look at the samples of this step"))]
    NonFinite {
        /// The norm as computed.
        norm: f64,
        /// The first parameters with such a gradient, comma-separated.
        names: String,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}

/// The first few of many names, for a message.
pub(crate) fn some_of<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 5;
    let names: Vec<_> = names.into_iter().collect();
    let text = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN { format!("{text} and {} more", names.len() - SHOWN) } else { text }
}

/// `did you mean …`, from the names most like `wanted`; `None` if nothing is near.
pub(crate) fn nearest<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let mut scored: Vec<_> =
        names.into_iter().map(|name| (strsim::normalized_levenshtein(wanted, name), name)).collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.retain(|(score, _)| *score > 0.6);
    (!scored.is_empty()).then(|| format!("did you mean {}?", some_of(scored.iter().take(3).map(|(_, name)| *name))))
}
