//! The few fields of a sentencepiece `.model` file (a protocol buffer) that a unigram tokenizer is made from.

/// Pieces in id order, and the normalisation table.
#[derive(Debug, Default)]
pub(crate) struct SentencePiece {
    /// Piece and log probability.
    pub(crate) pieces: Vec<(String, f64)>,
    /// Id of the piece for unknown characters.
    pub(crate) unknown: usize,
    /// `precompiled_charsmap`, empty for the identity.
    pub(crate) charsmap: Vec<u8>,
}

impl SentencePiece {
    /// `None` if the bytes are no such file.
    pub(crate) fn parse(file: &[u8]) -> Option<Self> {
        let mut model = Self::default();
        for field in fields(file) {
            match field? {
                // ModelProto.pieces { piece = 1, score = 2, type = 3 (2 is UNKNOWN) }
                (1, Field::Bytes(entry)) => {
                    let (mut piece, mut score) = (None, 0.0);
                    for field in fields(entry) {
                        match field? {
                            (1, Field::Bytes(text)) => piece = Some(std::str::from_utf8(text).ok()?.to_owned()),
                            (2, Field::Word(bits)) => score = f64::from(f32::from_bits(bits)),
                            (3, Field::Number(2)) => model.unknown = model.pieces.len(),
                            _ => {}
                        }
                    }
                    model.pieces.push((piece?, score));
                }
                // ModelProto.normalizer_spec { precompiled_charsmap = 2 }
                (3, Field::Bytes(spec)) => {
                    for field in fields(spec) {
                        if let (2, Field::Bytes(charsmap)) = field? {
                            model.charsmap = charsmap.to_vec();
                        }
                    }
                }
                _ => {}
            }
        }
        (!model.pieces.is_empty()).then_some(model)
    }
}

enum Field<'a> {
    Number(u64),
    Word(u32),
    Bytes(&'a [u8]),
    Long,
}

/// Number and value of each field of a message; a `None` ends a malformed one.
fn fields(mut rest: &[u8]) -> impl Iterator<Item = Option<(u64, Field<'_>)>> {
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let field = field(&mut rest);
        if field.is_none() {
            rest = &[];
        }
        Some(field)
    })
}

fn field<'a>(rest: &mut &'a [u8]) -> Option<(u64, Field<'a>)> {
    let key = varint(rest)?;
    let value = match key & 7 {
        0 => Field::Number(varint(rest)?),
        1 => rest.split_off(..8).map(|_| Field::Long)?,
        2 => {
            let length = usize::try_from(varint(rest)?).ok()?;
            Field::Bytes(rest.split_off(..length)?)
        }
        5 => Field::Word(u32::from_le_bytes(rest.split_off(..4)?.try_into().ok()?)),
        _ => return None,
    };
    Some((key >> 3, value))
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *rest.split_off_first()?;
        value |= u64::from(byte & 127) << shift;
        if byte < 128 {
            return Some(value);
        }
    }
    None
}
