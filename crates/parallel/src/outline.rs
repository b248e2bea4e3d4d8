//! What a whole model is like, for ranks that hold only some of it.

use std::collections::BTreeSet;
use std::ops::Range;

use nn::{Parameters, Transformer, block_of};

use crate::error::{Error, Result};
use crate::pp;

/// A model's blocks, and what is trained of it.
#[derive(Debug, Clone)]
pub struct Outline {
    /// The chain: the path of each block that has parameters, and its cost.
    blocks: Vec<(Option<String>, f64)>,
    /// Name and shape, in the order of the model.
    trained: Vec<(String, Vec<i64>)>,
    /// Names of those that stay in f32.
    wide: BTreeSet<String>,
}

impl Outline {
    /// Of a model that was built whole, perhaps without its numbers.
    pub fn of(model: &dyn Transformer, parameters: &Parameters) -> Result<Self> {
        let mut paths: Vec<&str> = Vec::new();
        for path in parameters.weights.iter().filter_map(|named| block_of(&named.name)) {
            if paths.last() != Some(&path) {
                paths.push(path);
            }
        }
        let with_parameters = model.blocks().iter().filter(|block| block.has_parameters()).count();
        if paths.len() != with_parameters || paths.iter().collect::<BTreeSet<_>>().len() != paths.len() {
            let message = format!("the model has {with_parameters} blocks, but parameters of {}", paths.len());
            return Err(Error::Unfit(message));
        }
        let mut paths = paths.into_iter();
        let path = |has: bool| if has { paths.next().map(str::to_owned) } else { None };
        let costs = model.blocks().iter().map(|block| (block.has_parameters(), block.cost()));
        let blocks = costs.scan(path, |path, (has, cost)| Some((path(has), cost))).collect();
        let trained = parameters.trainable().into_iter().map(|named| {
            let shape = parameters.shares.get(&named.name).map_or_else(Vec::new, |share| share.whole_shape().to_vec());
            (named.name, shape)
        });
        Ok(Self { blocks, trained: trained.collect(), wide: parameters.wide.clone() })
    }

    /// What is trained: name and shape.
    pub fn trained(&self) -> &[(String, Vec<i64>)] {
        &self.trained
    }

    /// Whether the model keeps that parameter in f32 whatever the others are in.
    pub(crate) fn is_wide(&self, name: &str) -> bool {
        self.wide.contains(name)
    }

    /// Which blocks each of so many stages has; fails if there are not enough.
    pub fn stages(&self, count: usize) -> Result<Vec<Range<usize>>> {
        let costs: Vec<f64> = self.blocks.iter().map(|(_, cost)| *cost).collect();
        pp::cuts(&costs, count).ok_or_else(|| {
            let blocks = costs.iter().filter(|cost| **cost > 0.0).count();
            Error::Unfit(format!("{blocks} blocks do not make {count} stages"))
        })
    }

    /// The `count` runs of blocks that stage `place` of `stages` has.
    pub(crate) fn runs(&self, place: usize, stages: usize, count: usize) -> Result<Vec<Range<usize>>> {
        Ok(self.stages(stages * count)?.into_iter().skip(place).step_by(stages).collect())
    }

    /// The paths of some blocks of the chain.
    pub(crate) fn paths(&self, blocks: Range<usize>) -> BTreeSet<String> {
        self.blocks[blocks].iter().filter_map(|(path, _)| path.clone()).collect()
    }
}
