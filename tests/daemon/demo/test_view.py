import io

from rich.console import Console

from hearth.daemon.demo.show import Reply, show


def screen(*, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=100, highlight=False), stream


def two_replies() -> list[Reply]:
    replies = [Reply("first question"), Reply("second question")]
    replies[0].add("one ", 1)
    replies[1].add("uno ", 1)
    replies[0].add("two", 2)
    return replies


def test_figures_count_tokens() -> None:
    reply = Reply("q")
    assert reply.figures() == "waiting"
    reply.add("a", 1)
    assert reply.figures().startswith("1 tokens, first after ")
    assert "tokens/s" not in reply.figures()


def test_off_a_terminal_lines_say_whose_they_are() -> None:
    console, stream = screen(terminal=False)
    show(console, two_replies(), lambda: True)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "1 asks: first question"
    assert lines[2].startswith("1 ")
    assert lines[2].endswith("  one two")
    assert lines[3].endswith("  uno ")
    assert lines[4].startswith("1 done: 3 tokens")


def test_on_a_terminal_the_replies_stand_side_by_side() -> None:
    console, stream = screen(terminal=True)
    show(console, two_replies(), lambda: True)
    assert any("one two" in line and "uno" in line for line in stream.getvalue().splitlines())


def test_showing_goes_on_until_all_are_finished() -> None:
    console, stream = screen(terminal=False)
    replies = [Reply("q")]
    answers = iter([False, False, True])

    def finished() -> bool:
        replies[0].add("x" * 30, 1)
        return next(answers)

    show(console, replies, finished)
    assert stream.getvalue().count("x") == 90


def test_control_characters_of_the_model_are_not_shown() -> None:
    reply = Reply("q")
    reply.add("\x1b[2J", 1)
    assert reply.text == "\ufffd[2J"
