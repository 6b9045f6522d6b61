"""The models of the benchmark in PyTorch's own idiom."""

import torch
from torch import nn

ACTIVATIONS = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU}


class Extractor(nn.Module):
    """Blocks of convolution, activation and pooling; dense layers; and, where there is one, a projection head."""

    def __init__(self, model: dict, shape: tuple[int, int, int]):
        super().__init__()
        height, width, channels = shape
        activation = ACTIVATIONS[model["activation"]]
        self.blocks, self.dense = nn.ModuleList(), nn.Sequential(nn.Flatten())
        for outputs, size, padding in model["blocks"]:
            layer = nn.Conv2d(channels, outputs, size, padding=padding)
            self.blocks.append(nn.Sequential(layer, activation(), nn.MaxPool2d(2)))
            height, width = ((side + 2 * padding - size + 1) // 2 for side in (height, width))
            channels = outputs
        inputs = height * width * channels
        for outputs in model["dense"]:
            self.dense.extend([nn.Linear(inputs, outputs), activation()])
            inputs = outputs
        self.projection: nn.Module = nn.Identity()
        self.dim = inputs
        if model["projection"] is not None:
            self.dim = model["projection"]
            self.projection = nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, self.dim))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """The features without the projection head."""
        for block in self.blocks:
            x = block(x)
        return self.dense(x)

    def maps(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The features, and the output of every block."""
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(x)
        return self.projection(self.dense(x)), maps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The features, [batch, dim]."""
        return self.projection(self.encode(x))


class Net(nn.Module):
    """An extractor and a linear head."""

    def __init__(self, model: dict, shape: tuple[int, int, int], classes: int):
        super().__init__()
        self.extractor = Extractor(model, shape)
        self.head = nn.Linear(self.extractor.dim, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, [batch, classes]."""
        return self.head(self.extractor(x))
