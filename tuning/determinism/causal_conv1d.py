"""Causal convolution: which causal-conv1d can be used, and a torch-native form that needs none.

causal-conv1d computes the gradients of weight and bias with atomics. From 1.6.0 on it has a deterministic backward,
which follows torch's flag or ``CAUSAL_CONV1D_DETERMINISTIC`` (``csrc/causal_conv1d.cpp``); before that there is none,
so a deterministic run through mixers that call it is refused.

FLA's own Triton form is autotuned; :func:`causal_convolution` takes its arguments and computes the same with
``torch.nn.functional.conv1d``.
"""

from __future__ import annotations

import math
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tuning.determinism.refusal import one_of, refusal, refuse

if TYPE_CHECKING:
    import torch

__all__ = ["MINIMUM_VERSION", "causal_conv1d_problem", "causal_convolution", "require_causal_conv1d"]

MINIMUM_VERSION = "1.6.0"
"""The first causal-conv1d with a deterministic backward."""

_DISTRIBUTION = "causal-conv1d"


def _installed_version() -> str | None:
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...] | None:
    """The release numbers of a version; None where there are none. A pre-release counts as below its release."""
    match = re.match(r"v?(\d+(?:\.\d+)*)(.*)$", version.strip())
    if match is None:
        return None
    numbers = (*map(int, match[1].split(".")), 0, 0, 0)[:3]
    early = re.match(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)", match[2])
    return (*numbers, -1 if early else 0)


def causal_conv1d_problem(*, minimum: str = MINIMUM_VERSION, required: bool = True) -> str | None:
    """Why the installed causal-conv1d cannot be used in a deterministic run, or None.

    Args:
        minimum: lowest version with a deterministic backward.
        required: the run needs it, so it is a problem too if it is not installed.
    """
    version = _installed_version()
    remedy = f"install causal-conv1d>={minimum}, or use the torch-native causal_convolution"
    if version is None:
        return f"causal-conv1d must be {minimum} or later, got none installed: {remedy}" if required else None
    found, lowest = _release(version), _release(minimum)
    if found is not None and lowest is not None and found >= lowest:
        return None
    return (
        f"causal-conv1d must be {minimum} or later, got {version} (earlier versions add the gradients of weight and "
        f"bias with atomics and cannot be told not to): {remedy}"
    )


def require_causal_conv1d(minimum: str = MINIMUM_VERSION) -> str:
    """Refuse a causal-conv1d that has no deterministic backward; for mixers that call it.

    Args:
        minimum: lowest version that is accepted.

    Returns:
        The version found.

    Raises:
        DeterminismError: it is older, or not installed; the version found is in the message.
    """
    problem = causal_conv1d_problem(minimum=minimum)
    refuse("this causal-conv1d", [problem] if problem else [])
    return _installed_version() or ""


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    chunk_size: int | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Depthwise causal convolution in plain torch, with the arguments of FLA's ``causal_conv1d``.

    Computed in float32 (float64 for float64 input) and rounded once, at the end. Packed sequences are convolved one by
    one, so each gives the bits that it gives alone.

    Args:
        x: shape ``[B, T, D]``, or ``[B, T, ...]`` whose trailing dimensions hold D elements.
        weight: shape ``[D, W]``; the last column meets the current token.
        bias: shape ``[D]``, or None.
        residual: shape of ``x``, added at the end, or None.
        initial_state: shape ``[N, D, W]``, the last W tokens before each sequence, or None for zeros.
        output_final_state: return the last W tokens too.
        activation: ``silu``, ``swish`` (the same) or None.
        backend: ignored; there is one.
        cu_seqlens: shape ``[N + 1]``, the bounds of N sequences packed in a batch of one, or None.
        cu_seqlens_cpu: the same on the CPU, which saves a synchronisation.
        chunk_indices, chunk_size: ignored; they are about FLA's kernel.
        cp_context: must be None.
        unknown: must all be None or False.

    Returns:
        Output of the shape and dtype of ``x``, and the final state of shape ``[N, D, W]`` or None.

    Raises:
        DeterminismError: a shape, bound, activation or argument that cannot be used.
    """
    import torch

    from tuning.determinism.packed import no_unknown, sequence_bounds

    problems = no_unknown("causal_conv1d", {"cp_context": cp_context, **unknown})
    if activation not in (None, "silu", "swish"):
        problems.append(one_of("activation", ["silu", "swish", "None"], activation, "no other is known", "choose one"))
    if weight is None or weight.dim() != 2:
        problems.append(f"weight must have shape [D, W], got {None if weight is None else list(weight.shape)}")
    elif x.dim() < 3 or math.prod(x.shape[2:]) != weight.shape[0]:
        problems.append(f"x must have shape [B, T, {weight.shape[0]}], got {list(x.shape)}")
    refuse("this convolution", problems)
    shape, (channels, width) = x.shape, weight.shape
    x = x.reshape(shape[0], shape[1], channels)
    bounds = sequence_bounds(x, cu_seqlens, cu_seqlens_cpu)
    count = x.shape[0] if bounds is None else len(bounds)
    if initial_state is not None and tuple(initial_state.shape) != (count, channels, width):
        shapes = f"{[count, channels, width]}, got {list(initial_state.shape)}"
        raise refusal("this convolution", [f"initial_state must have shape {shapes}"])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    kernel = weight.to(wide).unsqueeze(1)
    shift = None if bias is None else bias.to(wide)

    def convolve(part: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        # [B, D, W + T]: as many tokens before the sequence as the state has. That is one more than the kernel needs, so
        # the first output is dropped, and a sequence without tokens is no special case.
        before = part.new_zeros(part.shape[0], channels, width) if state is None else state.to(part.dtype)
        line = torch.cat([before, part.transpose(1, 2)], dim=2)
        # Contiguous rows: channels-last strides would send float32 to cuDNN, which may round to TF32.
        out = torch.nn.functional.conv1d(line.contiguous().to(wide), kernel, shift, groups=channels)[:, :, 1:]
        # Here, not on all sequences at once: on a CPU an element's bits may depend on where in the tensor it is.
        out = out if activation is None else torch.nn.functional.silu(out)
        return out.transpose(1, 2), line[:, :, line.shape[2] - width :]

    with torch.autocast(device_type=x.device.type, enabled=False):
        if bounds is None:
            y, final = convolve(x, initial_state)
        else:
            pieces = [
                convolve(x[:, start:stop], None if initial_state is None else initial_state[n : n + 1])
                for n, (start, stop) in enumerate(bounds)
            ]
            y = torch.cat([piece for piece, _ in pieces], dim=1)
            final = torch.cat([state for _, state in pieces], dim=0)
        if residual is not None:
            y = y + residual.reshape(y.shape).to(wide)
        y = y.to(x.dtype).reshape(shape)
    return y, final if output_final_state else None
