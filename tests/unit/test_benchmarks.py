"""The drafter benchmark counts what it says it counts, and refuses numbers that cannot be real."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.drafter_step import Options, measure, measure_with_update, ours, table
from benchmarks.workload import TINY, Shape, System, make_batch

CPU = torch.device("cpu")
QUICK = Options(iterations=3, warmup=1)


def tiny_ours() -> System:
    torch.manual_seed(0)
    return ours(TINY, make_batch(TINY, CPU))


def toy(weight: torch.Tensor, losses: list[float]) -> System:
    """A system that says these losses, one a step, and whose gradient is the loss."""
    said = iter(losses)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss = torch.tensor(next(said))
        weight.grad = torch.full_like(weight, loss.item())
        return loss, torch.tensor(1)

    return System(step, [("weight", weight)], [], "toy")


def test_the_true_shape_is_124_5_tflop_of_matrix_work_and_1_73_billion_parameters():
    assert Shape().matrix_flop() / 1e12 == pytest.approx(124.5, abs=0.05)
    assert Shape().drafter_parameters() / 1e9 == pytest.approx(1.73, abs=0.01)


def test_the_formula_counts_the_matrix_products_that_our_step_makes():
    system = tiny_ours()
    slots = 0
    while slots < TINY.anchors * (TINY.block_size - 1):  # slots past a document's end are not projected here
        with FlopCounterMode(display=False) as counter:
            slots = int(system.step()[1])
    counted = counter.get_flop_counts()["Global"]
    assert counted[torch.ops.aten.mm] == TINY.matrix_flop()


def test_the_parameter_count_is_the_drafters():
    matrices = [p for _, p in tiny_ours().trainable if p.ndim == 2]
    assert sum(p.numel() for p in matrices) == TINY.drafter_parameters()


@pytest.mark.parametrize("sliding", [0, 1])
def test_ours_runs_on_a_cpu_with_finite_changing_losses_and_a_gradient_everywhere(sliding: int):
    shape = dataclasses.replace(TINY, sliding_layers=sliding, window=8)
    system = ours(shape, make_batch(shape, CPU))
    result = measure(system, QUICK, CPU)
    assert 12 < result["slots"] <= 24
    assert result["loss"] > 0
    assert len(result["ms"]) == len(measure_with_update(system, QUICK, CPU)) == 3


def test_a_constant_loss_is_refused():
    with pytest.raises(SystemExit, match="constant"):
        measure(toy(torch.ones(2), [1.0] * 4), QUICK, CPU)


def test_a_loss_that_is_not_finite_is_refused():
    weight = torch.ones(2)
    system = toy(weight, [1.0, 2.0, float("nan"), 3.0])
    with pytest.raises(SystemExit, match="not finite or constant"):
        measure(system, QUICK, CPU)


def test_a_parameter_without_gradient_is_refused_by_name():
    with pytest.raises(SystemExit, match="'weight'"):
        measure(toy(torch.ones(2), [1.0, 2.0, 3.0, 0.0]), QUICK, CPU)


def test_steady_memory_counts_a_shared_storage_once_and_one_gradient_a_parameter():
    weight = torch.ones(4)
    system = System(lambda: (weight, weight), [("weight", weight)], [weight, weight[:2]], "toy")
    assert system.steady_bytes() == 2 * 4 * 4


def test_steady_memory_holds_moments_once_the_optimiser_has_made_them():
    system = tiny_ours()
    before = system.steady_bytes()
    measure_with_update(system, QUICK, CPU)
    matrices = sum(4 * p.numel() for _, p in system.trainable)
    assert system.steady_bytes() - before == pytest.approx(2 * matrices, rel=0.01)


def test_the_tables_ratio_is_to_ours_of_the_same_geometry():
    def result(ms: float) -> dict:
        facts = {"settings": "", "ms": [ms] * 3, "steady_gib": 1.0, "above_gib": 2.0, "loss": 1.0}
        return facts | {"grad_norm": 1.0, "slots": 1, "warm_s": 1.0, "compiled_late": 0}

    times = {"ours": 100.0, "peer": 150.0, "ours-published": 50.0, "peer-published": 150.0}
    lines = table({name: result(ms) for name, ms in times.items()}, flop=1e12, ceiling=1e13).splitlines()
    assert "floor 100 ms" in lines[0]
    rows = {cells[1].strip(): cells[3].strip() for cells in (line.split("|") for line in lines[4:])}
    assert rows == {"ours": "1.00", "peer": "1.50", "ours-published": "1.00", "peer-published": "3.00"}
