"""The drafter on several ranks is the drafter on one: gradients, losses, checkpoints; replicas and shards.

Every rank is a process of its own on gloo; rows are tiny, the drafter is that of the other tests.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.config import TrainConfig, UserError
from slipstream.models.drafter import Drafter
from slipstream.models.target import Head
from slipstream.training import checkpoint as room
from slipstream.training import parallel
from slipstream.training.blocks import decay_weights, make_blocks
from slipstream.training.checkpoint import (
    SHARDS,
    Position,
    clear_leftovers,
    complete_checkpoints,
    load_masters,
    newest_checkpoint,
    training_state,
    verify_checkpoint,
)
from slipstream.training.loss import BlockLoss, SlotWeights
from slipstream.training.parallel import DrafterRanks, shard_drafter
from slipstream.training.step import drafted_loss, make_optimizer, update
from slipstream.training.warmup import graphs_compiled
from tests.ranks import rank_outcomes, run_ranks
from tests.training import LAYOUTS, MASK, drafter_config, make_drafter, supervised_row

CPU = torch.device("cpu")
ONE = "one"
REPLICATED, SHARDED = "replicated", "sharded"
LR, CLIP = 1e-3, 0.5
ROWS = 12
"""A step's, where 1, 2, 3 and 4 ranks must have equally many."""


def loss_of(
    drafter: Drafter, number: int, attention: str = "documents", dtype: torch.dtype = torch.float32
) -> BlockLoss:
    """Loss of the endless sequence's row `number`; some of its rows have nothing to learn."""
    masks = list(LAYOUTS.values())[number % len(LAYOUTS)]
    row = supervised_row(masks, padding=2, row_id=number)
    generator = torch.Generator().manual_seed(number)
    taps_ST = torch.randn(len(row.input_ids), 3 * 64, generator=generator).to(dtype)
    embedding_VH, head_VH = (torch.randn(131, 64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    anchors = torch.nonzero(row.supervised[1:]).flatten()[:3]
    blocks = make_blocks(row, anchors, 4, drafter.config.block_size, MASK)
    head, weights = Head(head_VH.to(dtype), None, 1.0, None), SlotWeights(decay_weights(5, 2.0))
    return drafted_loss(drafter, blocks, taps_ST, embedding_VH, head, attention, weights, compiled=False)


@dataclass
class Trainee:
    """A drafter on one of the ranks, its optimiser, and what its steps gave."""

    drafter: Drafter
    optimizer: torch.optim.Optimizer
    ranks: DrafterRanks

    @staticmethod
    def make(
        rank: int,
        kind: str,
        layout: str = "plain",
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
    ) -> Trainee:
        """`kind` says how it lies on the ranks; each begins with weights of its own."""
        drafter = make_drafter(drafter_config(), seed=1 + rank)
        drafter.checkpoint_layers = layout == "checkpointed"
        group = None if kind == ONE else dist.group.WORLD
        if kind == SHARDED:
            assert group is not None
            shard_drafter(drafter, group, dtype, compiled)
        optimizer = make_optimizer(drafter, TrainConfig(lr=LR), CPU)
        ranks = DrafterRanks(drafter, group)
        ranks.share(optimizer)
        return Trainee(drafter, optimizer, ranks)

    def step(self, number: int, rank: int, ranks: int, rows: int) -> tuple[float, float, Tensor]:
        """Loss and norm of a step over `rows` rows, and what its gradients were, after clipping."""
        weight = torch.zeros(())
        total = torch.zeros(())
        mine = range(number * rows + rank, (number + 1) * rows, ranks)
        for row in mine:
            loss = loss_of(self.drafter, row)
            self.ranks.backward(loss.total, last=row == mine[-1])
            weight += loss.weight
            total += loss.total.detach()
        grads: list[Tensor] = []
        hook = self.optimizer.register_step_pre_hook(
            lambda *_: grads.extend(
                full(p.grad).flatten() for p in self.drafter.parameters() if p.grad is not None
            )
        )
        norm = update(self.drafter, self.optimizer, weight, CLIP, LR, self.ranks)
        hook.remove()
        sums = torch.stack((total, weight))
        if ranks > 1:
            dist.all_reduce(sums)
        return float(sums[0] / sums[1].clamp(min=1e-9)), float(norm), torch.cat(grads)

    def state(self) -> dict[str, Tensor]:
        return {name: full(t).clone() for name, t in training_state(self.drafter, self.optimizer).items()}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps(
    rank: int, ranks: int, kind: str, rows: int, count: int, *made: Any
) -> list[tuple[float, float, Tensor]]:
    trainee = Trainee.make(rank, kind, *made)
    return [trainee.step(i, rank, ranks, rows) for i in range(count)]


def assert_same(
    found: list[list[tuple[float, float, Tensor]]], reference: list[tuple[float, float, Tensor]]
) -> None:
    """Every rank's losses, norms and gradients: 1e-6 at the first step, 1e-5 at all others."""
    for mine in found:
        assert len(mine) == len(reference)
        for number, ((loss, norm, grad), (loss_1, norm_1, grad_1)) in enumerate(
            zip(mine, reference, strict=True)
        ):
            relative = 1e-6 if number == 0 else 1e-5
            assert loss == pytest.approx(loss_1, rel=relative, abs=0), f"step {number}"
            assert norm == pytest.approx(norm_1, rel=relative, abs=0), f"step {number}"
            assert (grad - grad_1).abs().max() <= relative * grad_1.abs().max(), f"step {number}"
        for ours, theirs in zip(mine, found[0], strict=True):
            assert ours[:2] == theirs[:2]
            assert torch.equal(ours[2], theirs[2])


@pytest.mark.parametrize(("ranks", "rows"), [(2, 2), (2, 3), (2, 1), (3, 7)])
def test_replicas_on_two_or_three_ranks_make_the_steps_of_one_also_when_a_rank_has_fewer_rows_or_none(
    ranks, rows
):
    assert_same(run_ranks(ranks, steps, REPLICATED, rows, 20), steps(0, 1, ONE, rows, 20))


@pytest.mark.parametrize(
    ("ranks", "rows", "layout"), [(2, 2, "plain"), (2, 4, "checkpointed"), (3, 6, "plain")]
)
def test_a_sharded_drafter_makes_the_steps_of_one_rank_also_where_parts_are_uneven(ranks, rows, layout):
    assert_same(run_ranks(ranks, steps, SHARDED, rows, 20, layout), steps(0, 1, ONE, rows, 20))


def test_sums_start_in_the_backward_of_the_last_row_and_in_no_other():
    assert run_ranks(2, started_sums) == [(0, 15), (0, 15)]


def started_sums(rank: int, ranks: int) -> tuple[int, int]:
    trainee = Trainee.make(rank, REPLICATED)
    started = []
    for last in (False, True):
        trainee.ranks.backward(loss_of(trainee.drafter, 0).total, last)
        started.append(len(trainee.ranks._works))
    trainee.ranks.summed(torch.ones(()))
    return started[0], started[1]


def test_sums_match_though_the_backward_of_one_rank_is_done_with_the_matrices_in_another_order():
    assert run_ranks(2, in_another_order, timeout=20) == [[float(2 * i) for i in range(25)]] * 2


def in_another_order(rank: int, ranks: int) -> list[float]:
    trainee = Trainee.make(rank, REPLICATED)
    ordered = [*enumerate(trainee.ranks.parameters)][:: 1 if rank else -1]
    parts = [(i * p).sum() for i, p in ordered]  # what is made later comes earlier in the backward
    trainee.ranks.backward(torch.stack(parts).sum(), last=True)
    grads, _ = trainee.ranks.summed(torch.ones(()))
    assert all((grad == grad.flatten()[0]).all() for grad in grads)
    return [float(grad.flatten()[0]) for grad in grads]


def test_shards_are_reduced_in_the_backward_of_the_last_row_and_in_no_other():
    assert run_ranks(2, reduced_shards) == [(0, 15), (0, 15)]


def reduced_shards(rank: int, ranks: int) -> tuple[int, int]:
    trainee = Trainee.make(rank, SHARDED)
    reduced = []
    for last in (False, True):
        trainee.ranks.backward(loss_of(trainee.drafter, 0).total, last)
        reduced.append(sum(isinstance(p.grad, DTensor) for p in trainee.ranks.parameters))
    return reduced[0], reduced[1]


def test_compiled_replicas_with_bf16_copies_make_the_steps_of_one_rank_and_compile_nothing_new():
    reference = run_ranks(1, compiled_steps, ONE, torch.bfloat16)[0]
    for norms, graphs, _, kept in run_ranks(2, compiled_steps, REPLICATED, torch.bfloat16):
        assert norms == pytest.approx(reference[0], rel=1e-5)
        assert graphs == [graphs[0]] * 3
        assert graphs[0] > 0
        assert kept == {torch.float32}


def test_sharded_layers_are_compiled_once_gather_bf16_and_keep_fp32_masters_norms_and_rotary_angles():
    reference = run_ranks(1, compiled_steps, ONE, torch.bfloat16)[0]
    for norms, graphs, seen, kept in run_ranks(2, compiled_steps, SHARDED, torch.bfloat16):
        assert norms[0] == pytest.approx(reference[0][0], rel=2e-3), "a row's gradients are rounded to bf16"
        assert norms == pytest.approx(reference[0], rel=0.05)
        assert graphs == [graphs[0]] * 3
        assert graphs[0] > 0
        assert seen == {"weight": torch.bfloat16, "norm": torch.float32, "cos": torch.float32}
        assert kept == {torch.float32}


def compiled_steps(
    rank: int, ranks: int, kind: str, dtype: torch.dtype
) -> tuple[list[float], list[int], Any, Any]:
    """Norms of three steps, all ranks on one and the same row, and the graphs compiled after each; dtypes of
    what a layer saw, and of masters, gradients and moments.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        trainee = Trainee.make(rank, kind, dtype=dtype, compiled=True)
        if kind != SHARDED:
            trainee.drafter.use_gpu(dtype, compiled=kind == REPLICATED)
    layer, seen = next(trainee.drafter.stack()), {}

    def look(layer: Any, given: Any) -> None:
        norm, weight = layer.input_layernorm.weight, layer.mlp.up_proj.weight
        seen.update(weight=weight.dtype, norm=norm.dtype, cos=given[2][0].dtype)

    layer.register_forward_pre_hook(look)
    norms, graphs, kept = [], [], set()
    for _ in range(3):
        loss = loss_of(trainee.drafter, 0, "dense", dtype)
        trainee.ranks.backward(loss.total, last=True)
        kept |= {p.grad.dtype for p in trainee.drafter.parameters() if p.grad is not None}
        norms.append(float(update(trainee.drafter, trainee.optimizer, loss.weight, CLIP, LR, trainee.ranks)))
        graphs.append(graphs_compiled())
    kept |= {t.dtype for t in training_state(trainee.drafter, trainee.optimizer).values()}
    return norms, graphs, seen, kept


# ---- replicas stay equal ----


def test_replicas_that_differ_in_one_bit_are_refused_by_name_and_nothing_is_written(tmp_path):
    for (error, unharmed), rank in zip(run_ranks(2, bit_flipped, tmp_path), (0, 1), strict=True):
        assert "the drafter ranks differ in 1 tensors (exp_avg.layers.1.mlp.up_proj.weight, …)" in error, rank
        assert unharmed
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step_00000001"]


def bit_flipped(rank: int, ranks: int, folder: Path) -> tuple[str, bool]:
    trainee = Trainee.make(rank, REPLICATED)
    trainee.step(0, rank, ranks, rows=3)
    trainee.ranks.save(folder, trainee.optimizer, position(1), keep=2)
    bits = training_state(trainee.drafter, trainee.optimizer)["exp_avg.layers.1.mlp.up_proj.weight"].view(
        torch.int32
    )
    bits[3, 5] ^= rank
    with pytest.raises(UserError) as e:
        trainee.ranks.save(folder, trainee.optimizer, position(2), keep=2)
    bits[3, 5] ^= rank
    trainee.ranks.refuse_difference(trainee.optimizer)
    return str(e.value), not (folder / "checkpoints" / ".step_00000002.partial").exists()


# ---- checkpoints ----


def position(step: int) -> Position:
    return Position(step=step, seconds=0.5, labels=3, fingerprint="f", window=(1.0,))


def saved(rank: int, ranks: int, kind: str, folder: Path, count: int = 2) -> dict[str, Tensor]:
    """`count` steps and a checkpoint after each; the last one's state, whole."""
    trainee = Trainee.make(rank, kind)
    for number in range(count):
        trainee.step(number, rank, ranks, rows=ROWS)
        with torch.no_grad():
            loss_of(trainee.drafter, 0)  # as in a validation: gathers, and must put away again
        trainee.ranks.save(folder, trainee.optimizer, position(number + 1), keep=2)
        there, _ = newest_checkpoint(folder)
        assert there is not None
        assert there.name == f"step_{number + 1:08d}", "it is there when `save` returns, on every rank"
    return trainee.state()


def loaded(
    rank: int, ranks: int, kind: str, checkpoint: Path
) -> tuple[Position, dict[str, Tensor], list[float]]:
    """Position and state of a checkpoint, and the norms of the two steps after it."""
    trainee = Trainee.make(rank, kind)
    found = trainee.ranks.load(checkpoint, trainee.optimizer, "f")
    state = trainee.state()
    return found, state, [trainee.step(number, rank, ranks, rows=ROWS)[1] for number in (2, 3)]


@pytest.mark.parametrize(("kind", "ranks"), [(ONE, 1), (REPLICATED, 2), (SHARDED, 2), (SHARDED, 3)])
def test_a_checkpoint_of_any_number_of_ranks_is_read_at_any_other_and_by_the_export(tmp_path, kind, ranks):
    state = run_ranks(ranks, saved, kind, tmp_path)[0]
    checkpoint = complete_checkpoints(tmp_path)[-1]
    verify_checkpoint(checkpoint)
    assert (checkpoint / SHARDS).exists() == (kind == SHARDED)
    geometry, masters = load_masters(checkpoint)
    assert geometry["num_layers"] == 2
    assert {f"master.{name}" for name in masters} == {name for name in state if name.startswith("master.")}
    assert all(torch.equal(w, state[f"master.{name}"]) for name, w in masters.items())
    uninterrupted = [norm for _, norm, _ in steps(0, 1, ONE, ROWS, 4)[2:]]
    for reader, readers in ((ONE, 1), (REPLICATED, 2), (REPLICATED, 4), (SHARDED, 2), (SHARDED, 4)):
        for found, again, norms in run_ranks(readers, loaded, reader, checkpoint):
            assert found == position(2)
            assert again.keys() == state.keys()
            assert all(torch.equal(again[name], state[name]) for name in state), (reader, readers)
            assert norms == pytest.approx(uninterrupted, rel=1e-5)


def test_replicas_write_the_very_files_of_one_rank(tmp_path):
    run_ranks(1, saved, ONE, tmp_path / "one")
    run_ranks(2, saved, REPLICATED, tmp_path / "two")
    one, two = (complete_checkpoints(tmp_path / name)[-1] for name in ("one", "two"))
    assert {p.name for p in one.iterdir()} == {p.name for p in two.iterdir()}
    for name in ("drafter.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(two / name), load_file(one / name)
        assert ours.keys() == theirs.keys()
        for tensor in ours:
            torch.testing.assert_close(ours[tensor], theirs[tensor], rtol=1e-4, atol=1e-6)


def test_damage_is_a_user_error_on_every_rank_though_one_alone_reads(tmp_path):
    run_ranks(2, saved, REPLICATED, tmp_path)
    checkpoint = complete_checkpoints(tmp_path)[-1]
    (checkpoint / "optimizer.safetensors").write_bytes(b"cut")
    for error in run_ranks(2, refused, REPLICATED, checkpoint):
        assert "optimizer.safetensors: damaged" in error
    run_ranks(2, saved, SHARDED, tmp_path / "shards")
    checkpoint = complete_checkpoints(tmp_path / "shards")[-1]
    part = bytearray((checkpoint / "__1_0.distcp").read_bytes())
    part[len(part) // 2] ^= 1
    (checkpoint / "__1_0.distcp").write_bytes(part)
    for error in run_ranks(2, refused, SHARDED, checkpoint):
        assert "__1_0.distcp: damaged" in error
    with pytest.raises(UserError, match=r"__1_0\.distcp: damaged"):
        load_masters(checkpoint)


def refused(rank: int, ranks: int, kind: str, checkpoint: Path) -> str:
    with pytest.raises(UserError) as e:
        loaded(rank, ranks, kind, checkpoint)
    return str(e.value)


def test_a_rank_that_cannot_write_its_part_is_named_on_every_rank_and_the_last_checkpoint_is_kept(tmp_path):
    for error in run_ranks(2, short_of_space, tmp_path):
        assert "drafter rank 1 cannot write its part of a checkpoint" in error
        assert "\n" not in error
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step_00000001", "step_00000002"}
    verify_checkpoint(complete_checkpoints(tmp_path)[-1])


def short_of_space(rank: int, ranks: int, folder: Path) -> str:
    saved(rank, ranks, SHARDED, folder)
    trainee = Trainee.make(rank, SHARDED)
    trainee.step(0, rank, ranks, rows=ROWS)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(UserError) as e:
        trainee.ranks.save(folder, trainee.optimizer, position(3), keep=1)
    return str(e.value)


KILLED_IN = [
    (REPLICATED, 0, "save_file"), (REPLICATED, 0, "_file_facts"), (REPLICATED, 0, "fsync"),
    (REPLICATED, 0, "replace"), (REPLICATED, 1, "together"), (SHARDED, 0, "save_shards"),
    (SHARDED, 1, "save_shards"), (SHARDED, 1, "write_data"), (SHARDED, 1, "_file_facts"),
    (SHARDED, 0, "_file_facts"), (SHARDED, 0, "fsync"), (SHARDED, 0, "replace"), (SHARDED, 0, "_discard"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "victim", "call"), KILLED_IN)
def test_a_rank_killed_in_a_save_leaves_a_whole_checkpoint_that_the_same_ranks_go_on_from(
    tmp_path, kind, victim, call
):
    state = run_ranks(2, saved, kind, tmp_path)[0]
    outcomes = rank_outcomes(2, killed_in, kind, tmp_path, victim, call, timeout=30)
    assert outcomes[victim].error == "killed or crashed without a word"
    newest, damaged = newest_checkpoint(tmp_path)
    assert newest is not None
    assert damaged == []
    verify_checkpoint(newest)
    stood = kind == REPLICATED and victim == 1  # the one that writes goes on
    assert newest.name == ("step_00000003" if call == "_discard" or stood else "step_00000002")
    clear_leftovers(tmp_path)
    for _, again, _ in run_ranks(2, loaded, kind, newest):
        if newest.name == "step_00000002":
            assert all(torch.equal(again[name], state[name]) for name in state)


def killed_in(rank: int, ranks: int, kind: str, folder: Path, victim: int, call: str) -> None:
    trainee = Trainee.make(rank, kind)
    trainee.ranks.load(complete_checkpoints(folder)[-1], trainee.optimizer, "f")
    trainee.step(2, rank, ranks, rows=ROWS)
    if rank == victim:
        owner = {"replace": room.os, "write_data": room.FileSystemWriter, "together": parallel}.get(
            call, room
        )
        assert call in dir(owner)
        setattr(owner, call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    trainee.ranks.save(folder, trainee.optimizer, position(3), keep=2)


# ---- the ranks of tests ----


def test_a_rank_that_raises_ends_all_at_once_with_its_traceback_and_one_that_hangs_in_time():
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 1: Traceback.*in wrong.*ValueError: no such thing"):
        run_ranks(2, wrong, timeout=60)
    assert time.monotonic() - began < 20
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] are not done in time"):
        run_ranks(2, asleep, timeout=1)
    assert multiprocessing.active_children() == []


def wrong(rank: int, ranks: int) -> None:
    if rank == 1:
        raise ValueError("no such thing")
    dist.barrier()


def asleep(rank: int, ranks: int) -> None:
    time.sleep(60)
