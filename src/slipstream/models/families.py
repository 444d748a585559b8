"""What is known about families of target models, in one table, and the choice of the mask token.

Facts that cannot be read from a model's modules: how documents of a packed row are kept apart, what the
family does to embedding rows and logits, which unused embedding row serves as mask. Loading and running a
model is target.py's business, proving that these facts hold for the model at hand is selfcheck.py's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from slipstream.config import UserError

Isolation = Literal["packed", "unpacked", "fused"]
Fact = Callable[[dict[str, Any]], float]  # of the text model's config, as a dict


def _one(_config: dict[str, Any]) -> float:
    return 1.0


def _root_of_width(config: dict[str, Any]) -> float:
    return config["hidden_size"] ** 0.5


@dataclass(frozen=True)
class TrunkFacts:
    """How decoder layers of a family differ in what the fused pass (trunk.py) takes over from them."""

    norm_offset: float = 0.0
    """Added to the weight of a norm (1 in families that store weights around zero); gated norms have none."""
    head_norm: bool = False
    """Whether queries and keys are normed by head."""
    query_gate: bool = False
    """Whether q_proj makes a gate of attention's output behind each head's query."""
    position_axes: int = 1
    """How often the rotary embedding takes each position: 3 where images have rows and columns."""


@dataclass(frozen=True)
class Family:
    """Facts of one `model_type` (that of the text model, where a wrapper has several)."""

    isolation: Isolation = "unpacked"
    """packed: one pass under a block-diagonal causal mask, only where a test proves it; unpacked: batches
    of documents, right for every causal model, and what a CPU always does because it is faster there. Both
    run the stock layers; a target with `trunk` facts may read rows fused instead."""
    trunk: TrunkFacts | None = None
    """What the fused pass must know; None where it does not know the family."""
    masks_by_layer_type: bool = False
    """Whether the decoder takes a dict of masks (full and sliding layers) in place of one mask."""
    embedding_scale: Fact = _one
    """What the model multiplies embedding rows by before its first layer."""
    logit_multiplier: Fact = _one
    """What the model multiplies the head's product by, before a softcap."""
    mask_token_id: int | None = None
    """A known unused embedding row."""


# A family that is not here is read as `Family()`: unpacked is right for every causal model, and the start-up
# self-check refuses it should its embeddings or logits be scaled.
TABLE: dict[str, Family] = {
    "llama": Family("packed", TrunkFacts(), mask_token_id=128002),
    "qwen3": Family("packed", TrunkFacts(head_norm=True), masks_by_layer_type=True, mask_token_id=151669),
    "qwen3_moe": Family(mask_token_id=151669),
    "qwen3_5_text": Family(  # hybrid: linear attention ignores a mask, so stock layers run it unpacked
        trunk=TrunkFacts(norm_offset=1.0, head_norm=True, query_gate=True, position_axes=3),
        mask_token_id=248070,
    ),
    "qwen3_5_moe_text": Family(mask_token_id=248070),
    "gpt_oss": Family(mask_token_id=200000),
    "gemma": Family(embedding_scale=_root_of_width),
    "gemma2": Family(embedding_scale=_root_of_width),
    "gemma3_text": Family("packed", masks_by_layer_type=True, embedding_scale=_root_of_width),
    "granite": Family(
        embedding_scale=lambda c: c["embedding_multiplier"],
        logit_multiplier=lambda c: 1 / c["logits_scaling"],
    ),
    "cohere": Family(logit_multiplier=lambda c: c["logit_scale"]),
    "cohere2": Family(logit_multiplier=lambda c: c["logit_scale"]),
}


def family_of(model_type: str) -> Family:
    """The table's facts of a model type; the cautious defaults for an unknown one."""
    return TABLE.get(model_type, Family())


_SPARE_NAME = re.compile(r"mask|reserved|unused|placeholder|extra_id", re.IGNORECASE)


def choose_mask_token(
    explicit: int | None,
    model_type: str,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Collection[int] = (),
) -> tuple[int, str]:
    """The mask token's id and, for the log, where it comes from.

    1. `explicit`, if it is an embedding row and neither pad nor a stop token.
    2. The family's known id, if it is an embedding row that no text reaches: either no token of this
       tokenizer, or a special token with no role (see `_spare_tokens`).
    3. A special token with no role; one whose name says reserved, unused or mask first, then the lowest id.

    `vocab_size` counts the rows of the target's embedding, which is never resized; `stop_ids` are further
    stop tokens (generation_config's). Raises `UserError` when the explicit id is refused or nothing fits:
    there is no fall-back.
    """
    if explicit is not None:
        return _checked_explicit(explicit, vocab_size, tokenizer, stop_ids), "given"
    spare = {i: name for i, name in _spare_tokens(tokenizer, stop_ids).items() if i < vocab_size}
    known = family_of(model_type).mask_token_id
    if known is not None and known < vocab_size:
        if known >= len(tokenizer) and known not in tokenizer.added_tokens_decoder:
            return known, f"known for {model_type}: no token of the tokenizer"
        if known in spare:
            return known, f"known for {model_type}: unused special token {spare[known]!r}"
    if spare:
        choice = min(spare, key=lambda i: (_SPARE_NAME.search(spare[i]) is None, i))
        return choice, f"unused special token {spare[choice]!r} of the tokenizer"
    raise UserError(
        f"mask token: the tokenizer has no unused special token among the {vocab_size} embedding rows: "
        "name an unused row with --mask-token-id"
    )


def _checked_explicit(
    explicit: int, vocab_size: int, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]
) -> int:
    if not 0 <= explicit < vocab_size:
        raise UserError(
            f"--mask-token-id {explicit} is not a row of the target's embedding (0 to {vocab_size - 1}): "
            "name an existing, unused row"
        )
    if explicit == tokenizer.pad_token_id:
        raise UserError(f"--mask-token-id {explicit} is the pad token: name an unused row of the embedding")
    if explicit == tokenizer.eos_token_id or explicit in stop_ids:
        raise UserError(f"--mask-token-id {explicit} is a stop token: name an unused row of the embedding")
    return explicit


def _spare_tokens(tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> dict[int, str]:
    """Added tokens without a role, id → text: special ones, or ones named as spare; never a token with a role
    (bos, eos, pad, unk, …), a stop token, or one that the chat template writes or renders."""
    role_ids: tuple[Any, ...] = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        tokenizer.sep_token_id,
        tokenizer.cls_token_id,
    )
    taken = {*stop_ids, *(i for i in role_ids if i is not None)}
    written = _template_text(tokenizer)
    return {
        i: token.content
        for i, token in tokenizer.added_tokens_decoder.items()
        if i not in taken
        and token.content not in written
        and (token.special or _SPARE_NAME.search(token.content))
    }


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template's source and a rendered conversation, as templates also make names out of roles."""
    template = tokenizer.chat_template
    if not template:
        return ""
    text = template if isinstance(template, str) else json.dumps(template)
    roles = ("system", "user", "assistant", "user")
    for first in (0, 1):  # some templates know no system turn
        messages = [{"role": role, "content": "x"} for role in roles[first:]]
        try:
            text += str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, TypeError, ValueError):  # a template may also raise what Python raises
            continue
    return text
