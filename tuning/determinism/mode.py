"""The whole mode as one object: check everything, apply everything, put everything back.

``check`` finds every problem of the process and puts all of them into one error; it changes nothing. ``apply`` checks
first and then works through a list; should anything fail on the way, what was done is undone in reverse before the
error goes up. ``restore`` undoes the same list.

What it does not do by itself is pin the autotuners: that needs a policy, which lives further up. The caller passes
``pin``, a function that pins and returns the function that unpins. Candidates are kept whole only together with a pin:
whole candidates that nobody pins would be timed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from enum import Enum
from types import TracebackType
from typing import Any, Literal, get_args

from tuning.determinism.arguments import argument_problems
from tuning.determinism.attention import AttentionVerdict, classify_backend
from tuning.determinism.candidates import CandidateGuard
from tuning.determinism.causal_conv1d import causal_conv1d_problem
from tuning.determinism.environment import apply_determinism_env, environment_problems
from tuning.determinism.fla_replacement import FlaReplacement
from tuning.determinism.flash import patch_flash_attention
from tuning.determinism.kernel_checks import run_kernel_checks
from tuning.determinism.lateness import nccl_group
from tuning.determinism.refusal import one_of, refuse
from tuning.determinism.torch_flags import restore_torch_flags, set_torch_flags

__all__ = ["DeterministicMode", "deterministic_mode", "mode_from_args"]

logger = logging.getLogger("tuning.determinism")

_CausalConv1d = Literal["auto", "required", "unused"]


class DeterministicMode:
    """Deterministic mode for this process.

    Args:
        env: the environment to check and fill; None means ``os.environ``.
        args: a framework's parsed arguments (a namespace or a mapping) to check against every gate, or None.
        attention_backend: name of the attention backend that the run uses; None where torch's own is used.
        attention_library: ``transformer_engine`` where that name is one of its own.
        causal_conv1d: ``auto`` refuses one that is installed and too old, ``required`` also one that is missing,
            ``unused`` does not look.
        fla: replace FLA's autotuned parts of gated delta nets by torch-native ones.
        fill_uninitialized_memory: leave torch's filling of unwritten memory on, to hunt reads of it.
        pin: pins the autotuners and returns the function that undoes it. None: nothing is pinned here.
        keep_candidates: keep the candidates of kernels whole that their package would reduce; None: if ``pin`` is
            given. Pass True only where the autotuners are pinned by other means.
    """

    def __init__(
        self,
        *,
        env: MutableMapping[str, str] | None = None,
        args: Any = None,
        attention_backend: str | Enum | None = None,
        attention_library: Literal["transformer_engine"] | None = None,
        causal_conv1d: _CausalConv1d = "auto",
        fla: bool = True,
        fill_uninitialized_memory: bool = False,
        pin: Callable[[], Callable[[], object]] | None = None,
        keep_candidates: bool | None = None,
    ) -> None:
        self.env: MutableMapping[str, str] = os.environ if env is None else env
        self.args = args
        self.attention_backend = attention_backend
        self.attention_library = attention_library
        self.causal_conv1d = causal_conv1d
        self.fla = fla
        self.fill_uninitialized_memory = fill_uninitialized_memory
        self.pin = pin
        self.keep_candidates = pin is not None if keep_candidates is None else keep_candidates
        self._undo: list[Callable[[], object]] | None = None

    @property
    def active(self) -> bool:
        """Whether the mode is applied now."""
        return self._undo is not None

    @property
    def attention(self) -> AttentionVerdict:
        """What the mode makes of the attention backend."""
        filled = dict(self.env)
        filled.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        return classify_backend(self.attention_backend, library=self.attention_library, env=filled)

    @property
    def _in_time(self) -> bool:
        # Until a group runs on NCCL, this process is where NCCL_DETERMINISTIC can still be filled.
        return self.env is not os.environ or nccl_group() is None

    def problems(self) -> list[str]:
        """Everything that the mode would refuse, one sentence each; nothing is changed."""
        found = environment_problems(self.env, at_worker_spawn=self._in_time)
        if self.args is not None:
            found += argument_problems(self.args)
        verdict = self.attention
        if verdict.problem:
            found.append(verdict.problem)
        if self.causal_conv1d not in get_args(_CausalConv1d):
            accepted = get_args(_CausalConv1d)
            found.append(one_of("causal_conv1d", accepted, self.causal_conv1d, "it says what to check", "choose one"))
        elif self.causal_conv1d != "unused":
            problem = causal_conv1d_problem(required=self.causal_conv1d == "required")
            if problem:
                found.append(problem)
        if self.fla:
            found += FlaReplacement().problems()
        return found

    def check(self) -> None:
        """Refuse what cannot be deterministic, changing nothing.

        What can be seen only with patches in place (whether flash attention has an entry point that can be bound, the
        checks of model packages) is refused by :meth:`apply`.

        Raises:
            DeterminismError: with every problem.
        """
        refuse("this process", self.problems())

    def apply(self) -> None:
        """Check, then switch everything on; applied already: does nothing.

        Raises:
            DeterminismError: with every problem. Whatever had been changed is as it was.
        """
        if self._undo is not None:
            return
        self.check()
        undo: list[Callable[[], object]] = []
        try:
            self._apply(undo)
        except BaseException:
            _run_backwards(undo)
            raise
        self._undo = undo

    def _apply(self, undo: list[Callable[[], object]]) -> None:
        report = apply_determinism_env(self.env, at_worker_spawn=self._in_time)
        undo.append(lambda: _unfill(self.env, report.filled))
        if self.keep_candidates:
            # Before torch's flag is set: from then on an import would reduce candidates.
            guard = CandidateGuard()
            undo.append(guard.restore)
            guard.apply()
        flags = set_torch_flags(fill_uninitialized_memory=self.fill_uninitialized_memory)
        undo.append(lambda: restore_torch_flags(flags))
        if self.attention.kind == "flash":
            patch = patch_flash_attention()
            undo.append(patch.undo)
            for text in patch.skipped:
                logger.info("flash attention: not bound: %s", text)
        if self.fla:
            replacement = FlaReplacement()
            undo.append(replacement.undo)
            replacement.apply()
        if self.pin is not None:
            undo.append(self.pin())
        elif not self.keep_candidates:
            logger.warning(
                "deterministic mode is on without a pinned autotune policy: Triton's timed choices can still change "
                "the bits; install a policy with deterministic=True"
            )
        run_kernel_checks()

    def take_over(self, other: DeterministicMode) -> None:
        """Become what is applied, in place of ``other``, changing nothing in the process.

        Raises:
            DeterminismError: the two are set up differently, so that one cannot stand for the other.
        """
        if other is self:
            return
        mine, theirs = self._settings(), other._settings()
        changed = [name for name in mine if mine[name] is not theirs[name] and mine[name] != theirs[name]]
        refuse(
            "this process",
            [
                f"deterministic mode is on with another {name}; expected the same, since NCCL and cuBLAS have read "
                "their environment: uninstall first, or install with the same settings"
                for name in changed
            ],
        )
        self._undo, other._undo = other._undo, None

    def _settings(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def restore(self) -> None:
        """Put everything back that :meth:`apply` changed; not applied: does nothing.

        Raises:
            DeterminismError: somebody else has patched a place since; everything else is back.
        """
        if self._undo is not None:
            undo, self._undo = self._undo, None
            _run_backwards(undo)

    def __enter__(self) -> DeterministicMode:
        self.apply()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def mode_from_args(args: Any) -> DeterministicMode | Literal[False]:
    """What to pass to ``install(policy, deterministic=...)`` for a framework's parsed arguments.

    Args:
        args: a namespace or mapping with ``deterministic_mode`` (see ``tuning.add_arguments``), whose other members are
            checked against every argument gate, and whose ``attention_backend``, where it is a name, is classified.

    Returns:
        A mode that is not applied yet, or False where deterministic mode is not asked for.

    Raises:
        DeterminismError: no option can be read from ``args``.
    """
    if not isinstance(args, Mapping) and not hasattr(args, "deterministic_mode") and not hasattr(args, "__dict__"):
        refuse("these arguments", argument_problems(args))

    def member(name: str) -> Any:
        return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)

    if not member("deterministic_mode"):
        return False
    backend = member("attention_backend")
    return DeterministicMode(args=args, attention_backend=backend if isinstance(backend, (str, Enum)) else None)


def _unfill(env: MutableMapping[str, str], filled: Mapping[str, str]) -> None:
    for name, value in filled.items():
        if env.get(name) == value:
            del env[name]


def _run_backwards(undo: list[Callable[[], object]]) -> None:
    """Run every undo, newest first; should some fail, the last error goes up after all have run."""
    with ExitStack() as stack:
        for step in undo:
            stack.callback(step)
        undo.clear()


def deterministic_mode(
    *,
    env: MutableMapping[str, str] | None = None,
    args: Any = None,
    attention_backend: str | Enum | None = None,
    attention_library: Literal["transformer_engine"] | None = None,
    causal_conv1d: _CausalConv1d = "auto",
    fla: bool = True,
    fill_uninitialized_memory: bool = False,
    pin: Callable[[], Callable[[], object]] | None = None,
    keep_candidates: bool | None = None,
) -> DeterministicMode:
    """Switch deterministic mode on, for the rest of the process or, in a ``with`` statement, for the block.

    The arguments are those of :class:`DeterministicMode`.

    Returns:
        The mode, applied. ``restore()``, or leaving the block, puts everything back.

    Raises:
        DeterminismError: with every problem; nothing has been changed then.
    """
    mode = DeterministicMode(
        env=env,
        args=args,
        attention_backend=attention_backend,
        attention_library=attention_library,
        causal_conv1d=causal_conv1d,
        fla=fla,
        fill_uninitialized_memory=fill_uninitialized_memory,
        pin=pin,
        keep_candidates=keep_candidates,
    )
    mode.apply()
    return mode
