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
    let size = |tensor: &Tensor| (tensor.numel() * kind.unwrap_or(tensor.kind()).elt_size_in_bytes()) as u64;
    let mut shards: Vec<Vec<(&str, &Tensor)>> = Vec::new();
    let (mut open, mut filled) = (Vec::new(), 0);
    for named in tensors {
        let bytes = size(&named.tensor);
        if bytes > shard_bytes {
            shards.push(vec![(&named.name, &named.tensor)]);
            continue;
        }
        if filled + bytes > shard_bytes {
            shards.push(std::mem::take(&mut open));
            filled = 0;
        }
        open.push((named.name.as_str(), &named.tensor));
        filled += bytes;
    }
    if !open.is_empty() {
        shards.push(open);
    }

    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    if let [single] = shards.as_slice() {
        let path = folder.join(format!("{stem}.safetensors"));
        write(&path, single, kind, &metadata)?;
        return Ok(vec![path]);
    }
    let (mut files, mut weight_map) = (Vec::new(), BTreeMap::new());
    for (i, shard) in shards.iter().enumerate() {
        let file = format!("{stem}-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        weight_map.extend(shard.iter().map(|(name, _)| ((*name).to_owned(), file.clone())));
        files.push(folder.join(&file));
        write(&folder.join(file), shard, kind, &metadata)?;
    }
    let total: u64 = tensors.iter().map(|named| size(&named.tensor)).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let path = folder.join(format!("{stem}.safetensors.index.json"));
    replace(&path, |file| Ok(writeln!(file, "{index:#}")?))?;
    files.push(path);
    Ok(files)
}

fn write(
    path: &Path,
    tensors: &[(&str, &Tensor)],
    kind: Option<Kind>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let bad = |reason: String| Error::File { path: path.to_owned(), reason };
    let mut order = Vec::with_capacity(tensors.len());
    for &(name, tensor) in tensors {
        let kind = kind.unwrap_or(tensor.kind());
        let (rank, dtype) =
            dtype_of(kind).ok_or_else(|| bad(format!("tensor `{name}` is {kind:?}, which is not supported")))?;
        order.push((rank, name, dtype, tensor, kind));
    }
    order.sort_by_key(|&(rank, name, ..)| (rank, name));
    if let Some(pair) = order.windows(2).find(|pair| pair[0].1 == pair[1].1) {
        return Err(bad(format!("tensor `{}` comes twice", pair[0].1)));
    }

    let mut fields = Vec::with_capacity(order.len() + 1);
    if !metadata.is_empty() {
        fields.push(format!("\"__metadata__\":{}", text(path, metadata)?));
    }
    let mut offset = 0;
    for (_, name, dtype, tensor, kind) in &order {
        let end = offset + (tensor.numel() * kind.elt_size_in_bytes()) as u64;
        let described = Described { dtype: (*dtype).to_owned(), shape: tensor.size(), data_offsets: [offset, end] };
        fields.push(format!("{}:{}", text(path, name)?, text(path, &described)?));
        offset = end;
    }
    let mut header = format!("{{{}}}", fields.join(",")).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');

    replace(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        for (.., tensor, kind) in &order {
            let host = tch::no_grad(|| tensor.f_to_kind(*kind)?.f_to_device(tch::Device::Cpu)?.f_contiguous())?;
            file.write_all(torch::host::bytes(&host)?)?;
        }
        Ok(())
    })
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
