#!/usr/bin/env python3
"""Everything of the mini model but its VAE's and its denoiser's weights.

    mini.py OUT PICTURES…

OUT        gets a FLUX folder in diffusers' layout: tokenizers trained on the captions, frozen random text encoders (a small
           model does well with them: they need only tell words and their order apart), configurations of VAE and denoiser
PICTURES…  data sets with `metadata.jsonl`, such as runs/scenes and runs/deck

Equal arguments give equal files. `train-vae` adds the VAE's weights, and recipes/mini-pretrain.toml the denoiser's.
Needs what tools/fixtures/requirements.txt lists.
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel, T5Tokenizer

sys.path.insert(0, str(Path(__file__).parent / "fixtures"))
import build  # noqa: E402

SEED = 78
# Widths are small, and a 96 x 144 picture has 216 tokens: a step of training takes a CPU a second.
TRANSFORMER = dict(
    patch_size=1, in_channels=32, num_layers=2, num_single_layers=4, attention_head_dim=48, num_attention_heads=4,
    joint_attention_dim=128, pooled_projection_dim=64, guidance_embeds=False, axes_dims_rope=(8, 20, 20))
VAE = dict(
    block_out_channels=(16, 48, 96), layers_per_block=1, latent_channels=8, norm_num_groups=8, sample_size=96,
    mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.0, shift_factor=0.0)
CLIP = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32)
T5 = dict(d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
SCHEDULER = dict(use_dynamic_shifting=False, shift=1.5)
PARTS = {
    "transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"], "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"], "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5Tokenizer"], "image_encoder": [None, None], "feature_extractor": [None, None]}


def captions(folders):
    """All captions; a small set counts as much as a large one, so that its words become tokens."""
    sets = [[json.loads(line)["caption"] for line in open(Path(folder) / "metadata.jsonl", encoding="utf-8")] for folder in folders]
    most = max(map(len, sets))
    return [line for lines in sets for line in lines * (most // len(lines))]


def word_tokenizer(lines):
    """T5's unigram model with a piece for every word, by its frequency, and rare letters for all others."""
    counts = Counter(word for line in lines for word in line.split(" "))
    total = sum(counts.values())
    words = [("\u2581" + word, math.log(count / total)) for word, count in sorted(counts.items(), key=lambda c: (-c[1], c[0]))]
    letters = [(chr(code), -20.0) for code in range(33, 127)] + [("\u2581", -20.0)]
    known = {piece for piece, _ in words}
    pieces = words + [letter for letter in letters if letter[0] not in known]
    sentinels = [(f"<extra_id_{i}>", 0.0) for i in range(99, -1, -1)]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces, *sentinels]
    return T5Tokenizer(vocab=vocab, extra_ids=100, model_max_length=512)


def main():
    """Write the folder."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("pictures", nargs="+")
    asked = arguments.parse_args()
    out, lines = asked.out, captions(asked.pictures)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)

    clip_tokenizer = build.clip_tokenizer(320, lines)
    clip_tokenizer.model_max_length = CLIP["max_position_embeddings"]
    clip_tokenizer.save_pretrained(out / "tokenizer")
    build.release_clip(clip_tokenizer, str(out / "tokenizer"), keep_json=False)
    config = json.loads((out / "tokenizer/tokenizer_config.json").read_text())
    build.write_json(out / "tokenizer/tokenizer_config.json", config | {"model_max_length": CLIP["max_position_embeddings"]})
    clip = CLIPTextModel(CLIPTextConfig(
        vocab_size=len(clip_tokenizer), projection_dim=CLIP["hidden_size"], pad_token_id=1, bos_token_id=clip_tokenizer.bos_token_id,
        eos_token_id=clip_tokenizer.eos_token_id, **CLIP))
    clip.half().save_pretrained(out / "text_encoder")
    path = out / "text_encoder/model.safetensors"
    save_file({"text_model." + k.removeprefix("text_model."): v for k, v in load_file(path).items()}, path, metadata={"format": "pt"})

    t5_tokenizer = word_tokenizer(lines)
    t5_tokenizer.save_pretrained(out / "tokenizer_2")
    build.release_t5(str(out / "tokenizer_2"))
    t5 = T5EncoderModel(T5Config(
        vocab_size=len(t5_tokenizer) + 5, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **T5))
    with torch.no_grad():
        for block in t5.encoder.block:
            block.layer[0].SelfAttention.q.weight.mul_(2.0)  # sharper looks at other words
    t5.half().save_pretrained(out / "text_encoder_2")

    FluxTransformer2DModel(**TRANSFORMER).save_config(out / "transformer")
    blocks = len(VAE["block_out_channels"])
    kinds = dict(down_block_types=("DownEncoderBlock2D",) * blocks, up_block_types=("UpDecoderBlock2D",) * blocks)
    AutoencoderKL(**kinds, **VAE).save_config(out / "vae")
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(out / "scheduler")
    import diffusers

    build.write_json(out / "model_index.json", {"_class_name": "FluxPipeline", "_diffusers_version": diffusers.__version__} | PARTS)
    words = sorted({word for line in lines for word in line.split(" ")})
    split = [word for word in words if len(t5_tokenizer(word).input_ids) > 2]
    longest = max(len(t5_tokenizer(line).input_ids) for line in set(lines))
    print(f"{len(words)} words, {len(split)} of them in several T5 pieces: {split}; the longest caption has {longest} tokens")
    print(f"CLIP: {clip_tokenizer.tokenize('a trtcrd of a golden cup by the sea at sunset')}")


if __name__ == "__main__":
    main()
