"""The target's tokenizer and the tokens it stops at: one way to load the one, one idea of the other.

Here too: what tells one tokenizer from another. Not here: chat templates (`chat`).
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from slipstream.config import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a target's folder (or of a hub name); `UserError` if none can be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as e:
        why = " ".join(str(e).split())[:200]
        raise UserError(
            f"{path}: no tokenizer can be loaded from it: {why}: copy the target's own there"
        ) from None


def load_generation_config(path: str) -> GenerationConfig | None:
    """How the target generates; None for a bare tokenizer's folder."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def stop_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Token ids that end an answer: those of the generation config, which often knows more, and the
    tokenizer's eos.
    """
    known = None if generation is None else generation.eos_token_id
    ids: set[int] = {known} if isinstance(known, int) else set(known or ())
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary (token → id) and of the begin and end tokens.

    Not of the padding token: training tools change it freely, and it changes no id.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    facts = [vocabulary, str(tokenizer.bos_token), str(tokenizer.eos_token)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id: a vocabulary may have holes."""
    return max(tokenizer.get_vocab().values()) + 1
