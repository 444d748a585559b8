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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import __version__
from slipstream.config import UserError
from slipstream.models.drafter import FULL, SLIDING, Drafter, DrafterConfig
from slipstream.training.checkpoint import MANIFEST, complete_checkpoints, fsync, load_masters

ARCHITECTURE = "DFlashDraftModel"
CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "slipstream.json"

T = TypeVar("T")


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


@dataclass(frozen=True)
class _Fields:
    """A `config.json` read field by field; what is missing or of the wrong kind is named with the file."""

    values: dict[str, Any]
    where: str

    def get(self, name: str, kind: type[T]) -> T | None:
        value = self.values.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise UserError(f"{self.where}: field {name!r} is {value!r}, no {kind.__name__}: mend the file")
        return value

    def need(self, name: str, kind: type[T]) -> T:
        value = self.get(name, kind)
        if value is None:
            raise UserError(
                f"{self.where}: field {name!r} is missing: not a z-lab DFlash drafter, or an incomplete one"
            )
        return value

    def size(self, name: str) -> int:
        value = self.need(name, int)
        if value < 1:
            raise UserError(f"{self.where}: field {name!r} is {value}, must be at least 1: mend the file")
        return value

    def items(self, name: str, kind: type[T]) -> tuple[T, ...]:
        value = self.need(name, list)
        if any(type(item) is not kind for item in value):
            raise UserError(
                f"{self.where}: field {name!r} is {value!r}, not a list of {kind.__name__}: mend the file"
            )
        return tuple(value)


def config_from_zlab(values: dict[str, Any], where: str) -> DrafterConfig:
    """Geometry from a `config.json`. Raises `UserError` naming `where` and the field.

    Read as the reference reader does: `dflash_config` before the top level, `rope_parameters` before
    `rope_theta`, a window only with `use_sliding_window`.
    """
    fields = _Fields(values, where)
    architectures = fields.get("architectures", list) or []
    if ARCHITECTURE not in architectures:
        raise UserError(
            f"{where}: architectures {architectures} is not {ARCHITECTURE}: not a drafter of this kind"
        )
    dflash = _Fields({**values, **fields.need("dflash_config", dict)}, where)
    scale = dflash.get("input_embedding_scale", float)
    try:
        return DrafterConfig(
            hidden_size=fields.size("hidden_size"),
            vocab_size=fields.size("vocab_size"),
            num_layers=fields.size("num_hidden_layers"),
            num_heads=fields.size("num_attention_heads"),
            num_kv_heads=fields.size("num_key_value_heads"),
            head_dim=fields.size("head_dim"),
            intermediate_size=fields.size("intermediate_size"),
            block_size=dflash.size("block_size"),
            mask_token_id=dflash.need("mask_token_id", int),
            target_layer_ids=dflash.items("target_layer_ids", int),
            num_target_layers=fields.size("num_target_layers"),
            rope_theta=_rope_theta(fields),
            rms_norm_eps=fields.need("rms_norm_eps", float),
            layer_types=_layer_types(fields),
            sliding_window=_window(fields),
            is_causal=fields.get("is_causal", bool),
            input_embedding_scale=1.0 if scale is None else scale,
            max_position_embeddings=fields.size("max_position_embeddings"),
        )
    except UserError as e:  # the geometry's own checks do not know the file
        text = str(e)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


def _rope_theta(fields: _Fields) -> float:
    """The base of plain one-dimensional RoPE; a stretched one is refused, a drafter here cannot have it."""
    rope = fields.get("rope_parameters", dict) or fields.get("rope_scaling", dict) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise UserError(
            f"{fields.where}: field 'rope_parameters' asks for {kind!r} rotary embeddings: only plain ones "
            "(rope_type default) can be read here"
        )
    return _Fields({**fields.values, **rope}, fields.where).need("rope_theta", float)


def _window(fields: _Fields) -> int | None:
    return fields.get("sliding_window", int) if fields.get("use_sliding_window", bool) else None


def _layer_types(fields: _Fields) -> tuple[str, ...]:
    """`layer_types`, or what a Qwen3 config means without it: sliding from layer `max_window_layers` on."""
    layers, window = fields.size("num_hidden_layers"), _window(fields)
    if fields.get("layer_types", list) is None:
        first = layers if window is None else fields.need("max_window_layers", int)
        return tuple(SLIDING if i >= first else FULL for i in range(layers))
    kinds = fields.items("layer_types", str)
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise UserError(
            f"{fields.where}: field 'layer_types' holds {min(unknown)!r}: known are {FULL} and {SLIDING}"
        )
    if SLIDING in kinds and window is None:
        raise UserError(
            f"{fields.where}: field 'layer_types' has sliding layers, but 'use_sliding_window' is not true "
            "or 'sliding_window' is missing: readers disagree on such a file: set both"
        )
    return kinds


def export_zlab(
    config: DrafterConfig,
    weights: dict[str, Tensor],
    output_dir: Path,
    provenance: dict[str, Any],
    replace: bool,
) -> None:
    """Write the drafter's folder as a whole or not at all. `replace` overwrites an earlier export.

    Everything is written and synced under a temporary name, then renamed. Raises `UserError` when the folder
    holds something or the disk refuses.
    """
    final = Path(os.path.abspath(output_dir))
    partial, old = (final.with_name(f".{final.name}.{kind}") for kind in ("partial", "old"))
    try:
        if final.exists() and not replace and any(final.iterdir()):
            raise UserError(f"{output_dir}: is not empty: give a new --output-dir")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        served = {name: w.detach().to(torch.bfloat16).contiguous().cpu() for name, w in weights.items()}
        save_file(served, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / WEIGHTS).chmod(0o644)  # safetensors makes files for the owner alone
        (partial / CONFIG).write_text(json.dumps(zlab_config(config), indent=2) + "\n")
        (partial / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
        for path in (*partial.iterdir(), partial):
            fsync(path)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(final, old)
        os.replace(partial, final)
        fsync(final.parent)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not final.exists():
            os.replace(old, final)
        why = " ".join(str(e).split())
        raise UserError(
            f"{output_dir}: cannot write the export ({why}): free space there or choose another folder"
        ) from None
    shutil.rmtree(old, ignore_errors=True)


def load_drafter(path: str | Path, device: torch.device, dtype: torch.dtype) -> Drafter:
    """A frozen drafter from its exported folder, weights in `dtype`. Raises `UserError` naming the file and
    the field or tensor.
    """
    folder = Path(path)
    drafter = Drafter(config_from_zlab(_read_config(folder / CONFIG), str(folder / CONFIG)))
    state = _read_weights(folder / WEIGHTS)
    expected = {name: tuple(w.shape) for name, w in drafter.state_dict().items()}
    for name in sorted(expected.keys() | state.keys()):
        where = f"{folder / WEIGHTS}: tensor {name}"
        if name not in state:
            raise UserError(f"{where} is missing, {CONFIG} asks for {expected[name]}: export it again")
        if name not in expected:
            raise UserError(f"{where} is none that {CONFIG} asks for: not a drafter of this kind")
        found = tuple(state[name].shape)
        if found != expected[name]:
            raise UserError(f"{where} is {found}, {CONFIG} asks for {expected[name]}: export it again")
        if not state[name].is_floating_point():
            raise UserError(f"{where} is {state[name].dtype}: quantised drafters cannot be read here")
    drafter.load_state_dict(state)
    return drafter.to(device=device, dtype=dtype).requires_grad_(False).eval()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as e:
        raise UserError(_unreadable(path, str(e.strerror))) from None
    except ValueError as e:  # not JSON, or not text at all
        raise UserError(f"{path}: not valid JSON ({e}): export it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}, not an object: export it again")
    return values


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(_unreadable(path, "not found"))
    try:
        return load_file(path)
    except (OSError, SafetensorError) as e:
        raise UserError(f"{path}: truncated or damaged ({e}): export it again") from None


def _unreadable(path: Path, why: str) -> str:
    return f"{path}: cannot be read ({why}): an exported drafter has {CONFIG} and {WEIGHTS}"


def export_run(source: Path, output_dir: Path, replace: bool) -> Path:
    """Export a run's newest complete checkpoint, or one checkpoint folder, to `output_dir`."""
    if not source.is_dir():
        raise UserError(f"{source}: no such folder: give a run's folder or one of its checkpoints")
    checkpoint = source
    if not (source / MANIFEST).exists():
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
