"""The verifier's tokenizer, as transformers loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speculators_core.errors import VerifierError, cause_of


def load_tokenizer(verifier_dir: Path) -> Any:
    """The tokenizer of a local verifier.

    Raises:
        VerifierError: its files are missing or broken, whatever the libraries that read them say to that.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(verifier_dir), local_files_only=True)
    except Exception as error:  # of `tokenizers` a bare one
        raise VerifierError(
            f"the tokenizer of {verifier_dir} cannot be loaded: {_broken(verifier_dir) or cause_of(error)}",
            mend="copy the verifier's tokenizer files beside its config.json again",
        ) from error


def _broken(verifier_dir: Path) -> str | None:
    """What is wrong with tokenizer.json by itself; None where nothing is, or another file is read."""
    from tokenizers import Tokenizer

    path = verifier_dir / "tokenizer.json"
    if path.is_file():
        try:
            Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 — told as the cause of an error that is raised
            return f"{path.name}: {error}"
    return None
