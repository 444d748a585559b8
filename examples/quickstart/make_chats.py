"""Make `chats.jsonl.gz`: conversations that the small target writes itself, both turns of them.

The model is fed the header of a user turn and sampled: what it writes is a prompt of the kind it was tuned
on. It then answers each prompt greedily, so that the answers are exactly what a drafter has to foresee.
Runs on a GPU in a few minutes (batches of thousands); the file ships with the project so that nobody has to
do it again.
"""

import argparse
import gzip
import json
import pathlib
import random
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@torch.inference_mode()
def complete(
    model, tokenizer, prompts: list[list[int]], max_new: int, batch: int, **sampling
) -> list[list[int]]:
    """Continue every prompt; a list of new ids each, cut after <|im_end|>. Batches hold prompts of like
    length."""
    eos, device = tokenizer.eos_token_id, model.device
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        width = max(len(prompts[i]) for i in rows)
        ids = torch.full((len(rows), width), eos)
        mask = torch.zeros_like(ids)
        for r, i in enumerate(rows):
            ids[r, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[r, width - len(prompts[i]) :] = 1
        made = model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new,
            pad_token_id=eos,
            **sampling,
        )
        for i, row in zip(rows, made[:, width:].tolist(), strict=True):
            out[i] = row[: row.index(eos) + 1] if eos in row else row
        print(f"  {min(start + batch, len(order))}/{len(order)}", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--prompts", type=int, default=28000)
    parser.add_argument("--max-answer", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).to(device).eval()
    torch.manual_seed(args.seed)
    eos = tokenizer.eos_token_id

    began = time.perf_counter()
    header = tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    drawn = complete(
        model,
        tokenizer,
        [header] * args.prompts,
        128,
        args.batch,
        do_sample=True,
        temperature=1.0,
        top_p=0.95,
        top_k=0,
    )
    texts = sorted({tokenizer.decode(d[:-1]).strip() for d in drawn if len(d) > 4 and d[-1] == eos})
    print(f"{len(texts)} prompts of {len(drawn)} kept, {time.perf_counter() - began:.0f} s", flush=True)

    began = time.perf_counter()
    encoded = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": t}], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        for t in texts
    ]
    answers = complete(model, tokenizer, encoded, args.max_answer, args.batch, do_sample=False)
    seconds = time.perf_counter() - began
    print(f"{sum(map(len, answers))} answer tokens, {sum(map(len, answers)) / seconds:.0f} tok/s", flush=True)

    lines = []
    for text, prompt, answer in zip(texts, encoded, answers, strict=True):
        finished = answer[-1] == eos
        reply = tokenizer.decode(answer[:-1] if finished else answer)
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        again = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        if again[: len(prompt) + len(answer)] != prompt + answer or len(answer) < 8:
            continue  # text that does not tokenise back to what the model said would teach something else
        lines.append(json.dumps({"messages": messages, "finished": finished}, ensure_ascii=False) + "\n")
    random.Random(args.seed).shuffle(
        lines
    )  # the prompts were sorted: any prefix of the file is a fair sample
    with gzip.open(args.output, "wt", encoding="utf-8", compresslevel=9) as f:
        f.writelines(lines)
    print(f"{len(lines)} of {len(texts)} conversations written to {args.output}")


if __name__ == "__main__":
    main()
