"""The cache of a batch of requests: columns that have room to grow, can be moved, and take in new rows.

Lives here: what batched decoding asks of transformers' cache layers. Not here: when it asks (batched.py),
the way back from refused tokens (rollback.py).
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from slipstream.config import UserError
from slipstream.models.target import Target

COLUMNS = 256
"""The cache grows by so many columns."""


class RoomyLayer(DynamicLayer):
    """Keys and values [B, heads, end, d], views of zeroed buffers that have columns to spare."""

    buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        self.open(key_states, value_states, len(key_states))
        self.end_at(start + key_states.shape[-2])
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def open(self, keys: Tensor, values: Tensor, rows: int) -> None:
        """Buffers for `rows` rows of this kind, if there are none yet."""
        if self.buffers is None:
            self.lazy_initialization(keys, values)
            shapes = ((rows, x.shape[1], 0, x.shape[3]) for x in (keys, values))
            a, b = (keys.new_zeros(shape) for shape in shapes)
            self.buffers = a, b

    def end_at(self, end: int) -> None:
        """Views of the first `end` columns; buffers grow to hold them."""
        assert self.buffers is not None
        a, b = (x if x.shape[2] >= end else _grown(x, end) for x in self.buffers)
        self.buffers = a, b
        self.keys, self.values = a[:, :, :end], b[:, :, :end]

    def move(self, end: int, to: int, keep: int) -> None:
        """The last `keep` of `end` columns become those before `to`."""
        self.end_at(max(end, to))
        assert self.buffers is not None
        for buffer in self.buffers:
            buffer[:, :, to - keep : to] = buffer[:, :, end - keep : end].clone()
        self.end_at(to)


def roomy_cache(target: Target) -> DynamicCache:
    """An empty cache of such layers; `UserError` where the target has others."""
    cache = target.new_cache()
    for i, layer in enumerate(cache.layers):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            # a sliding layer keeps all: the mask hides what has slid out, and columns can be moved
            cache.layers[i] = RoomyLayer()
        elif type(layer) is not LinearAttentionLayer:
            raise UserError(
                f"--target-model: {target.model_type} has layers with a {type(layer).__name__}, which cannot "
                "be decoded in batches here: serve it and answer with --server"
            )
    return cache


def put_rows(mine: object, new: object, slots: Tensor, rows: int, end: int) -> None:
    """Copies what a cache layer holds of new rows into those of the batch."""
    if isinstance(mine, RoomyLayer) and isinstance(new, RoomyLayer):
        assert new.keys is not None
        assert new.values is not None
        mine.open(new.keys, new.values, rows)
        mine.end_at(end)
        assert mine.buffers is not None
        for kept, values in zip(mine.buffers, (new.keys, new.values), strict=True):
            kept[slots, :, end - values.shape[2] : end] = values
        return
    assert isinstance(mine, LinearAttentionLayer)
    assert isinstance(new, LinearAttentionLayer)
    for i, state in new.conv_states.items():
        if state is not None:
            if mine.conv_states[i] is None:
                mine.update_conv_state(state.new_zeros(rows, *state.shape[1:]), state_idx=i)
            mine.conv_states[i][slots] = state  # type: ignore[index]
    for i, state in new.recurrent_states.items():
        if state is not None:
            if mine.recurrent_states[i] is None:
                mine.update_recurrent_state(state.new_zeros(rows, *state.shape[1:]), state_idx=i)
            mine.recurrent_states[i][slots] = state  # type: ignore[index]


def _grown(buffer: Tensor, end: int) -> Tensor:
    columns = -(-end // COLUMNS) * COLUMNS
    out = buffer.new_zeros(*buffer.shape[:2], columns, buffer.shape[3])
    out[:, :, : buffer.shape[2]] = buffer
    return out
