//! Exponential moving average of trained weights.

use tch::Kind;

use crate::builder::Named;
use crate::error::{Error, Result};
use crate::weights::Weights;

/// f32 averages of some parameters, beside them on their device.
#[derive(Debug)]
pub struct Ema {
    parameters: Vec<Named>,
    shadow: Vec<Named>,
}

impl Ema {
    /// Starts at the parameters' present values.
    pub fn new(parameters: Vec<Named>) -> Result<Self> {
        let copy = |named: &Named| -> Result<Named> {
            let tensor = named.tensor.f_detach()?.f_to_kind(Kind::Float)?.copy();
            Ok(Named { name: named.name.clone(), tensor })
        };
        let shadow = parameters.iter().map(copy).collect::<Result<_>>()?;
        Ok(Self { parameters, shadow })
    }

    /// Moves the averages: `shadow -= (1 - decay) * (shadow - parameter)`.
    pub fn update(&mut self, decay: f64) -> Result<()> {
        tch::no_grad(|| {
            for (shadow, named) in self.shadow.iter_mut().zip(&self.parameters) {
                let _ = shadow.tensor.f_lerp_(&named.tensor.f_to_kind(Kind::Float)?, 1.0 - decay)?;
            }
            Ok(())
        })
    }

    /// Exchanges the averages and the parameters: once to use the averages, once more to train on.
    pub fn swap(&mut self) -> Result<()> {
        tch::no_grad(|| {
            for (shadow, named) in self.shadow.iter_mut().zip(&mut self.parameters) {
                let kept = named.tensor.f_detach()?.f_to_kind(Kind::Float)?.copy();
                named.tensor.f_copy_(&shadow.tensor)?;
                shadow.tensor.f_copy_(&kept)?;
            }
            Ok(())
        })
    }

    /// The averages under their parameters' names.
    pub fn state(&self) -> &[Named] {
        &self.shadow
    }

    /// Takes up saved averages, one for each parameter.
    pub fn load_state(&mut self, saved: &Weights) -> Result<()> {
        for named in &mut self.shadow {
            let tensor = saved.tensor_of_shape(&named.name, &named.tensor.size())?;
            tch::no_grad(|| named.tensor.f_copy_(&tensor))?;
        }
        match saved.names().count() - self.shadow.len() {
            0 => Ok(()),
            count => Err(Error::Unexpected {
                origin: saved.origin().to_owned(),
                count,
                names: "averages of other weights".to_owned(),
            }),
        }
    }
}
