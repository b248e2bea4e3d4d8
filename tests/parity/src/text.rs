//! Token ids and text embeddings of FLUX are those of transformers.

use models::ModelFolder;
use models::tokenizer::Tokenizer;
use serde_json::Value;
use tch::Tensor;

use crate::support::{Golden, Report, goldens_of, options};

pub(crate) fn ids(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

pub(crate) fn check_cases(golden: &Golden, component: &str, tokenizer: &Tokenizer) {
    let cases = golden.numbers["tokenizer_cases"][component].as_array().unwrap();
    assert!(cases.len() > 10);
    for case in cases {
        let text = case[0].as_str().unwrap();
        assert_eq!(tokenizer.ids(text).unwrap(), ids(&case[1]), "{} {component} {text:?}", golden.name);
    }
}

#[test]
fn token_ids_are_equal_on_awkward_text() {
    for golden in goldens_of("flux") {
        check_cases(&golden, "tokenizer", &Tokenizer::clip(&golden.folder, "tokenizer").unwrap());
        check_cases(&golden, "tokenizer_2", &Tokenizer::t5(&golden.folder, "tokenizer_2").unwrap());
    }
}

/// A copy of the two tokenizers with only the older of their file formats.
fn without_tokenizer_json(golden: &Golden, to: &std::path::Path) -> ModelFolder {
    for (component, files) in [
        ("tokenizer", &["vocab.json", "merges.txt"][..]),
        ("tokenizer_2", &["spiece.model"]),
        ("", &["model_index.json"]),
    ] {
        fs_err::create_dir_all(to.join(component)).unwrap();
        for file in files.iter().chain((!component.is_empty()).then_some(&"tokenizer_config.json")) {
            fs_err::copy(golden.folder.path.join(component).join(file), to.join(component).join(file)).unwrap();
        }
    }
    ModelFolder::open(to).unwrap()
}

#[test]
fn a_tokenizer_needs_no_tokenizer_json() {
    for golden in goldens_of("flux") {
        let scratch = tempfile::tempdir().unwrap();
        let folder = without_tokenizer_json(&golden, scratch.path());
        check_cases(&golden, "tokenizer", &Tokenizer::clip(&folder, "tokenizer").unwrap());
        check_cases(&golden, "tokenizer_2", &Tokenizer::t5(&folder, "tokenizer_2").unwrap());
        fs_err::remove_file(scratch.path().join("tokenizer_2/spiece.model")).unwrap();
        let error = Tokenizer::t5(&folder, "tokenizer_2").unwrap_err().to_string();
        assert!(error.contains("has no `tokenizer_2/tokenizer.json`"), "{error}");
    }
}

#[test]
fn padded_ids_and_embeddings_are_equal() {
    for golden in goldens_of("flux") {
        let mut report = Report::new(&golden);
        let clip = Tokenizer::clip(&golden.folder, "tokenizer").unwrap();
        let t5 = Tokenizer::t5(&golden.folder, "tokenizer_2").unwrap();
        let encoders = golden.family.text_encoders(&golden.folder, options(false)).unwrap();
        for (i, (prompt, tokens)) in golden.prompts().into_iter().enumerate() {
            for (tokenizer, component, length) in [(&clip, "text_encoder", 77), (&t5, "text_encoder_2", tokens)] {
                let expected = golden.tensor(&format!("text/p{i}/{component}/input_ids")).view(-1);
                assert_eq!(
                    tokenizer.padded_ids(&prompt, length).unwrap(),
                    Vec::<i64>::try_from(expected).unwrap(),
                    "{prompt:?}"
                );
            }
            let text = &encoders.encode(&[prompt], tokens).unwrap()[0];
            let embedding = text["t5"].embedding.as_ref().unwrap().unsqueeze(0);
            report.close("t5", &format!("p{i}"), &embedding, &golden.tensor(&format!("text/p{i}/prompt_embeds")));
            let pooled = text["clip"].pooled.as_ref().unwrap().unsqueeze(0);
            report.close("clip", &format!("p{i}"), &pooled, &golden.tensor(&format!("text/p{i}/pooled_prompt_embeds")));
        }
    }
}

#[test]
fn a_batch_of_texts_is_encoded_as_each_alone() {
    for golden in goldens_of("flux") {
        let encoders = golden.family.text_encoders(&golden.folder, options(false)).unwrap();
        let prompts: Vec<String> = golden.prompts().into_iter().map(|(prompt, _)| prompt).collect();
        let together = encoders.encode(&prompts, 33).unwrap();
        for (prompt, text) in prompts.iter().zip(&together) {
            let alone = &encoders.encode(std::slice::from_ref(prompt), 33).unwrap()[0];
            let pick = |t: &models::Text| -> [Tensor; 2] {
                [
                    t["t5"].embedding.as_ref().unwrap().shallow_clone(),
                    t["clip"].pooled.as_ref().unwrap().shallow_clone(),
                ]
            };
            for (a, b) in pick(text).iter().zip(&pick(alone)) {
                assert!(crate::support::relative(a, b) < 1e-5);
            }
        }
        let rows: Vec<&models::Text> = together.iter().collect();
        let conditions = golden.family.conditions(&rows, 33, tch::Device::Cpu, tch::Kind::Float).unwrap();
        assert_eq!(conditions["t5"].size()[..2], [4, 33]);
        let short = encoders.encode(&prompts[..1], 20).unwrap();
        let error = golden
            .family
            .conditions(&[rows[0], &short[0]], 33, tch::Device::Cpu, tch::Kind::Float)
            .unwrap_err()
            .to_string();
        assert!(error.contains("33 and 20 `t5` tokens"), "{error}");
    }
}
