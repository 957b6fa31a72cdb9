"""Another release's wheel: asked of the package index by pip, downloaded once, verified."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from pagealign.errors import PagealignError
from pagealign.fetch import Package, fetch, sha256_of
from pagealign.paths import cache_dir
from pagealign.pin import Pin, WheelPin, load_pin
from pagealign.trees import wheel as pinned_wheel

_VERSION = re.compile(r"v?(\d+(?:\.\d+)+(?:(?:rc|\.post|\.dev)\d+)?)")
_WHEEL = re.compile(r"sglang-([^-]+)-.+\.whl")
PYTHON = "3.11"
# What zipfile raises for a file that isn't a zip, one that was cut or changed, and one that
# is encrypted or packed in a way it doesn't know.
BROKEN_WHEEL = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError)
PROCESSORS = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Release:
    """A release and the wheel of it that was read; ``path`` is verified against ``wheel``."""

    version: str
    path: Path
    wheel: WheelPin


def find(version: str, patches: Path) -> Release:
    """The release ``version``, fetched if it isn't cached; or a wheel's path in its place.

    Its file name and SHA-256 are those that the package index gives for this machine; the
    pinned release's are the PIN's. Raises PagealignError where there is no such release or
    file.
    """
    if version.endswith(".whl"):
        return _local(Path(version).expanduser())
    match = _VERSION.fullmatch(version)
    if not match:
        raise PagealignError(f"{version!r} is no release of SGLang: give one such as 0.5.22")
    version = match[1]
    pin = load_pin(patches)
    if version == pin.release:
        return Release(version, pinned_wheel(patches), pin.wheel)
    named = _ask_index(version)
    wheels = cache_dir("wheels")
    path = wheels / named.filename
    with FileLock(wheels / ".lock"):
        if not (path.is_file() and sha256_of(path) == named.sha256):
            with tempfile.TemporaryDirectory(dir=wheels, prefix=".tmp-") as folder:
                package = Package("sglang", version, named.filename, named.sha256)
                fetch(package, Path(folder)).replace(path)
    return Release(version, path, named)


def all_wheels(release: Release, pin: Pin) -> tuple[WheelPin, ...]:
    """The wheels that a PIN of ``release`` names: one for each processor it exists for."""
    if release.version == pin.release:
        return pin.wheels
    if release.wheel.filename.endswith("-any.whl"):
        return (release.wheel,)
    found = [release.wheel]
    for processor in PROCESSORS:
        if not release.wheel.filename.endswith(f"_{processor}.whl"):
            tag = release.wheel.filename.removesuffix(".whl").rsplit("-", 1)[1]
            platform = tag.replace(next(p for p in PROCESSORS if tag.endswith(p)), processor)
            try:
                found.append(_ask_index(release.version, platform))
            except PagealignError:
                continue  # not built for that processor
    return tuple(sorted(found, key=lambda w: not w.filename.endswith(f"_{PROCESSORS[0]}.whl")))


def _local(path: Path) -> Release:
    match = _WHEEL.fullmatch(path.name)
    if not (match and path.is_file()):
        raise PagealignError(f"{path} isn't a wheel of SGLang (sglang-VERSION-....whl)")
    try:
        with zipfile.ZipFile(path) as archive:
            if broken := archive.testzip():
                raise zipfile.BadZipFile(f"its {broken} is damaged")
    except BROKEN_WHEEL as error:
        raise PagealignError(f"{path} can't be read as a wheel: {error}") from error
    return Release(match[1], path, WheelPin(sha256_of(path), path.name))


def _ask_index(version: str, platform: str | None = None) -> WheelPin:
    """What pip would download: its name and its SHA-256 by the index. Downloads nothing.

    pip and not a URL of ours, so that the index, the proxy and the certificates are those
    that the user configured.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
    command += ["--ignore-installed", "--disable-pip-version-check", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command += ["--report", str(report)]
        if platform:
            command += ["--platform", platform, "--python-version", PYTHON]
            command += ["--target", str(Path(folder) / "target")]
        done = subprocess.run([*command, f"sglang=={version}"], capture_output=True, text=True)
        if done.returncode:
            raise PagealignError(_why(version, done.stderr))
        try:
            download = json.loads(report.read_text())["install"][0]["download_info"]
            sha256 = download["archive_info"]["hashes"]["sha256"]
            name = Path(unquote(urlsplit(download["url"]).path)).name
        except (OSError, ValueError, LookupError) as error:
            raise PagealignError(
                f"pip names no file with a SHA-256 for sglang {version}: give a wheel's path "
                "in place of the version"
            ) from error
    return WheelPin(sha256, name)


def _why(version: str, stderr: str) -> str:
    if "No matching distribution" in stderr:
        known = re.search(r"from versions: ([^)]*)\)", stderr)
        if known and known[1] != "none":
            newest = ", ".join(known[1].split(", ")[-5:])
            return f"there is no wheel of SGLang {version} for this machine; the newest: {newest}"
    lines: Sequence[str] = [x for x in stderr.splitlines() if x.startswith("ERROR")]
    why = lines[-1] if lines else "pip gave no reason"
    return f"the package index wasn't asked ({why}): give a wheel's path in place of the version"
