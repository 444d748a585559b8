"""FP8 (e4m3): matrix products of the frozen target in 8 bits, and checkpoints in block-scaled FP8.

Two things that share only the number format. Products: weights with one scale a row, activations with one
scale a token, made where the activation is made; which products run in FP8 is decided by the pass that makes
them. Checkpoints: weights with one scale a block (of 128 × 128, as released) are read into the target's own
dtype; nothing of them stays in 8 bits.

Shapes: M tokens · I input features · O output features.
"""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from slipstream.config import UserError

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST = 2.0**-110
"""Rows whose largest value is below this are read as zeros: the reciprocal of their scale would overflow."""
SLICE = 2**24
"""Elements of a weight that are held in fp32 at a time."""
WEIGHT, SCALE = ".weight", ".weight_scale_inv"


@dataclass(frozen=True)
class Fp8Weight:
    """A weight matrix in 8 bits: W[o] ≈ scale_O[o] · data_OI[o]; e4m3 and fp32, contiguous."""

    data_OI: Tensor
    scale_O: Tensor


def supports_fp8(capability: tuple[int, int]) -> str | None:
    """None where a GPU of this compute capability multiplies e4m3 matrices, else the reason why not."""
    if capability >= (8, 9):
        return None
    return f"needs a GPU of compute capability 8.9 or newer, this one has {capability[0]}.{capability[1]}"


def fits_fp8(w_OI: Tensor) -> bool:
    """Whether a weight can be multiplied in FP8: both sides are multiples of 16. Others stay as they are."""
    return w_OI.shape[0] % 16 == 0 and w_OI.shape[1] % 16 == 0


def quantize_rows(x_MI: Tensor) -> tuple[Tensor, Tensor]:
    """[M, I] → e4m3 [M, I] and fp32 scales [M] with x ≈ scale · x8: the largest of a row becomes 448.

    A row of zeros gets scale 1. An element is off by at most 2⁻⁴ of itself, or 2⁻¹⁰ of its row's scale where
    that is more. A row with an infinity or NaN comes back NaN. Only pointwise work and one maximum a row, so
    that a compiler writes the 8 bits in the kernel that makes x.
    """
    x = x_MI.float()
    largest_M = x.abs().amax(-1)
    scale_M = torch.where(largest_M < SMALLEST, 1.0, largest_M / E4M3_MAX)
    # rounding may put the largest just above 448; all below 464 is cast to 448, so nothing need be clamped
    x8 = (x * scale_M.reciprocal()[:, None]).to(E4M3)
    return x8, scale_M


@torch.no_grad()
def quantize_weight(w_OI: Tensor) -> Fp8Weight:
    """A weight with one scale a row, on its device; works in slices, so that little beside it is needed."""
    assert fits_fp8(w_OI), f"{tuple(w_OI.shape)}: both sides must be multiples of 16"
    data_OI = torch.empty_like(w_OI, dtype=E4M3, memory_format=torch.contiguous_format)
    scale_O = torch.empty(len(w_OI), dtype=torch.float32, device=w_OI.device)
    rows = max(1, SLICE // w_OI.shape[1])
    for at in range(0, len(w_OI), rows):
        data_OI[at : at + rows], scale_O[at : at + rows] = quantize_rows(w_OI[at : at + rows])
    return Fp8Weight(data_OI, scale_O)


def fp8_matmul(
    x8_MI: Tensor, scale_M: Tensor, weight: Fp8Weight, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """[M, O] = (scale_M · x8) (scale_O · W8)ᵀ in `out_dtype`; on a GPU with fast accumulation.

    Elsewhere, and for tests, the same values are multiplied in fp32. The scales must be whole tensors, not
    slices of others: cuBLAS wants them aligned to 16 bytes.
    """
    if not x8_MI.is_cuda:
        product = x8_MI.float() @ weight.data_OI.float().T
        return (product * scale_M[:, None] * weight.scale_O).to(out_dtype)
    return F.scaled_mm(
        x8_MI,
        weight.data_OI.T,
        scale_M[:, None],
        F.ScalingType.RowWise,
        weight.scale_O[None],
        F.ScalingType.RowWise,
        output_dtype=out_dtype,
        use_fast_accum=True,
    )


def fp8_blocks(config: PreTrainedConfig, path: str) -> tuple[int, int] | None:
    """Block size of a checkpoint's FP8 weights; None for any other checkpoint, quantised or not.

    Raises `UserError` for FP8 that is not block-scaled e4m3 with plain scales.
    """
    how = config.to_dict().get("quantization_config") or {}
    if how.get("quant_method") != "fp8":
        return None
    block, form, scales = how.get("weight_block_size"), how.get("fmt", "e4m3"), how.get("scale_fmt", "float")
    if (
        not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block))
        or form != "e4m3"
        or scales != "float"
    ):
        raise UserError(
            f"{path}: FP8 weights of kind (block {block}, fmt {form}, scale_fmt {scales}) cannot be read: "
            "name a checkpoint in bf16, or one in e4m3 with a scale for each block"
        )
    return block[0], block[1]


def load_fp8_checkpoint(
    path: str, config: PreTrainedConfig, block: tuple[int, int], dtype: torch.dtype, attention: str | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The causal LM of a block-scaled FP8 checkpoint with all weights in `dtype`, and the loading report.

    transformers reads such files only beside `accelerate`, and where a side is no multiple of the block it
    takes another block size than the file's. Here the weights are dequantised first, then given to it.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{path}: {config.model_type} is no causal language model: name one")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # of a model that sees images too, the text part
    text = config if isinstance(config, model_class.config_class) else config.get_text_config()
    plain = copy.deepcopy(text)
    plain.__dict__.pop("quantization_config", None)  # an attribute only where the file had it
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # no such file: made from the model's configuration
        generation = None
    return model_class.from_pretrained(
        None,
        config=plain,
        state_dict=dequantised_weights(folder, block, dtype),
        dtype=dtype,
        attn_implementation=attention,
        generation_config=generation,
        output_loading_info=True,
    )


def dequantised_weights(folder: Path, block: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files under their names there, FP8 weights times their scales.

    Other tensors come as stored. Raises `UserError` for an FP8 weight without a scale for each block and for
    a broken index.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(folder)]
        file_of = {key: file for file in files for key in file.keys()}  # noqa: SIM118
        scales = {key: file_of.pop(key).get_tensor(key) for key in [*file_of] if key.endswith(SCALE)}
        weights = {}
        for key, file in file_of.items():
            weight = file.get_tensor(key)
            if weight.dtype == E4M3:
                scale = scales.get(key.removesuffix(WEIGHT) + SCALE)
                scale = checked_scale(f"{folder}: FP8 tensor {key}", weight, scale, block)
                weight = dequantise(weight, scale, block, dtype)
            weights[key] = weight
    return weights


def weight_files(folder: Path) -> list[Path]:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    try:
        return [folder / name for name in sorted({*json.loads(index.read_text())["weight_map"].values()})]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: names no files of weights: fetch the checkpoint again") from None


def checked_scale(what: str, w8_OI: Tensor, scale: Tensor | None, block: tuple[int, int]) -> Tensor:
    if w8_OI.dim() != 2:
        raise UserError(f"{what} {[*w8_OI.shape]}: no matrix, so it has no blocks: name a checkpoint in bf16")
    blocks = [-(-side // size) for side, size in zip(w8_OI.shape, block, strict=True)]
    if scale is not None and [*scale.shape] == blocks:
        return scale
    found = "none" if scale is None else [*scale.shape]
    raise UserError(
        f"{what} {[*w8_OI.shape]}: scales {blocks} expected, the files have {found}: fetch the checkpoint "
        "again, or name one in bf16"
    )


def dequantise(w8_OI: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """[O, I] in `dtype`: w8 times the scale of its block, multiplied in fp32; last blocks may be short."""
    rows, columns = block
    out_OI = torch.empty(w8_OI.shape, dtype=dtype, device=w8_OI.device)
    for b, scale_b in enumerate(scale):
        here = slice(b * rows, (b + 1) * rows)
        out_OI[here] = w8_OI[here].float() * scale_b.repeat_interleave(columns)[: w8_OI.shape[1]]
    return out_OI
