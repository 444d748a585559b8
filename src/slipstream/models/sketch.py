"""A target known by its configuration alone: every shape of it, none of its weights. For planning."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from slipstream.config import TrainConfig, UserError
from slipstream.models.target import Target, one_line, target_config
from slipstream.models.trunk import why_not_fused


def sketch_target(settings: TrainConfig, device: torch.device, dtype: torch.dtype) -> Target:
    """What `load_target` would load on `device` in `dtype`, on torch's meta device: it can read no row.

    Raises `UserError` as `load_target` does for what config.json can show.
    """
    config, ids = target_config(settings.target_model, settings.target_layer_ids, settings.taps)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config.get_text_config(), dtype=dtype)
    except ValueError as e:
        raise UserError(f"{settings.target_model}: cannot make this target: {one_line(e)}") from e
    target, fp8 = Target(model, ids), settings.target_fp8
    wanted = settings.target_pass == "fused" or fp8
    if settings.target_pass != "stock" and (wanted or device.type == "cuda"):
        facts = target.config.to_dict()
        why = why_not_fused(target.family.trunk, facts, target.decoder, device, dtype, fp8)
        target.isolation = target.isolation if why else "fused"
    elif device.type == "cpu":
        target.isolation = "unpacked"
    return target
