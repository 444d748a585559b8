"""The proof that speculation changes nothing: greedy answers beside plain ones, token by token.

Batched matrix products round differently from single ones, so in bf16 a near-tie may fall the other way:
equality is claimed in fp32 only, and elsewhere the first divergence is reported with its margin. Not here:
the decoding itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from slipstream.decoding.prompts import Prompt
from slipstream.decoding.speculative import Decoded, generate_plain, generate_speculative
from slipstream.models.drafter import Drafter
from slipstream.models.target import Target


@dataclass(frozen=True)
class Difference:
    """Where a greedy speculative answer leaves the plain one."""

    where: str
    position: int
    """Index among the new tokens."""
    plain: int
    speculative: int
    margin: float
    """Target's logit of the plain token minus that of the speculative one, in a fresh pass over the common
    text.
    """


@dataclass(frozen=True)
class Agreement:
    """Greedy speculative answers beside plain ones, token by token up to each first difference."""

    dtype: str
    requests: int
    tokens: int
    """Tokens compared and found equal."""
    differences: list[Difference]

    @property
    def lossless(self) -> bool:
        return not self.differences


def compare(target: Target, requests: Sequence[tuple[Prompt, Decoded, Decoded]]) -> Agreement:
    """Greedy answers, plain (second) and speculative (third), token by token."""
    tokens, differences = 0, []
    for prompt, plain, drafted in requests:
        both = zip(plain.tokens, drafted.tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(both) if a != b), None)
        if same is None:
            # The same stop rule ends both: of two equal beginnings neither can be longer.
            assert len(plain.tokens) == len(drafted.tokens)
            tokens += len(plain.tokens)
            continue
        tokens += same
        a, b = plain.tokens[same], drafted.tokens[same]
        margin = _margin(target, prompt.ids + plain.tokens[:same], a, b)
        differences.append(Difference(prompt.where, same, a, b, margin))
    dtype = str(target.dtype).removeprefix("torch.")
    return Agreement(dtype, len(requests), tokens, differences)


@torch.inference_mode()
def _margin(target: Target, ids: list[int], plain: int, speculative: int) -> float:
    logits_nV, _ = target.decode_step(torch.tensor(ids, device=target.device), target.new_cache(), 0, last=1)
    return float(logits_nV[-1, plain].float() - logits_nV[-1, speculative].float())


def prove_lossless(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    stop_ids: Collection[int],
    block_size: int | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> Agreement:
    """Greedy decoding in fp32, plainly and with the drafter, compared token by token. Both models must be
    fp32 copies. `progress` gets the number of requests done, and nothing more to say.
    """
    assert target.dtype == torch.float32
    assert drafter.fc.weight.dtype == torch.float32
    requests = []
    for done, prompt in enumerate(prompts, 1):
        plain = generate_plain(target, prompt.ids, max_new_tokens, 0, stop_ids)
        drafted = generate_speculative(target, drafter, prompt.ids, max_new_tokens, 0, stop_ids, block_size)
        requests.append((prompt, plain, drafted))
        if progress is not None:
            progress(done, "")
    return compare(target, requests)
