from daemon.configuration.settings import GROUPS, SETTINGS
from daemon.configuration.words import allowed, shown

_HEAD = """\
# Settings of the service, each with what it is where nothing is said. docs/configuration.md tells
# more; `hearth check` says what they lead to, `systemctl reload hearth` takes what changed.
"""


def example() -> str:
    """A settings file that has every setting, commented out."""
    return _HEAD + "".join(
        f"\n\n# ---- {title} ----\n{''.join(map(_commented, names))}"
        for title, names in GROUPS.items()
    )


def _commented(name: str) -> str:
    setting = SETTINGS[name]
    values = allowed(setting.type, setting.declared.form).capitalize()
    return f"\n# {setting.declared.description} {values}.\n# {name} = {shown(setting.default)}\n"
