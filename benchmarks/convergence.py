"""What a parameter update that comes one step late costs in loss: the step modes side by side.

    python benchmarks/convergence.py --optimizers adamw --json a.json & # on two cores 12 minutes;
    python benchmarks/convergence.py --optimizers sgd --json b.json     # all in one process: 24
    python benchmarks/convergence.py --show a.json b.json               # OMP_NUM_THREADS=1 for both

Three tasks, none needs a network: the two recipes' own (``classifier``: MiniLM learns to label
docstrings; ``trainer``: a small GPT-2 under the Trainer), and ``scratch``: a deeper GPT-2 on the
bytes of Python's help texts and docstrings, in a raw loop. Learning rates rise for a tenth of the
steps to near the best peak for ``sync`` (``low``: to a third of it or less), and fall to zero.

Runs of one seed share data, order, first weights and dropout, so differences to ``sync`` are taken
seed by seed. Losses are held-out ones, of the newest parameters; looking at them makes the next
step of ``delayed`` a fresh one, LOOKS times in a run. ``overlap`` must equal ``sync`` exactly; if
its losses or its final weights differ in one bit, the script says so and ends with status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

from accel_scaler import ScalerConfig, attach, detach

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
LOOKS = 6
HELD_OUT = 128  # texts, or blocks of text, that a model is judged by
FRESH = 5  # delayed+warmup: one step in so many is not late, the first ones
STEPS = {"classifier": 60, "trainer": 200, "scratch": 150}
RATES: dict[tuple[str, str], dict[str, float]] = {
    ("classifier", "adamw"): {"": 1e-3},
    ("classifier", "sgd"): {"": 1e-1},
    ("trainer", "adamw"): {"": 1e-3},
    ("trainer", "sgd"): {"": 1e-1},
    ("scratch", "adamw"): {"low": 3e-4, "": 1e-3},
    ("scratch", "sgd"): {"low": 1e-2, "": 1e-1},
}
MODES = ("sync", "overlap", "delayed", "delayed+warmup")
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
        fresh = self.steps // FRESH if self.mode == "delayed+warmup" else 0
        return ScalerConfig(step_mode=self.mode.split("+")[0], delay_warmup_steps=fresh)

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


def loop(run: Run, model: Any, splits: tuple[DataLoader, DataLoader], micro_batches: int) -> Result:
    """Train in a raw Accelerate loop: the one of finetune_classifier.py, with looks in between."""
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=micro_batches)
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
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
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
    module = recipe("finetune_classifier")
    args = module.parse_args(["--seed", str(run.seed)])
    module.fill_defaults(args, "cpu")
    *splits, names = docstring_data(run.seed)
    set_seed(run.seed)
    model, tokenizer = module.load_model(args, names)
    module.freeze(model, args.freeze_layers, "cpu")
    loaders = module.loaders(Accelerator(mixed_precision="fp16"), tokenizer, splits, args)
    return loop(run, model, loaders, args.gradient_accumulation_steps)


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
    return loop(run, GPT2LMHeadModel(config), loaders, micro_batches=1)


TASKS = {"classifier": classifier, "trainer": trainer, "scratch": scratch}


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


def table(results: Sequence[Result]) -> str:
    """Markdown: one row for each task, optimizer, rate and mode."""
    kinds = list(dict.fromkeys((r.run.task, r.run.optimizer, r.run.rate) for r in results))
    head = "task, steps|optimizer|mode|final loss|best loss|final - sync, by seed|/ sync|worse in"
    lines = [f"| {head.replace('|', ' | ')} |", "|---" * 8 + "|"]
    for kind in kinds:
        mine = [r for r in results if (r.run.task, r.run.optimizer, r.run.rate) == kind]
        base = {r.run.seed: r.final for r in mine if r.run.mode == "sync"}
        for mode in MODES:
            rows = sorted((r for r in mine if r.run.mode == mode), key=lambda r: r.run.seed)
            if not rows:
                continue
            pairs = [(r.final, base[r.run.seed]) for r in rows if r.run.seed in base]
            gaps, versus = [a - b for a, b in pairs], ["", "", ""]
            if mode != "sync" and pairs:
                ratio = statistics.fmean(a / b for a, b in pairs)
                worse = sum(not gap <= 0 for gap in gaps)
                versus = [spread(gaps, "+"), f"{ratio:.3f}", f"{worse}/{len(gaps)}"]
            run = rows[0].run
            label = f"{OPTIMIZERS[run.optimizer]}, lr {run.rate:g}"
            label += f" ({run.label})" * bool(run.label)
            finals, bests = spread([r.final for r in rows]), spread([r.best for r in rows])
            cells = [f"{run.task}, {run.steps}", label, mode, finals, bests, *versus]
            lines.append("| " + " | ".join(cells) + " |")
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
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    add("--seeds", type=int, default=3, help="how many, from 0 (default: %(default)s)")
    add("--steps", type=int, help=f"of each run (default: {STEPS})")
    add("--json", type=Path, help="write every run's losses here, after each run")
    add("--show", type=Path, nargs="+", help="train nothing, print the table of such files")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> list[Run]:
    """The runs, all modes of a seed one after the other."""
    return [
        Run(task, optimizer, rate, label, args.steps or STEPS[task], mode, seed)
        for task in args.tasks
        for optimizer in args.optimizers
        for label, rate in RATES[task, optimizer].items()
        for seed in range(args.seeds)
        for mode in args.modes
    ]


def main(argv: list[str] | None = None) -> int:
    """Run, print the table; 1 if ``overlap`` is not ``sync``."""
    args = parse_args(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    results = [result for path in args.show or [] for result in load(path)]
    runs = [] if args.show else chosen(args)
    for number, run in enumerate(runs, 1):
        result = TASKS[run.task](run)
        results.append(result)
        curve = " ".join(f"{loss:.3f}" for loss in result.losses.values())
        what = f"{run.task} {run.optimizer} lr {run.rate:g} seed {run.seed} {run.mode}: {curve}"
        what += f" ({result.skips} skips, {result.seconds:.0f} s)"
        print(f"[{number}/{len(runs)}] {what}", flush=True)
        if args.json:
            save(args.json, results)
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads\n\n{table(results)}\n")
    said, well = verdict(results)
    print(said)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
