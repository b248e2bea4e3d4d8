//! Starting values, each a pure function of (seed, parameter name).

use tch::Tensor;

use crate::error::Result;
use crate::rng::Stream;

/// How a parameter starts when no weights are loaded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All 0.
    Zeros,
    /// All 1.
    Ones,
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform in [-1/sqrt(fan_in), 1/sqrt(fan_in)): what PyTorch gives the weights of Linear and Conv
    /// (`kaiming_uniform_(a=sqrt(5))`) and their biases.
    FanIn(i64),
}

impl Init {
    /// f32 values on the CPU.
    pub(crate) fn values(self, seed: u64, name: &str, shape: &[i64]) -> Result<Tensor> {
        let count = usize::try_from(shape.iter().product::<i64>()).unwrap_or(0);
        let mut stream = Stream::new(seed, &["init".into(), name.into()]);
        let values = match self {
            Self::Zeros => vec![0.0; count],
            Self::Ones => vec![1.0; count],
            Self::Normal { std } => stream.normals(count).into_iter().map(|z| (f64::from(z) * std) as f32).collect(),
            Self::FanIn(fan_in) => {
                let bound = 1.0 / (fan_in.max(1) as f64).sqrt();
                (0..count).map(|_| ((2.0 * stream.uniform() - 1.0) * bound) as f32).collect()
            }
        };
        Ok(Tensor::f_from_slice::<f32>(&values)?.f_reshape(shape)?)
    }
}
