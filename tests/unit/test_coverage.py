"""A set of weights that is not the whole model is refused by name, before anything is loaded."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout.coverage import Tensor, check_coverage, model_tensors
from shared.errors import WeightSyncError

LAYER = "model.layers.0."
EXPECTED = {
    "model.embed_tokens.weight": (8, 4),
    **{LAYER + f"self_attn.{x}_proj.weight": (4, 4) for x in "qkvo"},
    **{LAYER + f"mlp.experts.{e}.{x}_proj.weight": (4, 4) for e in range(4) for x in ("gate", "up", "down")},
    "lm_head.weight": (8, 4),
}


def sent(**changes: Tensor | None) -> list[Tensor]:
    """All expected tensors; `changes` replaces or drops (None) by the last parts of the name, dots as underscores."""
    tensors = []
    for name, shape in EXPECTED.items():
        key = next((k for k in changes if name.replace(".", "_").endswith(k)), None)
        changed = changes[key] if key else (name, "F32", shape)
        if changed is not None:
            tensors.append(changed)
    return tensors


def test_the_whole_model_is_accepted_in_any_order() -> None:
    check_coverage(EXPECTED, "F32", reversed(sent()))


DOWN_3 = LAYER + "mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (sent(experts_3_down_proj_weight=None), rf"'{DOWN_3}' was not sent \(1 missing of 18\)"),
        (sent(experts_3_down_proj_weight=("experts.3.w2", "F32", (4, 4))), r"'experts\.3\.w2' is unknown"),
        (sent(v_proj_weight=None), r"self_attn\.v_proj\.weight' was not sent"),
        ([*sent(), sent()[3]], r"self_attn\.v_proj\.weight' was sent twice"),
        (sent(experts_3_down_proj_weight=(DOWN_3, "F32", (4, 5))), rf"'{DOWN_3}' has shape \[4, 5\]"),
        (sent(experts_3_down_proj_weight=(DOWN_3, "BF16", (4, 4))), rf"'{DOWN_3}' is BF16"),
        ([], r"18 missing of 18"),
    ],
    ids=["dropped expert", "renamed expert", "q and k without v", "sent twice", "wrong shape", "wrong dtype", "none"],
)
def test_what_is_not_the_whole_model_is_refused_by_name(tensors: list[Tensor], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        check_coverage(EXPECTED, "F32", tensors)


def save_model(folder: Path, tied: bool) -> Path:
    tensors = {name: np.zeros(shape, dtype=np.float32) for name, shape in EXPECTED.items()}
    tensors[LAYER + "self_attn.rotary_emb.inv_freq"] = np.zeros(2, dtype=np.float32)
    items = list(tensors.items())
    save_file(dict(items[:5]), folder / "model-00001-of-00002.safetensors")
    save_file(dict(items[5:]), folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return folder


def test_the_truth_is_read_from_the_models_files(tmp_path: Path) -> None:
    assert model_tensors(save_model(tmp_path, tied=False)) == EXPECTED


def test_a_tied_head_is_not_expected_even_if_the_files_hold_it(tmp_path: Path) -> None:
    expected = model_tensors(save_model(tmp_path, tied=True))
    assert expected == {name: shape for name, shape in EXPECTED.items() if name != "lm_head.weight"}
    with pytest.raises(WeightSyncError, match=r"'lm_head\.weight' is unknown"):
        check_coverage(expected, "F32", sent())


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"model\.path"):
        model_tensors(tmp_path)
