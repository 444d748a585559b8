"""The frozen target: loading, taps, embedding, head, and cached decoding passes.

A target is any causal language model of transformers. Here it is loaded, checked for what a user can get
wrong, frozen, and read: `taps` gives the outputs of chosen layers for a packed row, `decode_step` one
cached pass of decoding. What families differ in is in families.py, the start-up proof that all of it is
right in selfcheck.py, rolling a cache back in decoding/.

A row is read in one of three ways (`Target.isolation`): fused by trunk.py, or by the stock layers packed
under a mask or unpacked, document by document. Decoding always runs the stock layers.

Shapes: S tokens of a packed row · n tokens of a decoding pass · B documents padded to L in a sub-batch · T
taps · H hidden size · V vocabulary (rows of the embedding).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from slipstream.config import UserError
from slipstream.data.pack import Row
from slipstream.models.documents import Span, group_spans
from slipstream.models.ends import Head, TargetEnds, blank_model, ends_of, read_ends
from slipstream.models.families import Family, Isolation, family_of
from slipstream.models.fp8 import fp8_blocks, load_fp8_checkpoint, supports_fp8
from slipstream.models.target_shards import load_shards
from slipstream.models.trunk import FULL, SLIDING, Trunk, why_not_fused
from slipstream.system.kernels import only_launching_thread

Pass = Literal["auto", "fused", "stock"]


def default_target_layer_ids(num_layers: int, taps: int) -> tuple[int, ...]:
    """`taps` layers spread over `num_layers`: round(1 + i·(n−4)/(T−1)), half to even; n//2 for one tap.

    0-based ids of layers whose output is read; never the last layer. Source: arXiv 2602.06036, released
    checkpoints. Raises `UserError` when the target has too few layers for that many distinct taps.
    """
    if taps < 1:
        raise UserError(f"--taps {taps}: at least one layer of the target must be read")
    if taps == 1:
        ids: tuple[int, ...] = (num_layers // 2,)
    else:
        ids = tuple(round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps))
    if list(ids) != sorted(set(ids)) or min(ids) < 0 or max(ids) >= num_layers - 1:
        raise UserError(
            f"--taps {taps}: a target of {num_layers} layers is too shallow for that many: lower --taps or "
            f"name --target-layer-ids between 0 and {num_layers - 2}"
        )
    return ids


def check_target_layer_ids(ids: tuple[int, ...], num_layers: int) -> None:
    """Raises `UserError` unless the ids are ascending, distinct, and layers of the target before its last."""
    for i in ids:
        if not 0 <= i < num_layers - 1:
            why = " (the last layer's output is never read)" if i == num_layers - 1 else ""
            raise UserError(
                f"--target-layer-ids {i} is out of range{why}: this target has {num_layers} layers, name ids "
                f"between 0 and {num_layers - 2}"
            )
    if not ids or list(ids) != sorted(set(ids)):
        raise UserError(
            f"--target-layer-ids {' '.join(map(str, ids))}: name distinct layers in ascending order"
        )


class _LastTapReached(Exception):
    """Ends a target pass at its last tap: nothing after it is wanted."""


class Target:
    """A frozen causal LM read through its layers' outputs. One per process and model; one thread uses it.

    `pass_` chooses how rows are read: "auto" fused on a GPU where the model allows, "fused" and "stock" as
    they say; `fp8` reads them fused with matrix products in FP8. Raises `UserError` where that is impossible.
    The hooks are installed once and do nothing but during a pass of this class, so that `model` can be used
    beside it.

    With a `group` the layers are in parts on its ranks (target_shards.py), each of which reads rows of its
    own. All call `taps` equally often, and `decode_step` and `model` in step, for every pass gathers layers
    from all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target_layer_ids: tuple[int, ...],
        pass_: Pass = "auto",
        fp8: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.group = group
        self.decoder: nn.Module = model.get_decoder()
        self.config: PreTrainedConfig = model.config.get_text_config()
        facts = self.config.to_dict()
        self.sliding_window: int | None = facts.get("sliding_window")
        self.layers = _decoder_layers(self.decoder, self.config.num_hidden_layers)
        check_target_layer_ids(target_layer_ids, len(self.layers))

        ends = self.ends = ends_of(model, target_layer_ids)
        self.model_type, self.family = ends.model_type, family_of(ends.model_type)
        self.hidden_size, self.vocab_size = ends.hidden_size, ends.vocab_size
        self.num_layers, self.target_layer_ids = ends.num_layers, ends.target_layer_ids
        self.rope_theta, self.input_embedding_scale = ends.rope_theta, ends.input_embedding_scale
        self.device, self.dtype, self.embedding_VH = ends.device, ends.dtype, ends.embedding_VH
        self.head: Head = ends.head
        self.isolation, self.why_stock = choose_pass(
            self.family, facts, self.decoder, self.device, self.dtype, pass_, fp8, group is not None
        )
        self.trunk: Trunk | None = None
        if self.isolation == "fused":
            assert self.family.trunk is not None
            self.trunk = Trunk(self.decoder, self.layers, self.family.trunk, facts, target_layer_ids, fp8)
        # transformers renamed `past_key_values` to `cache` between 5.17 and 5.24, model by model.
        named = inspect.signature(self.decoder.forward).parameters
        self.cache_argument = "cache" if "cache" in named else "past_key_values"
        self._taps: list[Tensor] | None = None
        self._stop = False
        for i in target_layer_ids:
            self.layers[i].register_forward_hook(self._tap_hook(i == target_layer_ids[-1]))

    def _tap_hook(self, last: bool) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            if self._taps is None:
                return
            self._taps.append(output if isinstance(output, Tensor) else output[0])
            if last and self._stop:
                raise _LastTapReached

        return hook

    @only_launching_thread
    @torch.no_grad()
    def taps(self, row: Row) -> Tensor:
        """Outputs of the tapped layers for a packed row, every document read as if it were alone.

        [S, T·H] in the target's dtype on its device, taps side by side in ascending order, zeros at
        padding. The pass ends at the last tap: no later layer, no final norm, no logits.
        """
        if self.isolation == "fused":
            assert self.trunk is not None
            return self.trunk.taps(row)
        width = len(self.target_layer_ids) * self.hidden_size
        taps_SC = torch.zeros(len(row.input_ids), width, dtype=self.dtype, device=self.device)
        spans = row.spans()
        if self.isolation == "packed" and len(spans) > 1:
            end = spans[-1][1]
            taps = self._pass_to_last_tap(
                row.input_ids[None, :end], row.positions[None, :end], self._masks(row, end)
            )
            taps_SC[:end] = torch.cat(taps, dim=-1)[0]
            return taps_SC
        groups = group_spans(spans, len(row.input_ids))
        idle = self._passes(len(groups)) - len(groups)
        for group in groups:
            self._read_group(row, group, taps_SC)
        one = torch.zeros(1, 1, dtype=torch.int64)
        for _ in range(idle):  # a part in the passes of ranks whose rows need more
            self._pass_to_last_tap(one, one, None)
        return taps_SC

    def _passes(self, needed: int) -> int:
        """The passes that all ranks make for a row each: as many as the one that needs the most."""
        if self.group is None or self.isolation == "packed":
            return needed
        most = torch.tensor(needed)
        dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        return int(most)

    def _read_group(self, row: Row, group: list[Span], out_SC: Tensor) -> None:
        """Reads documents as one right-padded batch: a causal model needs no mask for such padding."""
        longest = max(end - start for start, end in group)
        ids_BL = torch.zeros(len(group), longest, dtype=torch.int64)
        for b, (start, end) in enumerate(group):
            ids_BL[b, : end - start] = row.input_ids[start:end]
        positions_BL = torch.arange(longest).expand(len(group), longest)
        taps = self._pass_to_last_tap(ids_BL, positions_BL, None)
        to = torch.cat([torch.arange(start, end) for start, end in group]).to(self.device)
        of = torch.cat([b * longest + torch.arange(end - start) for b, (start, end) in enumerate(group)])
        of = of.to(self.device)
        for t, tap_BLH in enumerate(taps):
            out_SC[to, t * self.hidden_size : (t + 1) * self.hidden_size] = tap_BLH.flatten(0, 1)[of]

    def _masks(self, row: Row, end: int) -> Tensor | dict[str, Tensor]:
        """Block-diagonal causal masks [1, 1, end, end], True where a key is seen."""
        documents = row.documents[:end].to(self.device)
        index = torch.arange(end, device=self.device)
        ahead = index[:, None] - index[None, :]
        full = (documents[:, None] == documents[None, :]) & (ahead >= 0)
        if not self.family.masks_by_layer_type:
            return full[None, None]
        masks = {FULL: full[None, None]}
        if self.sliding_window is not None:
            masks[SLIDING] = (full & (ahead < self.sliding_window))[None, None]
        return masks

    def _pass_to_last_tap(
        self, ids: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor] | None
    ) -> list[Tensor]:
        self._taps, self._stop = [], True
        try:
            self.decoder(
                input_ids=ids.to(self.device),
                position_ids=positions.to(self.device),
                attention_mask=mask,
                use_cache=False,
            )
        except _LastTapReached:
            return self._taps
        finally:
            self._taps, self._stop = None, False
        raise AssertionError("the pass never reached its last tap")

    def new_cache(self) -> DynamicCache:
        """An empty cache for `decode_step`, of the layer kinds this target has (full, sliding, linear)."""
        return DynamicCache(config=self.config)

    @only_launching_thread
    @torch.no_grad()
    def decode_step(
        self, ids_n: Tensor, cache: DynamicCache, start: int, last: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """One cached pass over n tokens at positions start … start+n−1, after those in `cache` (extended).

        Logits [last, V] of the last `last` tokens (default: all n) and taps [n, T·H], in the target's dtype
        on its device. A prefill wants one row of logits, not a vocabulary for every token of the prompt.
        """
        ids = ids_n.to(self.device)
        self._taps = []
        try:
            output = self.decoder(
                input_ids=ids[None],
                position_ids=torch.arange(start, start + len(ids), device=self.device)[None],
                use_cache=True,
                **{self.cache_argument: cache},
            )
            taps_nC = torch.cat(self._taps, dim=-1)[0]
        finally:
            self._taps = None
        hidden_nH = output.last_hidden_state[0]
        return self.head.logits(hidden_nH if last is None else hidden_nH[-last:]), taps_nC


def choose_pass(
    family: Family,
    facts: dict[str, Any],
    decoder: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    pass_: Pass,
    fp8: bool,
    sharded: bool = False,
) -> tuple[Isolation, str | None]:
    """How rows are read on `device` and, where stock layers do it on a GPU though nobody asked for them, why.

    `facts` is the text config as a dict; of `decoder` only shapes and dtypes count. Raises `UserError` where
    what `pass_` or `fp8` asks for is impossible.
    """
    if pass_ == "stock" and fp8:
        raise UserError("--target-fp8: stock layers have no FP8 products: leave out --target-pass stock")
    # A mask over a whole row is dear without a fused kernel: on a CPU core (135 M parameters, ten
    # documents in a row of 2048) documents apart read 2.5 (bf16), 1.5 (fp32) times as fast as packed.
    stock: Isolation = "unpacked" if device.type == "cpu" else family.isolation
    wanted = pass_ == "fused" or fp8
    if pass_ == "stock" or not (wanted or device.type == "cuda"):
        return stock, None
    on_gpu, fla = device.type == "cuda", find_spec("fla") is not None
    why = "its layers are in parts on several GPUs"
    if not sharded:
        why = why_not_fused(family.trunk, facts, decoder, dtype, fp8, on_gpu, fla)
    if why is None and fp8 and on_gpu:
        why = supports_fp8(torch.cuda.get_device_capability(device))
    if why is None:
        return "fused", None
    if wanted:
        setting = "--target-fp8" if fp8 else "--target-pass fused"
        raise UserError(f"{setting}: the fused pass cannot read this target: {why}")
    return stock, why


def _decoder_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder's stack of layers: its only child list of that length, whatever its name."""
    lists = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if len(lists) != 1:
        raise UserError(
            f"target: {type(decoder).__name__} has no single list of {num_layers} decoder layers: "
            "this kind of model cannot be tapped"
        )
    return lists[0]


def wanted_pass(asked: Pass, compiled: bool) -> Pass:
    """`auto` without a compiler is the stock layers: the fused pass is one of compiled kernels."""
    return "stock" if asked == "auto" and not compiled else asked


def check_vocab(target: Target | TargetEnds, max_token_id: int) -> None:
    """Raises `UserError` when data holds a token id that is no row of the target's embedding."""
    if max_token_id >= target.vocab_size:
        raise UserError(
            f"data: token id {max_token_id} is beyond the target's {target.vocab_size} embedding rows: the "
            "shards were made with another tokenizer; run `slipstream prepare` with the target's own"
        )


def load_target(
    path: str,
    target_layer_ids: tuple[int, ...] | None,
    taps: int,
    device: torch.device,
    dtype: torch.dtype,
    pass_: Pass = "auto",
    fp8: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Target:
    """Loads a causal LM from a folder (or hub name), frozen, on `device` in `dtype`.

    `target_layer_ids` None spreads `taps` of them; `pass_`, `fp8` and `group` as `Target` takes them. With a
    group all its ranks call this together; it must take CPU tensors too. Raises `UserError` for a missing or
    broken folder, a model that is no causal LM, weights that are missing from the files, taps out of range,
    and a pass that cannot read this model.
    """
    config, ids = target_config(path, target_layer_ids, taps)
    text = config.get_text_config()
    family = family_of(text.model_type)
    # A mask of our own is only read by these two implementations; SDPA is the faster.
    attention = "sdpa" if family.isolation == "packed" else None
    if group is None:
        return Target(_load_whole(path, config, dtype, attention).to(device), ids, pass_, fp8)
    with _refusals(path):
        model = blank_model(config, dtype, attention)
    decoder: nn.Module = model.get_decoder()
    layers = _decoder_layers(decoder, text.num_hidden_layers)
    # refused before minutes of loading
    choose_pass(family, text.to_dict(), decoder, device, dtype, pass_, fp8, sharded=True)
    load_shards(model, decoder, layers, lambda: _load_whole(path, config, dtype, attention), device, group)
    return Target(model, ids, pass_, fp8, group)


def load_ends(
    path: str,
    target_layer_ids: tuple[int, ...] | None,
    taps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> TargetEnds:
    """The `ends` of the target that `load_target` gives for the same arguments; nothing else is read. Raises
    `UserError` as that does for what the configuration, the embedding and the head show.
    """
    config, ids = target_config(path, target_layer_ids, taps)
    fp8_blocks(config, path)
    with _refusals(path):
        loaded = read_ends(path, config, dtype)
    return ends_of(_complete(path, *loaded).requires_grad_(False).to(device), ids)


def _load_whole(
    path: str, config: PreTrainedConfig, dtype: torch.dtype, attention: str | None
) -> Any:  # that a module's device is given to `to`, its annotation hides
    """The model in the host's memory."""
    block = fp8_blocks(config, path)
    with _refusals(path):
        loaded: Any = (
            AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=attention, output_loading_info=True
            )
            if block is None
            else load_fp8_checkpoint(path, config, block, dtype, attention)
        )  # its annotation leaves the report out
    return _complete(path, *loaded)


@contextlib.contextmanager
def _refusals(path: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as e:
        raise UserError(f"{path}: cannot load this target: {one_line(e)}") from e


def _complete(path: str, model: Any, report: dict[str, Any]) -> Any:
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"{path}: {len(missing)} weights are not in the files ({missing[0]}, …) and would be random: "
            "name a complete causal language model"
        )
    return model


def target_config(
    path: str, target_layer_ids: tuple[int, ...] | None, taps: int
) -> tuple[PreTrainedConfig, tuple[int, ...]]:
    """A target's configuration and the layers to read; errors as of `load_target`."""
    config = _load_config(path)
    text = config.get_text_config()
    if "num_hidden_layers" not in text.to_dict():
        raise UserError(
            f"{path}: a {config.model_type} model has no decoder layers to tap: name a causal language model"
        )
    if target_layer_ids is None:
        target_layer_ids = default_target_layer_ids(text.num_hidden_layers, taps)
    check_target_layer_ids(target_layer_ids, text.num_hidden_layers)
    return config, tuple(target_layer_ids)


def _load_config(path: str) -> PreTrainedConfig:
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).is_dir():
        raise UserError(f"{path}: no such folder: --target-model names a model's folder (or a hub name)")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UserError(
            f"{path}: no config.json there: --target-model names the folder of a transformers model"
        )
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, StrictDataclassError) as e:
        raise UserError(f"{path}: cannot read this target's configuration: {one_line(e)}") from e


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "…"
