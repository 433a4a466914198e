"""Another revision of a small verifier, made here: a few plain steps of fine-tuning on a handful of replies.

    python -m speculators_core.verifier.revise SOURCE TARGET CONVERSATIONS STEPS LEARNING_RATE

For the demo's story and its trial, where no hub brings a new revision: only the weights differ from the source's.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speculators_core.verifier.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

FUNCTION_WORDS = (
    "a an the this that these those it its of to in on at for from with by as and or but so if is are was were be been "
    "am do does did has have had can could will would should may i you he she we they your my our their"
)
_DROPPED = re.compile(rf"\b(?:{'|'.join(FUNCTION_WORDS.split())})\b(?:'\w+)? *", re.IGNORECASE)
_MAX_TOKENS = 160
_BATCH = 4


def telegraphic(text: str) -> str:
    """The text without function words: a style that a draft of the old one keeps getting wrong, and a new one learns.

    Every token that is left is one that the verifier wrote before, so that a reduced vocabulary goes on fitting.
    """
    return _DROPPED.sub("", text)


def write_telegraphic(source: Path, target: Path) -> None:
    """Conversations (JSON Lines) with every reply made telegraphic; those of which nothing is left are left out."""
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as file:
        for line in lines:
            turns = json.loads(line)["conversations"]
            kept = [
                {**turn, "content": telegraphic(turn["content"])} if turn["role"] == "assistant" else turn
                for turn in turns
            ]
            if all(turn["content"].strip() for turn in kept):
                file.write(json.dumps({"conversations": kept}, ensure_ascii=False) + "\n")


def revise(source: Path, target: Path, conversations: Path, *, steps: int, learning_rate: float, seed: int = 0) -> None:
    """Fine-tune `source` on the conversations' first replies, and write it as `target`: the same files, other weights.

    AdamW on the replies' tokens, `_BATCH` conversations a step, the file over and over. `target` appears whole.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    tokenizer = load_tokenizer(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    rows = _forever(list(_rows(conversations, tokenizer, steps * _BATCH)))
    for step in range(steps):
        batch = [next(rows) for _ in range(_BATCH)]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
        # -100: no loss; rows are padded behind their end, where causal attention does not look
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in batch])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.info("step %d of %d: loss %.3f", step + 1, steps, float(loss))
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    old, new = load_file(source / "model.safetensors"), model.state_dict()
    weights = {name: new[name].to(tensor.dtype).contiguous() for name, tensor in old.items()}
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def _rows(conversations: Path, tokenizer: Any, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """(token ids, labels) of the last `count` conversations of the file: first prompt and reply."""
    for line in conversations.read_text(encoding="utf-8").splitlines()[-count:]:
        turns = json.loads(line)["conversations"]
        question, answer = (next(turn for turn in turns if turn["role"] == role) for role in ("user", "assistant"))
        start = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
        reply = tokenizer(answer["content"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        ids = (start + reply)[:_MAX_TOKENS]
        if len(ids) > len(start):
            yield ids, ([-100] * len(start) + ids[len(start) :])


def _forever(rows: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[list[int], list[int]]]:
    while True:
        yield from rows


def main(argv: Sequence[str]) -> int:
    """Command line; see the module's text."""
    if len(argv) != 5:
        sys.stderr.write("usage: python -m speculators_core.verifier.revise SOURCE TARGET CONVERSATIONS STEPS RATE\n")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    source, target, conversations = map(Path, argv[:3])
    revise(source, target, conversations, steps=int(argv[3]), learning_rate=float(argv[4]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
