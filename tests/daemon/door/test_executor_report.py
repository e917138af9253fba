from hearth.actors.supervisor_messages import ExecutorMetrics
from hearth.daemon.door.replies import executor_report
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.request import RowRound
from hearth.runtime.runner.image_merge import MultimodalMetrics
from hearth.runtime.speculation.policy import EagleGenerationMetrics
from hearth_client.protocol import ImagesReport


def test_every_metric_is_reported_under_its_name() -> None:
    speculation = EagleGenerationMetrics()
    speculation.record([RowRound(0, 8, 3)], draft_s=0.25, verify_s=0.5, commit_s=0.125)
    report = executor_report(
        ExecutorMetrics(StageMetrics(1, 40, 0.5), StageMetrics(9, 30, 1.5), speculation)
    )
    assert (report.prefill.steps, report.prefill.tokens, report.prefill.seconds) == (1, 40, 0.5)
    assert (report.generation.steps, report.generation.tokens) == (9, 30)
    told = report.speculation
    assert told is not None
    for name in EagleGenerationMetrics.__struct_fields__:
        assert getattr(told, name) == getattr(speculation, name)
    assert told.accept_length == 3.0


def test_an_executor_that_did_not_speculate_says_nothing_of_it() -> None:
    metrics = ExecutorMetrics(StageMetrics(), StageMetrics(), EagleGenerationMetrics())
    assert executor_report(metrics).speculation is None


def test_images_are_told_where_there_were_some() -> None:
    metrics = ExecutorMetrics(StageMetrics(), StageMetrics(), EagleGenerationMetrics())
    assert executor_report(metrics).images is None
    metrics.images = MultimodalMetrics(2, 98, 0.25, 1, 0.5)
    assert executor_report(metrics).images == ImagesReport(
        images=2, tokens=98, merge_seconds=0.25, encoded=1, encode_seconds=0.5
    )


def test_a_prefix_cache_is_told_where_there_is_one() -> None:
    metrics = ExecutorMetrics(StageMetrics(), StageMetrics(), EagleGenerationMetrics())
    assert executor_report(metrics).prefix is None
    metrics.prefix = PrefixMetrics(rows=2, hits=1, queried=90, reused=64, bytes={"device": 5})
    told = executor_report(metrics).prefix
    assert told is not None
    assert (told.rows, told.hits, told.queried, told.reused) == (2, 1, 90, 64)
    assert told.bytes == {"device": 5}
