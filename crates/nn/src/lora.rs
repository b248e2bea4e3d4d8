//! Low-rank adapters of linear layers: which layers, how large, how they start, and their part of a forward pass.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLock};

use tch::{Device, Kind, Tensor};
use torch::Shared;
use wildmatch::WildMatch;

use crate::builder::Named;
use crate::error::{Error, Result, nearest};
use crate::init::Init;
use crate::linear::like;
use crate::rng::Stream;
use crate::share::Share;

/// How A starts; B starts at 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// Uniform in ±1/sqrt(in), PEFT's default.
    #[default]
    KaimingUniform,
    /// Normal with variance 2 / (in + rank).
    XavierNormal,
}

/// LoRA over a model.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Rank of the update.
    pub rank: i64,
    /// The update is scaled by alpha / rank.
    pub alpha: f64,
    /// Layers to adapt. With `*`: the full dotted name. Without: the full name or its last segments (`to_q`, `attn.to_q`).
    pub targets: Vec<String>,
    /// Targets without `*` are full names only, as those of an adapter file.
    pub full_names: bool,
    /// Layers to leave out, in the form of targets.
    pub exclude: Vec<String>,
    /// Share of the adapter's input that is dropped; takes effect while dropout keys are set.
    pub dropout: f64,
    /// Seed of A and of dropout.
    pub seed: u64,
    /// How A starts.
    pub start: Start,
    /// Ranks of layers that differ from `rank`, by the same patterns.
    pub rank_pattern: BTreeMap<String, i64>,
    /// Alphas of layers that differ from `alpha`, by the same patterns.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Scale by alpha / sqrt(rank) instead (rank-stabilised LoRA).
    pub rslora: bool,
}

impl Spec {
    /// Adapters of one rank without dropout.
    pub fn new(rank: i64, alpha: f64, targets: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            rank,
            alpha,
            targets: targets.into_iter().map(Into::into).collect(),
            full_names: false,
            exclude: Vec::new(),
            dropout: 0.0,
            seed: 0,
            start: Start::default(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            rslora: false,
        }
    }

    /// Whether the linear layer `name` gets an adapter.
    pub fn selects(&self, name: &str) -> bool {
        self.targets.iter().any(|target| self.hits(target, name))
            && !self.exclude.iter().any(|pattern| matches(pattern, name))
    }

    fn hits(&self, target: &str, name: &str) -> bool {
        if self.full_names && !target.contains('*') { target == name } else { matches(target, name) }
    }

    /// Rank of the layer `name`.
    pub fn rank_of(&self, name: &str) -> i64 {
        lookup(&self.rank_pattern, name).unwrap_or(self.rank)
    }

    /// Alpha of the layer `name`.
    pub fn alpha_of(&self, name: &str) -> f64 {
        lookup(&self.alpha_pattern, name).unwrap_or(self.alpha)
    }

    /// Factor on `B A` in the layer `name`.
    pub fn scale_of(&self, name: &str) -> f64 {
        let rank = self.rank_of(name) as f64;
        self.alpha_of(name) / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Fails on settings without meaning, and on patterns that fit none of `linears`, the model's linear layers.
    pub fn check(&self, linears: &[String]) -> Result<()> {
        let ranks = self.rank_pattern.values().chain([&self.rank]);
        if let Some(rank) = ranks.into_iter().find(|rank| **rank < 1) {
            return Err(Error::Adapter(format!("rank must be at least 1, not {rank}")));
        }
        let alphas = self.alpha_pattern.values().chain([&self.alpha]);
        if let Some(alpha) = alphas.into_iter().find(|alpha| !alpha.is_finite()) {
            return Err(Error::Adapter(format!("alpha must be a number, not {alpha}")));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::Adapter(format!("dropout must be at least 0 and below 1, not {}", self.dropout)));
        }
        if self.targets.is_empty() {
            return Err(Error::Adapter("has no targets".to_owned()));
        }
        let targets = self.targets.iter().map(|pattern| ("target", pattern));
        let others = self.exclude.iter().map(|pattern| ("exclusion", pattern));
        let ranks = self.rank_pattern.keys().map(|pattern| ("rank pattern", pattern));
        let alphas = self.alpha_pattern.keys().map(|pattern| ("alpha pattern", pattern));
        for (what, pattern) in targets.chain(others).chain(ranks).chain(alphas) {
            let hit = |name: &String| if what == "target" { self.hits(pattern, name) } else { matches(pattern, name) };
            if !linears.iter().any(hit) {
                return Err(Error::UnmatchedAdapter {
                    what,
                    pattern: pattern.clone(),
                    help: suggestion(pattern, linears),
                });
            }
        }
        if !linears.iter().any(|name| self.selects(name)) {
            return Err(Error::Adapter("excludes every layer that it targets".to_owned()));
        }
        Ok(())
    }

    /// The adapter of one layer.
    pub(crate) fn adapter(&self, place: &Place<'_>, controls: Arc<Controls>) -> Result<Adapter> {
        let Place { path, ref a, ref b, device, trainable, meta } = *place;
        let (rank, input) = (self.rank_of(path), a.whole_shape()[1]);
        if rank < 1 {
            return Err(Error::Adapter(format!("rank must be at least 1, not {rank}")));
        }
        let leaf = |suffix: &str, share: &Share, init: Init| -> Result<Tensor> {
            let values = if meta {
                Tensor::f_zeros([1], (Kind::Float, Device::Cpu))?.f_expand(share.shape(), false)?
            } else {
                let whole = init.values(self.seed, &format!("{path}.{suffix}"), share.whole_shape())?;
                share.of(&whole)?.f_to_device(device)?
            };
            Ok(values.f_set_requires_grad(trainable)?)
        };
        let start = match self.start {
            Start::KaimingUniform => Init::FanIn(input),
            Start::XavierNormal => Init::Normal { std: (2.0 / (input + rank) as f64).sqrt() },
        };
        Ok(Adapter {
            a: leaf(A, a, start)?.into(),
            b: leaf(B, b, Init::Zeros)?.into(),
            scale: self.scale_of(path),
            dropout: Dropout { share: self.dropout, seed: self.seed, path: path.to_owned() },
            controls,
        })
    }
}

/// Suffixes of an adapter's two parameters.
pub(crate) const A: &str = "lora_A.weight";
pub(crate) const B: &str = "lora_B.weight";

/// Where an adapter goes.
pub(crate) struct Place<'a> {
    pub(crate) path: &'a str,
    /// Of `[rank, in]`.
    pub(crate) a: Share,
    /// Of `[out, rank]`.
    pub(crate) b: Share,
    pub(crate) device: Device,
    pub(crate) trainable: bool,
    pub(crate) meta: bool,
}

/// `scale * B(A(x))` of one layer.
#[derive(Debug)]
pub(crate) struct Adapter {
    a: Shared,
    b: Shared,
    scale: f64,
    dropout: Dropout,
    controls: Arc<Controls>,
}

impl Adapter {
    pub(crate) fn named(&self, path: &str) -> [Named; 2] {
        [(A, &self.a), (B, &self.b)]
            .map(|(suffix, tensor)| Named { name: format!("{path}.{suffix}"), tensor: tensor.handle() })
    }

    /// `y` plus this adapter's part, in the kind of `x`.
    pub(crate) fn add_to(&self, y: Tensor, x: &Tensor) -> Result<Tensor> {
        let strength = self.controls.strength();
        if strength == 0.0 {
            return Ok(y);
        }
        let kept = self.dropout.apply(x, &self.controls)?;
        let low = kept.f_linear(&like(&self.a, x)?, None::<Tensor>)?;
        let update = low.f_linear(&like(&self.b, x)?, None::<Tensor>)?;
        Ok(y.f_add(&update.f_mul_scalar(self.scale * strength)?)?)
    }
}

#[derive(Debug)]
struct Dropout {
    share: f64,
    seed: u64,
    path: String,
}

impl Dropout {
    fn apply(&self, x: &Tensor, controls: &Controls) -> Result<Tensor> {
        let state = controls.0.read().unwrap_or_else(PoisonError::into_inner);
        let Some(keys) = state.dropout_keys.as_ref().filter(|_| self.share > 0.0) else { return Ok(x.shallow_clone()) };
        let shape = x.size();
        if shape.first() != Some(&(keys.len() as i64)) {
            return Err(Error::Invalid(format!(
                "{} dropout keys for an input of shape {shape:?} in `{}`",
                keys.len(),
                self.path
            )));
        }
        let (per_row, kept) = (shape[1..].iter().product::<i64>() as usize, (1.0 / (1.0 - self.share)) as f32);
        let mut mask = Vec::with_capacity(per_row * keys.len());
        for &key in keys {
            let mut stream = Stream::new(self.seed, &["lora dropout".into(), self.path.as_str().into(), key.into()]);
            mask.extend(
                (0..per_row).map(|_| if f64::from(stream.bits32()) < self.share * 2f64.powi(32) { 0.0 } else { kept }),
            );
        }
        let mask = Tensor::f_from_slice(&mask)?.f_reshape(&shape)?.f_to_device(x.device())?.f_to_kind(x.kind())?;
        Ok(x.f_mul(&mask)?)
    }
}

/// What all adapters of a model obey together.
#[derive(Debug)]
pub(crate) struct Controls(RwLock<State>);

#[derive(Debug)]
struct State {
    strength: f64,
    dropout_keys: Option<Vec<u64>>,
}

impl Default for Controls {
    fn default() -> Self {
        Self(RwLock::new(State { strength: 1.0, dropout_keys: None }))
    }
}

impl Controls {
    pub(crate) fn set_strength(&self, strength: f64) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).strength = strength;
    }

    pub(crate) fn strength(&self) -> f64 {
        self.0.read().unwrap_or_else(PoisonError::into_inner).strength
    }

    pub(crate) fn set_dropout_keys(&self, keys: Option<&[u64]>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).dropout_keys = keys.map(<[u64]>::to_vec);
    }
}

/// Automodel's rule (`*` over the whole name) joined with PEFT's (the name or its last segments).
fn matches(pattern: &str, name: &str) -> bool {
    if pattern.contains('*') {
        return WildMatch::new(pattern).matches(name);
    }
    name.strip_suffix(pattern).is_some_and(|head| head.is_empty() || head.ends_with('.'))
}

fn lookup<T: Copy>(patterns: &BTreeMap<String, T>, name: &str) -> Option<T> {
    let exact = patterns.get(name);
    exact.or_else(|| patterns.iter().find(|(pattern, _)| matches(pattern, name)).map(|(_, value)| value)).copied()
}

/// Names most like `pattern`: with block numbers as `*` for a wildcard, else the last segments, as many as the pattern has.
fn suggestion(pattern: &str, linears: &[String]) -> Option<String> {
    let segments = pattern.split('.').count();
    let candidates: BTreeSet<String> = linears
        .iter()
        .map(|name| {
            let parts: Vec<_> = name.split('.').collect();
            let end = |segments: usize| parts[parts.len().saturating_sub(segments)..].join(".");
            if pattern.strip_prefix("*.").is_some_and(|rest| !rest.contains('*')) {
                format!("*.{}", end(segments - 1))
            } else if pattern.contains('*') {
                let number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
                parts.iter().map(|part| if number(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
            } else {
                end(segments)
            }
        })
        .collect();
    nearest(pattern, candidates.iter().map(String::as_str)).or_else(|| {
        let ends: BTreeSet<&str> = linears.iter().filter_map(|name| name.rsplit('.').next()).collect();
        let ends: Vec<String> = ends.iter().take(12).map(|end| format!("`{end}`")).collect();
        Some(format!("names of its linear layers end in {}", ends.join(", ")))
    })
}

#[cfg(test)]
#[path = "lora_tests.rs"]
mod tests;
