"""Secrets, by the names and the looks of them: what is stored or shown has `***` in their place.

A result is meant to be sent around. A key in it that nobody sees is lost; a `***` too many only asks somebody to fill
it in again, so what looks like a secret under an innocent name is masked as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: Words before a `key` that opens something, and before a `token` in the midst of a name: `access_key_id`.
_OPENING = (
    "(?:api|access|private|auth|account|storage|service|signing|encryption|ssh|license|hf|huggingface|hub|github|gitlab"
    "|gh|wandb|aws|azure|openai|refresh|login|id)"
)
#: Words before a `token` of a tokenizer.
_SPECIAL = "pad|padding|eos|bos|unk|cls|sep|mask|stop|end|start|special|per|new|image|prompt|next|last|first"
#: Names of secrets whatever their value, as lower-case words between underscores.
_SECRET = re.compile(
    "_(?:secrets|passwords|passwd|pwd|credentials?|bearer|pat|dsn|[a-z]*(?:password|passphrase|apikey|secret))_"
    f"|_{_OPENING}_keys?_"
)
_KEY_AT_THE_END = re.compile(r"_keys?_(?:\d+_)*$")
#: Names of secrets where the value is text: `hf_token` and `token_2`, not `token_type` or `eos_token`.
_SECRET_TEXT = re.compile(
    rf"_{_OPENING}_tokens?_|(?:^|_(?!(?:{_SPECIAL})_)[a-z0-9]+)"
    r"_(?:auth|authorization|cookies?|session|[a-z]*(?:token|accesskey|privatekey|secretkey))_(?:\d+_)*$"
)

#: Keys whose issuers gave them a mark of their own: Hugging Face, GitHub, GitLab, OpenAI and Anthropic, AWS, Slack,
#: Google, JSON Web Tokens (RFC 7519), PEM (RFC 7468).
_LOOKS = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|sk-(?:ant-|proj-|svcacct-)[\w-]{20,}|sk[-_](?:live_)?[A-Za-z0-9]{24,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|xox[abeoprs]-[\w-]{10,}|AIza[\w-]{35}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)(?![\w-])"
    r"|(?<=Bearer )[\w.~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
#: The user's part of an address, up to its last `@` before the path; a password may hold a slash, though it should not.
_USER = re.compile(r"""(?<![\w+.-])([A-Za-z][\w+.-]*://)(?:[^\s"'<>?#/]*|[^\s"'<>?#/:]*:(?!\d+/)[^\s"'<>?#]*)@""")
_QUERY = re.compile(r"""([?&;]([\w.-]+)=)[^&;\s#"'<>]+""")

#: Secrets that this process received under such a name; shorter values would mask text that happens to be the same.
_received: set[str] = set()
_SHORTEST = 6


def is_secret(name: str, value: object = "") -> bool:
    """Whether an option, a variable or a field of this name holds a secret; dotted names by their parts.

    Words are told apart by underscores, dots and capitals: `num_tokens`, `tokenizer`, `path`, `author` name no secret.
    True, false, zero and nothing are never secrets; a number is only where the name leaves no doubt.
    """
    if value is None or value == 0 or isinstance(value, bool) or name in ("PWD", "OLDPWD"):
        return False
    is_text = not isinstance(value, int | float)
    for part in name.split("."):
        words = "_".join(["", *map(str.lower, _WORDS.findall(part)), ""])
        patterns = ((_SECRET, True), (_KEY_AT_THE_END, part.isupper()), (_SECRET_TEXT, is_text))
        if any(applies and pattern.search(words) for pattern, applies in patterns):
            return True
    return False


def masked(tree: Any, name: str = "", is_to_be_used: bool = False) -> Any:
    """A tree of plain values, such as a configuration, without its secrets.

    Of text that holds a secret (an address) only that part is masked; in a tree that is to be used again all of it, to
    be filled in.
    """
    if isinstance(tree, Mapping):
        return {key: masked(value, _dotted(name, key), is_to_be_used) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked(value, name, is_to_be_used) for value in tree]
    if is_secret(name, tree) and tree != "":
        return MASK
    if not isinstance(tree, str):
        return tree
    text = masked_text(tree)
    return MASK if is_to_be_used and text != tree else text


def masked_whole(tree: Any) -> Any:
    """A tree without its secrets, to be used again: text that holds a secret is masked as a whole, to be filled in."""
    return masked(tree, is_to_be_used=True)


def secrets_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a tree's secrets; of those within a list, the list's name."""
    for path, value in leaves(tree, name):
        if masked(value, path) != value:
            yield path, value


def to_fill_in(tree: Any) -> list[str]:
    """Dotted names of the masked values of a stored tree."""
    return list(dict.fromkeys(path for path, value in leaves(tree) if value == MASK))


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of what a tree holds beside mappings and lists."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, _dotted(name, key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value, name)
    else:
        yield name, tree


def _dotted(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def masked_text(text: str) -> str:
    """Text without what looks like a secret, and without the users and passwords of addresses."""
    if "://" in text:
        text = _USER.sub(r"\1", text)
        text = _QUERY.sub(lambda match: f"{match[1]}{MASK}" if is_secret(match[2]) else match[0], text)
    return _LOOKS.sub(MASK, text)


def masked_message(text: str) -> str:
    """A message without secrets, also those that this process received: libraries quote them in their complaints."""
    for value in sorted(_received, key=len, reverse=True):
        text = text.replace(value, MASK)
    return masked_text(text)


def keep_secret(values: Iterable[object]) -> None:
    """Mask these in every message that this process stores and shows."""
    _received.update(text for value in values if len(text := str(value)) >= _SHORTEST)


def masked_words(words: Sequence[str]) -> list[str]:
    """A command line without its secrets: `--model.hf_token ***`, `--model.hf_token=***`."""
    result = list(words)
    for index, value in _secret_words(words):
        result[index] = words[index].removesuffix(value) + MASK
    return [masked_text(word) for word in result]


def keep_words_secret(words: Sequence[str]) -> None:
    """Mask the secrets of a command line in every message, before anybody has understood the line."""
    keep_secret(value for _, value in _secret_words(words))


def _secret_words(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The index of each word that is or ends in a secret, and the secret."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not name.startswith("--") or not is_secret(name.lstrip("-")):
            continue
        if equals and value:
            yield index, value
        elif not equals and index + 1 < len(words) and not words[index + 1].startswith("--"):
            yield index + 1, words[index + 1]
