"""The benchmarks count what they say they count, refuse numbers that cannot be real, and run on a CPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import pair, target_pass
from benchmarks.drafter_step import Options, measure, measure_with_update, table
from benchmarks.ours import ours
from benchmarks.workload import TINY, Shape, System, make_batch, random_row
from slipstream.system.memory import drafter_parameters
from tests.tiny import row_of

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
    assert drafter_parameters(Shape().geometry()) / 1e9 == pytest.approx(1.73, abs=0.01)


def test_the_formula_counts_the_matrix_products_that_our_step_makes():
    system = tiny_ours()
    slots = 0
    while slots < TINY.anchors * (TINY.block_size - 1):  # slots past a document's end are not projected here
        with FlopCounterMode(display=False) as counter:
            slots = int(system.step()[1])
    counted = counter.get_flop_counts()["Global"]
    assert counted[torch.ops.aten.mm] == TINY.matrix_flop()


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


def test_a_random_row_lies_as_packed_rows_do():
    made = random_row([3, 2, 1], 8, 131, torch.Generator().manual_seed(0))
    documents = [torch.ones(n, dtype=torch.int64) for n in (3, 2, 1)]
    expected = row_of(documents, 8)
    for field in ("positions", "documents", "supervised"):
        assert torch.equal(getattr(made, field), getattr(expected, field)), field
    assert made.spans() == [(0, 3), (3, 5), (5, 6)]
    assert not made.input_ids[6:].any()


def test_rows_of_the_pair_are_full_of_documents_of_many_lengths():
    rows = list(itertools.islice(pair.packed_rows(2048, 131), 3))
    lengths = {end - start for row in rows for start, end in row.spans()}
    assert len(lengths) > 3
    assert all(row.supervised.float().mean() > 0.8 and int(row.input_ids.max()) < 130 for row in rows)


def peers_steps(path: Path, **ms: float) -> Path:
    path.write_text(json.dumps({"results": {name: {"ms": [took]} for name, took in ms.items()}}))
    return path


def test_the_better_peer_is_the_fastest_of_the_same_geometry(tmp_path):
    times = {"ours": 1.0, "speculators": 7.0, "specforge": 9.0, "specforge-published": 2.0}
    assert pair.better_peer(peers_steps(tmp_path / "step.json", **times)) == 7.0
    assert pair.better_peer(peers_steps(tmp_path / "ours.json", ours=1.0)) is None
    assert pair.better_peer(tmp_path / "nowhere") is None


def test_the_pair_runs_on_a_cpu_and_its_fused_taps_are_the_stock_layers(tmp_path, capfd):
    against, out = peers_steps(tmp_path / "step.json", specforge=9.0), tmp_path / "pair.json"
    flags = f"--device cpu --tiny --steps 3 --fp8 --against {against} --json {out}"
    assert pair.main(flags.split()) == 0
    found = json.loads(out.read_text())
    assert found["rows"] == 2 + 3 + 12 + 1 + 12
    on_a_gpu = {"peak_gib", "reserved_gib", "growth_bytes", "compiled_late"}
    assert {name: found[name] for name in on_a_gpu} == dict.fromkeys(on_a_gpu, 0)
    assert len(found["bf16_taps_apart"]) == 2
    assert max(found["bf16_taps_apart"]) < 1e-5  # on a CPU in fp32
    assert all(1e-3 < apart < 1 for apart in found["fp8_taps_apart"])
    kinds = ("step", "bf16_target", "bf16", "fp8_target", "fp8", "common_target")
    assert all(found[f"{kind}_ms"] > 0 for kind in kinds)
    assert found["common_ms"] == found["common_target_ms"] + 9.0
    times = found["common_ms"] / found["fp8_ms"]
    assert f"fp8: {times:.2f}× the common way" in capfd.readouterr().out


def test_the_targets_pass_runs_on_a_cpu_and_compares_every_way_with_documents_alone(tmp_path):
    out = tmp_path / "target.json"
    flags = f"--device cpu --tiny --layers 8 --count 2 --fp8 --json {out}"
    assert target_pass.main(flags.split()) == 0
    found = json.loads(out.read_text())
    ways = {way["name"]: way for way in found["ways"]}
    assert list(ways) == ["common", "stock", "ours", "ours, FP8"]
    assert ways["common"]["difference"] == []
    assert max(ways["stock"]["difference"]) < 1e-5
    assert max(ways["ours"]["difference"]) < 1e-5
    assert ways["ours"]["worst_token"] < 1e-3
    assert all(1e-3 < apart < 1 for apart in ways["ours, FP8"]["difference"])
    assert all(0 < way["least_ms"] <= way["median_ms"] <= way["most_ms"] for way in ways.values())
    names = ["products of ours alone", "products of ours, FP8 alone", "matrix work at the ceiling"]
    assert list(found["floors_ms"]) == names
    assert min(found["floors_ms"].values()) > 0
    assert found["matrix_tflop"] > 0
