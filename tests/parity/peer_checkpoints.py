"""Run by the peer's interpreter (speculators 0.9.0): `peer_checkpoints.py job.json`.

job.json: convert [{model, verifier, algorithm, output_path, …}], load [{draft, state, saved}]. Each `load` reads a
draft with the peer's own loader, writes what it holds then as `state`, and saves it again as the peer saves.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path


def main(job_file: str) -> None:
    """Do what the job says; any failure of the peer is this script's."""
    job = json.loads(Path(job_file).read_text())
    convert_model = import_module("speculators.convert.entrypoints").convert_model
    import_module("speculators.models")
    loader = import_module("speculators").SpeculatorModel
    save_file = import_module("safetensors.torch").save_file
    for task in job["convert"]:
        convert_model(**task)
    for task in job["load"]:
        model = loader.from_pretrained(task["draft"])
        state = {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}
        save_file(state, task["state"])
        model.save_pretrained(task["saved"])


if __name__ == "__main__":
    main(sys.argv[1])
