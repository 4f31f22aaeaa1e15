"""Text fit to leave this program: secrets have `***` in their place, and no control character reaches a screen.

First the exact values of secrets that the process has (environment variables by their names, options), however a
library quotes them; then what stands under a secret's name; then what looks like a key. A result is meant to be sent
around: a key in it that nobody sees is lost, a `***` too many only asks somebody to fill it in again.

A terminal obeys control characters, and a mark of direction turns around what follows it. Whatever was read from a
file, a command line or a process goes through `shown` on its way to a screen, a table or a page.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: Words before a `key` that opens something, and before a `token` in the midst of a name: `access_key_id`.
_OPENING = (
    "(?:api|access|private|master|subscription|auth|account|storage|service|signing|encryption|ssh|license|hf|huggingface|hub|github|gitlab"
    "|gh|wandb|aws|azure|openai|refresh|login|id)"
)
#: Words before a `token` of a tokenizer.
_SPECIAL = "pad|padding|eos|bos|unk|cls|sep|mask|stop|end|start|special|per|new|image|prompt|next|last|first"
#: Names of secrets whatever their value, as lower-case words between underscores.
_SECRET = re.compile(
    "_(?:secrets|passwords|passwd|pwd|credentials?|creds|jwt|bearer|pat|dsn|[a-z]*(?:password|passphrase|apikey|secret))_"
    f"|_{_OPENING}_keys?_"
)
#: Names of secrets where all of the name is in capitals, as variables are.
_SECRET_VARIABLE = re.compile(r"_(?:keys?|pass|pw|sas|connection_string|webhook(?:_url)?)_(?:\d+_)*$")
#: Names of secrets where the value is text: `hf_token` and `token_2`, not `token_type` or `eos_token`.
_SECRET_TEXT = re.compile(
    rf"_{_OPENING}_tokens?_|(?:^|_(?!(?:{_SPECIAL})_)[a-z0-9]+)"
    r"_(?:auth|authorization|cookies?|session|[a-z]*(?:token|accesskey|privatekey|secretkey))_(?:\d+_)*$"
)

#: What the keys of well-known makers begin with, as in the rules of gitleaks and detect-secrets; letters and digits
#: follow.
_PREFIX = (
    r"gh[pousr]_|sk-|sk_(?=[0-9a-f]{48})|sk[-_]live_|[rps]k_(?:live|test)_|whsec_|npm_|r8_|gsk_|xai-|pplx-|fw_"
    r"|lsv2_(?:pt|sk)_|KGAT_|wandb_v\d_|dapi|do[opr]_v1_|shp(?:at|ca|pa|ss)_|sbp_|nfp_|rnd_|lin_api_|ntn_|secret_"
    r"|gls?[ac]_|dckr_[op]at_|sntry[su]_|PMAK-|NRAK-|AGE-SECRET-KEY-1|rubygems_|AT[AC]TT3|EAA[AC]"
    r"|key-|SK|AC|rp[as]_|phx_|a[ks]-|bkua_|sgp_|xkeysib-|mlsn\.|AKCp|LTAI|ABSK|ops_|oy2|rdme_|pnu_|tfp_|aio_|fm2_"
    r"|csk-|tvly-|jina_|e2b_"
)
#: Beginnings after which `-`, `_` or `.` may follow soon.
_LONG_PREFIX = (
    r"github_pat_|gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|imt|oas)-|sk-(?:ant|proj|svcacct|admin|or)-|pypi-|nvapi-|SG\."
    r"|GOCSPX-|ya29\.|hv[sbr]\.|figd_|sq0[a-z]{3}-|dp\.[a-z]+\.|pul-|sl\.|tgp_v1_|pcsk_"
    r"|pscale_(?:tkn|pw)_|sb_secret_|tskey-|HRKU-|CFPAT-|CCIPAT_|vercel_blob_rw_|dt0[cs]\d\d\.|bedrock-api-key-"
)
#: Keys with another form: Hugging Face (letters alone), AWS, Slack, Google, Azure, Telegram, Discord, Mailgun,
#: Mailchimp, Airtable, Terraform, JSON Web Tokens (RFC 7519), PEM (RFC 7468).
_LOOKS = re.compile(
    rf"(?<![\w-])(?:(?:{_PREFIX})(?=[A-Za-z]*\d)[A-Za-z0-9]{{20,}}[\w.=-]*"
    rf"|(?:{_LONG_PREFIX})(?=\D*\d)[\w.=-]{{20,}}"
    r"|(?:hf_|api_org_)[A-Za-z0-9]{34,}"
    r"|(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{16}|(?:xox[abeoprs]|xapp)-[\w-]{10,}|AIza[\w-]{35}"
    r"|\w{3}\dQ~[\w.~-]{31,34}|\d{8,10}:AA[\w-]{33}|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,38}"
    r"|[0-9a-f]{32}-(?:us\d{1,2}|[0-9a-f]{8}-[0-9a-f]{8})"
    r"|pat[A-Za-z0-9]{14}\.[0-9a-f]{64}|[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|eyJ[\w+/=-]{40,})(?![\w-])"
    r"|(?<=//hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)[\w/-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
#: Credentials of HTTP: `Authorization: Basic ...`.
_SCHEME = re.compile(
    r"""(authorization["']?\s*[:=]\s*["']?)?\b(bearer|basic|digest|token|apikey|sharedkey)(\s+)([\w.~+/=:-]{8,})""",
    re.I,
)
_ORDINARY_WORDS = re.compile(r"[A-Z]?[a-z]+(?:[-_.:/][A-Za-z]?[a-z]*)*")
#: The user's part of an address, up to its last `@` before the path; a password may hold a slash, though it should not.
_USER = re.compile(r"""(?<![\w+.-])([A-Za-z][\w+.-]*://)(?:[^\s"'<>?#/]*|[^\s"'<>?#/:]*:(?!\d+/)[^\s"'<>?#]*)@""")
#: A name before its value, and by its quotation mark the value: `Pwd=...;`, `?sig=...&`, `"api_key": "..."`, and of an
#: option also `--token ...` and `'--token', '...'`. What is called or indexed is code.
_NAME = re.compile(r"""(?<!\w)(--)?([A-Za-z_][\w.-]*)["']?\]?(\s*[=:]>?\s*|(?(1),?[ \t]+|(?!)))(?:b(?=["']))?(["']?)""")
_VALUE = {
    "": re.compile(r"""[^\s"'&;,#<>(){}\[\]]+(?![\w.]*[(\[])"""),
    "'": re.compile(r"[^'\n]+"),
    '"': re.compile(r'[^"\n]+'),
}
#: What stands behind the name of an option and is no value: an option, a placeholder, a word of the sentence.
_NO_VALUE = re.compile(
    r"-.*|[${A-Z_}]+|(?:an?|and|are|as|at|be|belongs|but|by|can|cannot|first|for|from|given|has|here|if|in|instead|is|it"
    r"|may|must|needs|not|of|on|once|only|or|takes|that|the|then|to|too|twice|was|were|when|where|with|without)[.:!?]*"
)
_SIGNATURE = re.compile("(?:^|[-_])sig(?:nature)?$", re.I)
_LEAST_SIGNATURE = 16

#: Secrets of this process: of its environment, and those that it received. Shorter values would mask text that happens
#: to be the same, and so would a word such as the desktop's name in DESKTOP_SESSION.
_known: set[str] = set()
_SHORTEST, _SHORTEST_WORD = 6, 10


def is_secret(name: str, value: object = "") -> bool:
    """Whether an option, a variable or a field of this name holds a secret; dotted names by their parts.

    Words are told apart by underscores, dots and capitals: `num_tokens`, `tokenizer`, `path`, `author` name no secret.
    True, false, zero and nothing are never secrets; a number is only where the name leaves no doubt.
    """
    if value is None or value == 0 or isinstance(value, bool) or name in ("PWD", "OLDPWD"):
        return False
    return _names_secret(name, not isinstance(value, int | float))


@cache
def _names_secret(name: str, is_text: bool) -> bool:
    for part in name.split("."):
        words = "_".join(["", *map(str.lower, _WORDS.findall(part)), ""])
        patterns = [_SECRET, *([_SECRET_VARIABLE] if part.isupper() else []), *([_SECRET_TEXT] if is_text else [])]
        if any(pattern.search(words) for pattern in patterns):
            return True
    return False


def masked(tree: Any, name: str = "", is_to_be_used: bool = False) -> Any:
    """A tree of plain values, such as a configuration, without its secrets.

    Of text that holds a secret (an address) only that part is masked; in a tree that is to be used again all of it, to
    be filled in.
    """
    if isinstance(tree, Mapping):
        masked_keys = {key: masked_text(key) if isinstance(key, str) else key for key in tree}
        return {masked_keys[key]: masked(value, _dotted(name, key), is_to_be_used) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked(value, name, is_to_be_used) for value in tree]
    text = masked_text(tree) if isinstance(tree, str) else tree
    is_whole = is_secret(name, tree) and tree != ""
    return MASK if is_whole or (is_to_be_used and text != tree) else text


def masked_whole(tree: Any) -> Any:
    """A tree without its secrets, to be used again: text that holds a secret is masked as a whole, to be filled in."""
    return masked(tree, is_to_be_used=True)


def secrets_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a tree's secrets; of those within a list, the list's name."""
    return ((path, value) for path, value in leaves(tree) if masked(value, path) != value)


def to_fill_in(tree: Any) -> list[str]:
    """Dotted names of the masked values of a stored tree."""
    return list(dict.fromkeys(path for path, value in leaves(tree) if value == MASK))


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of what a tree holds beside mappings and lists."""
    if isinstance(tree, Mapping):
        parts = [(_dotted(name, key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        parts = [(name, value) for value in tree]
    else:
        yield name, tree
        return
    for path, value in parts:
        yield from leaves(value, path)


def _dotted(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def masked_text(text: str) -> str:
    """Text without secrets, and without the users and passwords of addresses."""
    # The longest first, which may hold others.
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, MASK)
    if "://" in text:
        text = _USER.sub(r"\1", text)
    if len(text) > _SHORTEST:
        text = _SCHEME.sub(_masked_scheme, _LOOKS.sub(MASK, text))
    return _without_values(text) if any(sign in text for sign in ("=", ":", "--")) else text


def _masked_scheme(match: re.Match[str]) -> str:
    header, scheme, blank, value = match.groups(default="")
    is_word = not header and scheme.lower() != "bearer" and _ORDINARY_WORDS.fullmatch(value)
    return match[0] if is_word else f"{header}{scheme}{blank}{MASK}"


def _without_values(text: str) -> str:
    """Text without the values of secrets' names."""
    pieces, end = list[str](), 0
    for match in _NAME.finditer(text):
        dashes, name, separator, quotation = match.groups()
        value = _VALUE[quotation].match(text, match.end())
        is_option = dashes and ":" not in separator
        if match.start() < end or not value or (is_option and _NO_VALUE.fullmatch(value[0])):
            continue
        is_query = text[: match.start()].endswith(("?", "&", ";"))
        is_literal = is_option or is_query or quotation or not _ORDINARY_WORDS.fullmatch(value[0])
        is_signature = len(value[0]) >= _LEAST_SIGNATURE and _SIGNATURE.search(name)
        if (
            is_signature
            or is_secret(name, 1)
            or (is_literal and not value[0].isdecimal() and is_secret(name, value[0]))
        ):
            pieces += text[end : match.end()], MASK
            end = value.end()
    return "".join([*pieces, text[end:]])


def masked_message(text: str) -> str:
    """A message without secrets, also those that have come into the environment since: libraries quote them."""
    keep_environment_secret()
    return masked_text(text)


def keep_environment_secret() -> None:
    """Mask the values of environment variables with a secret's name in everything that leaves this process."""
    keep_secret(
        value
        for name, value in os.environ.items()
        if is_secret(name, value) and not (value.isalpha() and len(value) < _SHORTEST_WORD)
    )


def keep_secret(values: Iterable[object]) -> None:
    """Mask these in everything that leaves this process, also as Python, JSON and addresses quote them."""
    for text in map(str, values):
        if len(text) >= _SHORTEST:
            _known.update((text, repr(text)[1:-1], json.dumps(text)[1:-1]))
            _known.update((quote(text), quote(text, safe=""), quote_plus(text)))


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
    is_next = False
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        is_option = word.startswith("--")
        if is_next and not is_option:
            yield index, word
        is_named = is_option and is_secret(name.lstrip("-"))
        if is_named and value:
            yield index, value
        is_next = is_named and not equals


def shown(text: str) -> str:
    r"""The text on one line, its unprintable characters (`str.isprintable`) as Python writes them: `\n`, `\x1b`."""
    return _replace_unprintable(text, lambda character: character.encode("unicode_escape").decode())


def one_line(text: str) -> str:
    """A message as one line of printable characters; its line breaks mean no more than a blank."""
    return shown(" ".join(text.split()))


def shown_lines(text: str) -> str:
    """Text in several lines, each fit to be shown."""
    return "\n".join(map(shown, text.split("\n")))


def shown_json(text: str) -> str:
    """JSON of the same content, with unprintable characters escaped."""
    return "\n".join(
        _replace_unprintable(line, lambda character: json.dumps(character)[1:-1]) for line in text.split("\n")
    )


def _replace_unprintable(text: str, escape: Callable[[str], str]) -> str:
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else escape(character) for character in text)
