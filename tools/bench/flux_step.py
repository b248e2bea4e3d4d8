"""A training step and a VAE encode of a FLUX in PyTorch eager + diffusers: the counterpart of `cargo run -p models --example step`.

    python flux_step.py FOLDER [--size 256] [--batch 2] [--text 512] [--steps 5] [--threads 1] [--dtype float32]

FOLDER is made if it is not there (71 M parameters: 4 + 8 blocks, width 512; a VAE of a quarter of FLUX's channels). Both programs build the same inputs, so their
losses agree. Times are medians a step; CPU time is the process's, which a busy machine disturbs less.
"""

import argparse
import os

import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel

from measure import timed, wave

MID = dict(num_layers=4, num_single_layers=8, attention_head_dim=64, num_attention_heads=8, joint_attention_dim=512,
           pooled_projection_dim=128, axes_dims_rope=(8, 28, 28), guidance_embeds=True)
VAE = dict(block_out_channels=(32, 64, 128, 128), layers_per_block=2, latent_channels=16, down_block_types=["DownEncoderBlock2D"] * 4,
           up_block_types=["UpDecoderBlock2D"] * 4, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("folder")
    for name, value in dict(size=256, batch=2, text=512, steps=5, threads=1).items():
        ap.add_argument(f"--{name}", type=int, default=value)
    ap.add_argument("--dtype", default="float32")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    path = os.path.join(a.folder, "transformer")
    if not os.path.exists(path):
        torch.manual_seed(0)
        FluxTransformer2DModel(**MID).save_pretrained(path)
        AutoencoderKL(**VAE).save_pretrained(os.path.join(a.folder, "vae"))
        with open(os.path.join(a.folder, "model_index.json"), "w") as f:
            f.write('{"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}\n')
    dtype = getattr(torch, a.dtype)
    model = FluxTransformer2DModel.from_pretrained(path, torch_dtype=dtype)
    c, b, h = model.config, a.batch, a.size // 8
    clean, noise = wave(b, c.in_channels // 4, h, h, phase=0.1), wave(b, c.in_channels // 4, h, h, phase=0.2)
    sigma = torch.linspace(0.2, 0.8, b)
    noisy = (1 - sigma.view(-1, 1, 1, 1)) * clean + sigma.view(-1, 1, 1, 1) * noise
    inputs = dict(
        hidden_states=FluxPipeline._pack_latents(noisy, b, c.in_channels // 4, h, h).to(dtype), timestep=sigma,
        guidance=torch.full([b], 3.5) if c.guidance_embeds else None, pooled_projections=wave(b, c.pooled_projection_dim, phase=0.3).to(dtype),
        encoder_hidden_states=wave(b, a.text, c.joint_attention_dim, phase=0.4).to(dtype), txt_ids=torch.zeros(a.text, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(b, h // 2, h // 2, "cpu", torch.float32))
    target = FluxPipeline._pack_latents(noise - clean, b, c.in_channels // 4, h, h)

    def step():
        model.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(**inputs, return_dict=False)[0].float(), target)
        loss.backward()
        return loss.item()

    print(f"step: loss {timed(a.steps, step)}")
    vae = AutoencoderKL.from_pretrained(os.path.join(a.folder, "vae"), torch_dtype=dtype)
    pixels = (wave(b, 3, a.size, a.size, phase=0.5) / 1.4).to(dtype)

    @torch.no_grad()
    def encode():
        return vae.encode(pixels).latent_dist.mean.float().square().mean().item()

    print(f"encode: mean square {timed(a.steps, encode)}")


if __name__ == "__main__":
    main()
