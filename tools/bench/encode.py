"""Encode a folder of pictures one by one with diffusers, the way NeMo Automodel's preprocessing does: decode, resize, VAE, CLIP, T5, save.

    python encode.py --model DIR --images DIR --out DIR [--max-pixels 245760] [--dtype bfloat16] [--threads 1] [--tokens 512]

Prints JSON: pictures, seconds without loading, pictures a second, CPU seconds. Captions come from `metadata.jsonl`.
"""

import argparse
import json
import os
import resource
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from diffusers import FluxPipeline  # noqa: E402
from PIL import Image  # noqa: E402


@torch.no_grad()
def main():
    ap = argparse.ArgumentParser()
    for name, default in (("model", None), ("images", None), ("out", None), ("dtype", "bfloat16")):
        ap.add_argument(f"--{name}", default=default, required=default is None)
    for name, default in (("width", 384), ("height", 640), ("threads", 1), ("tokens", 512)):
        ap.add_argument(f"--{name}", type=int, default=default)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    dtype = getattr(torch, a.dtype)
    pipe = FluxPipeline.from_pretrained(a.model, transformer=None, torch_dtype=dtype, local_files_only=True)
    rows = [json.loads(line) for line in open(os.path.join(a.images, "metadata.jsonl"))]
    os.makedirs(a.out, exist_ok=True)
    config, cpu, start = pipe.vae.config, time.process_time(), time.perf_counter()
    for i, row in enumerate(rows):
        image = Image.open(os.path.join(a.images, row["file_name"])).convert("RGB")
        scale = max(a.width / image.width, a.height / image.height)
        image = image.resize((int(image.width * scale), int(image.height * scale)), Image.LANCZOS)
        left, top = (image.width - a.width) // 2, (image.height - a.height) // 2
        image = image.crop((left, top, left + a.width, top + a.height))
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()[None] / 127.5 - 1
        z = pipe.vae.encode(x.to(dtype)).latent_dist.sample()
        latent = ((z - config.shift_factor) * config.scaling_factor).to(torch.float16)
        t5, pooled, _ = pipe.encode_prompt(row.get("text") or row.get("caption"), max_sequence_length=a.tokens)
        torch.save(dict(latent=latent.cpu(), prompt_embeds=t5.cpu(), pooled_prompt_embeds=pooled.cpu()), os.path.join(a.out, f"{i}.pt"))
    wall = time.perf_counter() - start
    print(json.dumps(dict(pictures=len(rows), seconds=round(wall, 2), per_second=round(len(rows) / wall, 2), cpu=round(time.process_time() - cpu, 2),
                          rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)))


if __name__ == "__main__":
    main()
