"""Layers that carry K clients, and `Net`, a model made of them.

A layer has K weights, one for each client, and computes with all of them at once: images are
(B, K*C, H, W), and features are (K, B, F). With K = 1 it is the ordinary layer. Layers without
weights, such as nn.MaxPool2d or nn.Dropout, are torch's own.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ReLU = functools.partial(nn.ReLU, inplace=True)


class Conv2d(nn.Conv2d):
    """K convolutions as a grouped one: weight (K, O, C, h, w), x (B, K*C, H, W) -> (B, K*O, ..)."""

    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, *, bias=True):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias)

    def forward(self, x):
        bias = self.bias
        if bias is not None:
            bias = bias.flatten()
        return self.convolve(x, bias)

    def convolve(self, x, bias):
        weight = self.weight
        groups = len(weight)
        if self.is_product(x):
            y = multiply_patches(x, weight, self.stride, self.padding)
            return y if bias is None else y + bias[:, None, None]
        is_on_cpu = x.device.type == "cpu"
        if groups == 1 and is_on_cpu and weight.numel() > x.numel():
            x = x.contiguous()  # in another order all these weights are turned in every step
        if groups > 1 and is_on_cpu and weight.shape[2] == 3 and IS_AVX2:
            x, weight = add_channel(x, weight)
        return F.conv2d(x, weight.flatten(0, 1), bias, self.stride, self.padding, groups=groups)

    def is_product(self, x) -> bool:
        """Whether products of matrices are faster: on a GPU, with many channels and small maps."""
        if x.device.type != PRODUCTS_ON or isinstance(self.padding, str):
            return False
        K, _, channels = self.weight.shape[:3]
        height, width = x.shape[-2:]
        side = max(height // self.stride[0], width // self.stride[1])
        return K > 1 and channels >= 32 and side <= 8


PRODUCTS_ON = "cuda"  # a test computes products on the CPU, too


def multiply_patches(x: Tensor, weight: Tensor, stride, padding) -> Tensor:
    """A grouped convolution as a product of matrices for each client: x (B, K*C, H, W)."""
    K, _, C, h, w = weight.shape
    top, left = padding
    x = F.pad(x.unflatten(1, (K, C)), (left, left, top, top))
    patches = x.unfold(3, h, stride[0]).unfold(4, w, stride[1])  # (B, K, C, H', W', h, w)
    B = len(x)
    size = patches.shape[3:5]
    patches = patches.permute(1, 2, 5, 6, 0, 3, 4).reshape(K, C * h * w, -1)
    y = Product.apply(weight.flatten(2), patches)  # (K, O, B * H' * W')
    return y.unflatten(2, (B, *size)).permute(2, 0, 1, 3, 4).flatten(1, 2).contiguous()


class Product(torch.autograd.Function):
    """Products of matrices (K, ..), with TF32 where cuDNN's convolutions have it."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        with precision_of_convolutions():
            return torch.bmm(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad
        with precision_of_convolutions():
            grad_a = torch.bmm(grad, b.transpose(1, 2)) if need_a else None
            grad_b = torch.bmm(a.transpose(1, 2), grad) if need_b else None
        return grad_a, grad_b


@contextlib.contextmanager
def precision_of_convolutions() -> Iterator[None]:
    """In this block products of matrices are as exact as cuDNN's convolutions.

    By default convolutions use TF32 and products do not. A user's switches decide: off means off.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


IS_AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"


def add_channel(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Adds a fourth channel of zeros to images and weights of 3 channels.

    AVX2 has a kernel for the gradient of such weights, but not in groups of 3. It is four times as
    fast.
    """
    x = x.permute(0, 2, 3, 1).unflatten(3, (len(weight), 3))  # (B, H, W, K, C)
    x = F.pad(x, (0, 1)).flatten(3).permute(0, 3, 1, 2)
    return x, F.pad(weight, (0, 0, 0, 0, 0, 1))


class PooledConv2d(Conv2d):
    """Conv2d, then maxima of 2 x 2. The bias comes after, because all four values have the same."""

    def forward(self, x):
        x = max_pool(self.convolve(x, None))
        return x + self.bias.flatten()[:, None, None]


def max_pool(x: Tensor) -> Tensor:
    """Maxima of 2 x 2. Without gradients, this is 12 times as fast as torch's own."""
    if torch.is_grad_enabled() or 1 in x.shape[-2:]:
        return F.max_pool2d(x, 2)
    height = x.shape[-2] // 2 * 2
    width = x.shape[-1] // 2 * 2
    x = torch.maximum(x[..., 0:height:2, :], x[..., 1:height:2, :])
    return torch.maximum(x[..., 0:width:2], x[..., 1:width:2])


class Linear(nn.Linear):
    """K linear maps: weight (K, O, F), x (K, B, F) or images (B, K*C, H, W) -> (K, B, O)."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features)

    def forward(self, x):
        if x.dim() == 4:
            x = x.unflatten(1, (len(self.weight), -1)).transpose(0, 1).flatten(2)
        if len(x) == 1:
            return F.linear(x[0], self.weight[0], self.bias[0])[None]
        return Affine.apply(x, self.weight, self.bias)


class Affine(torch.autograd.Function):
    """x W^T + b of each client: x (K, B, F), W (K, O, F), b (K, O) -> (K, B, O).

    Autograd's own gradient of W lies transposed in memory. Copying it costs as much as making it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x = torch.bmm(grad, weight) if need_x else None
        grad_weight = torch.bmm(grad.transpose(1, 2), x) if need_weight else None
        grad_bias = grad.sum(1) if need_bias else None
        return grad_x, grad_weight, grad_bias


class BatchNorm2d(nn.BatchNorm2d):
    """K batch norms, each with the statistics of its own client."""

    def forward(self, x):
        return F.batch_norm(
            x,
            self.running_mean.flatten(),  # a view of the stack, updated in place
            self.running_var.flatten(),
            self.weight.flatten(),
            self.bias.flatten(),
            self.training,
            self.momentum,
            self.eps,
        )


class GroupNorm(nn.GroupNorm):
    """K group norms: weight and bias (K, C), x (B, K*C, H, W)."""

    def forward(self, x):
        groups = self.num_groups * len(self.weight)
        return F.group_norm(x, groups, self.weight.flatten(), self.bias.flatten(), self.eps)


class Residual(nn.Module):
    """body(x) + skip(x)."""

    def __init__(self, body: list[nn.Module], skip: nn.Module):
        super().__init__()
        self.body = nn.Sequential(*body)
        self.skip = skip

    def forward(self, x):
        return self.body(x) + self.skip(x)


class Net(nn.Module):
    """Client-aware layers up to the features (K, B, F), and the linear head on them."""

    def __init__(self, body: list[nn.Module], head: nn.Module):
        super().__init__()
        self.features = nn.Sequential(*body)
        self.head = head

    def replace_head(self, projection: list[nn.Module], head: nn.Module) -> None:
        self.features.extend(projection)
        self.head = head


# ----------------------------------------------------------------------------------------- inputs


def arrange(x: Tensor) -> Tensor:
    """What a model takes: images (K, B, H, W, C) -> (B, K*C, H, W); other samples as they are.

    Channels lie last in memory. There convolutions of many clients are twice as fast on a CPU. On a
    GPU they lie first, where clients train together.
    """
    if x.dim() != 5:
        return x
    if x.device.type == PRODUCTS_ON and len(x) > 1:
        return x.permute(1, 0, 4, 2, 3).flatten(1, 2).contiguous()
    x = x.permute(1, 2, 3, 0, 4).flatten(3)  # (B, H, W, K * C)
    return x.contiguous().permute(0, 3, 1, 2)


def gather(samples: Tensor, index: Tensor) -> Tensor:
    """samples[index] for an index of any shape, several times as fast as torch's own."""
    rows = samples.index_select(0, index.flatten())
    return rows.view(*index.shape, *samples.shape[1:])
