"""Use your own network: a Flax module with batch norm, on the bundled digits.

pip install '.[flax]'
python examples/own_model.py
"""

from flax import linen as nn

from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
from fedrax.data import DirichletClients, load
from fedrax.models import from_linen


class Network(nn.Module):
    """Two convolutions and an output layer. fedrax sets the argument ``train``."""

    @nn.compact
    def __call__(self, x, train: bool):
        for channels in (8, 16):
            x = nn.Conv(channels, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Dropout(0.1, deterministic=not train)(nn.avg_pool(x, (2, 2), (2, 2)))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


digits = load("digits")
federation = Federation.from_dataset(digits, DirichletClients(clients=20, alpha=0.5), seed=0)
model = from_linen(Network(), digits.train.x[:1].astype("float32"))
task = classification(model, federation.preprocess())
result = simulate(
    FedAvg(local=LocalSGD(lr=0.1, epochs=1, batch_size=10)), task, federation, rounds=20, cohort_size=8, eval_every=5
)
for round_, accuracy in result.metric("test_accuracy"):
    print(f"round {round_:2}: accuracy {accuracy:.3f}")
