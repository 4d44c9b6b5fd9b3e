"""Train a PyTorch module in JAX and convert it back to PyTorch: needs torch (pip install '.[torch]').

The bundled digits are [n, 8, 8, 1] and the module reads [B, 1, 8, 8]; ``channels_last=True`` transposes the digits.
"""

import torch
from torch import nn

from fedrax import Federation, LocalSGD, Scaffold, classification, simulate
from fedrax.data import DirichletClients, load
from fedrax.models import from_torch


class Net(nn.Module):
    """A small convolutional network with batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(16 * 4 * 4, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.out(self.drop(x.flatten(1)))


federation = Federation.from_dataset(load("digits"), DirichletClients(clients=10, alpha=0.3), seed=0)
network = from_torch(Net, torch.randn(2, 1, 8, 8), channels_last=True)
method = Scaffold(local=LocalSGD(lr=0.05, epochs=1, batch_size=20))
result = simulate(method, classification(network), federation, rounds=10, cohort_size=5)

trained = network.to_torch(result)  # a torch.nn.Module; torch.save(trained.state_dict(), ...)
images, labels = federation.test
with torch.no_grad():
    outputs = trained(torch.from_numpy(images).permute(0, 3, 1, 2))
print(
    "accuracy in PyTorch:",
    (outputs.argmax(1).numpy() == labels).mean(),
    "and in JAX:",
    result.events[-1]["test_accuracy"],
)
