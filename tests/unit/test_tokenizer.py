"""One way to the target's tokenizer, one idea of where its answers end."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from slipstream.config import UserError
from slipstream.data.tokenizer import load_generation_config, load_tokenizer, stop_ids
from tests.fixtures_data import byte_tokenizer


@pytest.mark.parametrize(
    ("eos", "known"), [(None, set()), (7, {7}), ([7, 2, 9], {2, 7, 9}), ([], set()), (0, {0})]
)
def test_an_answer_ends_at_the_generation_configs_tokens_and_at_the_tokenizers_eos(eos, known):
    tokenizer = byte_tokenizer()
    assert tokenizer.eos_token_id == 2
    assert stop_ids(GenerationConfig(eos_token_id=eos), tokenizer) == known | {2}
    assert stop_ids(None, tokenizer) == {2}
    tokenizer.eos_token = None
    assert stop_ids(GenerationConfig(eos_token_id=eos), tokenizer) == known


def test_a_targets_folder_gives_its_tokenizer_and_generation_config_and_a_bare_ones_none(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).get_vocab() == byte_tokenizer().get_vocab()
    assert load_generation_config(str(tmp_path)) is None
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    assert stop_ids(load_generation_config(str(tmp_path)), load_tokenizer(str(tmp_path))) == {2, 5, 6}


@pytest.mark.parametrize("broken", ["{", None])
def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_told_in_one_line(tmp_path, broken):
    if broken is not None:
        byte_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(UserError, match=f"^{tmp_path}: no tokenizer can be loaded from it") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)
