"""What a training loop calls, as one plain object; the callbacks of trainers are made of it.

In a checkpoint the choices are one string, the JSON text of the state. A string is what every way of saving treats as
one value. Torch's distributed checkpoint, which torchtitan uses, takes nested data apart and, on loading, reads only
what the object to be loaded already holds: a list that has not been filled yet would come back empty.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tuning._atomic import write_atomically
from tuning.errors import TableError, TuningError
from tuning.installation import Installation, active_installation, install, process_rank
from tuning.policy import AutotunePolicy
from tuning.spec import canonical_json

__all__ = ["CHOICES_FILE", "STATE_KEY", "TrainingHook"]

CHOICES_FILE = "triton_tuning.json"
"""Name of the file in a checkpoint's folder."""

STATE_KEY = "triton_tuning"
"""Name of the string in a checkpoint."""

logger = logging.getLogger("tuning")


class TrainingHook:
    """Keeps a policy in charge of a training run and its choices in the run's checkpoints.

    Call :meth:`start` before the first kernel runs, :meth:`after_step` after each step, :meth:`finish` at the end, on
    every rank at the same place; as a context manager the object starts and finishes by itself. Put the object where
    the loop keeps what it saves (it has ``state_dict`` and ``load_state_dict``), or call :meth:`save` and :meth:`load`.

    Choices can be carried in mode ``pinned`` alone. In the other modes, and with ``chaos``, the state is empty.

    Args:
        policy: the policy to install; None: the one that is installed when the hook starts, which is then left
            installed at the end.
        deterministic: as for :func:`tuning.install`.
        group: the torch process group whose ranks are compared and whose choices are saved; the default group when
            None.
        require_choices: whether resuming from a checkpoint without choices is an error. If not, it is a warning, and
            tables and policy decide as in a new run.
    """

    def __init__(
        self,
        policy: AutotunePolicy | None = None,
        *,
        deterministic: bool = False,
        group: Any = None,
        require_choices: bool = True,
    ) -> None:
        self.policy = policy
        self.group = group
        self._deterministic = deterministic
        self._require_choices = require_choices
        self._installation: Installation | None = None
        self._last_step: int | None = None

    @property
    def installation(self) -> Installation | None:
        """What the hook works with, or None before it has started and after it has finished."""
        return self._installation

    # -- the run --

    def start(self) -> Installation:
        """Install the policy. Again and again is as good as once.

        Raises:
            TuningError: there is no policy, neither given nor installed, or another one took its place meanwhile.
            As :func:`tuning.install`.
        """
        active = active_installation()
        if self._installation is not None:
            if active is not self._installation:
                raise TuningError(
                    "training hook: the policy that it started with is no longer installed; install one policy, either "
                    "by the hook or by tuning.install"
                )
            return self._installation
        if self.policy is not None:
            active = install(self.policy, deterministic=self._deterministic)
        elif active is None:
            raise TuningError(
                "training hook: no policy is installed; give the hook a policy, or call tuning.install() before"
            )
        self._installation, self._last_step = active, None
        return active

    def after_step(self, step: int) -> bool | None:
        """Compare ranks if the policy's ``verify_every`` says so. A step that is told twice is looked at once.

        Returns:
            As :func:`tuning.maybe_verify_choices`.

        Raises:
            TuningError: the hook has not started.
            DisagreementError, AbsentRankError: as :func:`tuning.verify_choices`.
        """
        installation = self._started("after_step")
        every = installation.policy.verify_every
        if every == 0 or step % every or step == self._last_step:
            return None
        self._last_step = step
        return installation.verify(self.group, step=step)

    def finish(self) -> None:
        """Uninstall the hook's own policy, which writes the manifest. Does nothing if the hook has not started."""
        installation, self._installation = self._installation, None
        if installation is not None and self.policy is not None:
            installation.uninstall()

    def __enter__(self) -> TrainingHook:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def _started(self, what: str) -> Installation:
        if self._installation is None:
            raise TuningError(f"training hook: {what} before start; call start() before the first kernel runs")
        return self._installation

    # -- checkpoints --

    @property
    def carries_choices(self) -> bool:
        """Whether checkpoints of this run hold choices: in mode ``pinned``, without ``chaos``."""
        installation = self._installation
        return installation is not None and installation.mode == "pinned" and not installation.policy.chaos

    def state_dict(self) -> dict[str, str]:
        """The choices of all ranks of the group, as one string under :data:`STATE_KEY`; empty where none are carried.

        Call it on all ranks of the group at the same place: it gathers.

        Raises:
            As :func:`tuning.state_dict`.
        """
        installation = self._started("state_dict")
        if not self.carries_choices:
            return {STATE_KEY: ""}
        return {STATE_KEY: canonical_json(installation.state_dict(all_ranks=True, group=self.group))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Launch what the run that wrote the checkpoint launched. Starts the hook if need be.

        Raises:
            TuningError: the checkpoint has no choices, and they are required.
            As :func:`tuning.load_state_dict`.
        """
        self._load(state.get(STATE_KEY, ""), "the checkpoint")

    def save(self, folder: str | os.PathLike[str], *, write: bool | None = None) -> None:
        """Write the choices of all ranks into a checkpoint's folder. Call it on all ranks: it gathers.

        Args:
            folder: the folder of the checkpoint, which exists where it is written.
            write: whether this rank writes; None: rank 0 does.

        Raises:
            TuningError: the file cannot be written.
            As :func:`tuning.state_dict`.
        """
        text = self.state_dict()[STATE_KEY]
        if text and (process_rank() == 0 if write is None else write):
            _write(Path(folder) / CHOICES_FILE, text)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """As :meth:`load_state_dict`, from a folder that :meth:`save` wrote to.

        Raises:
            TableError: the file is there and cannot be read.
            As :meth:`load_state_dict`.
        """
        path = Path(folder) / CHOICES_FILE
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(
                f"state of choices: {path} cannot be read ({error}); expected the file of a checkpoint",
                file=str(path),
                expected="a file that can be read",
                found=str(error),
            ) from error
        self._load(text, str(path))

    def _load(self, text: object, place: str) -> None:
        installation = self.start()
        if not text:
            self.without_choices(f"{place} has none")
            return
        try:
            state: Any = json.loads(text) if isinstance(text, str) else text
        except (ValueError, RecursionError) as error:
            raise TableError(
                f"state of choices: {place}: expected a JSON document, found {str(error).splitlines()[0]}",
                file=place,
                where="$",
                expected="a JSON document",
                found=str(error).splitlines()[0],
            ) from error
        installation.load_state_dict(state)

    def without_choices(self, reason: str) -> None:
        """Say that a checkpoint has no choices: an error if they are required and could have been carried.

        Raises:
            TuningError: they are required.
        """
        if not self.carries_choices:
            return
        message = f"resuming without the choices of the run before: {reason}"
        if self._require_choices:
            raise TuningError(
                f"{message}; name the folder that has {CHOICES_FILE}, or pass require_choices=False to go on with the "
                "choices of the tables as they are now"
            )
        logger.warning("%s; tables and policy decide, as in a new run", message)


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, f"{text}\n".encode())
    except OSError as error:
        raise TuningError(
            f"state of choices: {path} cannot be written ({error.strerror or error}); expected the folder "
            "of a checkpoint, which exists and can be written"
        ) from error
