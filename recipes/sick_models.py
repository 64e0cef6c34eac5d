"""Twelve small models that learn in fp32 and overflow in fp16, each as real ones were reported to.

``SICK`` has them by name, ``HEALTHY`` three whose only trouble is the scale, and ``NO_MODULE`` one
whose loss is spoilt outside of any module. The data are made up from a seed; a run takes seconds on
one core. What overflows is one small part of one of several layers: run in fp32 it takes at most 5
per cent of the parameters, and the rest is at home in fp16.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import T5Config, T5ForConditionalGeneration

Batch = dict[str, Tensor]

WORDS, WIDTH, LENGTH, BATCH = 64, 32, 16, 8
IGNORED = -100  # a label without a loss
HELD_OUT = 1 << 20  # the seed of batches that no training sees


@dataclass(frozen=True, kw_only=True)
class SickModel:
    """One model, its data, and its training."""

    name: str
    about: str
    """What overflows."""
    make: Callable[[], nn.Module]
    """The model with its first weights, the same on each call, in fp32 on the CPU."""
    batches: Callable[[int], Iterator[Batch]]
    """Seed -> batches without end, on the CPU."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """Mean loss, shape ()."""
    cure: tuple[str, ...] = ()
    """The smallest modules that have to run in fp32."""
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    lr: float = 3e-3
    steps: int = 150
    """Optimizer steps."""
    accumulate: int = 1
    """Batches of one step."""
    init_scale: float = 2.0**16
    loss_in_model: bool = True
    """The model returns its loss; else it is made of the model's output."""
    loss_in_autocast: bool = False
    """The loss is made outside of the model, and under autocast."""


# --- data -----------------------------------------------------------------------------------------


def texts(seed: int) -> Iterator[Batch]:
    """Words that follow each other by chance, some pairs more often than others."""
    fixed = torch.Generator().manual_seed(0)
    follows = torch.softmax(2 * torch.randn(WORDS, WORDS, generator=fixed), dim=-1)
    chance = torch.Generator().manual_seed(seed)
    while True:
        words = [torch.randint(WORDS, (BATCH,), generator=chance)]
        for _ in range(LENGTH):
            words.append(torch.multinomial(follows[words[-1]], 1, generator=chance)[:, 0])
        row = torch.stack(words, dim=1)
        yield {"tokens": row[:, :-1], "labels": row[:, 1:]}


def padded_texts(seed: int) -> Iterator[Batch]:
    """The same, with up to half of each row padding, on the left."""
    chance = torch.Generator().manual_seed(seed)
    for batch in texts(seed):
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=chance)
        padding = torch.arange(LENGTH) < LENGTH - lengths
        labels = batch["labels"].masked_fill(padding, IGNORED)
        yield {"tokens": batch["tokens"], "labels": labels, "padding": padding}


def ciphers(seed: int) -> Iterator[Batch]:
    """Texts, and each word's place in another order of the words, as T5 takes them."""
    order = torch.randperm(WORDS, generator=torch.Generator().manual_seed(0))
    for batch in texts(seed):
        yield {"input_ids": batch["tokens"], "labels": order[batch["labels"]]}


def pictures(seed: int) -> Iterator[Batch]:
    """Noisy pictures of eight kinds, of 12 x 12 points."""
    kinds = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    chance = torch.Generator().manual_seed(seed)
    while True:
        kind = torch.randint(8, (2 * BATCH,), generator=chance)
        noise = torch.randn(2 * BATCH, 1, 12, 12, generator=chance)
        yield {"x": kinds[kind] + 3 * noise, "labels": kind}


def pairs(seed: int) -> Iterator[Batch]:
    """Queries, and the fixed features of the documents that they look for; one in four is empty."""
    fixed = torch.Generator().manual_seed(0)
    change = torch.randn(WIDTH, WIDTH, generator=fixed) / sqrt(WIDTH)
    chance = torch.Generator().manual_seed(seed)
    while True:
        documents = torch.randn(2 * BATCH, WIDTH, generator=chance)
        noise = torch.randn(2 * BATCH, WIDTH, generator=chance)
        empty = torch.rand(2 * BATCH, 1, generator=chance) < 1 / 4
        yield {"x": documents @ change + noise, "documents": documents.masked_fill(empty, 0.0)}


def signals(seed: int) -> Iterator[Batch]:
    """Inputs, and the outputs of a fixed network for them, in large units and with noise."""
    fixed = torch.Generator().manual_seed(0)
    first, second = (torch.randn(WIDTH, 64, generator=fixed) for _ in range(2))
    chance = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(2 * BATCH, WIDTH, generator=chance)
        y = torch.tanh(x @ first / 4) @ second.T * 4
        yield {"x": x, "target": y + 20 * torch.randn(y.shape, generator=chance)}


def samples(seed: int) -> Iterator[Batch]:
    """Real points on a curve, points that a generator made, and points between them."""
    chance = torch.Generator().manual_seed(seed)
    fixed = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    while True:
        angle = 6.28 * torch.rand(2 * BATCH, 1, generator=chance)
        real = torch.cat([angle.sin(), angle.cos()], dim=1) @ fixed
        made = 1 + torch.randn(2 * BATCH, 16, generator=chance)
        share = torch.rand(2 * BATCH, 1, generator=chance)
        yield {"real": real, "made": made, "between": share * real + (1 - share) * made}


# --- models ---------------------------------------------------------------------------------------


class Mlp(nn.Sequential):
    """Two layers, at home in fp16."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))


class Residual(nn.Module):
    """A layer with a norm before and one after it, as Gemma 2 and Swin V2 have them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.LayerNorm(WIDTH), layer, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        return x + self.after(self.layer(self.before(x), **kwargs))


class Language(nn.Module):
    """Says the next word. The caller gives one of its layers."""

    def __init__(
        self, layer: nn.Module, embed: nn.Module | None = None, checkpoints: bool = False
    ) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embed = embed or nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([Residual(each) for each in (Mlp(), layer, Mlp())])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss where there are labels, else the scores of the words."""
        x = self.norm(self.embed(tokens))
        for number, layer in enumerate(self.layers):
            given = {"padding": padding} if number == 1 and padding is not None else {}
            if self.checkpoints and self.training:
                x = checkpoint(layer, x, use_reentrant=False, **given)
            else:
                x = layer(x, **given)
        scores = self.head(x)
        return scores if labels is None else next_word(scores, labels)


def next_word(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of the words that have a label."""
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def enlarge(layer: nn.Module, factor: float) -> None:
    """Multiply a layer's weight, as a long training in bf16 or fp32 may."""
    with torch.no_grad():
        layer.weight *= factor


class Attention(nn.Module):
    """One head; the caller gives the functions that make scores and use them."""

    def __init__(self, scores: nn.Module, softmax: nn.Module) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scores, self.softmax = scores, softmax
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        if padding is not None:
            hidden = hidden | padding[:, None, :]
        weights = self.softmax(self.scores(self.query(x), self.key(x)), hidden)
        return self.out(weights @ self.value(x))


class Scores(nn.Module):
    """Divided after the product, as most write it."""

    def __init__(self, temperature: float = sqrt(WIDTH)) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-2, -1) / self.temperature


class CausalSoftmax(nn.Module):
    """Sets hidden scores to -inf; each row has one other score."""

    def forward(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)


# --- the twelve -----------------------------------------------------------------------------------


def t5_feed_forward() -> nn.Module:
    """T5-base: ``wo`` gave 66246 in the first report (huggingface/transformers#5651)."""
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=2 * WORDS, d_model=WIDTH, d_kv=16, d_ff=32, num_heads=2, num_layers=2,
            num_decoder_layers=1, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0,
        )
    )  # fmt: skip
    feed_forward = model.encoder.block[1].layer[1].DenseReluDense
    enlarge(feed_forward.wi, 1000)
    enlarge(feed_forward.wo, 300)
    return model


class ScaledEmbedding(nn.Module):
    """Gemma's embeddings are multiplied by the root of the width (huggingface/transformers#37226);
    there in Gemma 4's vision pooler an inf was found (#46277)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.project = nn.Embedding(WORDS, 8), nn.Linear(8, WIDTH)
        enlarge(self.project, 2e4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.project(self.words(tokens)) * sqrt(WIDTH)


def attention_logits() -> nn.Module:
    """Queries and keys of some hundreds: their product passes 65504 before it is divided
    (pytorch/pytorch#119131, ultralytics/ultralytics#24990)."""
    attention = Attention(Scores(temperature=2e4), CausalSoftmax())
    for layer in (attention.query, attention.key):
        enlarge(layer, 200)
    return Language(attention)


class TwiceMaskedSoftmax(nn.Module):
    """The mask was added once on the way, and is added again: a row that is all padding comes to
    -inf throughout, and its softmax to NaN (huggingface/transformers#17306)."""

    def forward(self, scores: Tensor, hidden: Tensor) -> Tensor:
        mask = torch.zeros_like(scores).masked_fill(hidden, -65504.0)
        return (scores + mask + mask).softmax(dim=-1)


class HandLayerNorm(nn.Module):
    """Squares of numbers above 256 are inf in fp16, and inf less inf is NaN (pytorch/pytorch#66707,
    facebookresearch/ConvNeXt#80)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(f(width)) for f in (torch.ones, torch.zeros))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = (x * x).mean(dim=-1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.weight + self.bias


def layer_norm() -> nn.Module:
    """See HandLayerNorm."""
    up = nn.Linear(WIDTH, 32)
    enlarge(up, 200)
    with torch.no_grad():
        up.bias += 400
    return Language(nn.Sequential(up, HandLayerNorm(32), nn.GELU(), nn.Linear(32, WIDTH)))


class SquaredRelu(nn.Module):
    """Primer's activation (arXiv:2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        return x * x


class SquaredReluMlp(nn.Module):
    """What overflows goes on into the next product: both have to run in fp32
    (unslothai/unsloth-zoo#600 has the same of a gate)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 16), SquaredRelu(), nn.Linear(16, WIDTH)
        enlarge(self.up, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class GatedRmsNorm(nn.Module):
    """Mamba 2's norm without its cast to fp32: a gated value is inf, the mean of the squares too,
    and inf / inf is NaN (of the squares alone: pytorch/pytorch#133085)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x * F.silu(gate)
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5) * self.weight


class Gated(nn.Module):
    """A layer of two branches and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = GatedRmsNorm(WIDTH)
        for layer in (self.up, self.gate):
            enlarge(layer, 800)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x), self.gate(x)))


class Router(nn.Module):
    """DeepSeek's router. Where its scores are as low as GLM's, which come down to 1e-8
    (flashinfer-ai/flashinfer#3875), the gradient of their quotient passes 65504 by itself, so that
    no scale of the loss helps; the quotient, and so the loss, is finite. Switch Transformers run
    the router in fp32 for it (arXiv:2101.03961)."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        with torch.no_grad():
            self.gate.bias -= 13

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = torch.sigmoid(self.gate(x)).topk(2, dim=-1)
        return weights / (weights[..., :1] + weights[..., 1:] + 1e-20), chosen


class Experts(nn.Module):
    """A mixture of experts, two of them for each word."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = Router(experts)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        all_of_them = torch.stack([torch.relu(expert(x)) for expert in self.experts], dim=-2)
        index = chosen[..., None].expand(*chosen.shape, x.shape[-1])
        return (all_of_them.gather(-2, index) * weights[..., None]).sum(dim=-2)


def convolution() -> nn.Module:
    """SDXL's decoder: convolutions whose outputs are too large for fp16
    (huggingface.co/madebyollin/sdxl-vae-fp16-fix)."""
    sizes = [(1, 6), (6, 6), (6, 24), (24, 24)]
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Conv2d(*size, 3, padding=1), nn.BatchNorm2d(size[1]), nn.ReLU()]
    enlarge(layers[3], 3e5)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9 * 24, 8))


class Cosine(nn.Module):
    """1e-8 is 0 in fp16, and an empty document is divided by it (pyg-team/pytorch_geometric#2106,
    huggingface/diffusers#13316)."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        one, other = (
            each / torch.sqrt(torch.einsum("nd,nd->n", each, each) + 1e-8)[:, None]
            for each in (one, other)
        )
        return one @ other.T


class Search(nn.Module):
    """How well each query fits each document."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))
        self.cosine = Cosine()

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        return 5 * self.cosine(self.tower(x), documents)


def right_document(scores: Tensor) -> Tensor:
    """Return the mean loss of the queries, each of which looks for its own document."""
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class RelativeError(nn.Module):
    """A quotient of sums over all points, as a dice loss is; the sums are made by products, as in
    Mask2Former (huggingface/transformers#25938), and inf / inf is NaN."""

    def forward(self, made: Tensor, target: Tensor) -> Tensor:
        made, target = made.flatten(), target.flatten()
        error = made - target
        return (error @ error) / (made @ made + target @ target)


class Denoiser(nn.Module):
    """Gives the signal, or where it is told that its relative error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, WIDTH)
        )
        enlarge(self.layers[-1], 30)
        self.error = RelativeError()

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        made = self.layers(x)
        return made if target is None else self.error(made, target)


class BatchDeviation(nn.Module):
    """StyleGAN's: how much the points of a batch differ, as one more feature. Where a feature is
    always 0, fp16 takes the gradient of the root of 0 (lucidrains/stylegan2-pytorch#101,
    NVIDIA/apex#654: a gradient penalty overflows until the scale is 0)."""

    def forward(self, x: Tensor) -> Tensor:
        apart = x - x.mean(dim=0)
        deviation = torch.sqrt((apart * apart).mean(dim=0) + 1e-8).mean()
        return torch.cat([x, deviation.expand(len(x), 1)], dim=1)


class Critic(nn.Module):
    """Tells made points from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.deviation = BatchDeviation()
        self.last = nn.Sequential(nn.Linear(49, 48), nn.Softplus(), nn.Linear(48, 1))
        with torch.no_grad():
            self.first[2].bias[:4] = -50  # units that never fire

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.deviation(self.first(x)))


class Wasserstein(nn.Module):
    """WGAN-GP's loss of a critic (arXiv:1704.00028)."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = Critic()

    def forward(self, real: Tensor, made: Tensor, between: Tensor) -> Tensor:
        between = between.detach().requires_grad_()
        slope = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)[0]
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + 10 * penalty


# --- the tables -----------------------------------------------------------------------------------


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """``make`` with the same random numbers on each call, which takes none from others."""

    def call() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return call


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that the model returns."""
    output = model(**batch)
    return output if isinstance(output, Tensor) else output.loss


def loss_of_words(model: nn.Module, batch: Batch) -> Tensor:
    """Make the loss of the model's output."""
    return next_word(model(batch["tokens"]), batch["labels"])


def loss_of_pictures(model: nn.Module, batch: Batch) -> Tensor:
    """Make the loss of the model's output."""
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def loss_of_search(model: nn.Module, batch: Batch) -> Tensor:
    """Make the loss of the model's output."""
    return right_document(model(**batch))


def error_in_fp16(model: nn.Module, batch: Batch) -> Tensor:
    """Make the loss of the model's output: under autocast, in no module of the model."""
    return RelativeError()(model(batch["x"]), batch["target"])


def summed_loss_of_words(model: nn.Module, batch: Batch) -> Tensor:
    """Make a loss that is a sum, whose gradient fits in fp16 at a scale of 1024, not of 65536."""
    return loss_of_words(model, batch) * batch["labels"].numel()


def broken_signals(seed: int) -> Iterator[Batch]:
    """Signals; the tenth batch holds a NaN."""
    for number, batch in enumerate(signals(seed)):
        if number == 9:
            batch["x"][0, 0] = float("nan")
        yield batch


def language(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A language model with this layer in the middle."""
    return seeded(lambda: Language(layer()))


SGD = torch.optim.SGD
TWELVE = [
    SickModel(
        name="t5_feed_forward",
        about="the output of wo, in one of T5's feed-forwards",
        make=seeded(t5_feed_forward),
        batches=ciphers,
        loss=own_loss,
        cure=("encoder.block.1.layer.1.DenseReluDense.wo",),
        lr=5e-3,
        steps=100,
    ),
    SickModel(
        name="scaled_embedding",
        about="embeddings times the root of their width",
        make=seeded(lambda: Language(Mlp(), embed=ScaledEmbedding())),
        batches=texts,
        loss=own_loss,
        cure=("embed",),
    ),
    SickModel(
        name="attention_logits",
        about="products of queries and keys, before they are divided",
        make=seeded(attention_logits),
        batches=texts,
        loss=own_loss,
        cure=("layers.1.layer.scores",),
    ),
    SickModel(
        name="masked_softmax",
        about="a mask of -65504 that is added twice",
        make=language(lambda: Attention(Scores(), TwiceMaskedSoftmax())),
        batches=padded_texts,
        loss=own_loss,
        cure=("layers.1.layer.softmax",),
        steps=250,
    ),
    SickModel(
        name="layer_norm",
        about="squares in a layer norm written by hand",
        make=seeded(layer_norm),
        batches=texts,
        loss=loss_of_words,
        cure=("layers.1.layer.1",),
        loss_in_model=False,
    ),
    SickModel(
        name="squared_relu",
        about="a squared activation, and the layer after it",
        make=language(SquaredReluMlp),
        batches=texts,
        loss=loss_of_words,
        cure=("layers.1.layer.act", "layers.1.layer.down"),
        accumulate=2,
        loss_in_model=False,
    ),
    SickModel(
        name="rms_norm",
        about="a gated RMS norm in fp16",
        make=seeded(lambda: Language(Gated(), checkpoints=True)),
        batches=texts,
        loss=own_loss,
        cure=("layers.1.layer.norm",),
    ),
    SickModel(
        name="mixture_of_experts",
        about="the router's backward, at any scale, while the loss is finite",
        make=language(Experts),
        batches=texts,
        loss=own_loss,
        cure=("layers.1.layer.router",),
        steps=250,
    ),
    SickModel(
        name="convolution",
        about="one of four convolutions",
        make=seeded(convolution),
        batches=pictures,
        loss=loss_of_pictures,
        cure=("3",),
        optimizer=SGD,
        lr=0.05,
        loss_in_model=False,
    ),
    SickModel(
        name="cosine",
        about="an epsilon of 1e-8 below an empty document",
        make=seeded(Search),
        batches=pairs,
        loss=loss_of_search,
        cure=("cosine",),
        loss_in_model=False,
    ),
    SickModel(
        name="summed_loss",
        about="a loss summed in fp16, in a module of the model",
        make=seeded(Denoiser),
        batches=signals,
        loss=own_loss,
        cure=("error",),
    ),
    SickModel(
        name="gradient_penalty",
        about="a gradient within the forward, for WGAN-GP",
        make=seeded(Wasserstein),
        batches=samples,
        loss=own_loss,
        cure=("critic.deviation",),
        lr=1e-3,
        steps=300,
    ),
]
CONTROLS = [
    SickModel(
        name="high_scale",
        about="the first scale is 2**24",
        make=language(Mlp),
        batches=texts,
        loss=own_loss,
        init_scale=2.0**24,
    ),
    SickModel(
        name="loud_loss",
        about="a loss that is a sum; its backward fits at a scale of 1024",
        make=language(Mlp),
        batches=texts,
        loss=summed_loss_of_words,
        loss_in_model=False,
    ),
    SickModel(
        name="nan_batch",
        about="one batch holds a NaN",
        make=seeded(Denoiser),
        batches=broken_signals,
        loss=lambda model, batch: F.mse_loss(model(batch["x"]), batch["target"]),
        init_scale=2.0**10,
        loss_in_model=False,
    ),
]
SICK = {each.name: each for each in TWELVE}
HEALTHY = {each.name: each for each in CONTROLS}
NO_MODULE = SickModel(
    name="loss_outside",
    about="the loss is summed in fp16 by the training script: no module of the model is at fault",
    make=seeded(Denoiser),
    batches=signals,
    loss=error_in_fp16,
    loss_in_model=False,
    loss_in_autocast=True,
)
