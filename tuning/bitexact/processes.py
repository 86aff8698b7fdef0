"""The same function in several fresh processes, compared bit for bit.

A process writes its digests as JSON, and, to tell the index of a difference, the bytes of its tensors to a file beside
it. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuning.bitexact.compare import Comparison, require_values
from tuning.bitexact.difference import differences
from tuning.bitexact.digest import Digests, digest_value, flatten
from tuning.bitexact.digest_parts import as_tensor, is_plain
from tuning.errors import TuningError
from tuning.spec import Json

__all__ = ["compare_processes"]


def compare_processes(
    function: str | Callable[..., Any],
    *,
    arguments: Mapping[str, Json] | None = None,
    runs: int = 2,
    keep_values: bool = True,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> Comparison:
    """Call a function in fresh processes, one after the other, and compare what it returns, bit for bit.

    Args:
        function: ``package.module:name``, or a function that can be imported by its module and name.
        arguments: keyword arguments, as JSON data.
        runs: how many processes, at least two.
        keep_values: have each process write its tensors to a file in a temporary folder, to tell the index and the
            ulps of a difference. Off: digests alone.
        env: environment of the processes; that of this one when None. Each gets this one's ``sys.path``.
        timeout: seconds that a process may take.

    Raises:
        ValueError: fewer than two runs, a function that cannot be named, or one that returns nothing to compare.
        TuningError: a process failed or took too long; the end of what it wrote is in the message.
    """
    if runs < 2:
        raise ValueError(f"runs: expected at least 2, found {runs}")
    target = function if isinstance(function, str) else _named(function)
    module, _, name = target.partition(":")
    if not module or not name or module == "__main__" or "<" in name:
        expected = "package.module:name, or a function at the top level of a module that can be imported"
        raise ValueError(f"function: expected {expected}, found {target!r}")
    environment = dict(os.environ if env is None else env)
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    with tempfile.TemporaryDirectory(prefix="triton-tuning-runs-") as folder:
        folders = [Path(folder) / str(number) for number in range(runs)]
        for number, place in enumerate(folders):
            place.mkdir()
            request = {"function": target, "arguments": dict(arguments or {}), "keep_values": keep_values}
            (place / "request.json").write_text(json.dumps(request), encoding="utf-8")
            command = [sys.executable, "-m", "tuning.bitexact.processes", str(place)]
            _run(command, environment, timeout, f"process {number} of {target}")
        found = tuple(_read_digests(place) for place in folders)
        require_values(found[0], target)
        for number in range(1, runs):
            if found[number] != found[0]:
                values = (_read_values(folders[0]), _read_values(folders[number]))
                return Comparison(found, differences(found[0], found[number], values), number)
    return Comparison(found)


def _named(function: Callable[..., Any]) -> str:
    # A functools.partial, say, has no name.
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"


def _run(command: list[str], environment: Mapping[str, str], timeout: float, what: str) -> None:
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise TuningError(f"{what}: expected it to end within {timeout:g} s: raise timeout, or run it alone") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing on standard error"])[-1]
        raise TuningError(f"{what}: expected exit code 0, found {done.returncode}: {last}")


def _read_digests(folder: Path) -> Digests:
    return Digests.from_json(json.loads((folder / "result.json").read_text(encoding="utf-8"))["digests"])


def _read_values(folder: Path) -> dict[str, Any]:
    import torch

    stored = json.loads((folder / "result.json").read_text(encoding="utf-8"))["values"]
    raw = (folder / "values.bin").read_bytes()
    return {
        name: torch.frombuffer(bytearray(raw[at : at + length]), dtype=torch.uint8)
        .view(getattr(torch, dtype))
        .view(shape)
        for name, (dtype, shape, at, length) in stored.items()
        if length
    }


def _work(folder: Path) -> None:
    """In the fresh process: call the function, write what it returned."""
    import importlib

    import torch

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    module, _, name = request["function"].partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    value = found(**request["arguments"])
    stored: dict[str, Any] = {}
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    with (folder / "values.bin").open("wb") as file:
        for leaf, content in flatten(value).items() if request["keep_values"] else ():
            tensor = as_tensor(content)
            if tensor is None or not is_plain(tensor):
                continue
            plain = tensor.resolve_conj().resolve_neg().cpu()
            bits = torch.view_as_real(plain) if plain.is_complex() else plain
            # By integers, since torch cannot copy tensors of some dtypes that are not contiguous.
            bits = bits.view(integers[bits.element_size()]).contiguous()
            raw = bits.flatten().numpy().tobytes()
            stored[leaf] = [str(plain.dtype).removeprefix("torch."), list(plain.shape), file.tell(), len(raw)]
            file.write(raw)
    result = {"digests": digest_value(value).to_json(), "values": stored}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    try:
        _work(Path(sys.argv[1]))
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        sys.exit(1)
