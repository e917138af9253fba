import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hearth.daemon.cli.generate import generate
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from tests.peft_models import change_fields, write_peft
from tests.references import reference_folder


def run(*arguments: str, text: str | None = None) -> Result:
    result = CliRunner().invoke(generate, arguments, input=text, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_prompt_gives_one_line_with_the_four_names(tiny_engine: Path) -> None:
    result = run(str(tiny_engine), "--ids", "1,2,3", "--ids", "9", "--max-tokens", "8", "--json")
    found = lines(result)
    assert len(found) == 2
    for one in found:
        assert list(one) == ["token_ids", "text", "logprobs", "finish_reason"]
        assert len(one["token_ids"]) == len(one["logprobs"]) <= 8
        assert one["finish_reason"] in {"length", "stop"}
        assert all(value <= 0 for value in one["logprobs"])


def test_more_prompts_than_rows_run_in_several_batches_with_the_same_result(
    tiny_engine: Path,
) -> None:
    prompts = [f"prompt number {number}" for number in range(6)]
    together = lines(run(str(tiny_engine), "--max-tokens", "6", "--json", text="\n".join(prompts)))
    alone = [
        lines(run(str(tiny_engine), "--prompt", one, "--max-tokens", "6", "--json"))[0]
        for one in prompts
    ]
    assert [one["token_ids"] for one in together] == [one["token_ids"] for one in alone]


def test_an_end_token_is_part_of_the_ids_and_not_of_the_text(tiny_engine: Path) -> None:
    ends = json.loads((tiny_engine / "config.json").read_text())["eos_token_ids"]
    found = lines(run(str(tiny_engine), "--ids", "45", "--json"))[0]
    assert found["finish_reason"] == "stop"
    assert found["token_ids"][-1] in ends
    assert "<|im_end|>" not in found["text"]
    assert len(found["token_ids"]) < 90
    going_on = lines(run(str(tiny_engine), "--ids", "45", "--ignore-eos", "--json"))[0]
    assert going_on["finish_reason"] == "length"
    # The room of speculation is 4 of the 96 slots.
    assert len(going_on["token_ids"]) == 91


def test_what_was_chosen_for_memory_is_told(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = LLMInferenceRuntime.open

    def squeezed(*arguments: Any, **named: Any) -> LLMInferenceRuntime:
        runtime = opened(*arguments, **named)
        runtime.chosen = "1 row of 96 tokens"
        return runtime

    monkeypatch.setattr(LLMInferenceRuntime, "open", squeezed)
    result = run(str(tiny_engine), "--ids", "5", "--max-tokens", "2", "--json")
    assert (result.stderr, len(lines(result))) == ("1 row of 96 tokens\n", 1)


def test_alternatives_are_reported_on_demand(tiny_engine: Path) -> None:
    found = lines(
        run(str(tiny_engine), "--ids", "5", "--max-tokens", "2", "--logprobs", "3", "--json")
    )[0]
    assert [len(step) for step in found["top_logprobs"]] == [3, 3]


def test_the_same_seed_gives_the_same_text(tiny_engine: Path) -> None:
    arguments = (
        str(tiny_engine),
        "--ids",
        "5",
        "--temperature",
        "1",
        "--json",
        "--max-tokens",
        "9",
    )
    first, again = run(*arguments, "--seed", "3"), run(*arguments, "--seed", "3")
    other = run(*arguments, "--seed", "4")
    assert first.stdout == again.stdout
    assert first.stdout != other.stdout


def test_the_text_is_the_same_with_speculation_and_without(tiny_engine: Path) -> None:
    arguments = (str(tiny_engine), "--ids", "5,6,7,5,6", "--max-tokens", "40", "--json")
    plain = lines(run(*arguments, "--no-speculation"))[0]
    for flag in ((), ("--speculation",)):
        found = lines(run(*arguments, *flag))[0]
        assert (found["token_ids"], found["text"]) == (plain["token_ids"], plain["text"])
        # Several tokens a step are summed in another order than one.
        assert found["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-4)


def test_an_adapter_answers(tmp_path: Path) -> None:
    base, engine = reference_folder("qwen3"), tmp_path / "engine"
    export_model(base, engine, ExportOptions(max_lora_rank=4, capacity=96))
    adapter = write_peft(base, tmp_path / "adapter", rank=4)
    asked = (str(engine), "--ids", "1,2,3", "--max-tokens", "6", "--json")
    (found,) = lines(run(*asked, "--adapter", str(adapter)))
    assert found["token_ids"] != lines(run(*asked))[0]["token_ids"]
    change_fields(adapter, use_dora=True)
    with pytest.raises(HearthError, match="use_dora"):
        run(*asked, "--adapter", str(adapter))


def test_without_json_the_text_is_on_standard_output_and_the_rest_is_not(
    tiny_engine: Path,
) -> None:
    result = run(str(tiny_engine), "--prompt", "hello", "--max-tokens", "4")
    assert result.stdout.count("\n") >= 1
    assert "tokens/s" in result.stderr
    assert "tokens/s" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--ids", "1,2", "--max-tokens", "100"), "max_tokens"),
        (("--ids", "100000"), "token_ids"),
        (("--ids", "1", "--max-batch", "5"), "max_batch"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tiny_engine: Path, arguments: tuple[str, ...], field: str
) -> None:
    with pytest.raises(HearthError) as caught:
        run(str(tiny_engine), *arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "option",
    [
        ("--top-p", "7"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--seed", str(1 << 63)),
        ("--logprobs", "21"),
    ],
)
def test_what_no_engine_takes_is_wrong_usage(tmp_path: Path, option: tuple[str, str]) -> None:
    result = CliRunner().invoke(generate, [str(tmp_path), "--ids", "1", *option])
    assert result.exit_code == 2
    assert option[0][2:].replace("-", "_") in result.output


def test_a_system_message_needs_the_chat_template() -> None:
    result = CliRunner().invoke(generate, ["--system", "s", "--prompt", "x"])
    assert result.exit_code == 2
    assert "--system needs --chat" in result.output


def test_the_chat_template_is_applied_on_demand(tiny_engine: Path) -> None:
    arguments = (str(tiny_engine), "--prompt", "hi", "--max-tokens", "4", "--json")
    assert run(*arguments).stdout != run(*arguments, "--chat", "--system", "s").stdout


def test_the_chat_template_is_not_for_ids() -> None:
    result = CliRunner().invoke(generate, ["--chat", "--ids", "1,2"])
    assert result.exit_code == 2
    assert "leave --chat out" in result.output


@pytest.mark.parametrize("option", ["--threads", "--max-batch"])
def test_sizes_are_bounded_as_the_settings_are(option: str) -> None:
    result = CliRunner().invoke(generate, ["--ids", "1", option, "1025"])
    assert result.exit_code == 2
    assert option in result.output
