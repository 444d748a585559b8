"""Plain decoding of many prompts at once, in this process: finished rows make room for new ones at once.

Lives here: the batch, its passes, its sampling. Not here: its cache (columns.py); what is decoded
(answering.py); speculation, which decodes one request (speculative.py).

Shapes: B rows of the batch, of which some may be idle · b rows that are read anew · C columns of the cache in
use · n tokens of a pass · V vocabulary.

All rows end at the same column, `end`, and each begins where its own length says: what padding on the left
does for a batch of prompts, kept up while it decodes. A pass writes one column for all. A new prompt is read
by itself and copied in so that it ends at that column too. Keys carry their positions, so columns can be
moved: when the longest row has gone, the others move to the left. Layers with linear attention keep a state
by row instead; transformers keeps padding out of it.

A row draws from a sequence of uniform numbers that its seed alone decides, so what it says does not depend
on its neighbours but through rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from slipstream.decoding.columns import COLUMNS, RoomyLayer, put_rows, roomy_cache
from slipstream.models.target import Target
from slipstream.system.kernels import only_launching_thread

PASSES = 8
"""Passes between two looks at which rows have finished: a look waits for the device."""
PREFILL_TOKENS = {"cuda": 32768, "cpu": 2048}
"""Tokens, padding included, in one pass over new prompts."""


@dataclass(frozen=True)
class Wish:
    """One prompt to continue. `number` is the caller's; `temperature` 0 is greedy."""

    number: int
    ids: list[int]
    max_new: int
    stop_ids: frozenset[int]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Batch:
    """`rows` rows of a target that decodes. Ends rows at stop tokens and limits; nothing is thrown away
    before `harvest` has given it.
    """

    def __init__(self, target: Target, rows: int) -> None:
        self.target, self.rows, self.device = target, rows, target.device
        self.cache = roomy_cache(target)
        self.end = 0
        self.wishes: list[Wish | None] = [None] * rows
        self.known = [0] * rows  # tokens of each row at the last look, idle rows 0
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=self.device)  # noqa: E731
        self.length_B, self.count_B, self.limit_B, self.last_B = (zeros(rows) for _ in range(4))
        self.done_B = torch.ones(rows, dtype=torch.bool, device=self.device)
        self.stops_Bk, self.made_Bn = zeros(rows, 1) - 1, zeros(rows, 1)
        self.uniform_Bn = torch.zeros(rows, 1, device=self.device)
        self.temperature_B, self.top_p_B = (torch.ones(rows, device=self.device) for _ in range(2))

    @property
    def free(self) -> int:
        return self.wishes.count(None)

    @torch.inference_mode()
    def admit(self, wishes: list[Wish]) -> None:
        """Reads new prompts into idle rows; their first tokens are drawn."""
        assert len(wishes) <= self.free
        most = PREFILL_TOKENS[self.device.type]
        wishes = sorted(wishes, key=lambda w: -len(w.ids))
        while wishes:
            count = max(1, most // len(wishes[0].ids))
            self._read(wishes[:count])
            wishes = wishes[count:]

    def _read(self, wishes: list[Wish]) -> None:
        width, b = len(wishes[0].ids), len(wishes)
        free = [s for s, w in enumerate(self.wishes) if w is None][:b]
        ids, lengths = np.zeros((b, width), np.int64), np.array([len(w.ids) for w in wishes])
        for row, wish in zip(ids, wishes, strict=True):
            row[width - len(wish.ids) :] = wish.ids
        cache = roomy_cache(self.target)
        length_b, slots = self._tensor(lengths), self._tensor(free)
        logits_bV = self._pass(self._tensor(ids), length_b - width, cache, width)
        if width > self.end:
            self._move(width)
        for mine, new in zip(self.cache.layers, cache.layers, strict=True):
            put_rows(mine, new, slots, self.rows, self.end)
        self._fill_in(wishes, free, slots, length_b)
        self._take(logits_bV, slots, self._tensor([i for i, w in enumerate(wishes) if w.temperature > 0]))

    def _fill_in(self, wishes: list[Wish], free: list[int], slots: Tensor, length_b: Tensor) -> None:
        """Everything about new rows but their first token."""
        self.length_B[slots], self.count_B[slots], self.done_B[slots] = length_b, 0, False
        self.limit_B[slots] = self._tensor(np.array([w.max_new for w in wishes]))
        longest, most_stops = max(w.max_new for w in wishes), max(len(w.stop_ids) for w in wishes)
        self.made_Bn, self.uniform_Bn = (_wider(x, longest) for x in (self.made_Bn, self.uniform_Bn))
        self.stops_Bk = _wider(self.stops_Bk, most_stops, -1)
        stops = np.full((len(wishes), self.stops_Bk.shape[1]), -1)
        uniform = np.zeros((len(wishes), self.uniform_Bn.shape[1]), np.float32)
        for i, (wish, slot) in enumerate(zip(wishes, free, strict=True)):
            self.wishes[slot], self.known[slot] = wish, len(wish.ids)
            stops[i, : len(wish.stop_ids)] = list(wish.stop_ids)
            if wish.temperature > 0:
                draws = np.random.Generator(np.random.Philox(wish.seed))
                uniform[i, : wish.max_new] = draws.random(wish.max_new, np.float32)
        self.stops_Bk[slots] = self._tensor(stops)
        self.uniform_Bn[slots] = torch.from_numpy(uniform).to(self.device)
        for kept, values in (
            (self.temperature_B, [w.temperature or 1.0 for w in wishes]),
            (self.top_p_B, [w.top_p for w in wishes]),
        ):
            kept[slots] = torch.tensor(values, device=self.device)

    @torch.inference_mode()
    def decode(self, passes: int) -> None:
        """Up to `passes` tokens more in every row that has not finished."""
        longest = max(self.known)
        if self.end - longest > COLUMNS:
            self._move(longest)
        sampled = self._tensor([s for s, w in enumerate(self.wishes) if w is not None and w.temperature > 0])
        everyone = torch.arange(self.rows, device=self.device)
        for _ in range(passes):
            logits_BV = self._pass(self.last_B[:, None], self.length_B[:, None], self.cache, self.end + 1)
            self.end += 1
            self.length_B += (
                1  # finished rows go on too: their columns are in step, their tokens are not kept
            )
            self._take(logits_BV, everyone, sampled)

    @torch.inference_mode()
    def harvest(self) -> list[tuple[Wish, list[int]]]:
        """Finished rows, which are idle from now on: what was asked and the new tokens, the stop included."""
        done, count, length = torch.stack([self.done_B.long(), self.count_B, self.length_B]).tolist()
        finished = [s for s, w in enumerate(self.wishes) if w is not None and done[s]]
        made = self.made_Bn[self._tensor(finished)].tolist() if finished else []
        out = []
        for slot, tokens in zip(finished, made, strict=True):
            wish = self.wishes[slot]
            assert wish is not None
            out.append((wish, tokens[: count[slot]]))
            self.wishes[slot] = None
        self.known = [0 if w is None else n for w, n in zip(self.wishes, length, strict=True)]
        idle = self._tensor([s for s, w in enumerate(self.wishes) if w is None])
        self.length_B[idle] = 0
        return out

    @only_launching_thread
    def _pass(self, ids_bn: Tensor, first_bn: Tensor, cache: DynamicCache, columns: int) -> Tensor:
        """Logits [b, V] behind the last of n tokens; `first_bn` [b, 1] or [b] is the first one's position,
        below 0 where it is padding. The cache has `columns` columns after it.
        """
        first_b1, n = first_bn.reshape(-1, 1), ids_bn.shape[1]
        positions_bn = first_b1 + torch.arange(n, device=self.device)
        output = self.target.decoder(
            input_ids=ids_bn,
            attention_mask=torch.arange(columns, device=self.device) >= columns - n - first_b1,
            position_ids=positions_bn.clamp(min=0),
            use_cache=True,
            **{self.target.cache_argument: cache},
        )
        return self.target.head.logits(output.last_hidden_state[:, -1])

    def _take(self, logits_bV: Tensor, slots: Tensor, sampled: Tensor) -> None:
        """The next token of rows `slots` from their logits: drawn for those at `sampled` of the b, else
        greedy.
        """
        token_b = logits_bV.argmax(-1)
        if len(sampled):
            rows = slots[sampled]
            at = self.count_B[rows].clamp(max=self.uniform_Bn.shape[1] - 1)
            token_b[sampled] = draw(
                logits_bV[sampled], self.temperature_B[rows], self.top_p_B[rows], self.uniform_Bn[rows, at]
            )
        live = ~self.done_B[slots]
        at = self.count_B[slots].clamp(max=self.made_Bn.shape[1] - 1)
        self.made_Bn[slots, at] = torch.where(live, token_b, self.made_Bn[slots, at])
        self.count_B[slots] += live
        self.last_B[slots] = token_b
        ended = (token_b[:, None] == self.stops_Bk[slots]).any(-1) | (
            self.count_B[slots] >= self.limit_B[slots]
        )
        self.done_B[slots] |= ended

    def _move(self, to: int) -> None:
        keep = min(max(self.known), self.end, to)
        for layer in self.cache.layers:
            if isinstance(layer, RoomyLayer) and layer.buffers is not None:
                layer.move(self.end, to, keep)
        self.end = to

    def _tensor(self, values: np.ndarray | list[int]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)


def draw(logits_bV: Tensor, temperature_b: Tensor, top_p_b: Tensor, uniform_b: Tensor) -> Tensor:
    """Tokens [b] where `uniform_b`, in [0, 1), falls in the distribution at that temperature, cut to the
    smallest set of most likely tokens that has a probability of at least `top_p_b`.
    """
    probs_bV = torch.softmax(logits_bV.float() / temperature_b[:, None], dim=-1)
    probs_bV, order_bV = probs_bV.sort(dim=-1, descending=True)
    upto_bV = probs_bV.cumsum(-1)
    kept_b = ((upto_bV - probs_bV) < top_p_b[:, None]).sum(-1)
    mass_b = upto_bV.gather(-1, kept_b[:, None] - 1)[:, 0]
    pick_b = (upto_bV <= (uniform_b * mass_b)[:, None]).sum(-1).minimum(kept_b - 1)
    return order_bV.gather(-1, pick_b[:, None])[:, 0]


def _wider(x_Bn: Tensor, n: int, fill: int = 0) -> Tensor:
    return torch.nn.functional.pad(x_Bn, (0, max(0, n - x_Bn.shape[1])), value=fill)
