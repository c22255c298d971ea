"""Fetches the page's libraries again: `python scripts/vendor_web.py`, which needs npm.

web/vendor/manifest.json names each file's package, version and path in the package. The script
packs those versions, copies file and licence, and writes the hashes that a test compares. To take a
new version, change it in the manifest and run the script.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parent.parent / "asyncllm" / "server" / "web" / "vendor"
MANIFEST = VENDOR / "manifest.json"


def main() -> None:
    entries = json.loads(MANIFEST.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for entry in entries:
            fetch(entry, Path(folder))
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    MANIFEST.write_text(f"[\n{lines}\n]\n")


def fetch(entry: dict[str, Any], folder: Path) -> None:
    package = f"{entry['package']}@{entry['version']}"
    command = ["npm", "pack", "--silent", package]
    packed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        # The files end in an `export` where the package has it only as a plain script.
        content = read(archive, entry["source"]) + entry.get("append", "").encode()
        licence = read(archive, entry["licence_source"])
    (VENDOR / entry["file"]).write_bytes(content)
    (VENDOR / f"LICENSE.{Path(entry['file']).stem}").write_bytes(licence)
    entry["sha256"] = hashlib.sha256(content).hexdigest()


def read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(f"package/{name}")
    assert member is not None, name
    return member.read()


if __name__ == "__main__":
    main()
