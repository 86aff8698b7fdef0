"""Choose Triton autotuning configs without a stopwatch: recorded, reviewed, and the same on every rank.

Importing this package imports neither torch nor triton: every name is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import add_arguments, policy_from_args, policy_from_mapping, policy_from_yaml, policy_to_argv
    from .errors import (
        AbsentRankError,
        CostError,
        DeterminismError,
        DisagreementError,
        InventoryError,
        JournalError,
        MetricStandardError,
        PolicyError,
        TableError,
        TableMissError,
        TuningError,
        UnsupportedTritonError,
    )
    from .installation import (
        Installation,
        active_policy,
        benchmarks_run,
        choices,
        deterministic_mode,
        install,
        load_state_dict,
        maybe_verify_choices,
        state_dict,
        uninstall,
        verify_choices,
    )
    from .inventory import AutotunerInfo, list_autotuners
    from .policy import AutotunePolicy
    from .spec import Choice
    from .tables import Tables, load_tables

__all__ = [
    "AbsentRankError",
    "AutotunePolicy",
    "AutotunerInfo",
    "Choice",
    "CostError",
    "DeterminismError",
    "DisagreementError",
    "Installation",
    "InventoryError",
    "JournalError",
    "MetricStandardError",
    "PolicyError",
    "TableError",
    "TableMissError",
    "Tables",
    "TuningError",
    "UnsupportedTritonError",
    "active_policy",
    "add_arguments",
    "benchmarks_run",
    "choices",
    "deterministic_mode",
    "install",
    "list_autotuners",
    "load_state_dict",
    "load_tables",
    "maybe_verify_choices",
    "policy_from_args",
    "policy_from_mapping",
    "policy_from_yaml",
    "policy_to_argv",
    "state_dict",
    "uninstall",
    "verify_choices",
]

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(
        ("add_arguments", "policy_from_args", "policy_from_mapping", "policy_from_yaml", "policy_to_argv"), "arguments"
    ),
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "errors"),
    **dict.fromkeys(
        (
            "Installation",
            "active_policy",
            "benchmarks_run",
            "choices",
            "deterministic_mode",
            "install",
            "load_state_dict",
            "maybe_verify_choices",
            "state_dict",
            "uninstall",
            "verify_choices",
        ),
        "installation",
    ),
    **dict.fromkeys(("AutotunerInfo", "list_autotuners"), "inventory"),
    **dict.fromkeys(("Tables", "load_tables"), "tables"),
    "AutotunePolicy": "policy",
    "Choice": "spec",
}


def __getattr__(name: str) -> Any:
    if name == "manifest":
        # The module, which installation makes callable: ``tuning.manifest()`` describes the run.
        importlib.import_module(".installation", __name__)
        return importlib.import_module(".manifest", __name__)
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
