//! Writing safetensors, whole or in shards named as diffusers names them. Equal tensors give equal bytes.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::builder::Named;
use crate::error::{Error, Result};
use crate::weights::{Described, dtype_of};

/// diffusers' default size of a shard: 10 GB.
pub const SHARD_BYTES: u64 = 10_000_000_000;

/// Writes one file under a temporary name, flushes it to disk and renames it.
pub fn save_safetensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    write(path, &tensors.into_iter().collect::<Vec<_>>(), None, metadata)
}

/// Writes `{stem}.safetensors`, or `{stem}-00001-of-0000N.safetensors` and `{stem}.safetensors.index.json` if the tensors
/// exceed `shard_bytes`, converting each to `kind` on the way. Returns the files written.
pub fn save_model(
    folder: &Path,
    stem: &str,
    tensors: &[Named],
    kind: Option<Kind>,
    shard_bytes: u64,
) -> Result<Vec<PathBuf>> {
    let size = |named: &Named| (named.tensor.numel() * kind.unwrap_or(named.tensor.kind()).elt_size_in_bytes()) as u64;
    let sizes: Vec<(&str, u64)> = tensors.iter().map(|named| (named.name.as_str(), size(named))).collect();
    let plan = Plan::new(stem, &sizes, shard_bytes);
    let mut files = Vec::new();
    for (file, members) in &plan.files {
        let members: Vec<(&str, &Tensor)> =
            members.iter().map(|index| (tensors[*index].name.as_str(), &tensors[*index].tensor)).collect();
        files.push(folder.join(file));
        write(&folder.join(file), &members, kind, &plan.metadata())?;
    }
    files.extend(plan.write_index(folder, stem)?);
    Ok(files)
}

/// Which file of a model each tensor goes to.
#[derive(Debug)]
pub struct Plan {
    /// File name → indices of its tensors.
    pub files: Vec<(String, Vec<usize>)>,
    weight_map: BTreeMap<String, String>,
    total: u64,
}

impl Plan {
    /// For tensors of given names and bytes, in order; see [`save_model`].
    pub fn new(stem: &str, sizes: &[(&str, u64)], shard_bytes: u64) -> Self {
        let mut shards: Vec<Vec<usize>> = Vec::new();
        let (mut open, mut filled) = (Vec::new(), 0);
        for (index, (_, bytes)) in sizes.iter().enumerate() {
            if *bytes > shard_bytes {
                shards.push(vec![index]);
                continue;
            }
            if filled + bytes > shard_bytes {
                shards.push(std::mem::take(&mut open));
                filled = 0;
            }
            open.push(index);
            filled += bytes;
        }
        if !open.is_empty() {
            shards.push(open);
        }
        let count = shards.len();
        let name = |i: usize| match count {
            1 => format!("{stem}.safetensors"),
            _ => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let files: Vec<_> = shards.into_iter().enumerate().map(|(i, members)| (name(i), members)).collect();
        let entries = files
            .iter()
            .flat_map(|(file, members)| members.iter().map(move |i| (sizes[*i].0.to_owned(), file.clone())));
        Self { weight_map: entries.collect(), total: sizes.iter().map(|(_, bytes)| bytes).sum(), files }
    }

    /// What diffusers and transformers want in each file.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        BTreeMap::from([("format".to_owned(), "pt".to_owned())])
    }

    /// Writes the index that several files need.
    pub fn write_index(&self, folder: &Path, stem: &str) -> Result<Option<PathBuf>> {
        if self.files.len() == 1 {
            return Ok(None);
        }
        let index = json!({ "metadata": { "total_size": self.total }, "weight_map": self.weight_map });
        let path = folder.join(format!("{stem}.safetensors.index.json"));
        replace(&path, |file| Ok(writeln!(file, "{index:#}")?))?;
        Ok(Some(path))
    }
}

fn write(
    path: &Path,
    tensors: &[(&str, &Tensor)],
    kind: Option<Kind>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let outline = tensors.iter().map(|(name, tensor)| (*name, tensor.size(), kind.unwrap_or(tensor.kind())));
    let laid = lay_out(path, outline, metadata)?;
    let of: BTreeMap<&str, &Tensor> = tensors.iter().copied().collect();
    replace(path, |file| {
        file.write_all(&laid.header)?;
        for name in &laid.order {
            let tensor = of[name.as_str()];
            let kind = kind.unwrap_or(tensor.kind());
            let host = tch::no_grad(|| tensor.f_to_kind(kind)?.f_to_device(tch::Device::Cpu)?.f_contiguous())?;
            file.write_all(torch::host::bytes(&host)?)?;
        }
        Ok(())
    })
}

/// Where everything of a safetensors file goes.
#[derive(Debug)]
pub(crate) struct Laid {
    /// The file's first bytes: length of the description, and the description.
    pub(crate) header: Vec<u8>,
    /// Names in the order of their bytes.
    pub(crate) order: Vec<String>,
    /// Name → its first byte in the file.
    pub(crate) offsets: BTreeMap<String, u64>,
    /// Bytes of the whole file.
    pub(crate) length: u64,
}

/// Lays out a file of tensors given by name, shape and kind.
pub(crate) fn lay_out<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (&'a str, Vec<i64>, Kind)>,
    metadata: &BTreeMap<String, String>,
) -> Result<Laid> {
    let bad = |reason: String| Error::File { path: path.to_owned(), reason };
    let mut order = Vec::new();
    for (name, shape, kind) in tensors {
        let (rank, dtype) =
            dtype_of(kind).ok_or_else(|| bad(format!("tensor `{name}` is {kind:?}, which is not supported")))?;
        let bytes = shape.iter().product::<i64>() as u64 * kind.elt_size_in_bytes() as u64;
        order.push((rank, name, dtype, shape, bytes));
    }
    order.sort_by_key(|(rank, name, ..)| (*rank, *name));
    if let Some(pair) = order.windows(2).find(|pair| pair[0].1 == pair[1].1) {
        return Err(bad(format!("tensor `{}` comes twice", pair[0].1)));
    }
    let mut fields = Vec::with_capacity(order.len() + 1);
    if !metadata.is_empty() {
        fields.push(format!("\"__metadata__\":{}", text(path, metadata)?));
    }
    let (mut end, mut offsets) = (0, BTreeMap::new());
    for (_, name, dtype, shape, bytes) in &order {
        offsets.insert((*name).to_owned(), end);
        let described =
            Described { dtype: (*dtype).to_owned(), shape: shape.clone(), data_offsets: [end, end + bytes] };
        fields.push(format!("{}:{}", text(path, name)?, text(path, &described)?));
        end += bytes;
    }
    let mut description = format!("{{{}}}", fields.join(",")).into_bytes();
    description.resize(description.len().next_multiple_of(8), b' ');
    let header = [(description.len() as u64).to_le_bytes().to_vec(), description].concat();
    let data = header.len() as u64;
    for offset in offsets.values_mut() {
        *offset += data;
    }
    let order = order.into_iter().map(|(_, name, ..)| name.to_owned()).collect();
    Ok(Laid { length: data + end, header, order, offsets })
}

fn text(path: &Path, value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::File { path: path.to_owned(), reason: error.to_string() })
}

/// Fills a temporary file beside `path`, then renames it, so that `path` is never half written.
pub(crate) fn replace(path: &Path, fill: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".partial");
    let temporary = PathBuf::from(temporary);
    let mut file = BufWriter::new(fs_err::File::create(&temporary)?);
    let written = fill(&mut file).and_then(|()| {
        file.flush()?;
        file.get_ref().sync_all()?;
        Ok(fs_err::rename(&temporary, path)?)
    });
    if written.is_err() {
        // The first error is the one to tell; a leftover is overwritten next time.
        let _ = fs_err::remove_file(&temporary);
    }
    written
}
