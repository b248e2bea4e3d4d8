//! Cleaned prompts, token ids and text embeddings of Wan are those of diffusers and transformers.

use models::tokenizer::Tokenizer;
use models::wan_pipeline::prompt_clean;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::support::{Report, goldens_of, options, relative};
use crate::text::check_cases;

#[test]
fn prompts_are_cleaned_as_the_pipeline_cleans_them() {
    let mut compared = 0;
    for golden in goldens_of("wan") {
        for case in golden.numbers["clean_cases"].as_array().into_iter().flatten() {
            assert_eq!(prompt_clean(case[0].as_str().unwrap()), case[1].as_str().unwrap(), "{}", case[0]);
            compared += 1;
        }
    }
    assert!(compared > 60);
}

/// Where ftfy is not installed the pipeline gives the same for whatever ftfy leaves alone, and text that was decoded in the wrong
/// encoding stays as it is there and here.
#[test]
fn only_what_ftfy_mends_differs_from_a_pipeline_without_it() {
    for golden in goldens_of("wan").into_iter().filter(|golden| !golden.foreign) {
        let cases = |name: &str| golden.numbers[name].as_array().unwrap().clone();
        let text = |case: &Value, column: usize| case[column].as_str().unwrap().to_owned();
        let alike = cases("clean_cases").iter().filter(|case| prompt_clean(&text(case, 0)) == text(case, 2)).count();
        assert_eq!(alike, cases("clean_cases").iter().filter(|case| case[1] == case[2]).count());
        for case in cases("garbled_cases") {
            assert_eq!(prompt_clean(&text(&case, 0)), text(&case, 1));
            assert!(spec::looks_garbled(&text(&case, 0)), "{case}");
        }
    }
}

#[test]
fn token_ids_are_equal_on_awkward_text() {
    for golden in goldens_of("wan") {
        check_cases(&golden, "tokenizer", &Tokenizer::t5(&golden.folder, "tokenizer").unwrap());
    }
}

#[test]
fn ids_and_embeddings_are_equal_and_stop_where_the_mask_ends() {
    for golden in goldens_of("wan") {
        let mut report = Report::new(&golden);
        let tokenizer = Tokenizer::t5(&golden.folder, "tokenizer").unwrap();
        let encoders = golden.family.text_encoders(&golden.folder, options(false)).unwrap();
        for (i, (prompt, limit)) in golden.prompts().into_iter().enumerate() {
            let expected = golden.tensor(&format!("text/p{i}/prompt_embeds"));
            let limit = if golden.foreign { expected.size()[1] as usize } else { limit };
            let golden_ids = golden.tensor(&format!("text/p{i}/text_encoder/input_ids")).view(-1);
            let ids = tokenizer.padded_ids(&prompt_clean(&prompt), limit).unwrap();
            assert_eq!(ids, Vec::<i64>::try_from(golden_ids.to_kind(Kind::Int64)).unwrap(), "{prompt:?}");

            let text = &encoders.encode(std::slice::from_ref(&prompt), limit).unwrap()[0];
            let mask = golden.tensor(&format!("text/p{i}/text_encoder/attention_mask"));
            assert_eq!(text["umt5"].tokens, mask.sum(Kind::Int64).int64_value(&[]));
            assert_eq!(encoders.lengths(&prompt, limit).unwrap()["umt5"].limit, limit);
            let conditions = golden.family.conditions(&[text], limit, Device::Cpu, Kind::Float).unwrap();
            report.close("umt5", &format!("p{i}"), &conditions["umt5"], &expected);
        }
    }
}

#[test]
fn a_batch_of_texts_is_encoded_as_each_alone() {
    for golden in goldens_of("wan") {
        let encoders = golden.family.text_encoders(&golden.folder, options(false)).unwrap();
        let prompts: Vec<String> = golden.prompts().into_iter().map(|(prompt, _)| prompt).collect();
        let together = encoders.encode(&prompts, 33).unwrap();
        for (prompt, text) in prompts.iter().zip(&together) {
            let alone = &encoders.encode(std::slice::from_ref(prompt), 33).unwrap()[0];
            let pick = |text: &models::Text| -> Tensor { text["umt5"].embedding.as_ref().unwrap().shallow_clone() };
            assert!(relative(&pick(text), &pick(alone)) == 0.0);
        }
        let rows: Vec<&models::Text> = together.iter().collect();
        let conditions = golden.family.conditions(&rows, 40, Device::Cpu, Kind::Float).unwrap();
        assert_eq!(conditions["umt5"].size()[..2], [prompts.len() as i64, 40]);
        let error = golden.family.conditions(&rows, 12, Device::Cpu, Kind::Float).unwrap_err().to_string();
        assert!(error.contains("12"), "{error}");
    }
}
