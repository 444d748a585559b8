"""The benchmark of FP8 in the target's pass, over a drafter that was trained and exported."""

from __future__ import annotations

import json

import pytest

from benchmarks import fp8_effect
from slipstream import cli


def test_fp8s_effect_is_told_for_every_tap_and_slot_of_an_exported_drafter(world, tmp_path, capfd):
    assert (
        cli.main(
            world.train(tmp_path / "run", *["--max-steps", "40", "--lr", "3e-3", "--log-interval", "40"])
        )
        == 0
    )
    places = f"--target-model {world.target} --drafter {tmp_path / 'run' / 'export'} --data-dir {world.data}"
    size = "--rows 1 --token-budget 256 --max-anchors 16 --device cpu --dtype float32"
    out = tmp_path / "effect.json"
    assert fp8_effect.main(f"{places} {size} --json {out}".split()) == 0

    found = json.loads(out.read_text())
    assert (found["rows"], found["dtype"], len(found["taps"])) == (1, "float32", 2)
    assert 0 < found["tokens"] <= 256
    for tap in found["taps"]:
        assert 1e-3 < tap["change"] < 0.5
        assert 0.9 < tap["cosine"] < 1
        assert -1 <= tap["worst"] <= tap["cosine"]
    plain, fp8 = found["drafting"]["plain"], found["drafting"]["fp8"]
    assert plain["blocks"] == fp8["blocks"] == 16
    assert len(plain["slot_accuracy"]) == 3
    assert min(plain["tau"], fp8["tau"]) > 1.02
    assert plain["loss"] != fp8["loss"]
    assert plain["loss"] == pytest.approx(fp8["loss"], rel=0.1)
    assert f"FP8 {fp8['tau']:.4f}" in capfd.readouterr().out
