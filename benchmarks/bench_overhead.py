"""Time prefill and decoding of diffv2, attnres and both against their source, in one run.

The source is converted into a temporary folder first. The table is that of `difftool bench`'s
measure of speed: the checkpoints take turns, and a ratio is to the source in the same repetition.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from bench_convert import describe_machine

from difftool.bench.markdown import render_table
from difftool.bench.measures import speed
from difftool.bench.options import BenchOptions
from difftool.surgery.convert import ConvertOptions, convert
from difftool.terminal import FLOATS


def convert_all(source: str, folder: Path) -> list[tuple[str, str]]:
    """Return names and sources: the source itself, then what was made of it."""
    steps = (("diffv2", source, "diffv2"), ("attnres", source, "attnres"))
    steps += (("both", str(folder / "diffv2"), "attnres"),)
    for name, start, target in steps:
        print(f"converting to {name}", file=sys.stderr)
        options = ConvertOptions(to=target, verify=False)
        convert(start, folder / name, options)
    return [("source", source), *((name, str(folder / name)) for name, _, _ in steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", default="tiny", help="as difftool convert takes it")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4], metavar="N")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512], metavar="N")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N")
    parser.add_argument("--dtype", choices=FLOATS, default="float32")
    parser.add_argument("--device", help="instead of a GPU if there is one, else the CPU")
    parser.add_argument("--compile", action="store_true", help="time under torch.compile")
    arguments = parser.parse_args()
    options = BenchOptions(
        measures=("speed",),
        speed_batch_sizes=tuple(arguments.batch_sizes),
        speed_contexts=tuple(arguments.contexts),
        repetitions=arguments.repetitions,
        dtype=arguments.dtype,
        device=arguments.device,
        compile=arguments.compile,
    )
    with tempfile.TemporaryDirectory(prefix="difftool-overhead-") as folder:
        sources = convert_all(arguments.source, Path(folder))
        results = speed.measure_together(sources, options, lambda what, done, total: None)
    names = [name for name, _ in sources]
    for table in speed.tables(dict(zip(names, results, strict=True))):
        print(f"{render_table(table.columns, table.rows)}\n\n{table.note}\n")
    machine = describe_machine(Path(tempfile.gettempdir()))
    print("; ".join(f"{key} {value}" for key, value in machine.items()))


if __name__ == "__main__":
    main()
