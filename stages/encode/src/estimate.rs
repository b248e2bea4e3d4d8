//! What a run would have to encode, told from keys alone: no picture is decoded, no weight is loaded.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::PathBuf;

use spec::counted;
use stage::{Estimate, EstimateRequest, Failure, Items};
use store::{Digest, Memo};
use tables::{SampleInfo, TableReader};

use crate::captions::Wanted;
use crate::latents::{Keys, missing};
use crate::parameters::Parameters;
use crate::plan::{Grid, Item, Plan};
use crate::stock::{Captions, Latents, Stock};
use crate::{identity, model_folder, unusable};

/// So many files are named.
const NAMED: usize = 3;

pub(crate) fn estimate(parameters: &Parameters, request: &EstimateRequest) -> Result<Estimate, Failure> {
    let (Some(model), Some(input)) = (request.sources.get("model"), request.inputs.get("samples")) else {
        return Ok(Estimate::default());
    };
    // A model that is not here yet is not fetched for this.
    let Ok(folder) = model_folder(model, &|_, _| ControlFlow::Break(())) else { return Ok(Estimate::default()) };
    let memo = Memo::at(request.memo.as_deref().unwrap_or(&PathBuf::from("nowhere")));
    let family = models::family_of(&folder).map_err(unusable)?;
    let samples = TableReader::open(&input.join("samples")).map_err(unusable)?;
    let plan = Plan::new(parameters, Grid::of(family, &folder).map_err(unusable)?, &samples)?;
    let changed: Option<BTreeSet<&str>> = request.changed.as_ref().map(|c| c.iter().map(String::as_str).collect());

    let by = Keys::new(parameters, &identity::vae(family, &folder, &memo)?);
    let keys: Vec<Digest> = plan.items.iter().map(|item| by.of(item)).collect();
    let stock = Stock::<Latents>::gather(&request.previous, None, &keys.iter().copied().collect())?;
    let mut todo: Vec<&Item> = missing(&plan, &keys, &stock).into_iter().map(|(item, _)| item).collect();
    let stale = todo.len();
    let mut sources = Vec::new();
    if let Some(changed) = &changed {
        let known: BTreeSet<_> = todo.iter().map(|item| item.at).collect();
        for (at, row) in samples.rows::<SampleInfo>().flatten().filter(|(_, row)| changed.contains(row.source.as_str()))
        {
            sources.push(row.source);
            let found = plan.items.binary_search_by_key(&at, |item| item.at).ok().filter(|_| !known.contains(&at));
            todo.extend(found.map(|number| &plan.items[number]));
        }
    } else {
        for item in todo.iter().take(NAMED + 1) {
            sources.push(samples.get::<SampleInfo>(item.at).map_err(unusable)?.source);
        }
    }
    let because = match todo.len() {
        0 => None,
        // The VAE or a parameter changed, or nothing was there.
        _ if stale == plan.items.len() => None,
        _ => Some(format!("pixels of {} changed or are new", told(&sources, todo.len()))),
    };
    let latents = Items { name: "latents".into(), total: plan.items.len() as u64, todo: todo.len() as u64, because };

    let encoders = identity::text_encoders(family, &folder, &memo)?;
    let wanted = Wanted::new(parameters, &plan.captions, &encoders);
    let stock = Stock::<Captions>::gather(&request.previous, None, &wanted.keys())?;
    let todo = wanted.missing(&stock);
    let because = (!todo.is_empty() && todo.len() < plan.captions.len()).then(|| {
        format!("{} changed or are new", todo.values().take(NAMED).map(|t| quoted(t)).collect::<Vec<_>>().join(", "))
    });
    let captions =
        Items { name: "captions".into(), total: plan.captions.len() as u64, todo: todo.len() as u64, because };

    let mut facts = Vec::new();
    if !plan.refused.is_empty() {
        facts.push(format!("refused by policy: {} of {}", plan.refused.len(), counted(plan.rows, "sample")));
    }
    Ok(Estimate { items: vec![latents, captions], facts, ..Estimate::default() })
}

fn told(sources: &[String], all: usize) -> String {
    let named: Vec<_> = sources.iter().take(NAMED).map(|source| format!("`{source}`")).collect();
    let more = all.saturating_sub(named.len());
    if more > 0 { format!("{} and {more} more", named.join(", ")) } else { named.join(", ") }
}

fn quoted(text: &str) -> String {
    let start: String = text.chars().take(30).collect();
    if start.len() < text.len() { format!("{start:?}…") } else { format!("{start:?}") }
}
