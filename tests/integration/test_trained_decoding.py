"""A drafter that was trained, exported and loaded decodes losslessly, and accepts what it has learnt."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from slipstream.data.pack import pack_rows
from slipstream.data.records import Document
from slipstream.decoding.speculative import generate_speculative
from slipstream.export.zlab import export_run, load_drafter
from slipstream.models.drafter import Drafter
from slipstream.training.loop import train
from slipstream.training.metrics import Display
from slipstream.training.run import Rows
from tests.decoding import prompt_of, target_of
from tests.fixtures_data import memory_dataset
from tests.tiny import EOS
from tests.training import drafter_config, run_of

NEW = 24


def greedy(target, prompt):
    """What transformers itself answers."""
    ids = torch.tensor([prompt])
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return out[0, len(prompt) :].tolist()


def answered(target, seed):
    """A document of a random prompt and the target's own greedy answer."""
    prompt = prompt_of(6, seed)
    answer = greedy(target, prompt)
    supervised = np.array([False] * len(prompt) + [True] * len(answer))
    return Document(np.array(prompt + answer), supervised)


@pytest.mark.parametrize("family", ["qwen3", "llama", "hybrid"])
def test_a_trained_and_exported_drafter_gives_transformers_greedy_tokens_and_accepts_more(family, tmp_path):
    target = target_of(family)
    dataset = memory_dataset([answered(target, seed) for seed in range(48)])
    packing = pack_rows(dataset.lengths, 240, "truncate")
    torch.manual_seed(0)
    fresh = Drafter(drafter_config())
    settings = {"lr": 3e-3, "max_anchors": 96, "save_interval": 1000, "eval_interval": 1000}
    rows = Rows(dataset, packing, len(packing))
    run = run_of(target, fresh, folder=tmp_path / "run", rows=rows, steps=120, **settings)
    run.folder.mkdir()
    train(run, Display(Console(file=io.StringIO())))
    export_run(run.folder, tmp_path / "export", replace=False)
    trained = load_drafter(tmp_path / "export", target.device, torch.float32)
    torch.manual_seed(0)
    untrained = Drafter(drafter_config()).requires_grad_(False)

    passes = {"trained": 0, "untrained": 0}
    for seed in (0, 7, 31):
        prompt = prompt_of(6, seed)
        for name, drafter in (("trained", trained), ("untrained", untrained)):
            decoded = generate_speculative(target, drafter, prompt, NEW, 0.0, {EOS})
            assert decoded.tokens == greedy(target, prompt)
            passes[name] += decoded.passes
    assert passes["trained"] < 0.8 * passes["untrained"]
