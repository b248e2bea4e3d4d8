//! Distinct captions to embeddings, stored in bf16 under the digest of their text; those that are there are not made again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

use models::{DynTextEncoders, Encoded, Length, TextEncoders};
use serde_json::json;
use spec::{Problem, counted};
use stage::{Events, Exit, Failure, Work};
use store::Digest;
use tables::{Caption, CaptionInfo, TableReader, TextMeta};
use tch::{Device, Kind, Tensor, no_grad};

use crate::engine::Engine;
use crate::parameters::Parameters;
use crate::shards;
use crate::stock::{Captions, Parts, Place, Stock};
use crate::{Encode, ITEM_VERSION, KEPT, unusable};

/// What came of the captions.
pub(crate) struct Made {
    /// Distinct captions, the empty one included.
    pub(crate) captions: usize,
    /// Those of them that were encoded now.
    pub(crate) new: usize,
    /// Encoder → captions longer than it reads.
    pub(crate) truncated: BTreeMap<String, usize>,
}

/// Embeddings that a data set needs: (caption, encoder), in the order of the table.
pub(crate) struct Wanted<'a> {
    /// Digest → text.
    texts: &'a BTreeMap<String, String>,
    keys: BTreeMap<(&'a str, &'a str), Digest>,
}

impl<'a> Wanted<'a> {
    /// By each encoder, whose identity tells what it makes of a text.
    pub(crate) fn new(
        parameters: &Parameters,
        texts: &'a BTreeMap<String, String>,
        encoders: &'a BTreeMap<String, Digest>,
    ) -> Self {
        let how = |identity| json!({ "step": ITEM_VERSION, "encoder": identity, "how": parameters.caption_key() });
        let how: BTreeMap<&str, _> = encoders.iter().map(|(name, identity)| (name.as_str(), how(identity))).collect();
        let key = |digest: &str, name: &str| {
            Digest::of_json(&json!({ "caption": digest, "name": name, "encoder": how.get(name) }))
        };
        let pairs = texts.keys().flat_map(|digest| encoders.keys().map(move |name| (digest.as_str(), name.as_str())));
        Self { texts, keys: pairs.map(|(digest, name)| ((digest, name), key(digest, name))).collect() }
    }

    /// Their keys.
    pub(crate) fn keys(&self) -> BTreeSet<Digest> {
        self.keys.values().copied().collect()
    }

    /// Captions of which an embedding is not there.
    pub(crate) fn missing(&self, stock: &Stock<Captions>) -> BTreeMap<&'a str, &'a str> {
        let missing = self.keys.iter().filter(|(_, key)| stock.find(key).is_none());
        missing.filter_map(|((digest, _), _)| Some((*digest, self.texts.get(*digest)?.as_str()))).collect()
    }
}

/// Writes the embeddings into `captions/`, sorted by caption and encoder. The encoders are loaded only if they have to be.
pub(crate) fn encode(
    work: &Work<Encode>,
    texts: &BTreeMap<String, String>,
    identities: &BTreeMap<String, Digest>,
    load: impl FnOnce() -> Result<(DynTextEncoders, Engine), Failure>,
) -> Result<Made, Failure> {
    let wanted = Wanted::new(&work.parameters, texts, identities);
    let keys = wanted.keys();
    let meta = TextMeta {
        encoders: identities.iter().map(|(name, identity)| (name.clone(), identity.to_string())).collect(),
        max_tokens: work.parameters.max_sequence_length,
    };
    let mut stock = Stock::<Captions>::gather(&work.request.previous, Some(&work.request.scratch), &keys)?;
    let todo: Vec<_> = wanted.missing(&stock).into_iter().collect();
    if !todo.is_empty() {
        let (encoders, engine) = load()?;
        let mut parts = Parts::new(&work.request, meta.clone(), &keys);
        make(work, &wanted, &todo, encoders.as_ref(), &engine, &mut stock, &mut parts)?;
        parts.close(&mut stock)?;
    }

    let places = wanted.keys.iter().map(|((digest, encoder), key)| {
        stock
            .find(key)
            .ok_or_else(|| Problem::new(format!("the {encoder} embedding of caption {digest} was lost")).into())
    });
    let places = places.collect::<Result<Vec<Place>, Failure>>()?;
    let ends =
        shards::ends(wanted.keys.keys().map(|(digest, _)| *digest), row_bytes(&stock, &places, identities.len())?);
    let folder = work.request.output.join("captions");
    shards::write(&folder, &meta, &stock, &places, &ends, |_, _| true, |_, _| (), &work.events)?;
    let cut = Cut::of(&TableReader::open(&folder).map_err(unusable)?)?;
    cut.warn(&work.events, texts.len());
    Ok(Made { captions: texts.len(), new: todo.len(), truncated: cut.count })
}

/// Encodes captions a few batches at a time.
fn make(
    work: &Work<Encode>,
    wanted: &Wanted<'_>,
    todo: &[(&str, &str)],
    encoders: &(dyn TextEncoders + Send + Sync),
    engine: &Engine,
    stock: &mut Stock<Captions>,
    parts: &mut Parts<'_, Captions>,
) -> Result<(), Failure> {
    let max_tokens = work.parameters.max_sequence_length as usize;
    let batch_size = engine.batch_size(work.settings.text_batch_size, 32);
    let done = AtomicU64::new(0);
    for chunk in todo.chunks(batch_size * engine.width() * 8) {
        let batches: Vec<_> = chunk.chunks(batch_size).collect();
        let encoded = engine.run(&batches, |rows| {
            work.events.check_interrupted(KEPT)?;
            let texts: Vec<String> = rows.iter().map(|(_, text)| (*text).to_owned()).collect();
            let encoded = no_grad(|| encoders.encode(&texts, max_tokens)).map_err(Failure::from_diagnostic)?;
            let done = done.fetch_add(rows.len() as u64, Ordering::Relaxed) + rows.len() as u64;
            work.events.progress("encoding captions", done, Some(todo.len() as u64), "captions", None);
            Ok::<_, Failure>(encoded)
        });
        for (rows, encoded) in batches.into_iter().zip(encoded) {
            for ((digest, text), by_encoder) in rows.iter().zip(encoded?) {
                let lengths = encoders.lengths(text, max_tokens).map_err(unusable)?;
                let mut made = Vec::new();
                for (encoder, one) in &by_encoder {
                    let (Some(key), Some(length)) =
                        (wanted.keys.get(&(*digest, encoder.as_str())), lengths.get(encoder.as_str()))
                    else {
                        return Err(
                            Problem::new(format!("the model names no files of its text encoder `{encoder}`")).into()
                        );
                    };
                    if stock.find(key).is_none() {
                        made.push(row(digest, text, encoder, one, *length, key)?);
                    }
                }
                parts.push(stock, made)?;
            }
        }
    }
    Ok(())
}

fn row(
    digest: &str,
    text: &str,
    encoder: &str,
    made: &Encoded,
    length: Length,
    key: &Digest,
) -> Result<Caption, Failure> {
    let tensors = [&made.embedding, &made.pooled].into_iter().flatten();
    let width = tensors.last().and_then(|tensor| tensor.size().last().copied()).unwrap_or(0);
    let bytes = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| bf16(tensor, text, encoder)).transpose();
    Ok(Caption {
        caption_digest: digest.to_owned(),
        text: text.to_owned(),
        encoder: encoder.to_owned(),
        tokens: made.tokens as i32,
        width: width as i32,
        text_tokens: length.tokens as i32,
        max_tokens: length.limit as i32,
        item_key: key.to_string(),
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

/// Mean size of the rows of one caption, which every caption has about alike.
fn row_bytes(stock: &Stock<Captions>, places: &[Place], encoders: usize) -> Result<usize, Failure> {
    let mut sum = 0;
    for place in &places[..encoders.min(places.len())] {
        let row: CaptionInfo = stock.files[place.file].table.get(place.at).map_err(unusable)?;
        sum += 2 * usize::try_from(row.tokens).unwrap_or(0) * usize::try_from(row.width).unwrap_or(0);
    }
    Ok(sum / encoders.max(1))
}

/// Captions that an encoder does not read to their end.
#[derive(Default)]
struct Cut {
    count: BTreeMap<String, usize>,
    /// Encoder → the longest: its tokens, the encoder's limit, its text.
    longest: BTreeMap<String, (i32, i32, String)>,
}

impl Cut {
    fn of(table: &TableReader) -> Result<Self, Failure> {
        let mut cut = Self::default();
        for row in table.rows::<CaptionInfo>() {
            let (_, row) = row.map_err(unusable)?;
            if row.text_tokens > row.max_tokens {
                *cut.count.entry(row.encoder.clone()).or_default() += 1;
                let longest = cut.longest.entry(row.encoder).or_default();
                if row.text_tokens > longest.0 {
                    *longest = (row.text_tokens, row.max_tokens, row.text);
                }
            }
        }
        Ok(cut)
    }

    fn warn(&self, events: &Events, all: usize) {
        for (encoder, count) in &self.count {
            let Some((tokens, limit, text)) = self.longest.get(encoder) else { continue };
            let start: String = text.chars().take(60).collect();
            events.warning(format!(
                "longer than the {} that text encoder `{encoder}` reads: {count} of {}; the rest is cut off (longest: {}, {start:?}…)",
                counted(*limit, "token"),
                counted(all, "caption"),
                counted(*tokens, "token")
            ));
        }
    }
}
