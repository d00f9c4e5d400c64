"""Check that the environment holds what the project was built for; say what to do if not."""

import importlib
import sys
from importlib import metadata

NEEDED = ("torch", "transformers", "ray", "vllm", "pyarrow")
# Their published builds belong to one torch each, and transformers imports them whenever they are installed.
TORCH_BUILDS = ("torchvision", "torchaudio", "torchcodec")


def problem_of(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken binary extension raises whatever it likes
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    for name in TORCH_BUILDS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        problem = problem_of(name)
        if problem is not None:
            print(
                f"error: {name} {version} is installed but was built for another torch than "
                f"{metadata.version('torch')} ({problem}). transformers' model classes cannot be imported beside it, "
                f"and nothing here needs it: "
                f"`{sys.executable} -m pip uninstall -y {name}`",
                file=sys.stderr,
            )
            return 1
    for name in NEEDED:
        problem = problem_of(name)
        if problem is not None:
            print(
                f"error: cannot import {name} ({problem}); remove the environment and run `make setup` again",
                file=sys.stderr,
            )
            return 1
    print("environment ok: torch " + metadata.version("torch") + ", transformers " + metadata.version("transformers"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
