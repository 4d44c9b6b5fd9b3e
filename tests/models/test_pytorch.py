"""PyTorch modules as models: values, gradients, statistics, dropout, and conversion back. Needs torch."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fedrax import FedAvg, Federation, FedraxError, LocalSGD, classification, simulate  # noqa: E402
from fedrax.contract import Batch, Variables  # noqa: E402
from fedrax.contract.task_checks import constant_statistic  # noqa: E402
from fedrax.models import from_torch  # noqa: E402
from tests.models.torch_modules import LayerAndFunction  # noqa: E402
from tests.models.torch_networks import NETWORKS, BasicBlock, LeNet5  # noqa: E402

pytestmark = pytest.mark.usefixtures(
    "full_compilation"
)  # with fast compilation, gradients of one network are not finite


def without_dropout(module):
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    return module


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_gradients_and_statistics_agree_with_pytorch(name):
    torch.manual_seed(0)
    module, example = NETWORKS[name]()
    without_dropout(module)
    model = from_torch(module, example)
    variables, x = model.init(jax.random.key(0)), jnp.asarray(example.numpy())
    statistics = variables.statistics if isinstance(variables, Variables) else None
    params = variables.params if isinstance(variables, Variables) else variables
    other = example[torch.randperm(len(example))].repeat(2, *[1] * (example.ndim - 1))[:5]  # another batch size
    with torch.no_grad():
        expected = module.eval()(other)
    np.testing.assert_allclose(model.apply(variables, jnp.asarray(other.numpy())), expected, rtol=1e-4, atol=1e-5)

    trained = copy.deepcopy(module).train()
    outputs = trained(example)
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))
    (outputs * weights).sum().backward()

    def loss(params):
        whole = params if statistics is None else Variables(params, statistics)
        found = model.apply(whole, x, jax.random.key(0))
        return (found * weights.numpy()).sum()

    gradient = jax.jit(jax.grad(loss))(params)
    # Rounding is relative to the summed terms: a bias before batch norm has gradient 0 as a sum of such terms.
    limit = 2e-5 * max(1.0, *(float(p.grad.abs().max()) for p in trained.parameters() if p.grad is not None))
    for leaf, (label, parameter) in zip(*leaves_and_parameters(gradient, trained), strict=True):
        desired = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        np.testing.assert_allclose(leaf, desired, rtol=1e-3, atol=limit, err_msg=label)
    if statistics is not None:
        moved = model.train(variables, x, jax.random.key(0))[1]
        buffers = dict(trained.named_buffers())
        for path, leaf in jax.tree_util.tree_flatten_with_path(moved)[0]:
            label = ".".join(entry.key for entry in path)
            np.testing.assert_allclose(leaf, buffers[label], rtol=1e-4, atol=1e-5, err_msg=label)


def leaves_and_parameters(tree, module):
    """Leaves of a tree, and trainable parameters of a module with their names, in the same order."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {".".join(entry.key for entry in path): leaf for path, leaf in paths}
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert set(leaves) == set(trained)
    return [leaves[name] for name in sorted(leaves)], [(name, trained[name]) for name in sorted(trained)]


class Unsupported(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x):
        return self.how(self.linear(x))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda y: y if y.sum() > 0 else -y, r"test_pytorch.py, line \d+.*depends on the values"),
        (torch.special.bessel_j0, r"uses operators.*bessel_j0.*test_pytorch.py, line"),
        (lambda y: y.view(3, 2, 2), "takes only batches of 3"),
        (lambda y: (y, y), "not one array"),
        (lambda y: y @ torch.ones(3, 3), r"does not take an example of shape \(3, 4\).*test_pytorch.py, line"),
        (lambda y: y + torch.randn_like(y), "random numbers in evaluation too.*test_pytorch.py, line"),
    ],
)
def test_unsupported_code_raises_a_clear_error_with_its_line(how, message):
    with pytest.raises(FedraxError, match=message):
        from_torch(Unsupported(how), torch.randn(3, 4))


def test_invalid_arguments_raise_a_clear_error():
    with pytest.raises(FedraxError, match=r"takes a torch\.nn\.Module"):
        from_torch(3, torch.randn(3, 4))
    with pytest.raises(FedraxError, match="nothing to train"):
        from_torch(nn.ReLU(), torch.randn(3, 4))
    with pytest.raises(FedraxError, match="must be a batch"):
        from_torch(nn.Linear(4, 4), np.zeros((0, 4), np.float32))
    with pytest.raises(FedraxError, match="did you mean 'encode'"):
        from_torch(LeNet5(), torch.randn(2, 3, 32, 32), features="encoder")


def test_detached_values_have_no_gradient():
    model = from_torch(Unsupported(lambda y: y * y.detach() + torch.no_grad()(torch.exp)(y)), torch.randn(3, 4))
    params, x = model.init(jax.random.key(0)), jnp.ones((1, 4))
    gradient = jax.grad(lambda p: model.apply(p, x, jax.random.key(0)).sum())(params)
    outputs = x @ params["linear"]["weight"].T + params["linear"]["bias"]
    np.testing.assert_allclose(gradient["linear"]["bias"], outputs[0], rtol=1e-5)


def test_dropout_depends_on_the_key():
    model = from_torch(nn.Sequential(nn.Linear(50, 400), nn.Dropout(0.25)), torch.randn(2, 50))
    params, x = model.init(jax.random.key(0)), jnp.ones((3, 50))
    whole = model.apply(params, x)
    one, same, other = (model.apply(params, x, jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    np.testing.assert_allclose(one[one != 0], (whole / 0.75)[one != 0], rtol=1e-5)
    assert 0.2 < (one == 0).mean() < 0.3


def test_trained_parameters_are_converted_back_to_pytorch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.out = BasicBlock(1, 3), nn.Linear(3, 2)

        def encode(self, x):
            return self.block(x).mean((2, 3))

        def head(self, x):
            return self.out(x)

        def forward(self, x):
            return self.head(self.encode(x))

    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(24, 6, 6, 1)).astype(np.float32), rng.integers(0, 2, 24)
    federation = Federation.from_arrays(images, labels, np.arange(24) % 3, test=(images, labels))
    model = from_torch(Net, torch.randn(2, 1, 6, 6), channels_last=True, features="encode", blocks=("encode", "head"))
    first, again, second = (model.init(jax.random.key(k)).params["out"]["weight"] for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()
    method = FedAvg(local=LocalSGD(lr=0.1, steps=2, batch_size=4))
    result = simulate(method, classification(model), federation, rounds=2, cohort_size=2, eval_every=2)

    back, variables = model.to_torch(result), Variables(result.params, result.statistics)
    with torch.no_grad():
        expected = back(torch.from_numpy(images.transpose(0, 3, 1, 2))).numpy()
    np.testing.assert_allclose(model.apply(variables, images), expected, rtol=1e-4, atol=1e-5)
    assert (expected.argmax(1) == labels).mean() == pytest.approx(result.events[-1]["test_accuracy"])
    features = model.features(variables, images)
    np.testing.assert_allclose(model.blocks[1](variables, model.blocks[0](variables, images)), expected, atol=1e-4)
    np.testing.assert_allclose(features, model.blocks[0](variables, images), atol=1e-5)
    assert int(back.state_dict()["block.bn1.num_batches_tracked"]) > 0
    with pytest.raises(FedraxError, match="not the parameters of Net"):
        model.to_torch({"out": result.params["out"]})


def test_frozen_parameters_share_the_modules_memory():
    module = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2))
    module[0].requires_grad_(False)
    model = from_torch(module, torch.randn(2, 300))
    params, copied = model.init(jax.random.key(0)), dict(model.module.named_parameters())
    shared = [copied[name].data_ptr() == p.data_ptr() for name, p in module.named_parameters()]
    assert shared == [True, True, False, False] and set(params) == {"2"}
    with torch.no_grad():
        module[2].weight.zero_()  # a trained one is copied
    assert np.asarray(model.init(jax.random.key(0))["2"]["weight"]).any()
    back = model.to_torch(params)
    assert back[0].weight.data_ptr() != module[0].weight.data_ptr()
    with torch.no_grad():
        module[0].bias.add_(1)
    changed = r"frozen parameter 0\.bias of the module given to from_torch, .* convert a copy"
    for use in (
        lambda: model.init(None),
        lambda: model.apply(params, np.ones((2, 300))),
        lambda: model.to_torch(params),
    ):
        with pytest.raises(FedraxError, match=changed):
            use()


@pytest.mark.parametrize("given", ["module", "class"])
def test_float64_module_starts_a_float64_run_without_rounding(given):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 2, dtype=torch.float64)
            self.register_buffer("scale", torch.rand(4, dtype=torch.float64))

        def forward(self, x):
            return self.out(self.scale * x)

    x = torch.rand(6, 4, dtype=torch.float64)
    model = from_torch(Net() if given == "module" else Net, x)
    federation = Federation.from_arrays(x.numpy(), np.arange(6) % 2, np.arange(6) % 2)
    method = FedAvg(local=LocalSGD(lr=1e-30, steps=1))  # learning rate so small that nothing moves
    result = simulate(method, classification(model), federation, rounds=1, cohort_size=2, dtype="float64")
    weight = np.asarray(result.params["out"]["weight"])
    assert weight.dtype == np.float64
    assert (weight != weight.astype(np.float32)).any()
    if given == "module":
        np.testing.assert_array_equal(weight, model.module.out.weight.detach().numpy())
        with jax.enable_x64(), torch.no_grad():
            found = model.apply(result.params, jnp.asarray(x.numpy()))
            np.testing.assert_allclose(found, model.module(x), rtol=1e-14)
    short = simulate(method, classification(model), federation, rounds=1, cohort_size=2)
    assert short.params["out"]["weight"].dtype == np.float32


def test_samples_with_the_other_layout_are_warned_of():
    convolution = from_torch(torch.nn.Conv2d(1, 2, 3), torch.zeros(2, 1, 8, 8))
    params = convolution.init(jax.random.key(0))
    with pytest.raises(
        FedraxError, match=r"had samples of shape \[1, 8, 8\], and these have \[8, 8, 1\]: .*channels_last=True"
    ):
        convolution.apply(params, jnp.zeros((2, 8, 8, 1)))
    with pytest.raises(FedraxError, match=r"these have \[3, 8, 8\]$"):
        convolution.apply(params, jnp.zeros((2, 3, 8, 8)))


def test_small_integer_types_do_not_overflow():
    torch.manual_seed(0)
    net = LayerAndFunction(nn.Embedding(1000, 2), lambda self, x: self.layer((x * 31 + 7) % 1000))
    x = torch.tensor([[9, 200], [3, 77]])
    model = from_torch(net, x)
    params = model.init(jax.random.key(0))
    for kind in (jnp.uint8, jnp.int16, jnp.int32):
        np.testing.assert_array_equal(model.apply(params, jnp.asarray(x.numpy(), kind)), net(x).detach())


class MovingAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 3), []
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("square", torch.ones(3))

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        self.kept.append(y)  # a tensor with autograd history, which cannot be deep-copied
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
            self.square.data.mul_(0.9).add_(y.detach().square().mean(0), alpha=0.1)
        return (y - self.mean) / self.square.sqrt()


def test_assigned_buffers_are_statistics():
    net, x = nn.Sequential(MovingAverage()), torch.randn(5, 4)
    model = from_torch(net, torch.randn(3, 4))
    variables = model.init(jax.random.key(0))
    moved = model.train(variables, jnp.asarray(x.numpy()), jax.random.key(1))[1]["0"]
    net.train()(x)
    for name, buffer in net[0].named_buffers():
        np.testing.assert_allclose(moved[name], buffer.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 2)),
        nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3, momentum=None, affine=False)),
    ],
    ids=["dense", "images"],
)
def test_batch_norm_without_momentum_averages_over_all_batches(net: nn.Module):
    net = copy.deepcopy(net)
    net = nn.Sequential(*net, nn.Flatten())
    model = from_torch(net, torch.randn(3, 4))
    variables, batches = model.init(jax.random.key(0)), [torch.randn(size, 4) + size for size in (5, 2, 7)]
    for batch in batches:
        expected = net.train()(batch)
        outputs, statistics = model.train(variables, jnp.asarray(batch.numpy()), jax.random.key(1))
        variables = Variables(variables.params, statistics)
        np.testing.assert_allclose(outputs, expected.detach(), rtol=1e-4, atol=1e-5)
        for label, buffer in net.named_buffers():
            layer, name = label.split(".")
            np.testing.assert_allclose(statistics[layer][name], buffer, rtol=1e-5, atol=1e-6, err_msg=label)
    evaluated = model.apply(variables, jnp.asarray(batches[0].numpy()))
    np.testing.assert_allclose(evaluated, net.eval()(batches[0]).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "1/running_var"),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3, momentum=None)), "2/running_var"),
        (
            nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten()),
            "2/running_var",
        ),
        (nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten()), None),
    ],
    ids=["dense", "dropout", "one pixel", "images"],
)
def test_modules_that_fail_on_a_single_sample_are_detected(net: nn.Module, name: str | None):
    model = from_torch(net, torch.randn(3, 4))
    samples = Batch(np.zeros((1, 4), np.float32), np.zeros(1, int))
    assert constant_statistic(classification(model), model.init(jax.random.key(0)), samples) == name
