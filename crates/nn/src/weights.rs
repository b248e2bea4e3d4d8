//! Reading safetensors: one file, or shards joined by an index.
//!
//! Only headers are read at first; each tensor is then read straight into its own memory. Every number in a header is checked
//! before it is used, so a hostile file costs its header's size and no more.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::builder::missing;
use crate::error::{Error, Result};
use crate::share::{Run, Share};

/// Largest header accepted, that of the reference implementation.
const HEADER_LIMIT: u64 = 100_000_000;

/// The tensors of a checkpoint, on disk.
#[derive(Debug)]
pub struct Weights {
    origin: String,
    files: Vec<fs_err::File>,
    tensors: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    offset: u64,
    kind: Kind,
    shape: Vec<i64>,
    /// What is seen of it, if not all.
    share: Option<Share>,
}

/// One tensor in a safetensors header.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Described {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<i64>,
    pub(crate) data_offsets: [u64; 2],
}

/// `*.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// `{stem}.safetensors` of a folder, or the shards named by its `{stem}.safetensors.index.json`.
    pub fn open(folder: &Path, stem: &str) -> Result<Self> {
        let single = folder.join(format!("{stem}.safetensors"));
        let index = folder.join(format!("{stem}.safetensors.index.json"));
        if single.is_file() || !index.is_file() {
            return Self::file(&single);
        }
        let bad = |reason: String| Error::File { path: index.clone(), reason };
        let map: Index = serde_json::from_slice(&fs_err::read(&index)?).map_err(|error| bad(error.to_string()))?;
        let mut weights = Self::empty(folder);
        let mut shards: Vec<_> = map.weight_map.values().collect();
        shards.sort();
        shards.dedup();
        for shard in shards {
            let plain = matches!(Path::new(shard).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
            if !plain {
                return Err(bad(format!("shard `{shard}` is not a plain file name")));
            }
            weights.add(&folder.join(shard))?;
        }
        let absent: Vec<_> =
            map.weight_map.keys().map(String::as_str).filter(|name| weights.shape(name).is_none()).collect();
        if absent.is_empty() {
            Ok(weights)
        } else {
            Err(bad(format!("no shard holds {}", crate::error::some_of(absent))))
        }
    }

    /// A single file.
    pub fn file(path: &Path) -> Result<Self> {
        let mut weights = Self::empty(path);
        weights.add(path)?;
        Ok(weights)
    }

    fn empty(origin: &Path) -> Self {
        let origin = origin.display().to_string();
        Self { origin, files: Vec::new(), tensors: BTreeMap::new(), metadata: BTreeMap::new() }
    }

    /// The same checkpoint, of which only `share(name)` of a tensor is seen and read, where there is one; where `share` says
    /// `None`, the tensor is not seen. A share of another shape than the tensor is an error; scalars are always seen whole.
    pub fn seen(mut self, share: impl Fn(&str) -> Option<Share>) -> Result<Self> {
        for (name, mut entry) in std::mem::take(&mut self.tensors) {
            let Some(share) = share(&name) else { continue };
            if !entry.shape.is_empty() {
                if entry.shape != share.whole_shape() {
                    let (found, expected) = (entry.shape, share.whole_shape().to_vec());
                    return Err(Error::Shape { origin: self.origin, name, found, expected });
                }
                entry.shape = share.held_shape();
                entry.share = Some(share);
            }
            self.tensors.insert(name, entry);
        }
        Ok(self)
    }

    /// File or folder that was opened, for messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Keys in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape of a tensor, if there is such a key.
    pub fn shape(&self, name: &str) -> Option<&[i64]> {
        self.tensors.get(name).map(|entry| entry.shape.as_slice())
    }

    /// Kind of a tensor, if there is such a key.
    pub fn kind(&self, name: &str) -> Option<Kind> {
        self.tensors.get(name).map(|entry| entry.kind)
    }

    /// `__metadata__` of the header (of the last shard that has each key).
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Reads a tensor, as stored, to the CPU.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let entry = self.tensors.get(name).ok_or_else(|| missing(&self.origin, name, &[], self.names()))?;
        let whole = Run { first: 0, length: entry.shape.iter().product::<i64>() as usize };
        self.read(name, entry, &entry.shape, &entry.share.as_ref().map_or_else(|| vec![whole], Share::runs))
    }

    /// Reads what `share` is of a tensor, which must have the share's whole shape.
    pub fn share(&self, name: &str, share: &Share) -> Result<Tensor> {
        self.must_have(name, share.whole_shape(), self.shape(name))?;
        let entry = self.tensors.get(name).ok_or_else(|| missing(&self.origin, name, &[], self.names()))?;
        self.read(name, entry, &share.held_shape(), &share.runs())
    }

    fn read(&self, name: &str, entry: &Entry, shape: &[i64], runs: &[Run]) -> Result<Tensor> {
        let (file, width) = (&self.files[entry.file], entry.kind.elt_size_in_bytes());
        let read = torch::host::filled(entry.kind, shape, |mut bytes| {
            for run in runs {
                let (now, later) = bytes.split_at_mut(run.length * width);
                file.file().read_exact_at(now, entry.offset + (run.first * width) as u64)?;
                bytes = later;
            }
            Ok(())
        })?;
        read.map_err(|error| Error::File { path: file.path().to_owned(), reason: format!("tensor `{name}`: {error}") })
    }

    /// Reads a tensor that must have this shape.
    pub fn tensor_of_shape(&self, name: &str, shape: &[i64]) -> Result<Tensor> {
        self.must_have(name, shape, self.shape(name))?;
        self.tensor(name)
    }

    fn must_have(&self, name: &str, shape: &[i64], found: Option<&[i64]>) -> Result<()> {
        match found {
            Some(found) if found == shape => Ok(()),
            Some(found) => Err(Error::Shape {
                origin: self.origin.clone(),
                name: name.to_owned(),
                found: found.to_vec(),
                expected: shape.to_vec(),
            }),
            None => Err(missing(&self.origin, name, shape, self.names())),
        }
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let file = fs_err::File::open(path)?;
        let (header, data) = read_header(&file)?;
        let bad = |reason: String| Error::File { path: path.to_owned(), reason };
        let length = file.metadata()?.len() - data;
        let mut spans = Vec::new();
        for (name, value) in header {
            if name == "__metadata__" {
                let metadata: BTreeMap<String, String> =
                    serde_json::from_value(value).map_err(|error| bad(format!("`__metadata__`: {error}")))?;
                self.metadata.extend(metadata);
                continue;
            }
            let tensor: Described =
                serde_json::from_value(value).map_err(|error| bad(format!("tensor `{name}`: {error}")))?;
            let entry = entry(&tensor, length, self.files.len(), data)
                .map_err(|reason| bad(format!("tensor `{name}`: {reason}")))?;
            spans.push(tensor.data_offsets);
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(bad(format!("tensor `{name}` is also in another shard")));
            }
        }
        spans.sort_unstable();
        let end = spans.iter().try_fold(0, |end, [from, to]| (*from == end).then_some(*to));
        if end != Some(length) {
            return Err(bad(format!("its tensors do not fill its {length} bytes of data one after another")));
        }
        self.files.push(file);
        Ok(())
    }
}

/// The header of a safetensors file and the offset of its data.
fn read_header(file: &fs_err::File) -> Result<(serde_json::Map<String, serde_json::Value>, u64)> {
    let bad = |reason: String| Error::File { path: file.path().to_owned(), reason };
    let available = file.metadata()?.len();
    let mut prefix = [0; 8];
    let length = match file.file().read_exact_at(&mut prefix, 0) {
        Ok(()) => u64::from_le_bytes(prefix),
        Err(error) => return Err(bad(format!("not a safetensors file: {error}"))),
    };
    if length > HEADER_LIMIT || length > available - 8 {
        return Err(bad(format!(
            "not a safetensors file, or cut short: header of {length} bytes in a file of {available}"
        )));
    }
    let mut header = vec![0; usize::try_from(length).unwrap_or(0)];
    file.file().read_exact_at(&mut header, 8)?;
    let header = serde_json::from_slice(&header).map_err(|error| bad(format!("header: {error}")))?;
    Ok((header, 8 + length))
}

fn entry(tensor: &Described, length: u64, file: usize, data: u64) -> Result<Entry, String> {
    let kind = kind_of(&tensor.dtype).ok_or_else(|| format!("dtype `{}` is not supported", tensor.dtype))?;
    let size = tensor
        .shape
        .iter()
        .try_fold(kind.elt_size_in_bytes() as u64, |size, &side| size.checked_mul(u64::try_from(side).ok()?))
        .ok_or_else(|| format!("impossible shape {:?}", tensor.shape))?;
    let [from, to] = tensor.data_offsets;
    if to > length || from.checked_add(size) != Some(to) {
        return Err(format!("bytes {from}..{to} of {length} do not hold {} {:?}", tensor.dtype, tensor.shape));
    }
    Ok(Entry { file, offset: data + from, kind, shape: tensor.shape.clone(), share: None })
}

/// In the order in which the reference implementation lays tensors out: wide elements first, so that all are aligned.
const KINDS: [(&str, Kind); 9] = [
    ("I64", Kind::Int64),
    ("F64", Kind::Double),
    ("F32", Kind::Float),
    ("I32", Kind::Int),
    ("BF16", Kind::BFloat16),
    ("F16", Kind::Half),
    ("I16", Kind::Int16),
    ("U8", Kind::Uint8),
    ("BOOL", Kind::Bool),
];

fn kind_of(dtype: &str) -> Option<Kind> {
    KINDS.iter().find(|(name, _)| *name == dtype).map(|(_, kind)| *kind)
}

/// Rank in a file's layout and name of a kind, if it has one here.
pub(crate) fn dtype_of(kind: Kind) -> Option<(usize, &'static str)> {
    KINDS.iter().enumerate().find(|(_, (_, known))| *known == kind).map(|(rank, (name, _))| (rank, *name))
}
