import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.device.mapped_tensors import TensorFile
from hearth.runtime.errors import HearthError
from hearth.runtime.lora.adapter import other_base
from hearth.runtime.lora.stored import read_peft
from tests.low_rank_models import Array, random_adapter
from tests.peft_models import change_fields, change_tensors, write_peft
from tests.runtime.lora.adapter_configs import BASE, adapter_config, refusal

A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True}])
def test_alpha_and_rank_are_folded_into_b(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = write_peft(BASE, tmp_path / "one", rank=4, **fields)
    found, wanted = read_peft(folder, adapter_config()), random_adapter(BASE, 4)
    assert (found.rank, found.base, set(found.parts)) == (4, "qwen3", set(wanted))
    for place, (a, b) in wanted.items():
        assert np.array_equal(found.parts[place].a, a)
        assert np.allclose(found.parts[place].b, b, rtol=1e-6)


def test_each_module_may_have_a_rank_and_an_alpha_of_its_own(tmp_path: Path) -> None:
    folder = write_peft(BASE, tmp_path / "one", rank=8, alpha=16)
    # As in PEFT: the first pattern that fits, for the end of a name behind a dot.
    ranks = {r"model.layers.1.*.(q|v)_proj": 2, "q_proj": 4, "proj": 1}
    alphas = {"self_attn.k_proj": 4.0, r"layers.\d.mlp.up_proj": 32}
    cut = {(layer, kind): 8 for layer in range(3) for kind in ("k", "o", "v", "gate", "up", "down")}
    cut |= {(0, "q"): 4, (2, "q"): 4, (1, "q"): 2, (1, "v"): 2}

    def shorten(tensors: dict[str, Array]) -> None:
        for (layer, kind), rank in cut.items():
            for name in list(tensors):
                if f"layers.{layer}." in name and f".{kind}_proj." in name:
                    shape = (slice(rank), slice(None))
                    rows, columns = shape if "lora_A" in name else shape[::-1]
                    tensors[name] = tensors[name][rows, columns].copy()

    change_tensors(folder, shorten)
    change_fields(folder, rank_pattern=ranks, alpha_pattern=alphas)
    found, wanted = read_peft(folder, adapter_config()), random_adapter(BASE, 8)
    assert found.rank == 8
    for place, (a, b) in wanted.items():
        rank, kind = cut[place], place[1]
        alpha = {"k": 4, "up": 32}.get(kind, 16)
        # What was written is b by 2, its scale.
        assert np.array_equal(found.parts[place].a, a[:, :rank])
        assert np.allclose(found.parts[place].b, b[:rank] / 2 * alpha / rank, rtol=1e-6)


def test_a_rank_beyond_the_engines_is_refused_where_it_is_set(tmp_path: Path) -> None:
    folder = write_peft(BASE, tmp_path / "one", rank=4, targets="q")
    # The rank of all does not count where each has its own.
    change_fields(folder, r=16, rank_pattern={"q_proj": 4})
    assert read_peft(folder, adapter_config()).rank == 4
    change_fields(folder, r=4, rank_pattern={"q_proj": 16})
    refused(folder, "rank_pattern")


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rooted", [False, True])
def test_patterns_are_those_of_peft(tmp_path: Path, *, rooted: bool) -> None:
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    base = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(
        BASE, dtype=torch.float32
    )
    given = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        use_rslora=rooted,
        init_lora_weights=False,
        target_modules="all-linear",
        rank_pattern={r"layers\.1\..*_proj": 2, "^k_proj": 3, "mlp.up_proj": 4, "down": 1},
        alpha_pattern={
            "q_proj": 3,
            r"model.layers.[12].self_attn.v_proj": 40,
            "gate_proj|o_proj": 5,
        },
    )
    tuned = peft.get_peft_model(base, given)
    tuned.save_pretrained(tmp_path)
    found = read_peft(tmp_path, adapter_config())
    for layer, block in enumerate(tuned.base_model.model.model.layers):
        for kind, module in {
            **{kind: getattr(block.self_attn, f"{kind}_proj") for kind in "qkvo"},
            **{kind: getattr(block.mlp, f"{kind}_proj") for kind in ("gate", "up", "down")},
        }.items():
            part = found.parts[layer, kind]
            delta = module.get_delta_weight("default").detach().numpy().T
            assert part.a.shape[1] == module.r["default"]
            np.testing.assert_allclose(part.a @ part.b, delta, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("engine", ["float32", "float16"])
def test_other_types_become_the_engines(tmp_path: Path, dtype: type, engine: str) -> None:
    folder = write_peft(BASE, tmp_path / "one", dtype=dtype, targets="q v")
    found, wanted = (
        read_peft(folder, adapter_config(dtype=engine)),
        random_adapter(BASE, 8, targets="q v"),
    )
    assert {target for _, target in found.parts} == {"q", "v"}
    part = found.parts[1, "q"]
    assert {one.dtype for one in part} == {np.dtype(engine)}
    assert np.allclose(part.a, wanted[1, "q"][0].astype(dtype).astype(engine))


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.model.language_model",
        "base_model.model.language_model.model",
        "base_model.model.model.text_model",
    ],
)
def test_the_text_of_models_that_see_is_found(tmp_path: Path, prefix: str) -> None:
    folder = write_peft(BASE, tmp_path / "one", prefix=prefix)
    assert (0, "down") in read_peft(folder, adapter_config()).parts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modules_to_save", ["lm_head"]),
        ("use_dora", True),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": "4"}),
        ("rank_pattern", {"q_proj": True}),
        ("rank_pattern", {"(q_proj": 4}),
        ("rank_pattern", {"(q+)+": 4}),
        ("rank_pattern", {"(?=q).*": 4}),
        ("rank_pattern", {"q" * 300: 4}),
        ("alpha_pattern", {".*.*.*.*": 4}),
        ("alpha_pattern", {"(q_proj)?\\1": 4}),
        ("alpha_pattern", {"q_proj": "4"}),
        ("alpha_pattern", {"q_proj": None}),
        ("alpha_pattern", {"q_proj": 10**400}),
        ("init_lora_weights", "pissa"),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [3]),
        ("of_a_later_version", "something"),
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("r", 0),
        ("r", "8"),
        ("r", 16),
        ("r", True),
        ("r", 10**400),
        ("use_rslora", "no"),
        ("lora_alpha", 10**400),
        ("lora_alpha", "16"),
        ("lora_alpha", None),
        ("base_model_name_or_path", ["qwen3"]),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_name(
    tmp_path: Path, field: str, value: Any
) -> None:
    folder = write_peft(BASE, tmp_path / "one")
    change_fields(folder, **{field: value})
    refused(folder, field)


def moved(tensors: dict[str, Array], source: str, target: str) -> None:
    tensors[target] = tensors.pop(source)


TENSORS: list[tuple[str, Any]] = [
    (A, lambda t: t.update({A: t[A][:4]})),
    (B, lambda t: t.update({B: t[B][:-1]})),
    (A, lambda t: t.update({A: t[A].astype(np.int32)})),
    (A, lambda t: t.update({A: t[A].astype(np.float64)})),
    (B, lambda t: t.update({B: np.full_like(t[B], np.inf)})),
    (B, lambda t: t.pop(A)),
    ("lm_head.lora_A.weight", lambda t: moved(t, A, "lm_head.lora_A.weight")),
    (A.replace("q_proj", "x_proj"), lambda t: moved(t, A, A.replace("q_proj", "x_proj"))),
    (A.replace(".1.", ".9."), lambda t: moved(t, A, A.replace(".1.", ".9."))),
    (A, lambda t: t.update(
        {A.replace("A.weight", "A.default.weight"): t[A]}
    )),
    (B.replace("lora_B.weight", "lora_magnitude_vector"), lambda t: t.update(
        {B.replace("lora_B.weight", "lora_magnitude_vector"): t[B]}
    )),
    ("adapter_model.safetensors", lambda t: (t.pop(A), t.pop(B))),
    ("adapter_model.safetensors", lambda t: t.clear()),
]  # fmt: skip


@pytest.mark.parametrize(("field", "change"), TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, field: str, change: Any
) -> None:
    folder = write_peft(BASE, tmp_path / "one")
    change_tensors(folder, change)
    refused(folder, field)


def test_numbers_beyond_the_engines_type_are_refused(tmp_path: Path) -> None:
    folder = write_peft(BASE, tmp_path / "one", alpha=1e9)
    change_tensors(folder, lambda tensors: tensors.update({B: tensors[B] * 0 + 1e3}))
    assert read_peft(folder, adapter_config())
    refused(folder, B, dtype="float16")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xff\xff", b"[]"])
def test_a_file_that_is_missing_or_damaged_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    folder = write_peft(BASE, tmp_path / "one")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    refused(folder, name)


def test_a_file_that_is_cut_short_names_a_tensor(tmp_path: Path) -> None:
    folder = write_peft(BASE, tmp_path / "one")
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(HearthError, match="cut short") as caught:
        read_peft(folder, adapter_config())
    assert caught.value.code == "adapter_invalid"


def twice(data: bytes) -> bytes:
    """The file with the first key of its header a second time."""
    length = int.from_bytes(data[:8], "little")
    key, value = next(iter(json.loads(data[8 : 8 + length]).items()))
    more = data[8 : 8 + length].rstrip()[:-1] + f",{json.dumps(key)}:{json.dumps(value)}}}".encode()
    return len(more).to_bytes(8, "little") + more + data[8 + length :]


@pytest.mark.parametrize("change", [lambda data: data + bytes(4096), twice], ids=["tail", "twice"])
def test_a_file_that_says_less_or_more_than_it_holds_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    folder = write_peft(BASE, tmp_path / "one")
    path = folder / "adapter_model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    refused(folder, path.name)


def test_a_file_that_is_cut_while_it_is_read_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_peft(BASE, tmp_path / "one")

    def cut(file: TensorFile, name: str) -> Array:
        os.truncate(folder / "adapter_model.safetensors", 5000)
        return whole(file, name)

    whole = TensorFile.read
    monkeypatch.setattr(TensorFile, "read", cut)
    with pytest.raises(HearthError, match="changed while") as caught:
        read_peft(folder, adapter_config())
    assert caught.value.code == "adapter_invalid"


@pytest.mark.parametrize("spoilt", [False, True])
def test_an_adapter_takes_one_handle_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, spoilt: bool
) -> None:
    folder = write_peft(BASE, tmp_path / "one")
    if spoilt:
        change_tensors(folder, lambda tensors: tensors.update({B: tensors[B] * np.nan}))
    before, most, whole = open_handles(), [0], TensorFile.read

    def read(file: TensorFile, name: str) -> Array:
        found = whole(file, name)
        most.append(open_handles())
        return found

    monkeypatch.setattr(TensorFile, "read", read)
    refused = refusal(read_peft, folder)
    assert (refused is None) != spoilt
    assert max(most) == before + 1
    # The error and its frames are alive still.
    assert open_handles() == before


def open_handles() -> int:
    return sum(1 for _ in os.scandir("/proc/self/fd"))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_holds_nobody_up(tmp_path: Path, name: str) -> None:
    folder = write_peft(BASE, tmp_path / "one")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder, name)


def test_pickled_tensors_are_not_read(tmp_path: Path) -> None:
    folder = write_peft(BASE, tmp_path / "one")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused(folder, "adapter_model.bin")


def test_an_engine_without_adapters_says_how_to_get_one(tmp_path: Path) -> None:
    folder = write_peft(BASE, tmp_path / "one")
    with pytest.raises(HearthError, match="--max-lora-rank") as caught:
        read_peft(folder, adapter_config(0))
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "adapter")


@pytest.mark.parametrize("base", ["Qwen/Qwen3-0.6B", "/home/someone/qwen3-0.6b/", "", None])
def test_the_base_is_known_by_the_last_part_of_its_name(tmp_path: Path, base: str | None) -> None:
    folder = write_peft(BASE, tmp_path / "one", base_model_name_or_path=base)
    for name in ("Qwen3-0.6B", "", "Qwen3-1.7B"):
        config = adapter_config(model_name=name)
        assert (found := read_peft(folder, config).base) == (base or "")
        warned = bool(base) and name == "Qwen3-1.7B"
        assert ("trained for" in other_base(found, config)) == warned


def test_an_engine_of_some_projections_takes_adapters_of_these(tmp_path: Path) -> None:
    both, all_of_them = (
        write_peft(BASE, tmp_path / f"of {targets}", targets=targets) for targets in ("q v", "")
    )
    config = structs.replace(adapter_config(), lora_targets=("q", "v"))
    assert {target for _, target in read_peft(both, config).parts} == {"q", "v"}
    with pytest.raises(HearthError, match="--lora-targets") as caught:
        read_peft(all_of_them, config)
    assert caught.value.code == "adapter_invalid"


def test_an_adapter_of_some_layers_is_whole(tmp_path: Path) -> None:
    folder = write_peft(BASE, tmp_path / "one", layers_to_transform=[0])
    change_tensors(folder, lambda tensors: (tensors.pop(A), tensors.pop(B)))
    assert (1, "q") not in read_peft(folder, adapter_config()).parts


def refused(folder: Path, field: str, **fields: Any) -> None:
    with pytest.raises(HearthError) as caught:
        read_peft(folder, adapter_config(**fields))
    assert (caught.value.code, caught.value.field) == ("adapter_invalid", field)
