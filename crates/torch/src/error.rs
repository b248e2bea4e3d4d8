//! What can go wrong below the layers.

use std::path::PathBuf;

/// A failed libtorch call or an unusable device.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum Error {
    /// An exception that libtorch threw.
    #[error("libtorch: {0}")]
    Libtorch(String),
    /// There is no memory left for a tensor, on the host or on a GPU.
    #[error("out of memory: {0}")]
    #[diagnostic(code(torch::out_of_memory))]
    OutOfMemory(String),
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
    #[diagnostic(help(
        "start no more ranks on a host than it has GPUs, and let each see all of them: with Slurm, `--gpus-per-node`, not `--gpus-per-task`"
    ))]
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
        Self::of_libtorch(&text)
    }
}

impl Error {
    /// The exception whose text this is.
    pub(crate) fn of_libtorch(text: &str) -> Self {
        // The host's allocator, CUDA's, and C++'s own; an error that passed through a backward begins with our own words.
        const SIGNS: [&str; 4] = ["can't allocate memory", "CUDA out of memory", "bad_alloc", "out of memory: "];
        let text = without_backtrace(text);
        if !SIGNS.iter().any(|sign| text.contains(sign)) {
            return Self::Libtorch(text.to_owned());
        }
        let what = text.rsplit_once("out of memory: ").map_or(text, |(_, what)| what);
        // Where in libtorch's source it was noticed says nothing to a user.
        Self::OutOfMemory(what.rsplit_once("DefaultCPUAllocator: ").map_or(what, |(_, what)| what).to_owned())
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

    #[test]
    fn what_does_not_fit_into_memory_is_an_error_of_its_own() {
        // More than any machine can address.
        let error = Error::from(tch::Tensor::f_zeros([1 << 50], (tch::Kind::Float, tch::Device::Cpu)).unwrap_err());
        assert!(matches!(error, Error::OutOfMemory(_)), "{error:?}");
        let text = error.to_string();
        assert!(
            text.starts_with("out of memory: can't allocate memory: you tried to allocate 4503599627370496 bytes"),
            "{text}"
        );
        // The same after it has gone through a backward, which passes texts on.
        assert_eq!(Error::of_libtorch(&text).to_string(), text);
    }
}
