//! Adapters against PEFT: outputs, and files of diffusers, of PEFT and of older trainers.

use std::collections::BTreeMap;
use std::path::Path;

use nn::lora::Spec;
use nn::lora_file::{self, AdapterFile};
use nn::{BuildOptions, Builder, Error, Linear, Parameters, Weights};
use tch::{Kind, Tensor};

use crate::{CPU, assert_close, assert_same, fixture, golden, random};

/// The model of `tools/nn_fixtures.py`.
struct Model {
    blocks: Vec<(Linear, Linear)>,
    parameters: Parameters,
}

impl Model {
    fn build(adapter: Option<Spec>) -> nn::Result<Self> {
        Self::of_options(BuildOptions { adapter, ..BuildOptions::trained(CPU) })
    }

    fn of_options(options: BuildOptions) -> nn::Result<Self> {
        let b = Builder::from_weights(Weights::file(&fixture("lora_base.safetensors"))?, options);
        let block = |i| {
            Ok((
                b.pp("blocks").pp(i).pp("to_q").linear(8, 6, true)?,
                b.pp("blocks").pp(i).pp("to_out.0").linear(6, 8, true)?,
            ))
        };
        let blocks = (0..2).map(block).collect::<nn::Result<_>>()?;
        Ok(Self { blocks, parameters: b.finish()? })
    }

    fn load(path: &Path) -> nn::Result<Self> {
        let file = AdapterFile::open(path)?;
        let model = Self::build(Some(file.spec()))?;
        file.fill(&model.parameters)?;
        Ok(model)
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let step = |x: Tensor, (q, out): &(Linear, Linear)| &x + out.forward(&q.forward(&x).unwrap().tanh()).unwrap();
        self.blocks.iter().fold(x.shallow_clone(), step).detach()
    }
}

#[test]
fn a_merged_adapter_acts_as_one_beside_the_weights() {
    let x = golden().tensor("lora/x").unwrap();
    let file = AdapterFile::open(&fixture("lora_peft")).unwrap();
    let beside = Model::load(&fixture("lora_peft")).unwrap();
    beside.parameters.set_adapter_strength(0.5);
    for trainable in [false, true] {
        let merged = Model::of_options(BuildOptions { trainable, ..BuildOptions::trained(CPU) }).unwrap();
        file.merge_into(&merged.parameters, 0.5).unwrap();
        assert_close(&merged.forward(&x), &beside.forward(&x));
    }
    let plain = Model::build(None).unwrap();
    assert!((plain.forward(&x) - beside.forward(&x)).abs().max().double_value(&[]) > 1e-3);
}

#[test]
fn adapters_of_every_layout_give_pefts_output() {
    let golden = golden();
    let read = |name: &str| golden.tensor(&format!("lora/{name}")).unwrap();
    let cases = [
        ("lora_peft", "adapted"),
        ("lora_diffusers", "adapted"),
        ("lora_diffusers/pytorch_lora_weights.safetensors", "adapted"),
        ("lora_alpha.safetensors", "adapted"),
        ("lora_bare.safetensors", "adapted_without_metadata"),
    ];
    for (file, expected) in cases {
        let model = Model::load(&fixture(file)).unwrap();
        assert_close(&model.forward(&read("x")), &read(expected));
        model.parameters.set_adapter_strength(0.0);
        assert_close(&model.forward(&read("x")), &read("base"));
    }
    let model = Model::load(&fixture("lora_bare.safetensors")).unwrap();
    model.parameters.set_adapter_strength(0.5);
    assert_close(&model.forward(&read("x")), &read("half_without_metadata"));
}

#[test]
fn a_fresh_adapter_changes_nothing_but_has_gradients() {
    let golden = golden();
    let x = golden.tensor("lora/x").unwrap();
    let model = Model::build(Some(Spec { seed: 3, ..Spec::new(4, 8.0, ["to_q", "to_out.0"]) })).unwrap();
    assert_close(&model.forward(&x), &golden.tensor("lora/base").unwrap());
    let a = &model.parameters.adapter[0].tensor;
    let bound = f64::try_from(a.abs().max()).unwrap();
    assert!(bound > 0.2 && bound <= 1.0 / 8f64.sqrt(), "{bound}"); // kaiming_uniform(a=sqrt 5): ±1/sqrt(in)
    let again = Model::build(Some(Spec { seed: 3, ..Spec::new(4, 8.0, ["to_q"]) })).unwrap();
    assert_same(&again.parameters.adapter[0].tensor.detach(), &a.detach()); // by seed and name, whatever else is adapted
}

#[test]
fn the_peft_file_written_is_pefts_own() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::load(&fixture("lora_peft")).unwrap();
    let files = lora_file::save(folder.path(), &model.parameters, Some("black-forest-labs/FLUX.1-dev")).unwrap();
    assert_eq!(files.len(), 3);
    let read = |path: &Path| fs_err::read(path).unwrap();
    let file = "adapter_model.safetensors";
    assert!(read(&folder.path().join(file)) == read(&fixture("lora_peft").join(file)), "the bytes differ");

    // The settings mean the same to PEFT: its own file, but for targets by full name and what depends on the environment.
    let json = |path: &Path| -> serde_json::Value { serde_json::from_slice(&read(path)).unwrap() };
    let (ours, theirs) =
        (json(&folder.path().join("adapter_config.json")), json(&fixture("lora_peft/adapter_config.json")));
    let ours = ours.as_object().unwrap();
    for key in ours.keys() {
        assert!(theirs.get(key).is_some(), "PEFT does not know `{key}`");
    }
    let scale = |config: &serde_json::Value, module: &str| {
        let of = |common: &str, pattern: &str| config[pattern].get(module).unwrap_or(&config[common]).as_f64().unwrap();
        of("lora_alpha", "alpha_pattern") / of("r", "rank_pattern")
    };
    let ours_value = serde_json::Value::Object(ours.clone());
    for module in ["blocks.0.to_q", "blocks.0.to_out.0", "blocks.1.to_q", "blocks.1.to_out.0"] {
        assert_eq!(scale(&ours_value, module), scale(&theirs, module), "{module}");
        assert!(ours["target_modules"].as_array().unwrap().contains(&module.into()));
    }
    assert_eq!(ours["base_model_name_or_path"], "black-forest-labs/FLUX.1-dev");
}

#[test]
fn the_diffusers_file_written_has_the_tensors_and_metadata_of_diffusers() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::load(&fixture("lora_diffusers")).unwrap();
    lora_file::save(folder.path(), &model.parameters, None).unwrap();
    let file = "pytorch_lora_weights.safetensors";
    let open = |folder: &Path| Weights::file(&folder.join(file)).unwrap();
    let (ours, theirs) = (open(folder.path()), open(&fixture("lora_diffusers")));
    assert!(ours.names().eq(theirs.names()));
    // The tensors alone, for readers that know no metadata: alpha is the rank there, so the scale must be in them.
    let beside = tempfile::tempdir().unwrap();
    let tensors: Vec<_> = ours.names().map(|name| (name, ours.tensor(name).unwrap())).collect();
    let bare = write(beside.path(), &tensors);
    let metadata = |weights: &Weights| -> serde_json::Value {
        assert_eq!(weights.metadata()["format"], "pt");
        serde_json::from_str(&weights.metadata()["lora_adapter_metadata"]).unwrap()
    };
    let (ours, theirs) = (metadata(&ours), metadata(&theirs));
    for key in ours.as_object().unwrap().keys() {
        assert!(theirs.get(key).is_some(), "diffusers does not write `{key}`");
    }
    for key in ["transformer.peft_type", "transformer.bias", "transformer.use_dora", "transformer.use_rslora"] {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    // Reading ours gives the same model, whichever way; the scales were compared through it.
    let golden = golden();
    let x = golden.tensor("lora/x").unwrap();
    for path in [folder.path(), &bare] {
        assert_close(&Model::load(path).unwrap().forward(&x), &golden.tensor("lora/adapted").unwrap());
    }
}

#[test]
fn what_is_saved_does_not_depend_on_the_moment() {
    let model = Model::load(&fixture("lora_peft")).unwrap();
    let bytes = || {
        let folder = tempfile::tempdir().unwrap();
        let files = lora_file::save(folder.path(), &model.parameters, None).unwrap();
        files.iter().map(|path| fs_err::read(path).unwrap()).collect::<Vec<_>>()
    };
    assert!(bytes() == bytes(), "the bytes differ");
}

fn write(folder: &Path, tensors: &[(&str, Tensor)]) -> std::path::PathBuf {
    let path = folder.join("x.safetensors");
    nn::save::save_safetensors(&path, tensors.iter().map(|(name, tensor)| (*name, tensor)), &BTreeMap::new()).unwrap();
    path
}

#[test]
fn a_module_that_the_model_lacks_is_refused_with_the_nearest() {
    let folder = tempfile::tempdir().unwrap();
    let pair = |name: &str| {
        [(format!("{name}.lora_A.weight"), random(1, &[2, 8])), (format!("{name}.lora_B.weight"), random(2, &[6, 2]))]
    };
    let all: Vec<_> = ["transformer.blocks.0.to_q", "transformer.blocks.2.to_q"].into_iter().flat_map(pair).collect();
    let path = write(
        folder.path(),
        &all.iter().map(|(name, tensor)| (name.as_str(), tensor.shallow_clone())).collect::<Vec<_>>(),
    );
    let Err(Error::UnmatchedAdapter { pattern, help, .. }) = Model::load(&path).map(drop) else { panic!() };
    assert_eq!(pattern, "blocks.2.to_q");
    assert!(help.unwrap().contains("`blocks.0.to_q`"));
}

#[test]
fn a_file_that_is_no_plain_lora_is_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let refusal = |tensors: &[(&str, Tensor)]| {
        let path = write(folder.path(), tensors);
        let error = AdapterFile::open(&path).unwrap_err().to_string();
        error.strip_prefix(&format!("`{}`: ", path.display())).unwrap().to_owned()
    };
    let (a, b) = (random(1, &[2, 8]), random(2, &[6, 2]));
    let (a, b) = (|| a.shallow_clone(), || b.shallow_clone());
    assert_eq!(refusal(&[("q.lora_A.weight", a())]), "`q` has only one of its two factors");
    assert_eq!(
        refusal(&[("q.lora_magnitude_vector", a())]),
        "`q.lora_magnitude_vector` is no LoRA factor of a linear layer"
    );
    let named = |key: &str| refusal(&[(key, a())]);
    for (key, what) in [
        ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "is in kohya's naming"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight", "is a text encoder's, in kohya's naming"),
        ("text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_A.weight", "is a text encoder's"),
        ("diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight", "is in ComfyUI's naming"),
    ] {
        assert!(named(key).starts_with(&format!("`{key}` {what}")), "{}", named(key));
    }
    assert_eq!(refusal(&[("q.alpha", Tensor::from(1f32))]), "`q` has an alpha but no factors");
    assert_eq!(refusal(&[]), "holds no LoRA factors");
    let twice = [("q.lora_A.weight", a()), ("q.lora_down.weight", a()), ("q.lora_B.weight", b())];
    assert_eq!(refusal(&twice), "`q` comes twice");
    let unequal = [("q.lora_A.weight", a()), ("q.lora_B.weight", random(1, &[6, 3]))];
    assert_eq!(refusal(&unequal), "`q`: A [2, 8] and B [6, 3] are no factors of rank 2");
    // Of the right rank, but for a layer of another size.
    let path = write(
        folder.path(),
        &[("blocks.0.to_q.lora_A.weight", random(1, &[2, 9])), ("blocks.0.to_q.lora_B.weight", b())],
    );
    assert!(Model::load(&path).map(drop).unwrap_err().to_string().ends_with("has shape [2, 9], expected [2, 8]"));
}

#[test]
fn settings_that_change_the_maths_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["adapter_model.safetensors", "adapter_config.json"] {
        fs_err::copy(fixture("lora_peft").join(file), folder.path().join(file)).unwrap();
    }
    let config = folder.path().join("adapter_config.json");
    let text = fs_err::read_to_string(&config).unwrap();
    let refusal = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        fs_err::write(&config, text.replace(from, to)).unwrap();
        AdapterFile::open(folder.path()).map(drop).unwrap_err().to_string()
    };
    assert!(refusal(r#""use_dora": false"#, r#""use_dora": true"#).ends_with("`use_dora` is not supported"));
    assert!(
        refusal("blocks.0.to_out.0\": 1", "blocks.(0|1).to_out.0\": 1").contains("only module names are supported")
    );
    assert!(refusal("\"r\": 4", "\"r\": 8").contains("are no factors of rank 8"));
    assert!(refusal("\"r\": 4", "\"r\": \"four\"").ends_with("`r` is no number"));
}

#[test]
fn dropout_is_a_function_of_rows_and_never_of_the_batch() {
    let spec = Spec { dropout: 0.5, ..Spec::new(4, 4.0, ["to_q"]) };
    let model = Model::build(Some(spec)).unwrap();
    for (i, named) in model.parameters.adapter.iter().enumerate() {
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&random(i as u64, &named.tensor.size())));
    }
    let x = random(9, &[4, 8]);
    let off = model.forward(&x);
    model.parameters.set_dropout_keys(Some(&[10, 11, 12, 13]));
    let whole = model.forward(&x);
    assert!(!whole.equal(&off));
    assert_same(&model.forward(&x), &whole);
    model.parameters.set_dropout_keys(Some(&[12, 13]));
    assert_close(&model.forward(&x.slice(0, 2, 4, 1)), &whole.slice(0, 2, 4, 1));
    let error = model.blocks[0].0.forward(&x).unwrap_err().to_string();
    assert_eq!(error, "2 dropout keys for an input of shape [4, 8] in `blocks.0.to_q`");
    model.parameters.set_dropout_keys(None);
    assert_same(&model.forward(&x), &off);
}

#[test]
fn dropout_keeps_the_mean() {
    let options = BuildOptions {
        device: CPU,
        storage: Kind::Float,
        trainable: true,
        adapter: Some(Spec { dropout: 0.25, ..Spec::new(1, 1.0, ["q"]) }),
    };
    let b = Builder::random(0, options);
    let linear = b.pp("q").linear(40_000, 1, false).unwrap();
    let parameters = b.finish().unwrap();
    for (named, value) in parameters.weights.iter().chain(&parameters.adapter).zip([0.0, 1.0, 1.0]) {
        let _ = tch::no_grad(|| named.tensor.shallow_clone().fill_(value));
    }
    parameters.set_dropout_keys(Some(&[5]));
    let sum = f64::try_from(linear.forward(&Tensor::ones([1, 40_000], (Kind::Float, CPU))).unwrap()).unwrap();
    // Five standard errors of a sum of 40 000 numbers that are 4/3 with probability 3/4.
    assert!((sum - 40_000.0).abs() < 5.0 * (40_000.0f64 / 3.0).sqrt(), "{sum}");
}
