"""Tests of the server's flags."""

import argparse
from typing import Any

import pytest

from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.config.env import Env
from quire.config.sections import options_of
from quire.config.server_sections import SERVER_SECTIONS
from quire.errors import ConfigError
from quire.server.settings import (
    ServerSettings,
    add_server_flags,
    make_settings,
    paths,
    server_settings,
)

# Flags of `vllm serve` besides the engine's.
VLLM_SERVER_FLAGS = """
    headless api-server-count grpc host port uds root-path api-key allow-credentials allowed-origins
    allowed-methods allowed-headers ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers
    enable-ssl-refresh middleware enable-request-id-headers disable-fastapi-docs enable-offline-docs
    h11-max-incomplete-event-size h11-max-header-count uvicorn-log-level disable-uvicorn-access-log
    disable-access-log-for-endpoints log-config-file max-log-len enable-log-requests
    enable-log-outputs enable-log-deltas log-error-stack lora-modules chat-template
    chat-template-content-format trust-request-chat-template default-chat-template-kwargs
    response-role return-tokens-as-token-ids enable-auto-tool-choice tool-call-parser
    tool-parser-plugin exclude-tools-when-tool-choice-none tool-server enable-prompt-tokens-details
    enable-per-request-metrics enable-server-load-tracking enable-force-include-usage
    enable-tokenizer-info-endpoint tokens-only fingerprint-mode fingerprint-value
    data-parallel-supervisor-port enable-flash-late-interaction shutdown-timeout
""".replace("\n", " ").split()


def parser() -> FlagParser:
    made = FlagParser(prog="quire serve")
    made.add_argument("model_tag", nargs="?")
    add_server_flags(made)
    add_engine_flags(made)
    return made


def read(*args: str) -> argparse.Namespace:
    namespace: argparse.Namespace = parser().parse_args(list(args))
    return namespace


def test_defaults_without_flags() -> None:
    assert server_settings(read()) == ServerSettings()
    assert ServerSettings().http.port == 8000 and ServerSettings().http.shutdown_timeout == 30.0


def test_server_and_engine_flags_are_separated() -> None:
    """shutdown-timeout and enable-log-requests are engine flags elsewhere; here they must not be ignored."""
    namespace = read(
        "m", "--port", "9", "--shutdown_timeout", "3", "--enable-log-requests", "--max-num-seqs", "4"
    )
    settings = server_settings(namespace)
    assert (settings.http.port, settings.http.shutdown_timeout, settings.log.enable_log_requests) == (
        9,
        3.0,
        True,
    )
    assert engine_args_from(namespace) == {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("line", "section", "name", "value"),
    [
        ("--api-key a b", "access", "api_key", ("a", "b")),
        ('--allowed-origins ["http://x"]', "access", "allowed_origins", ["http://x"]),
        ("--max-request-body-bytes 1M", "http", "max_request_body_bytes", 1 << 20),
        ("--default-chat-template-kwargs.a 1", "api", "default_chat_template_kwargs", {"a": 1}),
        ("-asc 2", "http", "api_server_count", 2),
        ("--no-allow-credentials", "access", "allow_credentials", False),
    ],
)
def test_flag_syntax(line: str, section: str, name: str, value: Any) -> None:
    assert getattr(getattr(server_settings(read(*line.split())), section), name) == value


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 70000}, "at most 65535"),
        ({"allowed_origins": "x"}, "JSON list of strings"),
        ({"ssl_keyfile": "k"}, "go together"),
        ({"enable_log_outputs": True}, "needs enable_log_requests"),
        ({"root_path": "x"}, "must start with '/'"),
        ({"tool_server": "a"}, "tool_server='a' is not supported"),
        ({"tool_call_parser": "hermis"}, "unknown tool parser 'hermis'; did you mean 'hermes'?; known: "),
        ({"reasoning_parser": "qwen"}, "unknown reasoning parser 'qwen'; did you mean 'qwen3'?; known: "),
        ({"reasoning_config": {"end": "x"}}, "unknown reasoning_config key 'end'"),
        ({"reasoning_config": {"reasoning_parser": "qwen"}}, "unknown reasoning parser 'qwen'"),
        ({"reasoning_config": {"reasoning_end_str": "</t>"}}, "give both, or neither"),
        ({"reasoning_config": {"reasoning_start_str": 1}}, "must be a string"),
        (
            {
                "reasoning_parser": "mistral",
                "reasoning_config": {"reasoning_start_str": "[THINK]", "reasoning_end_str": "[/THINK].."},
            },
            "a text that ends with '[/THINK]'",
        ),
        ({"reasoning_parser": "qwen3", "reasoning_config": {"reasoning_parser": "mistral"}}, "given twice"),
        ({"tool_parser_plugin": "/nowhere.py"}, "no parser plugin at /nowhere.py"),
        ({"lora_modules": "x"}, "'x' must be name=path"),
        ({"prot": 1}, "unknown server setting 'prot'"),
        ({"max_n": 0}, "at least 1"),
    ],
)
def test_invalid_settings_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_settings(values)
    assert words in str(refused.value)


def test_several_lora_modules_are_parsed() -> None:
    """Catches a second adapter that is parsed as the model."""
    line = ["m", "--lora-modules", "a=x", '{"name": "b", "path": "y"}', "--enable-lora", "--max-loras", "4"]
    namespace = read(*line)
    assert [(module.name, module.root) for module in server_settings(namespace).modules] == [
        ("a", "x"),
        ("b", "y"),
    ]
    assert namespace.model_tag == "m" and engine_args_from(namespace) == {"enable_lora": True, "max_loras": 4}


def test_every_vllm_server_flag_is_known() -> None:
    known = set(parser()._option_string_actions)
    assert [name for name in VLLM_SERVER_FLAGS if f"--{name}" not in known] == []


def test_every_setting_has_help() -> None:
    actions = parser()._option_string_actions
    for name in options_of(SERVER_SECTIONS):
        assert len(actions[f"--{name.replace('_', '-')}"].help or "") > 10, name


def test_api_key_flag_overrides_the_environment_and_is_not_printed() -> None:
    env = Env.read({"VLLM_API_KEY": "from-env"})
    assert make_settings({}, env=env).access.api_key == ("from-env",)
    settings = make_settings({"api_key": ["flag"]}, env=env)
    assert settings.access.api_key == ("flag",) and "flag" not in repr(settings)


def test_address_and_exempt_paths() -> None:
    assert make_settings({}).address == "http://0.0.0.0:8000"
    assert make_settings({"host": "::1", "port": 1, "root_path": "/x"}).address == "http://[::1]:1/x"
    assert make_settings({"uds": "/s"}).address == "unix:/s"
    assert paths(" /a, /b,,") == {"/a", "/b"}
