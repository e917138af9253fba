from tests.references import reference_folder
from tools.hops import Call, Turn, figures, profile_turn, steady_turn


def test_the_steady_turn_is_the_most_common_one() -> None:
    first = Turn(step=[Call("a.py", "warm_up")] * 9)
    steady = Turn(step=[Call("a.py", "step")], rest=[Call("b.py", "tell")])
    report = Turn(step=[Call("a.py", "step")], rest=[Call("b.py", "report")] * 4)
    assert steady_turn([first, steady, report, steady]) is steady


def test_a_turn_begins_with_its_step_and_ends_before_the_next() -> None:
    turn = profile_turn(reference_folder("qwen3"))
    functions = [call.function for call in turn.step]
    assert functions[0] == "step"
    assert functions.count("step") == functions.count("launch") == 1
    assert "_tell" in {call.function for call in turn.rest}
    assert (turn.frames[0].function, turn.frames[-1].function) == ("run", "launch")
    counted = figures(turn)
    assert counted["calls"] == len(turn.step) < counted["turn_calls"]
    assert counted["files"] < counted["turn_files"]
