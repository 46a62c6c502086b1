"""Ask a running server about the pictures beside this file, at several retentions.

make serve                # in another terminal
python examples/ask.py    # or: python examples/ask.py my.png "Is there a red circle?"
"""

import argparse
import base64
import json
import mimetypes
from pathlib import Path

from openai import APIConnectionError, APIStatusError, OpenAI
from openai.types.chat import ChatCompletion

HERE = Path(__file__).parent
RETENTIONS = (1.0, 0.333, 0.222, 0.111)


def picture_url(path: Path) -> str:
    """Return the picture as a data URL, the form in which it travels inside a request."""
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def ask(
    client: OpenAI, model: str, picture: Path, question: str, retention: float
) -> ChatCompletion:
    """Send one question about one picture; `retention` is the share of its tokens to keep."""
    return client.chat.completions.create(
        model=model,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": picture_url(picture)}},
                    {"type": "text", "text": question},
                ],
            }
        ],
        max_tokens=8,
        temperature=0,
        extra_body={"retention": retention},
    )


def questions(arguments: argparse.Namespace) -> list[tuple[Path, str]]:
    if arguments.picture:
        return [(arguments.picture, question) for question in arguments.question]
    listed = json.loads((HERE / "questions.json").read_text(encoding="utf-8"))
    return [(HERE / name, question) for name, asked in listed.items() for question in asked]


class NoPruning(Exception):
    """The server is another one than this example is for."""


def served_model(client: OpenAI) -> str:
    """Return the name of the model, of a server that prunes."""
    try:
        model = client.models.list().data[0].id
    except (APIStatusError, AttributeError, IndexError, TypeError, ValueError):
        raise NoPruning(
            "no list of models here; the address ends in /v1, such as http://127.0.0.1:8000/v1, "
            "and a server with a key wants --key"
        ) from None
    try:
        client.get("/pruning", cast_to=object)
    except APIStatusError:
        raise NoPruning(
            "this server does not prune; start it with `make serve` or `msdg-vllm serve`"
        ) from None
    return model


def show(
    client: OpenAI, model: str, asked: list[tuple[Path, str]], retentions: list[float]
) -> None:
    """Print a table of answers: a line per question, a column per retention."""
    width = max(len(question.split("\n")[0]) for _, question in asked)
    kept = "".join(f"{f'keep {retention:g}':>14}" for retention in retentions)
    print(f"{'':14}{'':{width}}{kept}")
    for picture, question in asked:
        cells = []
        for retention in retentions:
            answer = ask(client, model, picture, question, retention)
            prompt = answer.usage.prompt_tokens if answer.usage else 0
            cells.append(f"{answer.choices[0].message.content} ({prompt})")
        line = "".join(f"{cell:>14}" for cell in cells)
        print(f"{picture.name:14}{question.split(chr(10))[0]:{width}}{line}")
    print("\nIn brackets: prompt tokens the language model saw.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("picture", nargs="?", type=Path, help="default: the bundled pictures")
    parser.add_argument("question", nargs="*", help="one or more questions about the picture")
    parser.add_argument("--server", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="the server's API key, if it has one")
    parser.add_argument("--retention", type=float, nargs="+", default=RETENTIONS)
    arguments = parser.parse_args()
    if arguments.picture and not arguments.question:
        parser.error('a picture needs a question, such as "Is there a red circle?"')
    asked = questions(arguments)
    for picture, _ in asked:
        if not picture.is_file():
            parser.exit(1, f"no picture {picture}; give the path of a PNG or JPEG file\n")
    client = OpenAI(base_url=arguments.server, api_key=arguments.key, max_retries=0)
    try:
        model = served_model(client)
        show(client, model, asked, arguments.retention)
    except APIConnectionError:
        parser.exit(1, f"no server at {arguments.server}; start one with `make serve`\n")
    except APIStatusError as error:
        parser.exit(1, f"{arguments.server} answered {error.status_code}: {error.message}\n")
    except NoPruning as error:
        parser.exit(1, f"{arguments.server}: {error}\n")


if __name__ == "__main__":
    main()
