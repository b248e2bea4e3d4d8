//! What activations take: one block of each kind, all weights zero, goes forward and back on this machine with few tokens of one
//! sample, and the pool of host tensors writes down what comes and goes. Everything that comes grows by so much for each token of
//! the picture and of the text, so three small passes tell what any number of them takes.

use std::collections::BTreeSet;

use models::{Encoded, Family, ModelFolder, Text};
use nn::{BuildOptions, Builder, Inputs, SharedBlock};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use stage::Failure;
use store::{FileStamp, Memo};
use tch::{Device, Kind, Tensor};

use crate::unusable;

/// Bytes of one part of a model: of `embed`, of a block, or of `head`.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Taken {
    /// Kept from its forward to its backward, its outputs among them.
    pub(crate) kept: u64,
    /// The outputs alone: what is kept where it is computed again.
    pub(crate) outputs: u64,
    /// Most of a forward, above what was there before.
    pub(crate) forward: u64,
    /// Most of a backward, above what was there before it with `kept`: the gradients of its parameters, all at once, too.
    pub(crate) backward: u64,
}

/// What was found.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Probe {
    /// Resident memory of the process without tensors, once a pass has run.
    pub(crate) base: u64,
    /// More of it for every further shape of a batch: what kernels keep for it.
    pub(crate) shape: u64,
    /// Noise, latents and conditions of a batch.
    pub(crate) batch: u64,
    pub(crate) embed: Taken,
    /// As many as there were `blocks`.
    pub(crate) blocks: Vec<Taken>,
    pub(crate) head: Taken,
}

/// What is looked at.
pub(crate) struct Subject<'a> {
    pub(crate) family: &'static dyn Family,
    pub(crate) folder: &'a ModelFolder,
    pub(crate) options: BuildOptions,
    pub(crate) compute: Kind,
    /// One block's path of each kind.
    pub(crate) blocks: BTreeSet<String>,
    /// Of a batch: samples, latent shape, tokens of text.
    pub(crate) batch: i64,
    pub(crate) latent: Vec<i64>,
    pub(crate) tokens: i64,
}

/// Places of a latent, and tokens of text, of the smallest pass.
const FEW: (i64, i64) = (64, 4);

impl Subject<'_> {
    /// What the answer depends on: this program, the model's shape, and all of the subject.
    fn question(&self) -> Option<Value> {
        let program = FileStamp::of(&std::env::current_exe().ok()?).ok()?;
        let shape = fs_err::read_to_string(self.folder.path.join("transformer").join("config.json")).ok()?;
        let Self { options, compute, blocks, batch, latent, tokens, .. } = self;
        let options = format!("{options:?} {compute:?}");
        Some(json!({
            "program": format!("{program:?}"), "shape": shape, "options": options,
            "blocks": blocks, "batch": batch, "latent": latent, "tokens": tokens,
        }))
    }
}

/// The probe of `subject`, from `memo` if it was made before. `None` where the system does not tell what memory is in use.
pub(crate) fn probe(subject: &Subject<'_>, memo: Option<&Memo>) -> Result<Option<Probe>, Failure> {
    let known = memo.zip(subject.question());
    if let Some(found) = known.as_ref().and_then(|(memo, question)| memo.recall("memory", question)) {
        return Ok(found);
    }
    let found = measure(subject)?;
    if let Some((memo, question)) = &known {
        memo.remember("memory", question, &found);
    }
    Ok(found)
}

fn measure(subject: &Subject<'_>) -> Result<Option<Probe>, Failure> {
    torch::memory::pool();
    let (latent, tokens) = (fewer(&subject.latent), subject.tokens.min(FEW.1));
    let mut wider = latent.clone();
    if let Some(rows) = wider.iter_mut().rev().nth(1) {
        *rows *= 2;
    }
    let keys = subject.family.image_tokens(&subject.latent[1..]) + subject.tokens;
    nn::attention::choose_as_for(Some(keys));
    torch::device::set_threads(torch::device::threads().max(2));
    // The first pass takes what stays for good.
    pass(subject, &latent, tokens)?;
    torch::memory::trim();
    let (base, before) = (torch::memory::resident(), torch::memory::anonymous());
    let few = pass(subject, &latent, tokens)?;
    let pixels = pass(subject, &wider, tokens)?;
    let text = pass(subject, &latent, 2 * tokens)?;
    nn::attention::choose_as_for(None);
    torch::memory::trim();
    let after = torch::memory::anonymous();
    let places = |latent: &[i64]| latent.iter().product::<i64>() as f64;
    // What a sample takes beside its tokens is little.
    let times = |whole: f64, few: f64| subject.batch as f64 * whole / few - 1.0;
    let more = [times(places(&subject.latent), places(&latent)), times(subject.tokens as f64, tokens.max(1) as f64)];
    let (Some(base), Some((before, after))) = (base, before.zip(after)) else { return Ok(None) };
    // Two shapes more than the first.
    let shape = after.saturating_sub(before) / 2;
    let others = pixels.iter().zip(&text);
    let parts: Vec<Part> =
        few.iter().zip(others).map(|(few, (pixels, text))| few.grown([pixels, text], more)).collect();
    let mut taken = parts.iter().map(Part::taken);
    let (embed, batch) = (taken.next().unwrap_or_default(), parts.first().map_or(0, |part| part.also));
    let head = taken.next_back().unwrap_or_default();
    Ok(Some(Probe { base, shape, batch: batch as u64, embed, blocks: taken.collect(), head }))
}

/// A latent of the same kind with few places.
fn fewer(latent: &[i64]) -> Vec<i64> {
    let mut few = latent.to_vec();
    // Channels stay; frames go first.
    if let [_, frames, _, _] = few.as_mut_slice() {
        *frames = 1;
    }
    while few[1..].iter().product::<i64>() > FEW.0
        && let Some(longest) = few[1..].iter_mut().max().filter(|longest| **longest > 2)
    {
        *longest = *longest / 4 * 2;
    }
    few
}

/// What one part of a pass took and gave back, in order.
#[derive(Debug)]
struct Part {
    forward: Vec<i64>,
    backward: Vec<i64>,
    /// Bytes of the outputs, and of what backward begins with.
    outputs: i64,
    seeds: i64,
    /// Bytes of the batch.
    also: i64,
}

impl Part {
    fn taken(&self) -> Taken {
        let bytes = |count: i64| u64::try_from(count).unwrap_or(0);
        Taken {
            kept: bytes(self.forward.iter().sum()),
            outputs: bytes(self.outputs),
            forward: bytes(most(&self.forward)),
            backward: bytes(most(&self.backward) + self.seeds),
        }
    }

    /// This part with so many more of what `others` have once more.
    fn grown(&self, others: [&Self; 2], more: [f64; 2]) -> Self {
        let number = |own: i64, others: [i64; 2]| {
            let by = others.into_iter().zip(more).map(|(other, more)| (other - own) as f64 * more);
            own + by.sum::<f64>() as i64
        };
        let list = |of: fn(&Self) -> &[i64]| -> Vec<i64> {
            let mut lists = [of(self), of(others[0]), of(others[1])].map(<[i64]>::to_vec);
            // Of a few numbers a kernel may make other pieces: then the highest point and the end are what can be compared.
            if lists.iter().any(|list| list.len() != lists[0].len()) {
                lists = lists.map(|list| vec![most(&list), list.iter().sum::<i64>() - most(&list)]);
            }
            let [own, a, b] = lists;
            own.into_iter().zip(a.into_iter().zip(b)).map(|(own, (a, b))| number(own, [a, b])).collect()
        };
        let one = |of: fn(&Self) -> i64| number(of(self), others.map(of));
        Self {
            forward: list(|part| &part.forward),
            backward: list(|part| &part.backward),
            outputs: one(|part| part.outputs),
            seeds: one(|part| part.seeds),
            also: one(|part| part.also),
        }
    }
}

/// The highest point on the way.
fn most(events: &[i64]) -> i64 {
    let sums = events.iter().scan(0, |sum, event| {
        *sum += event;
        Some(*sum)
    });
    sums.max().unwrap_or(0).max(0)
}

/// `embed`, a block of each kind, `head`.
fn pass(subject: &Subject<'_>, latent: &[i64], tokens: i64) -> Result<Vec<Part>, Failure> {
    let builder = Builder::zeros(subject.options.clone()).only(subject.blocks.clone());
    let model = subject.family.transformer(subject.folder, &builder).map_err(unusable)?;
    let parameters = builder.finish().map_err(unusable)?;
    let trained: Vec<Tensor> = parameters.trainable().into_iter().map(|named| named.tensor).collect();
    let forget = || torch::autograd::clear_gradients(&trained).map_err(Failure::from_diagnostic);
    let inputs = inputs(subject, latent, tokens)?;
    // Latents and noise, and the conditions.
    let batch = 2 * bytes([&inputs.latents]) + bytes(inputs.conditions.values());

    let (embedded, forward) = torch::memory::recorded(|| model.embed(&inputs).map_err(unusable));
    let mut state = embedded?;
    let given: Vec<&Tensor> = state.stream.iter().chain(&state.shared).collect();
    let mut parts = vec![part(forward, &given)?];
    parts[0].also = batch;
    forget()?;
    let leaf = |x: &Tensor, needs: bool| x.detach().set_requires_grad(needs);
    for (block, wanted) in model.blocks().iter().zip(wanted(subject, model.blocks())?) {
        if !wanted {
            continue;
        }
        // A block after others has inputs that need gradients; what all share needs them if `embed` is trained.
        let stream: Vec<Tensor> = state.stream.iter().map(|x| leaf(x, true)).collect();
        let shared: Vec<Tensor> = state.shared.iter().map(|x| leaf(x, x.requires_grad())).collect();
        let (outputs, forward) = torch::memory::recorded(|| block.forward(&stream, &shared).map_err(unusable));
        let outputs = outputs?;
        let part = part(forward, &outputs.iter().collect::<Vec<_>>())?;
        if block.has_parameters() {
            parts.push(part);
        }
        forget()?;
        state.stream = outputs.iter().map(|x| leaf(x, true)).collect();
    }
    state.shared = state.shared.iter().map(|x| leaf(x, x.requires_grad())).collect();
    let (loss, forward) = torch::memory::recorded(|| {
        let prediction = model.head(state).map_err(unusable)?;
        // As the loss is: in f32, with what it is held against.
        Ok::<_, Failure>((prediction.to_kind(Kind::Float) - &inputs.latents).square().sum(Kind::Float))
    });
    parts.push(part(forward, &[&loss?])?);
    Ok(parts)
}

/// With its backward from these outputs.
fn part(forward: Vec<i64>, outputs: &[&Tensor]) -> Result<Part, Failure> {
    let roots: Vec<Tensor> = outputs.iter().filter(|x| x.requires_grad()).map(|x| x.shallow_clone()).collect();
    // They come from the part after, which has gone by then.
    let seeds: Vec<Tensor> = roots.iter().map(Tensor::ones_like).collect();
    let (done, backward) = torch::memory::recorded(|| {
        if roots.is_empty() {
            return Ok(());
        }
        torch::autograd::backward(&roots, &seeds, false).map_err(Failure::from_diagnostic)
    });
    done?;
    Ok(Part { forward, backward, outputs: bytes(outputs.iter().copied()), seeds: bytes(&seeds), also: 0 })
}

/// Which blocks of the chain run: those that were built, and those without parameters.
fn wanted(subject: &Subject<'_>, blocks: &[SharedBlock]) -> Result<Vec<bool>, Failure> {
    let meta = Builder::meta(subject.options.clone());
    subject.family.transformer(subject.folder, &meta).map_err(unusable)?;
    let parameters = meta.finish().map_err(unusable)?;
    let mut paths: Vec<&str> = parameters.weights.iter().filter_map(|named| nn::block_of(&named.name)).collect();
    paths.dedup();
    let mut paths = paths.into_iter();
    let wants =
        |block: &SharedBlock| !block.has_parameters() || paths.next().is_some_and(|path| subject.blocks.contains(path));
    Ok(blocks.iter().map(wants).collect())
}

fn inputs(subject: &Subject<'_>, latent: &[i64], tokens: i64) -> Result<Inputs, Failure> {
    let Subject { family, folder, compute, .. } = subject;
    let host = (Kind::Float, Device::Cpu);
    let mut text = Text::new();
    for input in family.text_inputs(folder).map_err(unusable)? {
        let row = |shape: &[i64]| Some(Tensor::zeros(shape, host));
        let (embedding, pooled) =
            if input.pooled { (None, row(&[input.width])) } else { (row(&[tokens, input.width]), None) };
        text.insert(input.encoder.to_owned(), Encoded { tokens, embedding, pooled });
    }
    let conditions = family.conditions(&[&text], tokens as usize, Device::Cpu, *compute).map_err(unusable)?;
    let guided = family.takes_guidance(folder).map_err(unusable)?;
    Ok(Inputs {
        sigma: Tensor::full([1], 0.5, host),
        guidance: guided.then(|| Tensor::full([1], 3.5, host)),
        latents: Tensor::ones([&[1], latent].concat(), host),
        conditions,
        compute: *compute,
    })
}

fn bytes<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> i64 {
    tensors.into_iter().map(|x| (x.numel() * x.kind().elt_size_in_bytes()) as i64).sum()
}
