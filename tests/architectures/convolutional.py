"""Convolutional networks: classifiers, segmentation, sequences and volumes."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small_models import CLASSES, Architecture, draw_images


def trained(layer: nn.Module) -> nn.Module:
    """A norm with statistics and affine parameters that have seen data: fresh ones are zeros and ones."""
    for value in layer.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.5, 1.5)
    return layer


def batch_norm(channels: int) -> nn.Module:
    return trained(nn.BatchNorm2d(channels))


def conv3x3(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, groups=groups, bias=False)


def head(channels: int) -> nn.Module:
    """Channels [n, c, h, w] averaged, then logits."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Bottleneck(nn.Module):
    """1x1, 3x3 (in groups: ResNeXt), 1x1, each with BatchNorm, beside a shortcut."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(inputs, inner, kernel_size=1, bias=False),
            batch_norm(inner),
            nn.ReLU(inplace=True),
            conv3x3(inner, inner, stride, groups),
            batch_norm(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outputs, kernel_size=1, bias=False),
            batch_norm(outputs),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False), batch_norm(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.inside(x)
        out += self.shortcut(x)
        return F.relu(out)


def bottlenecks(groups: int) -> nn.Module:
    """ResNet for one group, ResNeXt for more; a strided stem and max pooling in front."""
    return nn.Sequential(
        nn.Conv2d(3, 4, kernel_size=3, stride=2, padding=1, bias=False),
        batch_norm(4),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        Bottleneck(4, 4, 8, 1, groups),
        Bottleneck(8, 4, 8, 2, groups),
        head(8),
    )


class SqueezeExcitation(nn.Module):
    """Channels weighed by what the image as a whole looks like."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        return x * F.hardsigmoid(gate)


class InvertedResidual(nn.Module):
    """MobileNet's block: expand, convolve channel by channel, weigh, project."""

    def __init__(self, channels: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.inside = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            batch_norm(wide),
            nn.Hardswish(),
            conv3x3(wide, wide, groups=wide),
            batch_norm(wide),
            SqueezeExcitation(wide),
            nn.Hardswish(inplace=True),
            nn.Conv2d(wide, channels, 1, bias=False),
            batch_norm(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


class UNet(nn.Module):
    """Down, up and a bridge; `up` doubles the size."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.down, self.inner = conv3x3(2, 4), conv3x3(4, 4)
        self.up, self.out = up, nn.Conv2d(8, CLASSES, kernel_size=3, padding=1, padding_mode="reflect")
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.norm(self.down(x)))
        low = F.relu(self.inner(F.max_pool2d(high, 2)))
        return self.out(torch.cat([high, self.up(low)], dim=1))


def draw_labelled_pixels(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 6, 6), torch.randint(CLASSES, (n, 6, 6))


def pixel_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each pixel, and a Dice term for overlap."""
    chosen = output.softmax(0)
    wanted = F.one_hot(target, CLASSES).movedim(-1, 0).to(output.dtype)
    dice = 2 * (chosen * wanted).sum((1, 2)) / (chosen + wanted).sum((1, 2))
    return F.cross_entropy(output[None], target[None]) + (1 - dice).mean()


UPSAMPLINGS: dict[str, nn.Module] = {
    "nearest": nn.Upsample(scale_factor=2, mode="nearest"),
    "nearest-exact": nn.Upsample(scale_factor=2, mode="nearest-exact"),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear-aligned": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "bicubic": nn.Upsample(scale_factor=2, mode="bicubic"),
    "area": nn.Upsample(size=(6, 6), mode="area"),
}


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 3, kernel_size=2),
        trained(nn.BatchNorm3d(3)),
        nn.ELU(),
        nn.MaxPool3d(2),
        nn.ConvTranspose3d(3, 2, kernel_size=2, stride=2),
        nn.AdaptiveAvgPool3d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


class FeaturePyramid(nn.Module):
    """A detector: levels of several sizes, joined from the top down, with class and box heads that all levels
    share.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.levels = nn.ModuleList(conv3x3(a, b, stride=2) for a, b in pairwise((2, width, width)))
        self.lateral = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))
        self.classes, self.boxes = nn.Conv2d(width, CLASSES, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        high = F.silu(self.levels[0](x))
        low = F.silu(self.levels[1](high))
        low = self.lateral[1](low)
        high = self.lateral[0](high) + F.interpolate(low, size=high.shape[-2:], mode="nearest")
        classes = [self.classes(level).flatten(2) for level in (high, low)]
        boxes = [self.boxes(level).flatten(2) for level in (high, low)]
        return torch.cat(classes, dim=2), torch.cat(boxes, dim=2)


def detection_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Every place's class, and the box where there is an object (class 0 is none)."""
    classes, boxes = output
    somewhere = (target > 0).to(boxes.dtype)
    distance = F.smooth_l1_loss(boxes, torch.ones_like(boxes), reduction="none").sum(0)
    return F.cross_entropy(classes.t(), target) + (distance * somewhere).sum() / somewhere.sum().clamp(min=1)


ARCHITECTURES = (
    Architecture("resnet-batch-norm", lambda: bottlenecks(groups=1), draw_images(3, 16)),
    Architecture("resnext", lambda: bottlenecks(groups=2), draw_images(3, 16)),
    Architecture(
        "mobilenet",
        lambda: nn.Sequential(conv3x3(3, 4, 2), InvertedResidual(4, 2), head(4)),
        draw_images(3, 8),
    ),
    Architecture(
        "unet-transposed",
        lambda: UNet(nn.ConvTranspose2d(4, 4, kernel_size=2, stride=2)),
        draw_labelled_pixels,
        pixel_loss,
    ),
    *(
        Architecture(f"unet-{name}", lambda up=up: UNet(up), draw_labelled_pixels, pixel_loss)
        for name, up in UPSAMPLINGS.items()
    ),
    Architecture("volumes", volumes, lambda n: (torch.randn(n, 1, 7, 7, 7), torch.randint(CLASSES, (n,)))),
    Architecture(
        "feature-pyramid",
        FeaturePyramid,
        lambda n: (torch.randn(n, 2, 8, 8), torch.randint(CLASSES, (n, 20))),
        detection_loss,
    ),
)
