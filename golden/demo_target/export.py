"""Turns train.py's checkpoint into the shipped demo folder: the HF target, its own completions, the held-out prompts.

    python export.py --work WORK --demo ../../crates/cli/demo

Everything measured here uses the weights after their rounding to bf16, which is how they ship. Writes WORK/export.json with the figures.
"""

import argparse
import json
import pathlib
import random
import shutil
from collections import Counter

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import corpus
from model import Qwen3, generate
from train import CONFIG, SPECIALS, render

MAX_NEW = 256
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def loops(tokens):
    """Whether some run of at least 4 tokens stands at least 4 times in a row."""
    for n in range(4, len(tokens) // 4 + 1):
        run = 0
        for i in range(n, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - n] else 0
            if run >= 3 * n:
                return True
    return False


def load(demo):
    """The shipped target, its tokenizer and the token ids that end an answer."""
    model = Qwen3(CONFIG)
    state = {k.removeprefix("model."): v.float() for k, v in load_file(str(demo / "target/model.safetensors")).items()}
    model.load_state_dict(state)
    tok = Tokenizer.from_file(str(demo / "target/tokenizer.json"))
    return model.eval(), tok, {tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")}


def complete(model, tok, stop, prompts, temperature, generator=None, rows=64):
    """Completions in the order of `prompts`; prompts of near-equal length share a batch."""
    ids = [e.ids for e in tok.encode_batch([render(p) for p in prompts])]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    out, ended = [None] * len(ids), [None] * len(ids)
    for at in range(0, len(order), rows):
        some = order[at : at + rows]
        got = generate(model, [ids[i] for i in some], stop, MAX_NEW, temperature, generator)
        for i, o, e in zip(some, *got):
            out[i], ended[i] = o, e
    return out, ended


def write_target(work, demo):
    target = demo / "target"
    target.mkdir(parents=True, exist_ok=True)
    state = torch.load(work / "weights.pt")
    state = {f"model.{k}": v.to(torch.bfloat16).contiguous() for k, v in state.items()}
    save_file(state, str(target / "model.safetensors"), {"format": "pt"})
    shutil.copy(work / "tokenizer.json", target / "tokenizer.json")
    tok = Tokenizer.from_file(str(target / "tokenizer.json"))
    end, eot = tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")

    def write(name, value):
        (target / name).write_text(json.dumps(value, indent=2) + "\n")

    write("config.json", dict(
        CONFIG, architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu", attention_bias=False, attention_dropout=0.0,
        initializer_range=0.04, tie_word_embeddings=True, use_cache=True, use_sliding_window=False, sliding_window=None,
        max_window_layers=CONFIG["num_hidden_layers"], layer_types=["full_attention"] * CONFIG["num_hidden_layers"], rope_scaling=None,
        bos_token_id=None, eos_token_id=end, pad_token_id=eot, dtype="bfloat16"))
    write("generation_config.json", dict(eos_token_id=[end, eot], pad_token_id=eot, do_sample=True, temperature=0.8))
    write("tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token="<|mask|>",
        bos_token=None, unk_token=None, add_prefix_space=False, clean_up_tokenization_spaces=False,
        model_max_length=CONFIG["max_position_embeddings"], additional_special_tokens=["<|im_start|>"],
        added_tokens_decoder={str(tok.token_to_id(s)): dict(
            content=s, lstrip=False, rstrip=False, normalized=False, single_word=False, special=True) for s in SPECIALS}))
    (target / "chat_template.jinja").write_text(TEMPLATE)


def check_against_transformers(model, tok, demo):
    """The largest difference of logits from transformers' model, and equality of the chat template with `render`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(demo / "target", dtype=torch.float32).eval()
    fast = AutoTokenizer.from_pretrained(demo / "target")
    prompt = "Add 12 and 30."
    text = fast.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
    assert text == render(prompt), (text, render(prompt))
    assert fast(text)["input_ids"] == tok.encode(text).ids
    assert fast.mask_token_id == tok.token_to_id("<|mask|>")
    ids = torch.tensor([tok.encode(text).ids])
    with torch.no_grad():
        return (theirs(ids).logits - model.head(model(ids))).abs().max().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--work", type=pathlib.Path, required=True)
    ap.add_argument("--demo", type=pathlib.Path, required=True)
    ap.add_argument("--completions", type=int, default=3000, help="prompts to answer; the ones kept are fewer")
    ap.add_argument("--prompts", type=int, default=96)
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    write_target(a.work, a.demo)
    model, tok, stop = load(a.demo)
    report = dict(largest_logit_difference_from_transformers=check_against_transformers(model, tok, a.demo))

    # Every family is measured; the demo ships those of corpus.DEMO.
    probe = [corpus.chat(random.Random(i), held_out=True, family=f) for f in corpus.FAMILIES for i in range(16)]
    out, _ = complete(model, tok, stop, [c[2] for c in probe], 0)
    report["right_of_16_by_family"] = Counter(c[0] for c, o in zip(probe, out) if c[4] in tok.decode(o))

    rng, held, seen = random.Random(2), [], set()
    families = corpus.DEMO
    while len(held) < a.prompts:
        c = corpus.chat(rng, held_out=True, family=families[len(held) % len(families)])
        if (c[0], c[1]) not in seen:
            seen.add((c[0], c[1]))
            held.append(c)
    out, ended = complete(model, tok, stop, [c[2] for c in held], 0)
    right, asked = Counter(), Counter()
    for c, o in zip(held, out):
        asked[c[0]] += 1
        right[c[0]] += c[4] in tok.decode(o)
    report["held_out_temperature_0"] = dict(
        prompts=len(held), ended=sum(ended), looping=sum(map(loops, out)), mean_tokens=sum(map(len, out)) / len(out),
        right={f: f"{right[f]}/{asked[f]}" for f in families}, right_all=f"{sum(right.values())}/{len(held)}")
    print(json.dumps(report, indent=1), flush=True)
    for c, o in list(zip(held, out))[: len(families)]:
        print(f"--- {c[0]}\n{c[2]}\n>>> {tok.decode(o)}")

    chats, prompts = [], set()
    while len(chats) < a.completions:
        c = corpus.chat(rng, family=rng.choice(families))
        if c[2] not in prompts:
            prompts.add(c[2])
            chats.append(c)
    out, ended = complete(model, tok, stop, [c[2] for c in chats], 0.8, torch.Generator().manual_seed(3))
    dropped, rows = Counter(), []
    for c, o, e in zip(chats, out, ended):
        if not e:
            dropped["truncated"] += 1
        elif loops(o):
            dropped["looping"] += 1
        else:
            rows.append((c, tok.decode(o)))
    with open(a.demo / "completions.jsonl", "w") as f:
        for c, text in rows:
            f.write(json.dumps({"messages": [{"role": "user", "content": c[2]}, {"role": "assistant", "content": text}]}) + "\n")
    with open(a.demo / "prompts.jsonl", "w") as f:
        for c in held:
            f.write(json.dumps({"prompt": c[2]}) + "\n")
    report["completions"] = dict(
        asked=len(chats), kept=len(rows), dropped=dropped, right=sum(c[4] in t for c, t in rows), mean_tokens=sum(map(len, out)) / len(out))
    report["bytes"] = {str(p.relative_to(a.demo)): p.stat().st_size for p in sorted(a.demo.rglob("*")) if p.is_file()}
    (a.work / "export.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
