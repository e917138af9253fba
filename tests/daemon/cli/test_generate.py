import io
import json
from pathlib import Path
from typing import Any, cast

import click
import pytest
from click.testing import CliRunner, Result
from PIL import Image, ImageDraw

from hearth.daemon.cli.errors import Failure
from hearth.daemon.cli.generate import encode_prompt, generate, parse_ids, read_prompts
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.text import Tokenizer
from tests.peft_models import change_fields, write_peft
from tests.references import reference_folder
from tests.vision_models import FAMILIES, write_vision_model


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


class FakeTokenizer:
    def encode(self, text: str) -> list[int]:
        return [len(text)]

    def encode_chat(self, turns: list[tuple[str, str]]) -> list[int]:
        return [ord(role[0]) for role, _ in turns]


def parse(*values: str) -> tuple[list[int], ...]:
    unused: Any = None
    return parse_ids(unused, unused, values)


def test_ids_are_numbers_between_commas() -> None:
    assert parse("1,2,3", "7") == ([1, 2, 3], [7])


@pytest.mark.parametrize("value", ["", "1,", "a", "1 2", "1.5"])
def test_other_ids_are_refused(value: str) -> None:
    with pytest.raises(click.BadParameter, match="like 1,2,3"):
        parse(value)


def test_prompts_come_in_order_and_empty_lines_do_not_count() -> None:
    file = io.StringIO("c\n\n d \r\n")
    assert read_prompts(("a", "b"), ([1, 2],), file) == ["a", "b", [1, 2], "c", " d "]


def test_without_options_standard_input_is_read() -> None:
    @click.command()
    def command() -> None:
        click.echo(repr(read_prompts((), (), None)))

    assert CliRunner().invoke(command, input="x\ny\n").output == "['x', 'y']\n"


def test_an_empty_input_is_a_usage_error() -> None:
    with pytest.raises(click.UsageError, match="the input is empty"):
        read_prompts((), (), io.StringIO("\n"))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_file_in_another_encoding_is_refused_by_its_name(tmp_path: Path, errors: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"one\ntw\xf6\n")
    with (
        path.open(encoding="utf-8", errors=errors) as file,
        pytest.raises(Failure, match="prompts is not utf-8"),
    ):
        read_prompts((), (), file)


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("never read"))
    with pytest.raises(click.UsageError, match="give --prompt"):
        read_prompts((), (), None)


def test_encoding_raw_chat_and_ids() -> None:
    tokenizer = cast("Tokenizer", FakeTokenizer())
    assert encode_prompt("abc", tokenizer, chat=False, system=None) == [3]
    assert encode_prompt("abc", tokenizer, chat=True, system=None) == [ord("u")]
    assert encode_prompt("abc", tokenizer, chat=True, system="s") == [ord("s"), ord("u")]
    assert encode_prompt([5], tokenizer, chat=True, system="s") == [5]


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    options = ExportOptions(max_batch=2, capacity=512)
    export_model(write_vision_model(folder / "model", request.param), folder / "engine", options)
    return folder / "engine"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = []
    for number, colour in enumerate(("red", "blue")):
        image = Image.new("RGB", (96, 64), "white")
        ImageDraw.Draw(image).ellipse((8, 8, 56, 56), colour)
        paths.append(folder / f"{number}.{('png', 'jpg')[number]}")
        image.save(paths[-1])
    return [str(path) for path in paths]


def answers(engine: Path, *arguments: str) -> list[dict[str, Any]]:
    asked = (str(engine), "--chat", "--max-tokens", "4", "--ignore-eos", "--json")
    return lines(run(*asked, *arguments))


def test_what_is_seen_changes_what_is_said(seeing: Path, pictures: list[str]) -> None:
    red, blue = pictures
    prompts = ["--prompt", "What is it?", "--prompt", "Where?"]
    seen = [
        answers(seeing, *prompts, *images)
        for images in (
            ("--image", red),
            ("--image", red),
            ("--image", blue),
            ("--image", red, "--image", blue, "--system", "Look."),
        )
    ]
    assert [list(one) for one in seen[0]] == [
        ["token_ids", "text", "logprobs", "finish_reason"]
    ] * 2
    assert seen[0] == seen[1]
    logprobs = [one[0]["logprobs"][0] for one in seen]
    assert len(set(logprobs)) == 3


def test_a_file_that_is_no_picture_is_named(seeing: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(HearthError, match=r"broken\.png") as caught:
        answers(seeing, "--prompt", "x", "--image", str(broken))
    assert (caught.value.code, caught.value.field) == ("image_invalid", "image")


def test_a_model_that_sees_nothing_says_so(tiny_engine: Path, pictures: list[str]) -> None:
    with pytest.raises(HearthError) as caught:
        answers(tiny_engine, "--prompt", "x", "--image", pictures[0])
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "image")


def test_images_need_a_template(tiny_engine: Path, pictures: list[str]) -> None:
    with pytest.raises(click.UsageError):
        run(str(tiny_engine), "--prompt", "x", "--image", pictures[0])
