"""The reference architectures: built as f(features, classes, **options), each treating every record apart.

None has a layer that looks across the batch, so that a record's gradient is its own. A network with a loss of its own
defines record_losses (see models.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairveil.errors import UserError, nearest

Features = Sequence[int]
GROUPS = 32  # of channels that are normalised together: the choice of Wu and He, "Group Normalization" (2018)
SMALLEST = {"imagenet": 17, "cifar": 5}  # pixels: a smaller image is one pixel before ResNet's last stage halves it


def logistic(features: Features, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    _refuse_regression("logistic", classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(features), classes))


def linear(features: Features, classes: int, intercept: bool = True) -> nn.Module:
    """Linear regression; with classes, the same as logistic."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(features), classes or 1, bias=intercept))


class SVM(nn.Module):
    """Linear support vector machine: hinge loss, zero start.

    Two classes share one unit f(x) = w·x + b with scores (-f/2, f/2). More have a unit each and the loss of Crammer and
    Singer, "On the Algorithmic Implementation of Multiclass Kernel-based Vector Machines" (2001).
    """

    def __init__(self, features: Features, classes: int) -> None:
        super().__init__()
        _refuse_regression("svm", classes)
        self.two = classes == 2
        self.linear = nn.Linear(math.prod(features), 1 if self.two else classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        units = self.linear(x.flatten(1))
        return torch.cat([-units / 2, units / 2], dim=1) if self.two else units

    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        """max(0, 1 - margin) for each record: the margin is its class's score less the best of the others."""
        own = y.unsqueeze(1) == torch.arange(output.shape[1], device=y.device)
        score = output.masked_fill(~own, 0.0).sum(dim=1)
        best = output.masked_fill(own, -math.inf).amax(dim=1)  # equals share the subgradient: no class comes first
        return F.relu(1 - (score - best))


def mlp(features: Features, classes: int, hidden: int = 128) -> nn.Module:
    """One hidden layer of ReLU units."""
    _check_count("hidden", hidden, 128)
    width = math.prod(features)
    return nn.Sequential(nn.Flatten(), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes or 1))


def cnn(features: Features, classes: int) -> nn.Module:
    """The convolutional network of Malekmohammadi et al. (2024): 28,938 parameters for 28x28 and 10 classes.

    The output layer adapts to other image sizes and channels.
    """
    channels, height, width = _image("cnn", features, 4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes or 1),
    )


def cnn_dp(features: Features, classes: int, zero_output: bool = True, squared: bool = False) -> nn.Module:
    """A small convolutional network for private training: 14,394 parameters for 28x28 and 10 classes.

    After Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)" (2021), without
    their hidden layer. Noise grows with the number of parameters, so it has half as many as `cnn`. tanh keeps
    activations, and so gradients, bounded (Papernot et al., "Tempered Sigmoid Activations for Deep Learning with
    Differential Privacy", 2021). The output layer starts at zero (zero_output): every class is equally likely at first,
    and the first steps are not spent on unlearning a random opinion. With `squared` the loss is the squared error of
    the probabilities, instead of the cross-entropy.
    """
    if squared:
        _refuse_regression("cnn-dp", classes)
    channels, height, width = _image("cnn-dp", features, 16)
    height, width = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    output = nn.Linear(32 * height * width, classes or 1)
    if zero_output:
        nn.init.zeros_(output.weight)
        nn.init.zeros_(output.bias)
    network = nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        output,
    )
    return SquaredError(network) if squared else network


class SquaredError(nn.Module):
    """A classifier that is judged by the squared error of its probabilities.

    Brier, "Verification of Forecasts Expressed in Terms of Probability" (1950).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.network(x)
        return scores

    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        own = F.one_hot(y, output.shape[1])
        return (output.softmax(dim=1) - own).square().sum(dim=1)


def alexnet_small(features: Features, classes: int) -> nn.Module:
    """The small AlexNet, for images of 28 to 64 pixels: 2,472,266 parameters for 3 channels and 10 classes.

    After Krizhevsky, Sutskever and Hinton, "ImageNet Classification with Deep Convolutional Neural Networks" (2012),
    with one linear layer in place of three. It has no dropout, whose draws a resumed run could not repeat.
    """
    large = len(features) == 3 and min(features[1:]) >= 28
    fix = 'model.name = "resnet18-gn"' if large else 'model.name = "mlp"'
    channels, _, _ = _image("alexnet-small", features, 28, 64, fix)
    return nn.Sequential(
        nn.Conv2d(channels, 64, 11, stride=4, padding=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(256, classes or 1),
    )


def resnet18_gn(features: Features, classes: int, stem: str = "imagenet") -> nn.Module:
    """ResNet-18 with group normalisation: 11,181,642 parameters for 3 channels and 10 classes.

    He et al., "Deep Residual Learning for Image Recognition" (2016). Batch normalisation would mix the records, so
    GroupNorm stands in its place. The count is that of Malekmohammadi et al., "Differentially Private Clustered
    Federated Learning" (2024).

    Args:
        stem: "imagenet" (7x7, stride 2, max-pool) makes the image four times smaller first; "cifar" (3x3, stride 1)
            keeps it whole, which suits small images and takes about 16 times the arithmetic; 11,173,962 parameters.
    """
    if stem not in SMALLEST:
        raise UserError(
            f"model.stem = {stem!r} is not known.",
            f"It must be one of: {', '.join(SMALLEST)}. Nothing was run.",
            f'model.stem = "{nearest(str(stem), SMALLEST) or "imagenet"}"',
        )
    small = len(features) == 3 and SMALLEST["cifar"] <= min(features[1:]) < SMALLEST[stem]
    fix = 'model.stem = "cifar"' if small else 'model.name = "mlp"'
    channels, _, _ = _image("resnet18-gn", features, SMALLEST[stem], fix=fix)
    first = _convolution(channels, 64, 7, stride=2) if stem == "imagenet" else _convolution(channels, 64, 3)
    pool = [nn.MaxPool2d(3, stride=2, padding=1)] if stem == "imagenet" else []
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    return nn.Sequential(
        first,
        nn.GroupNorm(GROUPS, 64),
        nn.ReLU(),
        *pool,
        *(Residual(before, after) for before, after in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes or 1),
    )


class Residual(nn.Module):
    """The basic block of ResNet: two 3x3 convolutions beside a shortcut. Where the width grows the image halves."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.branch = nn.Sequential(
            _convolution(before, after, 3, stride),
            nn.GroupNorm(GROUPS, after),
            nn.ReLU(),
            _convolution(after, after, 3),
            nn.GroupNorm(GROUPS, after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != after:
            self.shortcut = nn.Sequential(_convolution(before, after, 1, stride), nn.GroupNorm(GROUPS, after))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def _convolution(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias (the normalisation after it has one), drawn as He et al. draw it."""
    layer = nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class LSTM(nn.Module):
    """LSTM layers and one fully connected layer, for text as token ids or as vectors.

    With its two layers it is the Sent140 model of Du, Xiang and Wu, "Mitigating Unfairness in Differentially-Private
    Federated Learning" (2025). A record of shape (length,) holds token ids as whole numbers: 0 is padding, and an id
    outside [0, vocabulary) is read as the nearest one inside, so that the last id stands for every unknown word. A
    record of shape (length, dims) holds vectors already embedded: a vector of zeros is padding.

    Padding is skipped wherever it stands: the state after the last token is what is classified, and a record of
    nothing but padding has the zero state.

    Args:
        vocabulary, embedding: of token ids only; 4096 and 32 unless given.
        hidden: width of a layer's state.
    """

    def __init__(
        self, features: Features, classes: int, vocabulary: int | None = None, embedding: int | None = None,
        hidden: int = 64, layers: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        if len(features) not in (1, 2):
            raise UserError(
                f'model.name = "lstm" does not fit records of shape {tuple(features)}.',
                "A text is a row of token ids (length,), or of vectors already embedded (length, dims).",
                'model.name = "cnn"' if len(features) == 3 else 'model.name = "mlp"',
            )
        _check_count("hidden", hidden, 64)
        _check_count("layers", layers, 2)
        if len(features) == 1:
            self.vocabulary = 4096 if vocabulary is None else vocabulary
            width = 32 if embedding is None else embedding
            _check_count("vocabulary", self.vocabulary, 4096, least=2)  # padding and one word
            _check_count("embedding", width, 32)
            self.embedding: nn.Embedding | None = nn.Embedding(self.vocabulary, width)
        else:
            for key, value in (("vocabulary", vocabulary), ("embedding", embedding)):
                if value is not None:
                    raise UserError(
                        f"model.{key} = {value} does not apply to records of shape {tuple(features)}.",
                        "They hold vectors already embedded, so there are no token ids to look up.",
                        f"remove model.{key}, or give token ids (length,)",
                    )
            width, self.embedding = features[1], None
        self.layers = nn.ModuleList([LSTMLayer(width if i == 0 else hidden, hidden) for i in range(layers)])
        self.output = nn.Linear(hidden, classes or 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is None:
            token = (x != 0).any(dim=2)
        else:
            ids = torch.nan_to_num(x).clamp(0, self.vocabulary - 1).long()
            x, token = self.embedding(ids), ids != 0
        for layer in self.layers:
            x = layer(x, token)
        return self.output(x[:, -1])


class LSTMLayer(nn.Module):
    """One layer of Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997), with the forget gate of Gers et al.

    It is made of plain linear layers, so that book-keeping can follow it. The bias of the forget gate starts
    at 1, so that the first steps remember (Jozefowicz et al., "An Empirical Exploration of Recurrent Network
    Architectures", 2015).
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input = nn.Linear(width, 4 * hidden)  # gates in the order of nn.LSTM: in, forget, cell, out
        self.state = nn.Linear(hidden, 4 * hidden, bias=False)
        nn.init.zeros_(self.input.bias)
        nn.init.ones_(self.input.bias[hidden : 2 * hidden])

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """The state after each step (n, length, hidden), for x (n, length, width); it stays where token is False."""
        driven = self.input(x)
        state = cell = driven.new_zeros(x.shape[0], self.hidden)  # len(x) would fix the batch of a graph
        states = []
        for step in range(x.shape[1]):
            entry, forget, candidate, leave = (driven[:, step] + self.state(state)).chunk(4, dim=1)
            new_cell = forget.sigmoid() * cell + entry.sigmoid() * candidate.tanh()
            new_state = leave.sigmoid() * new_cell.tanh()
            here = token[:, step].unsqueeze(1)
            state, cell = torch.where(here, new_state, state), torch.where(here, new_cell, cell)
            states.append(state)
        return torch.stack(states, dim=1)


def _refuse_regression(name: str, classes: int) -> None:
    if not classes:
        raise UserError(
            f'model.name = "{name}" does not fit a regression.',
            "The target of this dataset is a number, not a class.",
            'model.name = "linear"',
        )


def _image(
    name: str, features: Features, smallest: int, largest: float = math.inf, fix: str = 'model.name = "mlp"'
) -> tuple[int, int, int]:
    """The channels, height and width of the records, if they are images that the model can take."""
    if len(features) != 3 or min(features[1:]) < smallest or max(features[1:]) > largest:
        size = (
            f"at least {smallest}x{smallest}"
            if largest == math.inf
            else f"{smallest}x{smallest} to {largest}x{largest}"
        )
        raise UserError(
            f'model.name = "{name}" does not fit records of shape {tuple(features)}.',
            f"A convolution needs images (channels, height, width), here of {size} pixels.",
            fix,
        )
    channels, height, width = features
    return channels, height, width


def _check_count(key: str, value: object, usual: int, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(
            f"model.{key} = {value!r} is not valid.",
            f"It must be a whole number of at least {least}. Nothing was run.",
            f"model.{key} = {usual}",
        )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "linear": linear,
    "svm": SVM,
    "mlp": mlp,
    "cnn": cnn,
    "cnn-dp": cnn_dp,
    "alexnet-small": alexnet_small,
    "resnet18-gn": resnet18_gn,
    "lstm": LSTM,
}
