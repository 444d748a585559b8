"""Start-up proof that the target is read rightly, and the cheap health check of taps inside a loop.

`self_check` compares our path through the target (taps, packing, head, cached pass) with transformers' own
on a sample of the user's data; any failed check must make the caller refuse, with the check's `detail` and
`mend`. Nothing here changes the target. Whether attention is fused and caches on disk are sane is system/'s
business.

Shapes: S tokens of a row · n sample tokens · T taps · H hidden size · V vocabulary · C = T·H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.data.pack import Row
from slipstream.models.target import Target

SAMPLE_TOKENS = 192
MIN_SAMPLE_TOKENS = 8


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
    """All start-up checks of the target on up to `SAMPLE_TOKENS` tokens of a row: seconds.

    The row must hold at least `MIN_SAMPLE_TOKENS` tokens (its documents are run together as one text).
    """
    ids_n = sample_row.input_ids[sample_row.documents >= 0][:SAMPLE_TOKENS]
    assert len(ids_n) >= MIN_SAMPLE_TOKENS, f"a sample row of {len(ids_n)} tokens proves nothing"
    reference = target.model(
        input_ids=ids_n[None].to(target.device), output_hidden_states=True, use_cache=False
    )
    whole_nC = target.taps(_row([ids_n]))[: len(ids_n)]
    return [
        _embedding_scale(target, ids_n),
        _greedy_tokens(target, ids_n, reference.logits[0]),
        _taps_are_layer_outputs(target, whole_nC, reference.hidden_states),
        _taps_healthy(target, whole_nC),
        _isolation(target, ids_n),
        _positions(target, ids_n),
    ]


def _embedding_scale(target: Target, ids_n: Tensor) -> Check:
    """The first layer is given raw rows × the table's scale, or nothing that is a multiple of the rows."""
    seen: list[Tensor] = []

    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    handle = target.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        target.taps(_row([ids_n]))
    finally:
        handle.remove()
    raw_nH = target.embedding_VH[ids_n.to(target.device)].double()
    given_nH = seen[0].reshape(raw_nH.shape).double()
    scale = float((given_nH * raw_nH).sum() / raw_nH.square().sum())
    proportional = _difference(given_nH, scale * raw_nH) < 1e-2  # the scale itself may be rounded to bf16
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
    worst = max(
        _difference(tap, hidden_states[i + 1][0])
        for i, tap in zip(target.target_layer_ids, taps_nC.split(target.hidden_size, dim=-1), strict=True)
    )
    return Check(
        "taps are layer outputs",
        worst <= tolerance(target.dtype),
        f"layers {' '.join(map(str, target.target_layer_ids))} differ from transformers' by {worst:.1e}",
        f"layers of {target.model_type} return no hidden state: it cannot be tapped",
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


def _isolation(target: Target, ids_n: Tensor) -> Check:
    """A row of two documents gives each document the taps that it has alone, read by plain transformers."""
    first, second = _two_documents(ids_n)
    row_SC = target.taps(_row([first, second]))
    alone = [
        target.model(
            input_ids=d[None].to(target.device), output_hidden_states=True, use_cache=False
        ).hidden_states
        for d in (first, second)
    ]
    alone_nC = torch.cat(
        [torch.cat([states[i + 1][0] for i in target.target_layer_ids], dim=-1) for states in alone]
    )
    worst = _difference(row_SC[: len(ids_n)], alone_nC)
    clean = not bool(row_SC[len(ids_n) :].any())
    return Check(
        "documents isolated",
        worst <= tolerance(target.dtype) and clean,
        f"{len(first)} and {len(second)} tokens, {target.isolation}, differ from each alone by {worst:.1e}"
        + ("" if clean else "; padding is not zero"),
        f"documents see each other: unpack {target.model_type} in models/families.py",
    )


def _positions(target: Target, ids_n: Tensor) -> Check:
    """The positions given to the model restart in every document (outputs cannot show it)."""
    first, second = _two_documents(ids_n)
    given: list[Tensor] = []

    def hook(_module: nn.Module, _args: tuple, kwargs: dict) -> None:
        given.append(kwargs["position_ids"].cpu())

    handle = target.decoder.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        target.taps(_row([first, second]))
    finally:
        handle.remove()
    counts = [torch.arange(len(first)), torch.arange(len(second))]
    if target.isolation == "packed":
        ok = len(given) == 1 and torch.equal(given[0][0], torch.cat(counts))
    else:
        ok = all(torch.equal(p, torch.arange(p.shape[-1]).expand_as(p)) for p in given) and len(given) > 0
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


def _difference(ours_nH: Tensor, theirs_nH: Tensor) -> float:
    """Largest distance of a token's vector from its reference, relative to the reference's length."""
    ours, theirs = ours_nH.double(), theirs_nH.double()
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-30)).max())


def _two_documents(ids_n: Tensor) -> tuple[Tensor, Tensor]:
    cut = 5 * len(ids_n) // 9  # unequal, so that an unpacked batch has padding, but alike enough to share one
    return ids_n[:cut], ids_n[cut:]


def _row(documents: list[Tensor]) -> Row:
    """These documents and as much padding again."""
    used = sum(len(d) for d in documents)
    padding = torch.zeros(used, dtype=torch.int64)
    owners = [torch.full((len(d),), i) for i, d in enumerate(documents)]
    return Row(
        row_id=0,
        input_ids=torch.cat([*documents, padding]),
        positions=torch.cat([*(torch.arange(len(d)) for d in documents), padding]),
        documents=torch.cat([*owners, padding - 1]),
        supervised=torch.cat([padding == 0, padding == 1]),
    )
