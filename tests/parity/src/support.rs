//! Golden folders, and how far a tensor may be from its golden value.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use models::{DynTransformer, Family, ModelFolder, family_of};
use nn::{BuildOptions, Builder, Conditions, Inputs, Parameters, Weights};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// Relative l2 error allowed in f32.
pub(crate) const F32: f64 = 1e-4;

/// A model folder with golden values; see `tools/fixtures/README.md` for their names.
pub(crate) struct Golden {
    pub(crate) name: String,
    pub(crate) folder: ModelFolder,
    pub(crate) family: &'static dyn Family,
    pub(crate) numbers: Value,
    /// Whether it is the larger set beside the project.
    pub(crate) foreign: bool,
    tensors: BTreeMap<String, Tensor>,
}

/// Every committed fixture, and the larger sets beside the project where they are there.
pub(crate) fn goldens() -> Vec<Golden> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<PathBuf> =
        fs_err::read_dir(here.join("fixtures")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 5, "fixtures are committed");
    let oracle =
        std::env::var_os("PARITY_ORACLE").map_or_else(|| here.join("../../../shared/oracle/default"), PathBuf::from);
    for family in ["flux", "wan", "wan22"] {
        let extra = oracle.join(family);
        if extra.is_dir() {
            folders.push(extra);
        } else {
            eprintln!("skipped: ../shared/oracle/default/{family} is absent");
        }
    }
    folders.iter().map(|folder| Golden::open(folder)).collect()
}

/// Those of one family.
pub(crate) fn goldens_of(family: &str) -> Vec<Golden> {
    let goldens: Vec<_> = goldens().into_iter().filter(|golden| golden.family.name() == family).collect();
    assert!(goldens.len() >= 2, "two sets of {family} are committed");
    goldens
}

impl Golden {
    fn open(path: &Path) -> Self {
        let folder = ModelFolder::open(path).unwrap();
        let tensors = Tensor::read_safetensors(path.join("golden.safetensors")).unwrap().into_iter().collect();
        let numbers = serde_json::from_slice(&fs_err::read(path.join("golden.json")).unwrap()).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let foreign = !path.starts_with(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures"));
        Self { name, family: family_of(&folder).unwrap(), folder, numbers, foreign, tensors }
    }

    /// The golden tensor of this name.
    pub(crate) fn tensor(&self, name: &str) -> Tensor {
        self.find(name).unwrap_or_else(|| panic!("{} has no golden `{name}`", self.name))
    }

    pub(crate) fn find(&self, name: &str) -> Option<Tensor> {
        self.tensors.get(name).map(Tensor::shallow_clone)
    }

    /// Goldens whose names start with `prefix`, by the rest of the name.
    pub(crate) fn under(&self, prefix: &str) -> Vec<(String, Tensor)> {
        self.tensors.iter().filter_map(|(k, v)| Some((k.strip_prefix(prefix)?.to_owned(), v.shallow_clone()))).collect()
    }

    /// The golden number of this name.
    pub(crate) fn number(&self, name: &str) -> f64 {
        self.numbers[name].as_f64().unwrap_or_else(|| panic!("{} has no golden number `{name}`", self.name))
    }

    pub(crate) fn prompts(&self) -> Vec<(String, usize)> {
        let prompts = self.numbers["prompts"].as_array().unwrap().iter().map(|p| p.as_str().unwrap().to_owned());
        prompts.enumerate().map(|(i, p)| (p, self.numbers["max_tokens"][i].as_u64().unwrap_or(512) as usize)).collect()
    }

    /// The first denoiser and its parameters.
    pub(crate) fn transformer(&self, options: BuildOptions) -> (DynTransformer, Parameters) {
        self.denoiser("transformer", options)
    }

    /// Names of all denoisers.
    pub(crate) fn denoisers(&self) -> impl Iterator<Item = &'static str> {
        self.family.denoisers(&self.folder).unwrap().into_iter().map(|denoiser| denoiser.component)
    }

    /// A denoiser by name, and its parameters.
    pub(crate) fn denoiser(&self, component: &str, options: BuildOptions) -> (DynTransformer, Parameters) {
        let weights = Weights::open(&self.folder.path.join(component), "diffusion_pytorch_model").unwrap();
        let builder = Builder::from_weights(weights, options);
        let model = self.family.transformer(&self.folder, &builder).unwrap();
        (model, builder.finish().unwrap())
    }

    /// What the family's denoiser is told beside latents and level: its name here → its golden.
    fn conditions(&self, component: &str) -> Conditions {
        let names: &[(&str, &str)] = match self.family.name() {
            "flux" => &[("t5", "encoder_hidden_states"), ("clip_pooled", "pooled_projections")],
            "wan" => &[("umt5", "encoder_hidden_states")],
            family => panic!("no conditions for {family}"),
        };
        names.iter().map(|(ours, theirs)| ((*ours).into(), self.tensor(&format!("{component}/in/{theirs}")))).collect()
    }

    /// Inputs of the training sample with this noise and these levels.
    pub(crate) fn inputs(&self, noise: &Tensor, sigma: &Tensor, compute: Kind) -> Inputs {
        let latents = diffusion::flow::interpolate(&self.clean(), noise, sigma);
        let guidance = self.find("transformer/in/guidance");
        Inputs { latents, sigma: sigma.shallow_clone(), conditions: self.conditions("transformer"), guidance, compute }
    }

    /// Inputs of the golden prediction.
    pub(crate) fn training_inputs(&self, compute: Kind) -> Inputs {
        self.inputs(&self.noise(), &self.tensor("transformer/level"), compute)
    }

    /// As [`training_inputs`](Self::training_inputs), of any denoiser; with what it should predict.
    pub(crate) fn sample_of(&self, component: &str, compute: Kind) -> (Inputs, Tensor) {
        let tensor = |name: &str| self.tensor(&format!("{component}/{name}"));
        let (clean, noise, sigma) = (tensor("clean/latents"), tensor("noise/latents"), tensor("level"));
        let latents = diffusion::flow::interpolate(&clean, &noise, &sigma);
        let (conditions, guidance) = (self.conditions(component), self.find(&format!("{component}/in/guidance")));
        (Inputs { latents, sigma, conditions, guidance, compute }, diffusion::flow::target(&clean, &noise))
    }

    pub(crate) fn clean(&self) -> Tensor {
        self.tensor("transformer/clean/latents")
    }

    pub(crate) fn noise(&self) -> Tensor {
        self.tensor("transformer/noise/latents")
    }

    /// Mean squared error of `model` on a training sample.
    pub(crate) fn loss(&self, model: &DynTransformer, noise: &Tensor, sigma: &Tensor, recompute: bool) -> Tensor {
        let prediction = model.forward(&self.inputs(noise, sigma, Kind::Float), recompute.into()).unwrap();
        diffusion::flow::sample_losses(&prediction, &diffusion::flow::target(&self.clean(), noise)).mean(Kind::Float)
    }
}

/// f32 on the CPU.
pub(crate) fn options(trainable: bool) -> BuildOptions {
    BuildOptions { device: Device::Cpu, storage: Kind::Float, trainable, adapter: None }
}

/// Relative l2 error.
pub(crate) fn relative(ours: &Tensor, golden: &Tensor) -> f64 {
    assert_eq!(ours.size(), golden.size());
    let (ours, golden) = (ours.to_kind(Kind::Double), golden.to_kind(Kind::Double));
    let size = golden.norm().double_value(&[]);
    (ours - golden).norm().double_value(&[]) / size.max(1e-12)
}

/// Collects the largest error of each group of goldens, and fails on the first that is too large.
pub(crate) struct Report<'a> {
    golden: &'a Golden,
    worst: BTreeMap<&'static str, (f64, usize)>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(golden: &'a Golden) -> Self {
        Self { golden, worst: BTreeMap::new() }
    }

    pub(crate) fn close(&mut self, group: &'static str, name: &str, ours: &Tensor, golden: &Tensor) {
        self.error(group, name, relative(ours, golden));
    }

    pub(crate) fn number(&mut self, group: &'static str, name: &str, ours: f64, golden: f64) {
        self.error(group, name, (ours - golden).abs() / golden.abs().max(1e-12));
    }

    fn error(&mut self, group: &'static str, name: &str, error: f64) {
        assert!(error <= F32, "{}: {group} `{name}` is off by {error:.2e}", self.golden.name);
        let worst = self.worst.entry(group).or_default();
        *worst = (worst.0.max(error), worst.1 + 1);
    }
}

impl Drop for Report<'_> {
    fn drop(&mut self) {
        for (group, (error, count)) in &self.worst {
            println!("{}: {group}: {count} compared, relative error at most {error:.1e}", self.golden.name);
        }
    }
}
