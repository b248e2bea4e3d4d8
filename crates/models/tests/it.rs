//! Model folders: real sizes build, and every broken folder is answered by name.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};

use models::flux::{Config, Flux};
use models::t5::T5Encoder;
use models::tokenizer::Tokenizer;
use models::{FAMILIES, Family, ModelFolder, family_of, flux_pipeline::FluxPipeline};
use nn::{BuildOptions, Builder, Weights, lora};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures").join(name)
}

/// A copy of `flux-tiny` without its goldens, to be broken.
fn copy() -> tempfile::TempDir {
    let scratch = tempfile::tempdir().unwrap();
    for part in ["scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae"] {
        fs_err::create_dir(scratch.path().join(part)).unwrap();
        for file in fs_err::read_dir(fixture("flux-tiny").join(part)).unwrap() {
            let file = file.unwrap();
            fs_err::copy(file.path(), scratch.path().join(part).join(file.file_name())).unwrap();
        }
    }
    fs_err::copy(fixture("flux-tiny/model_index.json"), scratch.path().join("model_index.json")).unwrap();
    scratch
}

fn edit(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs_err::read(file).unwrap()).unwrap();
    change(&mut value);
    fs_err::write(file, value.to_string()).unwrap();
}

fn frozen() -> BuildOptions {
    BuildOptions::frozen(Device::Cpu, Kind::Float)
}

#[test]
fn flux_dev_has_the_released_number_of_parameters() {
    let config = json!({
        "attention_head_dim": 128, "guidance_embeds": true, "in_channels": 64, "joint_attention_dim": 4096, "num_attention_heads": 24,
        "num_layers": 19, "num_single_layers": 38, "patch_size": 1, "pooled_projection_dim": 768,
    });
    let config: Config = serde_json::from_value(config).unwrap();
    let adapter = lora::Spec::new(64, 64.0, FluxPipeline.lora_targets().iter().copied());
    let builder = Builder::meta(BuildOptions { adapter: Some(adapter), ..frozen() });
    Flux::new(config, &builder).unwrap();
    let parameters = builder.finish().unwrap();
    // Counted in diffusers on the meta device.
    assert_eq!(parameters.weights.len(), 1160);
    assert_eq!(parameters.weights.iter().map(|p| p.tensor.numel()).sum::<usize>(), 11_901_408_320);
    assert_eq!(parameters.adapter.len(), 2 * (19 * 12 + 38 * 3));
}

/// Both kinds of Wan 2.2 have the pipeline class of Wan 2.1. Whoever asks for anything of the denoiser is told, at plan time.
#[test]
fn a_wan_2_2_with_a_time_for_each_token_is_refused_by_name() {
    let scratch = configurations("wan-tiny");
    edit(&scratch.path().join("model_index.json"), |index| index["expand_timesteps"] = json!(true));
    let folder = ModelFolder::open(scratch.path()).unwrap();
    let family = family_of(&folder).unwrap();
    for error in [
        family.pixel_unit(&folder).unwrap_err(),
        family.text_inputs(&folder).unwrap_err(),
        family.transformer(&folder, &Builder::meta(frozen())).err().unwrap(),
    ] {
        let message = error.to_string();
        assert!(message.contains("is a Wan 2.2 with a time for each token"), "{message}");
        assert!(message.contains("not supported; text-to-video of Wan 2.1 and of Wan 2.2 A14B is"), "{message}");
    }
}

/// The configurations of a fixture.
fn configurations(name: &str) -> tempfile::TempDir {
    let (scratch, from) = (tempfile::tempdir().unwrap(), fixture(name));
    let parts = ["transformer/config.json", "transformer_2/config.json", "vae/config.json", "model_index.json"];
    for part in parts.into_iter().filter(|part| from.join(part).is_file()) {
        let to = scratch.path().join(part);
        fs_err::create_dir_all(to.parent().unwrap()).unwrap();
        fs_err::copy(from.join(part), to).unwrap();
    }
    scratch
}

#[test]
fn two_denoisers_part_the_noise_levels_at_the_boundary() {
    let scratch = configurations("wan22-tiny");
    let denoisers = || {
        let folder = ModelFolder::open(scratch.path()).unwrap();
        family_of(&folder).unwrap().denoisers(&folder)
    };
    let found: Vec<_> = denoisers().unwrap().iter().map(|denoiser| (denoiser.component, denoiser.from)).collect();
    assert_eq!(found, [("transformer", 0.875), ("transformer_2", 0.0)]);
    for wrong in [Value::Null, json!(0), json!(1.0), json!("0.9")] {
        edit(&scratch.path().join("model_index.json"), |index| index["boundary_ratio"] = wrong);
        let message = denoisers().unwrap_err().to_string();
        assert!(message.contains("`boundary_ratio` is ") && message.contains("between 0 and 1"), "{message}");
    }
    edit(&scratch.path().join("model_index.json"), |index| index["boundary_ratio"] = json!(0.9));
    edit(&scratch.path().join("transformer_2/config.json"), |config| config["_name_or_path"] = json!("elsewhere"));
    assert_eq!(denoisers().unwrap()[0].from, 0.9);
    edit(&scratch.path().join("transformer_2/config.json"), |config| config["num_layers"] = json!(1));
    let message = denoisers().unwrap_err().to_string();
    assert!(message.contains("both denoisers must be of the same size"), "{message}");
    let folder = ModelFolder::open(fixture("wan-tiny")).unwrap();
    assert_eq!(family_of(&folder).unwrap().denoisers(&folder).unwrap().len(), 1);
}

#[test]
fn every_family_lists_what_it_reads() {
    for family in FAMILIES {
        for parts in [family.vae_parts(), family.text_parts(), family.transformer_parts()] {
            assert!(parts.contains(&"model_index.json"), "{}", family.name());
            assert!(parts.iter().all(|part| family.generate_parts().contains(part)), "{}", family.name());
        }
    }
}

#[test]
fn a_folder_without_its_parts_says_which() {
    let missing = ModelFolder::open("no/such/folder").unwrap_err().to_string();
    assert_eq!(missing, "there is no model folder at `no/such/folder`");

    let scratch = copy();
    let name = scratch.path().display();
    let folder = ModelFolder::open(scratch.path()).unwrap();
    fs_err::remove_file(scratch.path().join("vae/config.json")).unwrap();
    let error = FluxPipeline.vae(&folder, frozen()).err().unwrap().to_string();
    assert_eq!(error, format!("model folder `{name}` has no `vae/config.json`"));
    fs_err::remove_dir_all(scratch.path().join("vae")).unwrap();
    let error = FluxPipeline.vae(&folder, frozen()).err().unwrap().to_string();
    assert_eq!(error, format!("model folder `{name}` has no `vae/`"));
    fs_err::remove_file(scratch.path().join("tokenizer/merges.txt")).unwrap();
    let error = FluxPipeline.text_encoders(&folder, frozen()).err().unwrap().to_string();
    assert_eq!(error, format!("model folder `{name}` has no `tokenizer/merges.txt`"));
    fs_err::remove_file(scratch.path().join("model_index.json")).unwrap();
    let error = ModelFolder::open(scratch.path()).unwrap_err().to_string();
    assert_eq!(error, format!("model folder `{name}` has no `model_index.json`"));
}

#[test]
fn another_class_than_expected_is_named() {
    let scratch = copy();
    let index = scratch.path().join("model_index.json");
    edit(&index, |index| index["vae"][1] = json!("AutoencoderKLWan"));
    let folder = ModelFolder::open(scratch.path()).unwrap();
    let error = FluxPipeline.vae(&folder, frozen()).err().unwrap().to_string();
    assert!(
        error.contains("component `vae`") && error.contains("`AutoencoderKLWan`, expected `AutoencoderKL`"),
        "{error}"
    );

    edit(&index, |index| index["_class_name"] = json!("StableDiffusionPipeline"));
    let error = family_of(&ModelFolder::open(scratch.path()).unwrap()).unwrap_err().to_string();
    assert!(
        error.contains("`StableDiffusionPipeline`") && error.ends_with("supported: `FluxPipeline`, `WanPipeline`"),
        "{error}"
    );
    edit(&index, |index| index["_class_name"] = Value::Null);
    let error = ModelFolder::open(scratch.path()).unwrap_err().to_string();
    assert!(error.contains("`_class_name`"), "{error}");
}

#[test]
fn sizes_that_do_not_fit_together_are_refused() {
    let scratch = copy();
    let config = scratch.path().join("transformer/config.json");
    let folder = ModelFolder::open(scratch.path()).unwrap();
    let error = |change: fn(&mut Value)| {
        let before = fs_err::read(&config).unwrap();
        edit(&config, change);
        let error = Config::read(&folder).unwrap_err().to_string();
        fs_err::write(&config, before).unwrap();
        error
    };
    let text = error(|c| c["axes_dims_rope"] = json!([2, 2, 2]));
    assert!(text.contains("[2, 2, 2]") && text.contains("sum to `attention_head_dim`, 8"), "{text}");
    let text = error(|c| c["num_layers"] = json!("two"));
    assert!(text.contains("`transformer/config.json`") && text.contains("expected usize"), "{text}");
    let text = error(|c| c["num_layers"] = Value::Null);
    assert!(text.contains("`transformer/config.json`"), "{text}");
    let text = error(|c| c["patch_size"] = json!(2));
    assert!(text.contains("`patch_size` is 2"), "{text}");

    edit(&scratch.path().join("text_encoder_2/config.json"), |c| c["feed_forward_proj"] = json!("relu"));
    let text = FluxPipeline.text_encoders(&folder, frozen()).err().unwrap().to_string();
    assert!(text.contains("`feed_forward_proj` is `relu`"), "{text}");
    edit(&scratch.path().join("vae/config.json"), |c| c["down_block_types"][0] = json!("AttnDownEncoderBlock2D"));
    let text = FluxPipeline.vae(&folder, frozen()).err().unwrap().to_string();
    assert!(text.contains("DownEncoderBlock2D"), "{text}");
}

#[test]
fn a_broken_sentencepiece_file_is_no_panic() {
    let scratch = copy();
    fs_err::remove_file(scratch.path().join("tokenizer_2/tokenizer.json")).unwrap();
    let folder = ModelFolder::open(scratch.path()).unwrap();
    let file = scratch.path().join("tokenizer_2/spiece.model");
    let whole = fs_err::read(&file).unwrap();
    Tokenizer::t5(&folder, "tokenizer_2").unwrap();
    for length in [0, 1, 2, 7, whole.len() / 2, whole.len() - 1] {
        fs_err::write(&file, &whole[..length]).unwrap();
        let error = Tokenizer::t5(&folder, "tokenizer_2").unwrap_err().to_string();
        assert!(error.contains("tokenizer_2"), "{error}");
    }
    // A length that runs past the end of memory.
    fs_err::write(&file, [0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]).unwrap();
    assert!(Tokenizer::t5(&folder, "tokenizer_2").is_err());
}

#[test]
fn more_tokens_than_the_encoder_takes_are_refused() {
    let folder = ModelFolder::open(fixture("flux-tiny")).unwrap();
    let encoders = FluxPipeline.text_encoders(&folder, frozen()).unwrap();
    for asked in [0, 513] {
        let error = encoders.encode(&["x".into()], asked).unwrap_err().to_string();
        assert_eq!(error, format!("`max_sequence_length` is {asked}; `t5` takes 1 to 512"));
    }
    assert!(encoders.encode(&[], 16).unwrap().is_empty());
}

/// A safetensors file in which the table of a T5 encoder stands under each of `names`; none if it has none.
fn with_table_under(bytes: &[u8], names: &[&str]) -> Option<Vec<u8>> {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut data = bytes[8 + length..].to_vec();
    let table = header.as_object_mut().unwrap().remove("shared.weight")?;
    let range = [0, 1].map(|end| table["data_offsets"][end].as_u64().unwrap() as usize);
    let numbers = data[range[0]..range[1]].to_vec();
    for (copy, name) in names.iter().enumerate() {
        header[*name] = table.clone();
        if copy > 0 {
            header[*name]["data_offsets"] = json!([data.len(), data.len() + numbers.len()]);
            data.extend_from_slice(&numbers);
        }
    }
    let header = header.to_string();
    Some([&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat())
}

/// transformers writes it as `shared.weight`; other writers as `encoder.embed_tokens.weight`, or both.
#[test]
fn the_table_of_a_t5_encoder_may_have_either_name_or_both() {
    let mut seen = 0;
    for (name, folder) in models::testing::fixtures() {
        for component in ["text_encoder", "text_encoder_2"] {
            let file = folder.path.join(component).join("model.safetensors");
            let Ok(bytes) = fs_err::read(&file) else { continue };
            if with_table_under(&bytes, &["shared.weight"]).is_none() {
                continue;
            }
            let config: Value = folder.config(component).unwrap();
            let ids =
                Tensor::from_slice(&[3i64, 1, 4, 1, 5]).remainder(config["vocab_size"].as_i64().unwrap()).view([1, -1]);
            let embedded = |names: &[&str]| {
                let scratch = tempfile::tempdir().unwrap();
                fs_err::create_dir(scratch.path().join(component)).unwrap();
                fs_err::copy(folder.path.join("model_index.json"), scratch.path().join("model_index.json")).unwrap();
                let place = scratch.path().join(component);
                fs_err::copy(folder.path.join(component).join("config.json"), place.join("config.json")).unwrap();
                fs_err::write(place.join("model.safetensors"), with_table_under(&bytes, names).unwrap()).unwrap();
                let copy = ModelFolder::open(scratch.path()).unwrap();
                let builder = Builder::from_weights(Weights::open(&place, "model").unwrap(), frozen());
                let encoder = T5Encoder::new(&copy, component, &builder).unwrap();
                builder.finish().unwrap();
                tch::no_grad(|| encoder.forward(&ids)).unwrap()
            };
            let usual = embedded(&["shared.weight"]);
            for names in [&["encoder.embed_tokens.weight"][..], &["shared.weight", "encoder.embed_tokens.weight"]] {
                assert_eq!(embedded(names), usual, "{name} {component} {names:?}");
            }
            seen += 1;
        }
    }
    assert!(seen >= 2, "{seen}");
}
