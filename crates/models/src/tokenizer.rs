//! Tokenizers from a model folder: `tokenizer.json`, or what released folders have in its place (CLIP `vocab.json` and `merges.txt`,
//! T5 `spiece.model`). Ids are those of transformers 5, which takes the vocabulary from these files and builds normaliser and
//! pre-tokeniser itself. Texts are truncated and padded on the right to one length.

use serde_json::{Value, json};
use tokenizers::{NormalizerWrapper, PostProcessor, TruncationDirection};

use crate::error::{Error, Result};
use crate::folder::ModelFolder;
use crate::sentencepiece::SentencePiece;

/// A tokenizer and how it pads.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pad: i64,
    /// `model_max_length`, if the configuration has a real one.
    pub max_length: Option<usize>,
    fail: (std::path::PathBuf, String),
}

impl Tokenizer {
    /// CLIP's byte-level BPE.
    pub fn clip(folder: &ModelFolder, component: &str) -> Result<Self> {
        let settings = Settings::read(folder, component)?;
        let part = format!("{component}/tokenizer.json");
        let vocabulary = match folder.file(&part) {
            Some(_) => ClipVocabulary::from_json(folder.json(&part, "")?),
            None => ClipVocabulary::from_files(folder, component, &settings)?,
        };
        let json = vocabulary.tokenizer().map_err(|reason| folder.config_error(component, &reason))?;
        Self::new(folder, component, &settings, &json, None, "<|endoftext|>")
    }

    /// T5's sentencepiece unigram model.
    pub fn t5(folder: &ModelFolder, component: &str) -> Result<Self> {
        let settings = Settings::read(folder, component)?;
        let part = format!("{component}/tokenizer.json");
        if folder.file(&part).is_some() {
            let mut json = folder.json(&part, "")?;
            json["normalizer"] = precompiled(&json["normalizer"]);
            json["pre_tokenizer"] = t5_pre_tokenizer();
            // UMT5's pieces for single bytes are there but not used.
            json["model"]["byte_fallback"] = Value::Bool(false);
            return Self::new(folder, component, &settings, &json, None, "<pad>");
        }
        let spiece = format!("{component}/spiece.model");
        let purpose = format!("T5 needs it, or `{spiece}` in its place");
        let file = folder.file(&spiece).ok_or_else(|| folder.missing(&part, &purpose))?;
        let model = SentencePiece::parse(&fs_err::read(file)?)
            .ok_or_else(|| folder.config_error(&spiece, "it is not a sentencepiece model"))?;
        let normalizer = (!model.charsmap.is_empty())
            .then(|| tokenizers::normalizers::Precompiled::from(&model.charsmap))
            .transpose()
            .map_err(|e| folder.config_error(&spiece, &format!("its normalisation table cannot be read: {e}")))?;
        let json = t5_json(&model, settings.extra_ids);
        Self::new(folder, component, &settings, &json, normalizer.map(Into::into), "<pad>")
    }

    fn new(
        folder: &ModelFolder,
        component: &str,
        settings: &Settings,
        json: &Value,
        normalizer: Option<NormalizerWrapper>,
        default_pad: &str,
    ) -> Result<Self> {
        let fail = (folder.path.clone(), component.to_owned());
        let error = |reason: String| Error::Tokenizer { folder: fail.0.clone(), component: fail.1.clone(), reason };
        let bytes = serde_json::to_vec(json).map_err(|e| error(e.to_string()))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| error(e.to_string()))?;
        if normalizer.is_some() {
            inner.with_normalizer(normalizer).map_err(|e| error(e.to_string()))?;
        }
        inner.with_truncation(None).map_err(|e| error(e.to_string()))?;
        inner.with_padding(None);
        let pad = settings.pad.as_deref().unwrap_or(default_pad);
        let pad = inner
            .token_to_id(pad)
            .ok_or_else(|| error(format!("its padding token `{pad}` is not in its vocabulary")))?;
        Ok(Self { inner, pad: i64::from(pad), max_length: settings.max_length, fail })
    }

    /// Ids of `text` with the special tokens, neither truncated nor padded.
    pub fn ids(&self, text: &str) -> Result<Vec<i64>> {
        let encoding = self.inner.encode(text, true).map_err(|e| self.error(&e.to_string()))?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }

    /// Exactly `length` ids: the text is cut so that the special tokens still fit, then padded.
    pub fn padded_ids(&self, text: &str, length: usize) -> Result<Vec<i64>> {
        let mut encoding = self.inner.encode(text, false).map_err(|e| self.error(&e.to_string()))?;
        let special = self.inner.get_post_processor().map_or(0, |p| p.added_tokens(false));
        let room = length
            .checked_sub(special)
            .ok_or_else(|| self.error(&format!("a length of {length} leaves no room for its special tokens")))?;
        encoding.truncate(room, 0, TruncationDirection::Right);
        let encoding = self.inner.post_process(encoding, None, true).map_err(|e| self.error(&e.to_string()))?;
        let mut ids: Vec<i64> = encoding.get_ids().iter().map(|&id| i64::from(id)).collect();
        ids.resize(length, self.pad);
        Ok(ids)
    }

    fn error(&self, reason: &str) -> Error {
        Error::Tokenizer { folder: self.fail.0.clone(), component: self.fail.1.clone(), reason: reason.into() }
    }
}

/// What `tokenizer_config.json` says beside the tokenizer proper.
struct Settings {
    pad: Option<String>,
    max_length: Option<usize>,
    extra_ids: usize,
    /// `added_tokens_decoder`, by id.
    added: Vec<(u64, Value)>,
}

impl Settings {
    fn read(folder: &ModelFolder, component: &str) -> Result<Self> {
        let part = format!("{component}/tokenizer_config.json");
        let json = if folder.file(&part).is_some() { folder.json(&part, "")? } else { Value::Null };
        let added = json["added_tokens_decoder"].as_object().into_iter().flatten();
        let mut added: Vec<_> = added.filter_map(|(id, token)| Some((id.parse().ok()?, token.clone()))).collect();
        added.sort_by_key(|(id, _)| *id);
        Ok(Self {
            pad: json["pad_token"].as_str().or_else(|| json["pad_token"]["content"].as_str()).map(Into::into),
            // "No limit" is written as 1e30.
            max_length: json["model_max_length"].as_u64().filter(|&n| n < 1 << 32).map(|n| n as usize),
            extra_ids: json["extra_ids"].as_u64().unwrap_or(100) as usize,
            added,
        })
    }
}

/// What a CLIP tokenizer is made from.
struct ClipVocabulary {
    vocab: Value,
    merges: Value,
    added: Value,
}

impl ClipVocabulary {
    fn from_json(mut json: Value) -> Self {
        Self {
            vocab: json["model"]["vocab"].take(),
            merges: json["model"]["merges"].take(),
            added: json["added_tokens"].take(),
        }
    }

    fn from_files(folder: &ModelFolder, component: &str, settings: &Settings) -> Result<Self> {
        let purpose = "CLIP's tokenizer needs `tokenizer.json`, or `vocab.json` and `merges.txt`";
        let vocab = folder.json(&format!("{component}/vocab.json"), purpose)?;
        let part = format!("{component}/merges.txt");
        let merges = fs_err::read_to_string(folder.file(&part).ok_or_else(|| folder.missing(&part, purpose))?)?;
        let merges = merges.lines().filter(|line| !line.starts_with("#version") && !line.trim().is_empty()).collect();
        let added = settings.added.iter().map(|(id, token)| added_token(*id, token)).collect();
        Ok(Self { vocab, merges, added })
    }

    /// `tokenizer.json` as transformers' `CLIPTokenizer` builds it.
    fn tokenizer(self) -> Result<Value, String> {
        let id =
            |token: &str| self.vocab[token].as_u64().ok_or_else(|| format!("token `{token}` is not in its vocabulary"));
        let (start, end) = (id("<|startoftext|>")?, id("<|endoftext|>")?);
        let added = match self.added.as_array() {
            Some(tokens) if !tokens.is_empty() => self.added,
            _ => json!([special_token(start, "<|startoftext|>"), special_token(end, "<|endoftext|>")]),
        };
        Ok(json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}, {"type": "Lowercase"}]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "behavior": "Removed", "invert": true, "pattern": {"Regex":
                    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"}},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]},
            "post_processor": {"type": "RobertaProcessing", "sep": ["<|endoftext|>", end], "cls": ["<|startoftext|>", start],
                "trim_offsets": false, "add_prefix_space": false},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "unk_token": "<|endoftext|>", "continuing_subword_prefix": "", "end_of_word_suffix": "</w>",
                "fuse_unk": false, "byte_fallback": false, "vocab": self.vocab, "merges": self.merges},
        }))
    }
}

/// The table of character replacements within a normaliser, without the steps that older converters put around it.
fn precompiled(normalizer: &Value) -> Value {
    if normalizer["type"] == "Precompiled" {
        return normalizer.clone();
    }
    let steps = normalizer["normalizers"].as_array().into_iter().flatten();
    steps.map(precompiled).find(|step| !step.is_null()).unwrap_or(Value::Null)
}

fn t5_pre_tokenizer() -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "WhitespaceSplit"}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}]})
}

/// `tokenizer.json` (but for the normaliser) of a T5 tokenizer that has only `spiece.model`, as transformers' `T5Tokenizer` builds it.
fn t5_json(model: &SentencePiece, extra_ids: usize) -> Value {
    let sentinels = (0..extra_ids).rev().map(|i| (format!("<extra_id_{i}>"), 0.0));
    let vocab: Vec<(String, f64)> = model.pieces.iter().cloned().chain(sentinels).collect();
    let special = |(token, _): &(String, f64)| {
        ["<pad>", "</s>", "<unk>"].contains(&token.as_str()) || token.starts_with("<extra_id_")
    };
    let added: Vec<Value> =
        (0..).zip(&vocab).filter(|(_, v)| special(v)).map(|(id, v)| special_token(id, &v.0)).collect();
    let end = vocab.iter().position(|(token, _)| token == "</s>").unwrap_or(1);
    json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": t5_pre_tokenizer(),
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [end], "tokens": ["</s>"]}}},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": model.unknown, "vocab": vocab, "byte_fallback": false},
    })
}

fn special_token(id: u64, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
}

fn added_token(id: u64, token: &Value) -> Value {
    let flag = |name: &str, default| token[name].as_bool().unwrap_or(default);
    json!({
        "id": id, "content": token["content"], "single_word": flag("single_word", false), "lstrip": flag("lstrip", false),
        "rstrip": flag("rstrip", false), "normalized": flag("normalized", false), "special": flag("special", true),
    })
}
