"""Tiny LoRA adapters, with weights that change what is cached."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

_RANK = 8


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter for every attention layer of a tiny checkpoint; replaces one that is there."""
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config.get("head_dim", 64)
    widths = {
        "q_proj": config["num_attention_heads"] * head,
        "k_proj": config["num_key_value_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    for layer in (index for index, kind in enumerate(kinds) if "attention" in kind):
        for name, width in widths.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(_RANK, hidden, generator=generator) / hidden**0.5
            up = torch.randn(width, _RANK, generator=generator) / 3
            tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"] = down, up
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": list(widths),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
