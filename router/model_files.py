"""What the router needs of a model, read from its files: tokenizer, chat template, end tokens, defaults.

A model is a Hugging Face folder (tokenizer.json, config.json, …), a GGUF file, or a folder that holds one
GGUF file. Everything is read once, at the start; what is missing or broken is a ModelFilesError, one line
that names the file and what is wrong with it. No weights are read here, and no torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from router import gguf_tokenizer
from router.gguf_reader import Reader

GGUF_MAGIC = b"GGUF"
# Classes of tokenizers that transformers 5 builds by `add_prefix_space`, and models that have one unsaid.
_BYTE_LEVEL_CLASSES = frozenset({"GPT2Tokenizer", "Qwen2Tokenizer"})
_PIECE_CLASSES = frozenset({"LlamaTokenizer"})
_CLASSES_OF_MODELS = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}


class ModelFilesError(ValueError):
    """A model cannot be served from these files; the text is one line for people."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What absent sampling fields mean for this model; None where its files do not say.

    From generation_config.json: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, and
    `max_new_tokens` as `max_tokens`; a GGUF's `general.sampling.*` where there is no such file. As in vLLM, a
    value that stands there counts, whatever `do_sample` says: that is about transformers' own `generate`.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files say.

    `name` is the folder's name, or the file's without its suffix. `eos_token_ids` is the union of what
    config.json, generation_config.json and the tokenizer call an end token, ascending. `max_seq_len` is the
    most tokens, prompt and output, that the model was made for.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: GenerationDefaults
    max_seq_len: int | None


def read(path: Path) -> ModelFiles:
    """Read a model's files. Raises ModelFilesError, one line for people."""
    try:
        return _read(path)
    except OSError as error:
        raise ModelFilesError(
            f"{error.filename or path} cannot be read: {error.strerror or error}"
        ) from error


def _read(path: Path) -> ModelFiles:
    if not path.exists():
        raise ModelFilesError(
            f"--model is {path}, which does not exist: give a folder or a GGUF file "
            "(`chairlift pull smollm2` makes the folder models/smollm2)"
        )
    if path.is_file():
        return _read_gguf(path, name=path.stem, settings={})
    if (path / "tokenizer.json").exists():
        return _read_folder(path)
    gguf_paths = sorted(path.glob("*.gguf"))
    if len(gguf_paths) > 1:
        names = ", ".join(each.name for each in gguf_paths)
        raise ModelFilesError(f"{path} holds {len(gguf_paths)} GGUF files ({names}); name the one to serve")
    if not gguf_paths:
        raise ModelFilesError(f"{path} holds no tokenizer.json and no GGUF file, so there is no tokenizer")
    settings = _json_object(path / "generation_config.json", needed=False)
    return _read_gguf(gguf_paths[0], name=path.resolve().name, settings=settings)


def _read_folder(folder: Path) -> ModelFiles:
    config = _Settings(folder / "config.json", _json_object(folder / "config.json", needed=False))
    generation = _Settings(
        folder / "generation_config.json", _json_object(folder / "generation_config.json", needed=False)
    )
    tokenizer_config = _json_object(folder / "tokenizer_config.json", needed=False)
    tokenizer = _load_tokenizer(folder / "tokenizer.json")
    described = _Settings(folder / "tokenizer_config.json", tokenizer_config)
    if described.flag("split_special_tokens"):
        tokenizer.encode_special_tokens = True
    _follow_prefix_space(tokenizer, described, config)
    eos_token = _token_text(tokenizer_config.get("eos_token"))
    eos_token_ids = {*config.ids("eos_token_id"), *generation.ids("eos_token_id")}
    if eos_token is not None and (token_id := tokenizer.token_to_id(eos_token)) is not None:
        eos_token_ids.add(token_id)
    return ModelFiles(
        name=folder.resolve().name,
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, tokenizer_config),
        bos_token=_token_text(tokenizer_config.get("bos_token")),
        eos_token=eos_token,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        generation_defaults=_generation_defaults(generation),
        max_seq_len=config.integer("max_position_embeddings", at_least=1),
    )


def _read_gguf(path: Path, *, name: str, settings: dict[str, Any]) -> ModelFiles:
    metadata = _gguf_metadata(path)
    try:
        tokenizer = gguf_tokenizer.build(metadata)
        eos_token = gguf_tokenizer.special_token(metadata, "eos")
        bos_token = gguf_tokenizer.special_token(metadata, "bos")
    except gguf_tokenizer.UnsupportedTokenizerError as error:
        raise ModelFilesError(f"{path}: {error}") from error
    except Exception as error:  # the tokenizers library raises bare Exception
        reason = str(error).partition("\n")[0]
        raise ModelFilesError(f"{path}: its metadata make no tokenizer: {reason}") from error
    described = _Settings(path, metadata)
    generation = _Settings(path.parent / "generation_config.json", settings)
    ends = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    eos_token_ids = {*generation.ids("eos_token_id"), *(i for key in ends for i in described.ids(key))}
    return ModelFiles(
        name=name,
        tokenizer=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=bos_token,
        eos_token=eos_token,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        generation_defaults=_generation_defaults(generation if settings else _gguf_sampling(path, metadata)),
        max_seq_len=described.integer(f"{metadata.get('general.architecture')}.context_length", at_least=1),
    )


@dataclass(frozen=True, slots=True)
class _Settings:
    """Values out of one file, read with refusals that name it."""

    path: Path
    values: dict[str, Any]

    def ids(self, key: str) -> list[int]:
        """A token id or a list of them; none when the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return []
        ids = value if isinstance(value, list) else [value]
        if not all(_is_integer(each) and each >= 0 for each in ids):
            raise self._wrong(key, "a token id or a list of token ids")
        return ids

    def integer(self, key: str, *, at_least: int) -> int | None:
        """A whole number, None when the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not _is_integer(value) or value < at_least:
            raise self._wrong(key, f"a whole number of at least {at_least}")
        return int(value)

    def number(self, key: str, *, at_least: float = 0.0, at_most: float) -> float | None:
        """A finite number, None when the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not at_least <= value <= at_most:
            raise self._wrong(key, f"a number from {at_least:g} to {at_most:g}")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """A switch, None when the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def _wrong(self, key: str, expected: str) -> ModelFilesError:
        return ModelFilesError(f"{self.path}: {key} is {self.values[key]!r}, it must be {expected}")


def _generation_defaults(settings: _Settings) -> GenerationDefaults:
    top_p = settings.number("top_p", at_most=1.0)
    if top_p == 0:
        raise ModelFilesError(f"{settings.path}: top_p is 0, it must be above 0 and at most 1")
    repetition_penalty = settings.number("repetition_penalty", at_most=100.0)
    if repetition_penalty == 0:
        raise ModelFilesError(f"{settings.path}: repetition_penalty is 0, it must be above 0 and at most 100")
    return GenerationDefaults(
        temperature=settings.number("temperature", at_most=100.0),
        top_p=top_p,
        top_k=settings.integer("top_k", at_least=-1),
        min_p=settings.number("min_p", at_most=1.0),
        repetition_penalty=repetition_penalty,
        max_tokens=settings.integer("max_new_tokens", at_least=1),
    )


def _gguf_sampling(path: Path, metadata: dict[str, Any]) -> _Settings:
    """A GGUF's own sampling values, under the names of generation_config.json."""
    names = {
        "temp": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    return _Settings(
        path, {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
    )


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        reason = str(error).partition("\n")[0]
        raise ModelFilesError(f"{path} is not a tokenizer: {reason}") from error
    # Some files carry the lengths of their training batches.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _follow_prefix_space(tokenizer: Tokenizer, described: _Settings, config: _Settings) -> None:
    """Has the tokenizer follow `add_prefix_space` where transformers does, which goes by the class.

    It builds the tokenizers of a few classes anew, by this setting; for others tokenizer.json has the word.
    """
    wanted = described.flag("add_prefix_space")
    of_model = _CLASSES_OF_MODELS.get(str(config.values.get("model_type")))
    name = str(described.values.get("tokenizer_class") or of_model).removesuffix("Fast")
    if wanted is None:
        return
    stages = _stages(tokenizer.pre_tokenizer)
    byte_level = [stage for stage in stages if isinstance(stage, pre_tokenizers.ByteLevel)]
    if byte_level:
        for stage in byte_level if name in _BYTE_LEVEL_CLASSES else ():
            stage.add_prefix_space = wanted
        return
    if name not in _PIECE_CLASSES:
        return
    metaspace = [stage for stage in stages if isinstance(stage, pre_tokenizers.Metaspace)]
    has_prefix = any(stage.prepend_scheme != "never" for stage in metaspace) or any(
        isinstance(stage, normalizers.Prepend) for stage in _stages(tokenizer.normalizer)
    )
    if has_prefix is not wanted:
        raise ModelFilesError(
            f"{described.path}: add_prefix_space is {json.dumps(wanted)}, and tokenizer.json puts "
            f"{'a' if has_prefix else 'no'} space before a text; make one of them say what the other says"
        )


def _stages(whole: Any) -> list[Any]:
    """The parts of a normalizer or a pre-tokenizer that may be a sequence of them."""
    if not isinstance(whole, normalizers.Sequence | pre_tokenizers.Sequence):
        return [] if whole is None else [whole]
    parts: Any = whole  # it is iterable, which its types do not say
    return [each for part in parts for each in _stages(part)]


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The template in its own file, else in the tokenizer's settings, where of several the default counts."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template}.get("default")
    return template


def _token_text(value: Any) -> str | None:
    """A special token's text: a string, or an object that holds it as `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _json_object(path: Path, *, needed: bool) -> dict[str, Any]:
    if not needed and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def _gguf_metadata(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ModelFilesError(f"{path} is a file but not a GGUF file; give a GGUF file or a model folder")
    try:
        fields = Reader(path).fields
        return {key: field.contents() for key, field in fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelFilesError(f"{path} is broken or cut off: {error}") from error


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
