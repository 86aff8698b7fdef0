"""A sound table, what else is sound, and what is wrong where: for the reader, the published schema, the fast path."""

from __future__ import annotations

import json
from typing import Any

from tuning._table_schema import MAX_DEPTH

REMOVED: Any = object()

CONFIG = {"kwargs": {"BLOCK_M": 64, "BLOCK_N": 32}, "num_warps": 4, "num_stages": 2}
SAMPLE: dict[str, Any] = {
    "schema_version": 1,
    "arch": "sm90",
    "package": "pack",
    "package_version": "2.3",
    "triton": "3.6.0",
    "device": "NVIDIA H200",
    "multiprocessors": 132,
    "entries": [
        {
            "kernel": "pack.a.k",
            "key": "*",
            "config": {**CONFIG, "num_warps": 8},
            "evidence": {"reported_by": "somebody"},
        },
        {
            "kernel": "pack.a.k",
            "key": {"chunk": 128, "K": 64, "causal": False, "scale": {"float": "1.0"}, "dtype": {"dtype": "bfloat16"}},
            "dtypes": {"x_ptr": "bfloat16", "out_ptr": "float32"},
            "config": {**CONFIG, "num_ctas": 2, "maxnreg": 128, "ir_override": "k.ttir", "extra": {"waves": 2}},
            "source_hash": "0123456789abcdef",
            "evidence": {
                "measured": True,
                "best_ms": 0.25,
                "runner_up_ms": None,
                "ranks": 8,
                "date": "2026-01-01",
                "probe": {"compiler": "triton 3.6.0", "forms": ["00"], "inputs": 5},
            },
            "classes": [
                [{**CONFIG, "num_warps": 2}, CONFIG],
                [{**CONFIG, "num_ctas": 2, "maxnreg": 128, "ir_override": "k.ttir", "extra": {"waves": 2}}],
            ],
        },
        {
            "kernel": "pack.a.other",
            "key": {"K": 64},
            "dtypes": ["bfloat16", "float32"],
            "config": CONFIG,
            "evidence": {"reported_by": "somebody", "measured": False, "note": "not measured here"},
        },
    ],
    "denied": [
        {"kernel": "pack.a.k", "key": "*", "config": CONFIG, "reason": "races", "source": "a report"},
        {
            "kernel": "pack.a.k",
            "key": {"K": 256},
            "dtypes": {"x_ptr": "float32"},
            "config": {**CONFIG, "num_stages": 5},
            "reason": "out of shared memory",
            "source": "recorded",
        },
    ],
}


def changed(*where: str | int, to: Any) -> Any:
    """The sample with one place set to another value, or removed."""
    document = json.loads(json.dumps(SAMPLE))
    place: Any = document
    for step in where[:-1]:
        place = place[step]
    if to is REMOVED:
        del place[where[-1]]
    elif isinstance(place, list) and where[-1] == len(place):
        place.append(to)
    else:
        place[where[-1]] = to
    return document


def encode(document: Any) -> bytes:
    return json.dumps(document).encode()


K = ("entries", 1)

# Where the sample is changed, to what, and what the error must say: the JSON path, what was expected, what was found.
FAULTS: dict[str, tuple[tuple[str | int, ...], Any, str, str, str]] = {
    "no_version": (("schema_version",), REMOVED, "$", "schema_version", "no such member"),
    "newer": (
        ("schema_version",),
        2,
        "$.schema_version",
        "newest that this library reads (upgrade it)",
        "the number 2",
    ),
    "older": (("schema_version",), 0, "$.schema_version", "1", "the number 0"),
    "version_true": (("schema_version",), True, "$.schema_version", "1", "true"),
    "version_text": (("schema_version",), "1", "$.schema_version", "1", 'the string "1"'),
    "unknown_header": (("devcie",), "x", "$.devcie", "one of the members arch", "an unknown member"),
    "no_device": (("device",), REMOVED, "$", '"device"', "no such member"),
    "device_number": (("device",), 1, "$.device", "a string", "the number 1"),
    "arch_empty": (("arch",), "", "$.arch", "such as sm90", 'the string ""'),
    "arch_path": (("arch",), "../sm90", "$.arch", "such as sm90", "../sm90"),
    "arch_newline": (("arch",), "sm90\n", "$.arch", "such as sm90", "sm90"),
    "package_dotted": (("package",), "pack.a", "$.package", "top-level package", "pack.a"),
    "multiprocessors": (("multiprocessors",), -1, "$.multiprocessors", "at least 0", "the number -1"),
    "multiprocessors_null": (("multiprocessors",), None, "$.multiprocessors", "at least 0", "null"),
    "entries_object": (("entries",), {}, "$.entries", "an array", "an empty object"),
    "entry_array": (("entries", 1), [], "$.entries[1]", "an entry, as an object", "an empty array"),
    "denied_null": (("denied",), None, "$.denied", "an array", "null"),
    "no_denied": (("denied",), REMOVED, "$", '"denied"', "no such member"),
    "unknown_member": ((*K, "weight"), 1, "$.entries[1].weight", "one of the members", "an unknown member"),
    "odd_member": ((*K, "a b"), 1, '$.entries[1]["a b"]', "one of the members", "an unknown member"),
    "no_kernel": ((*K, "kernel"), REMOVED, "$.entries[1]", '"kernel"', "no such member"),
    "kernel_bare": ((*K, "kernel"), "k", "$.entries[1].kernel", "module and qualified name", 'the string "k"'),
    "kernel_space": ((*K, "kernel"), "pack.a b", "$.entries[1].kernel", "module and qualified name", "pack.a b"),
    "kernel_number": ((*K, "kernel"), 3, "$.entries[1].kernel", "module and qualified name", "the number 3"),
    "key_array": ((*K, "key"), [1], "$.entries[1].key", 'an object of key arguments, or "*"', "an array"),
    "key_star": ((*K, "key"), "**", "$.entries[1].key", 'or "*"', '"**"'),
    "key_float": ((*K, "key", "K"), 1.5, "$.entries[1].key.K", '{"float": "1.5"}', "the number 1.5"),
    "key_list": ((*K, "key", "K"), [1], "$.entries[1].key.K", "null, a boolean, an integer", "an array"),
    "key_tag": ((*K, "key", "K"), {"flaot": "1.0"}, "$.entries[1].key.K", "one of float, tuple", "an object"),
    "key_two_tags": ((*K, "key", "K"), {"float": "1.0", "dtype": "x"}, "$.entries[1].key.K", "one of", "an object"),
    "key_empty_tag": ((*K, "key", "K"), {}, "$.entries[1].key.K", "one of float", "an empty object"),
    "key_name": ((*K, "key", "a-b"), 1, '$.entries[1].key["a-b"]', "the name of an argument", '"a-b"'),
    "float_number": ((*K, "key", "K"), {"float": 1}, "$.entries[1].key.K.float", "as a string", "the number 1"),
    "float_word": ((*K, "key", "K"), {"float": "one"}, "$.entries[1].key.K.float", "the repr of a float", '"one"'),
    "tuple_item": ((*K, "key", "K"), {"tuple": [1, 2.5]}, "$.entries[1].key.K.tuple[1]", '"2.5"', "the number 2.5"),
    "bytes_odd": ((*K, "key", "K"), {"bytes": "abc"}, "$.entries[1].key.K.bytes", "even number", '"abc"'),
    "dtype_empty": ((*K, "key", "K"), {"dtype": ""}, "$.entries[1].key.K.dtype", "a name", '""'),
    "numpy_short": ((*K, "key", "K"), {"numpy": ["int64"]}, "$.entries[1].key.K.numpy", "a type's name", "an array"),
    "numpy_untyped": ((*K, "key", "K"), {"numpy": [1, 1]}, "$.entries[1].key.K.numpy[0]", "a type's name", "number 1"),
    "numpy_value": ((*K, "key", "K"), {"numpy": ["a", {}]}, "$.entries[1].key.K.numpy[1]", "null", "an empty object"),
    "dict_pair": ((*K, "key", "K"), {"dict": [["1"]]}, "$.entries[1].key.K.dict[0]", "a pair of", "an array"),
    "no_dtypes": ((*K, "dtypes"), REMOVED, "$.entries[1]", '"dtypes", or the key "*"', "no such member"),
    "star_dtypes": (("entries", 0, "dtypes"), ["float32"], "$.entries[0].dtypes", 'beside the key "*"', "an array"),
    "dtypes_text": ((*K, "dtypes"), "float32", "$.entries[1].dtypes", "an object of dtypes", 'string "float32"'),
    "dtype_prefix": (
        (*K, "dtypes", "x_ptr"),
        "torch.float32",
        "$.entries[1].dtypes.x_ptr",
        "without its",
        "torch.float32",
    ),
    "dtype_null": ((*K, "dtypes", "x_ptr"), None, "$.entries[1].dtypes.x_ptr", "a dtype", "null"),
    "sequence_item": (("entries", 2, "dtypes", 1), 7, "$.entries[2].dtypes[1]", "a dtype", "the number 7"),
    "config_null": ((*K, "config"), None, "$.entries[1].config", "a config, as an object", "null"),
    "config_typo": ((*K, "config", "num_wraps"), 4, "$.entries[1].config.num_wraps", "num_warps", "unknown member"),
    "no_warps": (
        ("entries", 2, "config", "num_warps"),
        REMOVED,
        "$.entries[2].config",
        '"num_warps"',
        "no such member",
    ),
    "no_kwargs": (("entries", 2, "config", "kwargs"), REMOVED, "$.entries[2].config", '"kwargs"', "no such member"),
    "warps_3": ((*K, "config", "num_warps"), 3, "$.entries[1].config.num_warps", "a power of two", "the number 3"),
    "warps_0": ((*K, "config", "num_warps"), 0, "$.entries[1].config.num_warps", "a power of two", "the number 0"),
    "warps_2048": ((*K, "config", "num_warps"), 2048, "$.entries[1].config.num_warps", "up to 1024", "2048"),
    "warps_true": ((*K, "config", "num_warps"), True, "$.entries[1].config.num_warps", "a power of two", "true"),
    "warps_text": ((*K, "config", "num_warps"), "4", "$.entries[1].config.num_warps", "a power of two", '"4"'),
    "stages": ((*K, "config", "num_stages"), -1, "$.entries[1].config.num_stages", "at least 0", "the number -1"),
    "ctas": ((*K, "config", "num_ctas"), 0, "$.entries[1].config.num_ctas", "at least 1", "the number 0"),
    "maxnreg": ((*K, "config", "maxnreg"), "64", "$.entries[1].config.maxnreg", "an integer", '"64"'),
    "override": ((*K, "config", "ir_override"), "", "$.entries[1].config.ir_override", "a file name", '""'),
    "extra_array": ((*K, "config", "extra"), [], "$.entries[1].config.extra", "an object", "an empty array"),
    "extra_unset": ((*K, "config", "extra", "waves"), 0, "$.entries[1].config.extra.waves", "leave it out", "number 0"),
    "extra_null": ((*K, "config", "extra", "waves"), None, "$.entries[1].config.extra.waves", "leave it out", "null"),
    "extra_core": ((*K, "config", "extra", "maxnreg"), 9, "$.entries[1].config.extra.maxnreg", "own place", "further"),
    "kwargs_float": ((*K, "config", "kwargs", "A"), 0.5, "$.entries[1].config.kwargs.A", '{"float": "0.5"}', "0.5"),
    "kwargs_name": ((*K, "config", "kwargs", "1A"), 1, '$.entries[1].config.kwargs["1A"]', "name of an argument", "1A"),
    "hash_short": ((*K, "source_hash"), "abc", "$.entries[1].source_hash", "hexadecimal", '"abc"'),
    "hash_upper": ((*K, "source_hash"), "ABCDEF01", "$.entries[1].source_hash", "hexadecimal", "ABCDEF01"),
    "hash_null": ((*K, "source_hash"), None, "$.entries[1].source_hash", "hexadecimal", "null"),
    "no_evidence": ((*K, "evidence"), REMOVED, "$.entries[1]", '"evidence"', "no such member"),
    "evidence_empty": ((*K, "evidence"), {}, "$.entries[1].evidence", "who measured", "an empty object"),
    "evidence_text": ((*K, "evidence"), "me", "$.entries[1].evidence", "an object", 'the string "me"'),
    "measured": ((*K, "evidence", "measured"), "yes", "$.entries[1].evidence.measured", "true or false", '"yes"'),
    "best_text": ((*K, "evidence", "best_ms"), "1", "$.entries[1].evidence.best_ms", "milliseconds", '"1"'),
    "probe_list": ((*K, "evidence", "probe"), ["f"], "$.entries[1].evidence.probe", "rest on", "an array"),
    "best_true": ((*K, "evidence", "best_ms"), True, "$.entries[1].evidence.best_ms", "milliseconds", "true"),
    "ranks_float": ((*K, "evidence", "ranks"), 8.5, "$.entries[1].evidence.ranks", "an integer", "8.5"),
    "note": ((*K, "evidence", "note"), ["x"], "$.entries[1].evidence.note", "a string", "an array"),
    "classes_empty": ((*K, "classes"), [], "$.entries[1].classes", "own config", "in none"),
    "class_empty": ((*K, "classes", 1), [], "$.entries[1].classes[1]", "at least one config", "an empty array"),
    "class_config": ((*K, "classes", 1, 0), 1, "$.entries[1].classes[1][0]", "a config", "the number 1"),
    "denied_unknown": (("denied", 0, "note"), "", "$.denied[0].note", "one of the members", "an unknown member"),
    "denied_reason": (("denied", 0, "reason"), "", "$.denied[0].reason", "what is wrong", '""'),
    "denied_source": (("denied", 0, "source"), REMOVED, "$.denied[0]", '"source"', "no such member"),
    "denied_sequence": (("denied", 1, "dtypes"), ["float32"], "$.denied[1].dtypes", "dtypes by argument", "an array"),
    "denied_config": (("denied", 1, "config", "num_stages"), 1.5, "$.denied[1].config.num_stages", "an integer", "1.5"),
}

# What a JSON Schema cannot say.
BEYOND_THE_SCHEMA: dict[str, tuple[tuple[str | int, ...], Any, str, str, str]] = {
    "version_float": (("schema_version",), 1.0, "$.schema_version", "1", "the number 1.0"),
    "warps_float": ((*K, "config", "num_warps"), 4.0, "$.entries[1].config.num_warps", "a power of two", "4.0"),
    "key_whole_float": ((*K, "key", "K"), 64.0, "$.entries[1].key.K", '{"float": "64.0"}', "the number 64.0"),
    "foreign_kernel": ((*K, "kernel"), "other.a.k", "$.entries[1].kernel", "a kernel of pack", "other.a.k"),
    "package_as_prefix": ((*K, "kernel"), "packer.a.k", "$.entries[1].kernel", "a kernel of pack", "packer.a.k"),
    "float_form": ((*K, "key", "K"), {"float": "1"}, "$.entries[1].key.K.float", "the repr of a float", '"1"'),
    "dict_order": (
        (*K, "key", "K"),
        {"dict": [["2", 1], ["1", 1]]},
        "$.entries[1].key.K.dict[1][0]",
        "sorted by key",
        '"1"',
    ),
    "dict_text": ((*K, "key", "K"), {"dict": [["1.0", 1]]}, "$.entries[1].key.K.dict[0][0]", "canonical text", '"1.0"'),
    "twice": (("entries", 3), SAMPLE["entries"][1], "$.entries[3]", "one row for each", "same as in $.entries[1]"),
    "twice_reordered": (
        ("entries", 3),
        {
            **SAMPLE["entries"][1],
            "key": dict(reversed(SAMPLE["entries"][1]["key"].items())),
            "dtypes": dict(reversed(SAMPLE["entries"][1]["dtypes"].items())),
        },
        "$.entries[3]",
        "one row for each",
        "same as in $.entries[1]",
    ),
    "star_twice": (
        ("entries", 3),
        {**SAMPLE["entries"][0], "config": CONFIG},
        "$.entries[3]",
        "one row for each",
        "same as in $.entries[0]",
    ),
    "sequence_twice": (("entries", 3), SAMPLE["entries"][2], "$.entries[3]", "one row", "same as in $.entries[2]"),
    "denied_twice": (("denied", 2), SAMPLE["denied"][1], "$.denied[2]", "one row for each", "same as in $.denied[1]"),
    "class_twice": ((*K, "classes", 1, 1), CONFIG, "$.entries[1].classes[1][1]", "in one class", "in one already"),
    "not_in_classes": ((*K, "config"), {**CONFIG, "num_warps": 16}, "$.entries[1].classes", "own config", "in none"),
    "deep_evidence": (
        (*K, "evidence", "x"),
        json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH),
        "$.entries[1].evidence.x" + "[0]" * (MAX_DEPTH - 1),
        f"at most {MAX_DEPTH} levels",
        "more",
    ),
    "deep_key": (
        (*K, "key", "K"),
        json.loads('{"constexpr": ' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)),
        "$.entries[1].key.K" + ".constexpr" * MAX_DEPTH,
        f"at most {MAX_DEPTH} levels",
        "more",
    ),
    "surrogate": (("device",), "\ud800", "$.device", "text", "half of a surrogate pair"),
    "surrogate_note": ((*K, "evidence", "note"), "\udfff", "$.entries[1].evidence.note", "text", "surrogate"),
}
ALL_FAULTS = {**FAULTS, **BEYOND_THE_SCHEMA}

VALID: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "as_it_is": (("device",), "NVIDIA H200"),
    "nothing_known": (("device",), ""),
    "no_multiprocessors": (("multiprocessors",), REMOVED),
    "no_entries": (("entries",), []),
    "nothing_denied": (("denied",), []),
    "empty_key": (("entries", 2, "key"), {}),
    "no_tensors": (("entries", 2, "dtypes"), []),
    "no_named_tensors": (("entries", 2, "dtypes"), {}),
    "no_parameters": (("entries", 2, "config", "kwargs"), {}),
    "null_fields": (("entries", 2, "config"), {"kwargs": {}, "num_warps": None, "num_stages": None, "maxnreg": None}),
    "no_stages": (("entries", 2, "config", "num_stages"), 0),
    "local_kernel": (("entries", 2, "kernel"), "pack.a.make.<locals>.kernel"),
    "unicode": (("entries", 2, "evidence", "note"), "Zürich, \U0001f600"),
    "free_evidence": (("entries", 2, "evidence", "regret"), {"worst": [1.5, None, {"x": True}]}),
    "huge_integer": (("entries", 2, "key", "K"), 10**30),
    **{
        f"value_{number}": (("entries", 2, "key", "K"), value)
        for number, value in enumerate(
            [
                None,
                True,
                -7,
                "text",
                {"float": "-0.0"},
                {"float": "inf"},
                {"float": "1e-07"},
                {"tuple": [1, {"list": []}]},
                {"dict": [['"a"', 1], ["1", {"float": "nan"}]]},
                {"bytes": ""},
                {"bytes": "00ff"},
                {"enum": "m.C.A"},
                {"class": "m.C"},
                {"function": "m.f"},
                {"tensor": "float32"},
                {"opaque": "m.C"},
                {"constexpr": {"dtype": "triton.fp32"}},
                {"numpy": ["int64", 1]},
                {"subclass": ["m.P", [1, 2]]},
            ]
        )
    },
}
