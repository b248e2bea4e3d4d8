"""Writes crates/nn/tests/fixtures: what torch 2.11, diffusers 0.42 and PEFT 0.21 compute for the layers of crates/nn.

Run from the repository root: python tools/nn_fixtures.py
"""
import shutil
from pathlib import Path

import torch
from diffusers import FluxPipeline
from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed, get_timestep_embedding
from diffusers.models.normalization import RMSNorm
from diffusers.training_utils import EMAModel
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

OUT = Path("crates/nn/tests/fixtures")
torch.manual_seed(0)
golden = {}


def keep(name, tensor):
    golden[name] = tensor.detach().clone().contiguous()
    return tensor


# Seeded normals: below 16, not a multiple of 16, and large numbers of values take different paths in torch.
for seed in [0, 42, 2**63 + 5]:
    for shape in [[1], [3], [15], [16], [17], [33], [2, 3, 5, 7], [1, 16, 6, 10], [1000]]:
        generator = torch.Generator("cpu").manual_seed(seed)
        keep(f"randn/{seed}/{'x'.join(map(str, shape))}", torch.randn(shape, generator=generator))

# Layers.
layers = {
    "linear": nn.Linear(12, 7),
    "embedding": nn.Embedding(9, 6),
    "layer_norm": nn.LayerNorm(12, eps=1e-5),
    "plain_norm": nn.LayerNorm(12, eps=1e-6, elementwise_affine=False),
    "rms_norm": RMSNorm(12, eps=1e-6),
    "torch_rms_norm": nn.RMSNorm(12, eps=1e-6),
    "group_norm": nn.GroupNorm(4, 12, eps=1e-6),
    "conv": nn.Conv2d(12, 5, 3, stride=2, padding=1),
}
for module in layers.values():
    for parameter in module.parameters():
        parameter.data.normal_()
weights = {f"{name}.{key}": value for name, module in layers.items() for key, value in module.state_dict().items()}
save_file(weights, OUT / "layers.safetensors", metadata={"format": "pt"})
x = keep("layers/x", torch.randn(2, 5, 12))
picture = keep("layers/picture", torch.randn(2, 12, 6, 8))
indices = keep("layers/indices", torch.tensor([[0, 8, 3], [3, 1, 1]]))
for kind in [torch.float32, torch.bfloat16]:
    for name, module in layers.items():
        source = picture if name in ("group_norm", "conv") else indices if name == "embedding" else x
        module = module.to(kind)
        given = source if name == "embedding" else source.to(kind)
        keep(f"layers/{name}/{str(kind).removeprefix('torch.')}", module(given))
    for module in layers.values():
        module.float()
for name, module in layers.items():
    module.load_state_dict({k.removeprefix(f"{name}."): v for k, v in weights.items() if k.startswith(f"{name}.")})

q, k, v = (keep(f"attention/{n}", torch.randn(2, 3, 5, 8)) for n in "qkv")
mask = keep("attention/mask", torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool().view(2, 1, 1, 5))
sdpa = nn.functional.scaled_dot_product_attention
keep("attention/plain", sdpa(q, k, v))
keep("attention/masked", sdpa(q, k, v, attn_mask=mask))
keep("attention/causal", sdpa(q, k, v, is_causal=True, scale=1.0))

# Time and position.
t = keep("timestep/t", torch.tensor([0.0, 1.0, 0.5, 249.75, 999.0, 1000.0]))
keep("timestep/flow", get_timestep_embedding(t, 256, flip_sin_to_cos=True, downscale_freq_shift=0))
keep("timestep/bf16", get_timestep_embedding(t.bfloat16(), 256, flip_sin_to_cos=True, downscale_freq_shift=0))
keep("timestep/odd", get_timestep_embedding(t, 33, flip_sin_to_cos=False, downscale_freq_shift=1, scale=2.5))
positions = keep("rotary/positions", torch.tensor([[0.0, 0, 0], [0, 0, 1], [0, 3, 7], [2, 47, 79]]))
tables = [
    get_1d_rotary_pos_embed(d, positions[:, i], theta=10000.0, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64)
    for i, d in enumerate([4, 6, 6])
]
cos, sin = (keep(f"rotary/{n}", torch.cat([table[i] for table in tables], -1)) for i, n in enumerate(["cos", "sin"]))
heads = keep("rotary/x", torch.randn(2, 3, 4, 16))
keep("rotary/rotated", apply_rotary_emb(heads, (cos, sin)))
keep("rotary/rotated_bf16", apply_rotary_emb(heads.bfloat16(), (cos, sin)))

# AdamW after clipping, with a parameter that gets no gradient in every second step; and the average of its weights.
parameters = {n: nn.Parameter(torch.randn(s)) for n, s in {"a": [4, 3], "b": [5], "c": [2, 2, 2]}.items()}
for name, parameter in parameters.items():
    keep(f"adamw/start/{name}", parameter)
optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
ema = EMAModel(parameters.values(), decay=0.9, min_decay=0.9, update_after_step=-9)
norms = []
for step in range(6):
    optimizer.zero_grad(set_to_none=True)
    for name, parameter in parameters.items():
        if name == "b" and step % 2:
            continue
        parameter.grad = keep(f"adamw/gradient/{step}/{name}", torch.randn_like(parameter) * (3.0 if step < 3 else 0.05)).clone()
    norms.append(nn.utils.clip_grad_norm_(parameters.values(), 1.0))
    optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
    optimizer.step()
    ema.step(parameters.values())
    for name, parameter in parameters.items():
        keep(f"adamw/after/{step}/{name}", parameter)
keep("adamw/norms", torch.stack(norms))
for name, shadow in zip(parameters, ema.shadow_params):
    keep(f"adamw/average/{name}", shadow)
for name, parameter in parameters.items():
    for key, value in optimizer.state[parameter].items():
        keep(f"adamw/state/{name}.{key}", value)


# LoRA in both layouts.
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(8, 6)
        self.to_out = nn.ModuleList([nn.Linear(6, 8)])

    def forward(self, x):
        return self.to_out[0](self.to_q(x).tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


model = Model()
save_file(model.state_dict(), OUT / "lora_base.safetensors", metadata={"format": "pt"})
x = keep("lora/x", torch.randn(3, 8))
keep("lora/base", model(x))
config = LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "to_out.0"], rank_pattern={"blocks.1.to_q": 2}, alpha_pattern={"blocks.0.to_out.0": 1})
adapted = get_peft_model(model, config)
for name, parameter in adapted.named_parameters():
    if "lora_B" in name:
        nn.init.normal_(parameter, std=0.3)
keep("lora/adapted", adapted(x))
shutil.rmtree(OUT / "lora_peft", ignore_errors=True)
adapted.save_pretrained(OUT / "lora_peft")
(OUT / "lora_peft/README.md").unlink()
state = {k.removeprefix("base_model.model."): v.contiguous() for k, v in get_peft_model_state_dict(adapted).items()}
FluxPipeline.save_lora_weights(OUT / "lora_diffusers", transformer_lora_layers=state, transformer_lora_adapter_metadata=config.to_dict())
# As some trainers write it: no metadata, an alpha tensor beside the factors, kohya's names of the factors.
old = {k.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): v for k, v in state.items()}
modules = {k.split(".lora_")[0] for k in state}
old |= {f"{m}.alpha": torch.tensor(1.0 if m == "blocks.0.to_out.0" else 6.0) for m in modules}
save_file(old, OUT / "lora_alpha.safetensors")
keep("lora/adapted_without_metadata", torch.zeros(3, 8))
for layer in adapted.modules():
    if hasattr(layer, "scaling"):
        layer.scaling["default"] = 1.0
keep("lora/adapted_without_metadata", adapted(x))
for layer in adapted.modules():
    if hasattr(layer, "scaling"):
        layer.scaling["default"] = 0.5
keep("lora/half_without_metadata", adapted(x))
save_file({f"transformer.{k}": v for k, v in state.items()}, OUT / "lora_bare.safetensors")

save_file(golden, OUT / "golden.safetensors")
print(f"{len(golden)} tensors")
