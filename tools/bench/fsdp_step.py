"""A training step of a FLUX transformer with PyTorch FSDP2 (or DDP) over Gloo: the counterpart of `cargo run --example spread_step`.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 fsdp_step.py FOLDER [--mode fsdp|ddp] [--recompute] [--size 256] [--batch 2]

FOLDER is made by `flux_step.py FOLDER`. Both programs build the same inputs, so their losses agree. `--batch` is the global
batch. Times are medians a step; memory is the peak resident size of each process.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def wave(*shape, phase):
    """Numbers of about unit size that any program can make."""
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (1.4 * torch.sin(n * 0.7390851 + phase)).float().view(shape)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("folder")
    for name, value in dict(size=256, batch=2, text=512, steps=5, threads=1).items():
        ap.add_argument(f"--{name}", type=int, default=value)
    ap.add_argument("--mode", default="fsdp", choices=["fsdp", "ddp"])
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--recompute", action="store_true")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    dist.init_process_group("gloo")
    rank, world, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, a.dtype)
    model = FluxTransformer2DModel.from_pretrained(os.path.join(a.folder, "transformer"), torch_dtype=torch.float32)
    c, b, h = model.config, a.batch, a.size // 8
    for blocks in (model.transformer_blocks, model.single_transformer_blocks):
        for i, block in enumerate(blocks):
            if a.recompute:
                blocks[i] = block = checkpoint_wrapper(block)
            if a.mode == "fsdp":
                fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    if a.mode == "fsdp":
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    own = slice(rank * b // world, (rank + 1) * b // world)
    clean, noise = wave(b, c.in_channels // 4, h, h, phase=0.1)[own], wave(b, c.in_channels // 4, h, h, phase=0.2)[own]
    sigma = torch.linspace(0.2, 0.8, b)[own]
    n = len(sigma)
    noisy = (1 - sigma.view(-1, 1, 1, 1)) * clean + sigma.view(-1, 1, 1, 1) * noise
    inputs = dict(
        hidden_states=FluxPipeline._pack_latents(noisy, n, c.in_channels // 4, h, h).to(dtype), timestep=sigma,
        guidance=torch.full([n], 3.5) if c.guidance_embeds else None,
        pooled_projections=wave(b, c.pooled_projection_dim, phase=0.3)[own].to(dtype),
        encoder_hidden_states=wave(b, a.text, c.joint_attention_dim, phase=0.4)[own].to(dtype),
        txt_ids=torch.zeros(a.text, 3), img_ids=FluxPipeline._prepare_latent_image_ids(n, h // 2, h // 2, "cpu", torch.float32))
    target = FluxPipeline._pack_latents(noise - clean, n, c.in_channels // 4, h, h)
    wall = []
    for _ in range(a.steps + 1):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        # Both average over the ranks, so a rank's own mean is right.
        loss = torch.nn.functional.mse_loss(model(**inputs, return_dict=False)[0].float(), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        wall.append(time.perf_counter() - start)
    total = loss.detach() / world
    dist.all_reduce(total)
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    print(f"rank {rank} of {world} ({a.mode})  loss {total.item():.6f}  wall {statistics.median(wall[1:]):.3f} s  peak {int(peak) // 1024} MiB", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
