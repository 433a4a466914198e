"""Which code produced something: versions of ourselves and of the packages that matter."""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("torch", "transformers", "safetensors")


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by distribution name; absent packages are left out."""
    found: dict[str, str] = {}
    for name in ("draftsmith", *(packages or PACKAGES)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
