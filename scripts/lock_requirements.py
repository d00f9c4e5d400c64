"""Make requirements/cpu.txt and requirements/dev.txt: every distribution with its version, no addresses.

pip resolves the project's extras without installing anything. Left out are torch, which `make setup` installs first,
and the distributions whose published builds belong to another torch: with a torchvision that does not load,
transformers' model classes do not import, and text models need none of the three.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
LEFT_OUT = {"seqrelay", "torch", "torchvision", "torchaudio", "torchcodec", "setuptools", "pip"}
HEADER = """\
# {what}
# Made by `make lock` (pip's own resolution of the extras {extras}); do not edit, run it again.
# Install with `pip install --no-deps -r`, after torch. Without torchvision, torchaudio and torchcodec on purpose.
"""


def resolve(extras: str) -> dict[str, str]:
    """Name and version of everything that the project with these extras needs."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run([*command, TORCH, f"{ROOT}[{extras}]"], check=True, stdout=subprocess.PIPE, text=True)
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {item["name"].lower().replace("_", "-").replace(".", "-"): item["version"] for item in found}


def write(path: Path, what: str, extras: str, pins: dict[str, str]) -> None:
    lines = [f"{name}=={version}" for name, version in sorted(pins.items()) if name not in LEFT_OUT]
    path.write_text(HEADER.format(what=what, extras=extras) + "\n".join(lines) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(lines)} distributions")


def main() -> None:
    everything = resolve("cpu,models,dev")
    runtime = resolve("cpu,models").keys()
    cpu = {name: version for name, version in everything.items() if name in runtime}
    dev = {name: version for name, version in everything.items() if name not in runtime}
    write(ROOT / "requirements" / "cpu.txt", "What the project needs to run on CPUs.", "cpu, models", cpu)
    write(ROOT / "requirements" / "dev.txt", "What checks and tests need on top of cpu.txt.", "dev", dev)


if __name__ == "__main__":
    main()
