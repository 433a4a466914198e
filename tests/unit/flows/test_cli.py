"""The command answers fast, teaches, and turns errors into a message and a status."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import is_news
from flows.cli_support import show_table
from speculators_core.errors import ConfigError
from tests.environment import ROOT, child_environment

DEMO = "deployments/recipes/demo.yaml"


def draftsmith(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=child_environment(home), capture_output=True, text=True, timeout=120, check=False
    )


def test_help_names_every_stage_and_imports_nothing_heavy() -> None:
    probe = (
        "import sys, flows.cli; heavy = {'torch', 'transformers', 'prefect', 'mlflow', 'matplotlib', 'datasets'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    shown = subprocess.run(
        [sys.executable, "-m", "flows.cli", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    stages = ("preflight", "prepare", "capture", "train", "export", "evaluate", "register")
    for name in ("retrain", *stages, "promote", "rollback", "history", "matrix", "support", "serve", "gc", "pin"):
        assert name in shown


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("retrain", "nothing.yaml"), 2, "no recipe at nothing.yaml"),
        (("convert", "", "out"), 2, "one of the arguments is empty"),
        (("capture", DEMO, "--set", "captur.concurrency=1"), 2, "did you mean `capture`"),
        (("prepare", DEMO, "--set", "verifier.path=missing"), 1, "does not exist"),
        (("doctor", DEMO, "--set", "x=1"), 2, "`x` is no key that is known here"),
        (("doctor", "--set", "x=1"), 2, "none is named"),
        (("retrain", DEMO, "--dry-run", "--set", "data.max_rows=399"), 2, "at most 99 prompts can be held back"),
        (("fingerprint", "tests"), 1, "config.json"),
        (("bench", "train", DEMO), 2, "--against-peer"),
        (("promote", "chat"), 2, "neither a recipe nor a version"),
        (("promote", "chat", "1", "--force"), 2, "--force needs a reason"),
        (("rollback", "chat"), 1, "there is no registry at"),
        (("matrix", "chat", "--test", "1"), 2, "go together"),
        (("rollback", DEMO), 1, "there is no registry at"),  # the recipe's deployment, not a model of that name
        (("runtime", "flags", DEMO), 2, "names no server of somebody else"),
        (("plan", "nothing.yaml"), 2, "no recipe at nothing.yaml"),
        (
            ("apply", "nothing.json"),
            2,
            "nothing.json: No such file or directory\n  mend: `draftsmith plan RECIPE` writes",
        ),
        (("diff", "nobody here", "tests"), 1, "does not exist"),
        (("deploy",), 2, "there is no Prefect server to deploy to"),
        (("serve", "chat", "--runtime", "http://gpu:8000"), 2, "starts its engines itself"),
        (("serve", "chat", "--set", "training.epochs=2"), 2, "needs a recipe"),
        (("serve", "chat", "--set", "serve.prot=1"), 2, "did you mean `port`?"),
        (("frobnicate",), 2, "No such command"),
    ],
)
def test_what_is_wrong_is_one_message_and_a_status(
    tmp_path: Path, arguments: tuple[str, ...], status: int, words: str
) -> None:
    done = draftsmith(tmp_path, *arguments)
    assert done.returncode == status, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr


def test_a_command_that_ends_with_a_status_ends_the_process_with_it() -> None:
    code = (
        "import sys, typer, flows.cli as cli\n"
        "@cli.app.command()\n"
        "def fail() -> None:\n"
        "    raise typer.Exit(3)\n"
        "sys.argv = ['draftsmith', 'fail']\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=child_environment(), check=False)
    assert done.returncode == 3


@pytest.mark.parametrize("came", ["SIGTERM", "SIGINT"])
def test_a_signal_closes_what_is_open_and_says_how_to_go_on(came: str) -> None:
    code = (
        "import os, signal, sys, time, flows.cli as cli\n"
        "@cli.app.command()\n"
        "def wait() -> None:\n"
        "    try:\n"
        f"        os.kill(os.getpid(), signal.{came})\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('closed', flush=True)\n"
        "sys.argv = ['draftsmith', 'wait']\n"
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (130, "closed\n")
    assert done.stderr.startswith("stopped: ") and "mend: run the same command again" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("status", "nothing.yaml"), "no recipe at nothing.yaml"), (("status", DEMO, "--frobnicate"), "No such option")],
)
def test_a_failure_is_json_too_where_that_was_asked_for(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = draftsmith(tmp_path, *arguments, "--json")
    assert done.returncode == 2 and words in done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"error", "mend"} and words in told["error"]


def test_what_prefect_says_of_our_errors_is_told_once_and_of_others_with_all() -> None:
    def record(name: str, message: str, error: Exception | None = None) -> logging.LogRecord:
        told = None if error is None else (type(error), error, None)
        return logging.LogRecord(name, logging.ERROR, "", 0, message, None, told)

    ours, other = ConfigError("no"), ValueError("no")
    assert not is_news(record("prefect.flow_runs", "Encountered exception during execution", ours))
    assert not is_news(record("prefect.task_runs", "Task run failed with exception", ours))
    assert not is_news(record("prefect.flow_runs", "Finished in state Failed('no')"))
    assert is_news(record("prefect.flow_runs", "Encountered exception during execution", other))
    assert is_news(record("prefect.flow_runs", "Finished in state Completed()"))
    assert is_news(record("speculators_core.run", "stage=train failed", ours))


def test_the_state_root_is_where_it_was_asked_to_be(tmp_path: Path) -> None:
    # needs no runtime: asking a vLLM for its version costs half a minute in a state root that does not know it yet
    few = ("--rows", "1", "--set", "data.max_rows=8")
    done = draftsmith(tmp_path / "home", "data", "sample", DEMO, *few)
    if not (ROOT / ".draftsmith" / "verifiers").exists():
        pytest.skip("the demo's verifier is made by `make verifier`")
    assert done.returncode == 0, done.stderr
    assert "<|im_start|>" in done.stdout and "⟦written by the verifier⟧" in done.stdout, "no colours in a pipe"
    *_, last = done.stdout.splitlines()
    assert last.startswith("read ") and "used 8, left out: beyond_max_rows" in last
    assert (tmp_path / "home" / "prefect").is_dir() and list((tmp_path / "home" / "store" / "dataset").iterdir())


def test_a_state_root_that_cannot_be_one_is_a_message(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    found = draftsmith(home, "status", DEMO)
    assert found.returncode == 1 and "Traceback" not in found.stderr
    assert found.stderr.startswith(f"error: {home}") and "mend:" in found.stderr


def test_brackets_in_a_cell_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("[demo]", [("registered", "version 1  [champion]")])
    shown = capsys.readouterr().out
    assert "[champion]" in shown and "[demo]" in shown


def test_no_digest_or_path_is_cut_or_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    digest, path = "ab12" * 16, f"file:///{'x/' * 60}"
    show_table(path, [("fingerprint", digest), (f"draft/{digest}", f"done {path}"), ("text", "word " * 60)])
    lines = capsys.readouterr().out.splitlines()
    for whole in (f"│ {digest}", f"draft/{digest} │", path):
        assert any(whole in line for line in lines[1:]), whole
    assert max(map(len, lines)) < 220, "prose is filled"


@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        ("keys >&-", 1, "error: standard output is closed"),
        ("keys budget > /dev/full", 1, "the disk is full"),
        ("keys > /dev/full", 1, "the disk is full"),
        ("keys budget | exec 0<&-", 1, ""),
        ("keys | head -1 > /dev/null", 1, ""),
        ("keys budget > /dev/null", 0, ""),
    ],
)
def test_output_that_nobody_gets_is_no_success(tmp_path: Path, command: str, status: int, told: str) -> None:
    script = f"set -o pipefail; {sys.executable} -m flows.cli {command}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=child_environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert told in done.stderr if told else not done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_name_in_another_encoding_is_refused_in_words(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "status", name],
        env=child_environment(tmp_path), cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "is not UTF-8" in done.stderr and "Traceback" not in done.stderr
