//! Weight files that all ranks write together, each what it holds: whole files on the disk, no whole tensor in any memory.

use std::collections::BTreeMap;
use std::path::Path;

use nn::save::Plan;
use nn::{Named, PartOf, SharedFile};
use tch::Kind;

use crate::error::{Error, Result};
use crate::fsdp::Shards;
use crate::team::Team;

impl Shards {
    /// The tensors `held` by this rank under a parameter's name, or that name and a suffix (`exp_avg`), as parts of files.
    pub fn parts(&self, held: &[Named], kind: Option<Kind>) -> Result<Vec<PartOf>> {
        held.iter().map(|named| self.part_of(named, kind)).collect()
    }

    fn part_of(&self, named: &Named, kind: Option<Kind>) -> Result<PartOf> {
        let (Named { name, tensor }, part) = (named, self.part());
        let kind = kind.unwrap_or(tensor.kind());
        if tensor.dim() == 0 {
            // The same number on all ranks.
            let elements = tensor.f_reshape([-1])?.f_narrow(0, 0, i64::from(part.index == 0))?;
            return Ok(PartOf { name: name.clone(), shape: Vec::new(), kind, first: 0, elements });
        }
        let own = self.whole_shape(name).or_else(|| self.whole_shape(name.rsplit_once('.')?.0));
        let shape = own.ok_or_else(|| Error::Unfit(format!("`{name}` is no part of a parameter")))?.to_vec();
        let first = part.range(shape.iter().product::<i64>() as usize).start;
        Ok(PartOf { name: name.clone(), shape, kind, first, elements: tensor.shallow_clone() })
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
