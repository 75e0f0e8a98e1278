"""Plain PyTorch, eager, with the loop of its tutorials."""

from collections.abc import Callable

import torch
from torch import nn

from ..works import Weights, Work


class Residual(nn.Module):
    def __init__(self, width: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def build(work: Work) -> nn.Module:
    """The model of `work` in torch, with its initial weights."""
    if work.kind == "residual":
        model = Residual(*work.sizes)
    elif work.kind == "lenet":
        model = nn.Sequential(
            *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2, 2)),
            *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2, 2), nn.Flatten()),
            *(nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
        )
    else:
        layers = []
        for inputs, outputs in zip(work.sizes[:-1], work.sizes[1:], strict=True):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), work.weights(), strict=True):
            parameter.copy_(torch.from_numpy(weight))
    return model


def weights_of(model: nn.Module) -> Weights:
    return [parameter.detach().numpy() for parameter in model.parameters()]


def criterion_of(work: Work) -> nn.Module:
    return nn.MSELoss() if work.criterion == "mse" else nn.CrossEntropyLoss()


def train(work: Work, clock: Callable[[], None]) -> Weights:
    model, criterion, loader = build(work), criterion_of(work), work.loader()
    optimizer = torch.optim.Adam(model.parameters(), work.rate)
    for _ in range(work.epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        clock()
    return weights_of(model)
