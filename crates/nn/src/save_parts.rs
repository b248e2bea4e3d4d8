//! Writing a safetensors file together: one writer lays it out, then each fills in the parts it holds, and nobody ever holds
//! a whole tensor. The bytes are those of writing it alone. Who waits for whom is the callers' business.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::save::{Laid, lay_out};
use crate::share::Run;

/// A tensor of a file that is written in parts.
#[derive(Debug)]
pub struct PartOf {
    /// Its key.
    pub name: String,
    /// Its whole shape.
    pub shape: Vec<i64>,
    /// The kind it is written in.
    pub kind: Kind,
    /// Where this writer's elements go, in order; none where it has none.
    pub runs: Vec<Run>,
    /// As many elements, of any shape.
    pub elements: Tensor,
}

impl PartOf {
    /// Copies the elements to host memory, in the kind they are written in.
    pub fn keep(&mut self) -> Result<()> {
        if self.runs.is_empty() {
            self.elements = Tensor::f_zeros([0], (Kind::Float, Device::Cpu))?;
            return Ok(());
        }
        let copy =
            || Ok::<_, tch::TchError>(self.elements.f_detach()?.f_to_device(Device::Cpu)?.f_totype(self.kind)?.copy());
        self.elements = tch::no_grad(copy)?;
        Ok(())
    }
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
        for part in tensors.iter().filter(|part| !part.runs.is_empty()) {
            let whole = part.shape.iter().product::<i64>() as usize;
            let fits = part.runs.iter().all(|run| run.first + run.length <= whole)
                && part.runs.iter().map(|run| run.length).sum::<usize>() == part.elements.numel();
            let offset = self.laid.offsets.get(&part.name).filter(|_| fits).ok_or_else(|| {
                let reason = format!("a part of tensor `{}` is not in its layout", part.name);
                Error::File { path: self.path.clone(), reason }
            })?;
            let to_host = || part.elements.f_to_kind(part.kind)?.f_to_device(Device::Cpu)?.f_contiguous();
            let host = tch::no_grad(to_host)?;
            let (mut bytes, width) = (torch::host::bytes(&host)?, part.kind.elt_size_in_bytes());
            for run in &part.runs {
                let (now, later) = bytes.split_at(run.length * width);
                file.file().write_all_at(now, offset + (run.first * width) as u64)?;
                bytes = later;
            }
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
    use crate::{Part, Share, Weights};

    #[test]
    fn what_is_kept_does_not_change_with_its_tensor() {
        let live = Tensor::arange(4, (Kind::Float, Device::Cpu));
        let runs = Share::whole(&[4]).runs();
        let part = |kind| PartOf {
            name: "a".to_owned(),
            shape: vec![4],
            kind,
            runs: runs.clone(),
            elements: live.shallow_clone(),
        };
        for kind in [Kind::Float, Kind::BFloat16] {
            let mut kept = part(kind);
            kept.keep().unwrap();
            let before = kept.elements.to_kind(Kind::Float).copy();
            let _ = live.shallow_clone().fill_(-1.0);
            assert_eq!((&kept.elements.kind(), kept.elements.to_kind(Kind::Float)), (&kind, before));
        }
    }

    #[test]
    fn parts_written_together_are_the_file_written_alone() {
        let folder = tempfile::tempdir().unwrap();
        let range = |n: i64, kind| Tensor::arange(n, (Kind::Float, Device::Cpu)).to_kind(kind);
        let tensors = [
            ("a.weight", range(30, Kind::Float).view([5, 6])),
            ("b", range(2, Kind::BFloat16)),
            ("c", Tensor::from(3f32)),
            ("none", range(0, Kind::Float)),
        ];
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let alone = folder.path().join("alone.safetensors");
        crate::save::save_safetensors(&alone, tensors.iter().map(|(name, t)| (*name, t)), &metadata).unwrap();
        let half = |index| Part { index, count: 2 };
        let share_of = |tensor: &Tensor, part: Part, columns: Option<Part>| match columns {
            Some(columns) if tensor.dim() == 2 => Share::cut(&tensor.size(), 1, &[2, 4], columns).unwrap().run(part),
            _ => Share::whole(&tensor.size()).run(part),
        };
        for (count, columns) in (1..5).flat_map(|count| [(count, false), (count, true)]) {
            // By runs of elements alone, or as well by the columns of the matrix.
            let holders: Vec<(Part, Option<Part>)> = if columns {
                (0..2).flat_map(|at| Part::all(count).map(move |part| (part, Some(half(at))))).collect()
            } else {
                Part::all(count).map(|part| (part, None)).collect()
            };
            let path = folder.path().join("together.safetensors");
            let of = |(part, columns): (Part, Option<Part>)| -> Vec<PartOf> {
                let part_of = |(name, tensor): &(&str, Tensor)| {
                    let share = share_of(tensor, part, columns);
                    let (name, kind) = ((*name).to_owned(), tensor.kind());
                    PartOf { name, shape: tensor.size(), kind, runs: share.runs(), elements: share.of(tensor).unwrap() }
                };
                tensors.iter().map(part_of).collect()
            };
            for (at, holder) in holders.iter().enumerate() {
                let file = SharedFile::new(&path, &of(*holder), &metadata).unwrap();
                if at == 0 {
                    file.create().unwrap();
                }
                file.write(&of(*holder)).unwrap();
                if at + 1 == holders.len() {
                    file.finish().unwrap();
                }
            }
            assert_eq!(fs_err::read(&alone).unwrap(), fs_err::read(&path).unwrap());

            // And each part is read again as it was written: by itself, or where only the part is seen.
            for (part, columns) in holders {
                let weights = Weights::file(&path).unwrap();
                for (name, tensor) in &tensors[..2] {
                    let share = share_of(tensor, part, columns);
                    assert_eq!(weights.share(name, &share).unwrap(), share.of(tensor).unwrap());
                }
                weights.share("a.weight", &Share::whole(&[6, 5])).unwrap_err();
                let (_, matrix) = &tensors[0];
                let share = share_of(matrix, part, columns);
                let seen = weights.seen(|name| (name != "b").then(|| share.clone()));
                // A share is of one shape.
                assert!(seen.is_err());
                let only = |name: &str| match name {
                    "a.weight" | "c" => Some(share.clone()),
                    _ => None,
                };
                let seen = Weights::file(&path).unwrap().seen(only).unwrap();
                assert_eq!(seen.names().collect::<Vec<_>>(), ["a.weight", "c"]);
                assert_eq!(seen.tensor("a.weight").unwrap(), share.of(matrix).unwrap());
                assert_eq!(seen.tensor_of_shape("c", &[]).unwrap().double_value(&[]), 3.0);
            }
        }
    }
}
