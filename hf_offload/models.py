"""What a recipe names, built: configurations, tokenizers and models. Only public calls of transformers."""

from __future__ import annotations

import fnmatch
import inspect
import logging
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hf_offload.errors import ConfigError, RecipeError, explain, said_by
from hf_offload.recipe import ModelSpec, TokenizerSpec, is_foreign_kernel, looks_local
from hf_offload.strict_yaml import suggest

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Found in many config.json files; transformers reads them under their newer names or not at all.
_OLD_CONFIG_KEYS = {"rope_theta", "rope_scaling", "torch_dtype", "_name_or_path", "model_type"}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")


def hub_reachable() -> bool:
    """Whether the hub's name resolves. transformers would retry for 20 seconds and more before it says so."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def fetch(setting: str, path: str, load: Callable[[bool], T]) -> T:
    """What `load(local_files_only)` returns for a folder or a hub id; every failure as a plain sentence.

    Args:
        setting: name of the setting that holds `path`, for the message.

    Raises:
        RecipeError: no such folder, no such model, no network, or files that do not fit.
    """
    local = looks_local(path)
    if local and not os.path.isdir(path):
        raise RecipeError(explain(setting, path, "no such folder", "Give a folder with config.json, or a hub id"))
    if not local and (len(path.split("/")) > 2 or not path.strip("/ ")):
        raise RecipeError(explain(setting, path, "neither a folder nor a hub id", "Write a hub id as owner/name"))
    reachable = local or hub_reachable()
    try:
        return load(not reachable)
    except Exception as error:  # a damaged config.json or weights file ends in any of a dozen
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not reachable:
            cause = "no such folder here, it is not in the local cache, and the hub cannot be reached"
            remedy = "Check the network, or download the model elsewhere and give its folder"
        elif local:
            cause, remedy = f"the folder cannot be used: {first}", "Give a folder written by save_pretrained"
        else:
            cause = f"no such folder here, and the hub does not give it: {first}"
            remedy = "Check the name, or log in with `hf auth login` if the model is gated"
        raise RecipeError(explain(setting, path, cause, remedy)) from error


def pretrained_config(path: str, setting: str, trust_remote_code: bool = False) -> Any:
    """The configuration of a folder or a hub id. Raises RecipeError."""
    from transformers import AutoConfig

    if looks_local(path) and os.path.isdir(path) and not (Path(path) / "config.json").is_file():
        raise RecipeError(explain(setting, path, "the folder has no config.json", "Give a folder with a model in it"))
    if trust_remote_code:
        _announce(path)
    config = fetch(
        setting,
        path,
        lambda offline: AutoConfig.from_pretrained(path, local_files_only=offline, trust_remote_code=trust_remote_code),
    )
    if not trust_remote_code:
        _refuse_kernels(config, path)
    return config


@cache
def _announce(path: str) -> None:
    """Said before it happens, and once."""
    logger.warning(
        "hf_offload: model.trust_remote_code=true: code that comes with %r runs on this machine now, with your rights.",
        path,
    )


def _refuse_kernels(config: Any, path: str) -> None:
    """transformers fetches and runs a compiled kernel where a config.json, or a part of one, names its repository.

    Raises:
        RecipeError: this one does.
    """
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _refuse_kernels(value, path)
        elif "implementation" in name and is_foreign_kernel(value):
            cause = f"its config.json names {value!r}, a repository of compiled code, for {name.strip('_')}"
            remedy = "Take that out of config.json, or set model.trust_remote_code=true if you trust the code"
            raise RecipeError(explain("model.path", path, cause, remedy))


def scratch_config(fields: dict[str, Any], setting: str) -> Any:
    """A configuration from `model_type` and its fields. transformers takes any name; unknown ones are refused here.

    Raises:
        RecipeError: an unknown architecture or field, or a value transformers refuses.
    """
    from transformers import CONFIG_MAPPING

    model_type = fields["model_type"]
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        remedy = suggest(str(model_type), list(CONFIG_MAPPING))
        raise RecipeError(explain(f"{setting}.model_type", model_type, "not known to transformers", remedy))
    cls = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"}
    known |= set(getattr(cls, "attribute_map", {})) | set(cls().to_dict()) | _OLD_CONFIG_KEYS
    for name, value in fields.items():
        if name not in known:
            cause = f"not a field of {model_type}"
            raise RecipeError(explain(f"{setting}.{name}", value, cause, suggest(str(name), sorted(known))))
    try:
        return cls(**{name: value for name, value in fields.items() if name != "model_type"})
    except Exception as error:  # the classes of transformers' validation errors differ between versions
        cause = said_by(error)
        raise RecipeError(f"{setting}: transformers refuses this configuration: {cause}") from error


def build_tokenizer(spec: TokenizerSpec, model: ModelSpec) -> Any:
    """The tokenizer of a recipe: its own, or the one that lies with the model. Raises RecipeError."""
    if spec.kind == "byte_level":
        return byte_level_tokenizer()
    from transformers import AutoTokenizer

    if model.trust_remote_code:
        _announce(model.path if spec.path is None else spec.path)
    setting, path = ("tokenizer.path", spec.path) if spec.path is not None else ("model.path", model.path)
    assert path is not None
    tokenizer = fetch(
        setting,
        path,
        lambda offline: AutoTokenizer.from_pretrained(
            path, local_files_only=offline, trust_remote_code=model.trust_remote_code
        ),
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def byte_level_tokenizer() -> Any:
    """A tokenizer that needs no file: each of the 256 bytes is a token, plus four special ones, with a chat template.

    Every text can be written in it and comes back unchanged; ids 0-255 are bytes in ByteLevel's order.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def build_model(spec: ModelSpec, tokenizer: Any) -> Any:
    """The model of a recipe, in its dtype, on the CPU.

    Raises:
        RecipeError: it cannot be had, or its vocabulary is smaller than the tokenizer's.
        ConfigError: `freeze` leaves nothing to train.
    """
    import torch
    from transformers import AutoModelForCausalLM

    kwargs: dict[str, Any] = {"dtype": getattr(torch, spec.dtype), "trust_remote_code": spec.trust_remote_code}
    if spec.attn_implementation is not None:
        kwargs["attn_implementation"] = spec.attn_implementation
    if spec.config is not None:
        config = scratch_config(spec.config, "model.config")
        _check_vocabulary(config, tokenizer, "model.config.vocab_size")
        # Else the Trainer finds that they differ from the tokenizer's, sets them and warns.
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
        model = _refusals_named(lambda: AutoModelForCausalLM.from_config(config, **kwargs))
    else:
        path = spec.path
        assert path is not None
        config = pretrained_config(path, "model.path", spec.trust_remote_code)
        _check_vocabulary(config, tokenizer, "vocab_size of the model")
        model = fetch(
            "model.path",
            path,
            lambda offline: AutoModelForCausalLM.from_pretrained(path, local_files_only=offline, **kwargs),
        )
    freeze(model, spec.freeze)
    return model


def _check_vocabulary(config: Any, tokenizer: Any, setting: str) -> None:
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if rows is not None and len(tokenizer) > rows:
        cause = f"the tokenizer has {len(tokenizer)} tokens"
        raise RecipeError(explain(setting, rows, cause, "Give a model and a tokenizer that belong together"))


def _refusals_named(build: Callable[[], T]) -> T:
    try:
        return build()
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        cause = said_by(error)
        raise RecipeError(f"model.config: transformers cannot build this model: {cause}") from error


def freeze(model: Any, patterns: tuple[str, ...]) -> None:
    """Stop training the parameters whose names match one of `patterns`.

    Raises:
        ConfigError: a pattern that matches nothing, or no trainable parameter is left.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            example = f"Names are like {names[0]}" if names else "The model has no parameters"
            raise ConfigError(explain("model.freeze", pattern, "matches no parameter of the model", example))
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        cause = "no trainable parameter is left in the model"
        raise ConfigError(explain("model.freeze", list(patterns), cause, "Freeze fewer"))


def quiet() -> None:
    """Keep transformers' progress bars and advice out of a run that shows its own; warnings of real trouble stay."""
    from transformers.utils import logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.disable_progress_bar()
