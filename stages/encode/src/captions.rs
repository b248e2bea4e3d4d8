//! Distinct captions to embeddings, stored in bf16 under the digest of their text.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use models::{Encoded, TextEncoders};
use serde_json::json;
use spec::Problem;
use stage::{Exit, Failure, Work};
use store::Digest;
use tables::{Caption, CaptionsWriter, TextMeta};
use tch::{Device, Kind, Tensor, no_grad};

use crate::engine::Engine;
use crate::{Encode, KEPT, VERSION, unusable};

/// What came of the captions.
pub(crate) struct Made {
    /// Distinct captions, the empty one included.
    pub(crate) captions: usize,
    /// Encoder → captions longer than it reads.
    pub(crate) truncated: BTreeMap<String, usize>,
}

/// Encodes `captions` (digest → text) into `captions/part-00000.parquet`, sorted by digest and encoder.
pub(crate) fn encode(
    work: &Work<Encode>,
    captions: &BTreeMap<String, String>,
    encoders: &(dyn TextEncoders + Send + Sync),
    identities: &BTreeMap<String, Digest>,
    engine: &Engine,
) -> Result<Made, Failure> {
    let parameters = &work.parameters;
    let max_tokens = parameters.max_sequence_length as usize;
    let meta = TextMeta {
        encoders: identities.iter().map(|(name, identity)| (name.clone(), identity.to_string())).collect(),
        max_tokens: parameters.max_sequence_length,
    };
    let mut writer =
        CaptionsWriter::create(&work.request.output.join("captions/part-00000.parquet"), &meta).map_err(unusable)?;
    let mut cut = Cut::default();
    let all: Vec<_> = captions.iter().collect();
    let batch_size = engine.batch_size(work.settings.text_batch_size, 32);
    let done = AtomicU64::new(0);
    for chunk in all.chunks(batch_size * engine.width() * 8) {
        let batches: Vec<_> = chunk.chunks(batch_size).collect();
        let encoded = engine.run(&batches, |rows| {
            work.events.check_interrupted(KEPT)?;
            let texts: Vec<String> = rows.iter().map(|(_, text)| (*text).clone()).collect();
            let encoded = no_grad(|| encoders.encode(&texts, max_tokens)).map_err(Failure::from_diagnostic)?;
            let done = done.fetch_add(rows.len() as u64, Ordering::Relaxed) + rows.len() as u64;
            work.events.progress("encoding captions", done, Some(all.len() as u64), "captions", None);
            Ok::<_, Failure>(encoded)
        });
        for (rows, encoded) in batches.into_iter().zip(encoded) {
            for ((digest, text), by_encoder) in rows.iter().zip(encoded?) {
                cut.note(text, encoders, max_tokens)?;
                for (encoder, made) in by_encoder {
                    let how = json!({ "step": VERSION, "encoder": identities.get(&encoder), "how": parameters.caption_key() });
                    let key = Digest::of_json(&json!({ "caption": digest, "name": encoder, "encoder": how }));
                    writer.push(row(digest, text, &encoder, &made, key.to_string())?).map_err(unusable)?;
                }
            }
        }
    }
    writer.finish().map_err(unusable)?;
    cut.warn(work, all.len());
    Ok(Made { captions: all.len(), truncated: cut.count })
}

fn row(digest: &str, text: &str, encoder: &str, made: &Encoded, item_key: String) -> Result<Caption, Failure> {
    let tensors = [&made.embedding, &made.pooled].into_iter().flatten();
    let width = tensors.last().and_then(|tensor| tensor.size().last().copied()).unwrap_or(0);
    let bytes = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| bf16(tensor, text, encoder)).transpose();
    Ok(Caption {
        caption_digest: digest.to_owned(),
        text: text.to_owned(),
        encoder: encoder.to_owned(),
        tokens: made.tokens as i32,
        width: width as i32,
        item_key,
        embedding: bytes(&made.embedding)?,
        pooled: bytes(&made.pooled)?,
    })
}

/// Little-endian bf16 bytes, all of them finite numbers.
fn bf16(tensor: &Tensor, text: &str, encoder: &str) -> Result<Vec<u8>, Failure> {
    let tensor = tensor.to_device(Device::Cpu).to_kind(Kind::BFloat16).contiguous();
    if i64::try_from(tensor.isfinite().all()).map_err(Failure::from_error)? == 0 {
        let problem = Problem::new(format!("text encoder `{encoder}` makes infinite or undefined numbers of {text:?}"))
            .help("the weights may be broken, or need `dtype = \"float32\"`");
        return Err(Failure::new(Exit::Numbers, problem));
    }
    let mut bytes = vec![0; 2 * tensor.numel()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel()).map_err(Failure::from_error)?;
    Ok(bytes)
}

/// Captions that an encoder does not read to their end.
#[derive(Default)]
struct Cut {
    count: BTreeMap<String, usize>,
    /// Encoder → the longest: its tokens, the encoder's limit, its text.
    longest: BTreeMap<String, (usize, usize, String)>,
}

impl Cut {
    fn note(
        &mut self,
        text: &str,
        encoders: &(dyn TextEncoders + Send + Sync),
        max_tokens: usize,
    ) -> Result<(), Failure> {
        for (encoder, length) in encoders.lengths(text, max_tokens).map_err(unusable)? {
            if length.tokens > length.limit {
                *self.count.entry(encoder.to_owned()).or_default() += 1;
                let longest = self.longest.entry(encoder.to_owned()).or_default();
                if length.tokens > longest.0 {
                    *longest = (length.tokens, length.limit, text.to_owned());
                }
            }
        }
        Ok(())
    }

    fn warn(&self, work: &Work<Encode>, all: usize) {
        for (encoder, count) in &self.count {
            let Some((tokens, limit, text)) = self.longest.get(encoder) else { continue };
            let start: String = text.chars().take(60).collect();
            work.events.warning(format!(
                "{count} of {all} captions are longer than the {limit} tokens that text encoder `{encoder}` reads; the rest of \
                 them is cut off (longest: {tokens} tokens, {start:?}…)"
            ));
        }
    }
}
