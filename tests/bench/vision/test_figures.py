import pytest

from hearth.bench.vision.asking import Asked, Rates
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
