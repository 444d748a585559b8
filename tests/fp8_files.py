"""Block-scaled FP8 checkpoints as they are released, written by other code than the package's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_fp8(
    plain: Path, out: Path, block: tuple[int, int], prefix: str = "model."
) -> dict[str, torch.Tensor]:
    """A saved model's linear layers in block-scaled FP8, split over two files; their values as bf16."""
    out.mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(plain / name, out)
    stored, values = {}, {}
    for name, w in load_file(plain / "model.safetensors").items():
        name = prefix + name.removeprefix("model.") if name.startswith("model.") else name
        if "_proj" not in name:
            stored[name] = values[name] = w
            continue
        (o, i), (rows, columns) = w.shape, block
        grid = torch.zeros(-(-o // rows) * rows, -(-i // columns) * columns)
        grid[:o, :i] = w
        largest = grid.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3))
        scale = (largest / 448).to(torch.bfloat16)
        full = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:o, :i]
        stored[name] = (w / full).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        values[name] = (stored[name].float() * full).to(torch.bfloat16)
    files = {name: f"model-{1 + n % 2}.safetensors" for n, name in enumerate(sorted(stored))}
    for file in set(files.values()):
        mine = {name: w.contiguous() for name, w in stored.items() if files[name] == file}
        save_file(mine, out / file, metadata={"format": "pt"})
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    set_config(out, {"quantization_config": quantization(block)})
    return values


def quantization(block):
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head"],
    }


def set_config(folder: Path, values: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
