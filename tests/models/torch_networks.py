"""Small versions of networks as users of PyTorch write them: (module, example) by name."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


class MnistNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(16 * 6 * 6, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


class LeNet5(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def encode(self, x):
        x = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x))))))
        x = x.view(-1, 16 * 5 * 5)
        return F.relu(self.fc2(F.relu(self.fc1(x))))

    def head(self, x):
        return self.fc3(x)

    def forward(self, x):
        return self.head(self.encode(x))


class BasicBlock(nn.Module):
    def __init__(self, inputs, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(planes), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inputs != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self, width=8, classes=10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        self.layers = nn.ModuleList(
            nn.Sequential(BasicBlock(a, b, 1 if i == 0 else 2), BasicBlock(b, b))
            for i, (a, b) in enumerate(pairwise(sizes))
        )
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for layer in self.layers:
            x = layer(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride, expand):
        super().__init__()
        hidden = inputs * expand
        self.residual = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden), nn.Hardswish(), nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x):
        scale = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(F.silu(self.down(scale))))


def mobile_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(), InvertedResidual(8, 8, 1, 2),
        SqueezeExcite(8), InvertedResidual(8, 16, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = self.double(1, 4), self.double(4, 8)
        self.pool, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.join, self.out = self.double(8, 4), nn.Conv2d(4, 3, 1)

    @staticmethod
    def double(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.LeakyReLU(0.1, inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding="same", dilation=2), nn.InstanceNorm2d(outputs), nn.PReLU(outputs),
        )  # fmt: skip

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(self.pool(first))
        up = self.up(second)
        smooth = F.interpolate(second, scale_factor=2, mode="bilinear", align_corners=False)[:, :4]
        near = F.interpolate(second, size=first.shape[-2:], mode="nearest")[:, 4:]
        up = up + smooth * near
        pad = first.size(3) - up.size(3)
        up = F.pad(up, [pad // 2, pad - pad // 2, 0, 0])
        return self.out(self.join(torch.cat([first, up], dim=1)))


class LSTMClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3)
        self.fc = nn.Linear(12, 4)

    def forward(self, tokens):
        batch = tokens.size(0)
        h0, c0 = torch.zeros(4, batch, 6), torch.zeros(4, batch, 6)
        outputs, (hidden, _) = self.lstm(self.embedding(tokens), (h0, c0))
        last = torch.cat((hidden[-2], hidden[-1]), dim=1)
        return self.fc(last + outputs[:, -1, :])


class Seq2Seq(nn.Module):
    """GRU encoder, and a decoder of GRU cells with additive attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
        self.query, self.memory, self.score = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 1, bias=False)
        self.cell, self.out = nn.GRUCell(8, 8), nn.Linear(16, 20)

    def forward(self, tokens):
        memory, hidden = self.encoder(self.embed(tokens))
        h, steps = hidden.squeeze(0), []
        for _ in range(3):
            scores = self.score(torch.tanh(self.query(h).unsqueeze(1) + self.memory(memory)))
            context = (F.softmax(scores, dim=1) * memory).sum(dim=1)
            h = self.cell(context, h)
            steps.append(self.out(torch.cat([h, context], dim=-1)))
        return torch.stack(steps, dim=1)


class PositionalEncoding(nn.Module):
    def __init__(self, width, longest=32):
        super().__init__()
        position = torch.arange(longest).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        pe = torch.zeros(longest, 1, width)
        pe[:, 0, 0::2], pe[:, 0, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0)])


class TransformerClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(30, 16), PositionalEncoding(16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, activation="gelu", norm_first=True)
        self.encoder, self.fc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.position(self.embedding(tokens).transpose(0, 1) * math.sqrt(16))
        x = self.encoder(x, src_key_padding_mask=padding).transpose(0, 1)
        kept = (~padding).unsqueeze(-1).float()
        return self.fc((x * kept).sum(1) / kept.sum(1).clamp(min=1))


class CausalLM(nn.Module):
    """A small language model whose output layer shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        x, length = self.embed(tokens), tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x), attn_mask=mask, need_weights=True)[0]
        q, k, v = (part.view(x.size(0), length, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + y.transpose(1, 2).reshape(x.shape))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token, self.place = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.place
        return self.head(self.blocks(x)[:, 0])


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.convs = nn.ModuleList(nn.Conv1d(8, 6, k) for k in (2, 3, 4))
        self.norm, self.fc = nn.BatchNorm1d(18), nn.Linear(18, 3)

    def forward(self, tokens):
        x = self.embed(tokens).permute(0, 2, 1)
        pooled = [F.max_pool1d(F.relu(conv(x)), conv(x).shape[2]).squeeze(2) for conv in self.convs]
        return self.fc(self.norm(torch.cat(pooled, 1)))


class DenseBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4 + 3 * i), nn.ReLU(), nn.Conv2d(4 + 3 * i, 3, 3, padding=1)) for i in range(3)
        )
        self.first, self.fc = nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.Linear(13 * 9, 4)

    def forward(self, x):
        found = [self.first(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        x = F.avg_pool2d(torch.cat(found, 1), 3, stride=2, padding=1, ceil_mode=True)
        return self.fc(F.adaptive_avg_pool2d(x, (3, 3)).flatten(1))


class ConvNextBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gamma = nn.Parameter(torch.full((8,), 0.1))
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(F.gelu(self.wide(y)))
        return self.out((x + y.permute(0, 3, 1, 2)).amax(dim=(-2, -1)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=1)
        self.second = nn.ConvTranspose1d(6, 2, 4, stride=3, dilation=2, bias=False)
        self.shrink = nn.Conv1d(2, 2, 5, stride=2, dilation=2)

    def forward(self, x):
        return self.shrink(torch.tanh(self.second(F.elu(self.first(x)))))


class RnnTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.gru = nn.RNN(5, 6, nonlinearity="relu"), nn.GRU(6, 4, 2, bidirectional=True, bias=False)
        self.lstm, self.tag = nn.LSTMCell(8, 5), nn.Linear(5, 3)

    def forward(self, x):
        x, _ = self.rnn(x.transpose(0, 1))
        x, _ = self.gru(x)
        h = c = x.new_zeros(x.size(1), 5)
        found = []
        for step in x.unbind(0):
            h, c = self.lstm(step, (h, c))
            found.append(self.tag(h))
        return torch.stack(found, 1)


class Handwritten(nn.Module):
    """Tensor methods and functional forms, in-place assignments, buffers, frozen parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4) * 0.5)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.randn(6))

    def forward(self, x):
        x = (x - self.mean) / x.std(dim=1, keepdim=True).clamp_min(1e-3)
        y = torch.zeros_like(x)
        y[:, :3] = x[:, 3:] ** 2
        y[:, 3:] += torch.where(x[:, :3] > 0, x[:, :3], 0.1 * x[:, :3].abs())
        z = self.frozen(y @ self.weight)
        z = F.normalize(z, dim=-1) + F.softplus(z).logsumexp(1, keepdim=True)
        with torch.no_grad():
            offset = z.mean()
        values, _ = torch.einsum("bi,bj->bij", z, z).max(dim=2)
        weights = F.one_hot(values.argmax(1), 4).to(z.dtype)
        return torch.cat([values - offset, z.sort(1).values, (weights * z).sum(1, keepdim=True), z.topk(2)[0]], 1)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(6, 12), nn.GELU("tanh"), nn.Linear(12, 6))
        self.channels = nn.Sequential(nn.Linear(5, 9), nn.Mish(), nn.Linear(9, 5))
        self.norm1, self.norm2, self.out = nn.LayerNorm(5), nn.RMSNorm(5), nn.Bilinear(5, 5, 3)

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).mT).mT
        x = x + self.channels(self.norm2(x))
        return self.out(x.mean(1), x.var(1))


def images(*shape):
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(7))


def tokens(length, words):
    found = torch.randint(1, words, (3, length), generator=torch.Generator().manual_seed(7))
    found[1, -2:] = 0
    return found


NETWORKS = {
    "mnist": lambda: (MnistNet(), images(1, 16, 16)),
    "lenet": lambda: (LeNet5(), images(3, 32, 32)),
    "resnet18": lambda: (ResNet18(), images(3, 64, 64)),
    "mobilenet": lambda: (mobile_net(), images(3, 16, 16)),
    "unet": lambda: (UNet(), images(1, 10, 14)),
    "lstm": lambda: (LSTMClassifier(), tokens(7, 30)),
    "seq2seq": lambda: (Seq2Seq(), tokens(5, 20)),
    "transformer": lambda: (TransformerClassifier(), tokens(9, 30)),
    "causal_lm": lambda: (CausalLM(), tokens(6, 20)),
    "vit": lambda: (VisionTransformer(), images(3, 16, 16)),
    "text_cnn": lambda: (TextCNN(), tokens(9, 30)),
    "densenet": lambda: (DenseBlock(), images(1, 11, 11)),
    "convnext": lambda: (ConvNextBlock(), images(3, 12, 12)),
    "decoder": lambda: (Decoder(), images(4, 5)),
    "rnn_tagger": lambda: (RnnTagger(), images(4, 5)),
    "handwritten": lambda: (Handwritten(), images(6)),
    "mixer": lambda: (Mixer(), images(6, 5)),
}
