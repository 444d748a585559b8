"""A target known by its configuration alone: every shape of it, none of its weights. For planning."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from slipstream.config import TrainConfig, UserError
from slipstream.models.fp8 import fp8_blocks
from slipstream.models.target import Target, choose_pass, one_line, target_config, wanted_pass


def sketch_target(settings: TrainConfig, device: torch.device, dtype: torch.dtype) -> Target:
    """What `load_target` would load on `device` in `dtype`, on torch's meta device: it can read no row.

    Raises `UserError` as `load_target` does for what config.json can show.
    """
    config, ids = target_config(settings.target_model, settings.target_layer_ids, settings.taps)
    fp8_blocks(config, settings.target_model)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config.get_text_config(), dtype=dtype)
    except ValueError as e:
        raise UserError(f"{settings.target_model}: cannot make this target: {one_line(e)}") from e
    target = Target(model, ids)
    target.isolation, target.why_stock = choose_pass(
        target.family,
        target.config.to_dict(),
        target.decoder,
        device,
        dtype,
        wanted_pass(settings.target_pass, settings.compile),
        settings.target_fp8,
    )
    return target
