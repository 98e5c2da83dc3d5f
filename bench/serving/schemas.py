"""JSON schemas through a running server: is every output that ends by itself valid, and would it be without a mask?

    .venv/bin/python -m bench.serving.schemas FOLDER... --url http://localhost:8000/v1
    .venv/bin/python -m bench.serving.schemas --random 10000 --url http://localhost:8000/v1

FOLDER: JSON files, each a schema, a list of schemas, a map of names to schemas, or cases of the JSON Schema Test Suite
(json/tests/draft2020-12 in the source package of PyPI's jsonschema); the package check-jsonschema carries schemas that
people use; random ones are made from --seed. Every schema is asked for once as response_format and, those of folders,
once more as a control, in words alone. A schema is

    valid     the output ended by itself and jsonschema finds it valid
    cut       the output reached its limit of tokens
    refused   400 before anything was computed, with a reason
    INVALID   the output ended by itself and is not JSON, or not valid
    BROKEN    anything else: a 5xx, no answer in time
    unclear   jsonschema cannot use the schema: Python's patterns are not JavaScript's
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from bench.serving.random_schemas import RandomSchemas

OUTCOMES = ("valid", "cut", "refused", "INVALID", "BROKEN", "unclear")


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one schema. `detail`: the output that was not valid, or the refusal. `reply_s`: of the answer."""

    name: str
    outcome: str
    detail: str
    reply_s: float
    control: str = ""  # outcome without a mask


def schemas_in(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, schema) of a file, or of all files below a folder."""
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        content = json.loads(file.read_text())
        if isinstance(content, list):
            for index, one in enumerate(content):
                is_case = isinstance(one, dict) and "schema" in one
                yield (
                    f"{file.stem}/{one.get('description', index) if is_case else index}",
                    one["schema"] if is_case else one,
                )
        elif isinstance(content, dict) and content and all(isinstance(one, dict) for one in content.values()):
            yield from ((f"{file.stem}/{name}", one) for name, one in content.items())
        else:
            yield file.stem, content


def problem_of(text: str, schema: Any) -> str:
    """Why a text is not a valid instance; empty if it is."""
    try:
        value = json.loads(text)
        if schema is not True:
            cls = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            cls(schema, format_checker=cls.FORMAT_CHECKER).validate(value)
    except json.JSONDecodeError as error:
        return f"not JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"not valid: {error.message}"
    except Exception as error:  # a schema with which jsonschema itself cannot validate, such as {"$ref": "#"}
        return f"jsonschema: {error}"
    return ""


async def outcome(client: httpx.AsyncClient, body: dict[str, Any], schema: Any) -> tuple[str, str]:
    """One of OUTCOMES and its detail."""
    try:
        while (answer := await client.post("/chat/completions", json=body)).status_code == 429:
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
    except httpx.HTTPError as error:
        return "BROKEN", repr(error)
    if answer.status_code == 400:
        return "refused", answer.json()["error"]["message"]
    if answer.status_code != 200:
        return "BROKEN", f"{answer.status_code} {answer.text[:200]}"
    choice = answer.json()["choices"][0]
    text = choice["message"]["content"] or ""
    if choice["finish_reason"] == "length":
        return "cut", text
    problem = problem_of(text, schema)
    if problem.startswith("jsonschema: "):
        return "unclear", problem
    return ("INVALID", f"{problem} in {text}") if problem else ("valid", "")


async def run(
    client: httpx.AsyncClient, named: Sequence[tuple[str, Any]], options: dict[str, Any], *, has_control: bool = True
) -> list[Row]:
    """A row for each schema; 8 requests at a time."""
    room = asyncio.Semaphore(8)

    async def one(name: str, schema: Any) -> Row:
        prompt = f"Answer with JSON that this schema allows, and nothing else: {json.dumps(schema)[:1500]}"
        body = options | {"messages": [{"role": "user", "content": prompt}]}
        spec = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
        async with room:
            start_s = time.perf_counter()
            found, detail = await outcome(client, body | {"response_format": spec}, schema)
            reply_s = time.perf_counter() - start_s
            if found == "refused" or not has_control:
                return Row(name, found, detail, reply_s)
            return Row(name, found, detail, reply_s, (await outcome(client, body, schema))[0])

    return list(await asyncio.gather(*(one(name, schema) for name, schema in named)))


def table(rows: Sequence[Row]) -> str:
    """Counts of outcomes, with and without masks, and the slowest refusal."""
    with_masks, without = Counter(row.outcome for row in rows), Counter(row.control for row in rows if row.control)
    lines = [f"{'':22}" + "".join(f"{name:>9}" for name in OUTCOMES)]
    for label, counts in (("with masks", with_masks), ("without (control)", without)):
        lines.append(f"{label:22}" + "".join(f"{counts[name]:9}" for name in OUTCOMES))
    slowest = max((row.reply_s for row in rows if row.outcome == "refused"), default=0.0)
    return "\n".join([*lines, f"{len(rows)} schemas; the slowest refusal took {slowest:.2f} s"])


async def _main(args: argparse.Namespace) -> None:
    headers = {"authorization": f"Bearer {args.api_key}"}
    async with httpx.AsyncClient(base_url=args.url, headers=headers, timeout=120) as client:
        model = (await client.get("/models")).json()["data"][0]["id"]
        options = {"model": model, "temperature": 1.0, "seed": args.seed, "max_tokens": args.max_tokens}
        named = [(path.name, True, list(schemas_in(path))[: args.most]) for path in args.paths]
        seeds = range(args.seed, args.seed + args.random)
        named += (
            [("random", False, [(f"seed {seed}", RandomSchemas(seed).schema()) for seed in seeds])] if seeds else []
        )
        for title, has_control, schemas in named:
            rows = await run(client, schemas, options, has_control=has_control)
            print(f"{title}\n{table(rows)}")
            for row in rows:
                if row.outcome in ("INVALID", "BROKEN") or (args.refused and row.outcome == "refused"):
                    print(f"    {row.outcome} {row.name}: {row.detail[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="random schemas")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--most", type=int, help="schemas of each folder, at most")
    parser.add_argument("--refused", action="store_true", help="print why schemas were refused")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
