"""A target whose layers lie in equal parts on the ranks of a group (FSDP2), for one that no GPU holds whole.

Forward only: a layer is gathered in its own dtype when its turn comes and put away behind it, so a device
holds its part and two layers. Embedding, final norm and head are whole on every rank. Which passes the ranks
must make together is target.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel

from slipstream.config import UserError


@dataclass(frozen=True)
class _Told:
    """What the first rank says of the model that it has loaded."""

    dtypes: dict[str, torch.dtype]
    generation_config: GenerationConfig


@torch.no_grad()
def load_shards(
    blank: PreTrainedModel,
    decoder: nn.Module,
    layers: nn.ModuleList,
    load: Callable[[], PreTrainedModel],
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Fills `blank`, on torch's meta device, with the model that `load` gives on the first rank of `group`.
    Of the `layers` of its `decoder` each rank keeps a part.

    All ranks call it together. The first alone calls `load`, and has the whole model in its host's memory
    until the end; no device ever holds more than its part, one layer, and what stays whole. A `UserError` of
    `load` is raised on every rank.
    """
    source: dict[str, Tensor] = {}
    told: list[_Told | UserError | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            whole = load()
            source = dict(_tensors(whole))
            told = [_Told({name: t.dtype for name, t in source.items()}, whole.generation_config)]
        except UserError as e:
            told = [e]
    dist.broadcast_object_list(told, group=group, group_src=0)
    facts = told[0]
    if isinstance(facts, UserError):
        raise facts
    assert facts is not None

    blank.generation_config = facts.generation_config
    blank.eval().requires_grad_(False)
    left = dict(_tensors(blank))
    assert {*left} == {*facts.dtypes}, f"{type(blank).__name__}: not the tensors that were loaded"
    for name, tensor in left.items():
        tensor.data = tensor.data.to(facts.dtypes[name])

    def fill(name: str, tensor: Tensor) -> None:
        if source:
            tensor.copy_(source[name])
        dist.broadcast(tensor, group=group, group_src=0)
        del left[name]

    mesh = DeviceMesh.from_group(group, device.type)
    split, inside = {*layers}, {module for layer in layers for module in layer.modules()}
    for prefix, module in list(blank.named_modules()):
        if module in split:
            module.to_empty(device=device)
            for name, tensor in _tensors(module, prefix):
                fill(name, tensor)
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        elif module not in inside:
            module.to_empty(device=device, recurse=False)
    blank.tie_weights()
    for name, tensor in _tensors(blank):
        if name in left:
            fill(name, tensor)
    # A root without parameters of its own lets layers be gathered while those before them compute.
    stay = {p for p in decoder.parameters() if not isinstance(p, DTensor)}
    kind = type(decoder)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True, ignored_params=stay)
    decoder.__class__ = kind  # by its class transformers knows what a model records; the hooks stay


def _tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, those included that no file holds: rotary frequencies, scales."""
    return chain(module.named_parameters(prefix), module.named_buffers(prefix))
