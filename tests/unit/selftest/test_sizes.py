"""``accel-scaler test --parameters``: its numbers beside what plain torch allocates, and the table
of docs/offload.md."""

from __future__ import annotations

import pytest
import torch
from places import ROOT
from torch import Tensor, nn

from accel_scaler import cli
from accel_scaler.config import COUNTS, amount_of
from accel_scaler.selftest import sizes
from accel_scaler.selftest.rows import Result

MEASURED = {"up": 24.0, "down": 20.0, "both": 32.0}
DTYPES = {"float32": torch.float32, "16-bit": torch.bfloat16}


def size(tensors: list[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def allocated(dtype: torch.dtype, has_copies: bool) -> tuple[int, int, int]:
    """Parameters, bytes of weights and gradients, and of all else, after a step of plain torch."""
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 7)).to(dtype)
    params = list(model.parameters())
    stepped = [nn.Parameter(p.detach().float()) for p in params] if has_copies else params
    optimizer = torch.optim.AdamW(stepped)
    for p, each in zip(params, stepped, strict=True):
        p.grad = torch.ones_like(p)
        each.grad = p.grad.to(each.dtype)
    optimizer.step()
    entries = optimizer.state.values()
    state = [entry[key] for entry in entries for key in ("exp_avg", "exp_avg_sq")]
    held = size([*params, *(p.grad for p in params if p.grad is not None)])
    copied = [p.detach() for p in stepped] if has_copies else []
    return sum(p.numel() for p in params), held, size(state + copied)


@pytest.mark.parametrize("weights", DTYPES)
def test_memory_is_that_of_plain_torch(weights: str) -> None:
    count, held, rest = allocated(DTYPES[weights], has_copies=False)
    found = sizes.memory(count, weights)
    assert found.stock == held + rest
    _, held, rest = allocated(DTYPES[weights], has_copies=weights == "16-bit")
    assert (found.copied, found.offload, found.host) == (held + rest, held, rest)


def test_slots_are_four_stretches_and_no_more_than_there_is() -> None:
    """Of 2**24 elements at most, of 2**20 at least, else of a thirty-second of all."""
    for count, slots in ((1000, 1000), (2**22 + 1, 2**22), (2**28, 2**25), (10**10, 2**26)):
        assert sizes.memory(count, "float32").slots == 8 * slots
        assert sizes.memory(count, "16-bit").slots == 12 * slots


@pytest.mark.parametrize(("weights", "bytes_"), [("float32", 8), ("16-bit", 12)])
@pytest.mark.parametrize(("tflops", "up", "down"), [(25, 12, 12), (400, 20, 50), (80, 50, 20)])
def test_from_so_many_tokens_on_copies_end_in_time(
    weights: str, bytes_: int, tflops: float, up: float, down: float
) -> None:
    count = 350_000_000

    def is_hidden(tokens: int) -> bool:
        forward = 2 * count * tokens / (tflops * 1e12)
        ways = (count * bytes_ / (up * 1e9), 2 * forward), (count * bytes_ / (down * 1e9), forward)
        return all(copies <= computes * (1 + 1e-9) for copies, computes in ways)

    found = sizes.tokens(weights, tflops, up, down)
    assert is_hidden(found)
    assert not is_hidden(found - 100)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("1.5B", 1_500_000_000), ("350M", 350_000_000), ("2.3M", 2_300_000), ("7 B", 7 * 10**9)),
        *(("1", 1), ("1500000000", 1_500_000_000), ("0.29B", 290_000_000), ("1.2345K", 1234)),
    ],
)
def test_a_number_of_parameters(text: str, count: int) -> None:
    assert amount_of(text, COUNTS) == count


def test_measured_copies_take_their_bytes_by_their_speed() -> None:
    """1.5 billion parameters: 12 and 18 GB each way."""
    found = sizes.table(1_500_000_000, MEASURED)
    assert [*found.values()][-4:] == [
        [12 / 24, 18 / 24],
        [12 / 20, 18 / 20],
        [24 / 32, 36 / 32],
        [20_000, 30_000],
    ]


@pytest.mark.parametrize("measured", [{}, MEASURED], ids=["assumed", "measured"])
@pytest.mark.parametrize("count", [1, 1_500_000_000, 10**13])
def test_lines_have_a_hundred_columns(count: int, measured: dict[str, float]) -> None:
    lines = [*sizes.told(count, measured)]
    assert max(map(len, lines)) <= 100
    for title, numbers in sizes.table(count, measured).items():
        (line,) = [line for line in lines if line.startswith(f"{title}  ")]
        shown = [float(word.replace(",", "")) for word in line.removeprefix(title).split()]
        assert shown == pytest.approx(numbers, rel=5e-3)


def test_the_command_says_what_it_can_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", "--device", "cpu", "--parameters", "1.5b"]) == 0
    out = capsys.readouterr().out
    assert "1 ok, 1 not run, 0 failed" in out
    assert out.endswith("\n".join(["", *sizes.told(1_500_000_000, {}), ""]))


LONG = Result("a row", "failed", "x" * 150 + " a reason\nof two lines " + "it " * 40)


def test_a_row_is_as_wide_as_the_table_and_tells_what_differs() -> None:
    lines = [*LONG.lines()]
    assert max(map(len, lines)) == 100
    assert "".join(line[36:] for line in lines).startswith("x" * 150)
    assert "a reason of two lines it it" in " ".join(map(str.strip, lines))
    assert [line[:36].split() for line in lines] == [
        ["a", "row", "failed"],
        *[[]] * (len(lines) - 1),
    ]
    assert [*Result("a row", "ok", "1").lines()] == [f"{'a row':<27}ok       1"]
    assert [*Result("a row", "ok").lines()] == [f"{'a row':<27}ok"]


def rows_of_the_page() -> list[str]:
    """The tables of docs/offload.md."""
    rows = []
    for billions in (0.35, 1, 3, 8):
        for weights in sizes.WEIGHTS:
            found = sizes.memory(round(billions * 1e9), weights)
            gb = [sizes.rounded(each / 1e9) for each in found]
            without = gb[1] if weights == "float32" else f"{gb[1]} ({gb[0]})"
            seconds = [sizes.rounded(found.host / 1e9 / gbps) for gbps in (12, 25, 50)]
            rows.append([str(billions), weights, without, gb[2], gb[3], gb[4], *seconds])
    for weights in sizes.WEIGHTS:
        counts = [sizes.tokens(weights, m.tflops, m.gbps, m.gbps) for m in sizes.MACHINES.values()]
        rows.append([weights, *(f"{count:,}" for count in counts)])
    return [f"| {' | '.join(row)} |" for row in rows]


def test_the_page_has_the_numbers_of_the_command() -> None:
    lines = (ROOT / "docs/offload.md").read_text("utf-8").splitlines()
    assert [row for row in rows_of_the_page() if row not in lines] == []
    machines = " | ".join(
        f"{name}: {gbps} GB/s, {tflops} TFLOP/s" for name, (gbps, tflops) in sizes.MACHINES.items()
    )
    assert any(line.endswith(f"| {machines} |") for line in lines)


if __name__ == "__main__":
    print("\n".join(rows_of_the_page()))
