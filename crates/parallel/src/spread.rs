//! The order in which techniques are applied to a model, and the one way in which a training step talks to them.

use std::sync::Arc;

use nn::{Named, Parameters, Part};
use spec::mesh::Axis;

use crate::ddp::{BUCKET_BYTES, Reducer};
use crate::error::{Error, Result};
use crate::fsdp::{self, Model, Shards};
use crate::team::Team;

/// How a model is spread over the ranks.
#[derive(Debug)]
pub struct Spread {
    /// Parameters in parts; none if every rank has all of them.
    shards: Option<Shards>,
    /// Adds up the gradients of what several ranks hold alike.
    copies: Reducer,
    /// Whether what is trained is held in parts.
    trained_in_parts: bool,
}

/// The part of each parameter that this rank holds, if parameters are split.
pub fn part(team: &Team) -> Option<Part> {
    let (index, count) = team.place(Axis::DpShard);
    (count > 1).then_some(Part { index, count })
}

/// Spreads a model that was built with [`part`].
pub fn spread(team: &Team, model: Model, parameters: &Parameters) -> Result<(Model, Spread)> {
    let trained = parameters.trainable();
    let (model, shards) = match part(team) {
        Some(_) => {
            let (model, shards) = fsdp::apply(model, parameters, team.along(&[Axis::DpShard])?)?;
            (model, Some(shards))
        }
        None => (model, None),
    };
    let trained_in_parts = shards.is_some() && parameters.adapter_spec().is_none();
    // Parts are alike on the replicas of the shards, whole parameters on all ranks.
    let alike = if trained_in_parts { team.along(&[Axis::DpReplicate])? } else { Arc::clone(team.data()) };
    let copies = Reducer::new(alike, &trained, BUCKET_BYTES)?;
    Ok((model, Spread { shards, copies, trained_in_parts }))
}

impl Spread {
    /// The parts, if parameters are split.
    pub fn shards(&self) -> Option<&Shards> {
        self.shards.as_ref()
    }

    /// The shards, if what is trained is held in parts.
    pub fn trained_shards(&self) -> Option<&Shards> {
        self.shards.as_ref().filter(|_| self.trained_in_parts)
    }

    /// Whether ranks must run the model as often as each other.
    pub fn in_step(&self) -> bool {
        self.shards.is_some()
    }

    /// Before the last backward of a step.
    pub fn before_last_backward(&self) {
        if !self.trained_in_parts {
            self.copies.arm();
        }
    }

    /// After each backward.
    pub fn after_backward(&self) -> Result<()> {
        self.shards.as_ref().map_or(Ok(()), Shards::end_backward)
    }

    /// After the last backward: gradients are those of the global batch.
    pub fn finish(&self) -> Result<()> {
        if let Some(shards) = self.trained_shards() {
            shards.finish()?;
        }
        self.copies.finish()
    }

    /// The global l2 norm of the gradients.
    pub fn gradient_norm(&self, trained: &[Named]) -> Result<f64> {
        match self.trained_shards() {
            Some(shards) => shards.gradient_norm(trained),
            None => Ok(nn::optim::gradient_norm(trained)?),
        }
    }

    /// See [`nn::optim::clip_gradients`].
    pub fn clip(&self, trained: &[Named], max_norm: f64) -> Result<f64> {
        let Some(shards) = self.trained_shards() else { return Ok(nn::optim::clip_gradients(trained, max_norm)?) };
        let norm = shards.gradient_norm(trained)?;
        if !norm.is_finite() {
            // Names this rank's own, if it has any.
            nn::optim::clip_gradients(trained, max_norm)?;
            return Err(nn::Error::NonFinite { norm, names: "parts that other ranks hold".to_owned() }.into());
        }
        nn::optim::clip_part(trained, norm, max_norm)?;
        Ok(norm)
    }

    /// The failure between ranks behind an error of forward or backward, which only pass texts on.
    pub fn failure(&self) -> Option<Error> {
        self.copies.failure().or_else(|| self.shards.as_ref().and_then(Shards::failure))
    }
}
