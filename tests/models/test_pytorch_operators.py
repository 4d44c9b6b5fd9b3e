"""Values and gradients of single operators agree with PyTorch. Needs torch."""

from __future__ import annotations

import copy
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fedrax import FedraxError  # noqa: E402
from fedrax.models import from_torch  # noqa: E402
from fedrax.models.pytorch.export import tracing_settings  # noqa: E402

torch.manual_seed(0)
VECTORS, IMAGES = torch.randn(5, 6), torch.randn(3, 2, 8, 8)
SEQUENCES, WORDS = torch.randn(4, 7, 6), torch.randint(0, 20, (4, 7))
WORDS[:, 3] = 0


class Net(nn.Module):
    """A first layer, a function of its outputs, and further named modules."""

    def __init__(self, first: Any, function: Any, **parts: Any):
        super().__init__()
        self.first, self.function = first, function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, self.first(x))


def net_of_matrices(function: Any) -> tuple[Net, Any]:
    """A network whose function gets positive definite matrices, one per sample: [B, 6, 6]."""
    definite = lambda y: y[:, :, None] * y[:, None] + 2 * torch.eye(6) + 0.1 * torch.arange(36.0).reshape(6, 6)  # noqa: E731
    return Net(nn.Linear(6, 6), lambda _, y: function(definite(y))), VECTORS


def net_of_vectors(function: Any) -> tuple[Net, Any]:
    return Net(nn.Linear(6, 8), lambda _, y: function(y)), VECTORS


def net_of_images(function: Any, **parts: Any) -> tuple[Net, Any]:
    return Net(nn.Conv2d(2, 4, 3), function, **parts), IMAGES


def rotary(self: Net, y: Any) -> Any:
    """Rotary position embedding by complex multiplication."""
    turns = torch.polar(torch.ones(7, 3), torch.arange(7.0)[:, None] * torch.arange(3.0) * 0.1)
    return torch.view_as_real(torch.view_as_complex(y.reshape(-1, 7, 3, 2)) * turns).flatten(2)


def spectral(self: Net, y: Any) -> Any:
    """A spectral layer: mix the lowest frequencies of images."""
    waves = torch.fft.rfft2(y, norm="ortho")
    low = torch.einsum("bixy,io->boxy", waves[:, :, :3, :3], torch.complex(self.mix, -self.mix))
    return torch.fft.irfft2(F.pad(low, (0, 1, 0, 3)), s=(6, 6), norm="ortho")


def spatial_transformer(self: Net, y: Any) -> Any:
    theta = torch.tanh(y.mean((2, 3)) @ self.turn).reshape(-1, 2, 3) + torch.eye(2, 3)
    return F.grid_sample(y, F.affine_grid(theta, [y.shape[0], 4, 5, 5], align_corners=False), align_corners=False)


def in_place_changes(y: Any) -> Any:
    """In-place changes under no_grad keep the gradient of the original tensor; new tensors have none."""
    z, other = y * 1, torch.zeros_like(y)
    with torch.no_grad():
        z.mul_(2)
        z[:, 0] = y[:, 1].round()
        other[:, 2] = y[:, 1]
        made = y.clone().clamp_(0)
        made += z
    return z * y + other * y + made * z


def grid_sample_net(mode: str, padding: str, corners: bool) -> tuple[Net, Any]:
    grid = torch.randn(1, 5, 4, 2, generator=torch.Generator().manual_seed(3)) * 1.2

    def function(_: Any, y: Any) -> Any:
        where = grid.expand(y.shape[0], -1, -1, -1)
        return F.grid_sample(y, where, mode=mode, padding_mode=padding, align_corners=corners)

    return net_of_images(function)


def vector_quantized(self: Net, y: Any) -> Any:
    """Vector quantization with a codebook of 30 and straight-through gradients."""
    nearest = self.book[torch.cdist(y, self.book).argmin(1)]
    return y + (nearest - y).detach() + nearest


def bags(mode: str, **options: Any) -> tuple[Net, Any]:
    return Net(nn.EmbeddingBag(20, 5, mode=mode, **options), lambda _, y: y), WORDS


def seq2seq() -> tuple[Net, Any]:
    inner = nn.Transformer(6, 2, 1, 1, 8, 0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return Net(nn.Linear(6, 6), lambda net, y: net.inner(y, y[:, :4], tgt_mask=mask), inner=inner), SEQUENCES


@torch.inference_mode()
def without(y: Any) -> Any:
    return y.mean(1, keepdim=True)


CASES: dict[str, Any] = {
    "inference mode": net_of_vectors(lambda y: y * without(y).clone()),
    **{
        name: net_of_vectors(function)
        for name, function in {
            "lgamma, digamma": lambda y: torch.lgamma(y.abs() + 0.5) + torch.digamma(y.abs() + 0.5),
            "erfinv, exp2": lambda y: torch.erfinv(torch.tanh(y) * 0.9) + torch.exp2(y),
            "bessel functions": lambda y: torch.special.i0(y) + torch.special.i1e(y),
            "hypot, copysign, ldexp": lambda y: torch.ldexp(torch.hypot(y, torch.copysign(y, -y + 1)), torch.tensor(2)),
            "powers of whole numbers": lambda y: y * y.argsort(1).add(1) ** -1.0 + torch.arange(8) ** 2.0 * 0.1,
            "fmin, fmax": lambda y: torch.fmin(y, 2 * y) - torch.fmax(y, 3 * y),
            "cummax, cummin": lambda y: y.cummax(1)[0] - 2 * y.flip(1).cummin(1)[0],
            "logcumsumexp": lambda y: torch.logcumsumexp(y, 1),
            "kthvalue, median": lambda y: y.kthvalue(3, 1)[0] + y.median(1)[0],
            "bucketize": lambda y: y * torch.bucketize(y.detach(), torch.linspace(-1, 1, 5)),
            "searchsorted": lambda y: y + torch.searchsorted(torch.linspace(-1, 1, 5), y.detach(), right=True),
            "distances": lambda y: torch.cdist(y[:, None], 2 * y[:, None]).flatten(1) + y,
            "triangles": lambda y: (y[:, :, None] * y[:, None])[:, *torch.triu_indices(8, 8, 1)],
            "complex": lambda y: torch.view_as_complex(y.reshape(-1, 4, 2)).conj().angle(),
            "waves": lambda y: torch.fft.fft(y, norm="forward").imag + torch.fft.ifft(y).real,
            "halves of waves": lambda y: torch.fft.irfft(torch.fft.rfft(y)[:, :3], n=7),
        }.items()
    },
    **{
        name: net_of_matrices(function)
        for name, function in {
            "inverse": torch.linalg.inv,
            "cholesky": lambda a: torch.linalg.cholesky((a + a.mT) / 2 + 9 * torch.eye(6)),
            "solve": lambda a: torch.linalg.solve(a, a[:, :, 0]) + torch.linalg.solve(a, a.mT)[:, 0],
            "triangular": lambda a: torch.linalg.solve_triangular(a.triu(), a, upper=True),
            "determinants": lambda a: torch.linalg.slogdet(a)[1] + 1e-3 * torch.linalg.det(a),
            "exponential": lambda a: torch.linalg.matrix_exp(a / 20),
            "singular values": torch.linalg.svdvals,
            "eigenvalues": lambda a: torch.linalg.eigh((a + a.mT) / 2)[0],
        }.items()
    },
    **{f"grid, {m}, {p}, {c}": grid_sample_net(m, p, c) for m, p, c in [
        ("bilinear", "zeros", False), ("bilinear", "border", True), ("bilinear", "reflection", False),
        ("bilinear", "reflection", True), ("nearest", "zeros", False),
    ]},
    "spatial transformer": net_of_images(spatial_transformer, turn=nn.Parameter(0.3 * torch.randn(4, 6))),
    "fourier layer": net_of_images(spectral, mix=nn.Parameter(torch.randn(4, 4))),
    "rotary embedding": (Net(nn.Linear(6, 6), rotary), SEQUENCES),
    "dilated pooling": net_of_images(lambda _, y: F.max_pool2d(y, 2, 1, 1, dilation=2, ceil_mode=True)),
    "pooling undone": net_of_images(lambda _, y: F.max_unpool2d(*F.max_pool2d(y, 2, return_indices=True), 2)),
    "codebook": (Net(nn.Linear(6, 4), vector_quantized, book=nn.Parameter(torch.randn(30, 4))), VECTORS),
    "bags, sums": bags("sum", padding_idx=0),
    "bags, means": bags("mean", padding_idx=0),
    "bags, maxima": bags("max", padding_idx=0),
    "orthogonal": (Net(nn.utils.parametrizations.orthogonal(nn.Linear(6, 4)), lambda _, y: y), VECTORS),
    "weight norm": (Net(nn.utils.weight_norm(nn.Linear(6, 4)), lambda _, y: y), VECTORS),
    "sequence to sequence": seq2seq(),
    "checkpoint": net_of_vectors(lambda y: torch.utils.checkpoint.checkpoint(torch.tanh, y, use_reentrant=False)),
    "changed in place": net_of_vectors(in_place_changes),
    "data": net_of_vectors(lambda y: y * y.tanh().data),
    "item": net_of_vectors(lambda y: y * torch.tensor(2.0).item()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_agree_with_pytorch(name: str):
    """On more and other samples than the example."""
    net, example = CASES[name]
    net = net.eval()
    model = from_torch(net, example)
    x = torch.cat([example.flip(0), example[:2]])
    outputs = net(x)
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))
    params = model.init(jax.random.key(0))
    expected = outputs.detach().numpy()
    limit = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(model.apply(params, jnp.asarray(x.numpy())), expected, rtol=1e-4, atol=2e-5 * limit)
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    found = jax.grad(lambda p: (model.apply(p, jnp.asarray(x.numpy())) * weights.numpy()).sum())(params)
    flat = {".".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]}
    (outputs * weights).sum().backward()
    for label, parameter in trained.items():
        limit = max(1.0, float(parameter.grad.abs().max()))
        np.testing.assert_allclose(flat[label], parameter.grad, rtol=1e-3, atol=1e-4 * limit, err_msg=label)


def at_kinks(_: Net, y: Any) -> Any:
    """Integers including zeros, and two values that are equal in every row."""
    pairs = y.reshape(-1, 3, 2)
    parts = [
        y.abs(), torch.copysign(y, -y), torch.fmax(y, y.flip(1)), torch.fmin(y, y.flip(1)), torch.sinc(y), torch.i0(y),
        y.angle(), torch.atan2(y, y), F.l1_loss(y, 0 * y, reduction="none"), F.normalize(y, p=1), y.median()[None] * y,
        y.norm(p=0.5, dim=1, keepdim=True), torch.cdist(pairs, pairs.flip(1), p=0.5).flatten(1),
        torch.linalg.vector_norm(torch.complex(y, y.flip(1)), dim=1, keepdim=True),
    ]  # fmt: skip
    return torch.cat(parts, 1)


def test_gradients_at_kinks_agree_with_pytorch():
    net = Net(nn.Linear(6, 6), at_kinks)
    model, start = from_torch(net, VECTORS), {"first": {"weight": jnp.eye(6), "bias": jnp.zeros(6)}}
    x = torch.tensor([[0.0, 1, -2, 2, 1, 0], [1, 1, 0, 0, -1, -1], [2, 0, 0, 0, 0, 0]])
    weights = torch.randn(at_kinks(net, x).shape, generator=torch.Generator().manual_seed(1))
    found = jax.grad(lambda x: (model.apply(start, x) * weights.numpy()).sum())(jnp.asarray(x.numpy()))
    (at_kinks(net, x.requires_grad_()) * weights).sum().backward()
    np.testing.assert_allclose(found, x.grad, rtol=1e-4, atol=1e-5)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def test_custom_derivatives_and_hooks_are_rejected():
    with pytest.raises(FedraxError, match=r"custom derivatives.*\(Sign\).*detach"):
        from_torch(*net_of_vectors(Sign.apply))
    again = net_of_vectors(lambda y: torch.utils.checkpoint.checkpoint(torch.tanh, y, use_reentrant=True))
    with pytest.raises(FedraxError, match=r"\(CheckpointFunction\).*use_reentrant=False"):
        from_torch(*again)
    with_gradient_hook = copy.deepcopy(net_of_vectors(torch.tanh)[0])
    with_gradient_hook.first.register_full_backward_hook(lambda module, inputs, outputs: tuple(-g for g in outputs))
    with pytest.raises(FedraxError, match=r"hooks of them.*a backward hook of Linear"):
        from_torch(with_gradient_hook, VECTORS)


def test_compiled_modules_are_unwrapped():
    net = net_of_vectors(torch.compile(lambda y: torch.tanh(y) * 2))[0]
    net.first = torch.compile(net.first)
    model = from_torch(torch.compile(net), VECTORS)
    params = model.init(jax.random.key(0))
    assert list(params["first"]) == ["_orig_mod"]
    with torch.no_grad():
        expected = 2 * torch.tanh(net.first._orig_mod(VECTORS))
    np.testing.assert_allclose(model.apply(params, jnp.asarray(VECTORS.numpy())), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(FedraxError, match="TorchScript: give the module"):
        from_torch(torch.jit.script(nn.Linear(6, 2)), VECTORS)


def with_gradient_hook(y: Any) -> Any:
    if y.requires_grad:
        y.register_hook(lambda gradient: -gradient)
    return y.tanh()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda self, y: Sign.apply(y) if self.training else y, "Sign"),
        (lambda self, y: with_gradient_hook(y), "register_hook"),
        (lambda self, y: y * y.tanh().detach_(), "detach_"),
    ],
    ids=["only in training", "tensor hook", "detached in place"],
)
def test_hidden_custom_derivatives_are_rejected(function: Any, name: str):
    with pytest.raises(FedraxError, match=rf"custom derivatives.*\({name}\)"):
        from_torch(Net(nn.Linear(6, 8), function), VECTORS)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_rejected(kind: str):
    net = nn.Linear(6, 8)
    getattr(net.bias, kind)(lambda gradient: None)
    with pytest.raises(FedraxError, match=r"hooks of gradients \(bias\)"):
        from_torch(net, VECTORS)


def test_infinite_and_complex_outputs_are_compared():
    hidden = torch.arange(8) > 5
    from_torch(*net_of_vectors(lambda y: y.masked_fill(hidden, -torch.inf)))
    other = lambda a: F.pad(torch.linalg.eigh(a, UPLO="U")[0], (0, 1), value=-torch.inf)  # noqa: E731
    with pytest.raises(FedraxError, match="differ from PyTorch's by"):  # for nonsymmetric matrices
        from_torch(*net_of_matrices(other))
    from_torch(*net_of_vectors(lambda y: torch.complex(y, -y)))
    with pytest.raises(FedraxError, match="differ from PyTorch's by"):
        from_torch(*net_of_matrices(lambda a: 1j * torch.linalg.eigh(a, UPLO="U")[0]))


def test_pytorch_settings_are_restored_with_two_threads():
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with tracing_settings(torch):
            entered.set()
            may_leave.wait()

    settings = lambda: (torch.backends.mha.get_fastpath_enabled(), nn.modules.transformer._detect_is_causal_mask)  # noqa: E731
    before, thread = settings(), threading.Thread(target=other, daemon=True)
    with tracing_settings(torch):
        thread.start()
        assert not entered.wait(0.2)
    may_leave.set()
    thread.join()
    assert settings() == before


def test_bfloat16_parameters_are_rejected():
    with pytest.raises(FedraxError, match=r"bfloat16: from_torch\(module\.float\(\), example\)"):
        from_torch(nn.Linear(6, 2).bfloat16(), VECTORS)


def test_randomized_leaky_relu():
    model = from_torch(*net_of_vectors(F.rrelu))
    params, x = model.init(jax.random.key(0)), jnp.asarray(VECTORS.numpy())
    flat = x @ params["first"]["weight"].T + params["first"]["bias"]
    np.testing.assert_allclose(model.apply(params, x), jnp.where(flat > 0, flat, flat * 11 / 48), rtol=1e-5, atol=1e-6)
    net = from_torch(Net(nn.Linear(6, 400), lambda self, y: F.rrelu(y, training=self.training)), VECTORS)
    params = net.init(jax.random.key(0))
    flat = x @ params["first"]["weight"].T + params["first"]["bias"]
    slopes = (net.apply(params, x, jax.random.key(1)) / flat)[flat < 0]
    assert 1 / 8 - 1e-4 < slopes.min() < 0.13
    assert 0.32 < slopes.max() < 1 / 3 + 1e-4
