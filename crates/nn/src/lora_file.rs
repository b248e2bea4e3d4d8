//! Adapter files of diffusers (`pytorch_lora_weights.safetensors`) and of PEFT (`adapter_model.safetensors` with
//! `adapter_config.json`).
//!
//! Layouts as written by diffusers 0.42 `save_lora_weights` and PEFT 0.21 `save_pretrained`. Module names must be the model's
//! own; files in other trainers' naming are refused by name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use crate::builder::{Named, Parameters, missing};
use crate::error::{Error, Result, nearest};
use crate::lora::{A, B, Spec};
use crate::save::{replace, save_safetensors};
use crate::weights::Weights;

const DIFFUSERS_FILE: &str = "pytorch_lora_weights.safetensors";
const DIFFUSERS_PREFIX: &str = "transformer.";
const DIFFUSERS_METADATA: &str = "lora_adapter_metadata";
const PEFT_FILE: &str = "adapter_model.safetensors";
const PEFT_PREFIX: &str = "base_model.model.";
const PEFT_CONFIG: &str = "adapter_config.json";

/// What names A and B in the layouts in use.
const PAIRS: [[&str; 2]; 4] = [
    [A, B],
    ["lora_A.default.weight", "lora_B.default.weight"],
    ["lora_down.weight", "lora_up.weight"],
    ["lora.down.weight", "lora.up.weight"],
];

/// Writes the adapter in both layouts, then reads both back and compares every factor and scale. In diffusers' layout B has the
/// scale in it, and alpha is the rank: so the strength is right for those who read tensors alone, too. Returns the three files.
pub fn save(folder: &Path, parameters: &Parameters, base_model: Option<&str>) -> Result<Vec<PathBuf>> {
    let spec =
        parameters.adapter_spec().ok_or_else(|| Error::Invalid("the model has no adapter to save".to_owned()))?;
    let modules: Vec<_> = parameters.adapter.iter().filter_map(|named| module_of(&named.name, A)).collect();
    let scaled: Vec<Named> = parameters.adapter.iter().map(|named| scaled(named, spec)).collect::<Result<_>>()?;
    let plain = Spec {
        alpha: spec.rank as f64,
        alpha_pattern: spec.rank_pattern.iter().map(|(name, rank)| (name.clone(), *rank as f64)).collect(),
        rslora: false,
        ..spec.clone()
    };
    let format = ("format".to_owned(), "pt".to_owned());

    let prefixed: Map<_, _> = config(&plain, &modules, base_model)
        .into_iter()
        .map(|(key, value)| (format!("{DIFFUSERS_PREFIX}{key}"), value))
        .collect();
    let described = (DIFFUSERS_METADATA.to_owned(), format!("{:#}", Value::Object(prefixed)));
    let diffusers = folder.join(DIFFUSERS_FILE);
    write(&diffusers, DIFFUSERS_PREFIX, &scaled, &BTreeMap::from([format.clone(), described]))?;

    let peft = folder.join(PEFT_FILE);
    write(&peft, PEFT_PREFIX, &parameters.adapter, &BTreeMap::from([format]))?;
    let settings = folder.join(PEFT_CONFIG);
    let config = Value::Object(config(spec, &modules, base_model));
    replace(&settings, |file| Ok(writeln!(file, "{config:#}")?))?;

    AdapterFile::open(&diffusers)?.verify(&scaled, &plain)?;
    AdapterFile::open(&peft)?.verify(&parameters.adapter, spec)?;
    Ok(vec![diffusers, peft, settings])
}

/// A factor with its layer's scale, if it is B.
fn scaled(named: &Named, spec: &Spec) -> Result<Named> {
    let scale = module_of(&named.name, B).map_or(1.0, |module| spec.scale_of(module));
    let tensor = tch::no_grad(|| named.tensor.f_detach()?.f_mul_scalar(scale))?;
    Ok(Named { name: named.name.clone(), tensor })
}

fn write(path: &Path, prefix: &str, adapter: &[Named], metadata: &BTreeMap<String, String>) -> Result<()> {
    let names: Vec<_> = adapter.iter().map(|named| format!("{prefix}{}", named.name)).collect();
    let tensors = names.iter().map(String::as_str).zip(adapter.iter().map(|named| &named.tensor));
    save_safetensors(path, tensors, metadata)
}

/// The fields of PEFT's LoraConfig that every release since 0.9 knows. Each module is a target by its full name.
fn config(spec: &Spec, modules: &[&str], base_model: Option<&str>) -> Map<String, Value> {
    let mut targets = modules.to_vec();
    targets.sort_unstable();
    let ranks =
        modules.iter().filter(|name| spec.rank_of(name) != spec.rank).map(|&name| (name, json!(spec.rank_of(name))));
    let alphas = modules
        .iter()
        .filter(|name| spec.alpha_of(name) != spec.alpha)
        .map(|&name| (name, number(spec.alpha_of(name))));
    let (ranks, alphas): (BTreeMap<_, _>, BTreeMap<_, _>) = (ranks.collect(), alphas.collect());
    let config = json!({
        "alpha_pattern": alphas,
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "lora_alpha": number(spec.alpha),
        "lora_dropout": spec.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": spec.rank,
        "rank_pattern": ranks,
        "revision": null,
        "target_modules": targets,
        "task_type": null,
        "use_dora": false,
        "use_rslora": spec.rslora,
    });
    config.as_object().cloned().unwrap_or_default()
}

/// Whole numbers without a fraction, since PEFT declares alpha an int.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}

/// An adapter as read from disk.
#[derive(Debug)]
pub struct AdapterFile {
    path: PathBuf,
    modules: BTreeMap<String, Module>,
    dropout: f64,
    rslora: bool,
}

#[derive(Debug)]
struct Module {
    a: Tensor,
    b: Tensor,
    rank: i64,
    alpha: f64,
}

impl AdapterFile {
    /// A file, or a folder with one in either layout. Without metadata, alpha is the rank or the module's `.alpha` tensor.
    pub fn open(path: &Path) -> Result<Self> {
        let path = if path.is_dir() { find(path)? } else { path.to_owned() };
        let weights = Weights::file(&path)?;
        let settings = settings(&path, &weights)?;
        let bad = |reason: String| Error::File { path: path.clone(), reason };

        let (mut factors, mut alphas) = (BTreeMap::new(), BTreeMap::new());
        for key in weights.names() {
            if let Some(what) = foreign(key) {
                return Err(bad(format!(
                    "`{key}` is {what}; files of diffusers and PEFT are read (diffusers' `load_lora_weights` and \
                     `save_lora_weights` convert others)"
                )));
            }
            let name = strip(key);
            if let Some(module) = module_of(name, "alpha") {
                alphas.insert(module.to_owned(), f64::try_from(weights.tensor(key)?.f_to_kind(Kind::Double)?)?);
                continue;
            }
            let part = PAIRS.iter().flat_map(|pair| pair.iter().enumerate());
            let Some((side, module)) =
                part.into_iter().find_map(|(side, suffix)| Some((side, module_of(name, suffix)?)))
            else {
                return Err(bad(format!("`{key}` is no LoRA factor of a linear layer")));
            };
            let tensor = weights.tensor(key)?.f_to_kind(Kind::Float)?;
            let slot: &mut [Option<Tensor>; 2] = factors.entry(module.to_owned()).or_default();
            if slot[side].replace(tensor).is_some() {
                return Err(bad(format!("`{module}` comes twice")));
            }
        }
        if let Some(module) = alphas.keys().find(|module| !factors.contains_key(*module)) {
            return Err(bad(format!("`{module}` has an alpha but no factors")));
        }
        if settings.given && !alphas.is_empty() {
            return Err(bad("alphas are given both as tensors and as metadata".to_owned()));
        }

        let mut modules = BTreeMap::new();
        for (name, [a, b]) in factors {
            let (Some(a), Some(b)) = (a, b) else {
                return Err(bad(format!("`{name}` has only one of its two factors")));
            };
            let ((rank, _), (_, columns)) = (a.size2()?, b.size2()?);
            let declared = settings.ranks.of(&name).map_or(rank, |rank| rank as i64);
            if rank != columns || rank != declared || rank == 0 {
                let shapes = format!("A {:?} and B {:?}", a.size(), b.size());
                return Err(bad(format!("`{name}`: {shapes} are no factors of rank {declared}")));
            }
            let alpha = alphas.get(&name).copied().or_else(|| settings.alphas.of(&name)).unwrap_or(rank as f64);
            modules.insert(name, Module { a, b, rank, alpha });
        }
        if modules.is_empty() {
            return Err(bad("holds no LoRA factors".to_owned()));
        }
        Ok(Self { path, modules, dropout: settings.dropout, rslora: settings.rslora })
    }

    /// The file that was read.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What to build a model with, before [`fill`](Self::fill). Building fails if the file names a layer the model lacks.
    pub fn spec(&self) -> Spec {
        let mut spec = Spec::new(1, 1.0, self.modules.keys().cloned());
        if let Some(first) = self.modules.values().next() {
            (spec.rank, spec.alpha) = (first.rank, first.alpha);
        }
        spec.full_names = true;
        spec.dropout = self.dropout;
        spec.rslora = self.rslora;
        for (name, module) in &self.modules {
            if module.rank != spec.rank {
                spec.rank_pattern.insert(name.clone(), module.rank);
            }
            if module.alpha != spec.alpha {
                spec.alpha_pattern.insert(name.clone(), module.alpha);
            }
        }
        spec
    }

    /// Copies the factors into a model built with [`spec`](Self::spec).
    pub fn fill(&self, parameters: &Parameters) -> Result<()> {
        for named in &parameters.adapter {
            let shape = named.tensor.size();
            let found = self.factor(&named.name, &shape)?;
            if found.size() != shape {
                let origin = self.path.display().to_string();
                return Err(Error::Shape { origin, name: named.name.clone(), found: found.size(), expected: shape });
            }
            tch::no_grad(|| named.tensor.shallow_clone().f_copy_(found))?;
        }
        Ok(())
    }

    /// Adds `strength` times the update to the weights themselves, for an adapter beside the one the model was built with.
    pub fn merge_into(&self, parameters: &Parameters, strength: f64) -> Result<()> {
        let spec = self.spec();
        for (name, module) in &self.modules {
            let key = format!("{name}.weight");
            let Some(named) = parameters.weights.iter().find(|named| named.name == key) else {
                let known = parameters.weights.iter().filter_map(|named| named.name.strip_suffix(".weight"));
                return Err(Error::UnmatchedAdapter {
                    what: "target",
                    pattern: name.clone(),
                    help: nearest(name, known),
                });
            };
            let update = module.b.f_matmul(&module.a)?.f_mul_scalar(spec.scale_of(name) * strength)?;
            if update.size() != named.tensor.size() {
                let origin = self.path.display().to_string();
                return Err(Error::Shape { origin, name: key, found: update.size(), expected: named.tensor.size() });
            }
            let device = named.tensor.device();
            tch::no_grad(|| {
                let sum = named.tensor.f_to_kind(Kind::Float)?.f_add(&update.f_to_device(device)?)?;
                named.tensor.shallow_clone().f_copy_(&sum)
            })?;
        }
        Ok(())
    }

    /// Fails unless this file holds the factors of `adapter` with the scales of `spec`, and no others.
    fn verify(&self, adapter: &[Named], spec: &Spec) -> Result<()> {
        let bad = |name: &str| Error::File {
            path: self.path.clone(),
            reason: format!("`{name}` did not read back as written"),
        };
        let read = self.spec();
        for named in adapter {
            let found = self.factor(&named.name, &named.tensor.size())?;
            let module = module_of(&named.name, A).or_else(|| module_of(&named.name, B)).unwrap_or_default();
            // Not `equal`, which takes NaN for different from itself; a diverged adapter must still be saved for inspection.
            let ours = named.tensor.f_detach()?.f_to_device(tch::Device::Cpu)?.f_contiguous()?;
            let same = torch::host::bytes(&ours)? == torch::host::bytes(&found.f_contiguous()?)?;
            if !same || read.scale_of(module) != spec.scale_of(module) {
                return Err(bad(&named.name));
            }
        }
        let complete = self.modules.len() * 2 == adapter.len();
        if complete { Ok(()) } else { Err(bad("the number of layers")) }
    }

    fn factor(&self, name: &str, shape: &[i64]) -> Result<&Tensor> {
        let a = module_of(name, A).and_then(|module| Some(&self.modules.get(module)?.a));
        let b = module_of(name, B).and_then(|module| Some(&self.modules.get(module)?.b));
        let origin = self.path.display().to_string();
        a.or(b).ok_or_else(|| missing(&origin, name, shape, self.modules.keys().map(String::as_str)))
    }
}

/// What a LoraConfig says, in either place.
struct Settings {
    given: bool,
    ranks: PerModule,
    alphas: PerModule,
    dropout: f64,
    rslora: bool,
}

/// A value with exceptions by module.
#[derive(Default)]
struct PerModule {
    common: Option<f64>,
    others: BTreeMap<String, f64>,
}

impl PerModule {
    fn of(&self, module: &str) -> Option<f64> {
        let ends =
            |pattern: &str| module.strip_suffix(pattern).is_some_and(|head| head.is_empty() || head.ends_with('.'));
        let exact = self.others.get(module);
        exact
            .or_else(|| self.others.iter().find(|(pattern, _)| ends(pattern)).map(|(_, value)| value))
            .copied()
            .or(self.common)
    }
}

fn settings(path: &Path, weights: &Weights) -> Result<Settings> {
    let (origin, json) = if let Some(text) = weights.metadata().get(DIFFUSERS_METADATA) {
        (path.to_owned(), text.clone())
    } else {
        let config = path.with_file_name(PEFT_CONFIG);
        if !config.is_file() || !weights.names().all(|key| key.starts_with(PEFT_PREFIX)) {
            let (ranks, alphas) = (PerModule::default(), PerModule::default());
            return Ok(Settings { given: false, ranks, alphas, dropout: 0.0, rslora: false });
        }
        let text = fs_err::read_to_string(&config)?;
        (config, text)
    };
    let bad = |reason: String| Error::File { path: origin.clone(), reason };
    let all: BTreeMap<String, Value> =
        serde_json::from_str(&json).map_err(|error| bad(format!("LoRA settings: {error}")))?;
    let all: BTreeMap<_, _> =
        all.iter().map(|(key, value)| (key.strip_prefix(DIFFUSERS_PREFIX).unwrap_or(key), value)).collect();
    let flag = |key: &str| all.get(key).is_some_and(|value| value.as_bool() == Some(true));
    for key in ["use_dora", "lora_bias", "fan_in_fan_out", "use_qalora"] {
        if flag(key) {
            return Err(bad(format!("LoRA settings: `{key}` is not supported")));
        }
    }
    let per_module = |common: &str, pattern: &str| -> Result<PerModule> {
        let number = |key: &str, value: &Value| {
            value.as_f64().ok_or_else(|| bad(format!("LoRA settings: `{key}` is no number")))
        };
        let mut values =
            PerModule { common: all.get(common).map(|value| number(common, value)).transpose()?, ..Default::default() };
        for (module, value) in all.get(pattern).and_then(|value| value.as_object()).into_iter().flatten() {
            // PEFT takes these for regular expressions; what it writes are names, at most anchored and escaped.
            let name = module.trim_start_matches('^').trim_end_matches('$').replace("\\.", ".");
            if name.contains(['*', '+', '?', '(', '[', '|', '\\', '^', '$']) {
                return Err(bad(format!(
                    "LoRA settings: `{pattern}` holds `{module}`; only module names are supported"
                )));
            }
            values.others.insert(name, number(pattern, value)?);
        }
        Ok(values)
    };
    Ok(Settings {
        given: true,
        ranks: per_module("r", "rank_pattern")?,
        alphas: per_module("lora_alpha", "alpha_pattern")?,
        dropout: all.get("lora_dropout").and_then(|value| value.as_f64()).unwrap_or(0.0),
        rslora: flag("use_rslora"),
    })
}

/// The adapter file of a folder.
fn find(folder: &Path) -> Result<PathBuf> {
    if let Some(path) =
        [DIFFUSERS_FILE, PEFT_FILE].map(|name| folder.join(name)).into_iter().find(|path| path.is_file())
    {
        return Ok(path);
    }
    let entries: Vec<_> = fs_err::read_dir(folder)?.collect::<Result<_, _>>()?;
    let paths = entries.into_iter().map(|entry| entry.path());
    let mut found: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors")).collect();
    found.sort();
    match <[_; 1]>::try_from(found) {
        Ok([single]) => Ok(single),
        Err(found) => {
            let reason = format!(
                "holds neither `{DIFFUSERS_FILE}` nor `{PEFT_FILE}`, and {} other safetensors files",
                found.len()
            );
            Err(Error::File { path: folder.to_owned(), reason })
        }
    }
}

/// What a key of another trainer, or for another component, is.
fn foreign(key: &str) -> Option<&'static str> {
    const KINDS: [(&str, &str); 7] = [
        ("lora_te", "a text encoder's, in kohya's naming; only the denoiser takes a LoRA here"),
        ("text_encoder", "a text encoder's; only the denoiser takes a LoRA here"),
        ("lora_unet_", "in kohya's naming"),
        ("lora_transformer_", "in kohya's naming"),
        ("diffusion_model.", "in ComfyUI's naming"),
        ("double_blocks.", "in the naming of Black Forest Labs"),
        ("single_blocks.", "in the naming of Black Forest Labs"),
    ];
    KINDS.iter().find(|(prefix, _)| key.starts_with(prefix)).map(|(_, what)| *what)
}

fn strip(key: &str) -> &str {
    [DIFFUSERS_PREFIX, PEFT_PREFIX].iter().find_map(|prefix| key.strip_prefix(prefix)).unwrap_or(key)
}

/// `blocks.0.to_q` of `blocks.0.to_q.lora_A.weight`.
fn module_of<'a>(name: &'a str, suffix: &str) -> Option<&'a str> {
    name.strip_suffix(suffix)?.strip_suffix('.')
}
