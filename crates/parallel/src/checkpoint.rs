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
    /// it holds `held`. Tensors that it does not hold are in the list, too, for every rank must know a file's layout.
    pub fn parts(&self, team: &Team, held: &[Named], kind: Option<Kind>) -> Result<Vec<PartOf>> {
        let by_name: BTreeMap<&str, &Named> = held.iter().map(|named| (named.name.as_str(), named)).collect();
        let names = self.held_by_any(team, held)?;
        names
            .into_iter()
            .map(|(name, shape)| self.part_of(by_name.get(name.as_str()).copied(), name, shape, kind))
            .collect()
    }

    fn part_of(&self, held: Option<&Named>, name: String, shape: Vec<i64>, kind: Option<Kind>) -> Result<PartOf> {
        let Some(Named { tensor, .. }) = held else {
            // What is trained, and what is kept for it, is in f32.
            let (kind, elements) = (kind.unwrap_or(Kind::Float), Tensor::f_zeros([0], (Kind::Float, Device::Cpu))?);
            return Ok(PartOf { name, shape, kind, runs: Vec::new(), elements });
        };
        let share = self.share(&name).ok_or_else(|| Error::Unfit(format!("`{name}` is no part of a parameter")))?;
        // A number that does not go by elements is the same for all shares.
        let number = Share::whole(&[]);
        let (share, writes) = match tensor.dim() {
            0 if !share.whole_shape().is_empty() => (&number, self.leads()),
            _ => (share, self.is_first(&name)),
        };
        let runs = if writes { share.runs() } else { Vec::new() };
        Ok(PartOf { name, shape, kind: kind.unwrap_or(tensor.kind()), runs, elements: tensor.shallow_clone() })
    }
}

/// Writes one file.
pub fn save(team: &Team, path: &Path, parts: &[PartOf], metadata: &BTreeMap<String, String>) -> Result<()> {
    let file = SharedFile::new(path, parts, metadata)?;
    if team.leads() {
        file.create()?;
    }
    team.barrier()?;
    file.write(parts)?;
    team.barrier()?;
    if team.leads() {
        file.finish()?;
    }
    Ok(())
}

/// Writes a model as [`nn::save::save_model`] does.
pub fn save_model(team: &Team, folder: &Path, stem: &str, parts: Vec<PartOf>, shard_bytes: u64) -> Result<()> {
    let bytes = |part: &PartOf| part.shape.iter().product::<i64>() as u64 * part.kind.elt_size_in_bytes() as u64;
    let sizes: Vec<(&str, u64)> = parts.iter().map(|part| (part.name.as_str(), bytes(part))).collect();
    let plan = Plan::new(stem, &sizes, shard_bytes);
    let mut parts: Vec<Option<PartOf>> = parts.into_iter().map(Some).collect();
    for (file, members) in &plan.files {
        let own: Vec<PartOf> = members.iter().filter_map(|index| parts[*index].take()).collect();
        save(team, &folder.join(file), &own, &plan.metadata())?;
    }
    if team.leads() {
        plan.write_index(folder, stem)?;
    }
    Ok(())
}
