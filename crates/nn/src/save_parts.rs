//! Writing a safetensors file together: one writer lays it out, then each fills in the parts it holds, and nobody ever holds
//! a whole tensor. The bytes are those of writing it alone. Who waits for whom is the callers' business.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::save::{Laid, lay_out};

/// A tensor of a file that is written in parts.
#[derive(Debug)]
pub struct PartOf {
    /// Its key.
    pub name: String,
    /// Its whole shape.
    pub shape: Vec<i64>,
    /// The kind it is written in.
    pub kind: Kind,
    /// Where the part begins, in elements.
    pub first: usize,
    /// The part, flat; empty where this writer has none.
    pub elements: Tensor,
}

/// A file that several write.
#[derive(Debug)]
pub struct SharedFile {
    path: PathBuf,
    partial: PathBuf,
    laid: Laid,
}

impl SharedFile {
    /// Lays out a file of `tensors`; every writer gives the same names, shapes and kinds.
    pub fn new(path: &Path, tensors: &[PartOf], metadata: &BTreeMap<String, String>) -> Result<Self> {
        let outline = tensors.iter().map(|part| (part.name.as_str(), part.shape.clone(), part.kind));
        let laid = lay_out(path, outline, metadata)?;
        let mut partial = OsString::from(path);
        partial.push(".partial");
        Ok(Self { path: path.to_owned(), partial: PathBuf::from(partial), laid })
    }

    /// Makes the file, of its full length: one writer, before the others begin.
    pub fn create(&self) -> Result<()> {
        let file = fs_err::File::create(&self.partial)?;
        file.file().write_all_at(&self.laid.header, 0)?;
        file.set_len(self.laid.length)?;
        Ok(())
    }

    /// Writes what this writer holds, and flushes it to disk.
    pub fn write(&self, tensors: &[PartOf]) -> Result<()> {
        let file = fs_err::OpenOptions::new().write(true).open(&self.partial)?;
        for part in tensors.iter().filter(|part| part.elements.numel() > 0) {
            let whole: i64 = part.shape.iter().product();
            let offset =
                self.laid.offsets.get(&part.name).filter(|_| part.first + part.elements.numel() <= whole as usize);
            let offset = offset.ok_or_else(|| {
                let reason = format!("a part of tensor `{}` is not in its layout", part.name);
                Error::File { path: self.path.clone(), reason }
            })?;
            let to_host = || part.elements.f_to_kind(part.kind)?.f_to_device(Device::Cpu)?.f_contiguous();
            let host = tch::no_grad(to_host)?;
            let at = offset + (part.first * part.kind.elt_size_in_bytes()) as u64;
            file.file().write_all_at(torch::host::bytes(&host)?, at)?;
        }
        Ok(file.sync_all()?)
    }

    /// Gives the file its name: one writer, after the others are done.
    pub fn finish(&self) -> Result<()> {
        Ok(fs_err::rename(&self.partial, &self.path)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Part, Weights};

    #[test]
    fn parts_written_together_are_the_file_written_alone() {
        let folder = tempfile::tempdir().unwrap();
        let range = |n: i64, kind| Tensor::arange(n, (Kind::Float, Device::Cpu)).to_kind(kind);
        let tensors = [
            ("a.weight", range(35, Kind::Float).view([5, 7])),
            ("b", range(2, Kind::BFloat16)),
            ("c", Tensor::from(3f32)),
            ("none", range(0, Kind::Float)),
        ];
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let alone = folder.path().join("alone.safetensors");
        crate::save::save_safetensors(&alone, tensors.iter().map(|(name, t)| (*name, t)), &metadata).unwrap();
        for count in 1..5 {
            let path = folder.path().join("together.safetensors");
            let of = |part: Part| -> Vec<PartOf> {
                let part_of = |(name, tensor): &(&str, Tensor)| {
                    let range = part.range(tensor.numel());
                    let elements = tensor.view(-1).narrow(0, range.start as i64, range.len() as i64);
                    let (name, kind) = ((*name).to_owned(), tensor.kind());
                    PartOf { name, shape: tensor.size(), kind, first: range.start, elements }
                };
                tensors.iter().map(part_of).collect()
            };
            for part in Part::all(count) {
                let file = SharedFile::new(&path, &of(part), &metadata).unwrap();
                if part.index == 0 {
                    file.create().unwrap();
                }
                file.write(&of(part)).unwrap();
                if part.index + 1 == count {
                    file.finish().unwrap();
                }
            }
            assert_eq!(fs_err::read(&alone).unwrap(), fs_err::read(&path).unwrap());

            // And each part is read again as it was written.
            for part in Part::all(count) {
                let weights = Weights::file(&path).unwrap().split(part);
                let range = part.range(35);
                assert_eq!(weights.whole_shape("a.weight"), Some([5, 7].as_slice()));
                let read = Vec::<f32>::try_from(weights.tensor_of_whole_shape("a.weight", &[5, 7]).unwrap()).unwrap();
                assert_eq!(read, range.map(|n| n as f32).collect::<Vec<_>>());
                assert_eq!(weights.tensor_of_shape("c", &[]).unwrap().double_value(&[]), 3.0);
                weights.tensor_of_whole_shape("a.weight", &[7, 5]).unwrap_err();
            }
        }
    }
}
