"""A training step and a VAE encode of a Wan in PyTorch eager + diffusers: the counterpart of `cargo run -p models --example step`.

    python wan.py FOLDER [--size 128] [--frames 17] [--batch 1] [--text 512] [--steps 5] [--threads 1] [--dtype float32] [--masters]

FOLDER is made if it is not there (71 M parameters: 16 blocks, width 512; a VAE of 32 channels at its widest size). Both programs build
the same inputs, so their losses agree. `--masters` keeps weights and gradients of the denoiser in float32 and computes in --dtype by
autocast, which is what our step does; without it, all is in --dtype. Times are medians; CPU time is the process's, which a busy machine disturbs less.
"""

import argparse
import os

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from measure import timed, wave

MID = dict(num_attention_heads=8, attention_head_dim=64, in_channels=16, out_channels=16, text_dim=512, freq_dim=256, ffn_dim=2048,
           num_layers=16, cross_attn_norm=True, eps=1e-6)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("folder")
    for name, value in dict(size=128, frames=17, batch=1, text=512, steps=5, threads=1).items():
        ap.add_argument(f"--{name}", type=int, default=value)
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--masters", action="store_true")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    path, vae_path = os.path.join(a.folder, "transformer"), os.path.join(a.folder, "vae")
    if not os.path.exists(path):
        torch.manual_seed(0)
        WanTransformer3DModel(**MID).save_pretrained(path)
        AutoencoderKLWan(base_dim=32).save_pretrained(vae_path)
        with open(os.path.join(a.folder, "model_index.json"), "w") as f:
            f.write('{"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"], "vae": ["diffusers", "AutoencoderKLWan"]}\n')
    dtype = getattr(torch, a.dtype)
    model = WanTransformer3DModel.from_pretrained(path, torch_dtype=torch.float32 if a.masters else dtype)
    b, h, f = a.batch, a.size // 8, (a.frames - 1) // 4 + 1
    clean, noise = wave(b, 16, f, h, h, phase=0.1), wave(b, 16, f, h, h, phase=0.2)
    sigma = torch.linspace(0.2, 0.8, b)
    noisy = (1 - sigma.view(-1, 1, 1, 1, 1)) * clean + sigma.view(-1, 1, 1, 1, 1) * noise
    text = wave(b, a.text, model.config.text_dim, phase=0.4).to(dtype)

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype, enabled=a.masters):
            out = model(hidden_states=noisy.to(dtype), timestep=sigma * 1000, encoder_hidden_states=text, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(out.float(), noise - clean)
        loss.backward()
        return loss.item()

    print(f"step: loss {timed(a.steps, step)}")
    vae = AutoencoderKLWan.from_pretrained(vae_path, torch_dtype=dtype)
    pixels = (wave(b, 3, a.frames, a.size, a.size, phase=0.5) / 1.4).to(dtype)

    @torch.no_grad()
    def encode():
        return vae.encode(pixels).latent_dist.mean.float().square().mean().item()

    print(f"encode: mean square {timed(a.steps, encode)}")


if __name__ == "__main__":
    main()
