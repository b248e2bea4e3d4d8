//! Weight files that all ranks write together, each what it holds: whole files on the disk, no whole tensor in any memory.

use std::collections::BTreeMap;
use std::path::Path;

use nn::save::Plan;
use nn::{Named, PartOf, Share, SharedFile};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::spread::Spread;
use crate::team::Team;

impl Spread {
    /// What this rank writes of the tensors under a trained parameter's name, or that name and a suffix (`exp_avg`), of which
    /// it holds `held`. Tensors that it does not hold are in the list, too, for every rank must know a file's layout. `kind`: of all
    /// but those that the model keeps in f32.
    pub fn parts(&self, team: &Team, held: &[Named], kind: Option<Kind>) -> Result<Vec<PartOf>> {
        let by_name: BTreeMap<&str, &Named> = held.iter().map(|named| (named.name.as_str(), named)).collect();
        let names = self.held_by_any(team, held)?;
        names
            .into_iter()
            .map(|(name, shape, own)| {
                let kind = kind.map(|kind| if self.is_wide(&name) { Kind::Float } else { kind });
                self.part_of(by_name.get(name.as_str()).copied(), name, shape, kind.unwrap_or(own))
            })
            .collect()
    }

    fn part_of(&self, held: Option<&Named>, name: String, shape: Vec<i64>, kind: Kind) -> Result<PartOf> {
        let Some(Named { tensor, .. }) = held else {
            let elements = Tensor::f_zeros([0], (Kind::Float, Device::Cpu))?;
            return Ok(PartOf { name, shape, kind, runs: Vec::new(), elements });
        };
        let share = self.share(&name).ok_or_else(|| Error::Unfit(format!("`{name}` is no part of a parameter")))?;
        // A number that does not go by elements is the same for all shares.
        let number = Share::whole(&[]);
        let (share, writes) = match tensor.dim() {
            0 if !share.whole_shape().is_empty() => (number, self.leads()),
            _ => (share, self.is_first(&name)),
        };
        let runs = if writes { share.runs() } else { Vec::new() };
        Ok(PartOf { name, shape, kind, runs, elements: tensor.shallow_clone() })
    }
}

/// A weight file that all ranks write together, each what it holds. Who waits for whom is the callers' business: one rank
/// creates it, then all write, then one finishes it.
#[derive(Debug)]
pub struct Together {
    file: SharedFile,
    parts: Vec<PartOf>,
}

impl Together {
    /// Of this rank's `parts`.
    pub fn new(path: &Path, parts: Vec<PartOf>, metadata: &BTreeMap<String, String>) -> Result<Self> {
        Ok(Self { file: SharedFile::new(path, &parts, metadata)?, parts })
    }

    /// The files of a model, named and divided as by [`nn::save::save_model`], and the plan that knows their index.
    pub fn model(folder: &Path, stem: &str, parts: Vec<PartOf>, shard_bytes: u64) -> Result<(Vec<Self>, Plan)> {
        let bytes = |part: &PartOf| part.shape.iter().product::<i64>() as u64 * part.kind.elt_size_in_bytes() as u64;
        let sizes: Vec<(&str, u64)> = parts.iter().map(|part| (part.name.as_str(), bytes(part))).collect();
        let plan = Plan::new(stem, &sizes, shard_bytes);
        let mut parts: Vec<Option<PartOf>> = parts.into_iter().map(Some).collect();
        let file = |(name, members): &(String, Vec<usize>)| {
            let own = members.iter().filter_map(|index| parts[*index].take()).collect();
            Self::new(&folder.join(name), own, &plan.metadata())
        };
        let files = plan.files.iter().map(file).collect::<Result<_>>()?;
        Ok((files, plan))
    }

    /// Copies what this rank holds to host memory, so that training does not change it before it is written.
    pub fn keep(&mut self) -> Result<()> {
        Ok(self.parts.iter_mut().try_for_each(PartOf::keep)?)
    }

    /// Makes the file.
    pub fn create(&self) -> Result<()> {
        Ok(self.file.create()?)
    }

    /// Writes what this rank holds, and flushes it to disk.
    pub fn write(&self) -> Result<()> {
        Ok(self.file.write(&self.parts)?)
    }

    /// Gives the file its name.
    pub fn finish(&self) -> Result<()> {
        Ok(self.file.finish()?)
    }
}
