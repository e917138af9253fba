from pathlib import Path

import pytest
from click.testing import CliRunner

from hearth.bench.vision.asking import Asked, Rates
from hearth.bench.vision.command import vision
from hearth.bench.vision.figures import (
    Looks,
    SizeFigures,
    VisionFigures,
    beside_figures,
    hidden_figures,
    missed_aims,
    ratio_of,
    size_figures,
)
from hearth.bench.vision.session import SIZES, photograph, renamed
from hearth.bench.vision.worker import PictureJob, PictureWorker
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.image_processing.decoding import decode
from hearth.runtime.image_processing.headers import read_header
from tests.bench.running import hide, run
from tests.vision_models import write_vision_model


@pytest.mark.slow
def test_the_command_measures_every_stage_without_a_peer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hidden := tmp_path / "hidden").mkdir()
    hide(hidden, "torch", monkeypatch)
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    code, figures = run("vision", "--model", str(model), "--cache", str(tmp_path), "--quick")
    assert code == 0
    assert set(figures["sizes"]) == {"224x224", "640x480", "1920x1080"}
    for size in figures["sizes"].values():
        assert min(size["decode_ms"], size["engine_ms"], size["prefill_ms"], size["ttft_ms"]) > 0
    assert figures["cached_ms"] > 0
    assert figures["text_row_loss"] < 1
    assert figures["beside"]["text_tokens_per_s"] > 0
    assert figures["hidden"]["images"] == 4
    assert (figures["preprocess_vs_transformers"], figures["ttft_vs_transformers"]) == (None, {})
    assert figures["memory_mb"]["daemon"] > 0
    assert [one.partition(":")[0] for one in figures["notes"]] == ["transformers"]


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = CliRunner().invoke(vision, ["--model", str(tmp_path)], standalone_mode=False)
    assert isinstance(found.exception, HearthError)
    assert str(tmp_path) in found.exception.message


def asked(ttft: float = 0.03, token: int = 7) -> Asked:
    return Asked(
        ttft=ttft,
        tokenize=0.001,
        decode=0.002,
        resize=0.003,
        engine=0.01,
        hand_over=0.0005,
        queue=0.0001,
        prefill=0.008,
        token=token,
        tokens=49,
        cached=False,
    )


def looks(**seconds: list[float]) -> Looks:
    named = {name.replace("__", " "): one for name, one in seconds.items()}
    return Looks([asked(), asked(0.02), asked(0.04)], {"hearth patches": [0.005], **named}, 7)


def test_a_size_has_medians_and_the_ratios_to_the_peers_that_there_are() -> None:
    found = size_figures(
        looks(transformers__first_token=[0.06, 0.09, 0.01], transformers__patches=[0.01])
    )
    assert (found.ttft_ms, found.decode_ms, found.hand_over_ms) == pytest.approx((30, 2, 0.5))
    assert found.ttft_vs_transformers == pytest.approx(2)
    assert found.preprocess_vs_transformers == pytest.approx(2)
    assert (found.preprocess_vs_torchvision, found.same_token) == (None, True)
    alone = size_figures(Looks([asked()], {"hearth patches": [0.005]}))
    assert (alone.ttft_vs_transformers, alone.same_token) == (None, None)


def test_what_was_kept_is_ready_after_all_stages() -> None:
    assert asked().encode == pytest.approx(0.0155)
    assert asked().ready == pytest.approx(0.0165)


def test_the_smallest_ratio_counts_and_none_without_a_peer() -> None:
    fast = size_figures(looks(transformers__patches=[0.05]))
    slow = size_figures(looks(transformers__patches=[0.004]))
    sizes = {"a": fast, "b": slow}
    assert ratio_of(sizes, "preprocess_vs_transformers") == pytest.approx(0.8)
    assert ratio_of(sizes, "preprocess_vs_torchvision") is None


def test_what_is_encoded_while_a_reply_streams_is_hidden() -> None:
    encodes, replies = [(0.0, 1.0), (0.5, 2.0), (5.0, 6.0)], [(1.5, 3.0), (2.5, 5.5), (9.0, 9.5)]
    found = hidden_figures(encodes, replies, new=[3.0, 2.0], kept=[1.0], encode_s=0.05)
    assert found.share == pytest.approx((0.5 + 0.5) / 3)
    assert (found.images, found.new_s, found.encode_ms) == (3, 2.5, 50)


def test_both_rates_are_told_alone_and_beside_one_another() -> None:
    found = beside_figures(Rates(1000, 0), Rates(0, 20), Rates(800, 8), nice=10, clients=4)
    assert (found.text_tokens_per_s_alone, found.text_tokens_per_s) == (1000, 800)
    assert (found.images_per_s_alone, found.images_per_s) == (20, 8)


def figures(sizes: dict[str, SizeFigures], **changes: float | None) -> VisionFigures:
    ttft = {name: one.ttft_vs_transformers or 0 for name, one in sizes.items()}
    made = VisionFigures(
        precision="float32",
        sizes=sizes,
        preprocess_vs_transformers=ratio_of(sizes, "preprocess_vs_transformers"),
        preprocess_vs_torchvision=None,
        ttft_vs_transformers=ttft,
        cached_ms=1.0,
        cached_p90_ms=1.5,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_missed_aims_are_named_and_what_was_not_measured_misses_none() -> None:
    quick = size_figures(looks(transformers__first_token=[0.09], transformers__patches=[0.01]))
    sizes = {"224x224": quick, "640x480": quick}
    assert missed_aims(figures(sizes, text_row_loss=0.04)) == []
    assert missed_aims(figures(sizes, preprocess_vs_transformers=None)) == []
    slow = size_figures(looks(transformers__first_token=[0.03], transformers__patches=[0.004]))
    late = figures(dict.fromkeys(sizes, slow), cached_ms=2.0, text_row_loss=0.06)
    assert len(missed_aims(late)) == 5


def test_a_photograph_is_a_file_of_its_size_and_the_same_each_time() -> None:
    size = SIZES[0]
    data = photograph(size)
    picture = read_header(memoryview(data))
    assert (picture.kind, picture.width, picture.height) == ("jpeg", *size)
    assert data == photograph(size)
    assert data != photograph(size, seed=1)


def test_a_renamed_one_has_the_same_pixels_in_other_bytes() -> None:
    data = photograph(SIZES[0])
    files = [data, renamed(data, 1), renamed(data, 2)]
    assert len(set(files)) == 3
    pixels = [decode(memoryview(one), read_header(memoryview(one))).tobytes() for one in files]
    assert len(set(pixels)) == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("seeing") / "model", "qwen3_vl")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "picture.jpg"
    file.write_bytes(photograph(SIZES[0]))
    return file


def test_hearth_makes_patches_and_nothing_else(model: Path, picture: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    export_model(model, engine, ExportOptions(max_batch=1, capacity=64))
    worker = PictureWorker(PictureJob(contender="hearth", path=str(engine)), tmp_path / "log")
    assert worker.works == ["patches"]
    looked = worker.look("patches", picture)
    assert looked.seconds > 0
    assert looked.rss_bytes > 0
    with pytest.raises(HearthError, match="in its daemon"):
        worker.look("first_token", picture)
    worker.close()


def test_a_missing_library_says_what_installs_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(tmp_path, "torch", monkeypatch)
    job = PictureJob(contender="transformers", path=str(model))
    with pytest.raises(HearthError, match="pip install torch"):
        PictureWorker(job, tmp_path / "log")
