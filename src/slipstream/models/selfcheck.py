"""Start-up proof that the target is read rightly, and the cheap health check of taps inside a loop.

`self_check` compares our path through the target (taps, packing, head, cached pass) with transformers' own
on a sample of the user's data; any failed check must make the caller refuse, with the check's `detail` and
`mend`. Nothing here changes the target. Whether attention is fused and caches on disk are sane is system/'s
business.

Shapes: S tokens of a row · n sample tokens · T taps · H hidden size · V vocabulary · C = T·H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.config import UserError
from slipstream.data.pack import Row
from slipstream.models.target import Target

SAMPLE_TOKENS, FUSED_SAMPLE_TOKENS = 192, 512
MIN_SAMPLE_TOKENS = 8
WORST_TOKEN = 5.0
"""How much farther than the mean token the worst may be where 16 bits are rounded in another order: a gate or
a softmax on an edge turns a rounding into several."""
FP8_LIMIT = 0.15
"""Largest relative change of a tap by FP8 products that a drafter can be trained on."""


@dataclass(frozen=True)
class Check:
    """One line of proof: what was checked, whether it holds, the figures, what to do when it does not."""

    name: str
    ok: bool
    detail: str
    mend: str


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference that rounding alone makes, between other batch shapes and masks."""
    return 1e-3 if dtype == torch.float32 else 5e-2


@torch.no_grad()
def self_check(target: Target, sample_row: Row) -> list[Check]:
    """All start-up checks of the target on the first tokens of a row: seconds.

    The row must hold at least `MIN_SAMPLE_TOKENS` tokens (its documents are run together as one text). At
    most `SAMPLE_TOKENS` are taken, `FUSED_SAMPLE_TOKENS` where rows are read fused: that many go through the
    stock model too, however long the row is. A fused pass is compiled for one length of row, so it is
    checked at the sample row's. All ranks of a sharded target call this together, with the same row.
    """
    fused = target.isolation == "fused"
    limit = FUSED_SAMPLE_TOKENS if fused else SAMPLE_TOKENS
    ids_n = sample_row.input_ids[sample_row.documents >= 0][:limit]
    assert len(ids_n) >= MIN_SAMPLE_TOKENS, f"a sample row of {len(ids_n)} tokens proves nothing"
    size = len(sample_row.input_ids) if fused else 2 * len(ids_n)
    first_layer: list[Tensor] = []

    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        first_layer.append(args[0] if args else kwargs["hidden_states"])

    handle = target.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        reference = target.model(
            input_ids=ids_n[None].to(target.device), output_hidden_states=True, use_cache=False
        )
    finally:
        handle.remove()
    whole_nC = target.taps(_row([ids_n], size))[: len(ids_n)]
    return [
        _embedding_scale(target, ids_n, first_layer[0]),
        _greedy_tokens(target, ids_n, reference.logits[0]),
        _taps_are_layer_outputs(target, whole_nC, reference.hidden_states),
        _taps_healthy(target, whole_nC),
        _isolation(target, ids_n, size),
        _positions(target, ids_n, size),
    ]


def _embedding_scale(target: Target, ids_n: Tensor, given_nH: Tensor) -> Check:
    """The first layer is given raw rows × the table's scale, or nothing that is a multiple of the rows."""
    raw_nH = target.embedding_VH[ids_n.to(target.device)].double()
    given_nH = given_nH.reshape(raw_nH.shape).double()
    scale = float((given_nH * raw_nH).sum() / raw_nH.square().sum())
    # the scale itself may be rounded to bf16
    proportional = float(_differences(given_nH, scale * raw_nH).max()) < 1e-2
    agrees = abs(scale / target.input_embedding_scale - 1) < 1e-2
    return Check(
        "embedding scale",
        agrees or not proportional,
        f"the model scales embedding rows by {scale:.4g}, a drafter by {target.input_embedding_scale:.4g}"
        if proportional
        else "the model adds more than a scale to embedding rows; the drafter reads the raw rows",
        f"add {target.model_type} with its embedding scale to models/families.py",
    )


def _greedy_tokens(target: Target, ids_n: Tensor, reference_nV: Tensor) -> Check:
    """Our last hidden → head gives the model's own logits and greedy tokens (but for near-ties)."""
    logits_nV, _ = target.decode_step(ids_n, target.new_cache(), 0)
    ours, theirs = logits_nV.float(), reference_nV.float()
    size = theirs.abs().max()
    difference = float((ours - theirs).abs().max() / size)
    allowed = 1e-4 if target.dtype == torch.float32 else 2e-2
    top = theirs.topk(2, dim=-1).values
    clear = top[:, 0] - top[:, 1] > 2 * allowed * size
    changed = int(((ours.argmax(-1) != theirs.argmax(-1)) & clear).sum())
    return Check(
        "greedy tokens",
        difference <= allowed and changed == 0,
        f"logits differ by {difference:.1e} of the largest, {changed} of {len(ids_n)} greedy tokens changed",
        f"{target.model_type} scales or caps its logits in a way models/families.py does not know: add it",
    )


def _taps_are_layer_outputs(target: Target, taps_nC: Tensor, hidden_states: tuple[Tensor, ...]) -> Check:
    """Tap i equals transformers' `hidden_states[i + 1]`: no layer off by one, nothing after a norm."""
    pairs = [
        (tap, hidden_states[i + 1][0])
        for i, tap in zip(target.target_layer_ids, taps_nC.split(target.hidden_size, dim=-1), strict=True)
    ]
    if target.isolation == "fused" and target.trunk is not None and target.trunk.fp8:
        changes = [float((tap - ref).float().norm() / ref.float().norm()) for tap, ref in pairs]
        return Check(
            "taps are layer outputs",
            max(changes) <= FP8_LIMIT,
            f"FP8 products change layers {' '.join(map(str, target.target_layer_ids))} by "
            + " ".join(f"{change:.1%}" for change in changes),
            f"more than {FP8_LIMIT:.0%} is another model than the one served: leave out --target-fp8",
        )
    limit = tolerance(target.dtype)
    worst = max(float(_differences(tap, ref).max()) for tap, ref in pairs)
    ok, detail = worst <= limit, f"differ from transformers' by {worst:.1e}"
    if target.isolation == "fused" and target.dtype != torch.float32:
        mean = max(float(_differences(tap, ref).mean()) for tap, ref in pairs)
        ok, detail = mean <= limit and worst <= WORST_TOKEN * limit, f"{detail}, a mean token by {mean:.1e}"
    return Check(
        "taps are layer outputs",
        ok,
        f"layers {' '.join(map(str, target.target_layer_ids))} {detail}",
        "the fused pass does not know this model: --target-pass stock"
        if target.isolation == "fused"
        else f"layers of {target.model_type} return no hidden state: it cannot be tapped",
    )


def _taps_healthy(target: Target, taps_nC: Tensor) -> Check:
    """Finite, not zero, not the same at every token, and different between layers."""
    problem = tap_health(taps_nC, len(target.target_layer_ids))
    taps = taps_nC.split(target.hidden_size, dim=-1)
    for i in range(len(taps) - 1):
        if problem is None and torch.equal(taps[i], taps[i + 1]):
            problem = "taps of layers {} and {} are the same".format(*target.target_layer_ids[i : i + 2])
    return Check(
        "taps healthy",
        problem is None,
        problem or f"{len(taps)} taps are finite, vary between tokens and differ between layers",
        "the weights are broken or not those of config.json: try transformers' generate on them",
    )


def _isolation(target: Target, ids_n: Tensor, size: int) -> Check:
    """A row of two documents gives each document the taps that it has alone.

    Alone is read by plain transformers, and by the fused pass where that reads the row: so no other order of
    rounding hides a leak, and what it gives one document is compared with transformers above.
    """
    first, second = documents = _two_documents(ids_n)
    row_SC = target.taps(_row([first, second], size))
    alone_nC = torch.cat([_alone(target, d, size) for d in documents])
    worst = float(_differences(row_SC[: len(ids_n)], alone_nC).max())
    clean = not bool(row_SC[len(ids_n) :].any())
    how = target.isolation + (f" (not fused: {target.why_stock})" if target.why_stock else "")
    return Check(
        "documents isolated",
        worst <= tolerance(target.dtype) and clean,
        f"{len(first)} and {len(second)} tokens, {how}, differ from each alone by {worst:.1e}"
        + ("" if clean else "; padding is not zero"),
        f"documents see each other: unpack {target.model_type} in models/families.py"
        if target.isolation != "fused"
        else "documents see each other: --target-pass stock, and please report it with this line",
    )


def _alone(target: Target, ids_n: Tensor, size: int) -> Tensor:
    """Taps [n, T·H] of one document: in a row with nothing else if rows are fused, or by transformers."""
    if target.isolation == "fused":
        return target.taps(_row([ids_n], size))[: len(ids_n)]
    states = target.model(
        input_ids=ids_n[None].to(target.device), output_hidden_states=True, use_cache=False
    ).hidden_states
    return torch.cat([states[i + 1][0] for i in target.target_layer_ids], dim=-1)


def _positions(target: Target, ids_n: Tensor, size: int) -> Check:
    """The positions given to the model restart in every document (outputs cannot show it)."""
    first, second = _two_documents(ids_n)
    given: list[Tensor] = []

    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        given.append((kwargs["position_ids"] if "position_ids" in kwargs else args[1]).cpu())

    trunk = target.trunk if target.isolation == "fused" else None
    reader = target.decoder if trunk is None else trunk.rotary
    handle = reader.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        target.taps(_row([first, second], size))
    finally:
        handle.remove()
    counts = torch.cat([torch.arange(len(first)), torch.arange(len(second))])
    if target.isolation == "unpacked":
        ok = all(torch.equal(p, torch.arange(p.shape[-1]).expand_as(p)) for p in given) and len(given) > 0
    else:
        ok = len(given) == 1 and torch.equal(given[0].flatten()[: len(counts)], counts)
    return Check(
        "positions restart",
        ok,
        f"{'one pass' if len(given) == 1 else f'{len(given)} passes'}, positions from 0 in every document"
        if ok
        else "a document's positions do not start at 0",
        "a defect of slipstream, not of your data: please report it with this line",
    )


def tap_health(taps_SC: Tensor, num_taps: int) -> str | None:
    """What is wrong with a row's taps [S, T·H], or None: one reduction, one read from the device.

    Names the first tap with non-finite, all-zero, or everywhere equal features. Zeros after the last
    non-zero token are padding. A row whose tokens are all the same is reported as constant too: its taps
    are.
    """
    norms_TS = torch.linalg.vector_norm(
        taps_SC.unflatten(-1, (num_taps, -1)), dim=-1, dtype=torch.float32
    ).T.cpu()
    used = int((norms_TS != 0).any(0).nonzero().max()) + 1 if norms_TS.any() else 0
    for t, norms in enumerate(norms_TS[:, :used]):
        name = f"tap {t + 1} of {num_taps}"
        if not norms.isfinite().all():
            return f"{name} is not finite at {int((~norms.isfinite()).sum())} of {used} tokens"
        if not norms.all():
            return f"{name} is all zero at {int((norms == 0).sum())} of {used} tokens"
        # Equal lengths are only a suspicion, cheap to have; the features themselves decide.
        if used > 1 and norms.max() <= norms.min() * (1 + 1e-5):
            features = taps_SC.unflatten(-1, (num_taps, -1))[:used, t].float()
            if bool((features - features[0]).abs().max() <= 1e-5 * features.abs().max()):
                return f"{name} is the same at all {used} tokens"
    return None if used else "all taps are zero"


def refuse_unhealthy(row: Row, taps_UC: Tensor, num_taps: int, documents: Sequence[int]) -> None:
    """A `UserError` for what `tap_health` says of a row's taps [U, T·H], with the documents it is true of.
    `documents`: the dataset's number of each document in the row; empty where there is no dataset.
    """
    trouble = tap_health(taps_UC, num_taps)
    if trouble is None:
        return
    of_spans = zip(documents, row.spans(), strict=True) if documents else ()
    bad = [document for document, (start, end) in of_spans if tap_health(taps_UC[start:end], num_taps)]
    where = f", documents {bad or list(documents)}" if documents else ""
    raise UserError(
        f"row {row.row_id}{where}: the target's features are {trouble}: training on them teaches nothing: "
        "leave these documents out, or try --target-pass stock"
    )


def _differences(ours_nH: Tensor, theirs_nH: Tensor) -> Tensor:
    """[n] distance of each token's vector from its reference, relative to the reference's length."""
    ours, theirs = ours_nH.double(), theirs_nH.double()
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-30)


def _two_documents(ids_n: Tensor) -> tuple[Tensor, Tensor]:
    cut = 5 * len(ids_n) // 9  # unequal, so that an unpacked batch has padding, but alike enough to share one
    return ids_n[:cut], ids_n[cut:]


def _row(documents: list[Tensor], size: int) -> Row:
    """These documents and padding up to `size` tokens."""
    used = sum(len(d) for d in documents)
    padding = torch.zeros(size - used, dtype=torch.int64)
    owners = [torch.full((len(d),), i) for i, d in enumerate(documents)]
    return Row(
        row_id=0,
        input_ids=torch.cat([*documents, padding]),
        positions=torch.cat([*(torch.arange(len(d)) for d in documents), padding]),
        documents=torch.cat([*owners, padding - 1]),
        supervised=torch.arange(size) < used,
    )
