//! Pictures of a folder in memory, and crops of them as tensors.

use std::path::Path;

use media::Picture;
use miette::{Context, IntoDiagnostic, Result, miette};
use nn::rng::Stream;
use tch::{Kind, Tensor};

/// Pictures of one size.
pub(crate) struct Pictures(Vec<Picture>);

impl Pictures {
    /// All PNG files of `folder` in the order of their names, each brought to `width` × `height` and cut.
    pub(crate) fn read(folder: &Path, width: u32, height: u32) -> Result<Self> {
        let entries = fs_err::read_dir(folder).into_diagnostic()?;
        let mut files =
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>().into_diagnostic()?;
        files.retain(|file| file.extension().is_some_and(|extension| extension == "png"));
        files.sort();
        let read = |file: &std::path::PathBuf| -> Result<Picture> {
            let bytes = fs_err::read(file).into_diagnostic()?;
            let picture =
                media::decode(&bytes, [255; 3]).into_diagnostic().wrap_err_with(|| file.display().to_string())?;
            Ok(media::cover_crop(&picture, width, height).picture)
        };
        let pictures = files.iter().map(read).collect::<Result<Vec<_>>>()?;
        if pictures.is_empty() {
            return Err(miette!("`{}` holds no PNG pictures", folder.display()));
        }
        Ok(Self(pictures))
    }

    /// `count` pictures spread over the folder: f32 [count, 3, H, W] in [-1, 1].
    pub(crate) fn spread(&self, count: usize) -> Tensor {
        let count = count.min(self.0.len());
        let picked: Vec<Tensor> = (0..count).map(|i| tensor(&self.0[i * self.0.len() / count])).collect();
        Tensor::stack(&picked, 0)
    }

    /// `count` square crops, drawn: f32 [count, 3, side, side].
    pub(crate) fn crops(&self, count: usize, side: u32, draw: &mut Stream) -> Vec<Tensor> {
        let crop = |_| {
            let picture = &self.0[draw.below(self.0.len() as u64) as usize];
            let mut at = |room: u32| draw.below(u64::from(room) + 1) as u32;
            let (left, top) = (at(picture.width - side), at(picture.height - side));
            tensor(&picture.cropped(left, top, side, side))
        };
        (0..count).map(crop).collect()
    }
}

/// f32 [3, H, W] in [-1, 1].
fn tensor(picture: &Picture) -> Tensor {
    let bytes = Tensor::from_slice(&picture.rgb).view([i64::from(picture.height), i64::from(picture.width), 3]);
    bytes.permute([2, 0, 1]).to_kind(Kind::Float) / 127.5 - 1.0
}
