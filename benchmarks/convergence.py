"""What a parameter update that comes one step late costs in loss: the step modes side by side.

    OMP_NUM_THREADS=1 python benchmarks/convergence.py --processes 2  # on two cores half an hour

Seven tasks, none needs a network. The two recipes' own (``classifier``: MiniLM learns to label
docstrings with its last layer; ``trainer``: a small GPT-2 under the Trainer); ``lora``: MiniLM's
docstrings with adapters in two layers; ``scratch``: a deeper GPT-2 on the bytes of Python's help
texts and docstrings; and on made-up data ``images`` (a convolutional net), ``recurrent`` (a GRU,
four micro-batches a step, clipped to less than the others) and ``half`` (float16 weights).

Learning rates rise for a tenth of the steps to a peak and fall to zero. The peak is the one of a
coarse grid that ``sync`` likes best (``--sweep`` shows it), and twice that. ``--long`` asks whether
a run of 1,000 steps makes up for what a short one lost.

Runs of one seed share data, order, first weights and dropout, so differences to ``sync`` are taken
seed by seed. Losses are held-out ones, of the newest parameters; looking at them makes the next
step of ``delayed, none`` a fresh one, LOOKS times in a run. The last column says whether the mean
difference is at most the standard deviation of ``sync`` over the seeds; ``better``: it is more,
to the good. ``overlap`` must equal ``sync`` exactly; if its losses or its final weights differ in
one bit, the script says so and ends with status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib
import json
import math
import multiprocessing
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    default_data_collator,
    get_linear_schedule_with_warmup,
)
from transformers.modeling_outputs import ModelOutput, SequenceClassifierOutput

from accel_scaler import ScalerConfig, attach, detach

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
LOOKS = 3
HELD_OUT = 128  # texts, or blocks of text, that a model is judged by
STEPS = {"classifier": 39, "lora": 45, "trainer": 180, "scratch": 120,
         "images": 300, "recurrent": 120, "half": 600}  # fmt: skip
LONG = 1000
GRID = {"adamw": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "sgd": (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)}
# Of GRID the peak with the least held-out loss of ``sync``, over two seeds.
RATES: dict[tuple[str, str], float] = {
    ("classifier", "adamw"): 1e-3,
    ("lora", "adamw"): 3e-3,
    ("trainer", "adamw"): 1e-3,
    ("trainer", "sgd"): 3e-1,
    ("scratch", "adamw"): 1e-3,
    ("scratch", "sgd"): 3e-1,
    ("images", "adamw"): 3e-2,
    ("images", "sgd"): 1e-1,
    ("recurrent", "adamw"): 3e-2,
    ("recurrent", "sgd"): 1.0,
    ("half", "adamw"): 3e-3,
    ("half", "sgd"): 3e-1,
}
FACTORS = {"best": 1, "twice": 2}
SETTINGS: dict[str, dict[str, str]] = {
    "sync": {"step_mode": "sync"},
    "overlap": {"step_mode": "overlap"},
    "delayed": {"step_mode": "delayed"},
    "delayed, none": {"step_mode": "delayed", "delay_compensation": "none"},
}
MODES = tuple(SETTINGS)
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD, momentum 0.9"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run, all that it depends on."""

    task: str
    optimizer: str
    rate: float
    label: str
    steps: int
    mode: str
    seed: int

    @property
    def config(self) -> ScalerConfig:
        return ScalerConfig(**SETTINGS[self.mode])

    @property
    def look_every(self) -> int:
        return max(1, self.steps // LOOKS)

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=self.rate, weight_decay=0.01, fused=True)
        return torch.optim.SGD(trained, lr=self.rate, momentum=0.9)

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return get_linear_schedule_with_warmup(optimizer, self.steps // 10, self.steps)


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of a run: held-out losses by step, and a digest of the final weights."""

    run: Run
    losses: dict[int, float]
    weights: str
    skips: int
    seconds: float

    @property
    def final(self) -> float:
        return self.losses[self.run.steps]

    @property
    def best(self) -> float:
        return min((loss for loss in self.losses.values() if math.isfinite(loss)), default=math.nan)


@functools.cache
def recipe(name: str) -> Any:
    """A recipe as a module; it imports its neighbours."""
    sys.path.insert(0, str(RECIPES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(RECIPES))


# --- the tasks ------------------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, loader: Iterable[Any]) -> float:
    """Mean loss of one example, from float32 logits."""
    model.eval()
    total = seen = 0.0
    for batch in loader:
        output = model(**batch)
        total += output.loss.double().item() * len(batch["labels"])
        seen += len(batch["labels"])
    model.train()
    return total / seen


def loop(
    run: Run,
    model: Any,
    splits: tuple[DataLoader, DataLoader],
    *,
    micro_batches: int = 1,
    clip: float = 1.0,
    autocast: bool = True,
) -> Result:
    """Train in a raw Accelerate loop: the one of finetune_classifier.py, with looks in between."""
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=micro_batches,
        kwargs_handlers=[AutocastKwargs(enabled=autocast)],
    )
    accelerator = attach(accelerator, run.config)
    optimizer = run.make_optimizer(model.to(accelerator.device))
    model, optimizer, schedule, training, held_out = accelerator.prepare(
        model, optimizer, run.make_schedule(optimizer), *splits
    )
    losses, done, start = {0: held_out_loss(model, held_out)}, 0, time.perf_counter()
    while done < run.steps:
        for batch in training:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            if done % run.look_every == 0 or done == run.steps:
                losses[done] = held_out_loss(model, held_out)
            if done == run.steps:
                break
    seconds, skips = time.perf_counter() - start, accelerator.scaler_history.skips
    result = Result(run, losses, digest(accelerator.unwrap_model(model)), skips, seconds)
    detach(accelerator)
    accelerator.free_memory()
    return result


@functools.cache
def docstring_data(seed: int) -> Any:
    module = recipe("finetune_classifier")
    argv = ["--seed", str(seed), "--max_eval_samples", str(HELD_OUT)]
    return module.load_data(module.parse_args(argv))


def classifier(run: Run) -> Result:
    """The task of recipes/finetune_classifier.py, with its settings for a CPU."""
    return on_docstrings(run, last_layer, batch=8, micro_batches=2)


def lora(run: Run) -> Result:
    """Adapters for the same model and docstrings."""
    return on_docstrings(run, with_adapters, batch=8, micro_batches=1)


def on_docstrings(
    run: Run, prepare: Callable[[Any], torch.nn.Module], batch: int, micro_batches: int
) -> Result:
    module = recipe("finetune_classifier")
    args = module.parse_args(["--seed", str(run.seed), "--per_device_batch_size", str(batch)])
    module.fill_defaults(args, "cpu")
    *splits, names = docstring_data(run.seed)
    set_seed(run.seed)
    model, tokenizer = module.load_model(args, names)
    loaders = module.loaders(Accelerator(mixed_precision="fp16"), tokenizer, splits, args)
    return loop(run, prepare(model), loaders, micro_batches=micro_batches)


def last_layer(model: Any) -> torch.nn.Module:
    """Train no other layer, and the head."""
    recipe("finetune_classifier").freeze(model, None, "cpu")
    return model  # type: ignore[no-any-return]


def with_adapters(model: Any) -> torch.nn.Module:
    """Train adapters in the last two layers, and the head."""
    peft = importlib.import_module("peft")
    count = model.config.num_hidden_layers
    config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS,
        r=8,
        lora_alpha=16,
        target_modules=["query", "value"],
        layers_to_transform=[count - 2, count - 1],
        modules_to_save=["pooler", "classifier"],
    )
    return peft.get_peft_model(model, config)  # type: ignore[no-any-return]


@functools.cache
def help_texts() -> tuple[list[str], Any, Any]:
    """Help texts, and the recipe's tokenizer and blocks of them (the same for every seed)."""
    module = recipe("trainer_swap")
    args = module.parse_args([])
    texts = module.read_texts(args)
    _, tokenizer = module.load_model(args, texts)
    return texts, tokenizer, module.blocks(texts, tokenizer, args)


def trainer(run: Run) -> Result:
    """The task of recipes/trainer_swap.py: its model, its data, its settings, its Trainer."""
    module = recipe("trainer_swap")
    texts, _, (training, held_out) = help_texts()
    recipe_args = module.parse_args(["--seed", str(run.seed), "--max_steps", str(run.steps)])
    arguments = module.training_arguments(recipe_args)
    arguments.disable_tqdm, arguments.logging_strategy = True, "no"
    arguments.eval_strategy, arguments.eval_steps = "steps", run.look_every
    set_seed(run.seed)
    model = module.load_model(recipe_args, texts)[0].to(arguments.device)
    optimizer = run.make_optimizer(model)
    job = Trainer(
        model=model,
        args=arguments,
        train_dataset=training,
        eval_dataset=held_out,
        data_collator=default_data_collator,
        optimizers=(optimizer, run.make_schedule(optimizer)),
    )
    job.remove_callback(transformers.PrinterCallback)
    attach(job, run.config)
    losses, start = {0: job.evaluate()["eval_loss"]}, time.perf_counter()
    set_seed(run.seed)
    job.train()
    losses |= {log["step"]: log["eval_loss"] for log in job.state.log_history if "eval_loss" in log}
    if run.steps not in losses:
        losses[run.steps] = job.evaluate()["eval_loss"]
    seconds, skips = time.perf_counter() - start, job.accelerator.scaler_history.skips
    result = Result(run, losses, digest(job.model), skips, seconds)
    detach(job)
    job.accelerator.free_memory()
    return result


class Bytes:
    """Text to tokens for trainer_swap's ``blocks``: each byte is one, zero ends a text."""

    eos_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


@functools.cache
def text_blocks() -> tuple[Any, ...]:
    """Blocks of bytes of Python's help texts and docstrings; whole texts are held out."""
    module, sources = recipe("trainer_swap"), recipe("stdlib_docstrings")
    args = module.parse_args(["--max_eval_samples", str(HELD_OUT)])
    root = Path(sysconfig.get_path("stdlib"))
    packages = [name for names in sources.LABELS.values() for name in names]
    found = [text for name in packages for _, text in sources.docstrings_of(name, root)]
    texts = {*module.read_texts(args), *found}
    mixed = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    return tuple(module.blocks(mixed, Bytes(), args))


def scratch(run: Run) -> Result:
    """A byte-level GPT-2 of four layers, from new weights, in a raw loop."""
    training, held_out = text_blocks()
    set_seed(run.seed)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4,
                        bos_token_id=0, eos_token_id=0, pad_token_id=0)  # fmt: skip
    loaders = (
        DataLoader(training, batch_size=8, shuffle=True, collate_fn=default_data_collator),
        DataLoader(held_out, batch_size=32, collate_fn=default_data_collator),
    )
    return loop(run, GPT2LMHeadModel(config), loaders)


class Judged(torch.nn.Module):
    """A net with its loss, called as a model of transformers is."""

    def __init__(self, net: torch.nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, inputs: Tensor, labels: Tensor) -> ModelOutput:
        output = self.net(inputs).float()
        return SequenceClassifierOutput(loss=self.loss(output, labels), logits=output)


def token_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token of each sequence."""
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def made_up(data: Sequence[tuple[Tensor, Tensor]], batch: int) -> tuple[DataLoader, DataLoader]:
    """Loaders of (inputs, labels) to train on and of the same to be judged by."""
    training, held_out = (
        [{"inputs": x, "labels": y} for x, y in zip(*split, strict=True)] for split in data
    )
    return (
        DataLoader(training, batch_size=batch, shuffle=True),  # type: ignore[arg-type]
        DataLoader(held_out, batch_size=256),  # type: ignore[arg-type]
    )


@functools.cache
def gratings() -> tuple[tuple[Tensor, Tensor], ...]:
    """Noisy stripes of a random width and place; the label is their direction, one of eight."""
    draw = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")

    def some(count: int, noise: float) -> tuple[Tensor, Tensor]:
        labels = torch.randint(8, (count,), generator=draw)
        width, place = (torch.rand(count, 1, 1, generator=draw) for _ in range(2))
        angle = (labels * (math.pi / 8))[:, None, None]
        along = x * angle.cos() + y * angle.sin()
        clean = torch.cos(2 * math.pi * (along / (4 + 4 * width) + place))
        return (clean + noise * torch.randn(clean.shape, generator=draw))[:, None], labels

    return some(4096, noise=2.0), some(512, noise=2.0)


def images(run: Run) -> Result:
    """A small convolutional net with batch normalisation."""

    def layer(into: int, out: int, *then: torch.nn.Module) -> torch.nn.Module:
        convolution = torch.nn.Conv2d(into, out, 3, padding=1, bias=False)
        normalised = torch.nn.BatchNorm2d(out)
        return torch.nn.Sequential(convolution, normalised, torch.nn.ReLU(), *then)

    set_seed(run.seed)
    net = torch.nn.Sequential(
        layer(1, 16, torch.nn.MaxPool2d(2)),
        layer(16, 32, torch.nn.MaxPool2d(2)),
        layer(32, 64, torch.nn.AdaptiveAvgPool2d(1)),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 8),
    )
    return loop(run, Judged(net, F.cross_entropy), made_up(gratings(), batch=32))


@functools.cache
def chains() -> tuple[tuple[Tensor, Tensor], ...]:
    """Sequences of 16 symbols in which the two before say how likely each is to be the next."""
    draw = torch.Generator().manual_seed(0)
    odds = (2 * torch.randn(8, 8, 8, generator=draw)).softmax(-1)

    def some(count: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(8, (count, 2), generator=draw)
        for _ in range(15):
            following = torch.multinomial(odds[tokens[:, -2], tokens[:, -1]], 1, generator=draw)
            tokens = torch.cat([tokens, following], 1)
        return tokens[:, :-1], tokens[:, 1:]

    return some(8192), some(512)


class Recurrent(torch.nn.Module):
    """A GRU that says what comes next."""

    def __init__(self, symbols: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(symbols, width)
        self.gru = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, symbols)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(inputs))[0])  # type: ignore[no-any-return]


def recurrent(run: Run) -> Result:
    """A recurrent net, by micro-batches, clipped to less than the others."""
    set_seed(run.seed)
    model = Judged(Recurrent(8, 64), token_loss)
    return loop(run, model, made_up(chains(), batch=16), micro_batches=4, clip=0.5)


class Residual(torch.nn.Module):
    """A block of a perceptron, added to what goes into it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.inner = torch.nn.Sequential(torch.nn.LayerNorm(width), first, torch.nn.GELU(), second)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.inner(inputs)  # type: ignore[no-any-return]


@functools.cache
def targets() -> tuple[tuple[Tensor, Tensor], ...]:
    """What a random net makes of random float16 inputs; noise is on what is trained on alone."""
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randn(shape, generator=draw) for shape in ((16, 32), (32, 4)))

    def some(count: int, noise: float) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, 16, generator=draw).half()
        clean = torch.tanh(inputs.float() @ first / 2) @ second / 4
        return inputs, clean + noise * torch.randn(clean.shape, generator=draw)

    return some(16384, noise=0.3), some(1024, noise=0.0)


def half(run: Run) -> Result:
    """Float16 weights, through the float32 masters, and no autocast."""
    set_seed(run.seed)
    ends = torch.nn.Linear(16, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 4)
    net = torch.nn.Sequential(ends[0], *(Residual(128) for _ in range(3)), *ends[1:])
    splits = made_up(targets(), batch=64)
    return loop(run, Judged(net.half(), F.mse_loss), splits, autocast=False)


TASKS: dict[str, Callable[[Run], Result]] = {
    "classifier": classifier,
    "lora": lora,
    "trainer": trainer,
    "scratch": scratch,
    "images": images,
    "recurrent": recurrent,
    "half": half,
}


def digest(model: torch.nn.Module) -> str:
    """Equal for models whose weights are equal, bit for bit."""
    sums = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sums.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return sums.hexdigest()


# --- the table ------------------------------------------------------------------------------------


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard deviation over seeds."""
    if not all(map(math.isfinite, values)):
        return f"diverged {sum(not math.isfinite(v) for v in values)}/{len(values)}"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):{sign}.3f} ± {deviation:.3f}"


@dataclasses.dataclass(frozen=True)
class Row:
    """The runs of one task, optimizer, rate and mode, with the final losses of ``sync``."""

    results: list[Result]
    sync: dict[int, float]

    @property
    def run(self) -> Run:
        return self.results[0].run

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Final losses, each with that of ``sync`` for the same seed; none of ``sync`` itself."""
        mine = [] if self.run.mode == "sync" else self.results
        return [(r.final, self.sync[r.run.seed]) for r in mine if r.run.seed in self.sync]

    @property
    def worse(self) -> int:
        return sum(cost(a) > cost(b) for a, b in self.pairs)

    @property
    def better(self) -> int:
        return sum(cost(a) < cost(b) for a, b in self.pairs)

    @property
    def within(self) -> str:
        """Whether the mean difference is within the spread of ``sync``; empty: who can tell."""
        base = list(self.sync.values())
        if not self.pairs or len(base) < 2 or not all(map(math.isfinite, base)):
            return ""
        gap = statistics.fmean(a - b for a, b in self.pairs)
        if abs(gap) <= statistics.stdev(base):
            return "yes"
        return "better" if gap < 0 else "no"


def cost(loss: float) -> float:
    """A loss to compare by: that of a run that diverged is the highest."""
    return loss if math.isfinite(loss) else math.inf


def compared(results: Sequence[Result]) -> list[Row]:
    """One row for each task, optimizer, rate and mode."""

    def kind(run: Run) -> tuple[Any, ...]:
        return run.task, run.optimizer, run.rate, run.steps

    rows = []
    for one in dict.fromkeys(kind(r.run) for r in results):
        mine = sorted((r for r in results if kind(r.run) == one), key=lambda r: r.run.seed)
        sync = {r.run.seed: r.final for r in mine if r.run.mode == "sync"}
        by_mode = ([r for r in mine if r.run.mode == mode] for mode in MODES)
        rows += [Row(same, sync) for same in by_mode if same]
    return rows


def table(results: Sequence[Result]) -> str:
    """Markdown: one row for each task, optimizer, rate and mode."""
    head = "task, steps|optimizer|mode|final loss|best loss|final - sync, by seed|/ sync|worse in"
    head += "|within the spread of sync"
    lines = [f"| {head.replace('|', ' | ')} |", "|---" * 9 + "|"]
    for row in compared(results):
        run, pairs, versus = row.run, row.pairs, ["", "", ""]
        if pairs:
            ratio = statistics.fmean(a / b for a, b in pairs)
            gaps = spread([a - b for a, b in pairs], "+")
            versus = [gaps, f"{ratio:.3f}", f"{row.worse}/{len(pairs)}"]
        label = f"{OPTIMIZERS[run.optimizer]}, lr {run.rate:g}"
        label += f" ({run.label})" * bool(run.label)
        finals, bests = (spread([getattr(r, of) for r in row.results]) for of in ("final", "best"))
        cells = [f"{run.task}, {run.steps}", label, run.mode, finals, bests, *versus, row.within]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(results: Sequence[Result]) -> str:
    """One line for each mode: how many rows are as good as ``sync``, how many runs are."""
    lines = []
    for mode in MODES[1:]:
        rows = [row for row in compared(results) if row.run.mode == mode and row.pairs]
        if not rows:
            continue
        said = [row.within for row in rows]
        line = f"{mode}: of {len(rows)} rows {said.count('yes')} within the spread of sync, "
        line += f"{said.count('better')} better, {said.count('no')} worse"
        runs = sum(len(row.pairs) for row in rows)
        better, worse = sum(row.better for row in rows), sum(row.worse for row in rows)
        equal = runs - better - worse
        lines.append(f"{line}; of {runs} runs {better} better, {worse} worse, {equal} equal")
    return "\n".join(lines)


def swept(results: Sequence[Result]) -> str:
    """One line for each task and optimizer: the mean final loss at each rate, and the best rate."""
    means: dict[tuple[str, str], dict[float, float]] = {}
    for row in compared(results):
        mean = statistics.fmean(cost(r.final) for r in row.results)
        means.setdefault((row.run.task, row.run.optimizer), {})[row.run.rate] = mean
    lines = []
    for kind, by_rate in means.items():
        best = min(by_rate, key=lambda rate: by_rate[rate])
        losses = ", ".join(f"{rate:g}: {mean:.3f}" for rate, mean in sorted(by_rate.items()))
        lines.append(f"{' '.join(kind)}: best {best:g} of {losses}")
    return "\n".join(lines)


def verdict(results: Sequence[Result]) -> tuple[str, bool]:
    """Compare runs of ``overlap`` with those of ``sync``: what to say, and whether all is well."""
    sync = {dataclasses.replace(r.run, mode="overlap"): r for r in results if r.run.mode == "sync"}
    pairs = [(r, sync[r.run]) for r in results if r.run in sync]
    # As text: NaN equals NaN there.
    wrong = [a.run for a, b in pairs if (a.weights, str(a.losses)) != (b.weights, str(b.losses))]
    if wrong:
        return f"FAULT: overlap differs from sync in {len(wrong)} of {len(pairs)}: {wrong}", False
    if not pairs:
        return "overlap and sync were not both run, so not compared", True
    return f"overlap equals sync in all {len(pairs)} pairs, bit for bit: losses, weights", True


def save(path: Path, results: Sequence[Result]) -> None:
    """Write what :func:`load` reads."""
    path.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1) + "\n")


def load(path: Path) -> list[Result]:
    """The results of an earlier call."""
    rows = json.loads(path.read_text())
    for row in rows:
        row["run"] = Run(**row["run"])
        row["losses"] = {int(step): loss for step, loss in row["losses"].items()}
    return [Result(**row) for row in rows]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--modes", nargs="+", choices=MODES, help="(default: all; of --long: some)")
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    add("--seeds", type=int, help="how many, from 0 (default: 3; of --sweep: 2, of --long: 1)")
    add("--steps", type=int, help=f"of each run (default: {STEPS})")
    add("--sweep", action="store_true", help=f"only sync, and each rate of a grid: {GRID}")
    add("--long", action="store_true", help=f"only scratch with adamw, {LONG:,} steps")
    add("--processes", type=int, default=1, help="at once; OMP_NUM_THREADS is for each of them")
    add("--json", type=Path, help="write every run's losses here, after each run")
    add("--show", type=Path, nargs="+", help="train nothing, print the table of such files")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> list[Run]:
    """The runs, all modes of a seed one after the other."""
    kinds = [kind for kind in RATES if kind[0] in args.tasks and kind[1] in args.optimizers]
    modes, steps, seeds = args.modes or MODES, STEPS, args.seeds or 3
    rates = {kind: {name: RATES[kind] * by for name, by in FACTORS.items()} for kind in kinds}
    if args.sweep or args.long:
        seeds = args.seeds or (2 if args.sweep else 1)
    if args.sweep:
        modes, rates = ("sync",), {kind: {f"{r:g}": r for r in GRID[kind[1]]} for kind in kinds}
    elif args.long:
        modes, steps = args.modes or ("sync", "delayed", "delayed, none"), {"scratch": LONG}
        rates = {("scratch", "adamw"): {"best": RATES["scratch", "adamw"]}}
    return [
        Run(task, optimizer, rate, label, args.steps or steps[task], mode, seed)
        for (task, optimizer), by_label in rates.items()
        for label, rate in by_label.items()
        for seed in range(seeds)
        for mode in modes
    ]


def quieten() -> None:
    """Only our own lines."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def train(run: Run) -> Result:
    return TASKS[run.task](run)


def trained(runs: Sequence[Run], processes: int) -> Iterator[Result]:
    """What comes out of the runs, in their order."""
    if processes == 1:
        yield from map(train, runs)
        return
    # The modes of a seed stay in one process, with what it has loaded.
    together = len({run.mode for run in runs})
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=quieten) as pool:
        yield from pool.map(train, runs, chunksize=together)


def main(argv: list[str] | None = None) -> int:
    """Run, print the table; 1 if ``overlap`` is not ``sync``."""
    args = parse_args(argv)
    quieten()
    results = [result for path in args.show or [] for result in load(path)]
    runs = [] if args.show else chosen(args)
    for number, result in enumerate(trained(runs, args.processes), 1):
        results.append(result)
        run = result.run
        curve = " ".join(f"{loss:.3f}" for loss in result.losses.values())
        what = f"{run.task} {run.optimizer} lr {run.rate:g} seed {run.seed} {run.mode}: {curve}"
        what += f" ({result.skips} skips, {result.seconds:.0f} s)"
        print(f"[{number}/{len(runs)}] {what}", flush=True)
        if args.json:
            save(args.json, results)
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads\n")
    if args.sweep:
        print(swept(results))
        return 0
    said, well = verdict(results)
    print(f"{table(results)}\n\n{summary(results)}\n{said}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
