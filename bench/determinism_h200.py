"""Deterministic mode on a GPU: does it do what it says, and what does it cost?

``python bench/determinism_h200.py --out DIR`` starts fresh processes, all at once, and finishes in about two minutes:

- a small hybrid model (Mamba-2's SSD mixer with causal-conv1d or its torch-native form, attention, a mixture of
  experts) is trained 20 steps by two processes with the mode on and by two with the mode off: digests of all losses,
  of all gradients of each step, and of the weights. On: identical. Off: different;
- FLA's parts of gated delta nets and the torch-native forms that stand in for them, each against float64, as relative
  norms of outputs and gradients, by two processes: the torch-native form no worse than FLA's kernel, within the bound,
  and with the same bits in both processes.

It prints a table, writes ``determinism_<device>.json``, and ends with status 1 if a claim does not hold. mamba-ssm is
needed for the first part and fla-core for the second; a part whose package is missing says so and counts as failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

DEADLINE_S = 175.0
BOUND = 5e-3
"""Of a relative norm. Results, and query and key once normalised, are rounded to bfloat16, by up to 2**-9 each time."""
SLACK = 1.05
"""How much larger the torch-native error may be: where rounding to bfloat16 is all of it, both are equal by chance."""


# -- the hybrid model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a batch."""

    batch: int = 2
    tokens: int = 1024
    width: int = 512
    heads: int = 8
    state: int = 128
    experts: int = 8
    vocabulary: int = 512
    layers: int = 2
    chunk: int = 128


def convolution() -> tuple[str, Callable[..., Any]]:
    """The short convolution of the mixer: causal-conv1d where it can be used, else torch-native."""
    from tuning.determinism.causal_conv1d import causal_conv1d_problem, causal_convolution

    if causal_conv1d_problem() is None and importlib.util.find_spec("causal_conv1d_cuda") is not None:
        from causal_conv1d import causal_conv1d_fn

        return "causal-conv1d", lambda x, w, b: causal_conv1d_fn(x.transpose(1, 2), w, b, activation="silu").transpose(
            1, 2
        )
    return "torch-native", lambda x, w, b: causal_convolution(x, w, b, activation="silu")[0]


def build(sizes: Sizes) -> tuple[Any, str]:
    """The model and the name of the convolution in use."""
    import torch
    import torch.nn.functional as F

    from bench.workloads import import_mamba_ssm

    import_mamba_ssm()
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    name, convolve = convolution()
    s, head = sizes, sizes.width // sizes.heads

    class Mixer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = s.width + 2 * s.state
            self.into = torch.nn.Linear(s.width, s.width + self.inner + s.heads, bias=False)
            self.weight = torch.nn.Parameter(torch.randn(self.inner, 4) * 0.3)
            self.bias = torch.nn.Parameter(torch.zeros(self.inner))
            self.rate = torch.nn.Parameter(torch.rand(s.heads))
            self.skip = torch.nn.Parameter(torch.ones(s.heads))
            self.shift = torch.nn.Parameter(torch.zeros(s.heads))
            self.out = torch.nn.Linear(s.width, s.width, bias=False)

        def forward(self, x: Any) -> Any:
            z, mixed, dt = self.into(x).split([s.width, self.inner, s.heads], dim=-1)
            mixed = convolve(mixed.contiguous(), self.weight.to(mixed.dtype), self.bias.to(mixed.dtype))
            value, b, c = mixed.split([s.width, s.state, s.state], dim=-1)
            value, z = (y.unflatten(-1, (s.heads, head)).contiguous() for y in (value, z))
            b, c = (y.unsqueeze(2).contiguous() for y in (b, c))
            y = mamba_chunk_scan_combined(
                value, dt.contiguous(), -self.rate.exp(), b, c, s.chunk, D=self.skip, z=z, dt_bias=self.shift,
                dt_softplus=True,
            )  # fmt: skip
            return self.out(y.flatten(2))

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = torch.nn.Linear(s.width, 3 * s.width, bias=False)
            self.out = torch.nn.Linear(s.width, s.width, bias=False)

        def forward(self, x: Any) -> Any:
            q, k, v = (y.unflatten(-1, (s.heads, head)).transpose(1, 2) for y in self.into(x).chunk(3, dim=-1))
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    class Experts(torch.nn.Module):
        """Two experts for each token; their results are added by index, with atomics unless told otherwise."""

        def __init__(self) -> None:
            super().__init__()
            self.router = torch.nn.Linear(s.width, s.experts, bias=False)
            self.up = torch.nn.Parameter(torch.randn(s.experts, s.width, s.width) * s.width**-0.5)
            self.down = torch.nn.Parameter(torch.randn(s.experts, s.width, s.width) * s.width**-0.5)

        def forward(self, x: Any) -> Any:
            flat = x.flatten(0, 1)
            gates, chosen = self.router(flat).float().softmax(-1).topk(2, dim=-1)
            out = torch.zeros_like(flat, dtype=torch.float32)
            rows = torch.arange(flat.shape[0], device=flat.device).unsqueeze(1).expand(-1, 2)
            order = chosen.flatten().argsort(stable=True)
            picked, weight = rows.flatten()[order], gates.flatten()[order].unsqueeze(1)
            counts = torch.bincount(chosen.flatten(), minlength=s.experts).tolist()
            parts = zip(flat[picked].split(counts), range(s.experts), strict=True)
            results = torch.cat([F.silu(part @ self.up[e]) @ self.down[e] for part, e in parts])
            return out.index_add(0, picked, results.float() * weight).to(x.dtype).view_as(x)

    class Hybrid(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(s.vocabulary, s.width)
            kinds = (Mixer, Attention, Experts)
            self.blocks = torch.nn.ModuleList(kind() for _ in range(s.layers) for kind in kinds)
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(s.width) for _ in self.blocks)
            self.head = torch.nn.Linear(s.width, s.vocabulary, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for norm, block in zip(self.norms, self.blocks, strict=True):
                x = x + block(norm(x))
            return self.head(x)

    return Hybrid(), name


def octets(tensor: Any) -> bytes:
    """The bytes of a tensor."""
    import torch

    raw: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return raw


def train(on: bool, steps: int, device: str, sizes: Sizes) -> dict[str, Any]:
    """Train the model from a fixed seed; digests and what the process did."""
    started = time.perf_counter()
    installed: Any = None
    if on:
        # Before torch touches the device and before any kernel is imported: nothing is too late then.
        import tuning

        installed = tuning.install(deterministic=True)
    import torch

    torch.manual_seed(0)
    model, conv = build(sizes)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)
    losses, gradients, times = [], [], []
    for _ in range(steps):
        begun = time.perf_counter()
        tokens = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.tokens + 1), generator=data).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - begun)
        total = hashlib.sha256()
        for name, parameter in model.named_parameters():
            total.update(name.encode() + octets(parameter.grad))
        gradients.append(total.hexdigest())
    weights = hashlib.sha256(b"".join(octets(parameter) for parameter in model.parameters()))
    found: dict[str, Any] = {
        "losses": [value.hex() for value in losses],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "gradients": gradients,
        "weights": weights.hexdigest(),
        "convolution": conv,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "first_step_s": round(times[0], 2),
        "later_step_ms": round(sorted(times)[len(times) // 2] * 1e3, 2),
    }
    if installed is not None:
        import tuning

        found["benchmarks"] = tuning.benchmarks_run()
        found["choices"] = [f"{choice.kernel} {choice.launch_config} ({choice.source})" for choice in tuning.choices()]
        installed.uninstall()
    found["seconds"] = round(time.perf_counter() - started, 1)
    return found


# -- FLA's parts beside the torch-native ones --------------------------------------------------------------------------

Case = tuple[dict[str, Any], Callable[..., Any], Callable[..., Any]]


def cases(device: str, scale: int) -> dict[str, Case]:
    """For each part: inputs in bfloat16, FLA's function and the torch-native one, both giving a tuple of tensors."""
    import torch
    import torch.nn.functional as F
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.l2norm import l2norm
    from fla.ops.delta_rule import chunk_delta_rule as fla_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_gdn
    from fla.ops.gdn2 import chunk_gdn2 as fla_gdn2

    from tuning.determinism import causal_convolution, chunk_gated_delta_rule, chunk_gdn2, l2_normalize

    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device=device)

    def leaf(x: Any) -> Any:
        return x.bfloat16().requires_grad_()

    b, t, h, k = 1, 2048 // scale, 8, 128 if scale == 1 else 16
    q, key, v = (leaf(normal(b, t, h, k)) for _ in range(3))
    state = normal(b, h, k, k).requires_grad_()
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    gate, erase = F.logsigmoid(normal(b, t, h)), normal(b, t, h).sigmoid()
    channel_gate = F.logsigmoid(normal(b, t, h, k) + 2)
    gdn = {"q": q, "k": key, "v": v, "g": leaf(gate), "beta": leaf(erase), "initial_state": state}
    ungated = {name: gdn[name] for name in ("q", "k", "v", "beta", "initial_state")}
    gdn2 = {
        "q": q, "k": key, "v": v, "g": leaf(channel_gate), "b": leaf(normal(b, t, h, k).sigmoid()),
        "w": leaf(normal(b, t, h, k).sigmoid()), "initial_state": state,
    }  # fmt: skip
    conv = {"x": leaf(normal(2, t, 8 * k)), "weight": leaf(normal(8 * k, 4) * 0.5), "bias": leaf(normal(8 * k))}
    return {
        "l2norm": ({"x": leaf(normal(4, t, h, k))}, lambda x: (l2norm(x),), lambda x: (l2_normalize(x),)),
        "causal_conv1d": (
            conv,
            lambda **i: causal_conv1d(**i, activation="silu")[:1],
            lambda **i: causal_convolution(**i, activation="silu")[:1],
        ),
        "gated_delta_rule": (
            gdn, lambda **i: fla_gdn(**i, **options), lambda **i: chunk_gated_delta_rule(**i, **options)
        ),
        # FLA refuses the gated backward on Hopper with Triton 3.4 to 3.7.0. Without a gate it has one to compare with.
        "delta_rule": (
            ungated,
            lambda **i: fla_delta_rule(**i, **options),
            lambda **i: chunk_gated_delta_rule(**i, g=i["beta"].new_zeros(b, t, h), **options),
        ),
        "gdn2": (gdn2, lambda **i: fla_gdn2(**i, **options), lambda **i: chunk_gdn2(**i, **options)),
    }  # fmt: skip


def run_case(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Outputs and the gradients of all inputs, for a fixed gradient of each output."""
    import torch

    outputs = function(**inputs)
    generator = torch.Generator(outputs[0].device).manual_seed(7)
    drawn = [torch.randn(o.shape, generator=generator, device=o.device) for o in outputs]
    grads = [g.to(torch.bfloat16).to(o.dtype) for g, o in zip(drawn, outputs, strict=True)]
    found = torch.autograd.grad(outputs, list(inputs.values()), grads)
    named = {("out", "state")[n]: o.detach() for n, o in enumerate(outputs)}
    return named | {f"d{name}": g for name, g in zip(inputs, found, strict=True)}


def milliseconds(function: Callable[..., Any], inputs: dict[str, Any], device: str) -> float:
    """Median time of forward and backward."""
    import torch

    times = []
    for _ in range(6):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run_case(function, inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return round(sorted(times)[2] * 1e3, 3)


def compare(device: str, scale: int) -> dict[str, Any]:
    """Errors, times and digests of every part."""
    import torch

    with contextlib.ExitStack() as stack:
        import tuning
        from tuning.determinism import deterministic_torch, replace_in_fla

        # One config for each of FLA's kernels: their errors do not hang on it, and timing them all would take minutes.
        stack.enter_context(tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("fla",))))
        found: dict[str, Any] = {}
        for name, (inputs, theirs, ours) in cases(device, scale).items():
            exact_inputs = {key: x.detach().double().requires_grad_() for key, x in inputs.items()}
            exact = run_case(ours, exact_inputs)
            fla, refusal = run_theirs(theirs, inputs)
            with deterministic_torch():
                native, again = run_case(ours, inputs), run_case(ours, inputs)
                with replace_in_fla():
                    through_fla = native if name in NOT_REPLACED else run_case(theirs, inputs)
            errors = {
                key: {
                    "native": relative(native[key], exact[key]),
                    "fla": relative(fla[key], exact[key]) if key in fla else None,
                    "between": relative(native[key], fla[key].double()) if key in fla else None,
                }
                for key in exact
            }
            digest = hashlib.sha256(b"".join(octets(native[key]) for key in sorted(native))).hexdigest()
            found[name] = {
                "errors": errors,
                "digest": digest,
                "same_bits_twice": all(octets(native[key]) == octets(again[key]) for key in native),
                "replacement_is_native": all(octets(native[key]) == octets(through_fla[key]) for key in native),
                "native_ms": milliseconds(ours, inputs, device),
                "fla_pinned_ms": None if refusal else milliseconds(theirs, inputs, device),
                "fla_refuses_backward": refusal,
            }
        found["fla_benchmarks"] = tuning.benchmarks_run()
        found["deterministic_after"] = torch.are_deterministic_algorithms_enabled()
    return found


NOT_REPLACED = {"delta_rule"}
"""Compared for its gradients; deterministic mode leaves FLA's own function in place."""


def run_theirs(function: Callable[..., Any], inputs: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """:func:`run_case` for FLA; outputs alone, and its words, where it refuses the backward on this GPU."""
    import torch

    try:
        return run_case(function, inputs), None
    except RuntimeError as error:
        if "produces incorrect results" not in str(error):
            raise
        with torch.no_grad():
            outputs = function(**inputs)
        return {("out", "state")[n]: output for n, output in enumerate(outputs)}, str(error)


def relative(found: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((found.double() - expected).norm() / expected.norm())


# -- the whole ---------------------------------------------------------------------------------------------------------


def start(folder: Path, name: str, cache: str, *arguments: str) -> subprocess.Popen[str]:
    """A fresh process of this script."""
    env = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    if name.startswith("fla"):
        # It switches torch's flag on in the middle of its work, when it would be too late for cuBLAS.
        from tuning.determinism import spawn_env

        env = spawn_env(env)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env |= {"TRITON_CACHE_DIR": str(folder / cache), "PYTHONPATH": path}
    with (folder / f"{name}.err").open("w") as log:
        return subprocess.Popen(
            [sys.executable, __file__, *arguments], env=env, stdout=subprocess.PIPE, stderr=log, text=True
        )


def collect(folder: Path, processes: dict[str, subprocess.Popen[str]]) -> dict[str, Any]:
    """What each process printed last, as JSON; an ``error`` for one that failed or took too long."""
    deadline, found = time.monotonic() + DEADLINE_S, {}
    for name, process in processes.items():
        try:
            out, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            found[name] = {"error": f"not finished after {DEADLINE_S:.0f} s"}
            continue
        log = (folder / f"{name}.err").read_text()
        found[name] = json.loads(out.splitlines()[-1]) if process.returncode == 0 else {"error": log[-2000:]}
    return found


def equal(runs: Sequence[dict[str, Any]], key: str) -> bool:
    """Whether all runs have the same value, none of them having failed."""
    return all("error" not in run for run in runs) and len({json.dumps(run[key]) for run in runs}) == 1


def judge(found: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """Claim, whether it holds, and figures."""
    on, off, fla = ([found[f"{kind}{n}"] for n in (1, 2)] for kind in ("on", "off", "fla"))
    lines: list[tuple[str, bool, str]] = []
    failed = [run["error"].strip() for run in (*on, *off, *fla) if "error" in run]
    lines += [("a process failed", False, error.splitlines()[-1] if error else "") for error in failed]
    for key in ("losses", "gradients", "weights"):
        lines.append((f"mode on, two processes: {key} equal", equal(on, key), ""))
        differ = all("error" not in run for run in off) and not equal(off, key)
        lines.append((f"mode off, two processes: {key} differ", differ, ""))
    if all("error" not in run for run in on):
        lines.append(("mode on: no benchmark of a kernel", all(run["benchmarks"] == 0 for run in on), ""))
    if all("error" not in run for run in fla):
        for name in ("l2norm", "causal_conv1d", "gated_delta_rule", "delta_rule", "gdn2"):
            one, other = (run[name] for run in fla)
            worst = max(one["errors"].items(), key=lambda item: item[1]["native"])
            within = all(error["native"] <= BOUND for error in one["errors"].values())
            compared = {key: error for key, error in one["errors"].items() if error["fla"] is not None}
            better = all(error["native"] <= SLACK * error["fla"] for error in compared.values())
            theirs = "refuses" if worst[1]["fla"] is None else f"{worst[1]['fla']:.2e}"
            text = f"worst {worst[0]}: native {worst[1]['native']:.2e}, FLA {theirs}"
            times = f"{one['native_ms']} ms, FLA {one['fla_pinned_ms']} ms"
            lines += [
                (f"{name}: within {BOUND:g} of float64", within, text),
                (f"{name}: no worse than FLA", better, f"{', '.join(compared)}"),
                (f"{name}: same bits twice and in two processes", one["same_bits_twice"] and
                 one["digest"] == other["digest"], times),
                (f"{name}: FLA's function gives those bits under the replacement", one["replacement_is_native"], ""),
            ]  # fmt: skip
    return lines


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for the JSON result")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--worker", choices=["on", "off", "fla"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        found = compare("cuda", 1) if options.worker == "fla" else train(options.worker == "on", options.steps, "cuda",
                                                                          Sizes())  # fmt: skip
        print(json.dumps(found))
        return 0
    import torch

    from bench import results

    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="determinism-") as temporary:
        folder = Path(temporary)
        steps = ["--steps", str(options.steps)]
        # Each process has a compile cache of its own: none starts warm, and none waits for another's kernels.
        processes = {
            f"{kind}{n}": start(folder, f"{kind}{n}", f"cache-{kind}{n}", "--worker", kind, *steps)
            for kind in ("on", "off", "fla")
            for n in (1, 2)
        }
        found = collect(folder, processes)
    lines = judge(found)
    for claim, holds, figures in lines:
        print(f"{'ok  ' if holds else 'FAIL'}  {claim:66}  {figures}")
    for kind in ("on", "off"):
        run = found[f"{kind}1"]
        if "error" not in run:
            times = f"first step {run['first_step_s']} s, later {run['later_step_ms']} ms (all processes at once)"
            print(f"      mode {kind}: {times}, convolution {run['convolution']}")
    result = {
        "case": "determinism",
        **results.circumstances(("triton", "torch", "mamba-ssm", "causal-conv1d", "fla-core")),
    }
    result["command"] = "python bench/determinism_h200.py"
    result["seconds"] = round(time.monotonic() - begun, 1)
    result["claims"] = [{"claim": claim, "holds": holds, "figures": figures} for claim, holds, figures in lines]
    result["runs"] = found
    device = str(result["device"]).lower().replace("nvidia ", "").replace(" ", "_")
    print(f"wrote {results.write(f'determinism_{device}', result, options.out)} after {result['seconds']} s")
    return 0 if all(holds for _, holds, _ in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
