"""Reading tokens into a target's cache and forgetting those that were refused.

Lives here: the one place that knows transformers' cache layers. Not here: what is accepted (speculative.py)
and how a target computes logits and taps (models/target.py).

Three kinds of layers, three ways back:
- attention over everything: drop the last keys and values;
- attention over a sliding window: the same, but the layer must keep what slid out of the window until the
  verdict is known ("recording"), and is trimmed after every pass. The trim is due even when nothing is
  refused;
- linear attention (a convolution's tail and a recurrent state): no inverse exists, and transformers' `crop`
  leaves the recurrent state as it is. The states are copied before a pass and put back when anything is
  refused; the accepted tokens wait and are read again in front of the next block: a refusal costs a few
  tokens more, and no pass more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from slipstream.config import UserError
from slipstream.models.target import Target

MAX_WAITING = 48
"""Accepted tokens that may wait to be read again; above this a pass reads them alone.

Refusals in a row would else let the wait grow without end. A pass of 64 tokens costs a GPU about what a pass
of one does (the weights are read either way), so waiting is cheap up to there.
"""


@dataclass(frozen=True)
class LinearState:
    """Copies of what a linear-attention layer keeps, by state index; a layer may lack either kind."""

    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]


def copy_linear_state(layer: LinearAttentionCacheLayerMixin) -> LinearState:
    return LinearState(
        conv={i: s.clone() for i, s in layer.conv_states.items() if s is not None},
        recurrent={i: s.clone() for i, s in layer.recurrent_states.items() if s is not None},
    )


def put_back_linear_state(layer: LinearAttentionCacheLayerMixin, state: LinearState) -> None:
    """In place: transformers promises these tensors a fixed address."""
    for kept, copies in ((layer.conv_states, state.conv), (layer.recurrent_states, state.recurrent)):
        for i, copy in copies.items():
            live = kept[i]
            assert live is not None
            live.copy_(copy)


def drop_attention_tail(cache: DynamicCache, count: int) -> None:
    """Forgets the last `count` tokens of every attention layer; 0 only trims sliding windows."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            if isinstance(
                layer, DynamicLayer
            ):  # attention and linear at once: its own crop would refuse the latter
                DynamicLayer.crop(layer, -count)
        else:
            assert isinstance(layer, DynamicLayer)
            layer.crop(-count)


class TargetReader:
    """A target and its cache, for one request: `read` a few tokens, then `keep` the first n of them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.cache = target.new_cache()
        self.linear = [x for x in self.cache.layers if isinstance(x, LinearAttentionCacheLayerMixin)]
        for layer in self.cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                if isinstance(layer, LinearAttentionCacheLayerMixin):
                    raise UserError(
                        f"target: {target.model_type} mixes a sliding window and linear attention in one "
                        "layer: speculative decoding cannot roll that back"
                    )
                layer.activate_past_recording()
        self.length = 0
        """Tokens kept so far, waiting ones included: the position of the next token."""
        self.catch_up_passes = 0
        """Passes that only read waiting tokens again; hybrid targets only."""
        self._waiting = torch.empty(0, dtype=torch.int64, device=target.device)
        self._read = self._waiting
        self._before: list[LinearState] = []

    def prefill(self, ids_n: Tensor) -> tuple[Tensor, Tensor]:
        """Reads and keeps a prompt: logits [V] after its last token, and its taps [n, T·H]."""
        assert self.length == 0
        logits_1V, taps = self.target.decode_step(ids_n, self.cache, 0, last=1)
        drop_attention_tail(self.cache, 0)
        self.length = len(ids_n)
        return logits_1V[0], taps

    def read(self, ids_n: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, V] and taps [n, T·H] of n new tokens; `keep` must follow before the next `read`."""
        self._before = [copy_linear_state(layer) for layer in self.linear]
        waiting = len(self._waiting)
        self._read = torch.cat([self._waiting, ids_n]) if waiting else ids_n
        start = self.length - waiting
        logits, taps = self.target.decode_step(self._read, self.cache, start, last=len(ids_n))
        return logits, taps[waiting:]

    def keep(self, count: int) -> None:
        """Keeps the first `count` tokens of the last `read` and forgets the others."""
        waiting = len(self._waiting)
        refused = len(self._read) - waiting - count
        assert refused >= 0
        assert count >= 0
        self.length += count
        if refused == 0 or not self.linear:
            drop_attention_tail(self.cache, refused)
            self._waiting = self._read[:0]
            return
        drop_attention_tail(self.cache, len(self._read))
        for layer, state in zip(self.linear, self._before, strict=True):
            put_back_linear_state(layer, state)
        self._waiting = self._read[: waiting + count]
        if len(self._waiting) > MAX_WAITING:
            self.catch_up()

    def catch_up(self) -> None:
        """Reads the waiting tokens, so that the cache holds all that was kept."""
        if len(self._waiting):
            self.target.decode_step(self._waiting, self.cache, self.length - len(self._waiting), last=1)
            drop_attention_tail(self.cache, 0)
            self._waiting = self._waiting[:0]
            self.catch_up_passes += 1
