"""Train a GAN in fp16: two models, two optimizers, one scaler.

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/gan.py

With no arguments it needs no network: the pictures are the digits of the fonts that come with
matplotlib, in several sizes, shifted and turned a little. It prints how far the samples are from
real pictures that were held out, before and after, and writes samples.png, real.png and the
generator's weights to --output_dir. Look for "the loop to copy".

    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml recipes/gan.py \
        --data_dir pictures --image_size 32 --max_steps 20000 --output_dir out/mine

Each optimizer's turn is a window of its own: backward, clip, step. Both share the loss scale, and
an overflow in one skips the step of that one alone. ACCEL_SCALER_STEP_MODE=overlap in front of
either command steps the optimizers on a thread of their own, with the same numbers.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import matplotlib
import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from accel_scaler import attach

RESULT_FILE = "gan.json"  # written last; marks a directory as this recipe's
# Fonts of three families and their styles, each with digits that look different.
FONTS = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral", "cmr10", "cmb10", "cmss10")
VARIANTS = 12  # pictures of one digit in one font
SHOWN = 64  # pictures in samples.png and real.png
LEAST = 2 * SHOWN
SHOW_EVERY = 10


def fail(message: str) -> SystemExit:
    """Make the one-line error that ends the run with status 1."""
    return SystemExit(f"gan: error: {message}")


def positive(text: str) -> int:
    """Read a whole number above zero from the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a GAN on grey pictures in fp16 with accel_scaler.",
        epilog="Without data arguments it learns the digits of matplotlib's fonts. "
        "The scaler's settings are read from ACCEL_SCALER_* in the environment.",
    )
    add = parser.add_argument
    add("--data_dir", type=Path, help="directory with image files, also in directories below it")
    data_help = "pictures in one .npz: its array 'images', or the only one, of shape (pictures, "
    data_help += "height, width) or (..., 3), either uint8 or floats from 0 to 1"
    add("--data_file", type=Path, help=data_help)
    out_help = "where the results go (default: %(default)s); an earlier result of this recipe is "
    out_help += "replaced, a directory with anything else in it is refused"
    add("--output_dir", type=Path, default=Path("out/gan"), help=out_help)
    add("--overwrite_output_dir", action="store_true", help="write into any directory")
    size_help = "height and width that pictures get (default: %(default)s)"
    add("--image_size", type=positive, default=16, help=size_help)
    add("--max_steps", type=positive, default=600, help="turns of each (default: %(default)s)")
    add("--per_device_batch_size", type=positive, default=64, help="(default: %(default)s)")
    add("--width", type=positive, default=256, help="of both models (default: %(default)s)")
    add("--latent", type=positive, default=32, help="random numbers a sample is made of "
        "(default: %(default)s)")  # fmt: skip
    add("--learning_rate", type=float, default=5e-4, help="of both (default: %(default)s)")
    clip_help = "clip each model's gradient to this (default: %(default)s)"
    add("--max_grad_norm", type=float, default=10.0, help=clip_help)
    add("--seed", type=int, default=0, help="of pictures, order, weights and samples (default: 0)")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """Refuse bad arguments before anything is loaded or written."""
    if args.data_dir and args.data_file:
        raise fail("give --data_dir or --data_file, not both")
    if args.data_dir and not args.data_dir.is_dir():
        raise fail(f"--data_dir {args.data_dir} is not a directory")
    if args.data_file and not args.data_file.is_file():
        raise fail(f"no such file: {args.data_file}")
    if args.data_file and args.data_file.suffix != ".npz":
        raise fail(f"{args.data_file}: expected a name that ends in .npz")
    out = args.output_dir
    if out.exists() and not out.is_dir():
        raise fail(f"--output_dir {out} is a file")
    foreign = out.is_dir() and any(out.iterdir()) and not (out / RESULT_FILE).is_file()
    if foreign and not args.overwrite_output_dir:
        raise fail(f"--output_dir {out} holds files of another origin; choose another directory "
                   "or pass --overwrite_output_dir")  # fmt: skip


# --- the pictures ---------------------------------------------------------------------------------


def digits(size: int, seed: int) -> Tensor:
    """Draw the digits 0 to 9 in every font and style, in random sizes, places and angles."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = sorted(path for name in FONTS for path in folder.glob(f"{name}*.ttf"))
    files = [path for path in files if "Display" not in path.name]  # has no digits
    if not files:
        raise fail(f"no fonts in {folder}; give your own pictures with --data_dir")
    rng = numpy.random.default_rng(seed)
    drawn = []
    for path in files:
        for digit in "0123456789":
            for scale, turn, right, down in rng.uniform(-1, 1, (VARIANTS, 4)):
                canvas = Image.new("L", (4 * size, 4 * size))  # drawn large, for smooth edges
                font = ImageFont.truetype(path, 4 * size * (0.85 + 0.1 * scale))
                middle = (2 * size * (1 + 0.1 * right), 2 * size * (1 + 0.1 * down))
                ImageDraw.Draw(canvas).text(middle, digit, fill=255, font=font, anchor="mm")
                turned = canvas.rotate(8 * turn, Image.Resampling.BILINEAR)
                drawn.append(numpy.asarray(turned.resize((size, size), Image.Resampling.BOX)))
    return torch.from_numpy(numpy.stack(drawn)).float() / 255


def from_directory(folder: Path, size: int) -> Tensor:
    """Load every image file below a directory, in grey."""
    names = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in names)
    if not files:
        raise fail(f"--data_dir {folder} has no image files")
    loaded = []
    for path in files:
        try:
            with Image.open(path) as image:
                loaded.append(numpy.asarray(image.convert("L").resize((size, size))))
        except (UnidentifiedImageError, OSError) as error:
            raise fail(f"{path} cannot be read: {error}") from error
    return torch.from_numpy(numpy.stack(loaded)).float() / 255


def from_file(path: Path, size: int) -> Tensor:
    """Load the array of an .npz file, in grey."""
    try:
        with numpy.load(path) as arrays:
            names = arrays.files
            if "images" not in names and len(names) != 1:
                raise fail(f"{path} has no array 'images', but: {', '.join(names) or 'nothing'}")
            pictures = arrays["images" if "images" in names else names[0]]
    except (OSError, ValueError) as error:
        raise fail(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if pictures.ndim == 4 and pictures.shape[-1] in (1, 3):
        pictures = pictures.mean(-1, dtype="float32").astype(pictures.dtype)
    if pictures.ndim != 3 or not (pictures.dtype == "uint8" or pictures.dtype.kind == "f"):
        got = f"{pictures.dtype} of shape {pictures.shape}"
        raise fail(
            f"{path}: expected uint8 or floats of shape (pictures, height, width), got {got}"
        )
    found = torch.from_numpy(pictures).float() / (255 if pictures.dtype == "uint8" else 1)
    if not len(found) or not (found.min() >= 0 and found.max() <= 1):
        raise fail(f"{path}: expected values from 0 to 1 (255 if uint8), and at least one picture")
    return nn.functional.interpolate(found[:, None], (size, size), mode="area")[:, 0]


def load_pictures(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return pictures to learn from, and a fifth held out; (pictures, 1, size, size), -1 to 1."""
    if args.data_dir:
        found = from_directory(args.data_dir, args.image_size)
    elif args.data_file:
        found = from_file(args.data_file, args.image_size)
    else:
        found = digits(args.image_size, args.seed)
    if len(found) < LEAST:
        raise fail(f"found {len(found)} pictures, expected at least {LEAST}")
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(args.seed))
    found = found[order, None] * 2 - 1
    held_out = max(SHOWN, len(found) // 5)
    return found[held_out:], found[:held_out]


# --- the models -----------------------------------------------------------------------------------


def make_generator(args: argparse.Namespace) -> nn.Module:
    """Make the network from random numbers (batch, latent) to pictures (batch, 1, size, size).

    Linear layers, since fp16 convolutions are slow on a CPU.
    """
    wide, size = args.width, args.image_size
    return nn.Sequential(
        nn.Linear(args.latent, wide),
        nn.BatchNorm1d(wide),
        nn.ReLU(),
        nn.Linear(wide, 2 * wide),
        nn.BatchNorm1d(2 * wide),
        nn.ReLU(),
        nn.Linear(2 * wide, size * size),
        nn.Tanh(),
        nn.Unflatten(1, (1, size, size)),
    )


def make_critic(args: argparse.Namespace) -> nn.Module:
    """Make the network that says whether pictures (batch, 1, size, size) are real: (batch, 1)."""
    wide, size = args.width, args.image_size
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(size * size, 2 * wide),
        nn.LeakyReLU(0.2),
        nn.Linear(2 * wide, wide),
        nn.LeakyReLU(0.2),
        nn.Linear(wide, 1),
    )


# --- how good it is -------------------------------------------------------------------------------


def distance(some: Tensor, others: Tensor, seed: int = 0) -> float:
    """Return the sliced Wasserstein distance of two sets of pictures.

    Both sets are seen along the same 256 random directions. Along one, the distance is how far the
    sorted values of the two sets lie from each other; this is the root of the mean square.
    It is 0 for equal sets, and grows with samples that look wrong as with samples all alike.
    """
    count = min(len(some), len(others))
    random = torch.Generator().manual_seed(seed)
    along = torch.randn(some[0].numel(), 256, generator=random)
    along /= along.norm(dim=0)
    a, b = (
        (part[:count].flatten(1).float().cpu() @ along).sort(dim=0).values
        for part in (some, others)
    )
    return (a - b).square().mean().sqrt().item()


@torch.no_grad()
def draw(accelerator: Accelerator, generator: nn.Module, noise: Tensor) -> Tensor:
    """Return the generator's pictures for this noise, on the CPU."""
    generator.eval()
    pictures = generator(noise.to(accelerator.device)).float().cpu()
    generator.train()
    return pictures


def save_picture(pictures: Tensor, path: Path) -> None:
    """Write the first pictures as one PNG, eight in a row, three times as large."""
    rows = [torch.cat(list(row[:, 0]), dim=1) for row in pictures[:SHOWN].split(8)]
    grey = ((torch.cat(rows) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    image = Image.fromarray(grey.numpy())
    image.resize((3 * image.width, 3 * image.height), Image.Resampling.NEAREST).save(path)


# --- training -------------------------------------------------------------------------------------


def train(
    accelerator: Accelerator,
    models: tuple[nn.Module, nn.Module],
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
    loader: DataLoader,
    args: argparse.Namespace,
) -> None:
    """Take turns. This is the loop to copy."""
    generator, critic = models
    generator_optimizer, critic_optimizer = optimizers
    bar = tqdm(total=args.max_steps, desc="training", disable=not accelerator.is_local_main_process)

    def wrong(guess: Tensor, truth: float) -> Tensor:
        return binary_cross_entropy_with_logits(guess, torch.full_like(guess, truth))

    while bar.n < args.max_steps:
        for (real,) in islice(loader, args.max_steps - bar.n):
            noise = torch.randn(len(real), args.latent, device=accelerator.device)
            fake = generator(noise)

            # The critic's turn. zero_grad first: the generator's turn left gradients in it.
            critic_optimizer.zero_grad()
            guess = critic(torch.cat((real, fake.detach())))
            on_real, on_fake = guess.chunk(2)
            critic_loss = (wrong(on_real, 0.9) + wrong(on_fake, 0.0)) / 2  # 0.9: never too sure
            accelerator.backward(critic_loss)
            accelerator.clip_grad_norm_(critic.parameters(), args.max_grad_norm)
            critic_optimizer.step()

            # The generator's turn, judged by the critic that has just been updated.
            generator_optimizer.zero_grad()
            generator_loss = wrong(critic(fake), 1.0)
            accelerator.backward(generator_loss)
            accelerator.clip_grad_norm_(generator.parameters(), args.max_grad_norm)
            generator_optimizer.step()

            bar.update()
            if bar.n % SHOW_EVERY == 0 or bar.n == args.max_steps:  # reading a loss waits
                losses = {"critic": critic_loss.item(), "generator": generator_loss.item()}
                shown = {name: f"{loss:.3f}" for name, loss in losses.items()}
                bar.set_postfix(shown | accelerator.scaler_history.progress())
    bar.close()


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    args = parse_args(argv)
    check_args(args)
    accelerator = attach(Accelerator(mixed_precision="fp16"))
    learned, held_out = load_pictures(args)
    set_seed(args.seed)
    generator, critic = make_generator(args), make_critic(args)
    set_seed(args.seed, device_specific=True)  # each process its own noise
    betas = (0.5, 0.99)
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=args.learning_rate, betas=betas)
        for model in (generator, critic)
    ]
    size = min(args.per_device_batch_size, len(learned) // accelerator.num_processes)
    loader = DataLoader(
        torch.utils.data.TensorDataset(learned), batch_size=size, shuffle=True, drop_last=True
    )
    generator, critic, *optimizers, loader = accelerator.prepare(
        generator, critic, *optimizers, loader
    )
    say = accelerator.print
    device, processes = accelerator.device.type, accelerator.num_processes
    say(f"{len(learned)} pictures of {args.image_size} x {args.image_size}, "
        f"{len(held_out)} held out, on {processes} x {device}")  # fmt: skip
    noise = torch.randn(
        max(SHOWN, len(held_out)), args.latent, generator=torch.Generator().manual_seed(args.seed)
    )
    before = distance(draw(accelerator, generator, noise), held_out)
    least = distance(learned, held_out)
    say(f"distance to held-out pictures before: {before:.3f} (training pictures: {least:.3f})")
    train(accelerator, (generator, critic), tuple(optimizers), loader, args)
    samples = draw(accelerator, generator, noise)
    after = distance(samples, held_out)
    say(f"distance to held-out pictures after: {after:.3f} ({args.max_steps} steps)")
    say(accelerator.scaler_history.summary())
    out = args.output_dir
    accelerator.save_model(generator, out)
    if accelerator.is_main_process:
        save_picture(samples, out / "samples.png")
        save_picture(held_out, out / "real.png")
        result = {"distance_before": before, "distance_after": after, "distance_of_real": least}
        result["steps"] = args.max_steps
        (out / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
    accelerator.wait_for_everyone()
    say(f"saved to {out}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
