"""The z-lab / SGLang layout: a drafter as serving engines load it, and back.

`config.json` is a Qwen3 config with `architectures: ["DFlashDraftModel"]` and a `dflash_config`; weights are
bf16 safetensors under the names of the released checkpoints, without embedding and head. Readers in the
field look for the same fact in different places, so block size and rope theta are written in both, and
`is_causal` whenever it is known.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import __version__
from slipstream.config import UserError
from slipstream.models.drafter import FULL, SLIDING, Drafter, DrafterConfig
from slipstream.training.checkpoint import complete_checkpoints, load_masters

ARCHITECTURE = "DFlashDraftModel"


def zlab_config(config: DrafterConfig) -> dict[str, Any]:
    """The `config.json` of a drafter."""
    sliding = SLIDING in config.layer_types
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "max_window_layers": config.layer_types.index(SLIDING) if sliding else config.num_layers,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "block_size": config.block_size,
            "input_embedding_scale": config.input_embedding_scale,
        },
    }
    if config.is_causal is not None:
        out["is_causal"] = config.is_causal
    return out


def config_from_zlab(values: dict[str, Any], where: str) -> DrafterConfig:
    """Geometry from a `config.json`; a missing field is a `UserError` that names it."""

    def need(table: dict[str, Any], name: str) -> Any:
        if table.get(name) is None:
            raise UserError(
                f"{where}: field {name!r} is missing: not a z-lab DFlash drafter, or an incomplete one"
            )
        return table[name]

    if ARCHITECTURE not in (values.get("architectures") or []):
        raise UserError(
            f"{where}: architectures {values.get('architectures')} is not {ARCHITECTURE}: not a drafter"
        )
    dflash = need(values, "dflash_config")
    layers = need(values, "num_hidden_layers")
    rope = values.get("rope_parameters") or {}
    return DrafterConfig(
        hidden_size=need(values, "hidden_size"),
        vocab_size=need(values, "vocab_size"),
        num_layers=layers,
        num_heads=need(values, "num_attention_heads"),
        num_kv_heads=need(values, "num_key_value_heads"),
        head_dim=need(values, "head_dim"),
        intermediate_size=need(values, "intermediate_size"),
        block_size=dflash.get("block_size") or need(values, "block_size"),
        mask_token_id=need(dflash, "mask_token_id"),
        target_layer_ids=tuple(need(dflash, "target_layer_ids")),
        num_target_layers=need(values, "num_target_layers"),
        rope_theta=float(rope.get("rope_theta") or need(values, "rope_theta")),
        rms_norm_eps=need(values, "rms_norm_eps"),
        layer_types=tuple(values.get("layer_types") or [FULL] * layers),
        sliding_window=values.get("sliding_window"),
        is_causal=values.get("is_causal"),
        input_embedding_scale=float(dflash.get("input_embedding_scale", 1.0)),
        max_position_embeddings=need(values, "max_position_embeddings"),
    )


def export_zlab(
    config: DrafterConfig,
    weights: dict[str, Tensor],
    output_dir: Path,
    provenance: dict[str, Any],
    replace: bool,
) -> None:
    """Write the drafter's folder as a whole or not at all. `replace` overwrites an earlier export."""
    if output_dir.exists() and not replace and any(output_dir.iterdir()):
        raise UserError(f"{output_dir}: is not empty: give a new --output-dir")
    partial = output_dir.with_name(f".{output_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    served = {name: w.detach().to(torch.bfloat16).contiguous().cpu() for name, w in weights.items()}
    save_file(served, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(zlab_config(config), indent=2) + "\n")
    (partial / "slipstream.json").write_text(json.dumps(provenance, indent=2) + "\n")
    if output_dir.exists():
        shutil.rmtree(output_dir)
    os.replace(partial, output_dir)


def load_drafter(path: str | Path, device: torch.device, dtype: torch.dtype) -> Drafter:
    """A frozen drafter from its exported folder, weights in `dtype`. Raises `UserError` naming the file or
    tensor.
    """
    folder = Path(path)
    try:
        values = json.loads((folder / "config.json").read_text())
        state = load_file(folder / "model.safetensors")
    except FileNotFoundError as e:
        raise UserError(
            f"{e.filename}: not found: an exported drafter has config.json and model.safetensors"
        ) from None
    except (json.JSONDecodeError, SafetensorError) as e:
        raise UserError(f"{folder}: cannot be read ({e}): export it again") from None
    drafter = Drafter(config_from_zlab(values, str(folder / "config.json")))
    expected = {name: tuple(w.shape) for name, w in drafter.state_dict().items()}
    for name in sorted(expected.keys() | state.keys()):
        found = tuple(state[name].shape) if name in state else None
        if expected.get(name) != found:
            raise UserError(
                f"{folder}: tensor {name} is {found}, its config.json asks for {expected.get(name)}"
            )
    drafter.load_state_dict(state)
    return drafter.to(device=device, dtype=dtype).requires_grad_(False).eval()


def export_run(source: Path, output_dir: Path, replace: bool) -> Path:
    """Export a run's newest complete checkpoint, or one checkpoint folder, to `output_dir`."""
    checkpoint = source
    if not (source / "drafter.safetensors").exists():
        found = complete_checkpoints(source)
        if not found:
            raise UserError(
                f"{source}: holds no complete checkpoint: give a run's folder or one of its checkpoints"
            )
        checkpoint = found[-1]
    geometry, weights = load_masters(checkpoint)
    env = checkpoint.parent.parent / "env.json"
    provenance = {
        "slipstream": __version__,
        "checkpoint": checkpoint.name,
        "position": json.loads((checkpoint / "position.json").read_text()),
        "run": json.loads(env.read_text()) if env.is_file() else None,
    }
    export_zlab(config_from_dict(geometry), weights, output_dir, provenance, replace)
    return output_dir


def config_from_dict(values: dict[str, Any]) -> DrafterConfig:
    """A geometry back from the plain values that a checkpoint keeps."""
    lists = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
    return DrafterConfig(**{**values, **lists})
