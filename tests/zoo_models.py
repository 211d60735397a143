"""Models as users write them: small definitions that stand for published ones (see zoo.py).

Each has the kinds of layers of a published model, and uses them as it does. No code is copied.
NAME(channels, side, classes) makes a model, as --model FILE.py:NAME wants it.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune, rnn
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint
from torchvision import models

CODES = {"text": 80, "words": 300}  # how many codes these samples have


@dataclass
class Entry:
    """A model: what it stands for, what is special about it, the samples that it takes."""

    make: Callable[[int, int, int], nn.Module]
    source: str
    trait: str
    kind: str  # image (3x32x32), grey (1x28x28), series, table, or one of CODES
    decay: float


ZOO: dict[str, Entry] = {}


def like(source: str, kind: str, decay=1e-3) -> Callable:
    """Adds a model to the table. The first line of its docstring says what is special about it."""

    def add(make):
        trait = make.__doc__.splitlines()[0].rstrip(".")
        ZOO[make.__name__] = Entry(make, source, trait, kind, decay)
        return make

    return add


class Flat(nn.Module):
    """One linear map of all that a sample has. `setup` may add to it."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.size = channels * max(side, 1) ** 2
        self.fc = nn.Linear(self.size, classes)
        self.setup(classes)

    def setup(self, classes):
        pass

    def forward(self, x):
        return self.fc(x.flatten(1))


class Small(nn.Module):
    """A convolution of images, the mean over pixels, a linear map. `setup` may add to it."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, 2)
        self.fc = nn.Linear(6, classes)
        self.setup(classes)

    def setup(self, classes):
        pass

    def forward(self, x):
        return self.head(self.conv(x))

    def head(self, x):
        return self.fc(x.relu().mean((2, 3)))


class Text(nn.Module):
    """An embedding (n, L, 8), and a linear map. `setup` may add to it."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.codes = channels or CODES["text"]
        self.embedding = nn.Embedding(self.codes, 8, padding_idx=0)
        self.fc = nn.Linear(8, classes)
        self.setup(classes)

    def setup(self, classes):
        pass

    def forward(self, x):
        return self.fc(self.embedding(x).mean(1))


# ------------------------------------------------------- images: repositories of federated learning


@like("TsingZ0/PFLlib FedAvgCNN; KarhouTam/FL-bench avgcnn", "image")
class FedAvgCNN(nn.Module):
    """Sequential blocks, inplace ReLU, one pool for both, torch.flatten."""

    def __init__(self, channels, side, classes):
        super().__init__()
        pool = nn.MaxPool2d((2, 2))
        self.conv1 = nn.Sequential(nn.Conv2d(channels, 8, 5), nn.ReLU(inplace=True), pool)
        self.conv2 = nn.Sequential(nn.Conv2d(8, 16, 5), nn.ReLU(inplace=True), pool)
        self.fc = nn.Linear(400, classes)

    def forward(self, x):
        return self.fc(torch.flatten(self.conv2(self.conv1(x)), 1))


@like("pytorch/tutorials cifar10_tutorial; PFLlib CifarNet; NIID-Bench SimpleCNN", "image")
class CifarNet(nn.Module):
    """x.view(-1, n) after convolutions, log_softmax."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 84)
        self.fc = nn.Linear(84, classes)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        return F.log_softmax(self.fc(F.relu(self.fc1(x))), dim=1)


@like("SMILELab-FL/FedLab CNN_MNIST", "grey")
class GreyView(nn.Module):
    """x.view after a convolution of grey images, which have one channel."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, kernel_size=(5, 5))
        self.pool = nn.MaxPool2d(kernel_size=(2, 2))
        self.fc1 = nn.Linear(8 * 144, classes)

    def forward(self, x):
        x = self.pool(self.conv1(x))
        return self.fc1(x.view(x.shape[0], -1))


@like("TsingZ0/PFLlib LeNet (iswn)", "grey")
class BottleneckLeNet(nn.Module):
    """Dropout2d, x.view, BatchNorm1d, old weight_norm."""

    def __init__(self, channels, side, classes):
        super().__init__()
        conv = nn.Conv2d(channels, 6, kernel_size=5)
        self.conv_params = nn.Sequential(conv, nn.Dropout2d(p=0.5), nn.MaxPool2d(4), nn.ReLU())
        self.bottleneck = nn.Linear(216, 16)
        self.bn = nn.BatchNorm1d(16, affine=True)
        self.fc = nn.utils.weight_norm(nn.Linear(16, classes), name="weight")

    def forward(self, x):
        x = self.conv_params(x)
        x = x.view(x.size(0), -1)
        return self.fc(F.dropout(self.bn(self.bottleneck(x)), 0.5, self.training))


@like("Xtra-Computing/NIID-Bench VGG (FCBlockVGG)", "image")
class AlwaysDropped(Small):
    """F.dropout without training=..: it is random in tests, too."""

    def head(self, x):
        return self.fc(F.dropout(x.mean((2, 3))))


@like("QinbinLi/MOON ModelFedCon", "image")
class ModelFedCon(Small):
    """It returns a tuple: features, projection, logits."""

    def head(self, x):
        h = F.adaptive_avg_pool2d(x, 1).squeeze()  # a batch of one sample loses its axis
        return h, h, self.fc(h)


@like("QinbinLi/MOON ModelFedCon, its logits alone", "image")
class ModelFedConLogits(ModelFedCon):
    """squeeze() takes the axis of a batch of one; features kept on self."""

    def head(self, x):
        self.h, self.z, logits = super().head(x)
        return logits


@like("KarhouTam/FL-bench (buffers: global)", "image")
class StatisticsAsParameters(Small):
    """Batch statistics are parameters without gradient, which training moves."""

    def setup(self, classes):
        self.norm = nn.BatchNorm2d(6)
        for name, buffer in [*self.norm.named_buffers()]:
            delattr(self.norm, name)
            statistic = nn.Parameter(buffer.float(), requires_grad=False)
            self.norm.register_parameter(name, statistic)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)))


@like("KarhouTam/FL-bench DecoupledModel.get_all_features", "image")
class HookedFeatures(Small):
    """Hooks append features to a list on self; layers in a list, too."""

    def setup(self, classes):
        self.all_features = []
        self.dropout = [nn.Dropout(0.3)]
        self.conv.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.all_features.append(output.detach().clone())

    def forward(self, x):
        return self.head(self.dropout[0](self.conv(x)))


@like("FedML-AI/FedML CNN_OriginalFedAvg", "grey")
class NoChannelAxis(Flat):
    """Its images have no channel axis: torch.unsqueeze(x, 1)."""

    def forward(self, x):
        x = F.max_pool2d(torch.unsqueeze(x, 1), 1)
        return self.fc(F.conv2d(x, torch.ones(1, 1, 1, 1)).flatten(1))


@like("FedML-AI/FedML CNN_DropOut; pytorch/examples mnist; LEAF femnist", "grey")
class CNNDropOut(nn.Module):
    """Dropout of images after convolutions."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.conv2d_1 = nn.Conv2d(channels, 6, kernel_size=3)
        self.dropout_1 = nn.Dropout(0.25)
        self.linear_1 = nn.Linear(6 * 169, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2d_1(x)), 2)
        return self.linear_1(nn.Flatten()(self.dropout_1(x)))


class BatchedGroupNorm(nn.BatchNorm2d):
    """A norm of each sample by F.batch_norm. Its statistics are copied back."""

    def forward(self, x):
        mean = self.running_mean.repeat(len(x))
        var = self.running_var.repeat(len(x))
        samples = x.reshape(1, -1, *x.shape[2:])
        out = F.batch_norm(samples, mean, var, None, None, self.training, self.momentum)
        self.running_mean.copy_(mean.view(len(x), -1).mean(0))
        self.running_var.copy_(var.view(len(x), -1).mean(0))
        return out.view_as(x)


@like("FedML-AI/FedML resnet_gn", "image")
class HandMadeGroupNorm(Small):
    """A norm of its own, which copies into its statistics in tests, too."""

    def setup(self, classes):
        self.norm = BatchedGroupNorm(6)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)))


@like("FedML-AI/FedML FedNAS; Liu et al. 2019 DARTS", "image")
class MixedOperations(Small):
    """Weights of operations, which a list on self holds, too."""

    def setup(self, classes):
        pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.BatchNorm2d(6, affine=False))
        wide = nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=6, bias=False)
        self._ops = nn.ModuleList([nn.Identity(), pool, wide])
        self.alphas = nn.Parameter(1e-3 * torch.randn(1, 3))
        self._arch_parameters = [self.alphas]

    def forward(self, x):
        x = self.conv(x)
        weights = F.softmax(self.alphas, dim=-1)[0]
        return self.head(sum(w * op(x) for w, op in zip(weights, self._ops, strict=True)))


@like("diaoenmao/HeteroFL Conv; adap/flower heterofl", "image")
class HeteroFL(Small):
    """Batch norms without running statistics; a scaler in training."""

    def setup(self, classes):
        self.norm = nn.BatchNorm2d(6, momentum=None, track_running_stats=False)

    def forward(self, x):
        x = self.conv(x)
        return self.head(self.norm(x / 0.5 if self.training else x))


@like("diaoenmao/HeteroFL, with track=True", "image")
class CumulativeNorm(Small):
    """A batch norm of momentum None, which divides by its counter."""

    def setup(self, classes):
        self.norm = nn.BatchNorm2d(6, momentum=None)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)))


class Bernoulli(torch.autograd.Function):
    """A random mask, with the gradient of its probabilities."""

    @staticmethod
    def forward(ctx, probability):
        ctx.save_for_backward(probability)
        return torch.bernoulli(probability)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient


@like("adap/flower FedPM; Isik et al. 2023", "grey")
class FedPM(Flat):
    """Frozen weights by NumPy, random masks in tests, too; autograd.Function."""

    def setup(self, classes):
        signs = np.random.choice([-0.5, 0.5], size=self.fc.weight.shape)
        weight = torch.tensor(signs, dtype=torch.float)
        self.fc.weight = nn.Parameter(weight, requires_grad=False)
        self.mask = nn.Parameter(torch.randn_like(weight))

    def forward(self, x):
        mask = Bernoulli.apply(torch.sigmoid(self.mask))
        return F.linear(x.flatten(1), self.fc.weight * mask, self.fc.bias)


@like("Tarvainen and Valpola 2017; torch.optim.swa_utils", "image")
class MeanTeacher(nn.Module):
    """AveragedModel: a copy that gets no gradients, and its counter."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.student = Small(channels, side, classes)
        average = swa_utils.get_ema_multi_avg_fn(0.8)
        self.teacher = swa_utils.AveragedModel(self.student, multi_avg_fn=average)

    def forward(self, x):
        if not self.training:
            return self.teacher(x)
        self.teacher.update_parameters(self.student)
        return self.student(x)


@like("Caron et al. 2021 DINO", "image")
class CentredOutput(Small):
    """A buffer that forward replaces: self.center = .."""

    def setup(self, classes):
        self.register_buffer("center", torch.zeros(1, classes))

    def forward(self, x):
        out = super().forward(x)
        if self.training:
            batch_center = out.detach().mean(dim=0, keepdim=True)
            self.center = self.center * 0.9 + batch_center * 0.1
        return out - self.center


@like("Howard and Ruder 2018 ULMFiT; jhoon-oh/FedBABU", "image")
class GradualUnfreezing(Small):
    """Frozen layers begin to train at the second step."""

    def setup(self, classes):
        self.conv.requires_grad_(False)
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        self.conv.requires_grad_(self.steps > 1)
        return super().forward(x)


@like("Li et al. 2020 LotteryFL; Li et al. 2021 FedMask", "grey")
class BooleanMask(Flat):
    """A bool buffer that depends on the initial weights."""

    def setup(self, classes):
        size = self.fc.weight.detach().abs()
        self.register_buffer("mask", size > size.median())

    def forward(self, x):
        return F.linear(x.flatten(1), self.fc.weight * self.mask, self.fc.bias)


@like("Shoham et al. 2019 FedCurv; Xuhong et al. 2018 L2-SP", "table")
class AnchoredWeights(Flat):
    """A plain attribute holds a copy of the initial weights."""

    def setup(self, classes):
        self.anchor = self.fc.weight.detach().clone().double()

    def forward(self, x):
        return F.linear(x, 2 * self.fc.weight - self.anchor, self.fc.bias)


# ------------------------------------------------------------ PyTorch's examples and its own tools


@like("pytorch/examples dcgan; Miyato et al. 2018", "image")
class OldSpectralNorm(Small):
    """Old spectral_norm, whose buffers training changes."""

    def setup(self, classes):
        self.conv = nn.utils.spectral_norm(self.conv)


@like("pytorch/tutorials parametrizations", "image")
class Parametrized(Small):
    """New weight_norm, spectral_norm, orthogonal."""

    def setup(self, classes):
        self.more = parametrizations.spectral_norm(nn.Conv2d(6, 6, 3))
        parametrizations.weight_norm(self.conv)
        parametrizations.orthogonal(self.fc)

    def forward(self, x):
        return self.head(self.more(self.conv(x)))


@like("pytorch/tutorials pruning_tutorial", "grey")
class Pruned(Flat):
    """prune.l1_unstructured: a float mask of the initial weights."""

    def setup(self, classes):
        prune.l1_unstructured(self.fc, "weight", amount=0.5)


@like("pytorch/examples gcn; FedML-AI/FedGraphNN", "table")
class SparseGraph(Flat):
    """A sparse adjacency matrix is a float buffer."""

    def setup(self, classes):
        index = torch.arange(self.size)
        edges = torch.stack([index, index.roll(1)])
        adjacency = torch.sparse_coo_tensor(edges, torch.ones(self.size)).coalesce()
        self.register_buffer("adjacency", adjacency)

    def forward(self, x):
        return self.fc(torch.sparse.mm(self.adjacency, x.T).T.relu())


@like("torch.utils.checkpoint", "image")
class Checkpointed(Small):
    """checkpoint(): dropout runs twice in a step."""

    def forward(self, x):
        return checkpoint(self.drop, x, use_reentrant=False)

    def drop(self, x):
        return self.head(F.dropout(self.conv(x), 0.3, self.training))


@like("torch.compile", "image")
def Compiled(channels, side, classes):
    """torch.compile of a model with x.view."""
    return torch.compile(CifarNet(channels, side, classes), backend="aot_eager")


@like("torch.jit.script", "grey")
def Scripted(channels, side, classes):
    """A ScriptModule."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, 8), nn.Dropout(0.2))
    return torch.jit.script(net.append(nn.Linear(8, classes)))


@like("torch.fx", "image")
def Traced(channels, side, classes):
    """A GraphModule."""
    return torch.fx.symbolic_trace(CifarNet(channels, side, classes))


@like("torch.nn.LazyLinear", "grey")
def Lazy(channels, side, classes):
    """A layer without a size before its first batch."""
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


@like("torch.ao.quantization", "table")
class QuantizationAware(Flat):
    """Minima and maxima are infinite when built; scales follow them."""

    def setup(self, classes):
        self.observe = torch.ao.quantization.default_fake_quant()

    def forward(self, x):
        return self.fc(self.observe(x.float()).to(x.dtype))


@like("detection models, whose batch norms are frozen", "image")
class FrozenNorm(Small):
    """train() keeps the batch norm in evaluation mode, and returns nothing."""

    def setup(self, classes):
        self.norm = nn.BatchNorm2d(6)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()

    def forward(self, x):
        return self.head(self.norm(self.conv(x)))


@like("microsoft/LoRA loralib; Hu et al. 2022", "table")
class MergedLoRA(Flat):
    """A frozen weight, to which eval() adds the product of two trained ones."""

    def setup(self, classes):
        self.fc.weight.requires_grad = False
        self.lora = nn.ParameterDict({"A": torch.randn(2, self.size)})
        self.lora["B"] = nn.Parameter(torch.randn(classes, 2))

    def eval(self):
        self.fc.weight.data += self.lora["B"] @ self.lora["A"]
        return super().eval()

    def forward(self, x):
        y = self.fc(x)
        if self.training:
            y = y + F.linear(F.linear(x, self.lora["A"]), self.lora["B"])
        return y


# ------------------------------------------------------------------------------ images: torchvision


@like("torchvision resnet18", "image")
def ResNet18(channels, side, classes):
    """Residual blocks with batch norms."""
    return models.resnet18(num_classes=classes)


@like("torchvision mobilenet_v3_small", "image")
def MobileNetV3(channels, side, classes):
    """Inverted residuals, squeeze-excite, Hardswish, dropout."""
    return models.mobilenet_v3_small(num_classes=classes)


@like("torchvision shufflenet_v2_x0_5; FedScale", "image")
def ShuffleNetV2(channels, side, classes):
    """Channels are shuffled by view and transpose."""
    return models.shufflenet_v2_x0_5(num_classes=classes)


@like("torchvision efficientnet_b0; FLamby fed_isic2019", "image")
def EfficientNetB0(channels, side, classes):
    """Stochastic depth, SiLU, squeeze-excite."""
    return models.efficientnet_b0(num_classes=classes)


@like("torchvision DenseNet", "image")
def DenseNet(channels, side, classes):
    """Dense blocks with checkpoints and dropout."""
    sizes = {"growth_rate": 6, "block_config": (2, 2), "num_init_features": 8}
    return models.DenseNet(**sizes, drop_rate=0.1, memory_efficient=True, num_classes=classes)


@like("torchvision googlenet", "image")
def GoogLeNet(channels, side, classes):
    """In training it returns a tuple, with auxiliary logits."""
    return models.googlenet(num_classes=classes, aux_logits=True, init_weights=False)


@like("torchvision ConvNeXt", "image")
def ConvNeXt(channels, side, classes):
    """LayerNorm over channels, permute, layer scale, stochastic depth."""
    block = models.convnext.CNBlockConfig
    setting = [block(8, 16, 1), block(16, None, 1)]
    return models.ConvNeXt(setting, stochastic_depth_prob=0.4, num_classes=classes)


@like("torchvision Swin", "image")
def Swin(channels, side, classes):
    """Shifted windows; integer buffers; features and head that are not all."""
    sizes = {"patch_size": [4, 4], "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3]}
    return models.SwinTransformer(**sizes, window_size=[4, 4], num_classes=classes)


@like("torchvision VisionTransformer", "image")
def VisionTransformer(channels, side, classes):
    """Class token, learnt positions, dropout."""
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    options = {"dropout": 0.1, "num_classes": classes}
    return models.VisionTransformer(image_size=32, patch_size=8, **sizes, **options)


# ---------------------------------------------------------------- images: timm, other publications


@like("adobe/antialiased-cnns; timm BlurPool2d", "image")
class BlurPool(Small):
    """A float buffer that is no part of state_dict."""

    def setup(self, classes):
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        kernel = torch.outer(row, row).repeat(6, 1, 1, 1)
        self.register_buffer("kernel", kernel, persistent=False)

    def forward(self, x):
        return self.head(F.conv2d(self.conv(x), self.kernel, stride=2, groups=6))


@like("Kingma and Dhariwal 2018 Glow (ActNorm)", "image")
class ActNorm(Small):
    """The first batch sets parameters by .data; a uint8 buffer remembers it."""

    def setup(self, classes):
        self.loc = nn.Parameter(torch.zeros(6, 1, 1))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        x = self.conv(x)
        if self.training and self.initialized.item() == 0:
            self.loc.data.copy_(-x.detach().mean((0, 2, 3)).view(6, 1, 1))
            self.initialized.fill_(1)
        return self.head(x + self.loc)


@like("Courbariaux et al. 2015 BinaryConnect", "grey")
class BinaryConnect(Flat):
    """Weights are clamped by .data in forward; their signs are used."""

    def forward(self, x):
        self.fc.weight.data = self.fc.weight.data.clamp(-0.03, 0.03)
        weight = self.fc.weight
        binary = weight + (weight.sign() * 0.03 - weight).detach()
        return F.linear(x.flatten(1), binary, self.fc.bias)


@like("Ganin et al. 2016 gradient reversal", "image")
class GradientHooks(Small):
    """Hooks on weights, features and a module change gradients."""

    def setup(self, classes):
        self.conv.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.fc.register_full_backward_hook(lambda module, inside, outside: None)

    def forward(self, x):
        x = self.conv(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: -0.5 * gradient)
        return self.head(x)


@like("one batch norm as an attribute and in a Sequential", "image")
class TwoNames(Small):
    """self.bn has two names, and is used twice."""

    def setup(self, classes):
        self.bn = nn.BatchNorm2d(6)
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3), self.bn, nn.ReLU())

    def forward(self, x):
        return self.head(self.block(self.bn(self.conv(x))))


# --------------------------------------------------------------------------------- text and words


@like("FedLab RNN_Shakespeare; FedML RNN_OriginalFedAvg", "text")
class ShakespeareRNN(Text):
    """padding_idx, a two-layer LSTM, its last output."""

    def setup(self, classes):
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)

    def forward(self, input_seq):
        lstm_out, _ = self.lstm(self.embedding(input_seq))
        return self.fc(lstm_out[:, -1])


@like("TsingZ0/PFLlib LSTMNet, BiLSTM", "words")
class PackedLSTM(Text):
    """pack_padded_sequence by lengths, bidirectional, dropout between layers."""

    def setup(self, classes):
        options = {"bidirectional": True, "dropout": 0.2, "batch_first": True}
        self.lstm = nn.LSTM(8, 4, num_layers=2, **options)

    def forward(self, text):
        lengths = (text != 0).sum(1).cpu()
        options = {"batch_first": True, "enforce_sorted": False}
        packed = rnn.pack_padded_sequence(self.embedding(text), lengths, **options)
        packed_output, (hidden, cell) = self.lstm(packed)
        out, _ = rnn.pad_packed_sequence(packed_output, batch_first=True)
        return self.fc(torch.relu_(out[:, 0]) + torch.cat((hidden[-2], hidden[-1]), 1))


@like("PFLlib fastText; pytorch/tutorials text_sentiment_ngrams", "words", decay=0.0)
class SparseBag(Text):
    """Sparse gradients of an EmbeddingBag with offsets."""

    def setup(self, classes):
        self.embedding = nn.EmbeddingBag(self.codes, 8, sparse=True)
        self.embedding.weight.data.uniform_(-0.5, 0.5)

    def forward(self, text):
        offsets = torch.arange(0, text.numel(), text.size(1))
        return self.fc(self.embedding(text.flatten(), offsets))


@like("PFLlib TransformerModel; pytorch transformer_tutorial", "text")
class TextTransformer(Text):
    """TransformerEncoder, positions in a float buffer, a padding mask."""

    def setup(self, classes):
        angles = torch.arange(64)[:, None] * 10.0 ** -torch.arange(4)
        pe = torch.cat([angles.sin(), angles.cos()], 1)
        self.register_buffer("pe", pe[None])
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, src):
        x = self.embedding(src) * math.sqrt(8) + self.pe[:, : src.size(1)]
        return self.fc(self.encoder(x, src_key_padding_mask=src == 0).mean(1))


@like("pytorch/examples word_language_model; pfl-research LMLSTM", "text")
class TiedWeights(Text):
    """decoder.weight is encoder.weight; an LSTM of (L, n), a hidden state."""

    def setup(self, classes):
        self.classes = classes
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.2)
        self.decoder = nn.Linear(8, self.codes)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.3, 0.3)

    def forward(self, x):
        hidden = next(self.parameters()).new_zeros(2, len(x), 8)
        output, _ = self.rnn(self.embedding(x.t()), (hidden, hidden))
        return F.log_softmax(self.decoder(output[-1])[:, : self.classes], dim=1)


@like("torch.nn.Embedding, max_norm; word2vec", "text")
class MaxNorm(Text):
    """A lookup shortens long vectors in place, in tests, too."""

    def setup(self, classes):
        self.embedding = nn.Embedding(self.codes, 8, max_norm=1.0)


@like("transformers BertModel; google-research/bert", "words")
class Bert(Text):
    """A pooler that no loss uses; 300 codes; position_ids, a buffer not saved."""

    def setup(self, classes):
        self.position_embeddings = nn.Embedding(32, 8)
        self.register_buffer("position_ids", torch.arange(32).expand(1, -1), persistent=False)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True)
        self.pooler = nn.Linear(8, 8)

    def forward(self, input_ids):
        positions = self.position_ids[:, : input_ids.size(1)]
        x = self.embedding(input_ids) + self.position_embeddings(positions)
        return self.fc(self.layer(x, src_key_padding_mask=input_ids == 0)[:, 0])


@like("transformers AlbertModel; Lan et al. 2020; FedScale", "words")
class Albert(Text):
    """One layer in several places."""

    def setup(self, classes):
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.layers = nn.ModuleList([layer] * 3)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.fc(x.mean(1))


@like("transformers GPT2Model; karpathy/nanoGPT", "words")
class GPT(Text):
    """A causal mask is a bool buffer, -inf a float one; tied weights."""

    def setup(self, classes):
        self.c_attn = nn.Linear(8, 24)
        self.register_buffer("bias", torch.ones(32, 32, dtype=torch.bool).tril())
        self.register_buffer("masked_bias", torch.tensor(float("-inf")))
        self.lm_head = nn.Linear(8, self.codes, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, x):
        seen = self.bias[: x.size(1), : x.size(1)]
        x = self.embedding(x)
        q, k, v = self.c_attn(x).split(8, dim=2)
        attention = torch.where(seen, q @ k.transpose(-2, -1), self.masked_bias)
        return self.fc((x + attention.softmax(-1) @ v)[:, -1])


@like("transformers LlamaModel; FedLLM", "words")
class Llama(Text):
    """RMSNorm, rotary positions by a float buffer not saved, SwiGLU."""

    def setup(self, classes):
        self.norm = nn.RMSNorm(8)
        inv_freq = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.gate = nn.Linear(8, 8, bias=False)

    def rotate(self, x):
        angles = torch.outer(torch.arange(x.size(1)), self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        half = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
        return x * angles.cos() + half * angles.sin()

    def forward(self, x):
        x = self.embedding(x)
        q = self.rotate(self.norm(x))
        x = x + F.scaled_dot_product_attention(q, q, x, is_causal=True)
        return self.fc(F.silu(self.gate(x[:, -1])) * x[:, -1])


@like("transformers BartModel, OPT; Fan et al. 2020 LayerDrop", "text")
class LayerDrop(Text):
    """Python's random numbers leave out layers: no gradients in a step."""

    def setup(self, classes):
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.embedding(x).mean(1)
        for layer in self.layers:
            if self.training and random.uniform(0, 1) < 0.5:
                continue
            x = x + layer(x).tanh()
        return self.fc(x)


@like("Fedus et al. 2022 Switch Transformers; FedJETs", "text")
class MixtureOfExperts(Text):
    """Experts that no sample of a batch chose get no gradient."""

    def setup(self, classes):
        self.router = nn.Linear(8, 6, bias=False)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(8, 8) for i in range(6)})

    def forward(self, x):
        x = self.embedding(x).mean(1)
        gate, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts.values()):
            samples = torch.nonzero(choice == i)[:, 0]
            if len(samples):
                out.index_add_(0, samples, gate[samples, None] * expert(x[samples]))
        return self.fc(out)


@like("transformers ModelOutput", "text")
class ReturnsDict(Text):
    """It returns a dict with logits."""

    def forward(self, x):
        return {"logits": super().forward(x), "hidden_states": None}


# ------------------------------------------------------------------------------------------ series


@like("TsingZ0/PFLlib HARCNN", "series")
class HARCNN(nn.Module):
    """A series as an image of height 1: permute, unsqueeze, kernels (1, k)."""

    def __init__(self, channels, side, classes):
        super().__init__()
        pool = nn.MaxPool2d(kernel_size=(1, 2), stride=2)
        self.conv1 = nn.Sequential(nn.Conv2d(channels, 8, (1, 9)), nn.ReLU(), pool)
        self.fc = nn.Linear(8 * 12, classes)

    def forward(self, x):
        x = x.permute(0, 2, 1).unsqueeze(2)
        return self.fc(torch.flatten(self.conv1(x), 1))


class Recurrent(nn.Module):
    """A recurrent layer of a series."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.rnn = self.make(channels)
        self.fc = nn.Linear(8, classes)

    def make(self, channels):
        return nn.RNN(channels, 8, batch_first=True)


@like("a mistake: batch_first is forgotten", "series")
class BatchFirstForgotten(Recurrent):
    """An LSTM that mixes the samples of a batch."""

    def make(self, channels):
        return nn.LSTM(channels, 8)

    def forward(self, x):
        return self.fc(self.rnn(x)[0][:, -1])


@like("stateful RNNs, as truncated backpropagation uses them", "series")
class StatefulRNN(Recurrent):
    """A state on self goes from batch to batch, detached."""

    hidden = None

    def forward(self, x):
        start = None
        if self.hidden is not None and self.hidden.size(1) == len(x):
            start = self.hidden.detach()
        out, self.hidden = self.rnn(x, start)
        return self.fc(out[:, -1])


@like("fairseq wav2vec2; transformers Wav2Vec2Model", "series")
class Wav2Vec2(nn.Module):
    """Old weight_norm with dim=2; a vector used in training alone, by NumPy's masks."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.masked_spec_embed = nn.Parameter(torch.rand(channels))
        conv = nn.Conv1d(channels, channels, 5, padding=2, groups=2)
        self.pos_conv = nn.utils.weight_norm(conv, name="weight", dim=2)
        self.projector = nn.Linear(channels, classes)

    def forward(self, x):
        if self.training:
            mask = torch.from_numpy(np.random.rand(*x.shape[:2]) < 0.3)
            x = torch.where(mask[..., None], self.masked_spec_embed, x)
        x = x + F.gelu(self.pos_conv(x.transpose(1, 2))).transpose(1, 2)
        return self.projector(x.mean(1))


@like("neuraloperator FNO1d; Li et al. 2021", "series")
class ComplexWeights(nn.Module):
    """A complex parameter."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.weights = nn.Parameter(0.1 * torch.randn(channels, 8, dtype=torch.cfloat))
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1)
        return self.fc((spectrum @ self.weights.to(spectrum.dtype)).abs().mean(1))


# ------------------------------------------------------------------------------------------- tables


@like("TsingZ0/PFLlib DNN; CharlieDinh/pFedMe DNN", "table")
class DNN(nn.Module):
    """torch.flatten, two layers, log_softmax."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.fc1 = nn.Linear(channels, 20)
        self.fc = nn.Linear(20, classes)

    def forward(self, x):
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc(x), dim=1)


@like("AshwinRJ/Federated-Learning-PyTorch MLP; shaoxiongji", "table")
class MLP(nn.Module):
    """Its arguments mean other numbers: on a table dim_hidden is 0."""

    def __init__(self, dim_in, dim_hidden, dim_out):
        super().__init__()
        self.layer_input = nn.Linear(dim_in, dim_hidden)
        self.layer_hidden = nn.Linear(dim_hidden, dim_out)

    def forward(self, x):
        return self.layer_hidden(F.relu(self.layer_input(x)))


@like("Xtra-Computing/NIID-Bench FcNet", "table")
class FcNet(nn.Module):
    """A ModuleList, weights set by .data, F.dropout(training=self.training)."""

    def __init__(self, channels, side, classes):
        super().__init__()
        sizes = [(channels, 32), (32, 16), (16, classes)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        for layer in self.layers:
            layer.weight.data.normal_(0.0, 0.1)
            layer.bias.data.fill_(0.1)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.dropout(F.relu(layer(x)), p=0.2, training=self.training)
        return self.layers[-1](x)


@like("FedML LogisticRegression; FLamby fed_heart_disease", "table")
class SigmoidOutputs(Flat):
    """torch.sigmoid on the outputs, which are used as logits."""

    def forward(self, x):
        return torch.sigmoid(self.fc(x))


@like("adap/flower heterofl MLP (nn.Softmax)", "table")
class SoftmaxOutputs(Flat):
    """A mistake: it returns probabilities."""

    def forward(self, x):
        return self.fc(x).softmax(dim=1)


@like("models with features, head and a dropout between them", "table")
class HeadAndFeatures(Flat):
    """In tests alone it is head(features(x))."""

    def setup(self, classes):
        self.features = nn.Linear(self.size, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        z = self.features(x)
        return self.head(F.dropout(z, 0.5, self.training))


@like("a mistake: layers of the size of the first batch", "table")
class MadeInForward(Flat):
    """The first forward pass makes a layer, which no optimizer knows."""

    def forward(self, x):
        if not hasattr(self, "more"):
            self.more = nn.Linear(x.shape[1], x.shape[1]).to(x.dtype)
        return self.fc(self.more(x))


@like("dreamquark-ai/tabnet; Arik and Pfister 2021", "table")
class TabNet(nn.Module):
    """Ghost batch norm: one norm for each chunk of a batch; masks on self."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.bn = nn.BatchNorm1d(8, momentum=0.02)
        self.attentive = nn.Linear(channels, channels, bias=False)
        self.fc = nn.Linear(channels, 8)
        self.out = nn.Linear(4, classes)

    def forward(self, x):
        self.mask = self.attentive(x).softmax(-1)
        chunks = self.fc(x * self.mask).chunk(math.ceil(len(x) / 4), 0)
        return self.out(F.glu(torch.cat([self.bn(chunk) for chunk in chunks], dim=0)))


@like("Blealtan/efficient-kan; Liu et al. 2024 KAN", "table")
class KAN(Flat):
    """Splines on a grid, an expanded float buffer."""

    def setup(self, classes):
        self.register_buffer("grid", torch.linspace(-2, 2, 8).expand(self.size, -1))
        self.spline_weight = nn.Parameter(torch.randn(classes, self.size, 7) * 0.1)

    def forward(self, x):
        left, right = self.grid[:, :-1], self.grid[:, 1:]
        distance = F.relu(x[:, :, None] - left) * F.relu(right - x[:, :, None])
        spline = F.linear(distance.flatten(1), self.spline_weight.flatten(1))
        return self.fc(F.silu(x)) + spline


@like("two parameters, one memory", "table")
class SharedMemory(Flat):
    """Two parameters are views of one tensor: both move it."""

    def setup(self, classes):
        self.b = nn.Parameter(self.fc.weight.detach())

    def forward(self, x):
        return self.fc(x) + F.linear(x.tanh(), self.b)
