//! How much of a model a rank holds, from a build without numbers: for telling memory before anything runs.

use nn::{Parameters, Part, block_of};
use spec::Mesh;
use spec::mesh::Axis;

use crate::error::Result;
use crate::fsdp::Model;
use crate::outline::Outline;
use crate::spread::FSDP;

/// Parameters that come, go and get their gradients together: a block's, or those of no block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holding {
    /// The block's path; none for those of no block.
    pub path: Option<String>,
    /// Elements that layers compute with here.
    pub whole: usize,
    /// Those that the first rank holds between uses, which is no less than any other.
    pub held: usize,
    /// Of its stretch of a gathered block, which is as wide on all ranks.
    pub stretch: usize,
    /// Elements of adapters, held whole.
    pub adapter: usize,
    /// Shapes of its parameters, here: blocks with equal shapes are alike.
    pub shapes: Vec<Vec<i64>>,
    /// Its place in the chain of blocks.
    pub place: usize,
}

/// What a rank of each stage of `mesh` holds: first what is in no block, then its blocks in order. `parameters`: of a whole
/// `model`, [divided](nn::Builder::divided) as the mesh's are. `chunks`: runs of blocks of each stage. `parts`: into how many ranks'
/// parts weights go, 1 for whole ones.
pub fn holdings(
    mesh: &Mesh,
    chunks: usize,
    model: &Model,
    parameters: &Parameters,
    parts: usize,
) -> Result<Vec<Vec<Holding>>> {
    let mut all = vec![Holding::default()];
    let mut places = (0..model.blocks().len()).filter(|at| model.blocks()[*at].has_parameters());
    for named in &parameters.weights {
        let path = block_of(&named.name);
        if path.is_some() && all.last().and_then(|last| last.path.as_deref()) != path {
            let place = places.next().unwrap_or_default();
            all.push(Holding { path: path.map(str::to_owned), place, ..Holding::default() });
        }
        let at = if path.is_some() { all.len() - 1 } else { 0 };
        let (holding, part, count) = (&mut all[at], Part { index: 0, count: parts }, named.tensor.numel());
        holding.whole += count;
        holding.held += part.range(count).len();
        holding.stretch += part.width(count);
        holding.shapes.push(named.tensor.size());
    }
    for named in &parameters.adapter {
        let path = block_of(&named.name);
        if let Some(holding) = all.iter_mut().find(|holding| holding.path.as_deref() == path) {
            holding.adapter += named.tensor.numel();
        }
    }
    let stages = mesh.degree(Axis::Pp);
    if stages == 1 {
        return Ok(vec![all]);
    }
    let outline = Outline::of(model.as_ref(), parameters)?;
    let of = |stage: usize| {
        let runs = outline.runs(stage, stages, chunks)?;
        let kept: Vec<_> = runs.into_iter().map(|run| outline.paths(run)).collect();
        let here = |path: &String| kept.iter().any(|run| run.contains(path));
        Ok(all.iter().filter(|holding| holding.path.as_ref().is_none_or(here)).cloned().collect())
    };
    (0..stages).map(of).collect()
}

/// Into how many parts a mesh splits each parameter.
pub fn parts(mesh: &Mesh) -> usize {
    FSDP.into_iter().map(|axis| mesh.degree(axis)).product()
}
