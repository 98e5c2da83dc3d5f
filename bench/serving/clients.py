"""Public clients against a running server: how many of their structured outputs, tool calls and agent loops work.

    make serve                                                                     # in one terminal
    .venv/bin/python -m bench.serving.clients --url http://localhost:8000/v1       # in another

A check passes when the client, unmodified, returns what it promises: an object of the caller's pydantic class, a call
of one of the caller's tools whose arguments its schema allows, an answer after a tool's result. How good the answers
are depends on the model and is not looked at. Clients that are not installed are named and left out; the OpenAI and
LangChain ones come with the dev extra, the others with pip install instructor pydantic-ai-slim[openai] openai-agents
llm-comply. Every request has a seed and a limit of tokens: an output cut at the limit counts as a failure.
"""

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema
import openai
from pydantic import BaseModel, Field, create_model

NEEDS = {  # client: the module that it needs
    "openai parse": "openai",
    "openai stream": "openai",
    "openai tools": "openai",
    "langchain": "langchain_openai",
    "instructor": "instructor",
    "pydantic-ai": "pydantic_ai",
    "openai-agents": "agents",
    "llm-comply chat": "llm_comply",
    "llm-comply responses": "llm_comply",
    "llm-comply anthropic": "llm_comply",
}
COMPLY = {"chat": "openai-chat", "responses": "open-responses", "anthropic": "anthropic"}
Word = Annotated[str, Field(max_length=24)]


class Mood(StrEnum):
    GLAD = "glad"
    SAD = "sad"
    OTHER = "so-so, or angry"


class Tree(BaseModel):
    value: int = Field(ge=0, le=9)
    children: list["Tree"] = Field(max_length=2)


class Chain(BaseModel):
    label: Literal["a", "b"]
    rest: "Chain | None"


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Word
    unit: Literal["celsius", "fahrenheit"]


class Add(BaseModel):
    """The sum of two numbers."""

    a: int
    b: int


def few(kind: Any, most: int = 3, least: int = 0) -> Any:
    return Annotated[list[kind], Field(min_length=least, max_length=most)]


Person = create_model("Person", name=Word, age=Annotated[int, Field(ge=0, le=120)], height_m=float, is_student=bool)
Company = create_model("Company", name=Word, founder=Person, offices=few(Word))
Review = create_model("Review", mood=Mood, stars=Literal[1, 2, 3, 4, 5])
Circle = create_model("Circle", kind=Literal["circle"], radius=float)
Box = create_model("Box", kind=Literal["box"], width=int, height=int)
Part = create_model("Part", number=Annotated[str, Field(pattern=r"^[A-Z]{2}-[0-9]{3}$")], amount=int)
Step = create_model("Step", explanation=Word, output=Word)
Quote = Annotated[str, Field(min_length=1, max_length=12, description='Says "hello", über 🙂.')]
MODELS: tuple[type[BaseModel], ...] = (
    Person,
    Company,
    Review,
    Tree,
    Chain,
    Step,
    create_model("Drawing", shapes=few(Circle | Box, least=1)),
    create_model("Maybe", nickname=Word | None, score=(int | None, None)),
    create_model("Meeting", day=date, starts=datetime, token=UUID),
    create_model("Order", parts=few(Part, 2, 1), billing=Literal["card", "cash"] | None),
    create_model("Point", at=tuple[int, int], size=Annotated[float, Field(ge=-1, lt=1)]),
    create_model("Counts", by_name=Annotated[dict[str, int], Field(max_length=2)]),
    create_model("Reasoning", steps=few(Step), final_answer=Word),
    create_model("Unions", value=int | bool | Literal["none"] | few(int)),
    create_model("Quotation", text=Quote),
)
SHORTEST = {  # a small model that is left alone with a schema which contains itself nests until it is cut
    "Tree": '{"value": 1, "children": []}',
    "Chain": '{"label": "a", "rest": null}',
}
TOOLS: dict[str, type[BaseModel]] = {"GetWeather": GetWeather, "Add": Add}
SPECS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": tool.__doc__, "parameters": tool.model_json_schema()},
    }
    for name, tool in TOOLS.items()
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris, and what is 2 + 3? Use the tools."}]


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test and what every request says besides. `http`: for all clients; closed by its owner."""

    url: str
    model: str
    api_key: str = "none"
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.7, "seed": 5, "max_tokens": 1000})
    http: Any = field(default_factory=lambda: openai.DefaultHttpxClient(timeout=120))

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=self.api_key, max_retries=0, http_client=self.http)

    def ask(self, **own: Any) -> Any:
        return self.openai().chat.completions.create(**{"model": self.model, "messages": QUESTION} | self.options | own)


Check = Callable[[Target], None]
CHECKS: dict[str, dict[str, Check]] = {name: {} for name in NEEDS}


def check(client: str, name: str = "") -> Callable[[Check], Check]:
    """Register a function that raises when the client does not get what it asked for."""

    def register(function: Check) -> Check:
        CHECKS[client][name or function.__name__.replace("_", " ")] = function
        return function

    return register


def example_of(model: type[BaseModel]) -> list[Any]:
    given = f" Like {SHORTEST[model.__name__]}, and no longer." if model.__name__ in SHORTEST else ""
    return [{"role": "user", "content": f"Give an example of a {model.__name__.lower()} as JSON.{given}"}]


def checked_call(name: str, arguments: str | dict[str, Any]) -> None:
    """A call must name one of TOOLS and its arguments must fit it."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    jsonschema.validate(values, TOOLS[name].model_json_schema())


def checked_calls(answer: Any, least: int = 1) -> Any:
    """The message of an answer that must consist of calls, with ids that differ."""
    choice = answer.choices[0]
    calls = choice.message.tool_calls or []
    assert choice.finish_reason in ("tool_calls", "stop") and len(calls) >= least, choice
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        checked_call(call.function.name, call.function.arguments)
    return choice.message


def _parse(model: type[BaseModel]) -> Check:
    def run(target: Target) -> None:
        answer = target.openai().chat.completions.parse(
            model=target.model, messages=example_of(model), response_format=model, **target.options
        )
        assert isinstance(answer.choices[0].message.parsed, model)

    return run


for _model in MODELS:
    check("openai parse", _model.__name__)(_parse(_model))


@check("openai stream")
def parsed_output(target: Target) -> None:
    with target.openai().chat.completions.stream(
        model=target.model, messages=example_of(Company), response_format=Company, **target.options
    ) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        answer = stream.get_final_completion().choices[0].message
    assert isinstance(answer.parsed, Company) and answer.content == deltas


@check("openai stream")
def parsed_tool_arguments(target: Target) -> None:
    tools = [openai.pydantic_function_tool(model) for model in TOOLS.values()]
    options = target.options | {"tools": tools, "tool_choice": "required"}
    with target.openai().chat.completions.stream(model=target.model, messages=QUESTION, **options) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = checked_calls(stream.get_final_completion())
    assert done and isinstance(done[0].parsed_arguments, TOOLS[done[0].name])
    assert [call.function.arguments for call in message.tool_calls][: len(done)] == [event.arguments for event in done]


@check("openai stream")
def deltas_of_calls(target: Target) -> None:
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for chunk in target.ask(tools=SPECS, tool_choice="required", stream=True):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for delta in choice.delta.tool_calls or []:
                call = calls.setdefault(delta.index, {"id": delta.id, "name": delta.function.name, "arguments": ""})
                call["arguments"] += delta.function.arguments or ""
    assert reason == "tool_calls" and sorted(calls) == list(range(len(calls))) and calls
    for call in calls.values():
        assert call["id"]
        checked_call(call["name"], call["arguments"])


@check("openai tools")
def required(target: Target) -> None:
    checked_calls(target.ask(tools=SPECS, tool_choice="required"))


@check("openai tools")
def one_call_only(target: Target) -> None:
    message = checked_calls(target.ask(tools=SPECS, tool_choice="required", parallel_tool_calls=False))
    assert len(message.tool_calls) == 1


@check("openai tools")
def named(target: Target) -> None:
    answer = target.ask(tools=SPECS, tool_choice={"type": "function", "function": {"name": "Add"}})
    assert {call.function.name for call in checked_calls(answer).tool_calls} == {"Add"}


@check("openai tools")
def none(target: Target) -> None:
    message = target.ask(tools=SPECS, tool_choice="none").choices[0].message
    assert not message.tool_calls and message.content


@check("openai tools")
def auto(target: Target) -> None:
    answer = target.ask(tools=SPECS)
    if answer.choices[0].message.tool_calls:
        checked_calls(answer)
    else:
        assert answer.choices[0].message.content


@check("openai tools")
def several_choices(target: Target) -> None:
    answer = target.ask(tools=SPECS, tool_choice="required", n=2)
    for choice in answer.choices:
        checked_calls(answer.model_copy(update={"choices": [choice]}))
    assert len(answer.choices) == 2


@check("openai tools")
def agent_loop_of_two_turns_with_parallel_calls(target: Target) -> None:
    """Calls, their results, more calls, their results, the answer."""
    messages = list(QUESTION)
    for _ in range(2):
        message = checked_calls(target.ask(messages=messages, tools=SPECS, tool_choice="required"))
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls]
    answer = target.ask(messages=messages, tools=SPECS, tool_choice="none").choices[0]
    assert answer.message.content and not answer.message.tool_calls


@check("openai tools")
def calls_in_the_history_render(target: Target) -> None:
    """Two parallel calls with their results, as any client sends them back."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "Add", "arguments": json.dumps({"a": i, "b": 2})}}
        for i in range(2)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in calls]
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    few = target.ask(messages=QUESTION, tools=SPECS, max_tokens=8).usage.prompt_tokens
    assert target.ask(messages=history, tools=SPECS, max_tokens=8).usage.prompt_tokens > few


def _langchain(target: Target) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=target.model,
        base_url=target.url,
        api_key=target.api_key,
        max_retries=0,
        http_client=target.http,
        **target.options,
    )  # type: ignore[call-arg]


def _with_structured_output(method: str, model: type[BaseModel], **own: Any) -> Check:
    def run(target: Target) -> None:
        chain = _langchain(target).with_structured_output(model, method=method, include_raw=True, **own)
        answer = chain.invoke(example_of(model))
        if method == "json_mode":  # the server promises an object, not this one's keys
            assert isinstance(json.loads(answer["raw"].content), dict)
        else:
            assert isinstance(answer["parsed"], model), answer["parsing_error"]

    return run


for _model in (Person, Company, Review, Tree, Chain):
    check("langchain", f"json_schema {_model.__name__}")(_with_structured_output("json_schema", _model, strict=True))
    if _model not in (Tree, Chain):  # LangChain sends tools without their recursion
        check("langchain", f"function_calling {_model.__name__}")(_with_structured_output("function_calling", _model))
check("langchain", "json_mode")(_with_structured_output("json_mode", Person))


@check("langchain")
def bind_tools_any(target: Target) -> None:
    answer = _langchain(target).bind_tools(list(TOOLS.values()), tool_choice="any").invoke(QUESTION)
    assert answer.tool_calls and not answer.invalid_tool_calls
    for call in answer.tool_calls:
        checked_call(call["name"], call["args"])


@check("langchain")
def bind_tools_strict_streamed(target: Target) -> None:
    chain = _langchain(target).bind_tools([Add], tool_choice="Add", strict=True)
    chunks = list(chain.stream(QUESTION))
    whole = sum(chunks[1:], chunks[0])
    assert whole.tool_calls
    checked_call(whole.tool_calls[0]["name"], whole.tool_calls[0]["args"])


@check("langchain")
def tool_messages(target: Target) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    chat = _langchain(target).bind_tools(list(TOOLS.values()), tool_choice="any")
    messages: list[Any] = [HumanMessage("What is 2 + 3?")]
    messages.append(chat.invoke(messages))
    messages += [ToolMessage("5", tool_call_id=call["id"]) for call in messages[-1].tool_calls]
    assert len(messages) > 2 and _langchain(target).invoke(messages).content


def _instructor(mode: str, model: type[BaseModel]) -> Check:
    def run(target: Target) -> None:
        import instructor

        client = instructor.from_openai(target.openai(), mode=instructor.Mode[mode])
        options = target.options | {"model": target.model, "max_retries": 0}
        assert isinstance(client.create(response_model=model, messages=example_of(model), **options), model)

    return run


for _mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
    for _model in (Person, Company):
        check("instructor", f"{_mode} {_model.__name__}")(_instructor(_mode, _model))


def _pydantic_ai(wrapper: str, model: type[BaseModel]) -> Check:
    def run(target: Target) -> None:
        import pydantic_ai
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        chat = OpenAIChatModel(target.model, provider=OpenAIProvider(base_url=target.url, api_key=target.api_key))
        agent = pydantic_ai.Agent(
            chat, output_type=getattr(pydantic_ai, wrapper)(model), model_settings=target.options, retries=0
        )
        assert isinstance(agent.run_sync(f"Give an example of a {model.__name__}.").output, model)

    return run


for _wrapper in ("ToolOutput", "NativeOutput"):
    for _model in (Person, Company):
        check("pydantic-ai", f"{_wrapper} {_model.__name__}")(_pydantic_ai(_wrapper, _model))


def _agents(**own: Any) -> Check:
    def run(target: Target) -> None:
        import agents

        calls: list[tuple[int, int]] = []

        @agents.function_tool
        def add(a: int, b: int) -> int:
            """The sum of two numbers."""
            calls.append((a, b))
            return a + b

        async def main() -> Any:
            async with openai.AsyncOpenAI(base_url=target.url, api_key=target.api_key, max_retries=0) as client:
                choice = None if "output_type" in own else "required"
                options = {"temperature": 0.7, "max_tokens": 1000, "extra_body": {"seed": 5}, "tool_choice": choice}
                agent = agents.Agent(
                    "helper",
                    model=agents.OpenAIChatCompletionsModel(target.model, client),
                    model_settings=agents.ModelSettings(**options),
                    tools=[] if "output_type" in own else [add],
                    **own,
                )
                return (await agents.Runner.run(agent, "What is 2 + 3?", max_turns=4)).final_output

        agents.set_tracing_disabled(True)
        output = asyncio.run(main())
        assert isinstance(output, own.get("output_type", str)) and (calls or "output_type" in own)

    return run


check("openai-agents", "output_type")(_agents(output_type=Person))
check("openai-agents", "tool, then an answer")(_agents())


def comply(target: Target, part: str) -> dict[str, str]:
    """llm-comply's checks: name -> "" or why it failed; those that it skips are left out."""
    command = [sys.executable, "-m", "llm_comply.cli", "--json", "--format", COMPLY[part], "--timeout", "120"]
    where = ["-u", target.url, "-k", target.api_key, "-m", target.model]
    done = subprocess.run([*command, *where], capture_output=True, text=True, timeout=1200)
    results = json.loads(done.stdout[done.stdout.index("{") :])["results"]
    kept = [one for one in results if one["status"] != "skipped"]
    return {one["name"]: "" if one["status"] == "passed" else "; ".join(one["errors"])[:200] for one in kept}


def outcomes(client: str, target: Target, names: Sequence[str] = ()) -> dict[str, str] | None:
    """Each check of a client: "" or why it failed. None: the client is not installed.

    names: those checks alone; all by default.
    """
    if importlib.util.find_spec(NEEDS[client]) is None:
        return None
    if client.startswith("llm-comply"):
        return comply(target, client.split()[1])
    results = {}
    for name, run in CHECKS[client].items():
        if names and name not in names:
            continue
        try:
            run(target)
            results[name] = ""
        except Exception as error:  # what a client raises is its own affair; the reason is reported
            last = traceback.extract_tb(error.__traceback__)[0]
            results[name] = f"{type(error).__name__}: {str(error)[:300]} ({last.name})"
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--only", nargs="*", default=list(NEEDS), choices=list(NEEDS), metavar="CLIENT")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = openai.OpenAI(base_url=args.url, api_key=args.api_key).models.list().data[0].id
    target, rows = Target(args.url, model, args.api_key), {}
    for client in args.only:
        results = rows[client] = outcomes(client, target)
        if results is None:
            print(f"{client:22} not installed")
            continue
        print(f"{client:22} {sum(not why for why in results.values())} of {len(results)}")
        for name, why in results.items():
            if why:
                print(f"    {name}: {why}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
