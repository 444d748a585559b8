"""`data verify` names every fault of prepared shards, whatever hides it, and none where there is none."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy

from slipstream import cli
from slipstream.config import UserError
from slipstream.data.verify import verify
from tests.unit.test_shards import DOCUMENTS, write


@pytest.fixture
def data(tmp_path):
    write(tmp_path / "data", heldout=DOCUMENTS[:2])
    return tmp_path / "data"


def faults(data):
    return verify(str(data))[1]


def consistently(data, name, **arrays):
    """Other contents under a hash and size that fit."""
    path, manifest = data / name, json.loads((data / "manifest.json").read_text())
    path.write_bytes(safetensors.numpy.save({**safetensors.numpy.load_file(path), **arrays}))
    (file,) = (f for files in manifest["splits"].values() for f in files if f["name"] == name)
    file |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (data / "manifest.json").write_text(json.dumps(manifest))


def test_whole_shards_have_no_fault_and_the_verb_ends_with_0(data, capsys):
    assert faults(data) == []
    assert cli.main(["data", "verify", str(data)]) == 0
    assert "heldout: 1 shards with 2 documents of 8 tokens are whole" in capsys.readouterr().out
    assert faults(f"file://{data}") == []


def test_every_fault_is_named_and_the_verb_ends_with_1(data, capsys):
    files = sorted(data.glob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    flipped = bytearray(files[2].read_bytes())
    flipped[-1] ^= 1
    files[2].write_bytes(flipped)
    assert cli.main(["data", "verify", str(data)]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAULT")]
    assert len(told) == 3
    for path, what in zip(files[:3], ("missing", "truncated", "corrupt: its sha256"), strict=True):
        assert any(f"{path}: {what}" in line for line in told)


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("tokens", np.array([400] * 8, "<u4"), "token id 400 in a vocabulary of 400"),
        ("tokens", np.array([5] * 8, "<u4"), "2 documents are not what their checks say, the first is 0"),
        ("supervised", np.array([2] * 8, "<u1"), "a mask value that is neither 0 nor 1"),
        ("supervised", np.array([0] * 8, "<u1"), "the manifest has others"),
        ("checks", np.array([1, 2], "<u4"), "2 documents are not what their checks say"),
        ("offsets", np.array([0, 7, 8], "<i8"), "2 documents are not what their checks say"),
        ("offsets", np.array([0, 9, 8], "<i8"), "do not add up"),
    ],
)
def test_contents_that_fit_their_hash_are_looked_at_too(data, name, changed, told):
    consistently(data, "heldout-00000.safetensors", **{name: changed})
    found = faults(data)
    assert any(told in fault and "heldout-00000.safetensors" in fault for fault in found), found


def test_what_is_no_dataset_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"no manifest\.json in it"):
        verify(str(tmp_path))
