//! `data`: the order of samples. Where they come from is the pipeline's business.

use serde::Serialize;
use serde_json::json;

use super::reader::Block;

/// What of the loader changes the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Data {
    /// Buckets, and samples in each, in a new order every epoch.
    pub(crate) shuffle: bool,
    /// `Some(n)`: leaves out, every epoch anew, what does not fill a last micro-batch of `n` samples of a bucket.
    pub(crate) drop_last: Option<u64>,
}

impl Data {
    pub(crate) fn read(mut block: Block<'_>, local_batch_size: u64) -> Self {
        let data = Self::loader(block.block_or_empty("dataloader"), local_batch_size);
        for key in ["validation_dataloader", "validation_dataset", "dataset"] {
            block.without_effect(key, &[], "samples come from `[ingest]`; held-out ones from `validation`");
        }
        block.finish();
        data
    }

    fn loader(mut block: Block<'_>, local_batch_size: u64) -> Self {
        let data = Self {
            shuffle: block.flag("shuffle").unwrap_or(true),
            drop_last: block.flag("drop_last").unwrap_or(false).then_some(local_batch_size),
        };
        if let Some(target) = block.text("_target_")
            && !target.ends_with("text_to_image_multiresolution_dataloader")
            && !target.ends_with("flux_multiresolution_dataloader")
            && !target.ends_with("TextToImageDataloaderConfig")
            && !target.ends_with("video_multiresolution_dataloader")
            && !target.ends_with("TextToVideoDataloaderConfig")
        {
            block.note(
                "_target_",
                format_args!("`{target}`: batches come from the shards of the pipeline's `bucket` stage"),
            );
        }
        block.without_effect("cache_dir", &[], "latents and captions come from the pipeline's own cache");
        block.without_effect("base_resolution", &[], "sizes come from `[encode] max_pixels`");
        block.refused("train_text_encoder", &[json!(false)], "text encoders are frozen and their results cached");
        block.refused("dynamic_batch_size", &[json!(false)], "every step has the same number of samples");
        block.without_effect(
            "num_workers",
            &[json!(0), json!(1), json!(2)],
            "one thread maps the shards and prepares the next batch",
        );
        for key in
            ["pin_memory", "prefetch_factor", "persistent_workers", "max_files", "batch_size", "model_type", "seed"]
        {
            block.without_effect(key, &[], "shards are mapped into memory; nothing to tune");
        }
        block.finish();
        data
    }
}
