"""What may be typed after `hybridflow`, and which function each command calls."""

import argparse

from engine.commands.outcome import Outcome

DEFAULT_ROOT = "runs"


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; `command` names the chosen one."""
    top = argparse.ArgumentParser(prog="hybridflow", description="RLHF as durable pipelines: data to registered model.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_runs(commands)
    _add_data_and_models(commands)
    for name, text in (
        ("doctor", "check this machine and installation"),
        ("ui", "serve the pages of Prefect and MLflow"),
    ):
        command = _add(commands, name, text)
        if name == "ui":
            _root(command)
    return top


def call(given: argparse.Namespace) -> Outcome:
    """Run the chosen command."""
    match given.command:
        case "run" | "resume":
            return _call_run(given)
        case "sft" | "reward-model":
            from engine.commands import offline

            if given.dry_run:
                return offline.dry_run(given.command, given.config, given.set)
            return offline.run(given.command, given.config, given.set, given.run_key, verbose=given.verbose)
        case "status" | "repair":
            return _call_records(given)
        case "data":
            from engine.commands import data

            return data.check(given.source, given.set)
        case "evaluate":
            from engine.commands import running

            return running.evaluate(given.config, given.set, given.model, verbose=given.verbose)
        case "promote" | "rollback" | "models" | "generate":
            return _call_models(given)
        case "doctor":
            from engine.commands import doctor

            return doctor.doctor()
        case _:
            from engine.commands import pages

            return pages.serve(given.root)


def _call_run(given: argparse.Namespace) -> Outcome:
    from engine.commands import running

    if given.command == "resume":
        return running.resume(given.run_key, given.root, verbose=given.verbose)
    if given.dry_run or given.architecture:
        from engine.commands import planning

        return planning.dry_run(given.config, given.set, given.architecture)
    return running.run(
        given.config, given.set, given.run_key, skip_if_registered=given.skip_if_registered, verbose=given.verbose
    )


def _call_records(given: argparse.Namespace) -> Outcome:
    from engine.commands import records, repairing

    if given.command == "repair":
        return repairing.repair(given.root)
    if given.watch is not None:
        return records.watch(given.root, given.run_key, given.watch)
    return records.status(given.root, given.run_key)


def _call_models(given: argparse.Namespace) -> Outcome:
    from engine.commands import models

    where = models.Registry(given.root, given.tracking_uri)
    match given.command:
        case "promote":
            return models.promote(where, given.name, given.version, given.reason)
        case "rollback":
            return models.rollback(where, given.name, given.to, given.reason)
        case "generate":
            from engine.commands import generating

            return generating.generate(where, given.source, given.prompt, given.max_tokens)
    match given.action:
        case "list":
            return models.list_models(where)
        case "show":
            return models.show(where, given.name)
        case _:
            return models.import_model(where, given.source, given.folder)


def _add_runs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = _add(commands, "run", "make a run from a configuration, or continue it")
    sft = _add(commands, "sft", "train a language model on fixed rows: objective sft or dpo")
    reward = _add(commands, "reward-model", "train a reward or cost model on preferences")
    for command in (run, sft, reward):
        _config(command)
        command.add_argument("--run-key", help="name of the run's folder; default NAME-TIME-ID")
        command.add_argument("--dry-run", action="store_true", help="check everything and show the plan, start nothing")
    run.add_argument(
        "--skip-if-registered",
        action="store_true",
        help="do nothing where a run with the same options, data and base model has registered its model",
    )
    run.add_argument(
        "--architecture",
        metavar="FOLDER",
        help="with --dry-run: plan for another machine from the config.json in FOLDER; neither model nor network is needed",
    )
    resume = _add(commands, "resume", "continue a run behind its last committed step")
    resume.add_argument("run_key")
    _root(resume)
    status = _add(commands, "status", "show the runs, or one of them")
    status.add_argument("run_key", nargs="?")
    status.add_argument(
        "--watch", nargs="?", const=2.0, type=_seconds, metavar="SECONDS", help="again every 2 s while a run goes"
    )
    _root(status)
    repair = _add(commands, "repair", "close attempts of processes that died, remove what they left half done")
    _root(repair)


def _add_data_and_models(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    data = commands.add_parser("data", help="look at data").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    check = _add(data, "check", "say what a data file, or the data of a configuration, holds and what is wrong with it")
    check.add_argument("source", metavar="CONFIG|FILE", help="a YAML configuration, or a data file or folder")
    _set(check)
    evaluate = _add(commands, "evaluate", "evaluate a model on the suites of a configuration")
    _config(evaluate)
    evaluate.add_argument(
        "--model", required=True, metavar="SOURCE", help="folder, models:/NAME@ALIAS, runs:KEY, .gguf, Hub id"
    )
    promote = _add(commands, "promote", "make a registered version champion")
    rollback = _add(commands, "rollback", "make an earlier version champion again")
    for command, option, text in (
        (promote, "--version", "challenger"),
        (rollback, "--to", "champion before the present one"),
    ):
        command.add_argument("name")
        command.add_argument(option, type=_version, metavar="N", help=f"default: the {text}")
        command.add_argument("--reason", required=True, type=_said, help="kept with the version")
        _registry(command)
    _add_models(commands)


def _seconds(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal() or float(text) < 0.1:
        raise argparse.ArgumentTypeError(f"{text!r} is no pause; give at least 0.1 seconds")
    return float(text)


def _version(text: str) -> str:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no version; versions are 1, 2, 3...")
    return text


def _said(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("say why, in a few words: it is kept with the version")
    return text


def _add_models(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    models = commands.add_parser("models", help="look at registered models").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    _registry(_add(models, "list", "registered models and their aliases"))
    show = _add(models, "show", "all versions of a model")
    show.add_argument("name")
    _registry(show)
    copied = _add(models, "import", "make a plain model folder of any source")
    copied.add_argument("source")
    copied.add_argument("folder")
    _registry(copied)
    generate = _add(commands, "generate", "answer prompts with a model")
    generate.add_argument("source", metavar="SOURCE")
    generate.add_argument("prompt", nargs="+", metavar="PROMPT")
    generate.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most tokens of an answer (256)")
    _registry(generate)


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    command.add_argument("--verbose", action="store_true", help="more messages, tracebacks of errors")
    return command


def _config(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG", help="YAML file")
    _set(command)


def _set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="change options, as YAML; after CONFIG",
    )


def _root(command: argparse.ArgumentParser) -> None:
    command.add_argument("--root", default=DEFAULT_ROOT, help=f"folder of runs ({DEFAULT_ROOT})")


def _registry(command: argparse.ArgumentParser) -> None:
    _root(command)
    command.add_argument("--tracking-uri", metavar="URI", help="MLflow; default: the SQLite file in the root")
