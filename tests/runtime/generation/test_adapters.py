"""Adapters in a runtime, beside engines of checkpoints into which they were merged."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.known_answer import load_answer
from hearth.runtime.lora.stored import store_adapter
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import CacheUse, GenerationRequest, RequestOptions, RowRequest
from tests.low_rank_models import merge, random_adapter
from tests.peft_models import write_peft
from tests.references import reference_folder
from tests.runtime.export.trees import export_with_draft
from tests.runtime.generation.image_models import STORE, image_rows
from tests.vision_models import write_vision_model

PROMPT = [3, 14, 15, 92, 6, 5, 35]
OFF = SpeculationOptions(method="off")
Answer = tuple[list[int], list[float]]


def opened(folder: Path, speculation: SpeculationOptions = OFF) -> LLMInferenceRuntime:
    options = RuntimeOptions(threads=1, max_batch=2, capacity=128, speculation=speculation)
    return LLMInferenceRuntime.open(folder, options, embeddings=STORE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with a draft, two adapters, and engines of the weights with each merged."""
    place, base = tmp_path_factory.mktemp("adapters"), reference_folder("qwen3")
    write_peft(base, place / "first", rank=8)
    write_peft(base, place / "second", rank=4, targets="q v", use_rslora=True, seed=1)
    export_with_draft("qwen3", place, max_lora_rank=8)
    for name, adapter in (
        ("first", random_adapter(base, 8)),
        ("second", random_adapter(base, 4, targets="q v", seed=1)),
    ):
        merged = merge(base, place / f"{name}_merged", adapter)
        export_model(merged, place / f"{name}_engine", ExportOptions())
    return place


@pytest.fixture
def runtime(folder: Path) -> Iterator[LLMInferenceRuntime]:
    with closing(opened(folder / "engine")) as made:
        for name in ("first", "second"):
            made.load_adapter(name, folder / name)
        yield made


def row(adapter: str = "", max_tokens: int = 12) -> RowRequest:
    options = RequestOptions(max_tokens=max_tokens, ignore_eos=True, adapter=adapter)
    return RowRequest(token_ids=list(PROMPT), prompt_length=len(PROMPT), options=options)


def answer(runtime: LLMInferenceRuntime, adapter: str = "") -> Answer:
    request = GenerationRequest(rows=[row(adapter), row(adapter, 20)])
    short, long = runtime.handle_request(request).rows
    assert (short.error, long.error) == (None, None)
    assert long.token_ids[:12] == short.token_ids
    return long.token_ids, long.logprobs


@pytest.mark.parametrize("name", ["first", "second"])
def test_an_adapter_answers_as_weights_do_that_hold_it(
    folder: Path, runtime: LLMInferenceRuntime, name: str
) -> None:
    with closing(opened(folder / f"{name}_engine")) as merged:
        wanted, logprobs = answer(merged)
    got, own = answer(runtime, name)
    assert got == wanted != answer(runtime)[0]
    assert np.allclose(own, logprobs, atol=1e-4)


def test_switching_back_is_exact(runtime: LLMInferenceRuntime) -> None:
    before = answer(runtime)
    others = [answer(runtime, name) for name in ("first", "second", "first")]
    assert others[0] == others[2] != others[1]
    assert answer(runtime) == before


def test_no_switch_misses_a_graph(folder: Path, runtime: LLMInferenceRuntime) -> None:
    runtime.unload_adapter("second")
    assert runtime.capture([1, 2]) == []
    # Steps are captured with what is loaded later, too, and while rows go on.
    runtime.admit([row("first", 8)])
    for _ in range(3):
        runtime.step()
    runtime.load_adapter("second", folder / "second")
    while runtime.active:
        runtime.step()
    expected, counters = answer(runtime, "second"), runtime.counters
    for name in ("", "first", "second", "", "second"):
        misses, hits = counters.misses, counters.hits
        found = answer(runtime, name)
        # Of two chunks of prompt at most, which have any width.
        assert counters.misses - misses <= 2 < counters.hits - hits == 19
    assert found == expected
    assert (counters.failed_captures, counters.fallbacks) == (0, 0)


def test_an_adapter_that_is_unloaded_leaves_nothing_behind(
    folder: Path, runtime: LLMInferenceRuntime
) -> None:
    runtime.capture([1])
    executor = runtime._runner.executor
    expected, kept = answer(runtime, "second"), len(executor._graphs)
    runtime.unload_adapter("second")
    assert (runtime.adapter, runtime.adapters) == ("", ["first"])
    assert len(executor._graphs) == kept * 2 // 3
    assert not any("second" in key for key in runtime._runner._steps._maps)
    with pytest.raises(HearthError, match="second") as caught:
        runtime.admit([row("second")])
    assert (caught.value.code, caught.value.field) == ("adapter_unknown", "adapter")
    runtime.load_adapter("second", folder / "second")
    assert len(executor._graphs) == kept
    assert answer(runtime, "second") == expected


def test_rows_that_run_together_share_an_adapter(runtime: LLMInferenceRuntime) -> None:
    with pytest.raises(HearthError, match="share") as caught:
        runtime.admit([row("first"), row("second")])
    assert (caught.value.code, caught.value.field) == ("invalid_value", "adapter")
    assert runtime.free == runtime.max_batch
    runtime.admit([row("first")])
    assert runtime.adapter == "first"
    runtime.step()
    for name in ("second", ""):
        with pytest.raises(HearthError, match="share"):
            runtime.admit([row(name)])
        with pytest.raises(HearthError, match="no row is active"):
            runtime.switch_adapter(name)
    with pytest.raises(HearthError, match="no row is active"):
        runtime.unload_adapter("first")
    runtime.unload_adapter("second")
    runtime.admit([row("first")])
    while runtime.active:
        runtime.step()
    runtime.switch_adapter("")
    runtime.unload_adapter("first")
    assert runtime.adapters == []


def test_a_folder_of_adapters_is_loaded_with_the_engine(folder: Path, tmp_path: Path) -> None:
    engine = folder / "engine"
    for name in ("first", "second"):
        store_adapter(folder / name, load_config(engine), tmp_path / "kept" / name)
    (tmp_path / "kept" / ".third.on.its.way").mkdir()
    (tmp_path / "kept" / "second" / "adapter.json").write_bytes(b"{")
    options = RuntimeOptions(threads=1, max_batch=1, capacity=64, adapters=str(tmp_path / "kept"))
    with closing(LLMInferenceRuntime.open(engine, options)) as runtime:
        assert runtime.adapters == ["first"]
        (refused,) = runtime.refused_adapters.items()
        assert (refused[0], refused[1].code) == ("second", "adapter_invalid")
        first, second = ((tmp_path / "kept" / name) for name in ("first", "second"))
        stored = [(one / "adapter.safetensors").stat().st_size for one in (first, second)]
        assert runtime._runner._lora is not None
        # With the zeros beside the diagonals of joined projections. Names count among a file's.
        own = runtime._runner._lora._get("first").block.nbytes
        assert own <= runtime.memory["adapters"] * stored[0] / sum(stored) < 1.6 * own
    missing = structs.replace(options, adapters=str(tmp_path / "nowhere"))
    with closing(LLMInferenceRuntime.open(engine, missing)) as runtime:
        assert (runtime.adapters, runtime.refused_adapters) == ([], {})
    (tmp_path / "nowhere").touch()
    with pytest.raises(HearthError) as caught:
        LLMInferenceRuntime.open(engine, missing)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "adapters")


def test_what_is_not_there_or_there_already_is_refused(
    folder: Path, runtime: LLMInferenceRuntime
) -> None:
    with pytest.raises(HearthError, match="already") as caught:
        runtime.load_adapter("first", folder / "first")
    assert caught.value.code == "invalid_value"
    for refused in (runtime.unload_adapter, runtime.switch_adapter):
        with pytest.raises(HearthError) as caught:
            refused("third")
        assert (caught.value.code, caught.value.field) == ("adapter_unknown", "adapter")
    with pytest.raises(HearthError) as caught:
        runtime.load_adapter("third", folder / "nowhere")
    assert caught.value.code == "adapter_invalid"
    assert runtime.adapters == ["first", "second"]


def test_an_engine_without_adapters_refuses_them(folder: Path) -> None:
    with closing(opened(folder / "first_engine")) as plain:
        with pytest.raises(HearthError, match="takes no adapters") as loading:
            plain.load_adapter("a", folder / "first")
        with pytest.raises(HearthError, match="takes no adapters") as checking:
            plain.check(row("a"))
        for caught in (loading, checking):
            assert (caught.value.code, caught.value.field) == ("unsupported_option", "adapter")
        plain.switch_adapter("")
        assert (plain.adapter, plain.adapters) == ("", [])


@pytest.mark.parametrize("method", ["lookup", "eagle"])
def test_speculation_leaves_it_as_it_is(
    folder: Path, runtime: LLMInferenceRuntime, method: str
) -> None:
    wanted = {name: answer(runtime, name) for name in ("", "first", "second")}
    speculation = SpeculationOptions(method=method, adaptive=False)  # type: ignore[arg-type] # one
    with closing(opened(folder / "engine", speculation)) as speculating:
        for name in ("first", "second"):
            speculating.load_adapter(name, folder / name)
        speculating.capture([1, 2])
        misses = speculating.counters.misses
        for name in ("first", "", "second", "first"):
            tokens, logprobs = answer(speculating, name)
            assert tokens == wanted[name][0]
            assert np.allclose(logprobs, wanted[name][1], atol=1e-4)
        assert speculating.counters.misses - misses <= 4 * 2
        assert speculating.speculation_metrics.rounds > 0


def test_prompts_are_kept_apart_by_the_numbers_of_their_adapter(folder: Path) -> None:
    options = RuntimeOptions(threads=1, max_batch=1, capacity=128, prefix_cache_bytes=1 << 20)
    prompt = [7 * n % 280 + 3 for n in range(70)]

    def ask(
        made: LLMInferenceRuntime, name: str, cache: CacheUse = "use"
    ) -> tuple[list[int], list[float], int]:
        asked = RequestOptions(max_tokens=4, ignore_eos=True, adapter=name, cache=cache)
        request = RowRequest(token_ids=list(prompt), prompt_length=70, options=asked)
        before = made.prefill_metrics.reused
        (found,) = made.handle_request(GenerationRequest(rows=[request])).rows
        return found.token_ids, found.logprobs, made.prefill_metrics.reused - before

    with closing(LLMInferenceRuntime.open(folder / "engine", options)) as made:
        for name in ("first", "second"):
            made.load_adapter(name, folder / name)
        names = ("", "first", "second")
        alone = {name: ask(made, name, "bypass") for name in names}
        assert [ask(made, name) for name in names] == [alone[name] for name in names]
        for name in names:
            tokens, logprobs, reused = ask(made, name)
            assert (tokens, reused) == (alone[name][0], 69)
            assert np.allclose(logprobs, alone[name][1], atol=1e-4)
        made.unload_adapter("first")
        made.load_adapter("other name", folder / "first")
        assert ask(made, "other name")[2] == 69


def test_text_behind_images_is_that_of_merged_weights(tmp_path: Path) -> None:
    source = write_vision_model(tmp_path / "model", "qwen3_vl")
    prefix = "base_model.model.model.language_model"
    adapter = write_peft(source, tmp_path / "adapter", targets="q o down", prefix=prefix)
    merge(source, tmp_path / "merged", random_adapter(source, 8, targets="q o down"))
    options: dict[str, Any] = {"prefill_chunk": 7, "max_batch": 3, "capacity": 256}
    engine = export_with_draft(source, tmp_path / "drafted", max_lora_rank=8, **options)
    export_model(tmp_path / "merged", tmp_path / "engine", ExportOptions(**options))
    rows = image_rows("qwen3_vl")[:2]
    adapted = [
        structs.replace(one, options=structs.replace(one.options, adapter="one")) for one in rows
    ]
    with closing(opened(tmp_path / "engine")) as merged:
        wanted = merged.handle_request(GenerationRequest(rows=rows)).rows
    drafting = SpeculationOptions(method="eagle", adaptive=False)
    with closing(opened(engine, drafting)) as runtime:
        runtime.load_adapter("one", adapter)
        got = runtime.handle_request(GenerationRequest(rows=adapted)).rows
        other = runtime.handle_request(GenerationRequest(rows=rows)).rows
        assert runtime.speculation_metrics.rounds > 0
        zeros = runtime._runner._resources.zero_buffer
        # Engines could write what NumPy may not.
        assert zeros is not None
        assert not zeros.array.any()
    for one, same, base in zip(got, wanted, other, strict=True):
        assert one.token_ids == same.token_ids
        assert np.allclose(one.logprobs, same.logprobs, atol=1e-4)
        assert not np.allclose(one.logprobs, base.logprobs, atol=1e-2)


def test_the_known_answer_is_that_of_no_adapter(folder: Path, runtime: LLMInferenceRuntime) -> None:
    known = load_answer(folder / "engine", runtime.config)
    assert known is not None
    answer(runtime, "first")
    runtime.check_answer(known)
    assert runtime.adapter == ""
    with closing(opened(folder / "first_engine")) as merged, pytest.raises(HearthError) as caught:
        merged.check_answer(known)
    assert caught.value.code == "wrong_answer"
