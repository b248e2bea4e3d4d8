//! Captions are encoded once each, as diffusers' `encode_prompt` does.

use half::bf16;
use serde_json::json;
use tables::{CaptionInfo, CaptionReader, TableReader};
use tch::Tensor;

use crate::support::{digest, golden, picture, run, sample};

#[test]
fn equal_captions_are_stored_once_and_the_empty_one_always() {
    let samples = (0..6).map(|i| sample(&picture(80, 80, i), if i % 2 == 0 { "even" } else { "odd" })).collect();
    let run = run(samples, json!({}));
    assert_eq!(run.outcome().info["captions"], 3);
    let table = TableReader::open(&run.output().join("captions")).unwrap();
    let rows: Vec<CaptionInfo> = table.rows().map(|row| row.unwrap().1).collect();
    let mut seen: Vec<_> = rows.iter().map(|row| (row.caption_digest.clone(), row.encoder.as_str())).collect();
    let sorted = {
        let mut rows = seen.clone();
        rows.sort();
        rows
    };
    assert_eq!(seen, sorted);
    seen.retain(|(_, encoder)| *encoder == "t5");
    let mut expected = [digest(""), digest("even"), digest("odd")];
    expected.sort();
    assert_eq!(seen.into_iter().map(|(digest, _)| digest).collect::<Vec<_>>(), expected);
}

#[test]
fn embeddings_are_those_of_diffusers_with_all_padding_positions() {
    let caption = "a trtcrd of a lighthouse keeper";
    let run = run(vec![sample(&picture(80, 80, 0), caption)], json!({}));
    let reader = CaptionReader::open(&run.output().join("captions")).unwrap();
    let expected: std::collections::BTreeMap<_, _> =
        Tensor::read_safetensors(golden("expected.safetensors")).unwrap().into_iter().collect();
    for (encoder, tokens) in [("t5", 32), ("clip", 77)] {
        let row = reader.get(&digest(caption), encoder).unwrap();
        assert_eq!(row.tokens, tokens);
        let bytes = row.embedding.or(row.pooled).unwrap();
        let ours: Vec<f32> = bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        let ours = Tensor::from_slice(&ours);
        let theirs = expected[encoder].view(-1);
        assert_eq!(ours.size(), theirs.size(), "{encoder}");
        let error = f64::try_from((&ours - &theirs).norm() / theirs.norm()).unwrap();
        assert!(error < 3e-3, "{encoder}: {error}, bf16 rounds by at most 2^-9");
    }
    assert_eq!(reader.meta().encoders.keys().collect::<Vec<_>>(), ["clip", "t5"]);
    assert_ne!(reader.meta().encoders["clip"], reader.meta().encoders["t5"]);
}

#[test]
fn a_caption_that_is_cut_is_told_with_its_beginning() {
    let long = "the moon over the sea, ".repeat(12);
    let run = run(vec![sample(&picture(80, 80, 0), &long), sample(&picture(80, 80, 1), "short")], json!({}));
    let warning = run.warnings().into_iter().find(|text| text.contains("`t5`")).expect("a warning").to_owned();
    assert!(
        warning.starts_with("longer than the 32 tokens that text encoder `t5` reads: 1 of 3 captions"),
        "{warning}"
    );
    assert!(warning.contains("the moon over the sea"), "{warning}");
    assert_eq!(run.outcome().info["truncated"]["t5"], 1);
}

#[test]
fn captions_in_the_wrong_encoding_are_told() {
    let samples = vec![sample(&picture(80, 80, 0), "un cafÃ©"), sample(&picture(80, 80, 1), "un thé")];
    let run = run(samples, json!({}));
    let warning =
        run.warnings().into_iter().find(|text| text.contains("wrong encoding")).expect("a warning").to_owned();
    assert!(warning.contains("1 of 3 captions, such as \"un cafÃ©\""), "{warning}");
}
