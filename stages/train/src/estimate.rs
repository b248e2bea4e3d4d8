//! What a run would need of memory, told before anything runs: what a rank holds, from a build without numbers, and what
//! activations take, from [a probe](crate::probe), along one step as the trainer and `parallel` do it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use models::{ModelFolder, family_of};
use nn::optim::Kept;
use nn::{BuildOptions, Builder, Part};
use parallel::Holding;
use spec::mesh::Axis;
use spec::{Bucket, Mesh};
use stage::{Estimate, EstimateRequest, Failure, ResolvedSource, SourceKind};
use store::Memo;
use tch::{Device, Kind};

use crate::config::{self, Config};
use crate::dataset::Dataset;
use crate::plan::Rule;
use crate::prefetch::AHEAD;
use crate::probe::{self, Probe, Subject, Taken};
use crate::session::{adapter_spec, compute_kind};
use crate::{Parameters, Settings, between_ranks, experts, unusable};

/// Peak memory of a rank's step. Says nothing if the recipe is wrong, or before model and shards are there.
pub(crate) fn estimate(
    parameters: &Parameters,
    settings: &Settings,
    request: &EstimateRequest,
) -> Result<Estimate, Failure> {
    let nothing = Ok(Estimate::default());
    let Ok(loaded) = config::load(parameters.config.as_deref(), parameters.table(settings), &request.base_dir) else {
        return nothing;
    };
    let config = loaded.config;
    let (Ok(mesh), true) = (config.distributed.mesh(request.ranks), loaded.problems.is_empty()) else { return nothing };
    let Some(folder) = request.sources.get("model").and_then(folder) else { return nothing };
    let (Some(shards), Some(captions)) = (request.inputs.get("shards"), request.inputs.get("captions")) else {
        return nothing;
    };
    let dataset = Dataset::open(shards, captions)?;
    let folder = ModelFolder::open(folder).map_err(unusable)?;
    let memo = request.memo.as_deref().map(Memo::at);
    let cuda = request.device.starts_with("cuda");
    let memory_bytes = needed(&config, &mesh, (&folder, &dataset), cuda, memo.as_ref())?;
    Ok(Estimate { memory_bytes, ..Estimate::default() })
}

/// Where the model lies; one that is not here yet is not fetched for this.
fn folder(source: &ResolvedSource) -> Option<std::path::PathBuf> {
    if source.kind == SourceKind::Path {
        return Some(source.location.clone().into());
    }
    let repo = hub::Repo::model(&source.location).ok()?;
    hub::local_folder(&repo, source.commit.as_deref()?, &source.parts, &|_, _| ControlFlow::Break(())).ok()
}

/// Bytes, or nothing where the probe cannot tell.
fn needed(
    config: &Config,
    mesh: &Mesh,
    (folder, dataset): (&ModelFolder, &Dataset),
    cuda: bool,
    memo: Option<&Memo>,
) -> Result<Option<u64>, Failure> {
    let family = family_of(folder).map_err(unusable)?;
    let adapter = adapter_spec(config, family);
    let full = adapter.is_none();
    let storage = if full { Kind::Float } else { Kind::from(config.model.torch_dtype) };
    let options = BuildOptions { device: Device::Cpu, storage, trainable: true, adapter };
    let compute = match config.model.compute_dtype {
        None if cuda => Kind::BFloat16,
        _ => compute_kind(config, Device::Cpu),
    };
    let away = config.distributed.cpu_offload;
    let parts = parallel::parts(mesh);
    let sharded = parts > 1 || away;

    let mut builder = Builder::meta(options.clone());
    if let Some(division) = parallel::tokens::division(mesh) {
        builder = builder.divided(division);
    }
    let model = family.transformer(folder, &builder).map_err(unusable)?;
    let parameters = builder.finish().map_err(unusable)?;
    let stages =
        parallel::holdings(mesh, config.distributed.chunks, &model, &parameters, parts).map_err(between_ranks)?;

    let mut counts: BTreeMap<Bucket, usize> = BTreeMap::new();
    for item in dataset.items() {
        *counts.entry(item.bucket).or_default() += 1;
    }
    let in_step = sharded || mesh.degree(Axis::Pp) > 1 || parallel::tokens::division(mesh).is_some();
    let rule = Rule::new(config, mesh.data_group(0).len(), in_step, dataset.stride());
    let Some((bucket, batch, batches)) = rule.dearest(&counts) else { return Ok(None) };
    // As layers see them: gathered weights are in the kind that is computed in.
    let seen = if sharded && full { compute } else { storage };
    let mut kinds: Vec<&Holding> = Vec::new();
    for holding in stages.iter().flatten().filter(|holding| holding.path.is_some()) {
        if !kinds.iter().any(|kind| alike(kind, holding)) {
            kinds.push(holding);
        }
    }
    let subject = Subject {
        family,
        folder,
        options: BuildOptions { storage: seen, ..options },
        compute,
        blocks: kinds.iter().filter_map(|kind| kind.path.clone()).collect::<BTreeSet<_>>(),
        batch: batch as i64,
        latent: dataset.shape(bucket),
        tokens: dataset.max_tokens() as i64,
    };
    let Some(probe) = probe::probe(&subject, memo)? else { return Ok(None) };
    let taken = |holding: &Holding| -> Taken {
        let kind = kinds.iter().position(|kind| alike(kind, holding));
        kind.and_then(|at| probe.blocks.get(at)).copied().unwrap_or_default()
    };
    let roles = experts::all(config, family, folder).map_err(unusable)?;
    let Ok(trained) = experts::trained(config, &roles) else { return Ok(None) };
    let step = Step {
        config,
        kept: config.kept(),
        experts: (trained.len() / mesh.degree(Axis::Ep)).max(1) as u64,
        sharded,
        full,
        parts,
        cuda,
        weight: storage.elt_size_in_bytes() as u64,
        seen: seen.elt_size_in_bytes() as u64,
        mesh,
        probe: &probe,
    };
    let of = |(at, holdings): (usize, &Vec<Holding>)| {
        let taken: Vec<Taken> = holdings[1..].iter().map(&taken).collect();
        // The first backward comes when most micro-batches are under way, the last one when it is alone with the others' gradients.
        let flights = flights(stages.len(), at, config.distributed.chunks, batches);
        let moments = [(flights, batches > flights), (1, batches > 1)];
        moments.into_iter().map(|(flights, again)| step.peak(holdings, &taken, flights as u64, again)).max()
    };
    let tensors = stages.iter().enumerate().filter_map(of).max().unwrap_or(0);
    Ok(Some(if cuda {
        tensors
    } else {
        // What the host itself holds beside the step: batches under way, texts, and a little that the pool keeps.
        let tensors = tensors + probe.batch * (1 + AHEAD as u64) + dataset.text_bytes()?;
        // Each bucket has full batches, and a last one.
        let more = (2 * counts.len()).clamp(1, MANY_SHAPES) - 1;
        probe.base + probe.shape * more as u64 + tensors + tensors / 32
    }))
}

/// Micro-batches whose activations a stage of a pipeline holds at once, as its schedule has it.
fn flights(stages: usize, stage: usize, chunks: usize, batches: usize) -> usize {
    let after = stages - 1 - stage;
    let under_way = if chunks == 1 { after + 1 } else { (2 * after + (chunks - 1) * stages + 1).div_ceil(chunks) };
    under_way.min(batches)
}

/// Whether two blocks have the same layers.
fn alike(a: &Holding, b: &Holding) -> bool {
    a.shapes == b.shapes && a.adapter == b.adapter
}

/// Bytes in use, and the most of them.
#[derive(Default)]
struct Meter {
    now: u64,
    most: u64,
}

impl Meter {
    fn take(&mut self, bytes: u64) {
        self.now += bytes;
        self.see(0);
    }

    fn give(&mut self, bytes: u64) {
        self.now = self.now.saturating_sub(bytes);
    }

    /// So much more for a moment.
    fn see(&mut self, bytes: u64) {
        self.most = self.most.max(self.now + bytes);
    }
}

/// One step of a rank, from memory's point of view.
struct Step<'a> {
    config: &'a Config,
    kept: Kept,
    /// Denoisers that it trains.
    experts: u64,
    /// Whether weights are held in parts.
    sharded: bool,
    /// Whether the weights are trained.
    full: bool,
    /// Ranks that have a weight between them.
    parts: usize,
    /// Whether it runs on a GPU.
    cuda: bool,
    /// Bytes of a weight that is held, and as layers see it.
    weight: u64,
    seen: u64,
    mesh: &'a Mesh,
    probe: &'a Probe,
}

impl Step<'_> {
    /// The most that is in use at any moment; `flights` micro-batches are under way at once, `again`: after the backward of others.
    fn peak(&self, holdings: &[Holding], taken: &[Taken], flights: u64, again: bool) -> u64 {
        let (root, blocks) = (&holdings[0], &holdings[1..]);
        let (probe, options) = (self.probe, self.config.distributed.options());
        let gradients: Vec<u64> = holdings.iter().map(|holding| self.gradients(holding)).collect();
        let all: u64 = gradients.iter().sum();
        let mut memory = Meter::default();
        memory.take(self.experts * holdings.iter().map(|holding| self.always(holding)).sum::<u64>());
        memory.take(probe.batch + (self.experts - 1) * all);
        let resting = memory.now;

        // What micro-batches before the last one left: gradients, or whole ones that wait for it.
        let deferred = self.sharded && self.full && again && options.defer;
        memory.take(match (again, deferred) {
            (false, _) => 0,
            (true, false) => all,
            (true, true) => holdings.iter().map(|holding| 4 * self.gathered(holding)).sum(),
        });

        let whole = |holding: &Holding| if self.sharded { self.seen * holding.whole as u64 } else { 0 };
        let coming = |holding: &Holding| if self.sharded { self.seen * self.gathered(holding) } else { 0 };
        let ahead = |at: usize| blocks[at + 1..].iter().take(options.forward_ahead).map(coming).sum::<u64>();
        let behind = |at: usize| blocks[..at].iter().rev().take(options.backward_ahead).map(coming).sum::<u64>();
        let stays_here = |at: usize| !options.reshard.unwrap_or(at + 1 < blocks.len());
        let own = |bytes: u64| bytes / self.spread();
        let recomputed = |at: usize| self.config.distributed.recompute.covers(blocks[at].place);
        let stays = |at: usize| own(if recomputed(at) { taken[at].outputs } else { taken[at].kept });

        // Forward.
        memory.take(whole(root));
        let beside = |holding: &Holding| if self.cuda { coming(holding) } else { 0 };
        memory.see(beside(root));
        memory.see(probe.embed.forward);
        let between: u64 = (0..blocks.len()).map(stays).sum();
        memory.take(flights * probe.embed.kept + (flights - 1) * between);
        for (at, block) in blocks.iter().enumerate() {
            let here = whole(block);
            memory.see(here + beside(block));
            memory.see(here + ahead(at) + own(taken[at].forward));
            memory.take(stays(at));
            if stays_here(at) {
                memory.take(here);
            }
        }
        memory.see(probe.head.forward);
        memory.take(probe.head.kept);

        // Backward. What a probe's backward gives to its parameters is as layers see them; parts come after.
        memory.see(probe.head.backward);
        memory.give(probe.head.kept);
        // Whole gradients of the block before, while they are on their way.
        let mut leaving = 0;
        for (at, block) in blocks.iter().enumerate().rev() {
            let here = whole(block);
            if stays_here(at) {
                memory.give(here);
            }
            let around = here + behind(at) + leaving;
            if recomputed(at) {
                // The outputs that it kept went with the block after.
                memory.give(own(taken[at].outputs));
                memory.see(around + own(taken[at].forward + taken[at].outputs));
                memory.see(around + own(taken[at].kept) + self.backward(&taken[at], block, again));
            } else {
                memory.see(around + self.backward(&taken[at], block, again));
                memory.give(own(taken[at].kept));
            }
            if self.sharded && self.full {
                // Gradients as layers have them, beside what they are added up in.
                leaving = self.leaving(block, deferred);
                memory.see(behind(at) + here + leaving);
            }
            if !again {
                memory.take(gradients[at + 1]);
            }
        }
        memory.see(leaving + probe.embed.backward);
        // What is in no block goes last.
        if self.sharded && self.full {
            memory.see(leaving + whole(root) + self.leaving(root, deferred));
        }
        // The step: narrow state is widened for some elements at a time.
        let narrow = self.kept != Kept { seed: self.kept.seed, ..Kept::default() };
        memory.now = resting + all;
        let copies = !self.sharded && self.mesh.world() > 1;
        memory.see(if narrow { WIDENING } else { 0 } + if copies { all.min(BUCKET) } else { 0 });
        memory.most
    }

    /// Whether weights, gradients and state are elsewhere than what counts.
    fn away(&self) -> bool {
        self.cuda && self.config.distributed.cpu_offload
    }

    /// Ranks that have a sample's tokens between them.
    fn spread(&self) -> u64 {
        (self.mesh.degree(Axis::Tp) * self.mesh.degree(Axis::Cp)) as u64
    }

    /// Elements of a gathered block, filled up.
    fn gathered(&self, holding: &Holding) -> u64 {
        (holding.stretch * self.parts) as u64
    }

    /// Whole gradients in f32, unless they were there before, and what comes of them from the other ranks.
    fn leaving(&self, holding: &Holding, deferred: bool) -> u64 {
        let reduce = self.config.distributed.options().reduce;
        let (whole, narrow) = (self.gathered(holding), reduce.elt_size_in_bytes() as u64);
        let sent = if reduce == Kind::Float { 0 } else { narrow * whole };
        let came = narrow * (whole - holding.stretch as u64);
        came + sent + if deferred { 0 } else { 4 * whole }
    }

    /// Backward through one block with the gradients of its parameters, which tokens elsewhere do not make smaller; those that
    /// are there already are added to, one after the other.
    fn backward(&self, block: &Taken, holding: &Holding, again: bool) -> u64 {
        let trained = if self.full { self.seen * holding.whole as u64 } else { 4 * holding.adapter as u64 };
        let largest = holding.shapes.iter().map(|shape| elements(shape)).max().unwrap_or(0) as u64;
        let beside = block.backward.saturating_sub(trained) / self.spread();
        let there = if again && !self.sharded { trained.min(self.seen * largest) } else { trained };
        // At its most, what it began with may have gone.
        (beside + there).min(block.backward)
    }

    /// What is there all the time: weights, optimizer state, averages.
    fn always(&self, holding: &Holding) -> u64 {
        let part = Part { index: 0, count: self.parts };
        let trained = |held: usize, of: usize| {
            let ema = if self.config.ema.is_some() { 4 * held } else { 0 };
            (ema + self.kept.exp_avg.bytes(held, of) + self.kept.exp_avg_sq.bytes(held, of)) as u64
        };
        let adapter = 4 * holding.adapter as u64 + trained(holding.adapter, 0);
        if self.away() {
            return if self.full { 0 } else { adapter };
        }
        let weights = self.weight * holding.held as u64;
        if !self.full {
            return weights + adapter;
        }
        let sizes = holding.shapes.iter().map(|shape| elements(shape));
        weights + sizes.map(|size| trained(part.range(size).len(), size)).sum::<u64>()
    }

    /// Gradients once a backward is over, f32.
    fn gradients(&self, holding: &Holding) -> u64 {
        match (self.full, self.away()) {
            (false, _) => 4 * holding.adapter as u64,
            (true, true) => 0,
            (true, false) => 4 * holding.held as u64,
        }
    }
}

fn elements(shape: &[i64]) -> usize {
    shape.iter().product::<i64>() as usize
}

/// Shapes for which kernels keep what they need; they forget the oldest ones.
const MANY_SHAPES: usize = 16;
/// What a million elements of narrow state take while they are wide: two moments, places, random bits, levels.
const WIDENING: u64 = 48 << 20;
/// Gradients in one tensor on their way between copies.
const BUCKET: u64 = parallel::ddp::BUCKET_BYTES as u64;
