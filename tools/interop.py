#!/usr/bin/env python3
"""Do diffusers and a run of ours draw the same pictures, or the same frames of clips?

    interop.py GENERATE --model FOLDER [--checkpoint FOLDER] [--lora FILE_OR_FOLDER]
               [--max-sequence-length N] [--tolerance 2]

GENERATE      the generate stage's artifact, such as runs/tarot/generate: its images.parquet names every picture with its
              prompt, seed, size, steps, guidance, true CFG, negative prompt and LoRA scale
--model       diffusers folder of the base model
--checkpoint  full fine-tune to load instead, such as runs/tarot/train/epoch_66_step_199: `from_pretrained` on it as it is
--lora        adapter to apply on the base model with `load_lora_weights` (a folder or file; diffusers or PEFT layout); a folder
              `transformer_2` in it holds that of Wan 2.2's second denoiser

--max-sequence-length  tokens of the text encoder; what the picture's own metadata says when absent

Every picture is drawn again by diffusers' pipeline of the model in float32 on the CPU; of clips, the frames that
`generate.frame_pngs` writes are compared. Prints one line a picture with the largest and
mean difference of the 8-bit values and, as a check of the check, how far it is from one without checkpoint or LoRA. Exit code
1 when one differs by more than --tolerance. `generate.dtype` of the recipe must be float32; pictures of `with_base` are
skipped. Needs torch, diffusers, transformers, peft, pyarrow, pillow.
"""

import argparse
import inspect
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from diffusers import DiffusionPipeline
from PIL import Image


def pipeline(folder, lora=None):
    """The pipeline of a folder in float32, with the adapter."""
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        path = Path(lora)
        if path.is_file():
            pipe.load_lora_weights(str(path.parent), weight_name=path.name)
            return pipe
        name, second = "pytorch_lora_weights.safetensors", path / "transformer_2"
        if (path / name).exists():
            pipe.load_lora_weights(str(path), weight_name=name)
        if (second / name).exists():
            pipe.load_lora_weights(str(second), weight_name=name, load_into_transformer_2=True)
        if not pipe.get_list_adapters():
            pipe.transformer = peft_adapter(pipe.transformer, path)
    return pipe


def peft_adapter(transformer, folder):
    """A transformer with an adapter in PEFT's own layout."""
    from peft import PeftModel

    return PeftModel.from_pretrained(transformer, str(folder)).base_model.model


def draw(pipe, row, tokens, scale):
    """One row of `images`, as RGB8 [frames, height, width, 3]."""
    if scale is not None:
        if hasattr(pipe, "set_adapters") and pipe.get_list_adapters():
            pipe.set_adapters(pipe.get_active_adapters(), scale)
        else:
            for module in pipe.transformer.modules():
                if hasattr(module, "scale_layer"):
                    module.scale_layer(scale)
    more = {}
    if row["true_cfg"] is not None:
        more = {"negative_prompt": row["negative_prompt"], "true_cfg_scale": row["true_cfg"]}
    elif row["negative_prompt"] is not None:
        more = {"negative_prompt": row["negative_prompt"]}
    clip = "num_frames" in inspect.signature(pipe.__call__).parameters
    if clip:
        more |= {"num_frames": row["frames"], "output_type": "pil"}
    if row.get("guidance_2") is not None:
        more["guidance_scale_2"] = row["guidance_2"]
    drawn = pipe(
        prompt=row["prompt"],
        width=row["width"],
        height=row["height"],
        num_inference_steps=row["steps"],
        guidance_scale=row["guidance"],
        max_sequence_length=tokens,
        generator=torch.Generator("cpu").manual_seed(row["seed"]),
        **more,
    )
    frames = drawn.frames[0] if clip else [drawn.images[0]]
    return np.stack([np.asarray(frame) for frame in frames]).astype(int)


def main():
    """Compare every picture; the exit code says whether all agree."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("generate", type=Path)
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--checkpoint")
    arguments.add_argument("--lora")
    arguments.add_argument("--max-sequence-length", type=int)
    arguments.add_argument("--tolerance", type=int, default=2)
    asked = arguments.parse_args()

    torch.set_num_threads(1)
    pipe = pipeline(asked.checkpoint or asked.model, asked.lora)
    base = pipeline(asked.model) if asked.checkpoint or asked.lora else None
    wrong = 0
    for row in pq.read_table(asked.generate / "images.parquet").to_pylist():
        if row["checkpoint"].startswith("base@") and row["lora"] is None:
            continue
        path = asked.generate / row["file"]
        frames = [path] if row["frames"] == 1 else sorted(path.with_suffix("").glob("frame_*.png"))
        if len(frames) != row["frames"]:
            sys.exit(f"{row['file']}: {len(frames)} of {row['frames']} frames are there; set `generate.frame_pngs = true`")
        pictures = [Image.open(frame) for frame in frames]
        tokens = asked.max_sequence_length or int(pictures[0].info["max_sequence_length"])
        ours = np.stack([np.asarray(picture.convert("RGB")) for picture in pictures]).astype(int)
        scale = row["lora_scale"] if asked.lora else None
        theirs = draw(pipe, row, tokens, scale)
        if ours.shape != theirs.shape:
            wrong += 1
            print(f"{row['file']}: {ours.shape} is not diffusers' {theirs.shape}")
            continue
        apart = np.abs(ours - theirs)
        wrong += bool(apart.max() > asked.tolerance)
        line = f"{row['file']}: at most {apart.max()}/255 apart, {apart.mean():.4f} on average"
        if base is not None:
            line += f"; without training {np.abs(ours - draw(base, row, tokens, None)).max()}/255"
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
