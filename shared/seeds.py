"""Where every random stream of a run comes from: a hash of the run's seed and the name of the stream. Pure."""

import hashlib


def derive_seed(run_seed: int, purpose: str, *numbers: int) -> int:
    """A 62-bit seed, different for every (run seed, purpose, numbers).

    Counting up from a base (`seed + i`) would give neighbouring streams of neighbouring runs the same numbers.
    """
    text = ":".join([str(run_seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2
