"""Forward and backward of a FLUX transformer in PyTorch eager + diffusers: the counterpart of `cargo run --example flux_step`.

    python flux_step.py FOLDER [--size 256] [--batch 2] [--text 512] [--steps 5] [--threads 1] [--dtype float32]

FOLDER is made if it is not there (71 M parameters: 4 + 8 blocks, width 512). Both programs build the same inputs, so their
losses agree. Times are medians a step; CPU time is the process's, which a busy machine disturbs less.
"""

import argparse
import os
import statistics
import time

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

MID = dict(num_layers=4, num_single_layers=8, attention_head_dim=64, num_attention_heads=8, joint_attention_dim=512,
           pooled_projection_dim=128, axes_dims_rope=(8, 28, 28), guidance_embeds=True)


def wave(*shape, phase):
    """Numbers of about unit size that any program can make."""
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (1.4 * torch.sin(n * 0.7390851 + phase)).float().view(shape)


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
        with open(os.path.join(a.folder, "model_index.json"), "w") as f:
            f.write('{"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}\n')
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
    wall, cpu = [], []
    for _ in range(a.steps + 1):
        t, p = time.perf_counter(), time.process_time()
        model.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(**inputs, return_dict=False)[0].float(), target)
        loss.backward()
        wall.append(time.perf_counter() - t)
        cpu.append(time.process_time() - p)
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    print(f"loss {loss.item():.6f}  wall {statistics.median(wall[1:]):.3f} s  cpu {statistics.median(cpu[1:]):.3f} s  peak {int(peak) // 1024} MiB")


if __name__ == "__main__":
    main()
