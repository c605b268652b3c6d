"""Who this build is: the parts of GetVersion that both services share."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
from pathlib import Path

DISTRIBUTION = "lora-refit"
API_VERSION = "refit.v1"


def service_version() -> str:
    """Version of the installed distribution."""
    return importlib.metadata.version(DISTRIBUTION)


def package_version(name: str) -> str:
    """Version of an installed package, found without importing it; empty when it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def git_revision() -> str:
    """REFIT_GIT_REVISION (an image sets it), else that of the checkout, else empty."""
    if revision := os.environ.get("REFIT_GIT_REVISION"):
        return revision
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
