"""Make models/tiny-moe: a one-million-parameter Qwen3-MoE that gets some two-digit sums right.

It reads and writes characters: the prompt "12+34=" asks for "46" and the end token. Random weights learn nothing by
reinforcement, so supervised steps warm it up until it samples the right answer with a chosen pass rate (about a minute
on one core); `--target-pass-rate 0` leaves it random. The same arguments give the same file on the same machine.
"""

import argparse
import sys
from pathlib import Path

from model_dir import make_model_dir


def pass_rate_argument(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 1)")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models/tiny-moe"))
    parser.add_argument("--target-pass-rate", type=pass_rate_argument, default=0.25, help="0 for random weights")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    target, seed = arguments.target_pass_rate, arguments.seed

    def write_files(out: Path) -> None:
        from tiny_moe import write_model  # imports torch, which a finished directory need not wait for

        write_model(out, target, seed)

    recipe = {"maker": "make_tiny_moe", "format": 1, "target_pass_rate": target, "seed": seed}
    try:
        made = make_model_dir(arguments.out, recipe, write_files)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    print(f"{arguments.out}: {'made' if made else 'already there, made with the same arguments'}")


if __name__ == "__main__":
    main()
