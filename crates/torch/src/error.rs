//! What can go wrong below the layers.

use std::path::PathBuf;

/// A failed libtorch call or an unusable device.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum Error {
    /// An exception that libtorch threw.
    #[error("libtorch: {0}")]
    Libtorch(String),
    /// A list argument whose length does not fit its companions.
    #[error("{what}: {found} given, {expected} needed")]
    Count {
        /// What was counted.
        what: &'static str,
        /// How many came.
        found: usize,
        /// How many belong there.
        expected: usize,
    },
    /// A device name of no known form.
    #[error("unknown device `{0}`")]
    #[diagnostic(help("use `cpu`, `cuda` or `cuda:N`"))]
    UnknownDevice(String),
    /// A CUDA device was asked for, but its half of libtorch is not there.
    #[error("`{device}` was asked for, but libtorch_cuda.so was not found (looked at: {looked})")]
    #[diagnostic(help("set LIBTORCH_CUDA to libtorch_cuda.so of torch {version}, to its folder, or to the folder of an installed Python `torch`; or use `cpu`", version = crate::device::LIBTORCH_VERSION))]
    NoCudaLibrary {
        /// As the user wrote it.
        device: String,
        /// Every candidate, comma-separated.
        looked: String,
    },
    /// Several ranks have GPUs, but the library by which they talk is not built.
    #[error("ranks on several GPUs talk through libpipeline_nccl.so, which was not found (looked at: {looked})")]
    #[diagnostic(help(
        "build it with `scripts/build-nccl.sh SITE_PACKAGES`, where the torch of LIBTORCH_CUDA lies; or use one rank"
    ))]
    NoNcclLibrary {
        /// Where it would be.
        looked: String,
    },
    /// A library is there, but the loader refused it.
    #[error("cannot load `{}`: {reason}", path.display())]
    #[diagnostic(help("the file must belong to torch {version} and its nvidia packages must lie beside it; or use `cpu`", version = crate::device::LIBTORCH_VERSION))]
    Load {
        /// The library.
        path: PathBuf,
        /// The dynamic loader's words.
        reason: String,
    },
    /// CUDA is loaded, but no driver or GPU answers.
    #[error("`{device}` was asked for, but no NVIDIA GPU answers")]
    #[diagnostic(help("check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use `cpu`"))]
    NoGpu {
        /// As the user wrote it.
        device: String,
    },
    /// `cuda:N` with too large an N.
    #[error("there is no `{device}`: {count} GPU(s) are visible, numbered from 0")]
    NoSuchGpu {
        /// As the user wrote it.
        device: String,
        /// Visible GPUs.
        count: i64,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        let text = match error {
            tch::TchError::Torch(text) => text,
            other => other.to_string(),
        };
        Self::Libtorch(without_backtrace(&text).to_owned())
    }
}

/// libtorch appends the place in its own source and a stack; neither helps a user.
fn without_backtrace(text: &str) -> &str {
    text.split("\nException raised from ").next().unwrap_or(text).trim_end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exception_keeps_its_message_and_loses_its_stack() {
        let wide = tch::Tensor::zeros([2, 3], (tch::Kind::Float, tch::Device::Cpu));
        let error = Error::from(wide.f_matmul(&wide).unwrap_err()).to_string();
        assert_eq!(error, "libtorch: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)");
    }
}
