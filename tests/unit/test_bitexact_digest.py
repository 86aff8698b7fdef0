"""Digests: every bit counts, and nothing else does: not the order of reduction, the chunks or the shards."""

from __future__ import annotations

import struct
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tuning.bitexact import (  # noqa: E402
    Digests,
    digest_gradients,
    digest_module,
    digest_optimizer,
    digest_tensor,
    digest_value,
)

MASK = (1 << 64) - 1


def by_hand(patterns: list[int]) -> str:
    """The documented function, in Python's integers."""

    def mix(z: int, rounds: list[tuple[int, int]]) -> int:
        for shift, factor in rounds:
            z = ((z ^ (z >> shift)) * factor) & MASK
        return z

    first = second = 0
    for place, bits in enumerate(patterns):
        z = (bits + place * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & MASK
        z = mix(z, [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)])
        first += z
        second += mix(z, [(29, 0xFF51AFD7ED558CCD), (32, 1)])
    return f"{first & MASK:016x}{second & MASK:016x}"


def signed(value: Any, size: int) -> int:
    return int.from_bytes(value, "little", signed=True) if size else 0


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8_e4m3fn", 1), ("int64", 8), ("bool", 1)],
)
def test_the_content_is_the_documented_function_of_the_bits(dtype: str, size: int) -> None:
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(3)).mul(3).to(getattr(torch, dtype))
    raw = values.contiguous().view(torch.uint8).numpy().tobytes()
    patterns = [signed(raw[at : at + size], size) for at in range(0, len(raw), size)]
    assert digest_tensor(values).content == by_hand(patterns)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_the_sign_of_a_zero_counts(dtype: str) -> None:
    zeros = torch.zeros(1000, dtype=getattr(torch, dtype))
    other = zeros.clone()
    other[617] = -0.0
    assert torch.equal(zeros, other)
    assert digest_tensor(zeros) != digest_tensor(other)


def test_two_swapped_signs_count() -> None:
    one = torch.tensor([0.0, -0.0, 1.0])
    other = torch.tensor([-0.0, 0.0, 1.0])
    assert digest_tensor(one).content != digest_tensor(other).content


def test_the_payload_of_a_nan_counts() -> None:
    quiet = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert digest_tensor(quiet) == digest_tensor(quiet.clone())
    assert digest_tensor(quiet) != digest_tensor(other)


def test_every_single_bit_counts() -> None:
    base = torch.randn(64, generator=torch.Generator().manual_seed(0))
    seen = {digest_tensor(base).content}
    for place in range(64):
        for bit in range(32):
            flipped = base.view(torch.int32).clone()
            flipped[place] ^= (1 << bit) if bit < 31 else -(1 << 31)
            seen.add(digest_tensor(flipped.view(torch.float32)).content)
    assert len(seen) == 64 * 32 + 1


def test_dtype_shape_and_strides_are_part_and_are_named() -> None:
    x = torch.zeros(4, 6)
    assert digest_tensor(x).differing(digest_tensor(x.view(torch.int32))) == ("dtype",)
    assert digest_tensor(x).differing(digest_tensor(x.view(6, 4))) == ("shape", "strides")
    y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    permuted = y.t().contiguous().t()
    assert torch.equal(y, permuted)
    assert digest_tensor(y).differing(digest_tensor(permuted)) == ("strides",)
    assert digest_tensor(y).differing(digest_tensor(y.to_sparse()))[0] == "strides"


def test_strides_of_one_element_mean_nothing() -> None:
    x = torch.randn(1, 5)
    assert digest_tensor(x) == digest_tensor(x.as_strided((1, 5), (77, 1)))


@pytest.mark.parametrize("most", [1, 7, 64, 1 << 20])
def test_chunks_do_not_matter(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuning.bitexact.digest_sums import _CHUNK

    x = torch.randn(5, 3, 11, generator=torch.Generator().manual_seed(0))
    cases = [x, x.permute(2, 0, 1), x[:, 1], x[::2, :, 1:7], x.expand(2, 5, 3, 11), x[:0], x[0, 0, 0]]
    before = [digest_tensor(case) for case in cases]
    monkeypatch.setitem(_CHUNK, "cpu", most)
    assert [digest_tensor(case) for case in cases] == before
    assert [d.content for d in before] == [digest_tensor(case.contiguous()).content for case in cases]


def test_a_complex_or_lazily_conjugated_tensor_is_its_real_numbers() -> None:
    x = torch.randn(6, dtype=torch.complex64)
    assert digest_tensor(x.conj()).content == digest_tensor(x.conj().resolve_conj()).content
    assert digest_tensor(x).content == digest_tensor(torch.view_as_real(x)).content
    assert digest_tensor(x).content != digest_tensor(x.conj()).content


@pytest.mark.filterwarnings("ignore:.*(in beta state|prototype stage):UserWarning")
def test_sparse_and_nested_tensors_have_digests_of_their_parts() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        other = sparse.clone()
        other.values().mul_(-1)
        assert digest_tensor(sparse) == digest_tensor(sparse.clone())
        assert digest_tensor(sparse).differing(digest_tensor(other)) == ("content",)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    longer = torch.nested.nested_tensor([torch.ones(1, 3), torch.ones(2, 3)], layout=torch.jagged)
    assert digest_tensor(jagged) != digest_tensor(longer)


def jagged(values: Any, offsets: list[int], lengths: list[int] | None = None, dim: int = 1) -> Any:
    kept = None if lengths is None else torch.tensor(lengths)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets), lengths=kept, jagged_dim=dim)


@pytest.mark.filterwarnings("ignore:.*(in beta state|prototype stage):UserWarning")
def test_where_a_nested_tensor_is_ragged_and_how_long_its_rows_are_count() -> None:
    values = torch.arange(36.0).reshape(6, 6)
    kinds = [
        jagged(values, [0, 3, 6]),
        jagged(values, [0, 3, 6], [2, 3]),
        jagged(values, [0, 3, 6], [3, 1]),
        jagged(values, [0, 3, 6], dim=2),
    ]
    digests = [digest_tensor(kind) for kind in kinds]
    assert len({(d.part, d.content) for d in digests}) == 4
    other = values.clone()
    other[2] = 7  # belongs to no row of the second
    assert digest_tensor(jagged(other, [0, 3, 6], [2, 3])) == digests[1]
    assert digest_tensor(jagged(other, [0, 3, 6])) != digests[0]


class Scaled(torch.Tensor):
    """Stands for its data times its scale."""

    @staticmethod
    def __new__(cls, data: Any, scale: Any, note: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: Any, scale: Any, note: Any = None) -> None:
        self.inner, self.scale, self.note = data, scale, note

    def __tensor_flatten__(self) -> Any:
        return ["inner", "scale"], self.note

    @staticmethod
    def __tensor_unflatten__(inner: Any, note: Any, size: Any, stride: Any) -> Any:
        return Scaled(inner["inner"], inner["scale"], note)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return type(args[0])(args[0].inner, args[0].scale, args[0].note)
        plain = [a.inner.float() * a.scale if isinstance(a, Scaled) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Opaque(Scaled):
    __tensor_flatten__ = property()


def test_a_subclass_that_wraps_tensors_is_what_it_wraps() -> None:
    two, one = torch.tensor([2, 4], dtype=torch.int8), torch.tensor([1, 2], dtype=torch.int8)
    base = digest_tensor(Scaled(two, torch.tensor(1.0)))
    assert base == digest_tensor(Scaled(two.clone(), torch.tensor(1.0)))
    assert base != digest_tensor(Scaled(one, torch.tensor(2.0)))
    assert base != digest_tensor(torch.tensor([2.0, 4.0]))
    assert base != digest_tensor(Scaled(two, torch.tensor(1.0), {"dtype": torch.float32}))
    assert digest_tensor(Scaled(one, two)) != digest_tensor(Scaled(two, one))
    assert "Scaled, inner: int8 [2], scale: float32 []" in base.part
    with pytest.raises(TypeError, match=r"Scaled: its context: expected numbers.* found object"):
        digest_tensor(Scaled(two, one, object()))
    with pytest.raises(TypeError, match=r"Opaque: expected a subclass that says by __tensor_flatten__"):
        digest_tensor(Opaque(two, one))

    class Named(torch.nn.Parameter):
        """Adds nothing that is digested."""

    assert digest_tensor(Named(torch.ones(2))) == digest_tensor(torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_a_quantized_tensor_is_its_integers_and_their_scale() -> None:
    def quantized(scale: float, zero: int = 0) -> Any:
        return torch._make_per_tensor_quantized_tensor(torch.tensor([1, 2], dtype=torch.int8), scale, zero)

    base = digest_tensor(quantized(0.5))
    assert base == digest_tensor(quantized(0.5))
    assert len({base, digest_tensor(quantized(0.25)), digest_tensor(quantized(0.5, 1))}) == 3
    scales = [torch.tensor([0.5, 1.0]), torch.tensor([0.5, 2.0])]
    integers, zeros = torch.tensor([1, 2], dtype=torch.int8), torch.zeros(2, dtype=torch.int64)
    by_channel = [torch._make_per_channel_quantized_tensor(integers, scale, zeros, 0) for scale in scales]
    assert digest_tensor(by_channel[0]) != digest_tensor(by_channel[1])


def test_a_change_of_the_highest_bits_alone_in_a_part_counts() -> None:
    # Sums that differ in their highest bit alone would be lost under an even factor.
    from tuning.bitexact import digest_parts

    factors = []

    class Sums:
        device = torch.device("cpu")

        def __rmul__(self, factor: int) -> Any:
            factors.append(factor)
            return torch.zeros(2, dtype=torch.int64)

        def to(self, device: Any) -> Any:
            return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_parts, "sums", lambda *_: Sums())
        digest_parts.measure(torch.eye(2).to_sparse(), gather=False)
    assert [factor % 2 for factor in factors] == [1, 1]
    assert len(set(factors)) == 2


def test_nothing_in_a_list_is_not_nothing_in_a_mapping() -> None:
    assert digest_value({}) != digest_value([])
    assert digest_value({"a": []}) != digest_value({})
    assert digest_value([10**5000]) != digest_value([10**5000 + 1])


def test_many_digests_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuning.bitexact.digest import measure_value, read_digests

    reads = []
    pending = [measure_value({"a": torch.ones(3), "b": torch.zeros(n), "c": 1.0}) for n in range(4)]
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(t), real(t))[1])
    found = read_digests(pending)
    assert len(reads) == 1
    assert found == [digest_value({"a": torch.ones(3), "b": torch.zeros(n), "c": 1.0}) for n in range(4)]


def test_what_has_no_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="meta device"):
        digest_tensor(torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match=r"a\.0: cannot be digested: expected tensors.* found object"):
        digest_value({"a": [object()]})
    with pytest.raises(TypeError, match=r"two values have the name 'a\.0'"):
        digest_value({"a": {"0": 1}, "a.0": 2})


def test_plain_values_carry_their_bits() -> None:
    zero, minus = digest_value({"a": 0.0}), digest_value({"a": -0.0})
    assert zero.differing(minus) == ("a",)
    assert digest_value({"a": 1}).differing(digest_value({"a": True})) == ("a",)
    payload = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]
    assert digest_value([payload]) != digest_value([float("nan")])
    numpy = pytest.importorskip("numpy")
    assert digest_value([numpy.float32(-0.0)]) != digest_value([numpy.float32(0.0)])
    backwards = numpy.arange(4.0)[::-1]
    assert digest_value([backwards])["0"].content == digest_tensor(torch.tensor([3.0, 2.0, 1.0, 0.0]).double()).content


def test_module_gradients_and_optimizer() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    assert {d.dtype for d in digest_gradients(model).values()} == {"NoneType"}
    before = digest_module(model), digest_optimizer(optimizer)
    assert "1.running_mean" in before[0]
    model(torch.randn(5, 3)).square().sum().backward()
    assert before[1] == digest_optimizer(optimizer)
    assert set(before[0].differing(digest_module(model))) == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked"
    }  # fmt: skip
    gradients = digest_gradients(model)
    optimizer.step()
    assert before[0].differing(digest_module(model)) == tuple(before[0])
    assert gradients == digest_gradients(model)
    assert "state.0.exp_avg" in digest_optimizer(optimizer)


def test_digests_survive_json_and_sum_up_in_one_root() -> None:
    one = digest_value({"a": torch.ones(3), "b": [1.5, None]})
    again = Digests.from_json(one.to_json())
    assert again == one
    assert again.root == one.root
    assert digest_value({"b": [1.5, None], "a": torch.ones(3)}).root == one.root
    assert digest_value({"a": torch.ones(3), "b": [1.5]}).root != one.root
    assert one.differing(digest_value({"a": torch.ones(3), "c": 0})) == ("b.0", "b.1", "c")
