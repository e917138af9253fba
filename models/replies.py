"""Answers to intents: a JSON action, a sentence, a list or a plan."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from models.domain import Combination, Device, Draw, Intent, Pending, Reply
from models.vocabulary import PLURALS, kind_of
from models.wording import may_ask, question

Answer = Callable[[Intent, Draw], Reply]
Step = dict[str, str]

OFF: Final[dict[str, str | Step]] = {
    "light": "turn_off", "plug": "turn_off", "fan": "turn_off", "tv": "turn_off",
    "heater": "turn_off", "speaker": "pause", "lock": "lock", "blind": "close",
}  # fmt: skip


def _typed(value: str) -> str | int:
    return int(value) if value.isdigit() else value


def as_json(step: Mapping[str, str]) -> str:
    """Return a step as compact JSON with its keys in the order given."""
    fields = {key: _typed(value) for key, value in step.items()}
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)


def combination_of(step: Mapping[str, str]) -> Combination:
    """Return the combination that one step of a plan uses."""
    action, device, *rest = step.values()
    return Combination(action, device, "|".join(rest))


def action(intent: Intent, draw: Draw) -> Reply:
    """Answer with one JSON action that holds the slots."""
    return Reply(as_json({"action": intent.name, **draw.slots}))


def by(name: str, value: str) -> Answer:
    """Return an answer with an action on the device by an amount that the user left open."""

    def answer(_: Intent, draw: Draw) -> Reply:
        step = {"action": name, "device": draw.slots["device"], "value": value}
        return Reply(as_json(step), (combination_of(step),))

    return answer


def chosen(name: str, *kinds: str, in_room: bool = True, **fields: str) -> Answer:
    """Return an answer with an action on the one listed device of these kinds, in a room if told.

    Other slots and `fields` are its fields. Where there are several devices it asks which.
    """

    def answer(_: Intent, draw: Draw) -> Reply:
        slots = {key: value for key, value in draw.slots.items() if not (in_room and key == "room")}
        slots.update(fields)
        room = draw.slots.get("room") if in_room else None
        found = [d for d in draw.context.devices if d.kind in kinds and room in {None, d.room}]
        if not found:
            return Reply("There is nothing here for that.", empty=True)
        if len(found) == 1:
            step = {"action": name, "device": found[0].name, **slots}
            return Reply(as_json(step), (combination_of(step),))
        if not may_ask(found):
            return Reply("")
        names = tuple(device.name for device in found)
        return Reply(question(names), pending=Pending(name, slots, names))

    return answer


def every(name: str) -> Answer:
    """Return an answer with one step for each listed device of the kind that a word names."""

    def answer(_: Intent, draw: Draw) -> Reply:
        kind, room = kind_of(draw.slots["kinds"]), draw.slots.get("room")
        found = [d for d in draw.context.devices if d.kind == kind and room in {None, d.room}]
        return _plan([{"action": name, "device": device.name} for device in found])

    return answer


def says(template: str) -> Answer:
    """Return an answer that is a sentence with the slots filled in."""
    return lambda _, draw: Reply(template.format(**draw.slots))


def _plan(steps: Sequence[Step]) -> Reply:
    if not steps:
        return Reply("There is nothing to do.", empty=True)
    text = ",".join(as_json(step) for step in steps)
    return Reply(f"[{text}]", tuple(combination_of(step) for step in steps))


def scene(kinds: Mapping[str, str | Step]) -> Answer:
    """Return an answer with one step for each listed device of these kinds, in list order."""

    def answer(_: Intent, draw: Draw) -> Reply:
        room = draw.slots.get("room")
        chosen = [d for d in draw.context.devices if d.kind in kinds and room in {None, d.room}]
        return _plan([_scene_step(kinds[device.kind], device) for device in chosen])

    return answer


def _scene_step(rule: str | Step, device: Device) -> Step:
    if isinstance(rule, str):
        return {"action": rule, "device": device.name}
    return {"action": rule["action"], "device": device.name, "value": rule["value"]}


def fetch(_: Intent, draw: Draw) -> Reply:
    """Answer with the steps that bring an item from one room to another."""
    slots = draw.slots
    robot = {"device": slots["device"]}
    return _plan(
        [
            {"action": "go", **robot, "room": slots["from"]},
            {"action": "pick", **robot, "item": slots["item"]},
            {"action": "go", **robot, "room": slots["to"]},
            {"action": "give", **robot, "item": slots["item"]},
        ]
    )


def patrol(_: Intent, draw: Draw) -> Reply:
    """Answer with a visit to three rooms and the way back to the dock."""
    device = draw.slots["device"]
    rooms = [draw.slots[key] for key in ("first", "second", "third")]
    visits = [{"action": "go", "device": device, "room": room} for room in rooms]
    return _plan([*visits, {"action": "dock", "device": device}])


def tidy(_: Intent, draw: Draw) -> Reply:
    """Answer with the steps that put an item on a surface of a room."""
    slots = draw.slots
    robot = {"device": slots["device"]}
    return _plan(
        [
            {"action": "pick", **robot, "item": slots["item"]},
            {"action": "go", **robot, "room": slots["room"]},
            {"action": "place", **robot, "surface": slots["surface"]},
        ]
    )


def _listing(head: str, names: Sequence[str], none: str) -> Reply:
    text = f"{head}: {', '.join(names)}." if names else none
    return Reply(text, empty=not names)


def list_room(_: Intent, draw: Draw) -> Reply:
    """Answer with the devices of a room."""
    room = draw.slots["room"]
    names = [d.name for d in draw.context.devices if d.room == room]
    return _listing(f"In the {room}", names, f"There are no devices in the {room}.")


def list_kind(_: Intent, draw: Draw) -> Reply:
    """Answer with the devices of a kind."""
    kinds = draw.slots["kinds"]
    names = [d.name for d in draw.context.devices if PLURALS[d.kind] == kinds]
    return _listing(f"The {kinds}", names, f"There are no {kinds}.")


def list_on(_: Intent, draw: Draw) -> Reply:
    """Answer with the devices that are listed as on."""
    names = [d.name for d in draw.context.devices if d.state.split()[0] == "on"]
    return _listing("These are on", names, "Nothing is on.")


def list_all(_: Intent, draw: Draw) -> Reply:
    """Answer with every device in list order."""
    return _listing("Your devices", [d.name for d in draw.context.devices], "")


def count_room(_: Intent, draw: Draw) -> Reply:
    """Answer with the number of devices in a room."""
    room = draw.slots["room"]
    count = sum(d.room == room for d in draw.context.devices)
    noun = "device" if count == 1 else "devices"
    return Reply(f"There {'is' if count == 1 else 'are'} {count} {noun} in the {room}.")


_NO: Final = frozenset({"off", "unlocked", "closed"})


def is_so(_: Intent, draw: Draw) -> Reply:
    """Answer whether a device is on, locked or open."""
    device, state = draw.slots["device"], draw.slots["state"]
    return Reply(f"{'No' if state in _NO else 'Yes'}, the {device} is {state}.")
