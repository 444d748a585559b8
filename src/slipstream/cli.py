"""The command line: `slipstream VERB [--config RECIPE.yaml] [flags]`. Verbs only; every heavy import is
inside its verb.
"""

from __future__ import annotations

import errno
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.config import (
    POSITIONAL,
    CacheConfig,
    DataConfig,
    DoctorConfig,
    EvalConfig,
    ExportConfig,
    PrepareConfig,
    RegenerateConfig,
    TrainConfig,
    UserError,
    check_ranges,
    check_required,
    from_dict,
    nearest,
    read_yaml,
    set_process_environment,
    to_yaml,
)

USAGE = """usage: slipstream VERB [--config RECIPE.yaml] [flags]     (slipstream VERB --help shows a verb's
flags)

  regenerate  the target answers prompts, from servers or on this machine's device
  prepare   chats or token ids → token shards
  data      look into a dataset: `slipstream data verify DIR`, `slipstream data stats DIR`
  cache     record the target's taps on disk, for small targets and many epochs
  train     train a drafter, export it, decode with what was exported
  eval      decode prompts with a drafter: τ, acceptance by slot, baselines, speed, losslessness
  export    write a checkpoint in the layout that serving engines load
  doctor    can this machine train, and how well; exit code 1 when it cannot

Flags win over the recipe, the recipe over defaults. --debug shows the traceback of an error."""


def run_regenerate(config: RegenerateConfig) -> int:
    from slipstream.data.regenerate import Regeneration, check, summary
    from slipstream.training.metrics import Display

    check(config)
    if config.server:
        from slipstream.data.server import answer
    else:
        from slipstream.decoding.answering import answer
    with Display() as display:
        run = Regeneration(config, display.advance)
        display.start("regenerate", run.prompts, run.prompts - run.left)
        try:
            answer(config, run, display.say)
        finally:
            for line in summary(run.close()):
                display.say(f"regenerate: {line}")
    return 0


def run_prepare(config: PrepareConfig) -> None:
    if config.show:
        from rich.console import Console

        from slipstream.data.show import show

        show(config, Console(highlight=False))
        return
    from slipstream.data.prepare import prepare
    from slipstream.training.metrics import Display

    with Display() as display:
        display.start("prepare", 100, percent=True)
        summary = prepare(config, lambda done, total: display.advance(100 * done // (total or 1)))
    counts, splits = summary["counts"], summary["splits"]
    display.say("prepare: " + ", ".join(f"{n} {what}" for what, n in counts.items() if isinstance(n, int)))
    for reason, n in counts["skipped"].items():
        display.say(f"prepare: {n} skipped: {reason} (the first: {counts['skipped_examples'][reason]})")
    for split, facts in splits.items():
        display.say(f"prepare: {split}: " + ", ".join(f"{n:,} {what}" for what, n in facts.items()))
    display.say(f"prepare: shards and manifest in {summary['output_dir']}")


def run_data(config: DataConfig) -> int:
    if config.task == "verify":
        from slipstream.data.verify import verify

        right, faults = verify(config.data_dir)
        print(*right, *(f"FAULT {fault}" for fault in faults), sep="\n")
        return 1 if faults else 0
    from slipstream.data.stats import stats

    print(stats(config))
    return 0


def run_cache(config: CacheConfig) -> None:
    from slipstream.training.metrics import Display
    from slipstream.training.record import record_taps

    with Display() as display:
        record_taps(config, display)


def run_train(config: TrainConfig) -> int:
    from slipstream.distributed.launch import is_rank, start_ranks
    from slipstream.distributed.placement import placement_of

    if config.plan and not config.probe:
        from slipstream.system.planner import plan
        from slipstream.training.metrics import Display

        with Display() as display:
            plan(config, display)
        return 0
    rank = probe_rank if config.plan else train_rank
    if is_rank() or (place := placement_of(config)).ranks == 1:
        return rank(config)
    logs = Path(config.output_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    asked = logs / "asked.yaml"  # what the ranks are started with, and whatever flags made of it
    asked.write_text(to_yaml(config))
    argv = ["-m", "slipstream.cli", "train", "--config", str(asked)]
    return start_ranks(argv, place.ranks, Path(config.output_dir), config.max_restarts)


def probe_rank(config: TrainConfig) -> int:
    """What `--plan --probe` measures, on one rank or as this process's part of it."""
    from slipstream.distributed.world import joined
    from slipstream.system.probe import probe, say_probe
    from slipstream.training.metrics import Display
    from slipstream.training.rank import open_rank
    from slipstream.training.setup import choose_device

    with joined(choose_device(config.device).type) as world:
        log = Path(config.output_dir) / "logs" / f"rank{world.rank}.log" if world.rank else None
        with Display(log=log) as display:
            run = open_rank(config, world, display)
            measured = probe(run, display)
            if run.crew.first:
                say_probe(run, measured, display)
    return 0


def train_rank(config: TrainConfig) -> int:
    """A run on one rank, or this process's part of one."""
    import torch

    from slipstream.distributed.world import joined
    from slipstream.export.zlab import export_run
    from slipstream.system.planner import explain_out_of_memory
    from slipstream.training.metrics import Display
    from slipstream.training.rank import open_rank, work
    from slipstream.training.setup import choose_device

    with joined(choose_device(config.device).type) as world:
        log = Path(config.output_dir) / "logs" / f"rank{world.rank}.log" if world.rank else None
        with Display(log=log) as display:
            run = open_rank(config, world, display)
            try:
                trained = work(run, display)
            except torch.OutOfMemoryError as e:
                raise UserError(f"slipstream train: {explain_out_of_memory(run)}") from e
    if not run.crew.first:
        return 0
    assert trained is not None
    if trained.interrupted:
        again = f"slipstream train --config {shlex.quote(str(run.folder / 'config.yaml'))}"
        step = trained.position.step
        stopped = f"stopped at step {step}, saved" if step else "stopped before the first step"
        display.say(f"{stopped}. Resume with: {again}")
        return 0
    exported = export_run(run.folder, run.folder / "export", replace=True)
    display.say(f"export: {exported}")
    if config.target_sharding and config.decode_prompts > 0:
        display.say("decode: left out, the target is in shards: run `slipstream eval` where it fits whole")
    elif config.decode_prompts > 0 and len(run.heldout_data):
        from slipstream.decoding.evaluate import decode_after_training

        decode_after_training(run, exported, display)
    return 0


def run_eval(config: EvalConfig) -> None:
    from slipstream.decoding.evaluate import run_eval as evaluate
    from slipstream.training.metrics import Display

    with Display() as display:
        evaluate(config, display)


def run_export(config: ExportConfig) -> None:
    from slipstream.export.zlab import export_run

    print(f"export: {export_run(Path(config.checkpoint), Path(config.output_dir), replace=False)}")


def run_doctor(config: DoctorConfig) -> int:
    from slipstream.system.doctor import doctor

    text, usable = doctor(config)
    print(text)
    return 0 if usable else 1


VERBS: dict[str, tuple[type, Callable[[Any], int | None]]] = {
    "regenerate": (RegenerateConfig, run_regenerate),
    "prepare": (PrepareConfig, run_prepare),
    "data": (DataConfig, run_data),
    "cache": (CacheConfig, run_cache),
    "train": (TrainConfig, run_train),
    "eval": (EvalConfig, run_eval),
    "export": (ExportConfig, run_export),
    "doctor": (DoctorConfig, run_doctor),
}


FULL = "free space and run the same command again"
CLOSED = "choose a place that can be written to, or change its permissions"
MENDS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), CLOSED),
}
"""What a user can do about the machine's own refusals, wherever they come up."""
PATH_MENDS = {
    errno.ENOTDIR: "a part of this path is a file: name a folder",
    errno.EISDIR: "name a file in this folder",
}
"""The same where the refusal names a file; for any other of these `ANY_PATH`."""
ANY_PATH = "check this path and the disk under it, or name another"
LOWER = {
    "train": "--plan says what is needed; lower --token-budget or --max-anchors where the target itself fits",
    "cache": "lower --token-budget",
    "eval": "lower --max-new-tokens, or leave the fp32 proof out with --lossless-tokens 0",
}
"""What makes a verb need less of a device's memory."""


def parse(cls: type, verb: str, args: list[str]) -> Any:
    """A verb's settings from its flags over its recipe. tyro ends the process itself for `--help` and
    unknown flags.
    """
    import tyro

    values, rest, where = {}, [], ""
    for name in POSITIONAL.get(cls, ()):
        if args and not args[0].startswith("-"):
            rest += [f"--{name}", args.pop(0)]
    while args:
        arg = args.pop(0)
        if arg == "--config" or arg.startswith("--config="):
            path = arg.partition("=")[2] or (args.pop(0) if args else "")
            if not path:
                raise UserError(f"slipstream {verb}: --config: name a recipe, a YAML file")
            values.update(read_yaml(path))
            where = path
        else:
            rest.append(arg)
    default = from_dict(cls, values, where) if values else cls()
    config = tyro.cli(cls, prog=f"slipstream {verb}", default=default, args=rest)
    check_required(config, f"slipstream {verb}")
    check_ranges(config)
    return config


def main(argv: list[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    verb = args.pop(0)
    try:
        if verb == "--version":
            from slipstream import __version__

            print(f"slipstream {__version__}")
            return 0
        if verb not in VERBS:
            raise UserError(
                f"slipstream {verb}: no such verb{nearest(verb, VERBS)}: one of {', '.join(VERBS)}"
            )
        cls, run = VERBS[verb]
        config = parse(cls, verb, args)
        for line in set_process_environment():
            print(line, file=sys.stderr)
        return run(config) or 0
    except UserError as e:
        if debug:
            raise
        print(f"error: {e}".replace("\n", " "), file=sys.stderr)
        return 2
    except OSError as e:
        mend = MENDS.get(e.errno or 0)
        if e.filename is not None and mend is None:
            mend = PATH_MENDS.get(e.errno or 0, ANY_PATH)
        if debug or mend is None:
            raise
        where = f"slipstream {verb}" if e.filename is None else e.filename
        print(f"error: {where}: {e.strerror}: {mend}".replace("\n", " "), file=sys.stderr)
        return 2
    except RuntimeError as e:
        torch = sys.modules.get("torch")  # whoever ran out of its memory has imported it
        if debug or torch is None or not isinstance(e, torch.OutOfMemoryError):
            raise
        mend = LOWER.get(verb, "free some and run the same command again")
        print(f"error: slipstream {verb}: the device is out of memory: {mend}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
